"""From assigned batches to ready rows: read ahead, check the address, look it up in the suppressions, find its lane.

Rows that can have their outcome now (no address, suppressed) get it here and are never attempted. Nothing waits: a row
whose lane is full is parked as a number and read again when the lane has room. With a zone column, the zones of a row
group are read before its rows: rows whose sending hours are closed fall asleep as a bit each (`sleepers.py`), and
their batch is read again when they open.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from engine.pace.scheduler import Scheduler
from engine.rows import Row, RowReader, first_texts
from engine.work.bench import OpenBatch, Recipient, Workbench
from engine.work.messages import Assign
from engine.work.recovery import Waiting
from engine.work.sleepers import Sleepers
from engine.zones import OWN, Zones
from formats.address import AddressError, Mailbox, canonical, parse_mailboxes
from formats.recipients import Span
from formats.sendlog import Reason

STRETCH_ROWS = 256  # rows made into Python values at a time: about a millisecond


class SuppressionCheck(Protocol):
    """What we ask of the suppression list."""

    def check(self, canonical_addresses: Sequence[str]) -> npt.NDArray[np.bool_]:
        """Whether each address is suppressed."""


class Lanes(Protocol):
    """What we ask of routing: where a domain's rows queue."""

    def lane_of(self, domain: str, row: int) -> int | None:
        """The lane, or None while it is not known: the row is then for `hold`."""

    def hold(self, domain: str, row: int) -> None:
        """Keep the row, never attempted, until the domain's lane is known."""

    def hold_waiting(self, domain: str, waiting: Waiting) -> None:
        """The same for a row between attempts, which keeps its plan."""


class _Reading:
    """A batch that is being read: what of it is not to be attempted now, and how many rows may still be."""

    def __init__(
        self,
        batch: OpenBatch,
        spans: Sequence[Span],
        *,
        skip: npt.NDArray[np.bool_] | None = None,
        limit: int | None = None,
        is_again: bool = False,
    ) -> None:
        """`is_again`: it was read before, and what is left of it slept."""
        self.batch, self.skip, self.left, self.is_again = batch, skip, limit, is_again
        self.unread = batch.rows
        self.surveyed: Span | None = None  # the row group whose zones these are
        self.zones: npt.NDArray[np.uint16] = np.zeros(0, np.uint16)
        self.stretches: Iterator[tuple[Span, int, int]] = (
            (span, first, min(STRETCH_ROWS, span.rows - first))
            for span in spans
            for first in range(0, span.rows, STRETCH_ROWS)
        )

    def skip_span(self, span: Span) -> None:
        """The rest of the row group is not to be read."""
        rest = list(self.stretches)
        self.unread -= sum(rows for other, _, rows in rest if other is span)
        self.stretches = iter([stretch for stretch in rest if stretch[0] is not span])

    def attemptable(self, start: int, rows: int) -> list[int]:
        """Which of the rows start .. start + rows - 1 are to be attempted, as places from `start`."""
        if self.skip is None:
            return list(range(rows))
        first = start - self.batch.first_row
        return np.flatnonzero(~self.skip[first : first + rows]).tolist()

    def unread_from(self, row: int) -> int:
        """How many attemptable rows there are from `row` to the batch's end."""
        first = row - self.batch.first_row
        return self.batch.rows - first if self.skip is None else int((~self.skip[first:]).sum())


def suppressed_rows(waiting: Mapping[int, Recipient], suppressions: SuppressionCheck) -> frozenset[int]:
    """Rows that were read, and found good, before somebody suppressed their recipients."""
    found = suppressions.check([canonical(recipient.mailbox) for recipient in waiting.values()])
    return frozenset(row for row, is_suppressed in zip(waiting, found.tolist(), strict=True) if is_suppressed)


