"""A campaign as the operator sees it: big numbers, providers, machines. Pure: a `Reading` and times go in.

Counts are the sums of what each incarnation told of itself once a second. Rows that a killed sender finished in its
last second are told by nobody's counters; they are `uncounted` here and have their outcome in `merge-logs`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from engine.control.store import Life
from engine.web.reading import Reading
from engine.web.told import Heard, ProviderCounts, limit_kind

KINDS = ("accepted", "bounced", "invalid", "suppressed", "expired", "in_doubt")
_MOST_EVENTS = 50
_MOST_REPLIES = 20


class ProviderView(msgspec.Struct, frozen=True, kw_only=True):
    """One provider, over all machines. Counts since the campaign began; `deferrals` are answers "later", not rows."""

    name: str
    rows: int | None  # of the list, where that is known
    accepted: int
    bounced: int
    deferrals: int
    lost: int
    in_doubt: int
    left: int | None
    connections: int
    allowed: int  # connections that budget and throttle allow now
    waiting: int  # rows ready for it
    per_second: float
    later_share: float  # of the answers of the last minute
    limit: str  # what limits it now, in words
    limit_kind: str  # budget, throttle, suspended, slowed, nothing
    suspended_until_us: int | None
    slowed: dict[str, str]  # the operator's words: connections, per_second
    finish_s: float | None
    planned_per_second: float | None


class MachineView(msgspec.Struct, frozen=True, kw_only=True):
    """One start of a sender, and its lease."""

    incarnation: str
    sender: str
    partition: int | None
    pid: int
    state: str  # sending, silent, ended, superseded
    started_at_us: int
    heard_s: float
    lease_s: float
    processes: int
    connections: int
    in_flight: int
    per_second: float
    reason: str


class ReplyView(msgspec.Struct, frozen=True):
    """An answer that was no 250, as the server said it."""

    provider: str
    text: str
    count: int


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """Everything the page shows, at one moment."""

    key: str  # names the campaign in URLs
    id: str
    at_us: int
    state: str  # unplanned, planned, sending, waiting, paused, stopped, cancelled, finished
    rows: int
    accepted: int
    bounced: int
    invalid: int
    suppressed: int
    expired: int
    in_doubt: int
    uncounted: int
    deferrals: int
    waiting: int
    left: int
    in_flight: int
    ready: int
    parked: int
    per_second: float
    finish_s: float | None
    finish_of: str  # the provider that is last
    next_due_us: int | None
    reason: str
    batches: dict[str, int]
    providers: list[ProviderView]
    machines: list[MachineView]
    replies: list[ReplyView]
    events: list[dict[str, Any]]
    has_report: bool
    capacity_planned_s: float | None


class Rates(msgspec.Struct, frozen=True):
    """What the history says of one provider: accepted a second, and the share of "later" among its answers."""

    per_second: float = 0.0
    later_share: float = 0.0


class Expected(msgspec.Struct, frozen=True):
    """What the plan says: rows by provider, rates that capacity planning promised, and the whole time."""

    rows: dict[str, int] = {}
    per_second: dict[str, float] = {}
    duration_s: float | None = None


def take_snapshot(
    key: str,
    id_: str,
    reading: Reading | None,
    expected: Expected,
    by_provider: Mapping[str, ProviderCounts],
    rates: Callable[[str], Rates],
    *,
    now_us: int,
    has_report: bool,
) -> Snapshot:
    """The campaign now. `by_provider` are the sums of the reading; `rates` tells a provider's rates by its name."""
    record = reading.campaign if reading else None
    incarnations = reading.incarnations if reading else []
    living = [one for one in incarnations if one.is_alive(now_us)]
    counts = _totals(incarnations)
    rows = record.rows if record else 0
    left = _left(reading, sum(counts[kind] for kind in KINDS), now_us) if reading and record else 0
    uncounted = max(0, rows - left - sum(counts[kind] for kind in KINDS))
    slowed = _slowed(reading)
    if len(by_provider) == 1 and not expected.rows:
        # One relay takes all there is.
        name, only = next(iter(by_provider.items()))
        done = only.accepted + only.rejected + only.in_doubt
        expected = msgspec.structs.replace(expected, rows={name: done + left})
    providers = [
        _provider(name, sums_, expected, rates(name), slowed.get(name, {}), now_us)
        for name, sums_ in by_provider.items()
    ]
    providers.sort(key=lambda one: (-(one.rows or 0), -one.accepted, one.name))
    per_second = sum(one.told.per_second for one in living)
    state = _state(reading, living, left)
    finish_s, finish_of = _finish(providers, left, per_second, state in ("sending", "waiting"))
    tallies: Counter[str] = Counter()
    for tally in reading.batches if reading else []:
        tallies[tally.state] += tally.batches
    return Snapshot(
        key=key,
        id=id_,
        at_us=now_us,
        state=state,
        rows=rows,
        **{kind: int(counts[kind]) for kind in KINDS},
        uncounted=uncounted,
        deferrals=sum(one.deferred for one in by_provider.values()),
        waiting=sum(one.told.waiting for one in living),
        left=left,
        in_flight=sum(one.told.in_flight for one in living),
        ready=sum(one.told.ready for one in living),
        parked=sum(one.told.parked for one in living),
        per_second=round(per_second, 1),
        finish_s=finish_s,
        finish_of=finish_of,
        next_due_us=min((due for one in living if (due := one.told.next_due_us) is not None), default=None),
        reason=next((one.told.reason for one in living if one.told.reason), ""),
        batches=dict(tallies),
        providers=providers,
        machines=[_machine(one, now_us) for one in reversed(incarnations)][:200],
        replies=_replies(incarnations),
        events=_events(incarnations),
        has_report=has_report,
        capacity_planned_s=expected.duration_s,
    )


