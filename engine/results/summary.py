"""What a campaign came to, in numbers small enough to read: the content of `summary.json`, of the page and the table.

Pure over what was merged. Everything that grows with the campaign is cut to its largest parts, the rest is one line.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import msgspec
import numpy as np

from engine.results.domains import DomainLine
from engine.results.merged import Damage, Event, LogSummary, Merged, PartitionSummary, Reply
from engine.results.recipients import Written
from formats.outcomes import WORDS, Outcome
from formats.sendlog import Verdict

FORMAT = 1

_DOMAINS = 20
_PROVIDERS = 8
_POINTS = 180  # of a timeline: more could not be told apart on a page
_STEPS = (1, 2, 5, 10, 15, 30, 60, 120, 240, 480, 1440, 2880, 10_080, 43_200)
_LINES = 50
_DAY = 24 * 60
_CONNECTIONS = re.compile(r"connections\W{1,4}(\d{1,6})")
_VARIABLE = re.compile(r"\d+(?:\.\d+)?")


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """A domain or provider: rows per outcome."""

    name: str
    rows: int
    outcomes: dict[str, int]
    attempts: int | None = None
    waited_s: float | None = None  # mean from first attempt to acceptance


class DuplicateLine(msgspec.Struct, frozen=True):
    """One row that was accepted more than once."""

    row: int
    times: int
    by_resend: bool
    at_us: list[int]
    machines: list[str]


class Series(msgspec.Struct, frozen=True):
    """One provider's counts per step of the timeline."""

    provider: str
    attempts: list[int]
    accepted: list[int]
    deferred: list[int]
    connections: list[int | None]


class Timeline(msgspec.Struct, frozen=True):
    """Attempts over time: point i covers the `step_minutes` from start_us + i * step on."""

    start_us: int
    step_minutes: int
    series: list[Series]


class Planned(msgspec.Struct, frozen=True, kw_only=True):
    """What capacity planning promised for one provider, beside what was reached."""

    provider: str
    planned_per_hour: float | None
    reached_per_hour: float
    busiest_per_hour: float
    rows: int


class EventLine(msgspec.Struct, frozen=True):
    """A kind of event, how often, and the last one."""

    words: str
    count: int
    provider: str | None
    last_at_us: int
    last: str


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """`summary.json`. Times are UTC microseconds."""

    format: int = FORMAT
    campaign_id: str
    rows: int
    outcomes: dict[str, int]
    reasons: dict[str, int]
    adds_up: bool
    gaps: list[str]
    exit_code: int
    attempts: int
    first_at_us: int | None
    last_at_us: int | None
    merged_at_us: int
    duplicate_rows: int
    duplicates_by_resend: int
    duplicates: list[DuplicateLine]
    came_back: dict[str, int]
    damage: list[Damage]
    notes: list[str]
    store_missing: bool
    list_problems: list[str]
    domains: list[Line]
    domain_count: int
    slowest_domains: list[Line]
    providers: list[Line]
    replies: list[Reply]
    events: list[EventLine]
    event_count: int
    capacity: list[Planned]
    timeline: Timeline
    partitions: list[PartitionSummary]
    logs: list[LogSummary]
    log_count: int
    files: dict[str, int]  # lines in the files beside


