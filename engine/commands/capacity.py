"""`engine capacity`: what we can send, what they will accept, and which of the two sets the schedule."""

from __future__ import annotations

import os

import click
import msgspec
import pyarrow.parquet as pq

from engine.campaign import Campaign
from engine.capacity import CONNECT_S, MESSAGE_S, OTHER, Accepts, Capacity, OurRate, capacity
from engine.commands.common import campaign_option, moment, span
from engine.commands.measure import Measured, kept_measure, measure
from engine.config import SETTINGS_FILE, DeliveryTable, Duration
from engine.counts import Counts, DomainCounts, by_provider, kept_answers, of_metas, provider_book
from engine.errors import EngineError, Exit
from engine.pace.budgets import BUDGETS_FILE, BudgetFile, Budgets, Section, Source, load_budgets
from engine.planner import expand
from engine.smtp.destination import relay_destination
from engine.warmup import schedule_named
from formats import listmeta

_SHOWN = 12
RELAY_CONNECT_S = 0.05
RELAY_MESSAGE_S = 0.02


class NoCounts(EngineError):
    """{what} says nothing about providers or domains."""

    exit_code = Exit.LIST
    hint = (
        "`engine prepare` notes the counts in the list (after `engine resolve`: by provider); or give them:"
        " --rows 1000000 --share google=45."
    )


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
@click.option(
    "--measure",
    "measured",
    is_flag=True,
    help="Compose, sign and send rows of the planned list to a sink here; kept for `plan`.",
)
@click.option("--messages", type=click.IntRange(1), default=2000, show_default=True, help="So many, with --measure.")
@click.option("--sources", type=click.IntRange(1), help="So many addresses in place of those in budgets.toml.")
@click.option("--warmup-day", type=click.IntRange(1), help="They are on this day of a warm-up; 1 is cold.")
@click.option("--schedule", "schedule_name", default="sparkpost", show_default=True, help="The warm-up's caps.")
@click.option("--connect-s", type=float, help="To open a connection.  [default: 0.6, to a relay 0.05]")
@click.option("--message-s", type=float, help="A message on an open connection.  [default: 0.5, to a relay 0.02]")
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
    measured: bool,
    messages: int,
    sources: int | None,
    warmup_day: int | None,
    schedule_name: str,
    connect_s: float | None,
    message_s: float | None,
    show_all: bool,
    as_json: bool,
) -> None:
    """Say whether a list can be sent by the deadline, what limits it, and what would make it possible.

    \b
    engine capacity list.parquet --deadline 24h
    engine capacity --measure
    engine capacity --rows 100000000 --share google=45 --share yahoo=12 --machines 5 --sources 20
    """
    deadline_s = parse_deadline(deadline)
    budgets = load_budgets(campaign.folder / BUDGETS_FILE)
    default_connect_s, default_message_s = CONNECT_S, MESSAGE_S
    if rows is not None:
        counts = _of_shares(rows, shares, domains)
    elif not lists and (delivery := campaign.settings().delivery).mode == "relay":
        budgets = relay_budgets(delivery)
        counts = Counts(providers={relay_name(delivery): campaign.plan().rows}, told_by="campaign.toml: a relay")
        default_connect_s, default_message_s = RELAY_CONNECT_S, RELAY_MESSAGE_S
    else:
        counts = _of_lists(lists, campaign)
    given = budgets.sources
    if sources is not None:
        given = tuple(Source(f"source-{number + 1}", warmup_day=warmup_day) for number in range(sources))
    elif warmup_day is not None:
        given = tuple(
            msgspec.structs.replace(source, warmup_day=warmup_day) for source in given or (Source("default"),)
        )
    ours = OurRate(machines=machines, processes=processes, gigabits=gigabits)
    if measured:
        found: Measured | None = measure(campaign, campaign.settings(), campaign.plan(), messages)
    else:
        has_settings = (campaign.folder / SETTINGS_FILE).exists()
        found = kept_measure(campaign, campaign.settings()) if has_settings else None
    if found is not None:
        message_bytes = message_bytes or found.message_bytes
        ours = with_measure(ours, found)
    told = capacity(
        counts.providers,
        budgets,
        ours,
        sources=given,
        schedule=schedule_named(schedule_name),
        message_bytes=message_bytes or 20_000,
        deadline_s=deadline_s,
        connect_s=default_connect_s if connect_s is None else connect_s,
        message_s=default_message_s if message_s is None else message_s,
        other_rows=counts.other_rows,
        other_domains=counts.other_domains,
    )
    if as_json:
        click.echo(msgspec.json.encode({**msgspec.to_builtins(told), "counts": counts.told_by, "measured": found}))
    else:
        click.echo(f"providers: by {counts.told_by}", err=True)
        if found is not None:
            click.echo(measure_line(found), err=True)
        print_capacity(told, show_all=show_all)


def parse_deadline(text: str) -> float:
    """Seconds; a usage error where it is none or nothing."""
    try:
        deadline_s = Duration.parse(text).seconds
    except ValueError as problem:
        raise click.BadParameter(str(problem), param_hint="--deadline") from None
    if not deadline_s:
        raise click.BadParameter("a deadline of nothing cannot be met", param_hint="--deadline")
    return deadline_s


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
    return Counts(providers=providers, other_rows=rest, other_domains=domains, told_by="--share")


def _of_lists(lists: tuple[str, ...], campaign: Campaign) -> Counts:
    book, answers = provider_book(campaign.folder), kept_answers(campaign.folder)
    if lists:
        metas = []
        for name in expand(lists, campaign.folder):
            meta = listmeta.of_metadata(pq.read_metadata(name).metadata)
            if meta is None:
                raise NoCounts(what=name)
            metas.append(meta)
        told, what = of_metas(metas), ", ".join(lists)
    else:
        plan = campaign.plan()
        told = DomainCounts(rows=plan.rows, domain_rows=plan.domain_rows, provider_rows=plan.provider_rows)
        what = "the planned list"
    counts = by_provider(told, answers, book)
    if counts is None:
        raise NoCounts(what=what)
    return counts


def with_measure(ours: OurRate, found: Measured) -> OurRate:
    """Our rate as it was measured; composing includes the signatures."""
    return msgspec.structs.replace(ours, per_process=found.per_process, measured=True)


def measure_line(found: Measured) -> str:
    """What was measured, in words."""
    return (
        f"measured here at {moment(found.at_us)}: {found.messages:,} messages of {found.message_bytes:,} bytes,"
        f" {found.signatures} signature(s) each, {'over TLS' if found.tls else 'without TLS'}:"
        f" {found.per_process:,.0f}/s a core sent, {found.composing_per_s:,.0f}/s composed and signed"
    )


def relay_budgets(delivery: DeliveryTable) -> Budgets:
    """A relay is one provider with the limits of [delivery], whatever the recipients' providers are."""
    per_minute = None
    if delivery.messages_per_second is not None:
        per_minute = max(1, int(delivery.messages_per_second * 60))
    section = Section(
        connections=delivery.connections,
        messages_per_connection=delivery.messages_per_connection,
        messages_per_minute=per_minute,
        scope="campaign",
    )
    return Budgets(BudgetFile(default=section), BudgetFile())


def relay_name(delivery: DeliveryTable) -> str:
    """The relay as logs and reports call it."""
    if delivery.relay.startswith("sink:"):
        return "sink"
    plain = msgspec.structs.replace(delivery, username=None, password_env=None, password_file=None, tls_ca_file=None)
    return relay_destination(plain, {}).key


def print_capacity(told: Capacity, *, show_all: bool = False) -> None:
    """The arithmetic, a line per provider, and the verdict, on stdout."""
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
