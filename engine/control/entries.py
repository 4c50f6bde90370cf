"""What a shared store's windows say of a batch: who is done, who waits, who is held in doubt. Pure.

PROTOCOL "Reporting": a row's state is derived from all its entries, never assigned. Any accepted or rejected is final;
else any open or in_doubt entry that was not resent holds the row; else it is due, or waits for its next attempt.

Bytes of a window: `rows` are uint32 (little-endian) counted from the batch's first row; `verdicts` one byte a place, 0
while the row is in the window; `details` are DETAIL records, in any order, of places whose verdict needs more words
than a byte. Of several records of a place the first that agrees with the place's verdict counts.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from uuid import UUID

import msgspec
import numpy as np
import numpy.typing as npt

from engine.control.store import Decision, Entry, SharedStore
from formats.sendlog import Verdict

Numbers = npt.NDArray[Any]

OPEN = 0

DETAIL = np.dtype(
    [
        ("place", "<u2"),
        ("verdict", "u1"),
        ("reason", "u1"),
        ("code", "<u2"),
        ("attempt", "<u2"),
        ("due_us", "<i8"),  # the store's time; 0 where there is none
        ("first_us", "<i8"),
        ("serial", "<u4"),  # the intent in the worker's log
    ]
)

_FINAL = np.zeros(256, bool)
_FINAL[
    [
        Verdict.ACCEPTED,
        Verdict.REJECTED,
        Verdict.SUPPRESSED,
        Verdict.INVALID,
        Verdict.EXPIRED,
        Verdict.UNSENT,
    ]
] = True
_HOLDS = np.zeros(256, bool)
_HOLDS[[OPEN, Verdict.IN_DOUBT]] = True

DUE, FINAL, HELD, WAITING = 0, 1, 2, 3


def window_bounds(log_id: str) -> tuple[UUID, UUID]:
    """The first and the last id that a window of this log may have. Log ids are `INCARNATION-NUMBER`."""
    incarnation, _, number = log_id.partition("-")
    head = int(incarnation, 16) << 64 | int(number) << 48
    return UUID(int=head), UUID(int=head | (1 << 48) - 1)


def window_id(log_id: str, number: int) -> UUID:
    """The id of a log's window."""
    return UUID(int=window_bounds(log_id)[0].int | number)


def log_of(window: UUID) -> str:
    """The log that a window's intents are in."""
    return f"{window.int >> 64:016x}-{window.int >> 48 & 0xFFFF:03d}"


class HeldRow(msgspec.Struct, frozen=True):
    """A row that a window holds: nobody knows whether it was sent, and nobody decided."""

    row: int
    window: UUID
    place: int
    at_us: int
    is_open: bool  # no verdict yet: its window may still be worked on


class WaitingRow(msgspec.Struct, frozen=True):
    """A row between attempts, in the store's time."""

    row: int
    attempt: int
    first_us: int
    due_us: int


class BatchView(msgspec.Struct, frozen=True):
    """All that is known of a batch's rows."""

    first_row: int
    states: Numbers  # uint8 per row
    held: list[HeldRow]
    waiting: list[WaitingRow]
    resent: frozenset[int]


def details_of(entry: Entry) -> dict[int, Any]:
    """The record of each place that has one."""
    found: dict[int, Any] = {}
    for record in np.frombuffer(entry.details, DETAIL):
        place = int(record["place"])
        if place not in found and place < len(entry.verdicts) and entry.verdicts[place] == record["verdict"]:
            found[place] = record
    return found


