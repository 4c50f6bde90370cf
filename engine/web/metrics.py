"""Metrics for Prometheus, from the counters that senders tell once a second; nothing is asked of a sender.

The same families are served by `engine serve` (all campaigns of its folder, summed over machines) and by
`engine send --metrics HOST:PORT` (this run alone). Counters of a campaign are sums over all starts of its senders, so
they go on after a restart. Labels are names of campaigns, providers and sources: no address of a recipient.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from engine.control.store import Incarnation
from engine.web.reading import Reading
from engine.web.snapshot import KINDS, LIMITS, Snapshot, is_alive, limit_kind
from engine.work.logbook import COMMIT_BUCKETS_S
from engine.work.progress import REPLY_BUCKETS_S, WINDOW_BUCKETS_S

_VERDICTS = ("accepted", "rejected", "deferred", "lost", "in_doubt")
_ANSWERS = ("accepted", "rejected", "deferred", "lost")
_QUEUES = ("ready", "parked", "waiting", "in_flight")
_MOST_PROVIDERS = 500  # series of more are summed as "others"


class Told(msgspec.Struct, frozen=True):
    """One start of a sender: what it told, and whether it lives."""

    sender: str
    is_alive: bool
    heard_s: float
    lease_s: float
    counters: dict[str, Any]


class Source(msgspec.Struct, frozen=True):
    """One campaign's. `left` and `in_doubt` are None where only this run's own counters are known."""

    campaign: str
    told: list[Told]
    state: str = ""
    batches: dict[str, int] = {}
    left: int | None = None
    in_doubt: int | None = None


def of_reading(snapshot: Snapshot, reading: Reading, now_us: int) -> Source:
    """A campaign as its store has it; what is left and in doubt as the page shows it, also when nobody sends."""

    def one(i: Incarnation) -> Told:
        return Told(i.sender, is_alive(i, now_us), (now_us - i.renewed_at_us) / 1e6, i.lease_us / 1e6, i.counters)

    told = [one(i) for i in reading.incarnations]
    state = reading.campaign.state if reading.campaign else ""
    return Source(snapshot.key, told, state, snapshot.batches, snapshot.left, snapshot.in_doubt)


def families(sources: Iterable[Source]) -> Iterator[Metric]:
    """Everything, as prometheus_client's families."""
    sources = list(sources)
    yield from _rows(sources)
    yield from _providers(sources)
    yield from _keys(sources)
    yield from _machines(sources)
    yield from _latencies(sources)


def _rows(sources: list[Source]) -> Iterator[Metric]:
    outcome = CounterMetricFamily("rowpost_rows", "Rows by outcome so far.", labels=["campaign", "outcome"])
    doubt = GaugeMetricFamily("rowpost_rows_in_doubt", "Rows that may have been sent.", labels=["campaign"])
    left = GaugeMetricFamily("rowpost_rows_left", "Rows without an outcome.", labels=["campaign"])
    queues = GaugeMetricFamily("rowpost_queue_rows", "Rows by where they wait.", labels=["campaign", "queue"])
    paused = GaugeMetricFamily("rowpost_campaign_paused", "1 while paused or cancelled.", labels=["campaign"])
    batches = GaugeMetricFamily("rowpost_batches", "Batches by state.", labels=["campaign", "state"])
    for source in sources:
        for kind in KINDS:
            total = sum(_number(told, kind) for told in source.told)
            if kind != "in_doubt":
                outcome.add_metric([source.campaign, kind], total)
        living = [told for told in source.told if told.is_alive]
        for gauge, known, name in ((doubt, source.in_doubt, "in_doubt"), (left, source.left, "left")):
            value = sum(_number(told, name) for told in living) if known is None else known
            gauge.add_metric([source.campaign], value)
        for queue in _QUEUES:
            queues.add_metric([source.campaign, queue], sum(_number(told, queue) for told in living))
        paused.add_metric([source.campaign], float(source.state in ("paused", "cancelled")))
        for state, count in source.batches.items():
            batches.add_metric([source.campaign, state], count)
    yield from (outcome, doubt, left, queues, paused, batches)


def _providers(sources: list[Source]) -> Iterator[Metric]:
    labels = ["campaign", "provider"]
    attempts = CounterMetricFamily("rowpost_attempts", "Attempts by verdict.", labels=[*labels, "verdict"])
    connections = GaugeMetricFamily("rowpost_connections", "Connections open now.", labels=labels)
    ready = GaugeMetricFamily("rowpost_provider_ready_rows", "Rows ready for the provider.", labels=labels)
    reply = HistogramMetricFamily("rowpost_reply_seconds", "Time until an answer came.", labels=labels)
    limited = GaugeMetricFamily("rowpost_provider_limited", "1 for what limits it now.", labels=[*labels, "by"])
    for source in sources:
        sums: dict[str, Counter[str]] = defaultdict(Counter)
        times: dict[str, list[float]] = {}
        for told in source.told:
            for name, counts in _dict(told.counters.get("providers")).items():
                name = _bounded(name, sums)
                for verdict in _VERDICTS:
                    sums[name][verdict] += counts.get(verdict, 0)
                if told.is_alive:
                    sums[name]["connections"] += counts.get("connections", 0)
                    sums[name]["ready"] += counts.get("waiting", 0)
                    sums[name][f"limit {limit_kind(counts.get('limit', ''))}"] = 1
                _add_times(times.setdefault(name, [0.0] * (len(REPLY_BUCKETS_S) + 2)), counts)
        for name, count in sums.items():
            for verdict in _VERDICTS:
                attempts.add_metric([source.campaign, name, verdict], count[verdict])
            connections.add_metric([source.campaign, name], count["connections"])
            ready.add_metric([source.campaign, name], count["ready"])
            for by in LIMITS:
                limited.add_metric([source.campaign, name, by], count[f"limit {by}"])
            *buckets, total = times[name]
            reply.add_metric([source.campaign, name], _cumulative(REPLY_BUCKETS_S, buckets), total)
    yield from (attempts, connections, ready, reply, limited)


