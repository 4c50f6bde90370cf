"""The supervisor's ledger of connections and message allowances, over all its worker processes. Pure.

A *slot* is the right to hold one connection for a key (source, provider). A worker opens a connection only with a slot
and gives the slot back (`closed`) once the connection is closed; a revoked slot is still held until then. So the sum of
slots is never above the limit, be it two connections for eight processes or two hundred. Where the key has rate limits
a worker sends a message only against an unexpired *allowance* (see `allowance`); keys without get no such traffic.

Who gets what: the worker with the fewest slots among those with rows waiting, the longest waiting first. Slots return
by themselves when connections end (after N messages, when idle); they are revoked only where that would take long: from
workers without rows, from a worker with two more than another that waits, and, where the limit is smaller than the
number of workers, one at a time after a turn of `_TURN_S`. Low rates get connections only when a message may soon go.

The ledger answers events; call `decide` after some, and at `next_at`.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TypeAlias

import msgspec

from engine.pace.allowance import Purse, Rate

Key: TypeAlias = tuple[str, str]  # (source, provider); source "*" where one budget covers all sources

_IDLE_S = 2.0  # a worker without waiting rows keeps its connections so long before another may have them
_TURN_S = 30.0  # the turn of a worker where there are fewer slots than workers
_EVEN_S = 5.0  # between two rounds of evening out
_SOON_S = 1.0  # a connection is worth opening when a message may go this soon
_PATIENCE_S = 10.0  # the longest a message occupies a connection, for how many a rate can use
_QUANTUM_S = 0.05  # allowances of one key are handed out at most this often
_URGENT_ROWS = 4  # urgent rows for which one more connection is taken from others: what one has in hand
_SHARE = 0.1  # of connections and messages, left to the others while urgent rows could use all


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


class _Seat:
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


class _Desk:
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
        self.seats: dict[int, _Seat] = {}
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

    def seat(self, worker: int, now: float) -> _Seat:
        seat = self.seats.get(worker)
        if seat is None:
            seat = self.seats[worker] = _Seat(now)
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


class Ledger:
    """Who holds what. Times are monotonic seconds of one clock; every method may be called in any order."""

    def __init__(self, limit_of: Callable[[Key], Limit]) -> None:
        self._limit_of = limit_of
        self._desks: dict[Key, _Desk] = {}
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

    def remember(self, key: Key, sent: Iterable[tuple[float, int]], now: float) -> None:
        """After a restart: (moment, messages) sent before, oldest first, by the logs."""
        purse = self._desk(key, now).purse
        if purse is not None:
            for at, messages in sent:
                purse.remember(messages, at, now)

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
            at = self._connections(key, desk, now, decisions)
            if desk.purse is not None:
                at = min(at, self._messages(key, desk, desk.purse, now, decisions))
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

    def _desk(self, key: Key, now: float) -> _Desk:
        desk = self._desks.get(key)
        if desk is None:
            desk = self._desks[key] = _Desk(self._limit_of(key), now)
        return desk

    def _connections(self, key: Key, desk: _Desk, now: float, out: list[Decision]) -> float:
        """Grants and revokes for one key; when to look again."""
        allowed = desk.allowed
        free = allowed - desk.held
        if free == 1 and desk.purse is None and desk.opening is None:
            return self._pass_on(key, desk, now, out)
        if free < 0:
            if free + desk.leaving < 0:
                self._shrink(key, desk, -(free + desk.leaving), out)
            return math.inf
        hungry = [(seat.held - seat.leaving, seat.since, worker) for worker, seat in desk.seats.items()
                  if seat.rows > 0 and seat.held - seat.leaving < seat.rows]  # fmt: skip
        if not hungry:
            return math.inf
        again = math.inf
        if free > 0:
            if desk.purse is not None:
                soon, again = _worth_opening(desk, desk.purse, now)
                free = min(free, soon)
            if desk.opening is not None and free > 0:
                may = desk.opening.available(now)
                if may < free:
                    again = min(again, desk.opening.next_at(now) if not may else now + _QUANTUM_S)
                free = min(free, may)
            self._fill(key, desk, hungry, free, now, out)
            if desk.held < allowed:
                return again
        return min(again, self._even_out(key, desk, allowed, now, out))

    def _pass_on(self, key: Key, desk: _Desk, now: float, out: list[Decision]) -> float:
        """The steady state, nearly all of the traffic: one slot came back and goes to who has the fewest."""
        best: _Seat | None = None
        best_worker = best_active = 0
        for worker, seat in desk.seats.items():
            active = seat.held - seat.leaving
            if (seat.urgent or seat.is_warm) and seat.lacking > 0:
                best, best_worker = seat, worker
                break
            if seat.rows > active and (
                best is None or active < best_active or (active == best_active and seat.since < best.since)
            ):
                best, best_worker, best_active = seat, worker, active
        if best is None:
            return math.inf
        best.held += 1
        best.got_at = now
        desk.held += 1
        out.append(Grant(best_worker, key, 1))
        # All are out now. Whether somebody should give way is asked at the next event, not for every slot.
        return now + _IDLE_S

    def _fill(
        self, key: Key, desk: _Desk, hungry: list[tuple[int, float, int]], free: int, now: float, out: list[Decision]
    ) -> None:
        """Gives `free` slots, one at a time to who has the fewest."""
        valid_s = math.inf if desk.opening is None else desk.opening.valid_s
        urgent = [one for one in hungry if (seat := desk.seats[one[2]]).lacking > 0 and (seat.urgent or seat.is_warm)]
        if urgent and len(urgent) < len(hungry):
            most = min(free, sum(desk.seats[worker].lacking for _, _, worker in urgent))
            self._fill(key, desk, urgent, most, now, out)
            free -= most
            if not free:
                return
        if free == 1 or len(hungry) == 1:
            active, _, worker = min(hungry)
            given = {worker: min(free, desk.seats[worker].rows - active)}
        else:
            given = {}
            heapq.heapify(hungry)
            while free and hungry:
                active, since, worker = hungry[0]
                given[worker] = given.get(worker, 0) + 1
                free -= 1
                if active + 1 < desk.seats[worker].rows:
                    heapq.heapreplace(hungry, (active + 1, since, worker))
                else:
                    heapq.heappop(hungry)
        for worker, connections in given.items():
            if not connections:
                continue
            seat = desk.seats[worker]
            seat.held += connections
            seat.got_at = now
            desk.held += connections
            desk.is_crowded = False
            if desk.opening is not None:
                desk.opening.give(worker, connections, now)
            out.append(Grant(worker, key, connections, valid_s))

    def _shrink(self, key: Key, desk: _Desk, excess: int, out: list[Decision]) -> None:
        """Revokes `excess` slots: of workers without rows first, then of who has the most."""
        taken: dict[int, int] = {}
        heap = [
            (seat.rows > 0 and (1 + (seat.urgent > 0 or seat.is_warm)), -seat.active, worker)
            for worker, seat in desk.seats.items()
            if seat.active
        ]
        heapq.heapify(heap)
        while excess and heap:
            busy, active, worker = heap[0]
            taken[worker] = taken.get(worker, 0) + 1
            excess -= 1
            if active + 1 < 0:
                heapq.heapreplace(heap, (busy, active + 1, worker))
            else:
                heapq.heappop(heap)
        for worker, connections in taken.items():
            self._revoke(key, desk, worker, connections, out)

    def _even_out(self, key: Key, desk: _Desk, allowed: int, now: float, out: list[Decision]) -> float:
        """All slots are out and somebody waits: may somebody else give one up? Returns when to ask again."""
        if desk.leaving:
            return math.inf  # some are on their way; their `closed` brings us back
        if any(seat.urgent or seat.is_warm for seat in desk.seats.values()) and self._make_way(key, desk, allowed, out):
            return math.inf
        poorest = min(
            ((seat.active, seat.since, worker) for worker, seat in desk.seats.items() if seat.rows > seat.active),
            default=None,
        )
        if poorest is None:
            return math.inf
        again = math.inf
        # Workers that hold connections and have had no rows for a while.
        for worker, seat in desk.seats.items():
            if seat.active and not seat.rows:
                if now - seat.since >= _IDLE_S:
                    self._revoke(key, desk, worker, seat.active, out)
                else:
                    again = min(again, seat.since + _IDLE_S)
        if desk.leaving:
            return again
        richest = max(
            ((seat.active, -seat.got_at, worker) for worker, seat in desk.seats.items() if seat.rows), default=None
        )
        if richest is None:
            return again
        gap = richest[0] - poorest[0]
        if gap >= 2 and desk.seats[richest[2]].urgent:
            return again
        if gap >= 2:
            if now - desk.evened_at >= _EVEN_S:
                desk.evened_at = now
                self._revoke(key, desk, richest[2], gap // 2, out)
                return again
            return min(again, desk.evened_at + _EVEN_S)
        if gap == 1 and poorest[0] == 0:
            # Fewer slots than workers: turns. The oldest holder gives way, one at a time.
            turn_s = _TURN_S if desk.purse is None else max(_TURN_S, 3.0 / desk.purse.per_second)
            at = max(-richest[1], poorest[1]) + turn_s
            if now >= at:
                self._revoke(key, desk, richest[2], 1, out)
            else:
                again = min(again, at)
        return again

    def _make_way(self, key: Key, desk: _Desk, allowed: int, out: list[Decision]) -> bool:
        """Urgent rows do not wait for an even share: others close connections now. Some are left to them."""
        need = sum(max(0, seat.lacking) for seat in desk.seats.values())
        if need <= 0:
            return False
        others = {
            worker: seat.active
            for worker, seat in desk.seats.items()
            if seat.active and not (seat.urgent or seat.is_warm)
        }
        keep = min(allowed - 1, max(1, math.ceil(allowed * _SHARE)))
        need = min(need, sum(others.values()) - keep)
        taken: dict[int, int] = {}
        while need > 0:
            worker = max(others, key=lambda one: others[one])
            others[worker] -= 1
            taken[worker] = taken.get(worker, 0) + 1
            need -= 1
        for worker, connections in taken.items():
            self._revoke(key, desk, worker, connections, out)
        return bool(taken)

    def _revoke(self, key: Key, desk: _Desk, worker: int, connections: int, out: list[Decision]) -> None:
        desk.seats[worker].leaving += connections
        desk.leaving += connections
        out.append(Revoke(worker, key, connections))

    def _messages(self, key: Key, desk: _Desk, purse: Purse, now: float, out: list[Decision]) -> float:
        """Allowances for one key, to workers that hold a connection and have rows; when to look again."""
        if now < desk.next_allow:
            return desk.next_allow
        takers: list[tuple[float, int, int]] = []
        for worker, seat in desk.seats.items():
            if seat.held > seat.leaving and seat.waiting:
                wants = seat.waiting - purse.holding(worker, now)
                if wants > 0:
                    takers.append((seat.allowed_at, worker, wants))
        if not takers:
            return math.inf  # the next demand, grant or report brings us back
        left = purse.available(now)
        if not left:
            return purse.next_at(now)
        takers.sort()  # who was served longest ago comes first
        if any(desk.seats[worker].urgent for _, worker, _ in takers):
            left = self._urgent_messages(key, desk, purse, left, takers, now, out)
        while left and takers:
            share = -(-left // len(takers))
            _, worker, wants = takers.pop(0)
            messages = min(share, wants, left)
            left -= messages
            purse.give(worker, messages, now)
            desk.seats[worker].allowed_at = now
            out.append(Allow(worker, key, messages, purse.valid_s))
        desk.next_allow = now + _QUANTUM_S
        return max(desk.next_allow, purse.next_at(now)) if takers or left == 0 else math.inf

    def _urgent_messages(
        self,
        key: Key,
        desk: _Desk,
        purse: Purse,
        left: int,
        takers: list[tuple[float, int, int]],
        now: float,
        out: list[Decision],
    ) -> int:
        """Urgent rows take what they want of `left`, but for the tenth that the others have saved up; what is left."""
        have_others = any(not desk.seats[worker].urgent for _, worker, _ in takers)
        owed = min(left, int(desk.credit)) if have_others else 0
        for place, (_, worker, wants) in enumerate(takers):
            seat = desk.seats[worker]
            messages = min(seat.urgent - purse.holding(worker, now), wants, left - owed)
            if messages <= 0:
                continue
            left -= messages
            desk.credit = min(desk.credit + messages * _SHARE, 10.0) if have_others else 0.0
            purse.give(worker, messages, now)
            seat.allowed_at = now
            out.append(Allow(worker, key, messages, purse.valid_s))
            takers[place] = (now, worker, wants - messages)
        takers[:] = [taker for taker in takers if taker[2] > 0 and not (desk.seats[taker[1]].urgent and have_others)]
        if have_others:
            desk.credit = max(0.0, desk.credit - left)
        return left


def _worth_opening(desk: _Desk, purse: Purse, now: float) -> tuple[int, float]:
    """How many more connections the messages that may go soon can use, and when to ask again."""
    if purse.per_second >= 1.0:
        return desk.allowed, math.inf
    soon = purse.available(now) + purse.outstanding
    if not soon:
        at = purse.next_at(now) - _SOON_S
        if at > now:
            return 0, at
        soon = 1
    # Allowance that came back unused says that the connections there are were busy or still opening.
    return max(soon - (desk.held - desk.leaving), int(desk.is_crowded)), math.inf
