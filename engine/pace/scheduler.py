"""The order of one worker's work: which row next, at which destination, and where every other row waits meanwhile.

Knows rows and lanes as numbers, and time as an argument; knows no addresses, sockets, budgets or replies. A *lane* is
one destination (a provider, or a domain of its own). Every row that was told and not settled is in exactly one place:

- *ready*: the caller holds its values; bounded by `ready_rows`, and by a share of it per lane;
- *parked*: never attempted, its number alone in its lane, 4 bytes;
- *due*: deferred before, its time has come; its number and history in its lane, 12 bytes;
- *reading*: `wanted()` named it, the caller reads its values again;
- *in flight*: `take()` handed it out;
- *waiting*: in the wheel until its due time, 16 bytes.

So nothing waits behind a slow destination: its rows pile up as numbers while the reader runs ahead to the others.
Times are seconds of one clock that does not go back; they are kept to a quarter of a second. Rows and lanes are
numbers below 2**32.
"""

from __future__ import annotations

import heapq
import random
from array import array
from collections import OrderedDict, deque
from collections.abc import Iterator
from itertools import islice

import msgspec

from engine.pace.places import FRESH, RETRY, Places, Suspension
from engine.pace.wheel import RECORD_WORDS, TICK_S, Wheel, attempts_of, pack, priority_of, unpack

RETRY_SHARE = 8  # of this many rows taken, one is a retry, if any is ready, however many fresh ones there are
EXPIRY_GRAIN_S = 30.0  # lanes of due rows are searched for expired ones this often; `take` never hands one out
BULK = 3  # the priority of a campaign's rows; 1 and 2 go before, and are never parked


class Counts(msgspec.Struct, frozen=True):
    """How many rows are where. `parked` counts due rows too: both are numbers without values."""

    ready: int = 0
    parked: int = 0
    due: int = 0
    reading: int = 0
    waiting: int = 0
    in_flight: int = 0


