"""A breaker per provider: when a provider suddenly calls many of its users unknown, it is the provider. Pure.

On 2020-12-14 Gmail answered `550 5.1.1` to valid users for hours; Apple did so on 2021-04-26. Whoever suppressed at
once lost good subscribers for good. While a breaker is open, hard bounces of that provider are recorded as provisional.
"""

from __future__ import annotations

from collections import deque

import msgspec

_HOUR_US = 3_600_000_000


class BreakerLimit(msgspec.Struct, frozen=True):
    """When a breaker opens: `bounces` hard ones within `hours`, and more than `share` of the provider's rows."""

    bounces: int = 50
    share: float = 0.1
    hours: float = 6.0


class Breakers:
    """What was hard lately, by provider."""

    def __init__(self, limit: BreakerLimit, rows_of: dict[str, int], all_rows: int = 0) -> None:
        """`rows_of`: the provider's rows in the campaign, where known; else all of the campaign's count."""
        self._limit = limit
        self._rows_of = rows_of
        self._all_rows = all_rows
        self._hard: dict[str, deque[int]] = {}

    def add(self, provider: str, at_us: int) -> bool:
        """One more hard bounce; True while the provider's breaker is open."""
        if not provider:
            return False
        times = self._hard.setdefault(provider, deque())
        times.append(at_us)
        while times and times[0] < at_us - self._limit.hours * _HOUR_US:
            times.popleft()
        return self.is_open(provider)

    def is_open(self, provider: str) -> bool:
        """Whether hard bounces of this provider are to be doubted now."""
        count = len(self._hard.get(provider, ()))
        rows = self._rows_of.get(provider, self._all_rows)
        return count >= self._limit.bounces and (rows == 0 or count > self._limit.share * rows)

    def open_ones(self) -> list[str]:
        """The providers whose breaker is open."""
        return sorted(provider for provider in self._hard if self.is_open(provider))
