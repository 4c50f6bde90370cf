"""`engine capacity`: what we can send, what they will accept, and which of the two sets the schedule."""

from __future__ import annotations

import os
import time
from pathlib import Path

import click
import msgspec
import pyarrow.parquet as pq

from engine.campaign import Campaign
from engine.capacity import OTHER, Accepts, Capacity, OurRate, capacity
from engine.clock import SystemClock
from engine.commands.common import campaign_option, span
from engine.compose.render import RowProblem, build_composer
from engine.config import Duration
from engine.errors import EngineError, Exit
from engine.pace.budgets import BUDGETS_FILE, Source, load_budgets
from engine.route.provider import ProviderBook, load_providers
from engine.rows import RowReader, first_texts, open_parquet
from engine.warmup import schedule_named
from formats import listmeta
from formats.address import AddressError, parse_mailboxes

_SHOWN = 12
_SAMPLE = 500


class NoCounts(EngineError):
    """{what} says nothing about providers or domains."""

    exit_code = Exit.LIST
    hint = "`engine prepare` notes the counts in the list; or give them: --rows 1000000 --share google=45."


class Counts(msgspec.Struct):
    """Rows per provider, and the tail."""

    providers: dict[str, int]
    other_rows: int = 0
    other_domains: int = 0


@click.command(name="capacity")
@click.argument("lists", nargs=-1, metavar="[LIST]...")
@campaign_option
@click.option("--rows", type=click.IntRange(1), help="Plan for a list that is not there yet, with --share.")
@click.option(
    "--share", "shares", multiple=True, metavar="PROVIDER=PERCENT", help="Of --rows; the rest are small domains."
)
@click.option(
    "--domains", type=click.IntRange(1), default=300_000, show_default=True, help="Small domains, with --rows."
)
@click.option("--deadline", default="24h", show_default=True)
@click.option("--machines", type=click.IntRange(1), default=1, show_default=True)
@click.option(
    "--processes", type=click.IntRange(1), default=os.cpu_count() or 1, show_default="cores", help="Per machine."
)
@click.option("--gigabits", type=float, default=1.0, show_default=True, help="A machine's line.")
@click.option(
    "--message-bytes", type=click.IntRange(1), help="Default: of rendered sample rows with --measure, else 20000."
)
@click.option("--measure", is_flag=True, help="Compose and sign sample rows of the planned list, here and now.")
@click.option("--sources", type=click.IntRange(1), help="So many addresses in place of those in budgets.toml.")
@click.option("--warmup-day", type=click.IntRange(1), help="They are on this day of a warm-up; 1 is cold.")
@click.option("--schedule", "schedule_name", default="sparkpost", show_default=True, help="The warm-up's caps.")
@click.option("--connect-s", type=float, default=0.6, show_default=True, help="To open a connection.")
@click.option("--message-s", type=float, default=0.5, show_default=True, help="A message on an open connection.")
@click.option("--all", "show_all", is_flag=True, help="Every provider, not the largest dozen.")
@click.option("--json", "as_json", is_flag=True)
def capacity_command(
    lists: tuple[str, ...],
    campaign: Campaign,
    rows: int | None,
    shares: tuple[str, ...],
    domains: int,
    deadline: str,
    machines: int,
    processes: int,
    gigabits: float,
    message_bytes: int | None,
    measure: bool,
    sources: int | None,
    warmup_day: int | None,
    schedule_name: str,
    connect_s: float,
    message_s: float,
    show_all: bool,
    as_json: bool,
) -> None:
    """Say whether a list can be sent by the deadline, what limits it, and what would make it possible.

    \b
    engine capacity list.parquet --deadline 24h
    engine capacity --measure
    engine capacity --rows 100000000 --share google=45 --share yahoo=12 --machines 5 --sources 20
    """
    try:
        deadline_s = Duration.parse(deadline).seconds
    except ValueError as problem:
        raise click.BadParameter(str(problem), param_hint="--deadline") from None
    if not deadline_s:
        raise click.BadParameter("a deadline of nothing cannot be met", param_hint="--deadline")
    counts = _of_shares(rows, shares, domains) if rows is not None else _of_lists(lists, campaign)
    budgets = load_budgets(campaign.folder / BUDGETS_FILE)
    given = budgets.sources
    if sources is not None:
        given = tuple(Source(f"source-{number + 1}", warmup_day=warmup_day) for number in range(sources))
    elif warmup_day is not None:
        given = tuple(
            msgspec.structs.replace(source, warmup_day=warmup_day) for source in given or (Source("default"),)
        )
    ours = OurRate(machines=machines, processes=processes, gigabits=gigabits)
    if measure:
        per_process, sampled_bytes = measured(campaign)
        message_bytes = message_bytes or sampled_bytes
        # Composing includes the signatures.
        ours = msgspec.structs.replace(ours, per_process=per_process, measured=True)
    told = capacity(
        counts.providers,
        budgets,
        ours,
        sources=given,
        schedule=schedule_named(schedule_name),
        message_bytes=message_bytes or 20_000,
        deadline_s=deadline_s,
        connect_s=connect_s,
        message_s=message_s,
        other_rows=counts.other_rows,
        other_domains=counts.other_domains,
    )
    if as_json:
        click.echo(msgspec.json.encode(told).decode())
    else:
        _print(told, show_all)


