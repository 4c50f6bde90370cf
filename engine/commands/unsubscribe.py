"""`engine unsubscribe-server`: the one-click unsubscribe endpoint, alone."""

from __future__ import annotations

from pathlib import Path

import click

from engine.errors import EngineError, Exit


class WebNeedsExtra(EngineError):
    """The unsubscribe endpoint needs the packages starlette and uvicorn."""

    exit_code = Exit.SETTINGS
    hint = "pip install 'rowpost[web]'"


class NotAnAddress(EngineError):
    """{listen} is not HOST:PORT."""

    exit_code = Exit.USAGE
    hint = "For instance --listen 127.0.0.1:8025; a proxy in front of it speaks https."


@click.command("unsubscribe-server")
@click.option(
    "--campaign",
    "folders",
    multiple=True,
    type=click.Path(path_type=Path, file_okay=False),
    default=(Path("campaign"),),
    help="Campaign folder; repeat it for several. By default ./campaign.",
)
@click.option("--listen", default="127.0.0.1:8025", show_default=True, help="HOST:PORT")
@click.option("--path", "prefix", default="/u", show_default=True, help="What precedes the token in unsubscribe_url.")
@click.option(
    "--webhook-secret", envvar="ROWPOST_WEBHOOK_SECRET", help="Also take providers' events at /webhook/SECRET."
)
def unsubscribe_server(folders: tuple[Path, ...], listen: str, prefix: str, webhook_secret: str | None) -> None:
    """Answer one-click unsubscribes (RFC 8058) for unsubscribe_url = "https://HOST/u/{token}".

    \b
    engine unsubscribe-server --campaign weekly-31 --campaign weekly-32 --listen 127.0.0.1:8025
    """
    try:
        import uvicorn
        from starlette.applications import Starlette
        from starlette.routing import Mount
    except ImportError:
        raise WebNeedsExtra from None
    from engine.web.unsubscribe import Unsubscriber, create_app
    from engine.web.webhook import create_webhook_app

    host, colon, port = listen.rpartition(":")
    if not colon or not port.isdigit():
        raise NotAnAddress(listen=listen)
    unsubscriber = Unsubscriber(folders)
    routes = [Mount("/" + prefix.strip("/"), create_app(unsubscriber))] if prefix.strip("/") else []
    if webhook_secret:
        routes.insert(0, Mount("/webhook", create_webhook_app(folders[0] / "feedback" / "inbox", webhook_secret)))
    app = Starlette(routes=routes) if routes else create_app(unsubscriber)
    try:
        click.echo(f"listening on http://{listen}/{prefix.strip('/')}/TOKEN", err=True)
        uvicorn.run(
            app, host=host.strip("[]"), port=int(port), log_level="warning", server_header=False, access_log=False
        )
    finally:
        unsubscriber.close()