def view(first_row: int, rows: int, entries: Iterable[Entry], decisions: Iterable[Decision]) -> BatchView:
    """What these windows of one batch say."""
    decided = {(d.log_id, d.serial): d.what for d in decisions}
    final = np.zeros(rows, bool)
    attempt = np.zeros(rows, np.uint16)
    due = np.zeros(rows, np.int64)
    first = np.zeros(rows, np.int64)
    holding: list[HeldRow] = []
    resent: set[int] = set()
    for entry in entries:
        where = np.frombuffer(entry.rows, "<u4").astype(np.int64)
        verdict = np.frombuffer(entry.verdicts, np.uint8)
        final[where[_FINAL[verdict]]] = True
        if entry.details:
            _add_details(entry, where, attempt, due, first)
        for place in np.flatnonzero(_HOLDS[verdict]).tolist():
            row = first_row + int(where[place])
            match decided.get((str(entry.window), place)):
                case "resend":
                    resent.add(row)
                case "accept":
                    final[where[place]] = True
                case _:
                    holding.append(HeldRow(row, entry.window, place, entry.at_us, int(verdict[place]) == OPEN))
    states = np.where(attempt > 0, WAITING, DUE).astype(np.uint8)
    for one in holding:
        states[one.row - first_row] = HELD
    states[final] = FINAL
    waiting = [
        WaitingRow(first_row + place, int(attempt[place]), int(first[place]), int(due[place]))
        for place in np.flatnonzero(states == WAITING).tolist()
    ]
    held = [one for one in holding if states[one.row - first_row] == HELD]
    return BatchView(first_row, states, held, waiting, frozenset(resent))


COMPACT_ROWS = 1000  # a window of so many fits a page with its verdicts, uncompressed and in place


def compacted(entries: Iterable[Entry]) -> tuple[list[UUID], list[Entry]]:
    """Windows that can go, and the fewer ones that say the same: closed ones of one log, without a row in doubt.

    At a low rate a window has few rows and costs more than they do. A window's place is named by decisions and by
    repeated statements only while it is open or in doubt; a batch that is done opens none, so no late statement can
    bring back one that went.
    """
    by_log: dict[tuple[str, int], list[Entry]] = {}
    for entry in entries:
        if not (set(entry.verdicts) & {OPEN, int(Verdict.IN_DOUBT)}):
            by_log.setdefault((log_of(entry.window), entry.batch), []).append(entry)
    gone: list[UUID] = []
    made: list[Entry] = []
    for mine in by_log.values():
        group: list[Entry] = []
        for entry in sorted(mine, key=lambda entry: entry.window):
            if group and sum(len(e.verdicts) for e in group) + len(entry.verdicts) > COMPACT_ROWS:
                _join(group, gone, made)
                group = []
            group.append(entry)
        _join(group, gone, made)
    return gone, made


def _join(group: list[Entry], gone: list[UUID], made: list[Entry]) -> None:
    if len(group) < 2:
        return
    details, start = [], 0
    for entry in group:
        records = np.array(list(details_of(entry).values()), DETAIL)
        records["place"] += start
        details.append(records.tobytes())
        start += len(entry.verdicts)
    last = group[-1]
    rows = b"".join(entry.rows for entry in group)
    verdicts = b"".join(entry.verdicts for entry in group)
    at_us, length, seal = group[0].at_us, last.log_length, last.log_seal
    made.append(Entry(group[0].window, last.batch, at_us, length, seal, rows, verdicts, b"".join(details)))
    gone += [entry.window for entry in group]


def held_rows(store: SharedStore, first_rows: list[int], rows: int) -> list[HeldRow]:
    """Every row that the store holds in doubt. `first_rows` are the batches', `rows` the plan's."""
    batches = sorted({entry.batch for entry in store.held_entries()})
    found: list[HeldRow] = []
    for number in batches:
        first = first_rows[number]
        end = first_rows[number + 1] if number + 1 < len(first_rows) else rows
        found += view(first, end - first, store.entries([number]), store.decisions_between(first, end)).held
    return found


def _add_details(entry: Entry, where: Numbers, attempt: Numbers, due: Numbers, first: Numbers) -> None:
    for place, record in details_of(entry).items():
        row = where[place]
        began = int(record["first_us"])
        if began and (not first[row] or began < first[row]):
            first[row] = began
        if record["verdict"] == Verdict.DEFERRED and record["attempt"] >= attempt[row]:
            attempt[row] = record["attempt"]
            due[row] = record["due_us"]
