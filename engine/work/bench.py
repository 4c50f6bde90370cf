"""The workbench: what the parts of one worker share, and nothing that decides.

Rows are open between being read and having their outcome. Of a ready row the values are here; of a parked or waiting
one its number alone is in the scheduler.
"""

from __future__ import annotations

import random
import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable
from typing import Protocol

import msgspec

from engine.clock import Clock
from engine.config import Settings
from engine.pace.places import Suspension
from engine.work.logbook import Logbook
from formats.address import Mailbox
from formats.sendlog import Reason, Verdict

_ADDRESS = re.compile(r"[^\s<>@:;,'\"()\[\]]{1,64}@[A-Za-z0-9.\-]{1,255}")


class Recipient(msgspec.Struct, frozen=True, gc=False):
    """A ready row: where it goes and what the template wants of it."""

    mailbox: Mailbox
    values: tuple[object, ...]
    zone: int = 0  # whose sending hours the row keeps (`engine.zones`)


class Flight(msgspec.Struct, gc=False):
    """An intent on its way: written to the log, its result owed."""

    row: int
    lane: int
    attempt: int
    first_at: float
    started_at: float


class LaneTally(msgspec.Struct):
    """Verdicts of a lane since the last pulse."""

    accepted: int = 0
    rejected: int = 0
    deferred: int = 0
    lost: int = 0
    in_doubt: int = 0


class OpenBatch(msgspec.Struct):
    """A batch of this worker's, and how many of its rows have no outcome yet."""

    batch: int
    first_row: int
    rows: int
    open_rows: int
    in_doubt: int = 0
    cut_short: bool = False  # `--limit` left rows of it unread


class RowQueue(Protocol):
    """What dispatch, settlement and lanes ask of whoever orders the rows (`pace.scheduler` says what each means)."""

    is_stopped: bool

    def take(self, lane: int, limit: int, now: float) -> list[int]: ...
    def settle(self, row: int, lane: int) -> None: ...
    def give_back(self, row: int, lane: int) -> None: ...
    def defer(
        self, row: int, lane: int, due_at: float, attempt: int, first_at: float, expires_at: float | None = None
    ) -> None: ...
    def history(self, row: int) -> tuple[int, float | None]: ...
    def advance(self, now: float) -> list[int]: ...
    def suspend_lane(self, lane: int, until: float | None, reason: str) -> list[int]: ...
    def resume_lane(self, lane: int) -> None: ...
    def suspension(self, lane: int) -> Suspension | None: ...
    def stop(self) -> None: ...
    def demand(self) -> dict[int, int]: ...
    def wanted(self, limit: int) -> list[int]: ...
    def returned(self, row: int) -> bool: ...
    def abandon(self, lane: int) -> list[tuple[int, int]]: ...
    def next_due(self) -> float | None: ...
    def suspended_rows(self) -> int: ...
    @property
    def open_rows(self) -> int: ...
    @property
    def ready(self) -> int: ...
    @property
    def parked(self) -> int: ...
    @property
    def waiting(self) -> int: ...


class Workbench:
    """Shared state of one worker; every method is quick and touches no disk."""

    def __init__(self, settings: Settings, logbook: Logbook, scheduler: RowQueue, clock: Clock, rng: random.Random):
        self.settings = settings
        self.log = logbook
        self.scheduler = scheduler
        self.clock = clock
        self.rng = rng
        self.open: dict[int, Recipient] = {}
        self.flights: dict[int, Flight] = {}
        self.losses: dict[int, int] = {}
        self.resent: set[int] = set()
        self.lanes: dict[int, LaneTally] = defaultdict(LaneTally)
        self.invalid = self.suppressed = self.expired = 0
        self.refused_unsent = 0  # by DNS: the domain takes no mail
        self.to_suppress: list[tuple[int, str, str]] = []  # rows whose recipient was refused for good
        self.batch_done: Callable[[OpenBatch], None] = lambda batch: None
        self._batches: dict[int, OpenBatch] = {}
        self._starts: list[int] = []
        self._mask = not settings.log.log_addresses

    # -- batches --------------------------------------------------------------------------------------------------

    def add_batch(self, batch: OpenBatch) -> None:
        """Take a batch on; one without an open row is done at once."""
        self._batches[batch.first_row] = batch
        self._starts = sorted(self._batches)
        self._close_if_done(batch)

    def batch_of(self, row: int) -> OpenBatch | None:
        """The batch of this worker's that holds the row."""
        at = bisect_right(self._starts, row) - 1
        if at < 0:
            return None
        batch = self._batches[self._starts[at]]
        return batch if row < batch.first_row + batch.rows else None

    @property
    def open_rows(self) -> int:
        """Rows without an outcome in the batches of this worker."""
        return sum(batch.open_rows for batch in self._batches.values())

    def has_outcome(self, row: int, *, in_doubt: bool = False) -> None:
        """The row has its last word, or is held; its batch may be done with it."""
        if self.losses:
            self.losses.pop(row, None)
        batch = self.batch_of(row)
        if batch is None:
            return
        batch.open_rows -= 1
        batch.in_doubt += in_doubt
        if not batch.open_rows:
            self._close_if_done(batch)

    def leave_unread(self, batch: OpenBatch, rows: int) -> None:
        """`--limit`: these rows are nobody's business in this run."""
        batch.cut_short = True
        batch.open_rows -= rows
        self._close_if_done(batch)

    def reopen(self, row: int) -> bool:
        """An operator's resend: the row has no outcome after all. False where its batch is not here."""
        batch = self.batch_of(row)
        if batch is None:
            return False
        batch.open_rows += 1
        batch.in_doubt -= 1
        return True

    def _close_if_done(self, batch: OpenBatch) -> None:
        if batch.open_rows == 0 and self._batches.get(batch.first_row) is batch:
            del self._batches[batch.first_row]
            self._starts.remove(batch.first_row)
            self.batch_done(batch)

    # -- outcomes without an attempt --------------------------------------------------------------------------------

    def is_invalid(self, row: int, reason: Reason, why: str) -> None:
        """The row can never be sent: its address or its rendering is at fault."""
        self.invalid += 1
        self.log.result(0, row, 0, Verdict.INVALID, reason=reason, text=self.masked(why))
        self.has_outcome(row)

    def is_suppressed(self, row: int) -> None:
        """The row must not be sent."""
        self.suppressed += 1
        self.log.result(0, row, 0, Verdict.SUPPRESSED)
        self.has_outcome(row)

    def is_expired(self, row: int, attempt: int, why: str | None = None) -> None:
        """The row waited past its maximum age; `why` where no reply in the log says what for."""
        self.expired += 1
        self.log.result(0, row, attempt, Verdict.EXPIRED, text=self.masked(why) if why else None)
        self.has_outcome(row)

    def masked(self, text: str) -> str:
        """A text for the log: addresses in it are masked unless `log_addresses`, and it is valid Unicode."""
        if not text.isprintable():
            text = "".join(c if c.isprintable() else "\ufffd" for c in text)
        if self._mask and "@" in text:
            text = _ADDRESS.sub("<address>", text)
        return text[:500]

    # -- time -------------------------------------------------------------------------------------------------------

    def monotonic_of(self, wall_us: int) -> float:
        """A time at rest as this process's monotonic seconds."""
        return self.clock.monotonic() + (wall_us - self.clock.wall_us()) / 1e6

    def wall_of(self, monotonic: float) -> int:
        """Monotonic seconds as a time at rest."""
        return self.clock.wall_us() + int((monotonic - self.clock.monotonic()) * 1e6)