def summarise(
    merged: Merged, written: Written, *, merged_at_us: int, planned_per_hour: dict[str, float] | None = None
) -> Summary:
    """The summary of a merge whose files were written."""
    largest, rest = written.domains.largest(_DOMAINS)
    times = [(log.first_us, log.last_us) for log in merged.logs if log.last_us]
    made = merged.tally.verdict != Verdict.NONE
    timeline = _timeline(merged)
    events = _events(merged.events)
    slow_from = max(5, merged.rows // 20_000)
    by_resend = sum(duplicate.ordered for duplicate in merged.duplicates)
    return Summary(
        campaign_id=merged.plan.campaign_id,
        rows=merged.rows,
        outcomes={str(outcome): count for outcome, count in merged.outcomes.items()},
        reasons=merged.reasons,
        adds_up=merged.adds_up,
        gaps=merged.gaps(),
        exit_code=int(merged.exit_code),
        attempts=int(merged.tally.count[made].sum()),
        first_at_us=min((first for first, _ in times), default=None),
        last_at_us=max((last for _, last in times), default=None),
        merged_at_us=merged_at_us,
        duplicate_rows=len(merged.duplicates),
        duplicates_by_resend=by_resend,
        duplicates=[
            DuplicateLine(d.row, d.times, d.ordered, d.at_us, [merged.machines[n] for n in d.machines])
            for d in merged.duplicates[:_LINES]
        ],
        came_back=merged.feedback.counts(),
        damage=merged.damage[:_LINES],
        notes=merged.notes[:_LINES],
        store_missing=merged.store_missing,
        list_problems=written.problems[:_LINES],
        domains=[_domain(line) for line in [*largest, *([rest] if rest else [])]],
        domain_count=len(written.domains),
        slowest_domains=[_domain(line) for line in written.domains.slowest(10, slow_from)],
        providers=_providers(merged),
        replies=merged.replies[:_LINES],
        events=events[:_LINES],
        event_count=len(merged.events),
        capacity=_capacity(merged, planned_per_hour or {}),
        timeline=timeline,
        partitions=merged.partitions[:1000],
        logs=merged.logs[:200],
        log_count=len(merged.logs),
        files={
            "recipients.parquet": written.recipients,
            **({} if merged.store_missing else {"undeliverable.parquet": written.undeliverable}),
            "suppress.parquet": written.suppress,
        },
    )


def _by_outcome(words: list[int]) -> dict[str, int]:
    found = {str(outcome): 0 for outcome in Outcome}
    for (outcome, _), count in zip(WORDS, words, strict=True):
        found[outcome] += count
    return found


def _domain(line: DomainLine) -> Line:
    waited = round(line.waited_s, 3) if line.accepted else None
    return Line(
        name=line.domain, rows=line.rows, outcomes=_by_outcome(line.words), attempts=line.attempts, waited_s=waited
    )


def _providers(merged: Merged) -> list[Line]:
    lines = [
        Line(name=name or "(none)", rows=sum(words), outcomes=_by_outcome(words))
        for name, words in zip(merged.providers, merged.provider_counts.tolist(), strict=True)
        if sum(words)
    ]
    lines.sort(key=lambda line: (-line.rows, line.name))
    if len(lines) <= _DOMAINS:
        return lines
    rest = lines[_DOMAINS:]
    outcomes = {str(outcome): sum(line.outcomes[outcome] for line in rest) for outcome in Outcome}
    other = Line(name=f"{len(rest):,} other providers", rows=sum(line.rows for line in rest), outcomes=outcomes)
    return [*lines[:_DOMAINS], other]


def _timeline(merged: Merged) -> Timeline:
    counts = merged.tally
    if not len(counts.minute):
        return Timeline(0, 1, [])
    minute, weight = counts.minute, counts.count
    low, high = int(minute.min()), int(minute.max())
    if high - low > 60 * _DAY:
        # A machine's clock was wrong for a while; the campaign is where most attempts are.
        order = np.argsort(minute, kind="stable")
        reached = np.cumsum(weight[order])
        middle = int(minute[order][np.searchsorted(reached, reached[-1] / 2)])
        low, high = max(low, middle - 14 * _DAY), min(high, middle + 14 * _DAY)
    step = next((s for s in _STEPS if (high - low) // s < _POINTS), _STEPS[-1])
    start = low // step * step
    points = (high - start) // step + 1
    inside = (minute >= low) & (minute <= high)
    per_provider = np.bincount(counts.provider, weights=weight, minlength=len(merged.providers))
    largest = [n for n in np.argsort(-per_provider, kind="stable").tolist() if per_provider[n]]
    groups: list[tuple[str, list[int]]] = [(merged.providers[n] or "(none)", [n]) for n in largest[:_PROVIDERS]]
    if largest[_PROVIDERS:]:
        groups.append((f"{len(largest) - _PROVIDERS} others", largest[_PROVIDERS:]))
    connections = _connections(merged.events, start, step, points)
    series = []
    for name, numbers in groups:
        mine = inside & np.isin(counts.provider, numbers)

        def per_step(which: Any) -> list[int]:
            at = (minute[which] - start) // step
            return [int(n) for n in np.bincount(at, weights=weight[which], minlength=points).tolist()]

        series.append(
            Series(
                name,
                per_step(mine),
                per_step(mine & (counts.verdict == Verdict.ACCEPTED)),
                per_step(mine & (counts.verdict == Verdict.DEFERRED)),
                connections.get(name, []),
            )
        )
    return Timeline(start * 60_000_000, step, series)


def _connections(events: list[Event], start: int, step: int, points: int) -> dict[str, list[int | None]]:
    """The connections that events name ("connections=12"), the last word in each step."""
    found: dict[str, list[int | None]] = {}
    for event in events:
        said = _CONNECTIONS.search(event.text)
        place = (event.at_us // 60_000_000 - start) // step
        if said and 0 <= place < points:
            found.setdefault(event.provider or "(none)", [None] * points)[place] = int(said[1])
    return found


def _events(events: list[Event]) -> list[EventLine]:
    counts: Counter[tuple[str, str | None]] = Counter()
    last: dict[tuple[str, str | None], Event] = {}
    for event in events:
        kind = (_VARIABLE.sub("…", event.text)[:200], event.provider)
        counts[kind] += 1
        last[kind] = event
    return [
        EventLine(words, count, provider, last[words, provider].at_us, last[words, provider].text[:500])
        for (words, provider), count in sorted(
            counts.items(), key=lambda item: (-item[1], item[0][0], item[0][1] or "")
        )
    ]


def _capacity(merged: Merged, planned: dict[str, float]) -> list[Planned]:
    counts = merged.tally
    accepted = counts.verdict == Verdict.ACCEPTED
    found = []
    for number, name in enumerate(merged.providers):
        mine = accepted & (counts.provider == number)
        if name is None or not mine.any():
            continue
        minutes, weight = counts.minute[mine], counts.count[mine]
        total = int(weight.sum())
        hours = max(1, int(minutes.max() - minutes.min()) + 1) / 60
        # A campaign shorter than an hour is measured by its busiest minute.
        window = 60 if hours >= 1 else 1
        # Numbered, not binned: a machine whose clock was wrong may be thousands of years away.
        _, step = np.unique((minutes - minutes.min()) // window, return_inverse=True)
        busiest = np.bincount(step, weights=weight).max() * 60 / window
        found.append(
            Planned(
                provider=name,
                planned_per_hour=planned.get(name),
                reached_per_hour=round(total / hours, 1),
                busiest_per_hour=round(float(busiest), 1),
                rows=total,
            )
        )
    return sorted(found, key=lambda line: (-line.rows, line.provider))[:_DOMAINS]