def measured(campaign: Campaign) -> tuple[float, int]:
    """(messages a second that one process composes and signs here, their mean size in bytes)."""
    settings, plan = campaign.settings(), campaign.plan()
    composer = build_composer(settings, campaign.folder, open_parquet(plan.files[0].path).schema_arrow)
    reader = RowReader(plan, [plan.address_column, *composer.columns])
    now_us = SystemClock().wall_us()
    spans = reader.spans(0, min(plan.rows, _SAMPLE))
    made = size = 0
    started = time.process_time()
    for part in spans:
        found = reader.read(part, 0, _SAMPLE)
        for place, (row, mailbox) in enumerate(zip(found, parse_mailboxes(first_texts(found)), strict=True)):
            if isinstance(mailbox, AddressError):
                continue
            try:
                size += len(composer.compose(part.first_row + place, mailbox, row[1:], now_us).content)
                made += 1
            except RowProblem:
                continue
        if made >= _SAMPLE:
            break
    took = time.process_time() - started
    if not made:
        raise NoCounts(what="a list without a single row that renders")
    return made / max(took, 1e-6), size // made


def _of_shares(rows: int, shares: tuple[str, ...], domains: int) -> Counts:
    providers: dict[str, int] = {}
    for share in shares:
        name, _, percent = share.partition("=")
        try:
            providers[name] = round(rows * float(percent) / 100)
        except ValueError:
            raise click.BadParameter(f"{share!r} is not PROVIDER=PERCENT", param_hint="--share") from None
    rest = rows - sum(providers.values())
    if rest < 0 or any(count < 0 for count in providers.values()):
        raise click.BadParameter("the shares are more than 100 %", param_hint="--share")
    return Counts(providers, rest, domains)


def _of_lists(lists: tuple[str, ...], campaign: Campaign) -> Counts:
    book = load_providers()
    if not lists:
        plan = campaign.plan()
        counts = _merged(plan.provider_rows, plan.domain_rows, book)
        counts.other_rows += plan.rows - sum(counts.providers.values())
        counts.other_domains = max(counts.other_domains, 1)
        if not counts.providers:
            raise NoCounts(what="the planned list")
        return counts
    total = Counts({})
    for name in lists:
        meta = listmeta.of_metadata(pq.read_metadata(Path(name)).metadata) if Path(name).exists() else None
        if meta is None:
            raise NoCounts(what=name)
        counts = _merged(meta.provider_rows, meta.domain_rows, book)
        for provider, rows in counts.providers.items():
            total.providers[provider] = total.providers.get(provider, 0) + rows
        total.other_rows += meta.rows - sum(counts.providers.values())
        total.other_domains = max(total.other_domains, meta.other_domains, 1)
    return total


def _merged(provider_rows: dict[str, int], domain_rows: dict[str, int], book: ProviderBook) -> Counts:
    """By provider where that was resolved; else well-known domains by the table, every other one for itself."""
    if provider_rows:
        return Counts(dict(provider_rows))
    providers: dict[str, int] = {}
    for domain, rows in domain_rows.items():
        name = book.of_domain(domain) or domain
        providers[name] = providers.get(name, 0) + rows
    return Counts(providers)


def _print(told: Capacity, show_all: bool) -> None:
    for line in told.arithmetic:
        click.echo(line)
    click.echo("")
    click.echo(
        f"{'provider':<22}{'rows':>13}{'sources':>9}{'accepts':>12}{'done in':>14}{'first day':>14}{'spills':>14}"
        "  limited by"
    )
    shown = told.providers if show_all else told.providers[:_SHOWN]
    for each in shown:
        click.echo(_row(each))
    hidden = told.providers[len(shown) :]
    if hidden:
        latest = max(hidden, key=lambda each: float("inf") if each.eta_s is None else each.eta_s)
        click.echo(f"and {len(hidden):,} more with {sum(each.rows for each in hidden):,} rows; the latest of them:")
        click.echo(_row(latest))
    click.echo("")
    for each in shown[:3]:
        for bind in each.limits:
            click.echo(f"{each.provider}: {bind.arithmetic}")
    click.echo("")
    theirs = span(told.theirs_eta_s) if told.theirs_eta_s is not None else "more than ten years"
    click.echo(f"we can send it in {span(told.ours_eta_s)} ({told.ours_binding}); they accept it in {theirs}")
    verdict = "possible" if told.is_possible else "not possible"
    eta = f"it takes {span(told.eta_s)}" if told.eta_s is not None else "it never ends"
    click.echo(f"within {span(told.deadline_s)}: {verdict}; {eta}, limited by {told.binding}")
    for remedy in told.remedies:
        click.echo(f"  {remedy}")


def _row(each: Accepts) -> str:
    eta = span(each.eta_s) if each.eta_s is not None else "never"
    name = each.provider if each.provider != OTHER else "other (small domains)"
    rate = f"{each.rate_per_s:,.1f}/s" if each.rate_per_s < 100_000 else "> 100,000/s"
    return (
        f"{name:<22}{each.rows:>13,}{each.sources:>9}{rate:>12}{eta:>14}{each.today:>14,}"
        f"{each.spills:>14,}  {each.binding}"
    )
