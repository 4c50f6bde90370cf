"""`engine suppress` and `engine forget`: who must not be written to."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import click
import msgspec

from engine.clock import SystemClock
from engine.commands.exchanging import exchange_of, hear, share
from engine.config import load_settings
from engine.control.store import StoreAway
from engine.lists import forgetting, suppression_io
from engine.lists.opening import FORMATS, Reading, open_files
from engine.lists.prepare import work_folder
from engine.lists.suppressions import Suppressions
from formats import suppression
from formats.address import AddressError, canonical, parse_mailboxes
from formats.suppression import ALL, Entry, Reason

Command = TypeVar("Command", bound=Callable[..., Any])


def _folder_option(command: Command) -> Command:
    """`--folder DIR`, or the campaign's own; the command gets a Path."""
    command = click.option(
        "--campaign",
        metavar="DIR",
        default="campaign",
        show_default=True,
        envvar="ROWPOST_CAMPAIGN",
        expose_value=False,
        is_eager=True,
        help="The campaign folder, whose suppressions are meant.",
        callback=lambda context, parameter, value: context.meta.__setitem__("campaign", value),
    )(command)
    return click.option(
        "--folder",
        metavar="DIR",
        help="A suppression folder of its own, shared by campaigns.",
        callback=lambda context, parameter, value: (
            Path(value) if value else Path(context.meta["campaign"], "suppression")
        ),
    )(command)


_control_option = click.option(
    "--control", metavar="URL", help="The store whose table machines share. [default: the campaign's]"
)
_scope_option = click.option("--scope", default=ALL, show_default=True, metavar="all|LIST", help="Whose mail it stops.")
_reason_option = click.option("--reason", default=None, type=click.Choice([one.value for one in Reason]))


def _canonical(addresses: Sequence[str]) -> list[str]:
    parsed = parse_mailboxes(addresses)
    for text, one in zip(addresses, parsed, strict=True):
        if isinstance(one, AddressError):
            raise click.UsageError(f"{text}: {one}")
    return [canonical(one) for one in parsed if not isinstance(one, AddressError)]


@click.group()
def suppress() -> None:
    """Who must not be written to: add, remove, import, export, check."""


@suppress.command()
@click.argument("address", nargs=-1, required=True)
@_scope_option
@_reason_option
@click.option("--source", default="operator", show_default=True, help="Where it comes from.")
@_folder_option
@_control_option
def add(
    address: tuple[str, ...], scope: str, reason: str | None, source: str, folder: Path, control: str | None
) -> None:
    """Stop mail to ADDRESS, within seconds also in a running campaign.

    \b
    engine suppress add ann@example.org --reason unsubscribe --scope weekly
    """
    now = SystemClock().wall_us()
    entries = [Entry(one, scope, reason or Reason.MANUAL, source, now) for one in _canonical(address)]
    added = Suppressions(folder, list_id=scope).add(entries)
    click.echo(f"{added} added, {len(entries) - added} were there already", err=True)
    with exchange_of(folder, control) as exchange:
        share(exchange)


@suppress.command()
@click.argument("address", nargs=-1, required=True)
@_scope_option
@click.option("--source", default="operator", show_default=True, help="Who takes it back, and why.")
@_folder_option
@_control_option
def remove(address: tuple[str, ...], scope: str, source: str, folder: Path, control: str | None) -> None:
    """Write to ADDRESS again. Only this lifts a suppression: no import does.

    \b
    engine suppress remove ann@example.org --scope weekly --source "asked to come back"
    """
    now = SystemClock().wall_us()
    with exchange_of(folder, control) as exchange:
        hear(exchange)  # what another machine added can be taken back here
        _remove(address, scope, source, folder, now)
        share(exchange)


def _remove(address: Sequence[str], scope: str, source: str, folder: Path, now: int) -> None:
    known = Suppressions(folder, list_id=scope)
    wanted = _canonical(address)
    if known.has_forgotten():
        wanted += [suppression.forgotten_address(one, known.forget_key()) for one in wanted]
    lifted = known.add([Entry(one, scope, Reason.MANUAL, source, now, lifted=True) for one in wanted])
    click.echo(f"{lifted} lifted in scope {scope}", err=True)
    for one in _canonical(address):
        if known.check([one])[0]:
            click.echo(f"{one} is still suppressed in scope {ALL}", err=True)


@suppress.command(name="import")
@click.argument("file", nargs=-1, required=True, type=click.Path(path_type=Path))
@_scope_option
@_reason_option
@click.option("--source", help="Where they come from. [default: the file's name]")
@click.option("--address-column", metavar="NAME")
@click.option("--format", "kind", type=click.Choice(FORMATS))
@_folder_option
@_control_option
@click.option("--json", "as_json", is_flag=True)
def import_(
    file: tuple[Path, ...],
    scope: str,
    reason: str | None,
    source: str | None,
    address_column: str | None,
    kind: str | None,
    folder: Path,
    control: str | None,
    as_json: bool,
) -> None:
    """Add every address in FILE (CSV, Parquet, JSON lines). A file that `export` wrote keeps its scopes and reasons.

    \b
    engine suppress import bounces.csv --reason bounce
    """
    now = SystemClock().wall_us()
    done = []
    with work_folder(folder) as work:
        for one in open_files(file, work, Reading(format=kind)):
            if suppression_io.is_exported(one):
                done.append(suppression_io.import_exported(one, folder))
                continue
            done.append(
                suppression_io.import_source(
                    one,
                    folder,
                    scope=scope,
                    reason=reason or Reason.IMPORT,
                    origin=source or Path(one.name).name,
                    now_us=now,
                    column=address_column,
                )
            )
    total = suppression_io.Imported(
        read=sum(one.read for one in done),
        added=sum(one.added for one in done),
        invalid=sum(one.invalid for one in done),
    )
    if as_json:
        click.echo(msgspec.json.encode(total))
    else:
        known = total.read - total.added - total.invalid
        click.echo(f"{total.read:,} read: {total.added:,} added, {known:,} known, {total.invalid:,} no addresses")
    with exchange_of(folder, control) as exchange:
        share(exchange)


