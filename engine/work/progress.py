"""What a run has done so far, how fast, and when it will be through. Pure: pulses and times come in.

Rates are means over the last ten seconds; the estimate is rows left over that rate, and says nothing while nothing
moves.
"""

from __future__ import annotations

from collections import deque

import msgspec

from engine.work.messages import Pulse

_SPAN_S = 10.0


class ProviderProgress(msgspec.Struct):
    """One provider in this run."""

    accepted: int = 0
    rejected: int = 0
    deferred: int = 0  # answers "later", not rows
    lost: int = 0
    in_doubt: int = 0
    connections: int = 0
    limit: str = ""  # what limits it now


class Progress:
    """Counters of one run."""

    def __init__(self, rows: int, started_at: float) -> None:
        self.rows = rows
        self.before = 0  # rows that had their outcome when we began
        self.held_before = 0  # rows that were in doubt when we began
        self.invalid = self.suppressed = self.expired = self.rejected_unsent = 0
        self.providers: dict[str, ProviderProgress] = {}
        self.waiting = self.in_flight = self.parked = 0
        self.next_due_us: int | None = None
        self.reason = ""
        self._started_at = started_at
        self._history: deque[tuple[float, int]] = deque([(started_at, 0)])

    def add(self, pulse: Pulse) -> None:
        """Count what a worker tells."""
        self.invalid += pulse.invalid
        self.suppressed += pulse.suppressed
        self.expired += pulse.expired
        self.rejected_unsent += pulse.rejected_unsent
        for told in pulse.providers:
            mine = self.providers.setdefault(told.provider, ProviderProgress())
            mine.accepted += told.accepted
            mine.rejected += told.rejected
            mine.deferred += told.deferred
            mine.lost += told.lost
            mine.in_doubt += told.in_doubt

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
            "reason": self.reason,
            "providers": {name: msgspec.to_builtins(provider) for name, provider in self.providers.items()},
        }