def _keys(sources: list[Source]) -> Iterator[Metric]:
    labels = ["campaign", "source", "provider"]
    answers = CounterMetricFamily("rowpost_answers", "Answers by source.", labels=[*labels, "answer"])
    slots = GaugeMetricFamily("rowpost_slots_held", "Connection slots handed out.", labels=labels)
    allowed = GaugeMetricFamily("rowpost_slots_allowed", "Connections that may be open now.", labels=labels)
    suspended = GaugeMetricFamily("rowpost_throttle_suspended", "1 while the throttle pauses it.", labels=labels)
    for source in sources:
        sums: dict[tuple[str, str], list[float]] = {}
        for told in source.told:
            for name, provider, accepted, refused, held, most, until, *kinds in told.counters.get("keys") or []:
                rejected, lost = kinds or (0, 0)  # a sender of before they were told apart
                mine = sums.setdefault((name, provider), [0.0] * 7)
                for place, count in enumerate((accepted, rejected, refused - rejected - lost, lost)):
                    mine[place] += count
                if told.is_alive:
                    mine[4] += held
                    mine[5] += most
                    mine[6] = max(mine[6], float(until is not None))
        for (name, provider), values in list(sums.items())[: 4 * _MOST_PROVIDERS]:
            where = [source.campaign, name, provider]
            for answer, count in zip(_ANSWERS, values[:4], strict=True):
                answers.add_metric([*where, answer], count)
            slots.add_metric(where, values[4])
            allowed.add_metric(where, values[5])
            suspended.add_metric(where, values[6])
    yield from (answers, slots, allowed, suspended)


def _machines(sources: list[Source]) -> Iterator[Metric]:
    alive = GaugeMetricFamily("rowpost_senders", "Senders whose lease stands.", labels=["campaign"])
    silent = GaugeMetricFamily("rowpost_senders_silent", "Senders that fell silent unended.", labels=["campaign"])
    heard = GaugeMetricFamily("rowpost_lease_age_seconds", "Since the sender was heard.", labels=["campaign", "sender"])
    lease = GaugeMetricFamily("rowpost_lease_length_seconds", "How long its lease is.", labels=["campaign", "sender"])
    workers = GaugeMetricFamily("rowpost_worker_processes", "Worker processes.", labels=["campaign", "sender"])
    for source in sources:
        living = [told for told in source.told if told.is_alive]
        alive.add_metric([source.campaign], len(living))
        lost = [told for told in source.told if not told.is_alive and told.heard_s < 86_400 and _number(told, "left")]
        silent.add_metric([source.campaign], len(lost) if not living else 0)
        for told in living:
            heard.add_metric([source.campaign, told.sender], max(0.0, told.heard_s))
            lease.add_metric([source.campaign, told.sender], told.lease_s)
            workers.add_metric([source.campaign, told.sender], _number(told, "processes"))
    yield from (alive, silent, heard, lease, workers)


def _latencies(sources: list[Source]) -> Iterator[Metric]:
    for name, told_as, bounds, words in (
        ("rowpost_log_commit_seconds", "log_commits", COMMIT_BUCKETS_S, "Time to make intents durable."),
        ("rowpost_window_seconds", "window_times", WINDOW_BUCKETS_S, "Time until the store had moved the windows."),
    ):
        family = HistogramMetricFamily(name, words, labels=["campaign"])
        for source in sources:
            sums = [0.0] * (len(bounds) + 2)
            for told in source.told:
                for place, value in enumerate(told.counters.get(told_as) or []):
                    sums[place] += value
            *buckets, total = sums
            family.add_metric([source.campaign], _cumulative(bounds, buckets), total)
        yield family


def _bounded(name: str, known: dict[str, Counter[str]]) -> str:
    return name if name in known or len(known) < _MOST_PROVIDERS else "others"


def _dict(value: object) -> dict[str, dict[str, Any]]:
    return value if isinstance(value, dict) else {}


def _number(told: Told, name: str) -> float:
    value = told.counters.get(name)
    return float(value) if isinstance(value, int | float) else 0.0


def _add_times(sums: list[float], counts: dict[str, Any]) -> None:
    for place, value in enumerate(counts.get("reply_s") or []):
        sums[place] += value
    sums[-1] += counts.get("reply_s_sum", 0.0)


def _cumulative(bounds: tuple[float, ...], buckets: list[float]) -> list[tuple[str, float]]:
    told, so_far = [], 0.0
    for bound, count in zip([*(f"{b:g}" for b in bounds), "+Inf"], buckets, strict=True):
        so_far += count
        told.append((bound, so_far))
    return told


class _Collector(Collector):
    def __init__(self, sources: Callable[[], list[Source]]) -> None:
        self._sources = sources

    def collect(self) -> Iterator[Metric]:
        return families(self._sources())

    def describe(self) -> list[Metric]:
        return []


def registry(sources: Callable[[], list[Source]]) -> CollectorRegistry:
    """A registry of our families alone."""
    made = CollectorRegistry(auto_describe=False)
    made.register(_Collector(sources))
    return made


def expose(sources: list[Source], accept: str) -> tuple[bytes, str]:
    """The text that a scrape gets, and its content type."""
    encode, content_type = choose_encoder(accept)
    return encode(registry(lambda: sources)), content_type
