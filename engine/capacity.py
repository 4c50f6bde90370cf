"""Before the first mail: what we can send, what they will accept, and which of the two sets the schedule. Pure.

Per provider and source address, a connection that carries k messages takes connect_s + k * message_s, so that c of
them carry c * k / (connect_s + k * message_s) messages a second; a budget's rates and a day's caps (its own, or the
warm-up's) lower that. Days are counted one by one, for a warm-up's caps grow. Our own rate is processes times what one
composes and signs, and the bandwidth. All arithmetic is told beside its result, so that the operator can check it.

What is assumed about time (connect_s, message_s) is an assumption until a rehearsal or a campaign has measured it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec

from engine.pace.budgets import Budget, BudgetFile, Budgets, Section, Source
from engine.warmup import Schedule, WarmupInTheFuture

DAY_S = 86_400.0
CONNECT_S = 0.6  # TCP, TLS 1.3 and greeting over a continent; ../facts: provider ceilings
MESSAGE_S = 0.5  # a transaction and the provider's thinking
MOST_DAYS = 3650
OTHER = "other"


class OurRate(msgspec.Struct, frozen=True, kw_only=True):
    """What one process does and how many there are. Messages a second."""

    per_process: float = 500.0  # an assumption: signing alone allows some 1300 a core; `--measure` tells the truth
    machines: int = 1
    processes: int = 1
    gigabits: float = 1.0  # a machine's line
    measured: bool = False
    signing_s: float = 1 / 1300  # one RSA-2048 signature on one core

    @property
    def per_machine(self) -> float:
        return self.per_process * self.processes


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


class Capacity(msgspec.Struct, frozen=True, kw_only=True):
    """Both numbers and what follows."""

    rows: int
    message_bytes: int
    deadline_s: float
    ours_per_s: float
    ours_binding: str
    ours_eta_s: float
    theirs_eta_s: float | None
    eta_s: float | None
    binding: str
    is_possible: bool
    total_bytes: int
    bytes_per_s: float  # to meet the deadline
    needed_per_s: float
    needed_per_machine: float
    signing_core_s: float
    providers: tuple[Accepts, ...]
    remedies: tuple[str, ...]
    arithmetic: tuple[str, ...]


def planned_per_hour(told: Capacity) -> dict[str, float]:
    """Messages an hour that each provider was planned to take, over the time it was planned to need."""
    ours = told.ours_per_s
    return {
        each.provider: round(3600 * each.rows / max(each.eta_s, each.rows / ours, 1.0), 1)
        for each in told.providers
        if each.eta_s is not None and ours > 0
    }


def capacity(
    provider_rows: Mapping[str, int],
    budgets: Budgets,
    ours: OurRate,
    *,
    sources: Sequence[Source] | None = None,
    schedule: Schedule | None = None,
    message_bytes: int = 20_000,
    deadline_s: float = DAY_S,
    connect_s: float = CONNECT_S,
    message_s: float = MESSAGE_S,
    other_rows: int = 0,
    other_domains: int = 0,
) -> Capacity:
    """The two numbers for a list with these rows per provider. Sources on a warm-up day need a schedule.

    `other_rows` lie at `other_domains` small destinations, each of which is a provider of its own.
    """
    sources = tuple(sources if sources is not None else budgets.sources) or (Source("default"),)
    for source in sources:
        if source.warmup_day is not None and source.warmup_day < 1:
            raise WarmupInTheFuture(source=source.name, day=source.warmup_day)
    rows = sum(provider_rows.values()) + other_rows
    told = [
        _accepts(name, count, rows, budgets, sources, schedule, deadline_s, connect_s, message_s)
        for name, count in sorted(provider_rows.items(), key=lambda item: (-item[1], item[0]))
        if count > 0
    ]
    if other_rows > 0:
        many = max(1, other_domains)
        one = _accepts(OTHER, -(-other_rows // many), rows, budgets, sources, None, deadline_s, connect_s, message_s)
        one = _times(one, other_rows, many)
        if schedule is not None and any(source.warmup_day is not None for source in sources):
            one = _warming_tail(one, other_rows / rows, sources, schedule, deadline_s)
        told.append(one)
    by_line = ours.gigabits * 1e9 / 8 / max(1, message_bytes) * ours.machines
    by_cores = ours.per_machine * ours.machines
    ours_per_s = min(by_line, by_cores)
    ours_eta = rows / ours_per_s if ours_per_s else math.inf
    theirs = (
        None if any(each.eta_s is None for each in told) else max((each.eta_s or 0.0 for each in told), default=0.0)
    )
    eta = None if theirs is None else max(theirs, ours_eta)
    slowest = max(told, key=lambda each: math.inf if each.eta_s is None else each.eta_s, default=None)
    if slowest is None:
        binding = "nothing to send"
    elif theirs is not None and ours_eta > theirs:
        binding = "our own rate"
    else:
        binding = f"{slowest.provider}: {slowest.binding}"
    needed = rows / deadline_s
    possible = eta is not None and eta <= deadline_s
    total = rows * message_bytes
    return Capacity(
        rows=rows,
        message_bytes=message_bytes,
        deadline_s=deadline_s,
        ours_per_s=ours_per_s,
        ours_binding="the line" if by_line < by_cores else "the processes",
        ours_eta_s=ours_eta,
        theirs_eta_s=theirs,
        eta_s=eta,
        binding=binding,
        is_possible=possible,
        total_bytes=total,
        bytes_per_s=total / deadline_s,
        needed_per_s=needed,
        needed_per_machine=needed / ours.machines,
        signing_core_s=rows * ours.signing_s,
        providers=tuple(told),
        remedies=() if possible else _remedies(told, sources, ours_eta, ours_per_s, needed, deadline_s),
        arithmetic=_arithmetic(rows, message_bytes, deadline_s, ours, ours_per_s, by_line, by_cores),
    )


def _accepts(
    provider: str,
    rows: int,
    all_rows: int,
    budgets: Budgets,
    sources: Sequence[Source],
    schedule: Schedule | None,
    deadline_s: float,
    connect_s: float,
    message_s: float,
) -> Accepts:
    share = rows / all_rows
    shared = budgets.of(provider).scope == "campaign"
    counted = sources[:1] if shared else sources
    limits, rate = _limits(provider, counted, budgets, connect_s, message_s)
    eta, days, today, by_deadline, capped = _days(rows, share, counted, budgets, provider, schedule, rate, deadline_s)
    binding = min(limits, key=lambda bind: bind.per_s).name
    if capped:
        binding = capped
    warm = [Source("warm")]
    warm_rate = _limits(provider, warm, budgets, connect_s, message_s)[1]
    alone = _days(rows, share, warm, budgets, provider, None, warm_rate, deadline_s)[3]
    needed = None if shared or not alone else math.ceil(rows / alone)
    if shared and by_deadline >= rows:
        needed = 1
    return Accepts(
        provider=provider,
        rows=rows,
        sources=len(counted),
        rate_per_s=rate,
        binding=binding,
        limits=tuple(limits),
        eta_s=eta,
        days=days,
        today=today,
        spills=rows - today,
        by_deadline=by_deadline,
        sources_needed=needed,
    )


def _budget(budgets: Budgets, provider: str, source: Source) -> Budget:
    # A source that the file does not name has no sections of its own; asked for as nobody, it is resolved once.
    is_named = any(source.name == named.name for named in budgets.sources)
    return budgets.of(provider, source.name if is_named else None)


def _times(one: Accepts, rows: int, domains: int) -> Accepts:
    """So many destinations like this one, with so many rows in all."""
    return msgspec.structs.replace(
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


def _warming_tail(
    one: Accepts, share: float, sources: Sequence[Source], schedule: Schedule, deadline_s: float
) -> Accepts:
    """The tail under a warm-up: a day's cap is the source's, so all small destinations have one part of it together."""
    own = one.rate_per_s
    budgets = Budgets(BudgetFile(default=Section(connections=1, messages_per_connection=1)), BudgetFile())
    eta, days, today, by_deadline, capped = _days(one.rows, share, sources, budgets, OTHER, schedule, own, deadline_s)
    return msgspec.structs.replace(
        one,
        binding=capped or one.binding,
        eta_s=None if eta is None else max(eta, one.eta_s or 0.0),
        days=days,
        today=today,
        spills=one.rows - today,
        by_deadline=by_deadline,
    )


def _limits(
    provider: str, sources: Sequence[Source], budgets: Budgets, connect_s: float, message_s: float
) -> tuple[list[Bind], float]:
    """Each limit summed over the sources, and the rate when each source keeps its own tightest."""
    totals: dict[str, float] = {}
    words: dict[str, str] = {}
    rate = 0.0
    for source in sources:
        budget = _budget(budgets, provider, source)
        k, c = budget.messages_per_connection, budget.connections
        each = {"connections": c * k / (connect_s + k * message_s)}
        words["connections"] = (
            f"{c} connections x {k} messages / ({connect_s:g} s + {k} x {message_s:g} s) = {each['connections']:.1f}/s"
        )
        if budget.connections_per_minute is not None:
            each["connections a minute"] = budget.connections_per_minute * k / 60
            words["connections a minute"] = (
                f"{budget.connections_per_minute} connections a minute x {k} messages / 60"
                f" = {each['connections a minute']:.1f}/s"
            )
        for name, count, per_s in (
            ("messages a minute", budget.messages_per_minute, 60),
            ("messages an hour", budget.messages_per_hour, 3600),
            ("messages a day", budget.messages_per_day, 86_400),
        ):
            if count is not None:
                each[name] = count / per_s
                words[name] = f"{count:,} {name} = {each[name]:.2f}/s"
        # A day's cap does not slow the hours before it is used up.
        rate += min(value for name, value in each.items() if name != "messages a day")
        for name, value in each.items():
            totals[name] = totals.get(name, 0.0) + value
    many = f", {len(sources)} sources" if len(sources) > 1 else ""
    return [Bind(name, totals[name], words[name] + many) for name in totals], rate


def _days(
    rows: int,
    share: float,
    sources: Sequence[Source],
    budgets: Budgets,
    provider: str,
    schedule: Schedule | None,
    rate: float,
    deadline_s: float,
) -> tuple[float | None, int | None, int, int, str]:
    """(when all are accepted, days begun, accepted on the first, accepted by the deadline, the cap that binds)."""
    left, today, by_deadline = rows, 0, 0
    capped = ""
    per_source = rate / len(sources)
    # Sources on the same day with the same cap are counted once and multiplied.
    alike: dict[tuple[int | None, int | None], int] = {}
    for source in sources:
        kind = (_budget(budgets, provider, source).messages_per_day, source.warmup_day)
        alike[kind] = alike.get(kind, 0) + 1
    for day in range(MOST_DAYS):
        allowed, slowest, name = 0, 0.0, ""
        warming = False
        for (daily, began), many in alike.items():
            cap = per_source * DAY_S
            hourly = per_source
            if daily is not None and daily < cap:
                cap, name = daily, "messages a day"
            if schedule is not None and began is not None:
                caps = schedule.caps(began + day, share)
                if caps.daily is not None and caps.hourly is not None:
                    warming = True
                    if caps.daily < cap:
                        cap, name = caps.daily, f"warm-up day {began}"
                    hourly = min(hourly, caps.hourly / 3600)
            allowed += many * int(min(cap, hourly * DAY_S))
            slowest = max(slowest, int(min(cap, hourly * DAY_S)) / hourly if hourly else 0.0)
        sent = min(left, allowed)
        if day == 0:
            today = sent
            capped = name if sent < rows else ""
        speed = allowed / slowest if slowest else 0.0
        before = deadline_s - day * DAY_S
        if before > 0:
            by_deadline += min(sent, int(speed * min(before, DAY_S)) if before < DAY_S else sent)
        left -= sent
        if left <= 0:
            return day * DAY_S + (sent / speed if speed else 0.0), day + 1, today, min(by_deadline, rows), capped
        if not warming and allowed:
            # Nothing changes any more: the rest is division.
            whole = math.ceil(left / allowed)
            last = left - (whole - 1) * allowed
            eta = (day + whole) * DAY_S + last / speed
            by_deadline += max(0, min(left, int(allowed * max(0.0, deadline_s / DAY_S - day - 1))))
            return (eta, day + 1 + whole, today, by_deadline, capped) if eta < MOST_DAYS * DAY_S else (
                None, None, today, by_deadline, capped
            )  # fmt: skip
        if not warming:
            break
    return None, None, today, by_deadline, capped


def _remedies(
    told: Sequence[Accepts],
    sources: Sequence[Source],
    ours_eta: float,
    ours_per_s: float,
    needed: float,
    deadline_s: float,
) -> tuple[str, ...]:
    out: list[str] = []
    late = [each for each in told if each.eta_s is None or each.eta_s > deadline_s]
    warming = any(source.warmup_day is not None for source in sources)
    for each in late[:10]:
        if each.sources_needed is None:
            out.append(f"{each.provider}: no number of sources helps: {each.binding} holds for all of them together")
        else:
            short = each.sources_needed - each.sources
            what = f"{each.sources_needed} warm sources in place of {each.sources}" if short > 0 else "warm sources"
            out.append(f"{each.provider}: {what} would do; {each.spills:,} rows spill over the first day")
    if len(late) > 10:
        out.append(f"and {len(late) - 10} more providers")
    if warming and late:
        out.append(
            "warm sources: start the warm-up earlier, or spread the list over its days (engaged recipients first)"
        )
    if ours_eta > deadline_s:
        out.append(f"our own side: {needed / ours_per_s:.1f} times the processes or machines")
    if late:
        slowest = max((each.eta_s or math.inf) for each in late)
        if slowest < math.inf:
            out.append(f"or a deadline of {math.ceil(slowest / 3600):,} h ({slowest / DAY_S:.1f} days)")
    return tuple(out)


def _arithmetic(
    rows: int, message_bytes: int, deadline_s: float, ours: OurRate, ours_per_s: float, by_line: float, by_cores: float
) -> tuple[str, ...]:
    needed = rows / deadline_s
    total = rows * message_bytes
    how = "measured here" if ours.measured else "assumed"
    return (
        f"{rows:,} rows / {deadline_s / 3600:g} h = {needed:,.0f}/s, / {ours.machines} machines"
        f" = {needed / ours.machines:,.0f}/s each",
        f"{rows:,} x {message_bytes:,} bytes = {total / 1e12:,.2f} TB, in {deadline_s / 3600:g} h"
        f" {total / deadline_s / 1e6:,.1f} MB/s",
        f"our processes: {ours.per_process:,.0f}/s ({how}) x {ours.processes} x {ours.machines} machines"
        f" = {by_cores:,.0f}/s",
        f"our lines: {ours.gigabits:g} Gbit/s / 8 / {message_bytes:,} bytes x {ours.machines} = {by_line:,.0f}/s",
        f"we can send {ours_per_s:,.0f}/s",
        f"signing: {rows:,} x {ours.signing_s * 1000:.2f} ms = {rows * ours.signing_s / 3600:,.1f} core hours of"
        f" {ours.machines * ours.processes * deadline_s / 3600:,.0f}",
    )
