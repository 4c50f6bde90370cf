"""Message allowances for one key: exact in every sliding window, spent evenly. Pure.

An allowance of n messages given at t is good until t + valid_s; the worker may send at any moment in between. So it
counts against the limit from t until `last possible moment + per_s + margin`. The last possible moment is its expiry,
or earlier where the worker has said when it sent (`spent`). Hence no window of length `per_s`, wherever it is laid,
holds more than `count` messages, whatever the workers do; and the rate reached is per_s / (per_s + margin + delay until
it was sent), above 98 % where the reports come promptly.

`margin` covers the network between us and whoever counts: two messages sent a minute apart may arrive 20 ms nearer.
"""

from __future__ import annotations

import math
from collections import deque

import msgspec

_CATCH_UP = 1.05  # tokens come a little faster than the rate, to make up for stalls; the window is what holds
_BURST_S = 0.5  # what may go at once, in seconds of the rate
_ROUNDING = 1e-6
_LATE_S = 5.0  # reports of an expired allowance are still heard for so long
_TIDY = 32  # accounted allowances that may lie about


class Rate(msgspec.Struct, frozen=True):
    """At most `count` in any `per_s` seconds, spent evenly over `spread_s` (default: `per_s`)."""

    count: int
    per_s: float
    spread_s: float | None = None

    @property
    def per_second(self) -> float:
        """The long-run rate."""
        return self.count / self.per_s

    @property
    def margin_s(self) -> float:
        """Half a percent of the window, 10 ms at least, a second at most."""
        return min(max(self.per_s * 0.005, 0.010), 1.0)


class Window:
    """How many of a rate's messages are still in a window that reaches into the future."""

    def __init__(self, rate: Rate) -> None:
        self.rate = rate
        self.count = rate.count  # of it ours, where machines share the rate
        self.used = 0
        self._span_s = rate.per_s + rate.margin_s
        self._entries: deque[tuple[float, int]] = deque()  # (when they leave every window, messages), in order
        # Moments nearer than this are one entry, at the later moment: a day's window stays short.
        self._grain_s = rate.per_s / 2000

    def add(self, messages: int, at: float) -> None:
        """Counts messages that were sent at `at` at the latest."""
        self.used += messages
        entries, free_at = self._entries, at + self._span_s
        if entries and entries[-1][0] >= free_at:
            last, count = entries[-1]
            entries[-1] = (last, count + messages)  # later than true: errs on the safe side
        elif len(entries) > 1 and free_at - entries[-2][0] < 2 * self._grain_s:
            entries[-1] = (free_at, entries[-1][1] + messages)  # never drifts by more than two grains
        else:
            entries.append((free_at, messages))

    def left(self, now: float) -> int:
        """Messages that may be sent from now on."""
        entries = self._entries
        while entries and entries[0][0] <= now:
            self.used -= entries.popleft()[1]
        return self.count - self.used

    def free_at(self, messages: int, now: float) -> float:
        """When `messages` could be sent as far as what is counted here goes (inf: never)."""
        missing = messages - self.left(now)
        if missing <= 0:
            return now
        for at, count in self._entries:
            missing -= count
            if missing <= 0:
                return at
        return math.inf

    def history(self) -> list[tuple[float, int]]:
        """What is counted: (moment, messages)."""
        return [(at - self._span_s, count) for at, count in self._entries]


class _Given:
    """One allowance that has been given and not been accounted for in full."""

    __slots__ = ("at", "expires_at", "messages", "worker")

    def __init__(self, worker: int, messages: int, at: float, expires_at: float) -> None:
        self.worker, self.messages, self.at, self.expires_at = worker, messages, at, expires_at


