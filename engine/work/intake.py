"""From assigned batches to ready rows: read ahead, check the address, look it up in the suppressions, find its lane.

Rows that can have their outcome now (no address, suppressed) get it here and are never attempted. Nothing waits: a row
whose lane is full is parked as a number and read again when the lane has room.
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

    def __init__(self, batch: OpenBatch, assigned: Assign, spans: Sequence[Span]) -> None:
        self.batch = batch
        self.left = assigned.limit
        self.unread = assigned.rows
        self.skip: npt.NDArray[np.bool_] | None = None
        if assigned.skip:
            bits = np.unpackbits(np.frombuffer(assigned.skip, np.uint8), count=assigned.rows)
            self.skip = bits.astype(bool)
        self.stretches: Iterator[tuple[Span, int, int]] = (
            (span, first, min(STRETCH_ROWS, span.rows - first))
            for span in spans
            for first in range(0, span.rows, STRETCH_ROWS)
        )

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
    ) -> None:
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
        reading = _Reading(batch, assigned, self._reader.spans(assigned.first_row, assigned.rows))
        batch.open_rows = reading.unread_from(batch.first_row) + len(assigned.waiting)
        self._bench.resent.update(assigned.resent)
        self._returning.extend(assigned.waiting)
        self._reading.append(reading)
        self._bench.add_batch(batch)

    @property
    def unread(self) -> int:
        """Rows assigned and not looked at yet."""
        return sum(reading.unread for reading in self._reading) + len(self._returning)

    def step(self) -> bool:
        """Read one stretch where there is room; True when something was done, so that the caller comes again."""
        return self._read_again() or self._take_back() or self._run_ahead()

    def routed(self, lane: int, rows: Sequence[int]) -> None:
        """The lane of these rows, never attempted and held while their domain was looked up, is known."""
        kept = [row for row in sorted(rows) if self._scheduler.add(row, lane)]
        for number, row in self._reader.pick(kept):
            (mailbox,) = parse_mailboxes(first_texts([row]))
            assert isinstance(mailbox, Mailbox)  # it was one when the row was held
            self._bench.open[number] = Recipient(mailbox, row)

    def come_back(self, waiting: Sequence[Waiting]) -> None:
        """The lane of these rows between attempts is known."""
        self._returning.extend(waiting)

    def _run_ahead(self) -> bool:
        if not self._reading or not self._scheduler.has_room():
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
        if reading.left is not None and len(places) > reading.left:
            self._bench.leave_unread(reading.batch, reading.unread_from(start + places[reading.left]))
            places = places[: reading.left]
            self._reading.popleft()
        if reading.left is not None:
            reading.left -= len(places)
        if places:
            found = self._reader.read(span, first, rows)
            self._sort_in([start + place for place in places], [found[place] for place in places], is_new=True)
        return True

    def _sort_in(self, numbers: Sequence[int], found: list[Row], *, is_new: bool) -> None:
        bench, lanes, scheduler = self._bench, self._lanes, self._scheduler
        parsed = parse_mailboxes(first_texts(found))
        good = [mailbox for mailbox in parsed if isinstance(mailbox, Mailbox)]
        refused = iter(self._suppressions.check([canonical(mailbox) for mailbox in good]).tolist())
        for number, row, mailbox in zip(numbers, found, parsed, strict=True):
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
            else:
                kept = scheduler.returned(number)
            if kept:
                bench.open[number] = Recipient(mailbox, row)

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
