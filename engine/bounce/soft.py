"""Soft bounces add up: enough of them, over enough days, and nobody reads there. Pure.

A full mailbox today is a holiday; five refusals over two weeks from mails sent on different days are an abandoned
mailbox. One day's burst never suppresses, and a message that arrives starts the count anew.
"""

from __future__ import annotations

import msgspec

_DAY_US = 86_400_000_000


class SoftLimit(msgspec.Struct, frozen=True):
    """When soft bounces suppress: at least `bounces` of them on different days, first and last `days` apart."""

    bounces: int = 5
    days: float = 7.0
    within_days: float = 90.0  # older ones are forgotten


class SoftCounts:
    """The soft bounces of each address, by day."""

    def __init__(self, limit: SoftLimit) -> None:
        self._limit = limit
        self._days: dict[str, set[int]] = {}

    def add(self, address: str, at_us: int) -> bool:
        """Count one; True where the address has had enough. Two of one day count once."""
        day = at_us // _DAY_US
        days = self._days.setdefault(address, set())
        days.add(day)
        recent = {one for one in days if one > day - self._limit.within_days}
        self._days[address] = recent
        return len(recent) >= self._limit.bounces and max(recent) - min(recent) >= self._limit.days

    def forget(self, address: str) -> None:
        """The address took a message, or was suppressed: it starts anew."""
        self._days.pop(address, None)

    def count(self, address: str) -> int:
        """Days with a soft bounce, as far as they are remembered."""
        return len(self._days.get(address, ()))
