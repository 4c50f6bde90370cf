"""`engine resolve`: who receives the mail of a list's domains."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from engine.campaign import Campaign, make_private_folder
from engine.clock import SystemClock
from engine.commands.common import campaign_option, span
from engine.config import Duration
from engine.errors import EngineError, Exit
from engine.route.answers import Kept, ask_all, kept, read_answers, still_to_ask
from engine.route.dns_client import DnsClient, NameServer, system_servers
from engine.route.provider import load_providers
from engine.route.resolver import Resolver
from formats.address import AddressError, domain_to_ascii


class NoNameServer(EngineError):
    """There is no name server to ask: /etc/resolv.conf names none."""

    exit_code = Exit.SETTINGS
    hint = "Name one: engine resolve ... --server 192.0.2.53"


class NotAListOrDomain(EngineError):
    """{what}: neither a Parquet file that can be read nor a domain ({problem})."""

    exit_code = Exit.LIST
    hint = "Name a list (list.parquet, with --column for another column than `email`) or a domain (example.org)."


def _server(text: str) -> NameServer:
    host, colon, port = text.rpartition(":")
    if colon and port.isdigit() and "]" not in port and host.count(":") in (0, 7):
        return NameServer(host.strip("[]"), int(port))
    return NameServer(text.strip("[]"))


@click.command()
@click.argument("what", nargs=-1, required=True, metavar="LIST.parquet|DOMAIN...")
@campaign_option
@click.option("--column", default="email", show_default=True, help="The column of addresses or domains.")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="Default: domains.jsonl in the campaign.")
@click.option("--server", "servers", multiple=True, metavar="HOST[:PORT]", help="Ask this name server; repeatable.")
@click.option("--at-once", default=300, show_default=True, help="Domains in flight.")
@click.option("--timeout", default=1.5, show_default=True, help="Seconds for one question to one server.")
@click.option("--max-age", default="7d", show_default=True, help="Answers older than this are asked again.")
@click.option("--allow-private", is_flag=True, help="Accept MX hosts at loopback and private addresses.")
@click.option("--json", "as_json", is_flag=True, help="The summary, or the domains' answers, as JSON.")
def resolve(
    what: tuple[str, ...],
    campaign: Campaign,
    column: str,
    out: Path | None,
    servers: tuple[str, ...],
    at_once: int,
    timeout: float,
    max_age: str,
    allow_private: bool,
    as_json: bool,
) -> None:
    """Ask where each domain's mail goes, once, and keep the answers for `prepare` and `plan`.

    \b
    engine resolve list.parquet
    engine resolve gmail.com example.org
    """
    asked = [_server(server) for server in servers] or system_servers()
    if not asked:
        raise NoNameServer
    clock = SystemClock()
    providers_file = campaign.folder / "providers.toml"
    providers = load_providers(*([providers_file] if providers_file.exists() else []))

    def resolver_of(client: DnsClient) -> Resolver:
        return Resolver(client, providers, clock, allow_private=allow_private)

    client_options: dict[str, Any] = {"try_s": timeout, "at_once": at_once * 2}
    files = [Path(word) for word in what if Path(word).is_file()]
    if not files:
        answers = asyncio.run(_ask_few([_domain(word) for word in what], resolver_of, asked, client_options, clock))
        _show_answers(answers, as_json)
        return
    rows = _domains_of(files, column)
    path = out or campaign.folder / "domains.jsonl"
    make_private_folder(path.parent)
    try:
        age_s = Duration.parse(max_age).seconds
    except ValueError as problem:
        raise click.BadParameter(str(problem), param_hint="--max-age") from None
    todo = still_to_ask(rows, read_answers(path), now_us=clock.wall_us(), max_age_s=age_s)
    begin = clock.monotonic()
    with Progress(console=Console(stderr=True), disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("asking", total=len(todo))

        async def run() -> None:
            client = DnsClient(asked, **client_options)
            try:
                await ask_all(
                    todo, resolver_of(client), path, clock, at_once=at_once, told=lambda _: progress.advance(task)
                )
            finally:
                await client.close()

        asyncio.run(run())
    spent = clock.monotonic() - begin
    click.echo(f"{len(todo):,} of {len(rows):,} domains asked in {span(spent)}; kept in {path}", err=True)
    _show_summary(rows, read_answers(path), as_json)


def _domain(word: str) -> str:
    try:
        return domain_to_ascii(word.rpartition("@")[2])
    except AddressError as problem:
        raise NotAListOrDomain(what=word, problem=problem) from None


def _domains_of(files: list[Path], column: str) -> dict[str, int]:
    """Rows of each domain; what is no domain is left to `prepare`, which names the row."""
    import polars as pl

    try:
        counted = (
            pl.scan_parquet(files)
            .select(pl.col(column).str.strip_chars().str.split("@").list.last().str.to_lowercase().alias("domain"))
            .drop_nulls()
            .group_by("domain")
            .len()
            .collect(engine="streaming")
        )
    except (pl.exceptions.PolarsError, OSError) as problem:
        raise NotAListOrDomain(what=files[0], problem=str(problem).splitlines()[0]) from None
    rows: Counter[str] = Counter()
    for domain, count in counted.iter_rows():
        try:
            rows[domain_to_ascii(domain)] += count
        except AddressError:
            continue
    return dict(rows)


async def _ask_few(
    domains: list[str], resolver_of: Any, servers: list[NameServer], options: dict[str, Any], clock: SystemClock
) -> list[Kept]:
    client = DnsClient(servers, **options)
    try:
        resolver = resolver_of(client)
        return [kept(found, clock.wall_us()) for found in await asyncio.gather(*map(resolver.route, domains))]
    finally:
        await client.close()


def _show_answers(answers: list[Kept], as_json: bool) -> None:
    for answer in answers:
        if as_json:
            click.echo(msgspec.json.encode(answer).decode())
            continue
        click.echo(f"{answer.domain}  {answer.provider or answer.why}")
        for host in answer.hosts:
            click.echo(f"  {host.preference:5d} {host.name}  {' '.join(host.addresses)}")


def _show_summary(rows: dict[str, int], answers: dict[str, Kept], as_json: bool) -> None:
    by_provider: Counter[str] = Counter()
    domains: Counter[str] = Counter()
    troubled: dict[str, Counter[str]] = {}
    for domain, count in rows.items():
        answer = answers.get(domain)
        kind: str = answer.kind if answer else "deferred"
        if answer is not None and kind == "route":
            by_provider[answer.provider] += count
            domains[answer.provider] += 1
        else:
            troubled.setdefault(kind, Counter())[domain] += count
    if as_json:
        summary = {
            "providers": {name: {"rows": count, "domains": domains[name]} for name, count in by_provider.most_common()},
            "unreachable": {kind: dict(found.most_common()) for kind, found in troubled.items()},
        }
        click.echo(msgspec.json.encode(summary).decode())
        return
    table = Table("provider", "domains", "rows", box=None)
    most = by_provider.most_common(20)
    for name, count in most:
        table.add_row(name, f"{domains[name]:,}", f"{count:,}")
    if len(by_provider) > len(most):
        others = [name for name in by_provider if name not in dict(most)]
        left = sum(by_provider[name] for name in others)
        table.add_row(f"{len(others):,} others", f"{sum(domains[name] for name in others):,}", f"{left:,}")
    words = {
        "null_mx": "take no mail (null MX)",
        "none": "do not exist",
        "unroutable": "name no usable host",
        "deferred": "not answered: ask again",
    }
    for kind, found in troubled.items():
        table.add_row(words[kind], f"{len(found):,}", f"{found.total():,}")
    wide_console().print(table)


def wide_console() -> Console:
    """Stdout as wide as the terminal, or wide enough where it is a file or a pipe: data is not folded."""
    console = Console()
    return console if console.is_terminal else Console(width=250)
