"""What answers say about pace, and all that is remembered of one (source, provider). Values and counters only.

`observing` makes signals of judged replies, `easing` answers them, `throttle` keeps the states. Times are seconds of
one monotonic clock.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

WINDOW_S = 60.0
IDLE_INTERVALS = 10.0  # between attempts, as they came before
SHORTEST_IDLE_S = 2.0


class Signal(StrEnum):
    """What an answer says about pace. (`rules.py` decides what a reply means; `supervisor` maps one to the other.)"""

    ACCEPTED = "accepted"
    BOUNCED = "bounced"  # a recipient refused for good: the provider works as usual
    REFUSED = "refused"  # 5xx about us: policy, content
    GREYLISTED = "greylisted"
    RATE = "rate"
    TOO_MANY_CONNECTIONS = "too_many_connections"
    TOO_MANY_PER_CONNECTION = "too_many_per_connection"
    REPUTATION = "reputation"
    BUSY = "busy"  # theirs: disk, database, shutdown
    OTHER_4XX = "other_4xx"
    UNREACHABLE = "unreachable"  # no connection, or one lost without a reply


PRESSURE = frozenset({Signal.RATE, Signal.BUSY})
FINE = frozenset({Signal.ACCEPTED, Signal.BOUNCED, Signal.GREYLISTED})
ANY_4XX = frozenset(
    {
        Signal.GREYLISTED,
        Signal.RATE,
        Signal.TOO_MANY_CONNECTIONS,
        Signal.TOO_MANY_PER_CONNECTION,
        Signal.REPUTATION,
        Signal.BUSY,
        Signal.OTHER_4XX,
    }
)


class Limits(msgspec.Struct, frozen=True):
    """What the budget allows at most; None: not limited."""

    connections: int = 10
    rate_per_s: float | None = None
    per_connection: int | None = None


class Observation(msgspec.Struct, frozen=True):
    """One answer, or `count` equal ones. Times in seconds."""

    signal: Signal
    now: float
    count: int = 1
    started_at: float | None = None  # when the attempt began; default: now
    reply_s: float | None = None
    connections: int | None = None  # open there at the time, a refused one not counted
    on_connection: int | None = None  # messages accepted on this connection before
    pause_s: float | None = None  # documented recovery: nothing for so long,
    then_connections: int | None = None  # then so many connections, and one more at a time
    text: str = ""  # the reply, for the operator


class State(msgspec.Struct, kw_only=True):
    """All that is remembered of one key. Fields that end in `_at` are times; `shifted` moves them to another clock."""

    limits: Limits = Limits()
    connections: int = 10
    rate_per_s: float | None = None
    per_connection: int | None = None
    reason: str = "as budgeted"
    # Suspension and the way back from it.
    suspended_until_at: float | None = None
    pause_s: float = 0.0
    repeats: int = 0
    is_recovering: bool = False
    doubles: bool = False  # on the way back: double (a block has ended), or one at a time (documented)
    goal_connections: int = 0
    recovered: int = 0  # successes since the last step of the way back
    stepped_at: float = 0.0
    # Rate.
    eased_at: float | None = None
    measuring_at: float | None = None
    measured_fine: int = 0
    measured_bad: int = 0
    barren: int = 0  # measurements in a row without any success
    refusal: str = ""  # the last one, for the reason
    good_rate_per_s: float | None = None  # before the last easing that came after a quiet time,
    good_until_at: float = 0.0  # which was then
    probe_from: float | None = None  # the good rate to return to when the probe is refused
    probe_until_at: float = 0.0  # what was refused since is the probe's doing
    next_probe_at: float = 0.0
    probe_wait_s: float = 0.0
    step: float = 0.0
    # Connections.
    connections_eased_at: float | None = None
    next_connection_at: float = 0.0
    connection_wait_s: float = 0.0
    connection_probe: bool = False
    # The present window and what former ones taught.
    window_at: float | None = None
    attempts: int = 0
    bad: int = 0
    any_4xx: int = 0
    refused_run: int = 0
    reply_s: float = 0.0
    replies: int = 0
    most_connections: int = 0
    last_attempts: int = 0
    quiet_share: float = 0.0
    usual_reply_s: float = 0.0
    unreachable: int = 0
    # The rate of attempts now: counted in slices of ten seconds.
    slice_at: float = 0.0
    slice_attempts: int = 0
    attempted_per_s: float = 0.0
    # What is no part of a rate: nothing was tried, for there was nothing to try, or nobody who tried.
    last_at: float = 0.0
    idle_s: float = 0.0  # of the present window

    def _idle_after_s(self) -> float:
        """A gap so much longer than usual is no slow traffic, it is none."""
        if self.attempted_per_s:
            return max(SHORTEST_IDLE_S, IDLE_INTERVALS / self.attempted_per_s)
        if self.slice_attempts < 5:
            return WINDOW_S
        return max(SHORTEST_IDLE_S, IDLE_INTERVALS * (self.last_at - self.slice_at) / self.slice_attempts)

    def window_rate(self, now: float) -> float:
        """Attempts a second in the present window, while anything was tried."""
        idle_s = self.idle_s + max(0.0, now - self.last_at - self._idle_after_s())
        return self.attempts / max(1.0, WINDOW_S - idle_s)

    def attempt_rate(self, now: float) -> float:
        """Attempts a second, lately."""
        elapsed = now - self.slice_at
        if elapsed >= 3.0 or not self.attempted_per_s:
            return self.slice_attempts / max(elapsed, 1.0)
        return self.attempted_per_s

    def count(self, seen: Observation) -> None:
        """Add an answer to the window and the slice."""
        now = seen.now
        if self.window_at is None:
            self.window_at = self.slice_at = self.last_at = now
        idle_s = now - self.last_at - self._idle_after_s()
        if idle_s > 0:
            self.idle_s += idle_s
            self.slice_at += idle_s
        self.last_at = now
        if now - self.slice_at >= 10.0:
            self.attempted_per_s = self.slice_attempts / (now - self.slice_at)
            self.slice_at, self.slice_attempts = now, 0
        self.attempts += seen.count
        self.slice_attempts += seen.count
        if seen.signal in PRESSURE:
            self.bad += seen.count
        if seen.signal in ANY_4XX:
            self.any_4xx += seen.count
        if seen.reply_s is not None:
            self.reply_s += seen.reply_s * seen.count
            self.replies += seen.count
        if seen.connections is not None:
            self.most_connections = max(self.most_connections, seen.connections)

    def next_window(self, now: float) -> None:
        """Begin a new window; the last one's reply time flows into the usual one where it was no refusal's."""
        if self.replies:
            mean = self.reply_s / self.replies
            weight = 0.1 if self.usual_reply_s else 1.0
            self.usual_reply_s += weight * (min(mean, 2 * self.usual_reply_s or mean) - self.usual_reply_s)
        self.last_attempts = self.attempts
        self.attempts = self.bad = self.any_4xx = self.replies = self.most_connections = 0
        self.reply_s = 0.0
        self.window_at = now
        self.idle_s = 0.0

    def suspend(self, now: float, pause_s: float, reason: str) -> None:
        """Nothing until the pause is over; then `is_recovering` brings it back."""
        self.goal_connections = max(self.goal_connections if self.is_recovering else 0, self.connections)
        self.pause_s = pause_s
        self.suspended_until_at = now + pause_s
        self.is_recovering = True
        self.recovered = 0
        self.measuring_at = None
        self.eased_at = now
        self.reason = reason