@suppress.command()
@click.option("-o", "--output", type=click.Path(path_type=Path), help=".csv or .parquet [default: CSV to stdout]")
@_folder_option
def export(output: Path | None, folder: Path) -> None:
    """Write every entry that holds: address, scope, reason, source, at.

    \b
    engine suppress export -o suppressed.parquet
    """
    count, text = suppression_io.export(folder, output)
    if output is None:
        click.echo(text, nl=False)
    click.echo(f"{count:,} entries", err=True)


@suppress.command()
@click.argument("address", nargs=-1, required=True)
@click.option("--list-id", metavar="ID", help="Is it stopped for this list? [default: for all]")
@_folder_option
@_control_option
@click.option("--json", "as_json", is_flag=True)
def check(address: tuple[str, ...], list_id: str | None, folder: Path, control: str | None, as_json: bool) -> None:
    """Tell whether ADDRESS is suppressed, and everything that was said about it.

    \b
    engine suppress check ann@example.org --list-id weekly
    """
    names = _canonical(address)
    with exchange_of(folder, control) as exchange:
        hear(exchange)
    known = Suppressions(folder, list_id=list_id)
    stopped = dict(zip(names, known.check(names).tolist(), strict=True))
    if as_json:
        said = {name: [msgspec.structs.asdict(one) for one in suppression_io.history(folder, [name])] for name in names}
        click.echo(msgspec.json.encode({name: {"suppressed": stopped[name], "entries": said[name]} for name in names}))
        return
    for name in names:
        click.echo(f"{name}: {'suppressed' if stopped[name] else 'not suppressed'}")
        for one in suppression_io.history(folder, [name]):
            when = datetime.fromtimestamp(one.at_us / 1e6, UTC).strftime("%Y-%m-%d %H:%M:%SZ")
            act = "lifted" if one.lifted else one.reason
            click.echo(f"  {when}  scope {one.scope}  {act}  {one.source}".rstrip())


@suppress.command()
@_folder_option
@_control_option
@click.option("--every", type=click.FloatRange(min=0.2), metavar="SECONDS", help="Again and again, until stopped.")
def sync(folder: Path, control: str | None, every: float | None) -> None:
    """Tell the store's table what this folder knows, and be told. `engine send` does it by itself.

    \b
    engine suppress sync --control postgresql://rowpost@db.example.com/rowpost --every 2
    """
    with exchange_of(folder, control) as exchange:
        if exchange is None:
            raise click.UsageError("nothing says where machines meet: give --control postgresql://user@host/database")
        while True:
            try:
                done = exchange.step()
            except StoreAway as problem:
                if every is None:
                    raise
                click.echo(f"{problem}; trying again", err=True)
            else:
                if every is None or done.sent or done.taken:
                    click.echo(f"{done.sent} told, {done.taken} heard", err=True)
            if every is None:
                return
            time.sleep(every)


@click.command()
@click.argument("address", nargs=-1)
@click.option(
    "--in",
    "files",
    multiple=True,
    type=click.Path(path_type=Path, exists=True),
    help="Also erase the row in this Parquet list or rejects file. Repeatable.",
)
@click.option(
    "--older-than",
    "days",
    type=click.IntRange(min=1),
    metavar="DAYS",
    help="In place of ADDRESS: turn all entries older than this into hashes.",
)
@click.option("--expired", is_flag=True, help="As --older-than, with the campaign's retention_days.")
@_folder_option
@_control_option
@click.option("--json", "as_json", is_flag=True)
def forget(
    address: tuple[str, ...],
    files: tuple[Path, ...],
    days: int | None,
    expired: bool,
    folder: Path,
    control: str | None,
    as_json: bool,
) -> None:
    """Erase a person: the address goes, a keyed hash stays, and they are not written to again by mistake.

    \b
    engine forget ann@example.org --in list.parquet --in rejects.parquet
    """
    if sum((bool(address), bool(days), expired)) != 1:
        raise click.UsageError("name ADDRESS, or give --older-than DAYS, or --expired")
    if expired:
        days = load_settings(folder.parent).suppression.retention_days
        if days is None:
            raise click.UsageError("the campaign's settings have no retention_days in [suppression]")
    now = SystemClock().wall_us()
    with exchange_of(folder, control) as exchange:
        if days:
            before = now - days * 86_400_000_000
            older = exchange.forget_older(before) if exchange else forgetting.forget_older(folder, before)
            done = forgetting.Forgotten(entries=older)
        else:
            names = _canonical(address)
            rows = {str(file): forgetting.erase_rows(file, names) for file in files}
            forget_names = exchange.forget if exchange else partial(forgetting.forget, folder)
            done = forgetting.Forgotten(entries=forget_names(names, now_us=now), rows=rows)
    if as_json:
        click.echo(msgspec.json.encode(done))
        return
    click.echo(f"{done.entries} entries in {folder} no longer name anybody")
    for file, count in done.rows.items():
        click.echo(f"{count} rows erased in {file}")
    click.echo(
        "not touched: exports the list was made from, backups, mail servers' logs, send logs with log_addresses",
        err=True,
    )
