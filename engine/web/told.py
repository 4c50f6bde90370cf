"""What senders tell of themselves once a second, typed, and its sums by provider. Pure: rows of the store go in.

The counters are those of `engine.work.progress.Progress.counters`; a worker in another language tells a few of them.
Unknown fields are skipped, missing ones are zero, and counters that cannot be read count as none: the page must not
fall for what one sender says.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from engine.control.store import Incarnation, Life

LIMITS = ("suspended", "throttle", "budget", "slowed", "nothing")


class ProviderCounts(msgspec.Struct):
    """One provider over all senders; what is so *now* (from connections on) only from living ones."""

    accepted: int = 0
    rejected: int = 0
    deferred: int = 0
    lost: int = 0
    in_doubt: int = 0
    connections: int = 0
    allowed: int = 0
    waiting: int = 0
    limit: str = ""
    suspended_until_us: int | None = None


class ProviderTold(ProviderCounts, gc=False):
    """One provider at one sender. Two hundred of each sender live for a second: the collector need not look."""

    reply_s: list[float] = []
    reply_s_sum: float = 0.0


class KeyTold(msgspec.Struct, array_like=True, gc=False):
    """One source at one provider. Of the `refused`, so many for good and so many without a reply."""

    source: str
    provider: str
    accepted: int = 0
    refused: int = 0
    held: int = 0
    allowed: int = 0
    suspended_until_us: int | None = None
    rejected: int = 0
    lost: int = 0


class Told(msgspec.Struct):
    """One sender's counters."""

    accepted: int = 0
    bounced: int = 0
    invalid: int = 0
    suppressed: int = 0
    expired: int = 0
    in_doubt: int = 0
    left: int | None = None
    waiting: int = 0
    ready: int = 0
    parked: int = 0
    in_flight: int = 0
    processes: int = 0
    per_second: float = 0.0
    next_due_us: int | None = None
    reason: str = ""
    providers: dict[str, ProviderTold] = {}
    keys: list[KeyTold] = []
    replies: list[tuple[str, str, int]] = []
    events: list[dict[str, Any]] = []
    log_commits: list[float] = []
    window_times: list[float] = []


_DECODE = msgspec.json.Decoder(Told, strict=False)
NOTHING = Told()


def read_told(counters: str | bytes | Mapping[str, object]) -> Told:
    """The counters, from JSON or from what it says."""
    try:
        if isinstance(counters, str | bytes):
            return _DECODE.decode(counters)
        return msgspec.convert(counters, Told, strict=False)
    except msgspec.MsgspecError:
        return NOTHING


class Heard(msgspec.Struct, frozen=True, kw_only=True):
    """One start of a sender as the store has it."""

    id: str
    sender: str
    pid: int
    partition: int | None
    state: Life
    started_at_us: int
    renewed_at_us: int
    lease_us: int
    told: Told
    has_told: bool  # anything at all

    def is_alive(self, now_us: int) -> bool:
        """Its lease stands: it was heard within its length."""
        return self.state is Life.ALIVE and now_us - self.renewed_at_us < self.lease_us


class Hearing:
    """Reads counters, those that changed alone: of a sender that is gone they never do."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[object, Told]] = {}

    def told(self, id_: str, version: object, counters: str | Mapping[str, object]) -> Told:
        """The counters of an incarnation; `version` differs whenever they do."""
        known = self._known.get(id_)
        if known is None or known[0] != version:
            known = self._known[id_] = (version, read_told(counters))
        return known[1]

    def of_incarnation(self, one: Incarnation) -> Heard:
        """As a shared store tells it."""
        return Heard(
            id=one.id,
            sender=one.sender,
            pid=one.pid,
            partition=one.partition,
            state=one.state,
            started_at_us=one.started_at_us,
            renewed_at_us=one.renewed_at_us,
            lease_us=one.lease_us,
            told=self.told(one.id, (one.renewed_at_us, one.state), one.counters),
            has_told=bool(one.counters),
        )


def sums(heard: Iterable[Heard], now_us: int) -> dict[str, ProviderCounts]:
    """Providers over all starts of senders."""
    found: dict[str, ProviderCounts] = {}
    for one in heard:
        is_alive = one.is_alive(now_us)
        for name, told in one.told.providers.items():
            mine = found.get(name)
            if mine is None:
                mine = found[name] = ProviderCounts()
            mine.accepted += told.accepted
            mine.rejected += told.rejected
            mine.deferred += told.deferred
            mine.lost += told.lost
            mine.in_doubt += told.in_doubt
            if is_alive:
                mine.connections += told.connections
                mine.allowed += told.allowed
                mine.waiting += told.waiting
                mine.limit = told.limit or mine.limit
                mine.suspended_until_us = told.suspended_until_us or mine.suspended_until_us
    return found


def limit_kind(limit: str) -> str:
    """Of `LIMITS`, what a sender's words about a provider say."""
    return next((kind for kind in LIMITS if limit.startswith(kind)), "nothing")
