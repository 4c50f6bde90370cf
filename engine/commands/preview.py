"""`engine preview`: any row's message as it would go out. `engine dkim-key`: a key and the record to publish."""

from __future__ import annotations

import re
import sys
import webbrowser
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import msgspec
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from engine.clock import SystemClock
from engine.compose.checklist import check_composer, check_message
from engine.compose.htmltext import text_as_html
from engine.compose.render import Message, RowProblem, build_composer
from engine.compose.sign import load_signer, make_key
from engine.config import DkimTable, load_settings
from engine.errors import EngineError, Exit
from formats import plan as plans
from formats.address import AddressError, parse_mailbox
from formats.dkim import record_strings

_RANGE = re.compile(r"(\d+)(?:-(\d+))?\Z")
_MOST_ROWS = 1000


class PreviewError(EngineError):
    """{problem}."""

    exit_code = Exit.LIST
    hint = "name the list with --list FILE.parquet and the rows with --rows 0,5-7 or --where \"domain = 'gmail.com'\"."


class PreviewList:
    """The list's Parquet files, for a few rows at a time."""

    def __init__(self, paths: list[Path]) -> None:
        self.paths = paths
        try:
            self._files = [pq.ParquetFile(path, memory_map=True) for path in paths]
        except (OSError, pa.ArrowInvalid) as problem:
            raise PreviewError(problem=f"the list cannot be read: {problem}") from None
        self.schema: pa.Schema = self._files[0].schema_arrow
        self.rows = sum(file.metadata.num_rows for file in self._files)

    def row(self, number: int, columns: list[str]) -> dict[str, Any]:
        """One row's values; raises PreviewError past the end."""
        left = number
        for file in self._files:
            for group in range(file.num_row_groups):
                size = file.metadata.row_group(group).num_rows
                if left < size:
                    table = file.read_row_group(group, columns=columns)
                    found: dict[str, Any] = table.slice(left, 1).to_pylist()[0]
                    return found
                left -= size
        raise PreviewError(problem=f"row {number} is past the end: the list has {self.rows} rows, numbered from 0")

    def where(self, condition: str, most: int) -> list[int]:
        """The numbers of the rows that an SQL condition picks, the first `most`."""
        try:
            numbered = pl.scan_parquet(self.paths).with_row_index("__row")
            picked = numbered.filter(pl.sql_expr(condition)).select("__row").head(most).collect()
        except pl.exceptions.PolarsError as problem:
            raise PreviewError(problem=f"--where {condition!r}: {str(problem).splitlines()[0]}") from None
        return picked["__row"].to_list()


def parse_rows(text: str) -> list[int]:
    """`0,5-7` as [0, 5, 6, 7]; raises PreviewError."""
    rows: list[int] = []
    for part in text.replace(" ", "").split(","):
        found = _RANGE.match(part)
        if not found:
            raise PreviewError(problem=f"--rows {text!r}: {part!r} is neither a number nor a range such as 5-7")
        first, last = int(found[1]), int(found[2] or found[1])
        if last < first or last - first >= _MOST_ROWS:
            raise PreviewError(problem=f"--rows {text!r}: {part!r} is no range of at most {_MOST_ROWS} rows")
        rows += range(first, last + 1)
    return rows


def _open_list(folder: Path, given: tuple[Path, ...]) -> tuple[PreviewList, str | None]:
    """The list and the plan's key id: as named, else as planned."""
    try:
        plan = plans.decode((folder / "plan.json").read_bytes())
    except FileNotFoundError:
        plan = None
    except plans.PlanError as problem:
        raise PreviewError(problem=f"{folder / 'plan.json'}: {problem}") from None
    if given:
        return PreviewList(list(given)), plan.key_id if plan else None
    if plan is None:
        raise PreviewError(problem=f"{folder} has no plan yet, so the list is not known")
    return PreviewList([folder / file.path for file in plan.files]), plan.key_id


