"""Metrics for Prometheus, from the counters that senders tell once a second; nothing is asked of a sender.

The same families are served by `engine serve` (all campaigns of its folder, summed over machines) and by
`engine send --metrics HOST:PORT` (this run alone). Counters of a campaign are sums over all starts of its senders, so
they go on after a restart. Labels are names of campaigns, providers and sources: no address of a recipient.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator

import msgspec
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from engine.control.store import Life
from engine.web.reading import Reading
from engine.web.snapshot import KINDS, Snapshot
from engine.web.told import LIMITS, Heard, ProviderTold, Told, limit_kind
from engine.work.logbook import COMMIT_BUCKETS_S
from engine.work.progress import REPLY_BUCKETS_S, WINDOW_BUCKETS_S

_VERDICTS = ("accepted", "rejected", "deferred", "lost", "in_doubt")
_ANSWERS = ("accepted", "rejected", "deferred", "lost")
_QUEUES = ("ready", "parked", "waiting", "in_flight")
_SILENT_S = 86_400.0  # a campaign that nobody looked after for a day is no news any more
_MOST_PROVIDERS = 500  # series of more are summed as "others"


class Start(msgspec.Struct, frozen=True):
    """One start of a sender: whether it lives, and what it told."""

    sender: str
    is_alive: bool
    is_silent: bool  # nobody ended it, and its lease ran out
    heard_s: float
    lease_s: float
    told: Told


class Source(msgspec.Struct, frozen=True):
    """One campaign's. `left` and `in_doubt` are None where only this run's own counters are known."""

    campaign: str
    starts: list[Start]
    state: str = ""
    batches: dict[str, int] = {}
    left: int | None = None
    in_doubt: int | None = None


def of_reading(snapshot: Snapshot, reading: Reading, now_us: int) -> Source:
    """A campaign as its store has it; what is left and in doubt as the page shows it, also when nobody sends."""

    def one(heard: Heard) -> Start:
        heard_s = (now_us - heard.renewed_at_us) / 1e6
        alive = heard.is_alive(now_us)
        silent = heard.state is Life.ALIVE and not alive and heard_s < _SILENT_S
        return Start(heard.sender, alive, silent, heard_s, heard.lease_us / 1e6, heard.told)

    starts = [one(heard) for heard in reading.incarnations]
    state = reading.campaign.state if reading.campaign else ""
    return Source(snapshot.key, starts, state, snapshot.batches, snapshot.left, snapshot.in_doubt)


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
            if kind != "in_doubt":
                total = sum(getattr(start.told, kind) for start in source.starts)
                outcome.add_metric([source.campaign, kind], total)
        living = [start.told for start in source.starts if start.is_alive]
        for gauge, known, name in ((doubt, source.in_doubt, "in_doubt"), (left, source.left, "left")):
            gauge.add_metric(
                [source.campaign], sum(getattr(told, name) or 0 for told in living) if known is None else known
            )
        for queue in _QUEUES:
            queues.add_metric([source.campaign, queue], sum(getattr(told, queue) for told in living))
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
        for start in source.starts:
            for name, told in start.told.providers.items():
                name = _bounded(name, sums)
                mine = sums[name]
                for verdict in _VERDICTS:
                    mine[verdict] += getattr(told, verdict)
                if start.is_alive:
                    mine["connections"] += told.connections
                    mine["ready"] += told.waiting
                    mine[f"limit {limit_kind(told.limit)}"] = 1
                _add_times(times.setdefault(name, [0.0] * (len(REPLY_BUCKETS_S) + 2)), told)
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
        for start in source.starts:
            for key in start.told.keys:
                mine = sums.setdefault((key.source, key.provider), [0.0] * 7)
                later = key.refused - key.rejected - key.lost
                for place, answered in enumerate((key.accepted, key.rejected, later, key.lost)):
                    mine[place] += answered
                if start.is_alive:
                    mine[4] += key.held
                    mine[5] += key.allowed
                    mine[6] = max(mine[6], float(key.suspended_until_us is not None))
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
        living = [start for start in source.starts if start.is_alive]
        alive.add_metric([source.campaign], len(living))
        silent.add_metric([source.campaign], sum(start.is_silent for start in source.starts))
        for start in living:
            heard.add_metric([source.campaign, start.sender], max(0.0, start.heard_s))
            lease.add_metric([source.campaign, start.sender], start.lease_s)
            workers.add_metric([source.campaign, start.sender], start.told.processes)
    yield from (alive, silent, heard, lease, workers)


def _latencies(sources: list[Source]) -> Iterator[Metric]:
    for name, told_as, bounds, words in (
        ("rowpost_log_commit_seconds", "log_commits", COMMIT_BUCKETS_S, "Time to make intents durable."),
        ("rowpost_window_seconds", "window_times", WINDOW_BUCKETS_S, "Time until the store had moved the windows."),
    ):
        family = HistogramMetricFamily(name, words, labels=["campaign"])
        for source in sources:
            sums = [0.0] * (len(bounds) + 2)
            for start in source.starts:
                for place, value in enumerate(getattr(start.told, told_as)):
                    sums[place] += value
            *buckets, total = sums
            family.add_metric([source.campaign], _cumulative(bounds, buckets), total)
        yield family


def _bounded(name: str, known: dict[str, Counter[str]]) -> str:
    return name if name in known or len(known) < _MOST_PROVIDERS else "others"


def _add_times(sums: list[float], told: ProviderTold) -> None:
    for place, value in enumerate(told.reply_s):
        sums[place] += value
    sums[-1] += told.reply_s_sum


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
