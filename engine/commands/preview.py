"""`engine preview`: any row's message as it would go out. `engine dkim-key`: a key and the record to publish."""

from __future__ import annotations

import base64
import email
import email.policy
import webbrowser
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import msgspec
import polars as pl
import pyarrow as pa

from engine.campaign import Campaign, make_private_folder
from engine.clock import SystemClock
from engine.commands.common import RowNumbers, campaign_option
from engine.compose.checklist import check_composer, check_message
from engine.compose.htmltext import text_as_html
from engine.compose.render import Message, RowProblem, build_composer
from engine.compose.sign import load_signer, make_key
from engine.errors import EngineError, Exit
from engine.planner import expand
from engine.rows import open_parquet
from formats.address import AddressError, parse_mailbox
from formats.dkim import record_strings
from formats.recipients import bare_name, values


class PreviewError(EngineError):
    """{problem}."""

    exit_code = Exit.LIST
    hint = "name the list with --list LIST.parquet, and rows with --rows 0,5-7 or --where \"city = 'Lyon'\"."


class PreviewList:
    """The list's Parquet files, for a few rows at a time."""

    def __init__(self, paths: Sequence[str]) -> None:
        self._paths = list(paths)
        self._files = [open_parquet(path) for path in paths]
        self.schema: pa.Schema = self._files[0].schema_arrow
        self._names = {bare_name(name): name for name in reversed(self.schema.names)}
        self.rows = sum(file.metadata.num_rows for file in self._files)

    def row(self, number: int, columns: Sequence[str]) -> list[object]:
        """One row's values, in the order of `columns`; raises PreviewError past the end."""
        names = [self._names[column] for column in columns]
        left = number
        for file in self._files:
            for group in range(file.num_row_groups):
                size = file.metadata.row_group(group).num_rows
                if left < size:
                    table = file.read_row_group(group, columns=names).select(names).slice(left, 1)
                    return [values(column)[0] for column in table.columns]
                left -= size
        raise PreviewError(problem=f"row {number} is past the end: the list has {self.rows} rows, numbered from 0")

    def has(self, column: str) -> bool:
        """Whether there is such a column."""
        return column in self._names

    def where(self, condition: str, most: int) -> list[int]:
        """The numbers of the rows that an SQL condition picks, the first `most`."""
        try:
            numbered = pl.scan_parquet(self._paths).with_row_index("__row")
            picked = numbered.filter(pl.sql_expr(condition)).select("__row").head(most).collect()
        except pl.exceptions.PolarsError as problem:
            raise PreviewError(problem=f"--where {condition!r}: {str(problem).splitlines()[0]}") from None
        return picked["__row"].to_list()


def _open_list(campaign: Campaign, given: tuple[str, ...]) -> tuple[PreviewList, str | None]:
    """The list and the plan's key id: as named, else as planned."""
    plan = campaign.plan() if campaign.plan_file.exists() else None
    if given:
        return PreviewList(expand(given, campaign.folder)), plan.key_id if plan else None
    if plan is None:
        raise PreviewError(problem=f"{campaign.folder} has no plan yet, so the list is not known")
    if not plan.files:
        raise PreviewError(problem="the planned list is empty")
    return PreviewList([file.path for file in plan.files]), plan.key_id


def _page_of(message: Message) -> str:
    """The HTML part as a page, images inline, or the text."""
    parsed = email.message_from_bytes(message.content, policy=email.policy.default)
    html, text = parsed.get_body(("html",)), parsed.get_body(("plain",))
    if html is None:
        return text_as_html(str(text.get_content()) if text else "")
    page = str(html.get_content())
    for part in parsed.walk():
        if part["Content-ID"]:
            data = base64.b64encode(part.get_content()).decode("ascii")
            page = page.replace(
                f"cid:{str(part['Content-ID']).strip('<>')}", f"data:{part.get_content_type()};base64,{data}"
            )
    return page