def _totals(incarnations: list[Heard]) -> Counter[str]:
    """Rows by outcome. Doubt is told in whole by the latest of each partition: earlier doubt is in its number."""
    totals: Counter[str] = Counter()
    latest: dict[int | None, Heard] = {}
    for one in incarnations:
        if not one.has_told:
            continue
        latest[one.partition] = one
        for kind in KINDS:
            if kind != "in_doubt":
                totals[kind] += getattr(one.told, kind)
    for one in latest.values():
        totals["in_doubt"] += one.told.in_doubt
    return totals


def _left(reading: Reading, counted: int, now_us: int) -> int:
    """Rows without an outcome: by the latest sender of each partition, or by its batches where nobody sent.

    Where machines take over batches no sender knows what is left of a partition: what is neither counted nor done is.
    """
    if reading.is_shared:
        total = reading.campaign.rows if reading.campaign else 0
        undone_rows = sum(tally.rows for tally in reading.batches if tally.state != "done")
        return max(0, min(undone_rows, total - counted))
    told: dict[int | None, int] = {}
    living: set[int | None] = set()
    for one in reading.incarnations:
        if one.told.left is not None:
            told[one.partition] = one.told.left
            living = living | {one.partition} if one.is_alive(now_us) else living - {one.partition}
    undone: Counter[int] = Counter()
    for tally in reading.batches:
        undone[tally.partition] += tally.rows if tally.state != "done" else 0
    # Of a living sender its own word counts, which is as old as its other counts. Of one that is gone: done batches
    # have nothing left whatever its last word was.
    return sum(
        told[partition] if partition in living else min(told.get(partition, rows), rows)
        for partition, rows in undone.items()
    )


def _slowed(reading: Reading | None) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = {}
    for one in reading.overrides if reading else []:
        scope, _, name = one.scope.partition(":")
        if scope == "provider":
            found.setdefault(name, {})[one.what] = one.value
            found[name]["who"] = one.who
    return found


