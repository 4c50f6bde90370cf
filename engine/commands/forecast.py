"""What `engine plan` says of the time to come: the capacity plan of its list, and the warm-up that `send` will keep."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import click
import msgspec
import polars as pl

from engine.campaign import Campaign
from engine.capacity import CONNECT_S, MESSAGE_S, Capacity, OurRate, capacity, planned_per_hour
from engine.commands.capacity import (
    RELAY_CONNECT_S,
    RELAY_MESSAGE_S,
    measure_line,
    print_capacity,
    relay_budgets,
    relay_name,
    with_measure,
)
from engine.commands.measure import Measured, kept_measure, sample_bytes
from engine.compose.render import build_composer
from engine.config import Settings
from engine.counts import Counts, DomainCounts, by_provider, counted, kept_answers, provider_book
from engine.errors import EngineError, Exit
from engine.pace.budgets import BUDGETS_FILE, Source, load_budgets
from engine.rows import open_parquet
from engine.warmup import Schedule, lay_out
from formats.plan import Plan, Warmup

COUNTED_ROWS = 10_000_000  # a list of so many rows that nobody prepared is counted while it is planned
NAMED_SHARE = 0.001  # providers with less of the rows share one part of a warm-up's caps
_DAYS_SHOWN = 10


class WarmupNeedsDirect(EngineError):
    """A warm-up belongs to the addresses that providers see, and mode = "relay" leaves through {relay}."""

    exit_code = Exit.SETTINGS
    hint = 'Deliver with mode = "direct" in [delivery], or warm the relay up by [delivery] messages_per_second.'


class WarmupNeedsCounts(EngineError):
    """A warm-up divides the day's cap by provider, and nothing is known of the list's providers."""

    exit_code = Exit.LIST
    hint = "`engine resolve LIST` asks the DNS, `engine prepare` notes the counts in the list; then plan again."


class NobodyWarmsUp(EngineError):
    """--warmup {schedule}: no source in budgets.toml is young."""

    exit_code = Exit.SETTINGS
    hint = "Give the young ones their day: [source.NAME] warmup_day = 1 in the campaign's budgets.toml."


class Forecast(msgspec.Struct, frozen=True, kw_only=True):
    """The two numbers for the planned list, or why there are none."""

    capacity: Capacity | None = None
    counts: Counts | None = None
    measured: Measured | None = None
    rows_per_day: list[int] = []  # by the warm-up's caps alone
    missing: str = ""
    notes: list[str] = []


def forecast(
    campaign: Campaign,
    settings: Settings,
    made: Plan,
    told: DomainCounts,
    *,
    engaged_first: str | None,
    deadline_s: float,
    schedule: Schedule | None,
) -> tuple[Plan, Forecast]:
    """The plan with what capacity and warm-up add to it, and what to tell."""
    delivery = settings.delivery
    is_direct = delivery.mode == "direct"
    if schedule is not None and not is_direct:
        raise WarmupNeedsDirect(relay=delivery.relay)
    notes: list[str] = []
    counts = _counts(campaign, made, told, notes)
    if counts is not None:
        made = msgspec.structs.replace(made, provider_rows=counts.providers)
    if is_direct:
        budgets = load_budgets(campaign.folder / BUDGETS_FILE)
    else:
        budgets = relay_budgets(delivery)
        counts = Counts(providers={relay_name(delivery): made.rows}, told_by="campaign.toml: one relay takes it all")
    if counts is None:
        if schedule is not None:
            raise WarmupNeedsCounts
        return made, Forecast(
            missing="nothing is known of the list's providers: `engine prepare` notes domains in the list, and"
            " `engine resolve LIST` asks the DNS for them; then plan again",
            notes=notes,
        )
    sources = budgets.sources or (Source("default"),)
    rows_per_day: list[int] = []
    if schedule is not None:
        sources = _young(sources, named=bool(budgets.sources), schedule=schedule)
        warmup = _warmup(schedule, counts, sources)
        made = msgspec.structs.replace(made, warmup=warmup)
        counts = _folded(counts, warmup)
        rows_per_day = lay_out(
            _portions(counts),
            [source.warmup_day for source in sources],
            schedule,
            weights=[source.weight for source in sources],
        )
        notes.append(
            f"each provider's rows go in the order of the list, and `engine prepare` put them by {engaged_first}"
            if engaged_first
            else "rows go in the order of the list; `engine prepare --engaged-first COLUMN` lets the engaged go first"
        )
    found = kept_measure(campaign, settings)
    composer = build_composer(settings, campaign.folder, open_parquet(made.files[0].path).schema_arrow)
    size = sample_bytes(composer, made) if made.rows else None
    ours = OurRate(machines=len(made.partitions), processes=os.cpu_count() or 1)
    if found is not None:
        ours = with_measure(ours, found)
    if not settings.dkim:
        ours = msgspec.structs.replace(ours, signing_s=0.0)
    # A relay is near and answers in milliseconds; a provider is far and thinks. Assumptions both, until measured.
    connect_s, message_s = (CONNECT_S, MESSAGE_S) if is_direct else (RELAY_CONNECT_S, RELAY_MESSAGE_S)
    result = capacity(
        counts.providers,
        budgets,
        ours,
        sources=sources,
        schedule=schedule,
        message_bytes=size or 20_000,
        deadline_s=deadline_s,
        connect_s=connect_s,
        message_s=message_s,
        other_rows=counts.other_rows,
        other_domains=counts.other_domains,
    )
    made = msgspec.structs.replace(made, planned_per_hour=planned_per_hour(result))
    return made, Forecast(capacity=result, counts=counts, measured=found, rows_per_day=rows_per_day, notes=notes)


def _counts(campaign: Campaign, made: Plan, told: DomainCounts, notes: list[str]) -> Counts | None:
    answers, book = kept_answers(campaign.folder), provider_book(campaign.folder)
    if not told.domain_rows and not told.provider_rows and answers:
        # Nobody prepared the list, but the DNS was asked for it: its domains can be counted at the price of a scan.
        files = [file.path for file in made.files]
        if made.rows > COUNTED_ROWS or any("://" in file for file in files):
            notes.append(f"a list of {made.rows:,} rows is not counted here: `engine prepare` notes its domains")
            return None
        try:
            told = counted(files, made.address_column)
        except pl.exceptions.PolarsError as problem:
            notes.append(f"the list's domains cannot be counted: {str(problem).splitlines()[0]}")
            return None
    return by_provider(told, answers, book)


def _young(sources: Sequence[Source], *, named: bool, schedule: Schedule) -> tuple[Source, ...]:
    """The sources with their days; the unnamed one begins, named ones say so themselves."""
    if not named:
        return tuple(msgspec.structs.replace(source, warmup_day=1) for source in sources)
    if all(source.warmup_day is None for source in sources):
        raise NobodyWarmsUp(schedule=schedule.name)
    return tuple(sources)


def _warmup(schedule: Schedule, counts: Counts, sources: Sequence[Source]) -> Warmup:
    rows = max(1, counts.rows)
    shares = {name: count / rows for name, count in counts.providers.items() if count / rows >= NAMED_SHARE}
    other = rows - sum(counts.providers[name] for name in shares)
    return Warmup(
        schedule=schedule.name,
        daily=list(schedule.days),
        hourly=list(schedule.hourly),
        days={source.name: source.warmup_day for source in sources if source.warmup_day is not None},
        shares=shares,
        other_share=other / rows,
        other_rows=other,
    )


def _folded(counts: Counts, warmup: Warmup) -> Counts:
    """The small destinations as one, as `send` caps them."""
    named = {name: rows for name, rows in counts.providers.items() if name in warmup.shares}
    return msgspec.structs.replace(
        counts,
        providers=named,
        other_rows=warmup.other_rows,
        other_domains=counts.other_domains + len(counts.providers) - len(named),
    )


def _portions(counts: Counts) -> Mapping[str, int]:
    return {**counts.providers, "other": counts.other_rows} if counts.other_rows else counts.providers


def tell(found: Forecast, campaign: Campaign) -> None:
    """In words: figures on stdout, talk on stderr."""
    for note in found.notes:
        click.echo(f"note: {note}", err=True)
    if found.capacity is None:
        click.echo(f"capacity: not known: {found.missing}", err=True)
        return
    assert found.counts is not None
    click.echo("")
    click.echo(f"providers: by {found.counts.told_by}", err=True)
    if found.counts.no_mail_rows:
        click.echo(
            f"{found.counts.no_mail_rows:,} rows have a domain that takes no mail: they will be bounced", err=True
        )
    where = "" if campaign.folder == Path("campaign") else f" --campaign {campaign.folder}"
    if found.measured is not None:
        click.echo(measure_line(found.measured), err=True)
    else:
        click.echo(f"our own rate is assumed: `engine capacity --measure{where}` measures it", err=True)
    print_capacity(found.capacity)
    if found.rows_per_day:
        click.echo("")
        click.echo("warm-up, rows a day by its caps alone:")
        for line in day_lines(found.rows_per_day):
            click.echo(line)


def day_lines(rows_per_day: Sequence[int]) -> list[str]:
    """A line per day with what is left behind it; the middle of a long warm-up is left out."""
    lines: list[str] = []
    left = sum(rows_per_day)
    for place, rows in enumerate(rows_per_day):
        left -= rows
        if place < _DAYS_SHOWN or place == len(rows_per_day) - 1:
            lines.append(f"  day {place + 1:>3} {rows:>14,} rows, {left:>14,} left")
        elif place == _DAYS_SHOWN:
            lines.append("  ...")
    return lines
