"""`engine serve`: the page, the API and the metrics of the campaigns in a folder."""

from __future__ import annotations

import contextlib
import gc
import sys
from pathlib import Path
from typing import Any

import click

from engine.config import SETTINGS_FILE
from engine.errors import EngineError, Exit


class WebNeedsExtra(EngineError):
    """`engine serve` needs packages that are not installed: {missing}."""

    exit_code = Exit.SETTINGS
    hint = "pip install 'rowpost[web]'"


class NotAnAddress(EngineError):
    """{listen} is not HOST:PORT."""

    exit_code = Exit.USAGE
    hint = "For instance --listen 127.0.0.1:8080"


class OpenToOthers(EngineError):
    """{listen} can be reached by others, and what is said there could be read on the way."""

    exit_code = Exit.USAGE
    hint = (
        "Give --tls-certificate and --tls-key; or keep to 127.0.0.1 behind a proxy that speaks https; or say "
        "--behind-proxy where the proxy is another machine of yours."
    )


@click.command()
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False, exists=True), default=Path("campaign"))
@click.option("--listen", default="127.0.0.1:8080", show_default=True, metavar="HOST:PORT", help="Port 0: a free one.")
@click.option("--token-file", type=click.Path(path_type=Path, dir_okay=False), help="NAME TOKEN a line, mode 0600.")
@click.option("--host-name", "names", multiple=True, metavar="NAME", help="A name browsers call us by; repeatable.")
@click.option("--tls-certificate", type=click.Path(path_type=Path, exists=True), help="PEM; we speak https ourselves.")
@click.option("--tls-key", type=click.Path(path_type=Path, exists=True))
@click.option("--behind-proxy", metavar="ADDRESS", help="Believe X-Forwarded-For and -Proto of this proxy.")
@click.option("--lists", type=click.Path(path_type=Path, file_okay=False, exists=True), help="Where new lists may lie.")
@click.option("--outbox", metavar="FOLDER|URL", help="The outbox that POST /outbox writes to.")
@click.option("--open-metrics", is_flag=True, help="/metrics without a token.")
@click.option("--unsubscribe/--no-unsubscribe", default=True, show_default=True, help="Answer /u/TOKEN (RFC 8058).")
@click.option("--webhook-secret", envvar="ROWPOST_WEBHOOK_SECRET", help="Take providers' events at /webhook/SECRET.")
@click.option("--hook", metavar="URL", help="POST here when a campaign finished or stopped, or a breaker opened.")
@click.option("--hook-secret", envvar="ROWPOST_HOOK_SECRET", default="", help="Signs what is posted there.")
def serve(
    folder: Path,
    listen: str,
    token_file: Path | None,
    names: tuple[str, ...],
    tls_certificate: Path | None,
    tls_key: Path | None,
    behind_proxy: str | None,
    lists: Path | None,
    outbox: str | None,
    open_metrics: bool,
    unsubscribe: bool,
    webhook_secret: str | None,
    hook: str | None,
    hook_secret: str,
) -> None:
    """Show the campaign in FOLDER, or all campaigns in its folders, and let operators act.

    \b
    engine serve                      the campaign in ./campaign, at http://127.0.0.1:8080
    engine serve /srv/campaigns --listen 0.0.0.0:443 --tls-certificate c.pem --tls-key k.pem --host-name mail.example
    """
    try:
        import uvicorn

        from engine.web.app import LOOPBACK, ServeOptions, create_app, public_routes
        from engine.web.auth import Keyring
        from engine.web.server import Ending, Patient, bind
        from engine.web.shelf import Shelf
    except ImportError as problem:
        raise WebNeedsExtra(missing=problem.name) from None
    host, colon, port = listen.rpartition(":")
    host = host.strip("[]")
    if not colon or not port.isdigit() or not host:
        raise NotAnAddress(listen=listen)
    is_local = host in ("localhost", "::1") or host.startswith("127.")
    if not is_local and tls_certificate is None and behind_proxy is None:
        raise OpenToOthers(listen=listen)
    shelf = Shelf(folder)
    tokens = token_file or (folder / "run" if (folder / SETTINGS_FILE).exists() else folder) / "web.token"
    keyring = Keyring(tokens)
    options = ServeOptions(
        hosts=frozenset({*LOOPBACK, host, *(name.lower() for name in names)}),
        lists=lists,
        outbox=outbox,
        secure_cookie=tls_certificate is not None or behind_proxy is not None,
        open_metrics=open_metrics,
        hook_url=hook,
        hook_secret=hook_secret,
    )
    with contextlib.ExitStack() as stack:
        extra: list[Any] = []
        folders = [one.campaign.folder for one in shelf.all() if one.campaign.plan_file.exists()]
        if folders and (unsubscribe or webhook_secret):
            extra, closing = public_routes(folders, webhook_secret)
            stack.enter_context(closing)
        socket_ = stack.enter_context(bind(host, int(port)))
        scheme = "https" if tls_certificate is not None else "http"
        where = f"{scheme}://{'[::1]' if ':' in host else host}:{socket_.getsockname()[1]}"
        click.echo(f"{where}/", err=False)
        click.echo(f"token: {tokens} (mode 0600); sign in at {where}/login", err=True)
        if sys.stderr.isatty():  # a person's terminal: what a service says is kept in logs, where no token belongs
            click.echo(f"or by this link: {where}/login#token={keyring.first}", err=True)
        app = create_app(shelf, keyring, options, extra=extra)
        server = Ending(
            uvicorn.Config(
                app,
                http=Patient,
                log_level="warning",
                access_log=False,
                server_header=False,
                ssl_certfile=tls_certificate,
                ssl_keyfile=tls_key,
                proxy_headers=behind_proxy is not None,
                forwarded_allow_ips=behind_proxy,
                limit_concurrency=500,
                timeout_keep_alive=15,
                timeout_graceful_shutdown=3,
                ws="none",
            ),
            app.state.round.end_streams,
        )
        # What is imported stays: the collector need not walk it again, which is half of the longest pauses.
        gc.collect()
        gc.freeze()
        server.run(sockets=[socket_])