class Intake:
    """Reads rows for one worker. The first value of a row is its address."""

    def __init__(
        self,
        bench: Workbench,
        scheduler: Scheduler,
        reader: RowReader,
        lanes: Lanes,
        suppressions: SuppressionCheck,
        zones: Zones | None = None,
    ) -> None:
        """`zones`: the reader's last column is a zone, and rows go in its hours."""
        self._zones = zones
        self.sleepers = Sleepers()
        self._bench = bench
        self._scheduler = scheduler
        self._reader = reader
        self._lanes = lanes
        self._suppressions = suppressions
        self._reading: deque[_Reading] = deque()
        self._returning: deque[Waiting] = deque()

    def assign(self, assigned: Assign) -> None:
        """Take a batch on. Raises ListChanged where a file of it is not the planned one."""
        self._reader.check(assigned.first_row, assigned.rows)
        batch = OpenBatch(assigned.batch, assigned.first_row, assigned.rows, 0)
        skip = None
        if assigned.skip:
            bits = np.unpackbits(np.frombuffer(assigned.skip, np.uint8), count=assigned.rows)
            skip = bits.astype(bool)
        spans = self._reader.spans(assigned.first_row, assigned.rows)
        reading = _Reading(batch, spans, skip=skip, limit=assigned.limit)
        batch.open_rows = reading.unread_from(batch.first_row) + len(assigned.waiting)
        self._bench.resent.update(assigned.resent)
        self._returning.extend(assigned.waiting)
        self._reading.append(reading)
        self._bench.add_batch(batch)

    @property
    def unread(self) -> int:
        """Rows assigned and not looked at yet."""
        asleep = 0
        if self._zones is not None and len(self.sleepers):
            asleep = self.sleepers.awake(self._zones.open_flags(self._bench.clock.wall_us()))
        return sum(reading.unread for reading in self._reading) + len(self._returning) + asleep

    def step(self) -> bool:
        """Read one stretch where there is room; True when something was done, so that the caller comes again."""
        return self._read_again() or self._take_back() or self._wake() or self._run_ahead()

    def routed(self, lane: int, rows: Sequence[int]) -> None:
        """The lane of these rows, never attempted and held while their domain was looked up, is known."""
        kept = [row for row in sorted(rows) if self._scheduler.add(row, lane)]
        for number, row in self._reader.pick(kept):
            (mailbox,) = parse_mailboxes(first_texts([row]))
            assert isinstance(mailbox, Mailbox)  # it was one when the row was held
            self._bench.open[number] = Recipient(mailbox, *self._values_and_zone(row))

    def come_back(self, waiting: Sequence[Waiting]) -> None:
        """The lane of these rows between attempts is known."""
        self._returning.extend(waiting)

    def _run_ahead(self) -> bool:
        if not self._reading or not self._scheduler.has_room(STRETCH_ROWS):
            return False
        reading = self._reading[0]
        stretch = next(reading.stretches, None)
        if stretch is None:
            self._reading.popleft()
            return True
        span, first, rows = stretch
        reading.unread -= rows
        start = span.first_row + first
        places = reading.attemptable(start, rows)
        is_whole = first == 0 and reading.left is None
        if reading.left is not None and len(places) > reading.left:
            self._bench.leave_unread(reading.batch, reading.unread_from(start + places[reading.left]))
            places = places[: reading.left]
            self._reading.popleft()
        if reading.left is not None:
            reading.left -= len(places)
        if places and self._zones is not None:
            places = self._put_to_sleep(reading, span, start, places, self._zones, is_whole=is_whole)
        if places:
            found = self._reader.read(span, first, rows)
            self._sort_in([start + place for place in places], [found[place] for place in places], is_new=True)
        return True

    # -- hours ---------------------------------------------------------------------------------------------------

    def _put_to_sleep(
        self, reading: _Reading, span: Span, start: int, places: list[int], zones: Zones, *, is_whole: bool
    ) -> list[int]:
        """Of the rows at `places` from `start`, those that may go now. `is_whole`: so may be any of the row group."""
        if reading.surveyed is not span:
            which = np.ones(span.rows, dtype=bool)
            if reading.skip is not None:
                first = span.first_row - reading.batch.first_row
                which = ~reading.skip[first : first + span.rows]
            counted = np.zeros_like(which) if reading.is_again else which
            reading.zones = zones.numbers(self._reader.last_column(span), counted)
            reading.surveyed = span
            if is_whole and not zones.open_flags(self._bench.clock.wall_us())[reading.zones[which]].any():
                # A row group of closed zones costs its zone column and nothing else.
                asleep = np.flatnonzero(which)
                self.sleepers.add(reading.batch, asleep + span.first_row, reading.zones[asleep])
                reading.skip_span(span)
                return []
        at = np.array(places, dtype=np.int64) + (start - span.first_row)
        is_open = zones.open_flags(self._bench.clock.wall_us())[reading.zones[at]]
        asleep = at[~is_open]
        self.sleepers.add(reading.batch, asleep + span.first_row, reading.zones[asleep])
        going: list[int] = (at[is_open] - (start - span.first_row)).tolist()
        return going

    def _wake(self) -> bool:
        """Sleepers whose hours have opened go before rows that were never read."""
        if self._zones is None or not len(self.sleepers) or not self._scheduler.has_room():
            return False
        if self._reading and self._reading[0].is_again:
            return False  # one at a time: a batch of sleepers is being read
        woken = self.sleepers.wake(self._zones.open_flags(self._bench.clock.wall_us()))
        if woken is None:
            return False
        batch, slept = woken
        spans = self._reader.spans(batch.first_row, batch.rows)
        reading = _Reading(batch, spans, skip=~slept, is_again=True)
        self._reading.appendleft(reading)
        return True

    def awake(self, rows: list[int], lane: int) -> list[int]:
        """Of rows just taken from a lane, those whose hours are open; the others wait for them, and burn no attempt."""
        zones, bench = self._zones, self._bench
        assert zones is not None
        now_us = bench.clock.wall_us()
        is_open = zones.open_flags(now_us)
        going = []
        for row in rows:
            zone = bench.open[row].zone
            if is_open[zone]:
                going.append(row)
                continue
            bench.open.pop(row)
            history = self._scheduler.history(row)
            if history[1] is None:
                self._scheduler.settle(row, lane)
            self._lie_down(row, lane, zone, history, now_us)
        return going

    def _lie_down(self, row: int, lane: int, zone: int, history: tuple[int, float | None], now_us: int) -> None:
        """A row that the scheduler has let go sleeps; one between attempts keeps its plan, and waits in the wheel."""
        zones, bench = self._zones, self._bench
        assert zones is not None
        attempt, first_at = history
        if first_at is None:
            batch = bench.batch_of(row)
            assert batch is not None  # it has an open row
            self.sleepers.add(batch, np.array([row], np.int64), np.array([zone], np.uint16))
            return
        due_at = bench.monotonic_of(zones.opens_at(zone, now_us))
        expires_at = first_at + bench.settings.retry.max_age.seconds
        self._scheduler.defer(row, lane, due_at, attempt, first_at, expires_at)

    @property
    def asleep(self) -> int:
        """Rows that wait for the hours of their zone."""
        return len(self.sleepers)

    @property
    def next_opening(self) -> tuple[int, str] | None:
        """When the first of them wake (UTC microseconds), and how people of their zone write that."""
        zones = self._zones
        if zones is None or not self.sleepers.by_zone:
            return None
        now_us = self._bench.clock.wall_us()
        at_us, zone = min((zones.opens_at(zone, now_us), zone) for zone in self.sleepers.by_zone)
        return at_us, zones.local(zone, at_us)

    def _values_and_zone(self, row: Row) -> tuple[Row, int]:
        if self._zones is None:
            return row, OWN
        zone = row[-1]
        return row[:-1], self._zones.number(zone if isinstance(zone, str) else None)

    # -- rows ------------------------------------------------------------------------------------------------------

    def _sort_in(self, numbers: Sequence[int], found: list[Row], *, is_new: bool) -> None:
        bench, lanes, scheduler = self._bench, self._lanes, self._scheduler
        parsed = parse_mailboxes(first_texts(found))
        good = [mailbox for mailbox in parsed if isinstance(mailbox, Mailbox)]
        refused = iter(self._suppressions.check([canonical(mailbox) for mailbox in good]).tolist())
        now_us = bench.clock.wall_us() if self._zones is not None else 0
        for number, row, mailbox in zip(numbers, found, parsed, strict=True):
            values, zone = self._values_and_zone(row)
            if isinstance(mailbox, AddressError):
                if not is_new:
                    scheduler.gone(number)
                bench.is_invalid(number, Reason.ADDRESS, str(mailbox))
                continue
            if next(refused):
                if not is_new:
                    scheduler.gone(number)
                bench.is_suppressed(number)
                continue
            if is_new:
                lane = lanes.lane_of(mailbox.domain, number)
                if lane is None:
                    lanes.hold(mailbox.domain, number)
                    continue
                kept = scheduler.add(number, lane)
            elif self._zones is not None and not self._zones.open_flags(now_us)[zone]:
                # Parked, or due again, and its hours have ended meanwhile.
                history = scheduler.history(number)
                self._lie_down(number, scheduler.gone(number), zone, history, now_us)
                continue
            else:
                kept = scheduler.returned(number)
            if kept:
                bench.open[number] = Recipient(mailbox, values, zone)

    def _read_again(self) -> bool:
        """Parked rows whose lanes have room again."""
        scheduler = self._scheduler
        rows = scheduler.wanted(STRETCH_ROWS)
        for row in scheduler.evicted():
            self._bench.open.pop(row, None)
        if not rows:
            return False
        picked = self._reader.pick(rows)
        self._sort_in([number for number, _ in picked], [row for _, row in picked], is_new=False)
        return True

    def _take_back(self) -> bool:
        """Rows that a predecessor left between attempts: they keep their plan, and need their lane."""
        if not self._returning:
            return False
        bench = self._bench
        some = [self._returning.popleft() for _ in range(min(STRETCH_ROWS, len(self._returning)))]
        some.sort(key=lambda waiting: waiting.row)
        for waiting, (number, row) in zip(some, self._reader.pick([w.row for w in some]), strict=True):
            (mailbox,) = parse_mailboxes(first_texts([row]))
            if isinstance(mailbox, AddressError):
                bench.is_invalid(number, Reason.ADDRESS, str(mailbox))
                continue
            lane = self._lanes.lane_of(mailbox.domain, number)
            if lane is None:
                self._lanes.hold_waiting(mailbox.domain, waiting)
                continue
            first_at = bench.monotonic_of(waiting.first_at_us)
            expires_at = first_at + bench.settings.retry.max_age.seconds
            self._scheduler.defer(
                number, lane, bench.monotonic_of(waiting.due_at_us), waiting.attempt, first_at, expires_at
            )
        return True