def _state(reading: Reading | None, living: list[Heard], left: int) -> str:
    if reading is None or reading.campaign is None:
        return "unplanned"
    if reading.campaign.state == "cancelled":
        return "cancelled"
    if all(tally.state == "done" for tally in reading.batches) and not living:
        return "finished"
    if reading.campaign.state == "paused":
        return "paused"
    if living:
        busy = any(one.told.in_flight or one.told.ready for one in living)
        waits = any(one.told.waiting for one in living)
        return "waiting" if waits and not busy else "sending"
    return "stopped" if reading.incarnations else "planned"


def _provider(
    name: str, counts: ProviderCounts, expected: Expected, rates: Rates, slowed: dict[str, str], now_us: int
) -> ProviderView:
    rows = expected.rows.get(name)
    left = None if rows is None else max(0, rows - counts.accepted - counts.rejected - counts.in_doubt)
    finish_s: float | None = None
    if left and rates.per_second > 0:
        finish_s = left / rates.per_second
        if counts.suspended_until_us is not None:
            finish_s += max(0.0, (counts.suspended_until_us - now_us) / 1e6)
    kind = limit_kind(counts.limit)
    limit = counts.limit
    if kind == "budget" and counts.connections < counts.allowed and not counts.waiting:
        kind, limit = "nothing", ""  # it could have more connections and has no rows for them
    return ProviderView(
        name=name,
        rows=rows,
        accepted=counts.accepted,
        bounced=counts.rejected,
        deferrals=counts.deferred,
        lost=counts.lost,
        in_doubt=counts.in_doubt,
        left=left,
        connections=counts.connections,
        allowed=counts.allowed,
        waiting=counts.waiting,
        per_second=round(rates.per_second, 2),
        later_share=round(rates.later_share, 4),
        limit=limit,
        limit_kind=kind,
        suspended_until_us=counts.suspended_until_us,
        slowed=slowed,
        finish_s=None if finish_s is None else round(finish_s, 1),
        planned_per_second=expected.per_second.get(name),
    )


def _finish(providers: list[ProviderView], left: int, per_second: float, is_sending: bool) -> tuple[float | None, str]:
    """When the last row is through: the slowest provider's time, where rows by provider are known; else one sum."""
    if not left or not is_sending:
        return None, ""
    known = [one for one in providers if one.finish_s is not None]
    if known:
        last = max(known, key=lambda one: one.finish_s or 0.0)
        return last.finish_s, last.name
    return (left / per_second, "") if per_second > 0 else (None, "")


def _machine(one: Heard, now_us: int) -> MachineView:
    connections = sum(provider.connections for provider in one.told.providers.values())
    alive = one.is_alive(now_us)
    state = "sending" if alive else {Life.ALIVE: "silent"}.get(one.state, str(one.state))
    return MachineView(
        incarnation=one.id,
        sender=one.sender,
        partition=one.partition,
        pid=one.pid,
        state=state,
        started_at_us=one.started_at_us,
        heard_s=round(max(0, now_us - one.renewed_at_us) / 1e6, 1),
        lease_s=one.lease_us / 1e6,
        processes=one.told.processes if alive else 0,
        connections=connections if alive else 0,
        in_flight=one.told.in_flight if alive else 0,
        per_second=one.told.per_second if alive else 0.0,
        reason=one.told.reason,
    )


def _replies(incarnations: list[Heard]) -> list[ReplyView]:
    found: Counter[tuple[str, str]] = Counter()
    for one in incarnations:
        for provider, text, count in one.told.replies:
            found[provider, text] += count
    return [ReplyView(provider, text, count) for (provider, text), count in found.most_common(_MOST_REPLIES)]


def _events(incarnations: list[Heard]) -> list[dict[str, Any]]:
    """The latest first; `sender` says whose it is."""
    found: list[dict[str, Any]] = []
    for one in incarnations[-20:]:
        found += [{**event, "sender": one.sender} for event in one.told.events]
    found.sort(key=lambda event: -int(event.get("at_us", 0)))
    return found[:_MOST_EVENTS]
