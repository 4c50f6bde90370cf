"""One provider's side of a capacity plan: what it takes from our sources, day by day, and when it has all. Pure.

A connection that carries k messages takes connect_s + k * message_s, so that c of them carry
c * k / (connect_s + k * message_s) messages a second; a budget's rates and a day's caps (its own, or the warm-up's)
lower that. Connections are not there at once: a budget of so many a minute lets them open one after the other, and the
first messages wait for that (`connections_take_s`). Rows are drawn to sources by weight, as `engine send` draws them:
a young source's rows are sent by it and by no other, so the slowest source says when the provider is done.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from engine.pace.budgets import Budget, BudgetFile, Budgets, Section, Source
from engine.warmup import DAY_S, Schedule

CONNECT_S = 0.6  # TCP, TLS 1.3 and greeting over a continent; ../facts: provider ceilings
MESSAGE_S = 0.5  # a transaction and the provider's thinking
MOST_DAYS = 3650
OTHER = "other"


class Bind(msgspec.Struct, frozen=True):
    """One limit on one provider: messages a second over all sources, and how it comes about."""

    name: str
    per_s: float
    arithmetic: str


class Accepts(msgspec.Struct, frozen=True, kw_only=True):
    """One provider's side."""

    provider: str
    rows: int
    sources: int
    rate_per_s: float
    binding: str
    limits: tuple[Bind, ...]
    eta_s: float | None  # None: not within ten years
    days: int | None
    today: int  # rows accepted within the first day
    spills: int  # the rest
    by_deadline: int  # rows accepted by the deadline
    sources_needed: int | None  # warm sources with which the deadline holds; None: no number of them


class Terms(msgspec.Struct, frozen=True, kw_only=True):
    """What holds for every provider of a list."""

    budgets: Budgets
    sources: tuple[Source, ...]
    schedule: Schedule | None = None
    deadline_s: float = DAY_S
    connect_s: float = CONNECT_S
    message_s: float = MESSAGE_S


class _Course(msgspec.Struct, frozen=True):
    """What one source (or several alike) gets through."""

    eta_s: float | None
    days: int | None
    today: int
    by_deadline: int
    capped: str = ""  # by which cap of a day


def accepts(provider: str, rows: int, share: float, terms: Terms) -> Accepts:
    """A provider's side, for so many rows, which are this share of the list."""
    is_shared = terms.budgets.of(provider).scope == "campaign"
    sources = _together(terms.sources) if is_shared else _in_use(terms.sources)
    kinds = _kinds(provider, sources, terms.budgets)
    limits, rate = _limits(kinds, len(sources), terms)
    courses = _courses(rows, share, kinds, terms)
    slowest = max(courses, key=lambda course: math.inf if course.eta_s is None else course.eta_s)
    by_deadline, today = (min(rows, sum(getattr(c, name) for c in courses)) for name in ("by_deadline", "today"))
    alone = _course(rows, share, Source("warm"), terms.budgets.of(provider), terms).by_deadline
    needed = None if is_shared or not alone else math.ceil(rows / alone)
    if is_shared and by_deadline >= rows:
        needed = 1
    return Accepts(
        provider=provider,
        rows=rows,
        sources=len(sources),
        rate_per_s=rate,
        binding=slowest.capped or min(limits, key=lambda bind: bind.per_s).name,
        limits=tuple(limits),
        eta_s=slowest.eta_s,
        days=slowest.days,
        today=today,
        spills=rows - today,
        by_deadline=by_deadline,
        sources_needed=needed,
    )