@click.command("preview")
@campaign_option
@click.option("--rows", type=RowNumbers(), help="Row numbers, from 0: 0,5-7. Without any, row 0.")
@click.option("--where", metavar="SQL", help="A condition on the list's columns: \"city = 'Lyon'\"")
@click.option("--limit", type=click.IntRange(1), default=10, show_default=True, help="At most so many rows.")
@click.option("--list", "lists", metavar="LIST", multiple=True, help="Parquet file or folder; default: the plan's.")
@click.option("--out", type=click.Path(path_type=Path), help="Folder for the files; default: preview/ in the campaign.")
@click.option("--html", "as_html", is_flag=True, help="Write .html pages in place of .eml messages.")
@click.option("--open", "opens", is_flag=True, help="Open the first page in the browser; means --html.")
@click.option("--json", "as_json", is_flag=True, help="Print a line of JSON a row.")
@click.pass_context
def preview(
    context: click.Context,
    campaign: Campaign,
    rows: list[int] | None,
    where: str | None,
    limit: int,
    lists: tuple[str, ...],
    out: Path | None,
    as_html: bool,
    opens: bool,
    as_json: bool,
) -> None:
    """Write the messages of some rows as files, just as they would be sent.

    \b
    engine preview --rows 0,5-7
    engine preview --where "city = 'Lyon'" --open
    """
    if rows and where:
        raise click.UsageError("give either --rows or --where")
    settings = campaign.settings()
    listed, key_id = _open_list(campaign, lists)
    composer = build_composer(settings, campaign.folder, listed.schema, key_id=key_id)
    if not listed.has(settings.list.address_column):
        problem = f"the list has no column {settings.list.address_column!r}, which [list] address_column names"
        raise PreviewError(problem=problem)
    wanted = listed.where(where, limit) if where else (rows or [0])[:limit]
    target = out or campaign.folder / "preview"
    make_private_folder(target)
    as_html = as_html or opens
    now_us = SystemClock().wall_us()
    written: list[Path] = []
    for row in wanted:
        address, *fields = listed.row(row, [settings.list.address_column, *composer.columns])
        try:
            mailbox = parse_mailbox(address if isinstance(address, str) else None)
            message = composer.compose(row, mailbox, fields, now_us)
        except (AddressError, RowProblem) as problem:
            reason = problem.reason if isinstance(problem, RowProblem) else "address"
            _say(as_json, {"row": row, "problem": reason, "detail": str(problem)}, f"row {row}: {reason}: {problem}")
            continue
        path = target / f"{row}.{'html' if as_html else 'eml'}"
        path.write_bytes(_page_of(message).encode() if as_html else message.content)
        findings = [f for f in check_message(message.content, return_path=message.return_path) if f.severity != "ok"]
        fact = {"row": row, "file": str(path), "to": message.recipient, "bytes": len(message.content)}
        _say(as_json, {**fact, "findings": msgspec.to_builtins(findings)}, str(path))
        if not as_json and not written:
            for finding in [*check_composer(composer), *findings]:
                click.echo(f"  {finding.severity}: {finding.subject}: {finding.reason}", err=True)
        written.append(path)
    if opens and written:
        webbrowser.open(written[0].resolve().as_uri())
    if len(written) < len(wanted):
        click.echo(f"{len(wanted) - len(written)} of {len(wanted)} rows have no message", err=True)
        context.exit(Exit.ROWS_OPEN)


def _say(as_json: bool, fact: dict[str, Any], line: str) -> None:
    click.echo(msgspec.json.encode(fact).decode() if as_json else line)


@click.command("dkim-key")
@campaign_option
@click.option("--domain", help="Domain that signs: that of From, or above it.")
@click.option("--selector", help="Name of the key in the DNS, such as s2026.")
@click.option(
    "--type", "kind", type=click.Choice(["rsa", "ed25519"]), default="rsa", show_default=True, help="Kind of key."
)
@click.option(
    "--bits",
    type=click.Choice(["2048", "3072", "4096"]),
    default="2048",
    show_default=True,
    help="Length of an RSA key.",
)
@click.option("--file", "key_file", help="Where the key goes; default: keys/dkim-SELECTOR.pem")
@click.option("--show", is_flag=True, help="Make no key; print the records of the keys in the settings.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def dkim_key(
    campaign: Campaign,
    domain: str | None,
    selector: str | None,
    kind: str,
    bits: str,
    key_file: str | None,
    show: bool,
    as_json: bool,
) -> None:
    """Make a DKIM key and print the DNS record to publish.

    Example: engine dkim-key --domain example.org --selector s1
    """
    if show:
        for table in campaign.settings().dkim:
            _print_record(table.selector, table.domain, load_signer(table, campaign.folder).record(), as_json)
        return
    if not domain or not selector:
        raise click.UsageError("give --domain and --selector, or --show")
    name = key_file or f"keys/dkim-{selector}.pem"
    record = make_key(campaign.folder / name, "rsa" if kind == "rsa" else "ed25519", int(bits))
    _print_record(selector, domain, record, as_json)
    for line in _settings_lines(domain, selector, name, kind):
        click.echo(line, err=True)


def _settings_lines(domain: str, selector: str, name: str, kind: str) -> Iterator[str]:
    yield f"key written to {name} (mode 0600). Publish the record, then add to campaign.toml:"
    yield from ("", "[[dkim]]", f'domain = "{domain}"', f'selector = "{selector}"', f'key_file = "{name}"')
    if kind != "rsa":
        yield f'algorithm = "{kind}-sha256"'


def _print_record(selector: str, domain: str, record: str, as_json: bool) -> None:
    name = f"{selector}._domainkey.{domain}"
    if as_json:
        click.echo(msgspec.json.encode({"name": name, "type": "TXT", "text": record}).decode())
    else:
        strings = " ".join(f'"{piece}"' for piece in record_strings(record))
        click.echo(f"{name}. IN TXT ( {strings} )")
