"""The supervisor's ledger of connections and message allowances, over all its worker processes. Pure.

A *slot* is the right to hold one connection for a key (source, provider). A worker opens a connection only with a slot
and gives the slot back (`closed`) once the connection is closed; a revoked slot is still held until then. So the sum of
slots is never above the limit, be it two connections for eight processes or two hundred. Where the key has rate limits
a worker sends a message only against an unexpired *allowance* (see `allowance`); keys without get no such traffic.

Who gets what is decided in `sharing`; what is known of a key stands in `desks`.

The ledger answers events; call `decide` after some, and at `next_at`.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Collection, Iterable, Mapping

from engine.pace.desks import Allow, Decision, Desk, Grant, Key, Limit, Revoke, Share, Use
from engine.pace.sharing import share_connections, share_messages

__all__ = ["Allow", "Decision", "Grant", "Key", "Ledger", "Limit", "Revoke", "Share", "Use"]


class Ledger:
    """Who holds what. Times are monotonic seconds of one clock; every method may be called in any order."""

    def __init__(self, limit_of: Callable[[Key], Limit]) -> None:
        self._limit_of = limit_of
        self._desks: dict[Key, Desk] = {}
        self._dirty: dict[Key, None] = {}
        self._due: list[tuple[float, Key]] = []

    # What the workers say.

    def demand(
        self,
        worker: int,
        wanted: Mapping[Key, int],
        now: float,
        urgent: Mapping[Key, int] | None = None,
        warm: Collection[Key] = (),
    ) -> None:
        """Rows the worker has waiting for a connection, per key; keys not named stay as they were.

        `urgent` of them go before the rows of all others: they get slots and allowances first, but for a tenth.
        At a `warm` key the worker keeps a connection also while it has no row, so that the next one need not wait.
        """
        for key, rows in wanted.items():
            seat = self._desk(key, now).seat(worker, now)
            if (rows > 0) != (seat.waiting > 0):
                seat.since = now
            seat.waiting = max(rows, 0)
            seat.urgent = min(seat.waiting, urgent.get(key, 0)) if urgent else 0
            seat.is_warm = key in warm
            seat.rows = seat.waiting or int(seat.is_warm)
            self._dirty[key] = None

    def closed(self, worker: int, key: Key, connections: int, now: float) -> None:
        """Slots given back: the connections are closed (or were never opened)."""
        desk = self._desk(key, now)
        seat = desk.seats.get(worker)
        if seat is None:
            return
        closed = min(connections, seat.held)
        left = min(closed, seat.leaving)
        seat.held -= closed
        seat.leaving -= left
        if seat.waiting:
            seat.since = now  # to the end of the queue
        desk.held -= closed
        desk.leaving -= left
        self._dirty[key] = None

    def spent(self, worker: int, key: Key, messages: int, at: float, now: float) -> None:
        """Messages sent on allowances, the last of them at `at` (the machine's monotonic clock is one for all)."""
        purse = self._desk(key, now).purse
        if purse is not None:
            purse.spent(worker, messages, at, now)
            self._dirty[key] = None

    def unused(self, worker: int, key: Key, messages: int, now: float) -> None:
        """Allowance given back: so many messages were not and will not be sent on it."""
        desk = self._desk(key, now)
        if desk.purse is not None:
            desk.is_crowded = True
            desk.purse.unused(worker, messages, now)
            self._dirty[key] = None

    def gone(self, worker: int, now: float) -> None:
        """The worker is dead: its slots are free, its allowances are spent."""
        for key, desk in self._desks.items():
            seat = desk.seats.pop(worker, None)
            if seat is None:
                continue
            desk.held -= seat.held
            desk.leaving -= seat.leaving
            for purse in (desk.purse, desk.opening):
                if purse is not None:
                    purse.lost(worker, now)
            self._dirty[key] = None

    # What the operator and the throttle say.

    def set_limit(self, key: Key, limit: Limit, now: float) -> None:
        """From now on; what was sent before stays counted, what is held above it is revoked."""
        self._desk(key, now).set_limit(limit, now)
        self._dirty[key] = None

    def set_ceiling(self, key: Key, connections: int | None, now: float) -> None:
        """The throttle's word: at most so many connections (0: pause, None: no ceiling), within the limit."""
        self._desk(key, now).ceiling = connections
        self._dirty[key] = None

    def remember(
        self, key: Key, sent: Iterable[tuple[float, int]], now: float, opened: Iterable[tuple[float, int]] = ()
    ) -> None:
        """After a restart: (moment, messages) sent before, and connections opened, oldest first."""
        desk = self._desk(key, now)
        for purse, before in ((desk.purse, sent), (desk.opening, opened)):
            if purse is not None:
                for at, count in before:
                    purse.remember(count, at, now)

    # What the ledger says.

    def decide(self, now: float) -> list[Decision]:
        """Decisions for every key that an event or the time has touched since the last call."""
        due = self._due
        while due and due[0][0] <= now:
            key = heapq.heappop(due)[1]
            desk = self._desks[key]
            if desk.due_at <= now:
                self._dirty[key] = None
        if not self._dirty:
            return []
        decisions: list[Decision] = []
        for key in self._dirty:
            desk = self._desks[key]
            if desk.due_at <= now:
                desk.due_at = math.inf
            at = share_connections(key, desk, now, decisions)
            if desk.purse is not None:
                at = min(at, share_messages(key, desk, desk.purse, now, decisions))
            if at < desk.due_at:  # to be asked too early does no harm, and keeps the heap at one entry a key
                desk.due_at = at
                heapq.heappush(due, (at, key))
        self._dirty.clear()
        return decisions

    def next_at(self, now: float) -> float | None:
        """When `decide` should be called although nothing happened; None: not until something does."""
        if self._dirty:
            return now
        due = self._due
        while due and self._desks[due[0][1]].due_at != due[0][0]:
            heapq.heappop(due)
        return max(due[0][0], now) if due else None

    def held(self, key: Key) -> int:
        """Slots that are out, revoked ones included."""
        desk = self._desks.get(key)
        return desk.held if desk else 0

    def use(self, key: Key, now: float) -> Use:
        """What the key uses now; asked by those who share its limits with other machines."""
        desk = self._desk(key, now)
        messages: tuple[int, ...] = ()
        in_hand, sent, ran_dry = 0, 0, False
        if desk.purse is not None:
            messages, in_hand = desk.purse.used(now), desk.purse.outstanding
            sent, ran_dry = desk.purse.sent, desk.purse.ran_dry
            desk.purse.ran_dry = False
        opened = desk.opening.used(now)[0] if desk.opening is not None else 0
        rows = sum(seat.rows for seat in desk.seats.values())
        return Use(desk.held, rows, messages, opened, in_hand, sent, ran_dry)

    def allowed(self, key: Key, now: float) -> int:
        """Connections that the key may hold now: limit, ceiling, and what its rate can use."""
        return self._desk(key, now).allowed

    def _desk(self, key: Key, now: float) -> Desk:
        desk = self._desks.get(key)
        if desk is None:
            desk = self._desks[key] = Desk(self._limit_of(key), now)
        return desk
