"""Before the first mail: what we can send, what they will accept, and which of the two sets the schedule. Pure.

What they accept is counted provider by provider (`engine.accepting`). Our own rate is processes times what one
composes and signs, and the bandwidth. All arithmetic is told beside its result, so that the operator can check it.

What is assumed about time (connect_s, message_s) is an assumption until a rehearsal or a campaign has measured it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec

from engine.accepting import CONNECT_S, MESSAGE_S, OTHER, Accepts, Bind, Terms, accepts, accepts_tail
from engine.pace.budgets import Budgets, Source
from engine.warmup import DAY_S, Schedule, WarmupInTheFuture

__all__ = [
    "CONNECT_S", "DAY_S", "MESSAGE_S", "OTHER", "Accepts", "Bind", "Capacity", "OurRate", "capacity",
    "planned_per_hour",
]  # fmt: skip


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
    terms = Terms(
        budgets=budgets,
        sources=sources,
        schedule=schedule,
        deadline_s=deadline_s,
        connect_s=connect_s,
        message_s=message_s,
    )
    rows = sum(provider_rows.values()) + other_rows
    told = [
        accepts(name, count, count / rows, terms)
        for name, count in sorted(provider_rows.items(), key=lambda item: (-item[1], item[0]))
        if count > 0
    ]
    if other_rows > 0:
        told.append(accepts_tail(other_rows, max(1, other_domains), other_rows / rows, terms))
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
