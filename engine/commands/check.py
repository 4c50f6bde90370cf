"""`engine check`: try what can be tried without sending: settings, templates against columns, keys, the relay."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Iterator

import click

from engine.campaign import Campaign
from engine.clock import SystemClock
from engine.commands.common import campaign_option
from engine.commands.trial import dry_run
from engine.compose.checklist import Finding, Severity, check_composer, check_message
from engine.compose.dnscheck import check_dns
from engine.compose.keys import load_keys
from engine.compose.render import RowProblem, build_composer
from engine.config import Settings
from engine.errors import EngineError, Exit
from engine.pace.budgets import load_budgets
from engine.planner import expand, read_shape, sample_mixing
from engine.route.lookup import TextLookup
from engine.rows import RowReader, first_texts
from engine.smtp.destination import ConnectionLimits, relay_destination
from engine.smtp.probe import probe
from engine.work.frozen import check_frozen, planned_composer
from formats.address import Mailbox, parse_mailboxes


@click.command()
@campaign_option
@click.argument("sources", nargs=-1, metavar="[LIST...]")
@click.option("--all-rows", is_flag=True, help="Render every row of the planned list.")
@click.option("--dns", "ask_dns", is_flag=True, help="Ask what the DNS says of our names; always for direct delivery.")
@click.pass_context
def check(context: click.Context, campaign: Campaign, sources: tuple[str, ...], all_rows: bool, ask_dns: bool) -> None:
    """Try settings, templates, keys and the relay (greeting, TLS, login); send nothing.

    LIST is checked against the templates where there is no plan yet.

    \b
    engine check list.parquet
    """
    settings = campaign.settings()
    click.echo(f"ok    settings: {campaign.folder / 'campaign.toml'}")
    worst = Exit.DONE
    for name, look in _looks(campaign, settings, sources, ask_dns):
        try:
            for line in look():
                click.echo(f"{line[0]:5} {name}: {line[1]}")
        except EngineError as problem:
            worst = worst or problem.exit_code
            click.echo(f"FAIL  {name}: {problem}")
            if problem.next_step:
                click.echo(f"      next: {problem.next_step}")
    if all_rows and not worst:
        worst = dry_run(campaign, settings, campaign.plan())
    context.exit(worst)


Lines = Iterator[tuple[str, str]]


def _looks(
    campaign: Campaign, settings: Settings, sources: tuple[str, ...], ask_dns: bool
) -> Iterator[tuple[str, Callable[[], Lines]]]:
    yield "keys", lambda: _keys(campaign, settings)
    if sources or not campaign.plan_file.exists():
        yield "list", lambda: _list(campaign, settings, sources or ("list.parquet",))
    else:
        yield "plan", lambda: _plan(campaign, settings)
        yield "message", lambda: _message(campaign, settings)
    if settings.delivery.mode == "relay":
        yield "relay", lambda: _relay(campaign, settings)
    if ask_dns or settings.delivery.mode == "direct":
        yield "dns", lambda: _dns(campaign, settings)


def _keys(campaign: Campaign, settings: Settings) -> Lines:
    path = campaign.folder / settings.keys.file
    ring = load_keys(path)
    yield "ok", f"{path} (current key {ring.current_id})"
    if path.stat().st_mode & 0o077:
        yield "warn", f"{path} can be read by others: chmod 600 {path}"


def _list(campaign: Campaign, settings: Settings, sources: tuple[str, ...]) -> Lines:
    shape = read_shape(expand(sources, campaign.folder), settings.list.address_column, settings.list.id_column)
    yield "ok", f"{shape.rows:,} rows in {len(shape.files)} file(s), addresses in {shape.address_column!r}"
    composer = build_composer(settings, campaign.folder, shape.schema)
    yield "ok", f"templates use {', '.join(composer.columns) or 'no column'}"
    if shape.rows and (mixing := sample_mixing(shape)).is_bad:
        yield (
            "warn",
            f"badly mixed: {mixing.worst_domain} is {mixing.worst_points:.0f} points off; `engine prepare` mixes",
        )


def _plan(campaign: Campaign, settings: Settings) -> Lines:
    plan = campaign.plan()
    check_frozen(campaign, settings, plan)
    yield "ok", f"{plan.rows:,} rows; nothing frozen has changed"
    if plan.files:
        composer = planned_composer(campaign, settings, plan)
        yield "ok", f"templates use {', '.join(composer.columns) or 'no column'}"


def _message(campaign: Campaign, settings: Settings) -> Lines:
    """The bulk senders' requirements, held against the first row that has a message."""
    plan = campaign.plan()
    composer = planned_composer(campaign, settings, plan)
    for finding in check_composer(composer):
        yield _state(finding), f"{finding.subject}: {finding.reason}"
    reader = RowReader(plan, [plan.address_column, *composer.columns])
    for number, row in reader.pick(range(min(plan.rows, 100))):
        (mailbox,) = parse_mailboxes(first_texts([row]))
        if not isinstance(mailbox, Mailbox):
            continue
        with contextlib.suppress(RowProblem):
            made = composer.compose(number, mailbox, row[1:], SystemClock().wall_us())
            for finding in check_message(made.content, return_path=made.return_path):
                yield _state(finding), f"{finding.subject}: {finding.reason}"
            return


def _dns(campaign: Campaign, settings: Settings) -> Lines:
    """What the world's DNS says of our names and sources."""
    budgets = load_budgets(campaign.folder / "budgets.toml")
    addresses = [source.bind for source in budgets.sources if source.bind]
    lookup = TextLookup(settings.delivery.nameservers)
    greeting = settings.delivery.greeting_name
    for finding in check_dns(settings, campaign.folder, lookup, sources=addresses, greeting_name=greeting):
        yield _state(finding), f"{finding.subject}: {finding.reason}"


def _state(finding: Finding) -> str:
    """What receivers hold against a message is told, and is no reason to fail a check of the campaign's files."""
    return "ok" if finding.severity is Severity.OK else "warn"


def _relay(campaign: Campaign, settings: Settings) -> Lines:
    if settings.delivery.relay.startswith("sink:"):
        yield "ok", "the test server inside the sender; nothing leaves this machine"
        return
    destination = relay_destination(settings.delivery, os.environ, folder=campaign.folder)
    report = asyncio.run(probe(destination, ConnectionLimits.of(settings.delivery)))
    yield from ((line.state, line.text) for line in report.lines)
    if report.problem is not None:
        raise report.problem
