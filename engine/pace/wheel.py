"""Rows between attempts, by when they are due, in 16 bytes each: a timing wheel of numbers.

A record is a row's history in three 32-bit words: its number; when it was first attempted; its maximum age, priority
and attempts. Times are quarters of a second from the wheel's base, which is the earliest time it was told of first.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Iterator

TICK_S = 5.0  # the wheel's grain by default: a row is due at most this much late
RECORD_WORDS = 3  # row; first attempt; age, priority and attempts
_WHEEL_WORDS = 4  # the same, and the lane

_QUARTERS = 4
_PAST = 1 << 30  # quarters of a second before the base, 8.5 years: first attempts may lie before a restart
_AGE_BITS = 22  # seconds, 48 days
_NO_AGE = 0


class Wheel:
    """Buckets of records, each a tick wide; their number is bounded by the longest wait over the tick."""

    __slots__ = ("_base", "_ticks", "buckets", "tick_s")

    def __init__(self, tick_s: float) -> None:
        self.tick_s = tick_s
        self.buckets: dict[int, array[int]] = {}
        self._ticks: list[int] = []
        self._base: float | None = None

    def put(
        self, row: int, lane: int, due_at: float, *, attempt: int, priority: int, first_at: float,
        expires_at: float | None,
    ) -> None:  # fmt: skip
        """Keep the row until `due_at`, or until it expires: by then it is looked at."""
        if self._base is None:
            self._base = min(first_at, due_at)
        if expires_at is not None:
            due_at = min(due_at, expires_at)
        tick = -int(-(due_at - self._base) // self.tick_s)
        bucket = self.buckets.get(tick)
        if bucket is None:
            bucket = self.buckets[tick] = array("I")
            heapq.heappush(self._ticks, tick)
        bucket.extend((row, self.pack_time(first_at), pack(attempt, priority, first_at, expires_at), lane))

    def due(self, now: float) -> Iterator[tuple[int, int, int, int]]:
        """Take out what is due: (row, packed first attempt, packed rest, lane), the earliest bucket first."""
        if self._base is None:
            return
        # The very sum that `next_at` tells: a quotient would round otherwise, and a driver would wake for nothing.
        while self._ticks and self._base + self._ticks[0] * self.tick_s <= now:
            bucket = self.buckets.pop(heapq.heappop(self._ticks))
            for at in range(0, len(bucket), _WHEEL_WORDS):
                yield bucket[at], bucket[at + 1], bucket[at + 2], bucket[at + 3]

    def next_at(self) -> float | None:
        """When the first bucket is due; None where nothing waits."""
        return self._base + self._ticks[0] * self.tick_s if self._ticks and self._base is not None else None

    def rows(self) -> Iterator[tuple[int, int]]:
        """(row, lane) of everything that waits."""
        for bucket in self.buckets.values():
            for at in range(0, len(bucket), _WHEEL_WORDS):
                yield bucket[at], bucket[at + 3]

    def pack_time(self, at: float) -> int:
        """A time as a word of a record."""
        assert self._base is not None
        return round((at - self._base) * _QUARTERS) + _PAST

    def time(self, packed: int) -> float:
        """That word as seconds again, to a quarter."""
        assert self._base is not None
        return self._base + (packed - _PAST) / _QUARTERS


def pack(attempt: int, priority: int, first_at: float, expires_at: float | None) -> int:
    """Age (22 bits, seconds, 0: none), priority (2 bits), attempts (8 bits)."""
    age = _NO_AGE
    if expires_at is not None:
        age = max(1, min((1 << _AGE_BITS) - 1, int(expires_at - first_at + 0.999)))
    return age << 10 | priority << 8 | min(attempt, 255)


def unpack(meta: int, first_at: float) -> tuple[int, int, float | None]:
    """(attempts, priority, when it expires)."""
    age = meta >> 10
    return meta & 255, (meta >> 8) & 3, first_at + age if age else None


def attempts_of(meta: int) -> int:
    """The attempts alone."""
    return meta & 255


def priority_of(meta: int) -> int:
    """The priority alone."""
    return (meta >> 8) & 3
