"""`engine merge-logs`, `report`, `retry-list`, `write-back`: what happened to each row, and what to do with it."""

from __future__ import annotations

import sys
import tempfile
import webbrowser
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import click
import msgspec

from engine.campaign import Campaign, make_private_folder
from engine.clock import SystemClock
from engine.commands.common import campaign_option
from engine.control.sqlite import SqliteStore
from engine.errors import EngineError, Exit
from engine.results.feedback import read_feedback
from engine.results.merge import Decided, merge
from engine.results.report import read_summary, redraw, write_report
from engine.results.retry import DEFAULT, write_retry_list
from engine.results.summary import Summary
from engine.results.tables import next_steps, plain, rich_table, shown, table


class NoSuchFolder(EngineError):
    """{path} is no folder and no log."""

    exit_code = Exit.USAGE
    hint = "name campaign folders, folders of logs (*.arrows), or log files."


@click.command("merge-logs")
@click.argument("sources", nargs=-1, metavar="[FOLDER...]", type=click.Path(path_type=Path))
@campaign_option
@click.option(
    "--processes", type=click.IntRange(1, 64), default=2, show_default=True, help="Logs are read side by side."
)
@click.option("--json", "as_json", is_flag=True, help="summary.json on stdout in place of the table.")
def merge_logs(sources: tuple[Path, ...], campaign: Campaign, processes: int, as_json: bool) -> None:
    """Prove what happened: every row of the plan accounted for, and report/ written.

    The logs of the campaign folder are read, and those of every FOLDER named (other machines' campaign or log folders).

    \b
    engine merge-logs
    engine merge-logs machine-1/ machine-2/logs --campaign spring
    """
    plan, fingerprint = campaign.plan_and_fingerprint()
    settings = campaign.settings()
    logs = sorted({*campaign.log_files(), *_log_files(sources)})
    feedback_files = [*campaign.feedback.glob("*.arrows")]
    for source in sources:
        feedback_files += (source / "feedback").glob("*.arrows")
    feedback = read_feedback(sorted(set(feedback_files)), plan.campaign_id, plan.rows)
    with (
        _scratch(campaign) as scratch,
        merge(
            plan,
            logs,
            decisions=_decisions(campaign),
            feedback=feedback,
            plan_fingerprint=fingerprint,
            processes=processes,
            scratch=scratch,
            progress=_progress("logs read"),
        ) as merged,
    ):
        summary = write_report(
            merged,
            plan,
            settings,
            campaign.report,
            merged_at_us=SystemClock().wall_us(),
            threads=processes,
            campaign=_option(campaign),
            progress=_progress("rows written"),
        )
    _tell(summary, campaign, as_json)
    sys.exit(summary.exit_code)


@click.command()
@campaign_option
@click.option("--open", "in_browser", is_flag=True, help="Open the page in the browser.")
@click.option("--json", "as_json", is_flag=True, help="summary.json on stdout in place of the table.")
def report(campaign: Campaign, in_browser: bool, as_json: bool) -> None:
    """Show the last report again, and draw its page anew (for instance after installing the charts).

    \b
    engine report --open
    """
    summary = read_summary(campaign.report)
    page = redraw(campaign.report, _option(campaign))
    _tell(summary, campaign, as_json)
    if in_browser and not webbrowser.open(page.resolve().as_uri()):
        click.echo(f"no browser was found; the page is {page}", err=True)


@click.command("retry-list")
@campaign_option
@click.option(
    "--out", type=click.Path(path_type=Path, dir_okay=False), required=True, help="The Parquet file to write."
)
@click.option(
    "--select",
    "selected",
    multiple=True,
    metavar="OUTCOME[/REASON]",
    default=DEFAULT,
    show_default=True,
    help="Which rows; may be given several times.",
)
def retry_list(campaign: Campaign, out: Path, selected: tuple[str, ...]) -> None:
    """Write rows that were not accepted as the next list, ready for `engine plan` of another campaign.

    \b
    engine retry-list --out next.parquet
    engine retry-list --out next.parquet --select deferred --select bounced/policy
    """
    rows = write_retry_list(campaign.report / "undeliverable.parquet", out, selected)
    click.echo(f"{rows:,} rows in {out}")
    if rows:
        click.echo(f"  next: plan them as a campaign of their own: `engine init`, then `engine plan {out}`", err=True)


def _log_files(sources: tuple[Path, ...]) -> Iterator[Path]:
    for source in sources:
        if source.is_file():
            yield source
        elif (source / "logs").is_dir():
            yield from (source / "logs").glob("*.arrows")
        elif source.is_dir():
            yield from source.glob("*.arrows")
        else:
            raise NoSuchFolder(path=source)


def _decisions(campaign: Campaign) -> list[Decided]:
    """The operators' words on doubt, where this campaign has a store."""
    if not campaign.store_file.exists():
        return []
    store = SqliteStore(campaign.store_file)
    try:
        return list(store.decisions())
    finally:
        store.close()


@contextmanager
def _scratch(campaign: Campaign) -> Iterator[Path]:
    make_private_folder(campaign.folder)
    with tempfile.TemporaryDirectory(prefix=".merge-", dir=campaign.folder) as folder:
        yield Path(folder)


def _option(campaign: Campaign) -> str:
    return "" if campaign.folder == Path("campaign") else f" --campaign {campaign.folder}"


def _progress(what: str) -> Callable[[int, int], None] | None:
    """A line on stderr that counts, on a terminal only."""
    if not sys.stderr.isatty():
        return None

    def show(done: int, total: int) -> None:
        if total:
            click.echo(f"\r{what}: {100 * done // total} %", nl=done >= total, err=True)

    return show


def _tell(summary: Summary, campaign: Campaign, as_json: bool) -> None:
    if as_json:
        click.echo(msgspec.json.encode(summary).decode())
    elif sys.stdout.isatty():
        from rich.console import Console

        Console().print(rich_table(table(summary)))
    else:
        click.echo(plain(table(summary)))
    for damage in summary.damage:
        click.echo(f"damaged: {shown(damage.path)}: {shown(damage.problem)}", err=True)
    for problem in summary.list_problems:
        click.echo(f"list: {shown(problem)}", err=True)
    for note in summary.notes:
        click.echo(f"note: {shown(note)}", err=True)
    for step in next_steps(summary, _option(campaign)):
        click.echo(f"  next: {shown(step)}", err=True)
    click.echo(f"report: {campaign.report / 'index.html'}", err=True)