def _page_of(message: Message) -> str:
    """The HTML part as a page, images inline, or the text."""
    import base64
    import email
    import email.policy

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
@click.option(
    "--campaign",
    "folder",
    type=click.Path(path_type=Path),
    default=Path("campaign"),
    show_default=True,
    help="The campaign folder.",
)
@click.option("--rows", "rows_text", help="Row numbers, from 0: 0,5-7")
@click.option("--where", help="An SQL condition on the list's columns: \"city = 'Lyon'\"")
@click.option(
    "--limit",
    type=click.IntRange(1, _MOST_ROWS),
    default=10,
    show_default=True,
    help="At most so many rows of --where.",
)
@click.option(
    "--list", "lists", type=click.Path(path_type=Path), multiple=True, help="Parquet file; default: the plan's."
)
@click.option("--out", type=click.Path(path_type=Path), help="Folder for the files; default: preview/ in the campaign.")
@click.option("--html", "as_html", is_flag=True, help="Write .html pages in place of .eml messages.")
@click.option("--open", "opens", is_flag=True, help="Open the first page in the browser; means --html.")
@click.option("--json", "as_json", is_flag=True, help="Print a line of JSON a row.")
def preview(
    folder: Path, rows_text: str | None, where: str | None, limit: int, lists: tuple[Path, ...], out: Path | None,
    as_html: bool, opens: bool, as_json: bool,
) -> None:  # fmt: skip
    """Write the messages of some rows as files, just as they would be sent.

    Example: engine preview --rows 0,5-7
    """
    settings = load_settings(folder)
    listed, key_id = _open_list(folder, lists)
    composer = build_composer(settings, folder, listed.schema, key_id=key_id)
    if rows_text and where:
        raise PreviewError(problem="give either --rows or --where")
    rows = listed.where(where, limit) if where else parse_rows(rows_text or "0")
    address_column = settings.list.address_column
    if address_column not in listed.schema.names:
        raise PreviewError(problem=f"the list has no column {address_column!r}, which [list] address_column names")
    target = out or folder / "preview"
    target.mkdir(parents=True, exist_ok=True)
    as_html = as_html or opens
    failed, written = 0, []
    now_us = SystemClock().wall_us()
    for row in rows:
        values = listed.row(row, [*dict.fromkeys([*composer.columns, address_column])])
        try:
            mailbox = parse_mailbox(values[address_column])
            message = composer.compose(row, mailbox, [values[name] for name in composer.columns], now_us)
        except (AddressError, RowProblem) as problem:
            failed += 1
            reason = problem.reason if isinstance(problem, RowProblem) else "address"
            _say(as_json, {"row": row, "problem": reason, "detail": str(problem)}, f"row {row}: {reason}: {problem}")
            continue
        path = target / f"{row}.{'html' if as_html else 'eml'}"
        path.write_bytes(_page_of(message).encode() if as_html else message.content)
        written.append(path)
        findings = [f for f in check_message(message.content, return_path=message.return_path) if f.severity != "ok"]
        fact = {"row": row, "file": str(path), "to": message.recipient, "bytes": len(message.content),
                "findings": msgspec.to_builtins(findings)}  # fmt: skip
        _say(as_json, fact, str(path))
        if not as_json and row == rows[0]:
            for finding in [*check_composer(composer), *findings]:
                click.echo(f"  {finding.severity}: {finding.subject}: {finding.reason}", err=True)
    if opens and written:
        webbrowser.open(written[0].resolve().as_uri())
    if failed:
        click.echo(f"{failed} of {len(rows)} rows have no message", err=True)
        sys.exit(Exit.TEMPLATE)


def _say(as_json: bool, fact: dict[str, Any], line: str) -> None:
    click.echo(msgspec.json.encode(fact).decode() if as_json else line)


@click.command("dkim-key")
@click.option(
    "--campaign",
    "folder",
    type=click.Path(path_type=Path),
    default=Path("campaign"),
    show_default=True,
    help="The campaign folder.",
)
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
    folder: Path,
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
        for table in load_settings(folder).dkim:
            _print_record(table.selector, table.domain, load_signer(table, folder).record(), as_json)
        return
    if not domain or not selector:
        raise click.UsageError("give --domain and --selector, or --show")
    name = key_file or f"keys/dkim-{selector}.pem"
    record = make_key(folder / name, "rsa" if kind == "rsa" else "ed25519", int(bits))
    _print_record(selector, domain, record, as_json)
    algorithm = DkimTable(domain=domain, selector=selector, key_file=name, algorithm=f"{kind}-sha256").algorithm  # type: ignore[arg-type]
    for line in _settings_lines(domain, selector, name, algorithm):
        click.echo(line, err=True)


def _settings_lines(domain: str, selector: str, name: str, algorithm: str) -> Iterator[str]:
    yield f"key written to {name} (mode 0600). Publish the record, then add to campaign.toml:"
    yield from ("", "[[dkim]]", f'domain = "{domain}"', f'selector = "{selector}"', f'key_file = "{name}"')
    if algorithm != "rsa-sha256":
        yield f'algorithm = "{algorithm}"'


def _print_record(selector: str, domain: str, record: str, as_json: bool) -> None:
    name = f"{selector}._domainkey.{domain}"
    if as_json:
        click.echo(msgspec.json.encode({"name": name, "type": "TXT", "text": record}).decode())
    else:
        strings = " ".join(f'"{piece}"' for piece in record_strings(record))
        click.echo(f"{name}. IN TXT ( {strings} )")
