"""Where the rows of one lane are: ready ones in queues, stored ones as numbers."""

from __future__ import annotations

from array import array
from collections import deque

import msgspec

from engine.pace.wheel import RECORD_WORDS

FIRST, SECOND, FRESH, RETRY = range(4)  # the ready queues of a lane


class Suspension(msgspec.Struct, frozen=True):
    """A lane offers nothing until then (None: until resumed), and why."""

    until: float | None
    reason: str


class Places:
    """The rows of one lane that are not on their way, and how many are. `scheduler` says what each place means."""

    __slots__ = (
        "due",
        "due_at",
        "in_flight",
        "next_expiry",
        "parked",
        "parked_at",
        "queues",
        "reading",
        "ready",
        "since_retry",
        "suspension",
        "urgent",
        "waiting",
    )

    def __init__(self) -> None:
        self.queues: list[deque[int] | None] = [None, None, None, None]
        self.parked: array[int] | None = None
        self.parked_at = 0  # what lies before was handed out
        self.due: array[int] | None = None  # RECORD_WORDS each
        self.due_at = 0
        self.urgent: array[int] | None = None  # due rows of priority 1 and 2
        self.ready = self.reading = self.in_flight = self.waiting = 0
        self.since_retry = 0
        self.next_expiry: float | None = None
        self.suspension: Suspension | None = None

    def parked_rows(self) -> int:
        return len(self.parked) - self.parked_at if self.parked is not None else 0

    def due_rows(self) -> int:
        rows = (len(self.due) - self.due_at) // RECORD_WORDS if self.due is not None else 0
        return rows + (len(self.urgent) // RECORD_WORDS if self.urgent is not None else 0)

    def stored(self) -> bool:
        return self.parked is not None or self.due is not None or self.urgent is not None

    def is_idle(self) -> bool:
        return not (self.ready or self.reading or self.in_flight or self.waiting or self.suspension or self.stored())

    def push(self, queue: int, row: int) -> None:
        rows = self.queues[queue]
        if rows is None:
            rows = self.queues[queue] = deque()
        rows.append(row)
        self.ready += 1

    def push_front(self, queue: int, row: int) -> None:
        rows = self.queues[queue]
        if rows is None:
            rows = self.queues[queue] = deque()
        rows.appendleft(row)
        self.ready += 1