class Scheduler:
    """One worker's rows, from read to settled."""

    def __init__(
        self,
        *,
        ready_rows: int = 4096,
        ready_rows_per_lane: int = 512,
        tick_s: float = TICK_S,
        rng: random.Random | None = None,
    ) -> None:
        """`tick_s` is the wheel's grain; it bounds the number of its buckets by the longest wait over it."""
        self.ready_rows = ready_rows
        self.ready_rows_per_lane = ready_rows_per_lane
        self._rng = rng or random.Random(0)
        self._lanes: dict[int, Places] = {}
        self._ready_lanes: OrderedDict[int, None] = OrderedDict()  # the least recently taken from comes first
        self._hungry: dict[int, None] = {}  # stored rows and few ready ones, in the order they became so
        self._starved: dict[int, None] = {}  # asked for rows, had none ready, has stored ones
        self._reading: dict[int, int] = {}  # row -> lane
        self._in_flight: dict[int, int] = {}  # row -> lane
        self._history: dict[int, tuple[int, float, float | None]] = {}  # of ready, reading, in flight rows
        self._urgent: dict[int, int] = {}  # row -> priority, where it is not BULK; of the same rows
        self._wheel = Wheel(tick_s)
        self._expiries: list[tuple[float, int]] = []  # (when, lane) where due rows may have expired
        self._resumes: list[tuple[float, int]] = []
        self._expired: dict[int, tuple[int, float, float | None]] = {}  # with history, until `advance` tells them
        self._told: dict[int, tuple[int, float, float | None]] = {}
        self._evicted: list[int] = []
        self._ready = self._parked = self._due = self._waiting = 0
        self._run_ahead = 0
        self.is_stopped = False

    # What the reader tells.

    def add(self, row: int, lane: int, *, priority: int = BULK) -> bool:
        """A row was read: True says keep its values, it is ready; False says drop them, it is parked."""
        place = self._lane(lane)
        if self._run_ahead:
            self._run_ahead -= 1
        if priority < BULK:
            self._urgent[row] = max(priority, 1)
            self._make_ready(place, lane, max(priority, 1) - 1, row)
            return True
        # Rows of a lane that already has parked ones join them: first read, first attempted.
        if (
            place.parked is None
            and place.suspension is None
            and self._ready + len(self._reading) < self.ready_rows
            and place.ready + place.reading < self._share()
        ):
            self._make_ready(place, lane, FRESH, row)
            return True
        self._park(place, lane, row)
        return False

    def has_room(self, rows: int = 1) -> bool:
        """Whether the reader may run ahead by so many: there is room, or a connection asked for rows nobody had."""
        if self.is_stopped:
            return False
        # With one lane there is nothing to find further on: rows read beyond the room would only be read again.
        if self.ready_rows_per_lane >= self.ready_rows and len(self._lanes) == 1:
            (place,) = self._lanes.values()
            share, held = self._share(), place.ready + place.reading
            return place.parked is None and (held + rows <= share or held <= share // 2)
        is_searching = self._run_ahead > 0 and len(self._lanes) > 1
        return self._ready + len(self._reading) < self.ready_rows or is_searching

    def wanted(self, limit: int) -> list[int]:
        """Parked and due rows whose lanes have room again, in row order so that Parquet is read in runs.

        Read them, then say `returned` or `gone` of each. Lanes that a connection waits for come first, and make
        others give up ready rows (see `evicted`) where there is no room.
        """
        if self.is_stopped or not (self._starved or self._hungry):
            return []
        room = self.ready_rows - self._ready - len(self._reading)
        share = self._share()
        out: list[int] = []
        for lane in list(self._starved):
            del self._starved[lane]
            if room <= 0 and len(out) < limit:
                room += self._evict(max(1, share // 2), but=lane)
            room -= self._ask(lane, min(share, room, limit - len(out)), out)
        if room > 0 and len(out) < limit:
            for lane in list(islice(self._hungry, min(room, limit - len(out)))):
                if room <= 0 or len(out) >= limit:
                    break
                del self._hungry[lane]
                room -= self._ask(lane, min(share, room, limit - len(out)), out)
        out.sort()
        return out

    def returned(self, row: int) -> bool:
        """A wanted row was read again: True, it is ready; False, its lane was suspended meanwhile: drop its values."""
        lane = self._reading.pop(row)
        place = self._lanes[lane]
        place.reading -= 1
        if place.suspension is not None and row not in self._urgent:
            self._store_front(place, lane, [row])
            return False
        queue = self._urgent[row] - 1 if row in self._urgent else RETRY if row in self._history else FRESH
        self._make_ready(place, lane, queue, row)
        return True

    def gone(self, row: int) -> int:
        """A wanted row turned out invalid, suppressed or not to be sent now: it is settled. Returns its lane."""
        lane = self._reading.pop(row)
        place = self._lanes[lane]
        place.reading -= 1
        self._forget(row)
        if place.suspension is None and place.stored() and place.ready + place.reading <= self._share() // 2:
            self._hungry[lane] = None
        self._tidy(place, lane)
        return lane

    def evicted(self) -> list[int]:
        """Ready rows that were parked to make room since the last call; the caller drops their values."""
        out, self._evicted = self._evicted, []
        return out

    # What connections tell.

    def take(self, lane: int, limit: int, now: float) -> list[int]:
        """Rows to attempt now, at most `limit`. They are in flight until settled, given back or deferred."""
        place = self._lanes.get(lane)
        if place is None or self.is_stopped or place.suspension is not None:
            if place is None:
                self._run_ahead = 2 * self.ready_rows
            return []
        rows: list[int] = []
        if place.ready:
            self._ready_lanes.move_to_end(lane)
            retries = place.queues[RETRY]
            if retries and place.since_retry + limit >= RETRY_SHARE:
                for _ in range(max(1, limit // RETRY_SHARE)):
                    if retries and (row := self._pop_unexpired(place, retries, now)) is not None:
                        rows.append(row)
                place.since_retry = 0
            for queue in place.queues:
                if queue is None:
                    continue
                if queue is retries:
                    while queue and len(rows) < limit:
                        if (row := self._pop_unexpired(place, queue, now)) is not None:
                            rows.append(row)
                else:
                    while queue and len(rows) < limit:
                        rows.append(queue.popleft())
                        place.ready -= 1
                        self._ready -= 1
            if retries:
                place.since_retry += len(rows)
            for row in rows:
                self._in_flight[row] = lane
            place.in_flight += len(rows)
            if not place.ready:
                self._ready_lanes.pop(lane, None)
                place.queues = [None, None, None, None]
        if place.stored():
            if not rows:
                self._starved[lane] = None
            if place.ready + place.reading <= self._share() // 2:
                self._hungry[lane] = None
        elif len(rows) < limit and not place.reading:
            self._run_ahead = 2 * self.ready_rows
        if not rows:
            self._tidy(place, lane)
        return rows

    def settle(self, row: int, lane: int) -> None:
        """The row has its outcome."""
        place = self._land(row, lane)
        self._forget(row)
        self._tidy(place, lane)

    def give_back(self, row: int, lane: int) -> None:
        """The row was not attempted, or lost before the dot: it goes to the front of its lane with its values."""
        place = self._land(row, lane)
        place.push_front(self._urgent.get(row, BULK) - 1, row)
        self._ready += 1
        self._ready_lanes.setdefault(lane, None)

    def defer(
        self, row: int, lane: int, due_at: float, attempt: int, first_at: float, expires_at: float | None = None
    ) -> None:
        """The row waits until `due_at`; its values may go. Rows not in flight may be told too (after a restart)."""
        if row in self._in_flight:
            self._land(row, lane)
        place = self._lane(lane)
        priority = self._urgent.pop(row, BULK)
        self._history.pop(row, None)
        self._wheel.put(row, lane, due_at, attempt=attempt, priority=priority, first_at=first_at, expires_at=expires_at)
        place.waiting += 1
        self._waiting += 1

    def history(self, row: int) -> tuple[int, float | None]:
        """(attempts so far, time of the first) of a row ready or in flight; (0, None) where it has none.

        Of rows that `advance` told as expired too, until it is called again.
        """
        known = self._history.get(row) or self._told.get(row)
        return (known[0], known[1]) if known is not None else (0, None)

    # What the clock and the operator tell.

    def advance(self, now: float) -> list[int]:
        """Rows that came due join their lanes, suspensions end; returns the rows whose maximum age has passed.

        Those are settled, wherever they waited. Rows in flight are left to their reply.
        """
        while self._resumes and self._resumes[0][0] <= now:
            until, lane = heapq.heappop(self._resumes)
            place = self._lanes.get(lane)
            if place is not None and place.suspension is not None and place.suspension.until == until:
                self.resume_lane(lane)
        for row, first, meta, lane in self._wheel.due(now):
            self._ring(row, first, meta, lane, now)
        while self._expiries and self._expiries[0][0] <= now:
            _, lane = heapq.heappop(self._expiries)
            if (place := self._lanes.get(lane)) is not None:
                self._expire(place, lane, now)
        self._told, self._expired = self._expired, {}
        return list(self._told)

    def next_due(self) -> float | None:
        """When `advance` has something to do, at the earliest."""
        times = [heap[0][0] for heap in (self._expiries, self._resumes) if heap]
        if (at := self._wheel.next_at()) is not None:
            times.append(at)
        return min(times, default=None)

    def suspend_lane(self, lane: int, until: float | None, reason: str) -> list[int]:
        """The lane offers nothing until then (None: until resumed), early retries included.

        Returns its ready rows: they are parked, the caller drops their values.
        """
        place = self._lane(lane)
        place.suspension = Suspension(until, reason)
        if until is not None:
            heapq.heappush(self._resumes, (until, lane))
        self._hungry.pop(lane, None)
        self._starved.pop(lane, None)
        return self._unready(place, lane, place.ready)

    def resume_lane(self, lane: int) -> None:
        """The lane offers its rows again."""
        place = self._lanes.get(lane)
        if place is None or place.suspension is None:
            return
        place.suspension = None
        if place.stored():
            self._hungry[lane] = None
        self._tidy(place, lane)

    def abandon(self, lane: int) -> list[tuple[int, int]]:
        """Take every row that is ready or stored out of the lane, for the caller to settle: (row, attempts)."""
        place = self._lanes.get(lane)
        if place is None:
            return []
        rows: list[tuple[int, int]] = []
        for queue in place.queues:
            for row in queue or ():
                rows.append((row, self.history(row)[0]))
                self._forget(row)
        self._ready -= place.ready
        self._ready_lanes.pop(lane, None)
        place.queues, place.ready = [None, None, None, None], 0
        if place.parked is not None:
            rows += [(row, 0) for row in place.parked[place.parked_at :]]
            self._parked -= place.parked_rows()
        for records, start in ((place.due, place.due_at), (place.urgent, 0)):
            if records is not None:
                rows += [(records[at], attempts_of(records[at + 2])) for at in range(start, len(records), RECORD_WORDS)]
        self._due -= place.due_rows()
        place.parked = place.due = place.urgent = None
        place.parked_at = place.due_at = 0
        place.suspension = None
        self._hungry.pop(lane, None)
        self._starved.pop(lane, None)
        self._tidy(place, lane)
        return rows

    def suspended_rows(self) -> int:
        """Rows of suspended lanes: they wait for the lane, not for a time of their own."""
        return sum(
            place.ready + place.reading + place.parked_rows() + place.due_rows()
            for place in self._lanes.values()
            if place.suspension is not None
        )

    def suspension(self, lane: int) -> Suspension | None:
        """Until when the lane is suspended and why, or None."""
        place = self._lanes.get(lane)
        return place.suspension if place is not None else None

    def stop(self) -> None:
        """Drain: no more rows are handed out; those in flight finish."""
        self.is_stopped = True

    def demand(self) -> dict[int, int]:
        """Rows that could be attempted now, per lane that has any: ready, reading, parked and due."""
        if self.is_stopped:
            return {}
        return {
            lane: rows
            for lane, place in self._lanes.items()
            if place.suspension is None
            and (
                rows := place.ready + place.reading + (place.parked_rows() + place.due_rows() if place.stored() else 0)
            )
        }

    @property
    def ready(self) -> int:
        return self._ready

    @property
    def parked(self) -> int:
        return self._parked + self._due

    @property
    def waiting(self) -> int:
        return self._waiting

    @property
    def in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def open_rows(self) -> int:
        """All rows told and not settled."""
        return self._ready + self._parked + self._due + len(self._reading) + self._waiting + len(self._in_flight)

    def counts(self, lane: int | None = None) -> Counts:
        """Where the rows are, of one lane or of all."""
        if lane is None:
            return Counts(self._ready, self.parked, self._due, len(self._reading), self._waiting, len(self._in_flight))
        place = self._lanes.get(lane)
        if place is None:
            return Counts()
        due = place.due_rows()
        return Counts(place.ready, place.parked_rows() + due, due, place.reading, place.waiting, place.in_flight)

    def lanes(self) -> list[int]:
        """Lanes with any row, or suspended."""
        return list(self._lanes)

    def rows(self) -> Iterator[tuple[int, int, str]]:
        """(row, lane, place) of every open row: what a report calls unsent, and what tests check."""
        for lane, place in self._lanes.items():
            for queue in place.queues:
                for row in queue or ():
                    yield row, lane, "ready"
            if place.parked is not None:
                for row in place.parked[place.parked_at :]:
                    yield row, lane, "parked"
            if place.due is not None:
                for row in place.due[place.due_at :: RECORD_WORDS]:
                    yield row, lane, "due"
            if place.urgent is not None:
                for row in place.urgent[::RECORD_WORDS]:
                    yield row, lane, "due"
        for row, lane in self._reading.items():
            yield row, lane, "reading"
        for row, lane in self._in_flight.items():
            yield row, lane, "in flight"
        for row, lane in self._wheel.rows():
            yield row, lane, "waiting"

    def check(self) -> None:
        """Assert that every row is in exactly one place and that all counts are right; for tests, it is slow."""
        seen: dict[int, str] = {}
        counted: dict[tuple[int, str], int] = {}
        for row, lane, where in self.rows():
            assert row not in seen, f"row {row} is {seen[row]} and {where}"
            seen[row] = where
            counted[lane, where] = counted.get((lane, where), 0) + 1
        for lane, place in self._lanes.items():
            told = self.counts(lane)
            assert not place.is_idle(), f"lane {lane} is kept for nothing"
            assert told.ready == counted.get((lane, "ready"), 0), lane
            assert told.due == counted.get((lane, "due"), 0), lane
            assert told.parked - told.due == counted.get((lane, "parked"), 0), lane
            assert told.reading == counted.get((lane, "reading"), 0), lane
            assert told.waiting == counted.get((lane, "waiting"), 0), lane
            assert told.in_flight == counted.get((lane, "in flight"), 0), lane
            assert (lane in self._ready_lanes) == (place.ready > 0), lane
            if place.suspension is None and place.stored() and place.ready + place.reading == 0:
                assert lane in self._hungry or lane in self._starved, f"lane {lane} would never be read again"
        assert len(seen) == self.open_rows
        assert set(self._history) <= {row for row, where in seen.items() if where in ("ready", "reading", "in flight")}

    # Inside.

    def _lane(self, lane: int) -> Places:
        place = self._lanes.get(lane)
        if place is None:
            place = self._lanes[lane] = Places()
        return place

    def _tidy(self, place: Places, lane: int) -> None:
        if not place.in_flight and place.is_idle():
            self._lanes.pop(lane, None)
            self._hungry.pop(lane, None)
            self._starved.pop(lane, None)

    def _share(self) -> int:
        """Ready rows that one lane may hold: half of the room is shared out, the other is for lanes to come."""
        lanes = len(self._ready_lanes)
        return max(1, min(self.ready_rows_per_lane, self.ready_rows // (2 * lanes) if lanes else self.ready_rows))

    def _make_ready(self, place: Places, lane: int, queue: int, row: int) -> None:
        if not place.ready:
            self._ready_lanes[lane] = None
        place.push(queue, row)
        self._ready += 1

    def _park(self, place: Places, lane: int, row: int) -> None:
        if place.parked is None:
            place.parked = array("I")
            place.parked_at = 0
        place.parked.append(row)
        self._parked += 1
        if place.suspension is None and place.ready + place.reading <= self._share() // 2:
            self._hungry[lane] = None

    def _ask(self, lane: int, limit: int, out: list[int]) -> int:
        """Move up to `limit` stored rows of a lane to reading and append them to `out`; returns how many."""
        place = self._lanes.get(lane)
        if place is None or place.suspension is not None:
            return 0
        room = min(limit, self._share() - place.ready - place.reading)
        asked: list[int] = []
        if room > 0 and place.urgent is not None:
            asked.extend(self._pop_due(place, place.urgent, 0, room))
        if room > len(asked) and place.due is not None:
            # One in RETRY_SHARE while fresh rows are parked: they go first, retries are not starved.
            rest = room - len(asked)
            retries = min(rest, max(1, rest // RETRY_SHARE, rest - place.parked_rows()))
            asked.extend(self._pop_due(place, place.due, place.due_at, retries))
        if room > len(asked) and place.parked is not None:
            start, end = place.parked_at, min(len(place.parked), place.parked_at + room - len(asked))
            asked.extend(place.parked[start:end])
            self._parked -= end - start
            place.parked_at = end
            if end == len(place.parked):
                place.parked = None
            elif end > 64 and end > len(place.parked) // 2:
                place.parked = place.parked[end:]
                place.parked_at = 0
        for row in asked:
            self._reading[row] = lane
        place.reading += len(asked)
        out.extend(asked)
        if place.stored() and place.ready + place.reading <= self._share() // 2:
            self._hungry[lane] = None  # there was no room for all: its turn comes again, behind the others
        return len(asked)

    def _pop_due(self, place: Places, records: array[int], start: int, limit: int) -> list[int]:
        end = min(len(records), start + limit * RECORD_WORDS)
        rows: list[int] = []
        for at in range(start, end, RECORD_WORDS):
            row = records[at]
            first_at = self._wheel.time(records[at + 1])
            attempt, priority, expires_at = unpack(records[at + 2], first_at)
            self._history[row] = (attempt, first_at, expires_at)
            if priority < BULK:
                self._urgent[row] = priority
            rows.append(row)
        self._due -= len(rows)
        rest = records[end:] if end < len(records) else None
        if records is place.urgent:
            place.urgent = rest
        elif rest is None:
            place.due, place.due_at = None, 0
        elif end > 192 and end > len(records) // 2:
            place.due, place.due_at = rest, 0
        else:
            place.due_at = end
        return rows

    def _pop_unexpired(self, place: Places, queue: deque[int], now: float) -> int | None:
        row = queue.popleft()
        place.ready -= 1
        self._ready -= 1
        known = self._history.get(row)
        if known is not None and known[2] is not None and known[2] <= now:
            self._expired[row] = known
            self._evicted.append(row)
            self._forget(row)
            return None
        return row

    def _ring(self, row: int, first: int, meta: int, lane: int, now: float) -> None:
        """A row is due: it joins its lane, or is told where it has expired."""
        place = self._lanes[lane]
        place.waiting -= 1
        self._waiting -= 1
        first_at = self._wheel.time(first)
        attempt, _, expires_at = unpack(meta, first_at)
        if expires_at is not None and expires_at <= now:
            self._expired[row] = (attempt, first_at, expires_at)
            self._tidy(place, lane)
            return
        self._store_due(place, lane, row, first, meta, expires_at)
        if place.suspension is None and place.ready + place.reading <= self._share() // 2:
            self._hungry[lane] = None

    def _store_due(self, place: Places, lane: int, row: int, first: int, meta: int, expires_at: float | None) -> None:
        if priority_of(meta) < BULK:
            if place.urgent is None:
                place.urgent = array("I")
            place.urgent.extend((row, first, meta))
        else:
            if place.due is None:
                place.due, place.due_at = array("I"), 0
            place.due.extend((row, first, meta))
        self._due += 1
        if expires_at is not None and (place.next_expiry is None or expires_at < place.next_expiry):
            place.next_expiry = expires_at
            heapq.heappush(self._expiries, (expires_at, lane))

    def _expire(self, place: Places, lane: int, now: float) -> None:
        """Tell the expired among the due rows of a lane."""
        if place.next_expiry is None or place.next_expiry > now:
            return
        earliest: float | None = None
        for name, start in (("due", place.due_at), ("urgent", 0)):
            records: array[int] | None = getattr(place, name)
            if records is None:
                continue
            kept = array("I")
            for at in range(start, len(records), RECORD_WORDS):
                first_at = self._wheel.time(records[at + 1])
                attempt, _, expires_at = unpack(records[at + 2], first_at)
                if expires_at is not None and expires_at <= now:
                    self._expired[records[at]] = (attempt, first_at, expires_at)
                    self._due -= 1
                else:
                    kept.extend(records[at : at + RECORD_WORDS])
                    if expires_at is not None:
                        earliest = expires_at if earliest is None else min(earliest, expires_at)
            setattr(place, name, kept if len(kept) else None)
        place.due_at = 0
        place.next_expiry = None
        if earliest is not None:
            place.next_expiry = max(earliest, now + EXPIRY_GRAIN_S)
            heapq.heappush(self._expiries, (place.next_expiry, lane))
        self._tidy(place, lane)

    def _evict(self, count: int, *, but: int) -> int:
        """Park ready rows of the lanes longest not taken from, to make room; returns how many."""
        made = 0
        for lane in list(self._ready_lanes)[:64]:
            if made >= count:
                break
            if lane == but:
                continue
            rows = self._unready(self._lanes[lane], lane, count - made)
            self._evicted.extend(rows)
            made += len(rows)
        return made

    def _unready(self, place: Places, lane: int, count: int) -> list[int]:
        """Turn the last `count` ready bulk rows of a lane into numbers again, at the front of what is stored."""
        rows: list[int] = []
        for queue in (place.queues[RETRY], place.queues[FRESH]):
            while queue and len(rows) < count:
                rows.append(queue.pop())
        if not rows:
            return []
        place.ready -= len(rows)
        self._ready -= len(rows)
        rows.reverse()
        self._store_front(place, lane, rows)
        if not place.ready:
            self._ready_lanes.pop(lane, None)
            if place.suspension is None:
                self._hungry[lane] = None
        return rows

    def _store_front(self, place: Places, lane: int, rows: list[int]) -> None:
        fresh = [row for row in rows if row not in self._history]
        if fresh:
            rest = place.parked[place.parked_at :] if place.parked is not None else array("I")
            place.parked, place.parked_at = array("I", fresh) + rest, 0
            self._parked += len(fresh)
        if len(fresh) < len(rows):
            rest = place.due[place.due_at :] if place.due is not None else array("I")
            place.due, place.due_at = None, 0
            for row in rows:
                if (known := self._history.pop(row, None)) is not None:
                    attempt, first_at, expires_at = known
                    meta = pack(attempt, BULK, first_at, expires_at)
                    self._store_due(place, lane, row, self._wheel.pack_time(first_at), meta, expires_at)
            assert place.due is not None
            place.due.extend(rest)

    def _land(self, row: int, lane: int) -> Places:
        was = self._in_flight.pop(row)
        assert was == lane, f"row {row} was taken from lane {was}, not {lane}"
        place = self._lanes[lane]
        place.in_flight -= 1
        return place

    def _forget(self, row: int) -> None:
        if self._history:
            self._history.pop(row, None)
        if self._urgent:
            self._urgent.pop(row, None)