def accepts_tail(rows: int, domains: int, share: float, terms: Terms) -> Accepts:
    """So many small destinations, each a provider of its own, with so many rows in all."""
    cold = msgspec.structs.replace(terms, schedule=None)
    one = accepts(OTHER, -(-rows // domains), share, cold)
    told = msgspec.structs.replace(
        one,
        rows=rows,
        rate_per_s=one.rate_per_s * domains,
        today=min(rows, one.today * domains),
        spills=max(0, rows - one.today * domains),
        by_deadline=min(rows, one.by_deadline * domains),
        limits=tuple(
            Bind(bind.name, bind.per_s * domains, f"{bind.arithmetic}, {domains:,} destinations") for bind in one.limits
        ),
    )
    if terms.schedule is None or all(source.warmup_day is None for source in terms.sources):
        return told
    # Under a warm-up a day's cap is the source's: all small destinations have one part of it together.
    wide = Budgets(BudgetFile(default=Section(connections=10**9, messages_per_connection=1)), BudgetFile())
    terms = msgspec.structs.replace(terms, budgets=wide, connect_s=0.0)
    courses = _courses(rows, share, _kinds(OTHER, _in_use(terms.sources), wide), terms)
    slowest = max(courses, key=lambda course: math.inf if course.eta_s is None else course.eta_s)
    today = min(rows, sum(course.today for course in courses))
    return msgspec.structs.replace(
        told,
        binding=slowest.capped or told.binding,
        eta_s=None if slowest.eta_s is None else max(slowest.eta_s, told.eta_s or 0.0),
        days=slowest.days,
        today=today,
        spills=rows - today,
        by_deadline=min(rows, sum(course.by_deadline for course in courses)),
    )


def connections_take_s(
    rows: int, connections: int, per_connection: int, connect_s: float, message_s: float, gap_s: float
) -> float:
    """Seconds until `rows` are answered by connections that open one after the other, `gap_s` apart.

    The first j of them, each open from (i - 1) * gap_s on, share the rows so that all end together; later ones come
    too late to help. Each reconnects after `per_connection` messages. At the end some are within their last message.
    """
    best = math.inf
    for used in range(1, min(connections, rows) + 1):
        if (used - 1) * gap_s + connect_s >= best:
            break
        each = rows / used
        opened = math.ceil(each / per_connection)
        best = min(
            best,
            gap_s * (used - 1) / 2 + opened * connect_s + each * message_s + (message_s / 2 if used > 1 else 0.0),
        )
    return best if rows > 0 else 0.0


# Sources.


def _in_use(sources: Sequence[Source]) -> tuple[Source, ...]:
    """Weight 0 keeps a source out of use; if all are, that cannot be meant (`work.routing` reads it so)."""
    return tuple(source for source in sources if source.weight) or tuple(
        msgspec.structs.replace(source, weight=1) for source in sources
    )


def _together(sources: Sequence[Source]) -> tuple[Source, ...]:
    """One budget over all sources is as young as the youngest of them (`work.warming` reads it so)."""
    young = [source.warmup_day for source in sources if source.warmup_day is not None]
    return (msgspec.structs.replace(sources[0], warmup_day=min(young, default=None), weight=1),)


class _Kind(msgspec.Struct, frozen=True):
    """So many sources alike: with one budget, of one age and weight."""

    budget: Budget
    source: Source
    count: int


def _kinds(provider: str, sources: Sequence[Source], budgets: Budgets) -> list[_Kind]:
    """The sources, those alike as one: there are many providers, and they are counted once for each kind."""
    counts: dict[tuple[str | None, int | None, int], int] = {}
    first: dict[tuple[str | None, int | None, int], Source] = {}
    for source in sources:
        own = source.name if budgets.has_own(provider, source.name) else None
        kind = (own, source.warmup_day, source.weight)
        first.setdefault(kind, source)
        counts[kind] = counts.get(kind, 0) + 1
    return [_Kind(budgets.of(provider, kind[0]), first[kind], count) for kind, count in counts.items()]


def _courses(rows: int, share: float, kinds: Sequence[_Kind], terms: Terms) -> list[_Course]:
    """One course for each kind of source, with the rows that weights draw to it."""
    total = sum(kind.source.weight * kind.count for kind in kinds)
    courses: list[_Course] = []
    weight, given = 0, 0
    for kind in kinds:
        weight += kind.source.weight * kind.count
        mine = rows * weight // total - given
        given += mine
        one = _course(-(-mine // kind.count), share, kind.source, kind.budget, terms)
        today, by_deadline = min(mine, one.today * kind.count), min(mine, one.by_deadline * kind.count)
        courses.append(msgspec.structs.replace(one, today=today, by_deadline=by_deadline))
    return courses


# Limits and days.


def _speeds(budget: Budget, connect_s: float, message_s: float) -> dict[str, tuple[float, str]]:
    """Each limit of one source in messages a second, and its arithmetic."""
    k, c = budget.messages_per_connection, budget.connections
    carried = c * k / (connect_s + k * message_s)
    words = f"{c} connections x {k} messages / ({connect_s:g} s + {k} x {message_s:g} s) = {carried:.1f}/s"
    found = {"connections": (carried, words)}
    if (opened := budget.connections_per_minute) is not None:
        words = f"{opened} connections a minute x {k} messages / 60 = {opened * k / 60:.1f}/s"
        found["connections a minute"] = (opened * k / 60, words)
    for name, count, per_s in (
        ("messages a minute", budget.messages_per_minute, 60),
        ("messages an hour", budget.messages_per_hour, 3600),
        ("messages a day", budget.messages_per_day, 86_400),
    ):
        if count is not None:
            found[name] = (count / per_s, f"{count:,} {name} = {count / per_s:.2f}/s")
    return found


def _fluid(budget: Budget, terms: Terms) -> float:
    """Messages a second of one source while no day's cap is used up."""
    speeds = _speeds(budget, terms.connect_s, terms.message_s)
    return min(per_s for name, (per_s, _) in speeds.items() if name != "messages a day")


def _limits(kinds: Sequence[_Kind], sources: int, terms: Terms) -> tuple[list[Bind], float]:
    """Each limit summed over the sources, and the rate when each source keeps its own tightest."""
    totals: dict[str, float] = {}
    words: dict[str, str] = {}
    rate = 0.0
    for kind in kinds:
        rate += _fluid(kind.budget, terms) * kind.count
        for name, (per_s, arithmetic) in _speeds(kind.budget, terms.connect_s, terms.message_s).items():
            totals[name] = totals.get(name, 0.0) + per_s * kind.count
            words[name] = arithmetic
    many = f", {sources} sources" if sources > 1 else ""
    return [Bind(name, totals[name], words[name] + many) for name in totals], rate


class _Day(msgspec.Struct, frozen=True):
    """What one source may do on one day."""

    most: int
    per_s: float
    name: str = ""  # of the cap that holds, where one does
    is_young: bool = False


def _day(number: int, share: float, source: Source, budget: Budget, fluid: float, schedule: Schedule | None) -> _Day:
    most, per_s, name, is_young = fluid * DAY_S, fluid, "", False
    if (daily := budget.messages_per_day) is not None:
        # Spent evenly over a part of the day, as the ledger does it.
        spread = budget.limit().rates[-1].spread_s or DAY_S
        if daily / spread < per_s:
            most, per_s, name = daily, daily / spread, "messages a day"
    if schedule is not None and source.warmup_day is not None:
        caps = schedule.caps(source.warmup_day + number, share)
        if caps.daily is not None and caps.hourly is not None:
            is_young = True
            if caps.daily < most:
                most, name = caps.daily, f"warm-up day {source.warmup_day}"
            per_s = min(per_s, caps.per_s)
    return _Day(int(most), per_s, name, is_young)


def _course(rows: int, share: float, source: Source, budget: Budget, terms: Terms) -> _Course:
    """Day by day, for a warm-up's caps grow; where nothing grows any more the rest is division."""
    if rows <= 0:
        return _Course(0.0, 1, 0, 0)
    fluid = _fluid(budget, terms)
    first_s = terms.connect_s + terms.message_s
    left, today, by_deadline, capped = rows, 0, 0, ""
    for number in range(MOST_DAYS):
        day = _day(number, share, source, budget, fluid, terms.schedule)
        sent = min(left, day.most)
        if number == 0:
            today = sent
            capped = day.name if sent < rows or day.per_s < fluid else ""
        before_s = terms.deadline_s - number * DAY_S
        if before_s > 0:
            by_deadline += min(sent, int(day.per_s * min(before_s, DAY_S)))
        left -= sent
        if left <= 0:
            eta_s = number * DAY_S + max(0, sent - 1) / day.per_s + first_s
            if number == 0:
                gap_s = 60 / budget.connections_per_minute if budget.connections_per_minute is not None else 0.0
                k, c = budget.messages_per_connection, budget.connections
                eta_s = max(eta_s, connections_take_s(rows, c, k, terms.connect_s, terms.message_s, gap_s))
            return _Course(eta_s, number + 1, today, by_deadline, capped)
        if day.is_young:
            continue
        if not day.most:
            break
        whole = math.ceil(left / day.most)
        last = left - (whole - 1) * day.most
        eta_s = (number + whole) * DAY_S + last / day.per_s + first_s
        later_s = max(0.0, terms.deadline_s - (number + 1) * DAY_S)
        full, part_s = divmod(later_s, DAY_S)
        by_deadline += min(left, int(full) * day.most + min(day.most, int(day.per_s * part_s)))
        if eta_s < MOST_DAYS * DAY_S:
            return _Course(eta_s, number + 1 + whole, today, by_deadline, capped)
        break
    return _Course(None, None, today, by_deadline, capped)