class Purse:
    """All rates of one key together: what may be given now, what was given, what came back."""

    def __init__(self, rates: tuple[Rate, ...], now: float) -> None:
        self.rates = rates
        self._windows = [Window(rate) for rate in rates]
        self._part = 1.0
        self._speed = self._whole_speed = min(rate.count / (rate.spread_s or rate.per_s) for rate in rates) * _CATCH_UP
        self._burst = max(1.0, self._speed * _BURST_S)
        self.sent = 0  # in all
        self.ran_dry = False  # it let nothing through when somebody asked, since that was last looked at
        self._tokens = self._burst
        self._tokens_at = now
        self._given: deque[_Given] = deque()
        self.outstanding = 0
        shortest = min(rate.per_s for rate in rates)
        self.valid_s = min(max(shortest * 0.01, 0.25), 10.0)
        self._late_s = min(shortest, _LATE_S)
        self._accounted = 0

    @property
    def per_second(self) -> float:
        """The long-run rate of the tightest limit; our part of it, where it is shared."""
        return min(rate.per_second for rate in self.rates) * self._part

    def confine(self, counts: tuple[int, ...], part: float, now: float) -> None:
        """Of rates that machines share, so much is ours: a count of each of the first rates, a part of the speed."""
        self._refill(now)
        for window, count in zip(self._windows, counts, strict=False):
            window.count = min(count, window.rate.count)
        self._part = part
        self._speed = self._whole_speed * part
        self._burst = max(1.0, self._speed * _BURST_S)
        self._tokens = min(self._tokens, self._burst)

    def used(self, now: float) -> tuple[int, ...]:
        """Messages in each rate's window, those that workers may still send included."""
        self._expire(now)
        return tuple(window.count - window.left(now) + self.outstanding for window in self._windows)

    def available(self, now: float) -> int:
        """Messages that may be allowed now."""
        self._expire(now)
        self._refill(now)
        left = min(window.left(now) for window in self._windows) - self.outstanding
        left = max(0, min(left, int(self._tokens + _ROUNDING)))
        self.ran_dry |= not left
        return left

    def next_at(self, now: float) -> float:
        """When at least one more message may be allowed; now or later, inf if no limit lets any through."""
        if self.available(now) > 0:
            return now
        if not self._speed:
            return math.inf  # nothing of it is ours
        tokens_at = now if self._tokens + _ROUNDING >= 1 else now + (1 - self._tokens) / self._speed
        at = tokens_at
        for window in self._windows:
            if window.left(now) - self.outstanding <= 0:
                free = window.free_at(min(self.outstanding + 1, max(1, window.count)), now)
                if self._given and window.count <= self.outstanding:
                    # All of it is in workers' hands: the earliest expiry decides, if no report comes first.
                    free = self._given[0].expires_at + window.rate.per_s + window.rate.margin_s
                at = max(at, free)
        return at

    def give(self, worker: int, messages: int, now: float) -> None:
        """Counts an allowance, at most `available`, good for `valid_s`."""
        self._given.append(_Given(worker, messages, now, now + self.valid_s))
        self.outstanding += messages
        self._tokens -= messages

    def holding(self, worker: int, now: float) -> int:
        """Messages the worker may still be about to send on unexpired allowances."""
        return sum(g.messages for g in self._given if g.worker == worker and g.expires_at > now)

    def spent(self, worker: int, messages: int, at: float, now: float) -> None:
        """The worker says that so many were sent, the last at `at` (same clock)."""
        # The oldest go first: what stays may be sent until the latest expiry, which errs on the safe side.
        taken = self._take(worker, messages)
        if taken:
            self._count(taken, min(at, now))

    def unused(self, worker: int, messages: int, now: float) -> None:
        """The worker says that so many will not be sent."""
        self._refill(now)
        self._tokens = min(self._tokens + self._take(worker, messages), self._burst)

    def lost(self, worker: int, now: float) -> None:
        """The worker is dead: what it held counts as sent just now."""
        taken = self._take(worker, self.outstanding)
        if taken:
            self._count(taken, now)

    def remember(self, messages: int, at: float, now: float) -> None:
        """Counts messages sent before this ledger began (a restart), at `at` <= now."""
        self._count(messages, min(at, now))

    def inherit(self, other: Purse) -> None:
        """Takes over what `other` knows was sent, for rates that have changed."""
        longest = max(other._windows, key=lambda window: window.rate.per_s)
        same = {window.rate.per_s: window for window in other._windows}
        for window in self._windows:
            for at, messages in same.get(window.rate.per_s, longest).history():
                window.add(messages, at)
        self._given = other._given
        self.outstanding = other.outstanding
        self._tokens = min(other._tokens, self._burst)
        self._tokens_at = other._tokens_at

    def _take(self, worker: int, messages: int) -> int:
        taken = 0
        for given in self._given:
            if taken == messages:
                break
            if given.worker == worker and given.messages:
                part = min(given.messages, messages - taken)
                given.messages -= part
                taken += part
                self._accounted += not given.messages
        self.outstanding -= taken
        if self._accounted > _TIDY:
            self._given = deque(given for given in self._given if given.messages)
            self._accounted = 0
        while self._given and not self._given[0].messages:
            self._given.popleft()
        return taken

    def _count(self, messages: int, at: float) -> None:
        self.sent += messages
        for window in self._windows:
            window.add(messages, at)

    def _expire(self, now: float) -> None:
        while self._given and (not self._given[0].messages or self._given[0].expires_at + self._late_s <= now):
            given = self._given.popleft()
            self.outstanding -= given.messages
            if given.messages:
                self._count(given.messages, given.expires_at)

    def _refill(self, now: float) -> None:
        if now > self._tokens_at:
            self._tokens = min(self._tokens + (now - self._tokens_at) * self._speed, self._burst)
            self._tokens_at = now
