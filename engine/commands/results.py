"""`engine merge-logs`, `report`, `retry-list`, `write-back`: what happened to each row, and what to do with it."""

from __future__ import annotations

import sys
import tempfile
import webbrowser
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import click
import msgspec

from engine.campaign import Campaign, make_private_folder
from engine.clock import SystemClock
from engine.commands.common import campaign_option
from engine.control.log_store import fetch
from engine.control.opening import control_url, open_store
from engine.control.sqlite import SqliteStore
from engine.control.store import SharedStore, Store, StoreAway, StoreRefuses
from engine.errors import EngineError, Exit
from engine.results.feedback import read_feedback
from engine.results.merge import merge
from engine.results.merged import Decided
from engine.results.report import read_summary, redraw, write_report
from engine.results.retry import DEFAULT, write_retry_list
from engine.results.statement import parse
from engine.results.store_reports import read_store
from engine.results.summary import Summary
from engine.results.tables import next_steps, plain, rich_table, shown, table
from engine.results.target import open_target
from engine.results.write_back import BATCH, Kind, Written, choose, people, write_back
from engine.work.timing import schedule_of
from formats.plan import Plan


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
@click.option("--control", metavar="URL", help="Where machines meet, as given to `engine plan`.")
@click.option("--json", "as_json", is_flag=True, help="summary.json on stdout in place of the table.")
def merge_logs(
    sources: tuple[Path, ...], campaign: Campaign, processes: int, control: str | None, as_json: bool
) -> None:
    """Prove what happened: every row of the plan accounted for, and report/ written.

    The logs of the campaign folder are read, and those of every FOLDER named (other machines' campaign or log folders).

    \b
    engine merge-logs
    engine merge-logs machine-1/ machine-2/logs --campaign spring
    """
    plan, fingerprint = campaign.plan_and_fingerprint()
    settings = campaign.settings()
    where = settings.log.log_store
    fetched = fetch(campaign, plan.campaign_id, where) if where is not None else []
    logs = sorted({*campaign.log_files(), *fetched, *_log_files(sources)})
    feedback_files = [*campaign.feedback.glob("*.arrows")]
    for source in sources:
        feedback_files += (source / "feedback").glob("*.arrows")
    feedback = read_feedback(sorted(set(feedback_files)), plan.campaign_id, plan.rows)
    state = ""
    try:
        decisions, reports, state = _ask_store(campaign, plan, control)
    except (StoreAway, StoreRefuses) as problem:
        # Without the store its rows are unknown; the exit code says so.
        click.echo(f"warning: {problem}", err=True)
        decisions, reports = [], None
    is_over = schedule_of(settings).is_over(SystemClock().wall_us())
    with (
        _scratch(campaign) as scratch,
        merge(
            plan,
            logs,
            decisions=decisions,
            reports=reports,
            feedback=feedback,
            ended="expired" if is_over else "cancelled" if state == "cancelled" else None,
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
            planned_per_hour=plan.planned_per_hour,
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


@click.command("write-back")
@campaign_option
@click.option("--to", "url", required=True, metavar="URL", help="sqlite:///users.db or postgresql://user@host/database")
@click.option("--bounced", metavar="SQL", help="For addresses where nobody is.")
@click.option("--complained", metavar="SQL", help="For who complained.")
@click.option("--unsubscribed", metavar="SQL", help="For who unsubscribed.")
@click.option(
    "--on",
    "per_list",
    nargs=3,
    multiple=True,
    metavar="LIST KIND SQL",
    help="As above, for campaigns of this list alone; outweighs the general one.",
)
@click.option("--apply", is_flag=True, help="Do it. Without it the first batch is tried and taken back.")
def write_back_command(
    campaign: Campaign,
    url: str,
    bounced: str | None,
    complained: str | None,
    unsubscribed: str | None,
    per_list: tuple[tuple[str, str, str], ...],
    apply: bool,
) -> None:
    """Tell the users table who bounced, complained or unsubscribed, by your own statements.

    They may name :address, :id, :row, :list_id, :reason and :at. First a dry run; then the same line with --apply.

    \b
    engine write-back --to sqlite:///users.db --bounced "UPDATE users SET daily_newsletter = 0 WHERE email = :address"
    """
    plan = campaign.plan()
    list_id = plan.list_id or ""
    general = {Kind.BOUNCED: bounced, Kind.COMPLAINED: complained, Kind.UNSUBSCRIBED: unsubscribed}
    for _, kind, _ in per_list:
        if kind not in list(Kind):
            raise click.UsageError(f"{kind!r} is none of {', '.join(Kind)}")
    given = [("", str(kind), sql) for kind, sql in general.items() if sql] + list(per_list)
    if not given:
        raise click.UsageError("give at least one of --bounced, --complained, --unsubscribed")
    feedback = read_feedback(sorted(campaign.feedback.glob("*.arrows")), plan.campaign_id, plan.rows)
    whom = people(campaign.report / "recipients.parquet", feedback, plan.campaign_id)
    target = open_target(url)
    try:
        statements = {kind: parse(kind, sql, target.placeholder) for kind, sql in choose(given, list_id).items()}
        for kind, statement in statements.items():
            done = write_back(
                target, campaign.folder / "write-back.sqlite", statement, whom[kind], list_id, apply=apply
            )
            _tell_written(done, apply)
    finally:
        target.close()
    if not apply:
        click.echo("  next: this was a dry run; the same line with --apply does it", err=True)


def _tell_written(done: Written, apply: bool) -> None:
    left = done.people - done.before
    told = f"{done.kind}: {done.people:,} people, {done.before:,} written before, "
    if apply:
        click.echo(f"{told}{done.now:,} written now, {done.changed:,} rows changed")
        return
    tried = min(left, BATCH)
    click.echo(f"{told}{left:,} to write; tried with {tried:,}, which changed {done.changed:,} rows, and taken back")
    for person in done.examples:
        click.echo(f"  id={person.id!r} address={shown(person.address)} reason={shown(person.reason)}")


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


def _ask_store(campaign: Campaign, plan: Plan, control: str | None) -> tuple[list[Decided], list[Any] | None, str]:
    """The operators' words on doubt and on the campaign; of a store that machines share, what it knows of rows too."""
    if plan.store != "sqlite":
        if control_url(campaign, campaign.settings(), control) is None:
            return [], None, ""
        shared = cast(SharedStore, open_store(campaign, control))
        try:
            says = read_store(shared, plan)
            return list(says.decisions), says.reports, _state_of(shared)
        finally:
            shared.close()
    if not campaign.store_file.exists():
        return [], None, ""
    store = SqliteStore(campaign.store_file)
    try:
        return list(store.decisions()), None, _state_of(store)
    finally:
        store.close()


def _state_of(store: Store) -> str:
    found = store.campaign()
    return found.state if found is not None else ""


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
