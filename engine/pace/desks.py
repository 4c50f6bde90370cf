"""What the ledger of slots knows of one key: its limit, what was sent, and a seat for each worker. Pure.

Counts only; who gets what is decided in `sharing`, and what happens is told to `slots`. Times are monotonic seconds.
"""

from __future__ import annotations

import math
from typing import TypeAlias

import msgspec

from engine.pace.allowance import Purse, Rate

Key: TypeAlias = tuple[str, str]  # (source, provider); source "*" where one budget covers all sources

_PATIENCE_S = 10.0  # the longest a message occupies a connection, for how many a rate can use
_URGENT_ROWS = 4  # urgent rows for which one more connection is taken from others: what one has in hand


class Share(msgspec.Struct, frozen=True):
    """This machine's part of rates that several share: a count of each of the first rates, a part of the speed."""

    counts: tuple[int, ...]
    part: float
    opening: int = 0  # of the connection rate


class Limit(msgspec.Struct, frozen=True):
    """What a key may use. `connections` 0 stops it; `rates` empty means no allowances are needed."""

    connections: int
    rates: tuple[Rate, ...] = ()
    connection_rate: Rate | None = None
    share: Share | None = None


class Use(msgspec.Struct, frozen=True):
    """What a key uses now: slots that are out, rows that wait, and the counts in the windows of its rates."""

    held: int
    rows: int
    messages: tuple[int, ...]
    opened: int
    in_hand: int  # of the messages, those that workers may still send
    sent: int  # messages in all
    ran_dry: bool  # messages waited for a rate since this was last asked


class Grant(msgspec.Struct, frozen=True, tag=True):
    """So many more slots; a connection not begun within `valid_s` gives its slot back unopened."""

    worker: int
    key: Key
    connections: int
    valid_s: float = math.inf


class Allow(msgspec.Struct, frozen=True, tag=True):
    """So many messages may be sent within `valid_s` of this decision; what was not sent comes back by `unused`."""

    worker: int
    key: Key
    messages: int
    valid_s: float


class Revoke(msgspec.Struct, frozen=True, tag=True):
    """Close so many connections once what is in flight on them is answered."""

    worker: int
    key: Key
    connections: int


Decision: TypeAlias = Grant | Allow | Revoke


class Seat:
    """One worker at one key."""

    __slots__ = ("allowed_at", "got_at", "held", "is_warm", "leaving", "rows", "since", "urgent", "waiting")

    def __init__(self, now: float) -> None:
        self.waiting = 0  # rows
        self.rows = 0  # the same, and at least 1 for a seat that is kept warm: what connections are given by
        self.is_warm = False
        self.urgent = 0  # of these, rows that go before everybody else's
        self.since = now  # when `waiting` last became zero or more than zero
        self.held = 0  # slots, revoked ones included
        self.leaving = 0  # revoked, not yet closed
        self.got_at = now
        self.allowed_at = -math.inf

    @property
    def active(self) -> int:
        return self.held - self.leaving

    @property
    def lacking(self) -> int:
        """Connections that its urgent rows are short of."""
        return max(-(-self.urgent // _URGENT_ROWS), self.is_warm) - self.active


class Desk:
    """One key."""

    __slots__ = (
        "ceiling",
        "credit",
        "due_at",
        "evened_at",
        "held",
        "is_crowded",
        "leaving",
        "limit",
        "next_allow",
        "opening",
        "purse",
        "seats",
    )

    def __init__(self, limit: Limit, now: float) -> None:
        self.seats: dict[int, Seat] = {}
        self.held = 0
        self.leaving = 0
        self.ceiling: int | None = None
        self.credit = 0.0  # messages owed to the others for those that urgent rows took
        self.evened_at = -math.inf
        self.next_allow = -math.inf
        self.due_at = math.inf
        self.is_crowded = False
        self.purse: Purse | None = None
        self.opening: Purse | None = None
        self.set_limit(limit, now)

    def set_limit(self, limit: Limit, now: float) -> None:
        self.limit = limit
        self.purse = _changed(self.purse, limit.rates, now)
        self.opening = _changed(self.opening, (limit.connection_rate,) if limit.connection_rate else (), now)
        if (share := limit.share) is not None:
            if self.purse is not None:
                self.purse.confine(share.counts, share.part, now)
            if self.opening is not None:
                self.opening.confine((share.opening,), share.opening / self.opening.rates[0].count, now)

    def seat(self, worker: int, now: float) -> Seat:
        seat = self.seats.get(worker)
        if seat is None:
            seat = self.seats[worker] = Seat(now)
        return seat

    @property
    def allowed(self) -> int:
        """Connections that may be held now."""
        allowed = self.limit.connections
        if self.ceiling is not None and self.ceiling < allowed:
            allowed = self.ceiling
        if self.purse is not None:
            allowed = min(allowed, math.ceil(self.purse.per_second * _PATIENCE_S))
        return allowed


def _changed(purse: Purse | None, rates: tuple[Rate, ...], now: float) -> Purse | None:
    if not rates:
        return None
    if purse is not None and purse.rates == rates:
        return purse
    fresh = Purse(rates, now)
    if purse is not None:
        fresh.inherit(purse)
    return fresh
