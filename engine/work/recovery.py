"""What the logs say of a stretch of rows: who is done, who waits, who is held in doubt. Pure over the logs' records.

PROTOCOL: a row's state is derived from all its entries, never assigned. Any accepted or rejected is final; else any
intent without a result, or with the result "in doubt", that was not resent holds the row; else it is due, or waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from formats.sendlog import Kind, Reader, Reason, Verdict

Numbers = npt.NDArray[Any]

_FINAL = (
    Verdict.ACCEPTED,
    Verdict.REJECTED,
    Verdict.SUPPRESSED,
    Verdict.INVALID,
    Verdict.EXPIRED,
    Verdict.UNSENT,
)

DUE, FINAL, HELD, WAITING = 0, 1, 2, 3


class Doubt(msgspec.Struct, frozen=True):
    """An intent without a result that nobody has decided on."""

    log_id: str
    serial: int
    row: int
    at_us: int


class Waiting(msgspec.Struct, frozen=True, array_like=True):
    """A row between attempts. Times are UTC microseconds."""

    row: int
    attempt: int
    first_at_us: int
    due_at_us: int


class RowStates:
    """The states of rows first_row .. first_row + rows - 1, gathered log by log in any order."""

    def __init__(self, first_row: int, rows: int, decisions: Iterable[tuple[str, int, str]] = ()) -> None:
        """`decisions` are the operator's: (log id, serial, "resend" or "accept")."""
        self.first_row, self.rows = first_row, rows
        self._final = np.zeros(rows, dtype=bool)
        self._attempt = np.zeros(rows, dtype=np.uint16)
        self._first_at = np.zeros(rows, dtype=np.int64)
        self._deferred_attempt = np.zeros(rows, dtype=np.uint16)
        self._due_at = np.zeros(rows, dtype=np.int64)
        self._decided: dict[str, dict[int, str]] = {}
        for log_id, serial, what in decisions:
            self._decided.setdefault(log_id, {})[serial] = what
        self.doubts: list[Doubt] = []
        self._resent: set[int] = set()

    def add_log(self, log_id: str, batches: Iterable[pa.RecordBatch]) -> None:
        """Take in one log's records."""
        intents: list[tuple[Numbers, Numbers, Numbers]] = []
        answered: list[Numbers] = []
        for batch in batches:
            kind = batch.column("kind").to_numpy()
            row = batch.column("row").to_numpy().astype(np.int64) - self.first_row
            mine = (row >= 0) & (row < self.rows) & (kind <= Kind.RESULT)
            if not mine.any():
                continue
            serial = batch.column("serial").to_numpy()
            at = batch.column("at").cast(pa.int64()).to_numpy()
            attempt = batch.column("attempt").to_numpy()
            is_intent = mine & (kind == Kind.INTENT)
            intents.append((serial[is_intent], row[is_intent], at[is_intent]))
            if (batch.column("reason").to_numpy()[is_intent] == Reason.RESENT).any():
                resent = is_intent & (batch.column("reason").to_numpy() == Reason.RESENT)
                self._resent.update((row[resent] + self.first_row).tolist())
            is_result = mine & (kind == Kind.RESULT)
            if not is_result.any():
                continue
            verdict = batch.column("verdict").to_numpy()
            answered.append(serial[is_result & (verdict != Verdict.IN_DOUBT) & (serial > 0)])
            self._final[row[is_result & np.isin(verdict, _FINAL)]] = True
            counted = is_result & ~np.isin(verdict, (Verdict.LOST, Verdict.UNTOUCHED))
            np.maximum.at(self._attempt, row[counted], attempt[counted])
            self._add_deferred(batch, is_result & (verdict == Verdict.DEFERRED), row, at, attempt)
        if intents:
            self._add_intents(log_id, intents, answered)

    def _add_deferred(self, batch: pa.RecordBatch, which: Numbers, row: Numbers, at: Numbers, attempt: Numbers) -> None:
        wait_us = batch.column("wait_s").to_numpy().astype(np.int64) * 1_000_000
        for index in np.flatnonzero(which).tolist():
            place = row[index]
            # Deferred without an attempt (no answer from the DNS): that began its age.
            if self._first_at[place] == 0 or at[index] < self._first_at[place]:
                self._first_at[place] = at[index]
            if attempt[index] >= self._deferred_attempt[place]:
                self._deferred_attempt[place] = attempt[index]
                self._due_at[place] = at[index] + wait_us[index]

    def _add_intents(
        self, log_id: str, intents: list[tuple[Numbers, Numbers, Numbers]], answered: list[Numbers]
    ) -> None:
        serial, row, at = (np.concatenate(column) for column in zip(*intents, strict=True))
        # The first attempt's time starts the clock of the maximum age.
        known = self._first_at[row]
        np.minimum.at(self._first_at, row[known > 0], at[known > 0])
        fresh = known == 0
        order = np.argsort(at[fresh], kind="stable")[::-1]
        self._first_at[row[fresh][order]] = at[fresh][order]
        open_ = ~np.isin(serial, np.concatenate(answered)) if answered else np.ones(len(serial), dtype=bool)
        decided = self._decided.get(log_id, {})
        for s, r, t in zip(serial[open_].tolist(), row[open_].tolist(), at[open_].tolist(), strict=True):
            match decided.get(s):
                case "accept":
                    self._final[r] = True
                case "resend":
                    self._resent.add(r + self.first_row)
                case _:
                    self.doubts.append(Doubt(log_id, s, r + self.first_row, t))

    def held(self) -> set[int]:
        """Rows in doubt: a final answer that came later has resolved the others."""
        return {doubt.row for doubt in self.doubts if not self._final[doubt.row - self.first_row]}

    def resent(self) -> set[int]:
        """Rows whose doubt was answered by a resend once: a standing order to resend applies once per row."""
        return set(self._resent)

    def states(self) -> Numbers:
        """uint8 per row: DUE, FINAL, HELD or WAITING."""
        states = np.where(self._due_at > 0, WAITING, DUE).astype(np.uint8)
        for row in self.held():
            states[row - self.first_row] = HELD
        states[self._final] = FINAL
        return states

    def waiting(self) -> list[Waiting]:
        """The rows between attempts, with the plan they had."""
        places = np.flatnonzero(self.states() == WAITING).tolist()
        return [
            Waiting(
                place + self.first_row,
                int(self._deferred_attempt[place]),
                int(self._first_at[place]),
                int(self._due_at[place]),
            )
            for place in places
        ]


def read_states(
    buffers: Sequence[pa.Buffer],
    first_row: int,
    rows: int,
    decisions: Iterable[tuple[str, int, str]] = (),
    damaged: Callable[[str, str], None] = lambda log_id, problem: None,
) -> RowStates:
    """The states that these logs give; `damaged` is told of one that is not whole up to a torn tail.

    Raises LogDamaged where one has no header.
    """
    states = RowStates(first_row, rows, decisions)
    for buffer in buffers:
        reader = Reader(buffer)
        states.add_log(reader.log.header.log_id, reader)
        if reader.log.damage is not None:
            damaged(reader.log.header.log_id, reader.log.damage)
    return states
