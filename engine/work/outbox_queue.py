"""The rows that this server has claimed, in the order they go: what `pace.scheduler` is to a campaign's worker.

Few rows are here, all with their values: what cannot go soon is put back into the table, where it costs nothing. Per
lane there is a queue for each priority; priority 1 goes first, then 2, then 3, but of `TURN` rows taken one is of the
lowest priority that waits, so that nothing starves.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import msgspec

from engine.control.outbox import Claimed
from engine.pace.places import Suspension

TURN = 10
CROWDED_S = 2.0  # rows of a destination that has enough of them here look in again after so long
PRIORITIES = (1, 2, 3)


class Seat(msgspec.Struct):
    """A claimed row here."""

    claimed: Claimed
    lane: int = -1
    first_at: float | None = None  # monotonic
    is_in_flight: bool = False
    is_void: bool = False  # the table says that it is not ours any more


class _Lane:
    __slots__ = ("queues", "suspension", "turn")

    def __init__(self) -> None:
        self.queues: dict[int, deque[int]] = {priority: deque() for priority in PRIORITIES}
        self.suspension: Suspension | None = None
        self.turn = 0

    @property
    def rows(self) -> int:
        return sum(map(len, self.queues.values()))


class OutboxQueue:
    """Has the methods of `Scheduler` that dispatch, settlement and lanes use."""

    def __init__(self, put_back: Callable[[Claimed, float, bool], None], *, per_lane: int) -> None:
        """`put_back` returns a row to the table unattempted, due again after so many seconds; True: its age counts.

        `per_lane` is how many rows of a priority queue at one destination: a slow one must not fill the house.
        """
        self._put_back = put_back
        self._per_lane = per_lane
        self._lanes: dict[int, _Lane] = {}
        self.seats: dict[int, Seat] = {}
        self._now = 0.0
        self.is_stopped = False

    # -- rows come ---------------------------------------------------------------------------------------------------

    def claimed(self, claimed: Claimed, first_at: float | None) -> None:
        """A row is ours; its lane may not be known yet."""
        self.seats[claimed.id] = Seat(claimed, first_at=first_at)

    def add(self, row: int, lane: int) -> bool:
        """The row's lane is known: True, it queues there; False, it is not here, or went back to the table."""
        seat = self.seats.get(row)
        if seat is None or seat.lane >= 0:
            return False
        place = self._lanes.setdefault(lane, _Lane())
        if self.is_stopped or place.suspension is not None:
            self._return(row, place.suspension)
            return False
        if len(place.queues[seat.claimed.priority]) >= self._per_lane:
            self.seats.pop(row)
            self._put_back(seat.claimed, CROWDED_S, False)
            return False
        seat.lane = lane
        place.queues[seat.claimed.priority].append(row)
        return True

    def room(self, priority: int, most: int) -> int:
        """How many more rows of a priority may be claimed."""
        return most - sum(1 for seat in self.seats.values() if seat.claimed.priority == priority)

    def drop(self, row: int) -> Seat | None:
        """The row has an outcome, or is the table's again."""
        seat = self.seats.pop(row, None)
        if seat is not None and seat.lane >= 0 and not seat.is_in_flight:
            queue = self._lanes[seat.lane].queues[seat.claimed.priority]
            if row in queue:
                queue.remove(row)
        return seat

    def return_all(self) -> None:
        """Put back every row that is not in flight."""
        for row, seat in list(self.seats.items()):
            if not seat.is_in_flight:
                self._return(row, None)

    def _return(self, row: int, suspension: Suspension | None) -> None:
        seat = self.drop(row)
        if seat is not None and not seat.is_void:
            until = suspension.until if suspension is not None and suspension.until is not None else self._now
            self._put_back(seat.claimed, max(0.0, until - self._now), suspension is not None)

    # -- what dispatch and settlement ask and tell -------------------------------------------------------------------

    def take(self, lane: int, limit: int, now: float) -> list[int]:
        """Rows to attempt now."""
        place = self._lanes.get(lane)
        if place is None or self.is_stopped or place.suspension is not None:
            return []
        rows: list[int] = []
        while len(rows) < limit:
            waiting = [priority for priority in PRIORITIES if place.queues[priority]]
            if not waiting:
                break
            place.turn += 1
            which = waiting[-1] if place.turn % TURN == 0 else waiting[0]
            row = place.queues[which].popleft()
            self.seats[row].is_in_flight = True
            rows.append(row)
        return rows

    def settle(self, row: int, lane: int) -> None:
        """It has its outcome: `drop` follows when that was told to the table."""

    def give_back(self, row: int, lane: int) -> None:
        """Not attempted: to the front of its lane, unless the table took it from us."""
        seat = self.seats[row]
        seat.is_in_flight = False
        place = self._lanes[lane]
        if seat.is_void:
            del self.seats[row]
        elif self.is_stopped or place.suspension is not None:
            self._return(row, place.suspension)
        else:
            place.queues[seat.claimed.priority].appendleft(row)

    def defer(
        self, row: int, lane: int, due_at: float, attempt: int, first_at: float, expires_at: float | None = None
    ) -> None:
        """It waits in the table; the result that says so was written."""
        self.seats.pop(row, None)

    def history(self, row: int) -> tuple[int, float | None]:
        """(attempts so far, time of the first)."""
        seat = self.seats.get(row)
        return (seat.claimed.attempts, seat.first_at) if seat is not None else (0, None)

    # -- what the clock and the throttle tell ------------------------------------------------------------------------

    def advance(self, now: float) -> list[int]:
        """Suspensions end; nothing expires here, the table's claims see to that."""
        self._now = now
        for lane, place in self._lanes.items():
            if place.suspension is not None and place.suspension.until is not None and place.suspension.until <= now:
                self.resume_lane(lane)
        return []

    def suspend_lane(self, lane: int, until: float | None, reason: str) -> list[int]:
        """The lane offers nothing until then; its rows go back to the table. Returns them."""
        place = self._lanes.setdefault(lane, _Lane())
        place.suspension = Suspension(until, reason)
        rows = [row for queue in place.queues.values() for row in queue]
        for row in rows:
            self._return(row, place.suspension)
        return rows

    def resume_lane(self, lane: int) -> None:
        """The lane takes rows again."""
        if (place := self._lanes.get(lane)) is not None:
            place.suspension = None

    def suspension(self, lane: int) -> Suspension | None:
        place = self._lanes.get(lane)
        return place.suspension if place is not None else None

    def stop(self) -> None:
        """No more rows are handed out."""
        self.is_stopped = True

    def demand(self) -> dict[int, int]:
        """Rows that could be attempted now, per lane that has any."""
        if self.is_stopped:
            return {}
        return {lane: rows for lane, place in self._lanes.items() if place.suspension is None and (rows := place.rows)}

    def urgent(self) -> dict[int, int]:
        """Of these, rows of priority 1 and 2."""
        if self.is_stopped:
            return {}
        counts = {
            lane: len(place.queues[1]) + len(place.queues[2])
            for lane, place in self._lanes.items()
            if place.suspension is None
        }
        return {lane: rows for lane, rows in counts.items() if rows}

    def next_due(self) -> float | None:
        """When a suspension ends."""
        times = [p.suspension.until for p in self._lanes.values() if p.suspension and p.suspension.until is not None]
        return min(times, default=None)

    def wanted(self, limit: int) -> list[int]:
        """Nothing is parked here."""
        return []

    def returned(self, row: int) -> bool:
        """Nothing is read again here."""
        return False

    def abandon(self, lane: int) -> list[tuple[int, int]]:
        """None: rows of a destination that cannot be reached are in the table, and give up by their own age."""
        return []

    def suspended_rows(self) -> int:
        """None: they went back to the table."""
        return 0

    @property
    def open_rows(self) -> int:
        return len(self.seats)

    @property
    def ready(self) -> int:
        return sum(place.rows for place in self._lanes.values())

    @property
    def parked(self) -> int:
        return 0

    @property
    def waiting(self) -> int:
        return 0
