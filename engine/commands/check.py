"""`engine check`: try what can be tried without sending: settings, templates against columns, keys, the relay."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator

import click

from engine.campaign import Campaign
from engine.commands.common import campaign_option
from engine.commands.trial import dry_run
from engine.compose.keys import load_keys
from engine.compose.render import build_composer
from engine.config import Settings
from engine.errors import EngineError, Exit
from engine.planner import expand, read_shape, sample_mixing
from engine.smtp.destination import ConnectionLimits, relay_destination
from engine.smtp.probe import probe
from engine.work.frozen import check_frozen, planned_composer


@click.command()
@campaign_option
@click.argument("sources", nargs=-1, metavar="[LIST...]")
@click.option("--all-rows", is_flag=True, help="Render every row of the planned list.")
@click.pass_context
def check(context: click.Context, campaign: Campaign, sources: tuple[str, ...], all_rows: bool) -> None:
    """Try settings, templates, keys and the relay (greeting, TLS, login); send nothing.

    LIST is checked against the templates where there is no plan yet.

    \b
    engine check list.parquet
    """
    settings = campaign.settings()
    click.echo(f"ok    settings: {campaign.folder / 'campaign.toml'}")
    worst = Exit.DONE
    for name, look in _looks(campaign, settings, sources):
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
    campaign: Campaign, settings: Settings, sources: tuple[str, ...]
) -> Iterator[tuple[str, Callable[[], Lines]]]:
    yield "keys", lambda: _keys(campaign, settings)
    if sources or not campaign.plan_file.exists():
        yield "list", lambda: _list(campaign, settings, sources or ("list.parquet",))
    else:
        yield "plan", lambda: _plan(campaign, settings)
    if settings.delivery.mode == "relay":
        yield "relay", lambda: _relay(campaign, settings)


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


def _relay(campaign: Campaign, settings: Settings) -> Lines:
    if settings.delivery.relay.startswith("sink:"):
        yield "ok", "the test server inside the sender; nothing leaves this machine"
        return
    destination = relay_destination(settings.delivery, os.environ, folder=campaign.folder)
    report = asyncio.run(probe(destination, ConnectionLimits.of(settings.delivery)))
    yield from ((line.state, line.text) for line in report.lines)
    if report.problem is not None:
        raise report.problem
