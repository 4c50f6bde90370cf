"""What a run has done so far, how fast, and when it will be through. Pure: pulses and times come in.

Rates are means over the last ten seconds; the estimate is rows left over that rate, and says nothing while nothing
moves.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterable

import msgspec

from engine.pace.throttle import Signal
from engine.work.logbook import COMMIT_BUCKETS_S
from engine.work.messages import Key, Pulse, Seen

_SPAN_S = 10.0
_ACCEPTED = Signal.ACCEPTED.value
_UNREACHABLE = Signal.UNREACHABLE.value
_EVENTS = 50
_MOST_REPLIES = 500  # different texts remembered; more are counted as "other replies"
_TOP_REPLIES = 30
OTHER_REPLIES = "other replies"
REPLY_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)  # the last is followed by +Inf
WINDOW_BUCKETS_S = (0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0, 30.0)  # of `window_times`; then +Inf
_REJECTED = frozenset({Signal.BOUNCED.value, Signal.REFUSED.value})


class ProviderProgress(msgspec.Struct):
    """One provider in this run."""

    accepted: int = 0
    rejected: int = 0
    deferred: int = 0  # answers "later", not rows
    lost: int = 0
    in_doubt: int = 0
    connections: int = 0
    limit: str = ""  # what limits it now
    allowed: int = 0  # connections that budget and throttle allow now; 0: suspended
    waiting: int = 0  # rows ready for it
    suspended_until_us: int | None = None
    reply_s: list[int] = msgspec.field(
        default_factory=lambda: [0] * (len(REPLY_BUCKETS_S) + 1)
    )  # answers by time taken
    reply_s_sum: float = 0.0


class KeyProgress(msgspec.Struct):
    """One source at one provider in this run."""

    accepted: int = 0
    refused: int = 0
    held: int = 0  # slots handed out
    allowed: int = 0
    suspended_until_us: int | None = None
    rejected: int = 0  # of the refused: for good
    lost: int = 0  # of the refused: no connection, or one that ended without a reply


class Progress:
    """Counters of one run."""

    def __init__(self, rows: int, started_at: float) -> None:
        self.rows = rows
        self.before = 0  # rows that had their outcome when we began
        self.held_before = 0  # rows that were in doubt when we began
        self.invalid = self.suppressed = self.expired = self.rejected_unsent = 0
        self.providers: dict[str, ProviderProgress] = {}
        self.waiting = self.in_flight = self.parked = self.ready = self.processes = 0
        self.log_commits = [0.0] * (len(COMMIT_BUCKETS_S) + 2)
        self.window_times = [0.0] * (len(WINDOW_BUCKETS_S) + 2)  # by time taken, then their seconds
        self.keys: dict[Key, KeyProgress] = {}
        self.events: deque[dict[str, object]] = deque(maxlen=_EVENTS)
        self.replies: Counter[tuple[str, str]] = Counter()  # (provider, text) of answers that were no 250
        self.next_due_us: int | None = None
        self.asleep = 0  # of `waiting`, rows for the hours of their zone
        self.opens_at: tuple[int, str] | None = None  # when the first of them go, also as people there write it
        self.zone_missing = self.zone_unknown = 0  # rows that follow the campaign's zone
        self.reason = ""
        self._started_at = started_at
        self._history: deque[tuple[float, int]] = deque([(started_at, 0)])

    def add(self, pulse: Pulse) -> None:
        """Count what a worker tells."""
        self.invalid += pulse.invalid
        self.suppressed += pulse.suppressed
        self.expired += pulse.expired
        self.rejected_unsent += pulse.rejected_unsent
        self.zone_missing += pulse.zoneless[0]
        self.zone_unknown += pulse.zoneless[1]
        if pulse.commits:
            self.log_commits = [a + b for a, b in zip(self.log_commits, pulse.commits, strict=True)]
        for told in pulse.providers:
            mine = self.providers.setdefault(told.provider, ProviderProgress())
            mine.accepted += told.accepted
            mine.rejected += told.rejected
            mine.deferred += told.deferred
            mine.lost += told.lost
            mine.in_doubt += told.in_doubt

    def hear(self, seen: Iterable[Seen]) -> None:
        """Count answers by their text and by the time they took."""
        for one in seen:
            provider = self.providers.setdefault(one.key[1], ProviderProgress())
            if one.reply_s is not None:
                provider.reply_s[bisect_left(REPLY_BUCKETS_S, one.reply_s)] += one.count
                provider.reply_s_sum += one.reply_s * one.count
            mine = self.keys.setdefault(one.key, KeyProgress())
            if one.signal == _ACCEPTED:
                mine.accepted += one.count
            else:
                mine.refused += one.count
                mine.rejected += one.count if one.signal in _REJECTED else 0
                mine.lost += one.count if one.signal == _UNREACHABLE else 0
            if one.text:
                key = (one.key[1], one.text)
                if key not in self.replies and len(self.replies) >= _MOST_REPLIES:
                    key = (one.key[1], OTHER_REPLIES)
                self.replies[key] += one.count

    def time_window(self, took_s: float) -> None:
        """The shared store answered a step of the windows, so long after it was first said."""
        self.window_times[bisect_left(WINDOW_BUCKETS_S, took_s)] += 1
        self.window_times[-1] += took_s

    @property
    def accepted(self) -> int:
        return sum(provider.accepted for provider in self.providers.values())

    @property
    def rejected(self) -> int:
        return self.rejected_unsent + sum(provider.rejected for provider in self.providers.values())

    @property
    def in_doubt(self) -> int:
        return self.held_before + sum(provider.in_doubt for provider in self.providers.values())

    @property
    def finished(self) -> int:
        """Rows that have an outcome or are held in doubt."""
        mine = self.accepted + self.rejected + self.invalid + self.suppressed + self.expired
        return self.before + mine + self.in_doubt

    @property
    def left(self) -> int:
        return self.rows - self.finished

    def rate(self, now: float) -> float:
        """Accepted messages a second over the last ten seconds."""
        accepted = self.accepted
        self._history.append((now, accepted))
        while len(self._history) > 2 and self._history[1][0] <= now - _SPAN_S:
            self._history.popleft()
        since, had = self._history[0]
        return (accepted - had) / max(0.2, now - since)

    def mean_rate(self, now: float) -> float:
        """Accepted messages a second since the run began."""
        return self.accepted / max(0.001, now - self._started_at)

    def eta_s(self, now: float) -> float | None:
        """Seconds until nothing is left, or None while nothing moves."""
        rate = self.rate(now)
        return self.left / rate if rate > 0 and self.left else None

    def counters(self, now: float) -> dict[str, object]:
        """The same for the store and for `--json`."""
        return {
            "rows": self.rows,
            "before": self.before,
            "accepted": self.accepted,
            "bounced": self.rejected,
            "invalid": self.invalid,
            "suppressed": self.suppressed,
            "expired": self.expired,
            "in_doubt": self.in_doubt,
            "waiting": self.waiting,
            "left": self.left,
            "per_second": round(self.rate(now), 1),
            "next_due_us": self.next_due_us,
            "asleep": self.asleep,
            "opens_at": self.opens_at[1] if self.opens_at is not None else None,
            "zone_missing": self.zone_missing,
            "zone_unknown": self.zone_unknown,
            "reason": self.reason,
            "ready": self.ready,
            "parked": self.parked,
            "in_flight": self.in_flight,
            "processes": self.processes,
            "log_commits": [round(value, 6) for value in self.log_commits],
            "window_times": [round(value, 6) for value in self.window_times] if any(self.window_times) else [],
            "keys": [[*key, *msgspec.structs.astuple(told)] for key, told in self.keys.items()],
            "events": list(self.events),
            "replies": [[*key, count] for key, count in self.replies.most_common(_TOP_REPLIES)],
            "providers": {name: msgspec.to_builtins(provider) for name, provider in self.providers.items()},
        }
