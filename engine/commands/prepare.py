"""`engine prepare` and `engine inspect`: lists in, and what is in a list."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from engine.campaign import Campaign
from engine.clock import SystemClock
from engine.commands.common import campaign_option
from engine.commands.exchanging import exchange_of, share
from engine.lists.inspect import Inspection, inspect
from engine.lists.opening import FORMATS, Reading, open_files, parse_types
from engine.lists.prepare import Report, Wishes, work_folder
from engine.lists.prepare import prepare as prepare_list
from engine.lists.providers_file import read_providers
from engine.lists.scan import SuppressionList
from engine.lists.sql_source import sql_source
from engine.lists.suppression_files import SuppressionFile, is_suppression_folder
from engine.lists.suppressions import Suppressions


class Bars:
    """Stages as bars with rate and remaining time, on stderr; nothing where stderr is no terminal."""

    def __init__(self) -> None:
        self._bars = Progress(
            TextColumn("{task.description:20}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            disable=not sys.stderr.isatty(),
        )
        self._task: Any = None

    def __enter__(self) -> Bars:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def stage(self, name: str, rows: int) -> None:
        if self._task is not None:
            self._bars.update(self._task, completed=self._bars.tasks[self._task].total)
        self._task = self._bars.add_task(name, total=rows, rate="")

    def advance(self, rows: int) -> None:
        self._bars.advance(self._task, rows)
        speed = self._bars.tasks[self._task].finished_speed or self._bars.tasks[self._task].speed
        if speed:
            self._bars.update(self._task, rate=f"{speed:,.0f}/s")


@click.command()
@click.argument("source", nargs=-1, type=click.Path(path_type=Path))
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="The Parquet file to write.")
@click.option("--rejects", type=click.Path(path_type=Path), help="Rows left out. [default: rejects.parquet beside it]")
@click.option(
    "--from",
    "from_url",
    metavar="URL",
    help="A database in place of files: postgresql://, sqlite://, mysql://, mssql://",
)
@click.option("--query", metavar="SQL", help="What to select from it. @FILE reads the query from a file.")
@click.option("--address-column", metavar="NAME", help="[default: email, or another usual name]")
@click.option("--id-column", metavar="NAME", help="[default: id, where there is one]")
@click.option("--where", metavar="CONDITION", help="Keep only rows for which this SQL condition is true.")
@click.option(
    "--keep",
    default="first",
    show_default=True,
    metavar="WHICH",
    help='Of duplicates: first, last, or a column ("updated_at desc").',
)
@click.option("--engaged-first", metavar="COLUMN", help="Within each domain, the largest values of this column first.")
@click.option(
    "--suppress",
    multiple=True,
    type=click.Path(path_type=Path),
    help="A suppression folder, or a file of addresses. Repeatable.",
)
@click.option("--control", metavar="URL", help="The store whose suppressions machines share. [default: the campaign's]")
@click.option("--list-id", metavar="ID", help="Obey unsubscribes of this list too. [default: of all lists only]")
@click.option(
    "--providers",
    type=click.Path(path_type=Path, exists=True),
    help="Mix by provider: answers of `engine resolve`, or a JSON object {domain: provider}."
    " [default: domains.jsonl in the campaign folder, where there is one]",
)
@campaign_option
@click.option("--fold-local/--keep-local-case", default=True, show_default=True, help="Ann@ and ann@ are one.")
@click.option("--fold-provider", is_flag=True, help="a.nn+news@gmail.com and ann@gmail.com are one.")
@click.option("--check-domains", is_flag=True, help="Leave out domains that take no mail, asked of the DNS.")
@click.option("--format", "kind", type=click.Choice(FORMATS), help="[default: by the file's name]")
@click.option("--delimiter", metavar="C", help="Of CSV. [default: looked for]")
@click.option("--encoding", metavar="NAME", help="Of CSV. [default: looked for]")
@click.option(
    "--type",
    "types",
    multiple=True,
    metavar="COLUMN=TYPE",
    help="A CSV column that is not text: int, float, bool, date, timestamp.",
)
@click.option("--row-group-rows", default=10_000, show_default=True)
@click.option("--memory", default=4096, show_default=True, metavar="MB", help="A larger list goes through files.")
@click.option("--seed", default=1, show_default=True, help="Of the mixing: the same seed gives the same list.")
@click.option(
    "--work-folder", "work_parent", type=click.Path(path_type=Path), help="For stages. [default: beside the output]"
)
@click.option("--json", "as_json", is_flag=True, help="The report as JSON.")
def prepare(
    source: tuple[Path, ...],
    output: Path,
    rejects: Path | None,
    from_url: str | None,
    query: str | None,
    address_column: str | None,
    id_column: str | None,
    where: str | None,
    keep: str,
    engaged_first: str | None,
    suppress: tuple[Path, ...],
    control: str | None,
    list_id: str | None,
    providers: Path | None,
    campaign: Campaign,
    fold_local: bool,
    fold_provider: bool,
    check_domains: bool,
    kind: str | None,
    delimiter: str | None,
    encoding: str | None,
    types: tuple[str, ...],
    row_group_rows: int,
    memory: int,
    seed: int,
    work_parent: Path | None,
    as_json: bool,
) -> None:
    """Make a clean, mixed list of SOURCE files, or of a database.

    \b
    engine prepare export.csv -o list.parquet --suppress suppression/
    engine prepare --from postgresql://db/shop --query "SELECT * FROM users WHERE active" -o list.parquet
    """
    if bool(source) == bool(from_url) or bool(query) != bool(from_url):
        raise click.UsageError("name SOURCE files, or --from URL with --query, not both")
    try:
        reading = Reading(format=kind, delimiter=delimiter, encoding=encoding, types=parse_types(types))
    except ValueError as problem:
        raise click.UsageError(f"--type {problem}") from None
    wishes = Wishes(
        address=address_column,
        id=id_column,
        where=where,
        keep=keep,
        engaged_first=engaged_first,
        fold_local=fold_local,
        fold_provider=fold_provider,
        seed=seed,
        row_group_rows=row_group_rows,
        memory_bytes=memory << 20,
    )
    if providers is None and (kept := campaign.folder / "domains.jsonl").exists():
        providers = kept
        click.echo(f"note: mixed by provider, by the answers of `engine resolve` in {kept}", err=True)
    known = read_providers(providers) if providers else None
    with work_folder(work_parent or output.parent) as work, Bars() as bars:
        if from_url:
            assert query is not None
            text = Path(query[1:]).read_text() if query.startswith("@") else query
            sources = [sql_source(from_url, text, work)]
        else:
            sources = open_files(source, work, reading)
        report = prepare_list(
            sources,
            output,
            rejects or output.with_name("rejects.parquet"),
            wishes,
            work=work,
            suppressions=_suppressions(suppress, list_id, work, control),
            check_domains=_domain_checker() if check_domains else None,
            providers=known,
            progress=bars,
            now_us=SystemClock().wall_us(),
        )
    if as_json:
        click.echo(msgspec.json.encode(report))
    else:
        _show_report(report)


def _suppressions(paths: Sequence[Path], list_id: str | None, work: Path, control: str | None) -> list[SuppressionList]:
    found: list[SuppressionList] = []
    folders = [path for path in paths if is_suppression_folder(path)]
    if control and not folders:
        folders = [work / "shared-suppressions"]
        paths = [*paths, *folders]
    for number, path in enumerate(paths):
        if path in folders:
            with exchange_of(path, control) as exchange:
                share(exchange)  # a list made without what others know would reach who left
            found.append(Suppressions(path, list_id=list_id))
        else:
            stage = work / f"suppress-{number}"
            stage.mkdir()
            found += [SuppressionFile(one) for one in open_files([path], stage, Reading())]
    return found


def _domain_checker() -> Any:
    from engine.lists.domain_check import check_domains

    return check_domains


def _show_report(report: Report) -> None:
    for note in report.notes:
        click.echo(f"note: {note}", err=True)
    click.echo(f"{report.rows:>13,} rows read")
    for reason, count in report.rejected.items():
        click.echo(f"{count:>13,} {reason.replace('_', ' ')}")
    click.echo(f"{report.kept:>13,} rows in {report.output}, {report.domains:,} domains")
    if report.rejected:
        click.echo(f"rows left out, with reasons: {report.rejects}")
    click.echo(_mixing_line(report.mixing))


def _mixing_line(mixing: Any) -> str:
    return (
        f"mixing by {mixing.by}: worst 500 rows {mixing.worst_500:.1f} points off, worst 10,000 rows "
        f"{mixing.worst_10000:.2f}, longest run {mixing.longest_run}"
    )


@click.command(name="inspect")
@click.argument("file", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--address-column", metavar="NAME")
@click.option("--domains", default=15, show_default=True, help="How many domains to show.")
@click.option("--json", "as_json", is_flag=True)
def inspect_command(file: tuple[Path, ...], address_column: str | None, domains: int, as_json: bool) -> None:
    """Show what a Parquet list holds: columns, sizes, domains, how well it is mixed.

    \b
    engine inspect list.parquet
    """
    paths = [one for path in file for one in (sorted(path.glob("*.parquet")) if path.is_dir() else [path])]
    if not paths:
        raise click.UsageError("no Parquet file there")
    found = inspect(paths, address=address_column)
    if as_json:
        click.echo(msgspec.json.encode(found))
    else:
        _show_inspection(found, domains)


def _show_inspection(found: Inspection, domains: int) -> None:
    # A pipe has no width: nothing is cut or wrapped there.
    console = Console() if sys.stdout.isatty() else Console(width=200)
    size = sum(file.bytes for file in found.files)
    groups = sum(file.row_groups for file in found.files)
    prepared = "prepared" if found.is_prepared else "not prepared by this engine"
    console.print(
        f"{found.rows:,} rows in {len(found.files)} file(s), {size / 2**20:,.1f} MB, {groups:,} row groups, {prepared}",
        highlight=False,
    )
    table = Table("column", "type", "MB", "nulls", "examples", box=None, header_style="bold")
    for column in found.columns:
        nulls = "?" if column.nulls is None else f"{column.nulls:,}"
        table.add_row(column.name, column.type, f"{column.bytes / 2**20:.1f}", nulls, " | ".join(column.examples)[:60])
    console.print(table, highlight=False, markup=False)
    meta = found.meta
    if meta is not None and meta.rows:
        console.print(f"{meta.domains:,} domains", highlight=False)
        shown = list(meta.domain_rows.items())[:domains]
        widest = max(rows for _, rows in shown)
        for name, rows in shown:
            bar = "█" * max(1, round(30 * rows / widest))
            console.print(
                f"{name:30.30} {rows:>12,} {100 * rows / meta.rows:5.1f} % {bar}", highlight=False, markup=False
            )
        rest = meta.rows - sum(rows for _, rows in shown)
        if rest > 0:
            console.print(f"{'all others':26} {rest:>12,} {100 * rest / meta.rows:5.1f} %", highlight=False)
        for name, rows in list(meta.provider_rows.items())[:5]:
            console.print(f"provider {name:17.17} {rows:>12,} {100 * rows / meta.rows:5.1f} %", highlight=False)
        if meta.mixing is not None:
            console.print(_mixing_line(meta.mixing), highlight=False)
    for warning in found.warnings:
        click.echo(f"warning: {warning}", err=True)
