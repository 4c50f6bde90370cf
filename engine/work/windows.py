"""Sliding windows: with a shared store a row may be attempted only while it is in an open window of this incarnation.

    worker: Gate  --Admit, Report-->  supervisor: WindowBook  --Advance-->  store
                  <--Admitted, NotAdmitted--              <--Advanced--

A row joins a window when a connection is ready for it and leaves it with its first verdict; a retry needs a new window.
At most `window_rows` rows of a worker are unreported, over all its windows. The book decides and does no I/O: `step`
says what the next statement does, and says the same again until `answered` is called with the store's answer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from uuid import UUID

import msgspec
import numpy as np

from engine.control.entries import DETAIL, OPEN, log_of, window_id
from engine.control.store import Advance, Advanced, Opening, Settled, Told
from engine.work.bench import Workbench
from engine.work.logbook import Logbook
from engine.work.messages import Admit, Admitted, NotAdmitted, Report, Reported
from formats.sendlog import Reason, Verdict

WINDOW_ROWS = 500
# Verdicts after which the row is to be attempted again.
DUE_AGAIN = frozenset({Verdict.DEFERRED, Verdict.LOST, Verdict.UNTOUCHED})


# -- the worker's side ------------------------------------------------------------------------------------------------


class Gate:
    """Asks for rows before they are sent, and reports what became of them. One per worker."""

    def __init__(self, send: Callable[[msgspec.Struct], None]) -> None:
        self._send = send
        self._reports: list[Reported] = []
        self._asked: dict[int, tuple[int, int]] = {}  # serial -> (batch, first attempt's wall time)
        self._log: ReportingLog | None = None

    def attach(self, log: ReportingLog, bench: Workbench) -> None:
        """Hear what `log` records of the rows of `bench`."""
        self._log = log

        def note(told: Reported) -> None:
            if not told.serial and (batch := bench.batch_of(told.row)) is not None:
                self._reports.append(msgspec.structs.replace(told, batch=batch.batch))
            elif (asked := self._asked.pop(told.serial, None)) is not None:
                self._reports.append(msgspec.structs.replace(told, batch=asked[0], first_us=asked[1]))

        log.note = note

    def ask(self, rows: Sequence[tuple[int, int, int, int]]) -> None:
        """May these be sent? (serial, row, batch, wall time of the row's first attempt). `Admitted` answers.

        Their intents are durable: the log's length, told with them, says that it holds them.
        """
        assert self._log is not None
        self.flush()
        for serial, _, batch, first_us in rows:
            self._asked[serial] = (batch, first_us)
        length, seal = self._log.position()
        self._send(Admit(rows=[(serial, row, batch) for serial, row, batch, _ in rows], length=length, seal=seal))

    def flush(self) -> None:
        """Tell the supervisor what was noted."""
        if self._reports:
            self._send(Report(reports=self._reports))
            self._reports = []


class ReportingLog(Logbook):
    """A send log whose results are told to `note` as well."""

    note: Callable[[Reported], None]

    def position(self) -> tuple[int, str]:
        """How far the log has come, and its last seal."""
        return self._encoder.length, self._encoder.seal

    def result(
        self,
        serial: int,
        row: int,
        attempt: int,
        verdict: Verdict,
        *,
        reason: int = Reason.NONE,
        code: int = 0,
        provider: int = 0,
        source: int = 0,
        wait_s: int = 0,
        text: str | None = None,
    ) -> None:
        names = {"reason": reason, "code": code, "provider": provider, "source": source, "wait_s": wait_s}
        super().result(serial, row, attempt, verdict, **names, text=text)
        due_us = self._clock.wall_us() + wait_s * 1_000_000 if verdict is Verdict.DEFERRED else 0
        self.note(Reported(serial, row, 0, verdict, reason, code, attempt, due_us, 0))


# -- the supervisor's side --------------------------------------------------------------------------------------------


class _Window:
    """One window of one log: its rows by place, what the store knows and what it is to be told."""

    __slots__ = (
        "batch",
        "details",
        "first_row",
        "id",
        "is_due",
        "known",
        "length",
        "log_id",
        "rows",
        "seal",
        "serials",
        "verdicts",
    )

    def __init__(self, id_: UUID, log_id: str, batch: int, first_row: int, length: int, seal: str) -> None:
        self.id, self.log_id, self.batch, self.first_row = id_, log_id, batch, first_row
        self.length, self.seal = length, seal
        self.rows: list[int] = []
        self.serials: list[int] = []
        self.known = b""
        self.verdicts = bytearray()
        self.details = b""
        self.is_due = False


class _Worker:
    """What the book keeps of one worker's log."""

    def __init__(self) -> None:
        self.asked: deque[tuple[int, int, int]] = deque()  # (serial, row, batch), in no window yet
        self.given_back: set[int] = set()  # serials of those that were given back meanwhile
        self.length, self.seal = 0, ""
        self.windows = 0  # ids given
        self.unreported = 0
        self.settled: list[Reported] = []


class WindowBook:
    """All windows of one incarnation."""

    def __init__(self, first_row_of: Callable[[int], int], window_rows: int = WINDOW_ROWS) -> None:
        """`first_row_of` a batch."""
        self._first_row_of = first_row_of
        self._window_rows = window_rows
        self._workers: dict[str, _Worker] = {}
        self._places: dict[tuple[str, int], tuple[_Window, int]] = {}
        self._windows: dict[UUID, _Window] = {}
        self._dirty: dict[UUID, _Window] = {}
        self._under_way: Advance | None = None
        self._sent: dict[UUID, bytes] = {}  # verdicts as the statement under way tells them
        self.offset_us = 0  # the store's time less ours

    # -- what workers say ------------------------------------------------------------------------------------------

    def admit(self, log_id: str, message: Admit) -> None:
        """A worker asks for rows."""
        worker = self._workers.setdefault(log_id, _Worker())
        worker.asked.extend(message.rows)
        worker.length, worker.seal = message.length, message.seal

    def report(self, log_id: str, reports: Iterable[Reported]) -> None:
        """A worker tells verdicts."""
        worker = self._workers.setdefault(log_id, _Worker())
        for told in reports:
            if not told.serial:
                worker.settled.append(told)
            elif (at := self._places.get((log_id, told.serial))) is not None:
                self._note(at[0], at[1], told)
            else:
                worker.given_back.add(told.serial)

    def worker_is_gone(self, log_id: str, verdicts: Mapping[int, Reported], intents: frozenset[int] | None) -> None:
        """The worker was reaped and its log read: `verdicts` by serial, and the serials that were intents.

        Without a readable log (`intents` is None) the rows that are still in windows are in doubt.
        """
        worker = self._workers.pop(log_id, None)
        for (log, serial), (window, place) in list(self._places.items()):
            if log != log_id:
                continue
            told = verdicts.get(serial)
            if told is None:
                in_doubt = intents is None or serial in intents
                told = Reported(serial, 0, 0, Verdict.IN_DOUBT if in_doubt else Verdict.UNTOUCHED, 0, 0, 0, 0, 0)
            self._note(window, place, told)
        if worker is not None and worker.settled:
            self._workers[log_id] = rest = _Worker()
            rest.settled, rest.windows = worker.settled, worker.windows

    def _note(self, window: _Window, place: int, told: Reported) -> None:
        if window.verdicts[place] != OPEN:
            return
        del self._places[window.log_id, window.serials[place]]
        window.verdicts[place] = told.verdict
        window.is_due |= told.verdict in DUE_AGAIN
        window.details += detail(place, told, self.offset_us)
        self._dirty[window.id] = window

    # -- what is said to the store ---------------------------------------------------------------------------------

    @property
    def has_news(self) -> bool:
        """Whether `step` has something to do."""
        return bool(
            self._under_way
            or self._dirty
            or any(w.settled or (w.asked and w.unreported < self._window_rows) for w in self._workers.values())
        )

    @property
    def has_reports(self) -> bool:
        """Whether the store does not know everything that we know."""
        return bool(self._under_way or self._dirty or any(w.settled for w in self._workers.values()))

    def has_open(self, log_id: str) -> bool:
        """Whether rows of this log are in windows, as far as we were told."""
        return any(log == log_id for log, _ in self._places)

    def rows_of(self, log_id: str) -> set[int]:
        """Rows of this log that are in windows."""
        return {window.rows[place] for (log, _), (window, place) in self._places.items() if log == log_id}

    def knows_all_of(self, batch: int) -> bool:
        """Whether the store was told everything about the batch: its windows are closed, and no outcome waits."""
        return not any(window.batch == batch for window in self._windows.values()) and not any(
            told.batch == batch for worker in self._workers.values() for told in worker.settled
        )

    def step(self) -> Advance | None:
        """The next statement, or the last one again while it is not answered; None where there is nothing to say."""
        if self._under_way is None:
            told = [self._told(window) for window in sorted(self._dirty.values(), key=lambda window: window.id)]
            self._dirty.clear()
            settled, openings = [], []
            for log_id, worker in self._workers.items():
                settled += self._settled(log_id, worker)
                openings += self._openings(log_id, worker)
            if told or settled or openings:
                self._under_way = Advance(told, settled, openings)
        return self._under_way

    def _told(self, window: _Window) -> Told:
        verdicts = self._sent[window.id] = bytes(window.verdicts)
        told = Told(window.id, window.known, verdicts, window.details, window.is_due)
        freed = window.known.count(OPEN) - verdicts.count(OPEN)
        if (worker := self._workers.get(window.log_id)) is not None:
            worker.unreported -= freed
        window.details, window.is_due = b"", False
        return told

    def _settled(self, log_id: str, worker: _Worker) -> list[Settled]:
        by_batch: dict[int, list[Reported]] = {}
        for told in worker.settled[: self._window_rows]:
            by_batch.setdefault(told.batch, []).append(told)
        made = []
        for batch, mine in by_batch.items():
            first = self._first_row_of(batch)
            details = b"".join(detail(place, told, self.offset_us) for place, told in enumerate(mine))
            made.append(
                Settled(
                    self._next_id(log_id, worker),
                    batch,
                    _offsets([told.row for told in mine], first),
                    bytes(told.verdict for told in mine),
                    details,
                )
            )
        return made

    def _openings(self, log_id: str, worker: _Worker) -> list[Opening]:
        windows: dict[int, _Window] = {}
        while worker.asked and worker.unreported < self._window_rows:
            serial, row, batch = worker.asked.popleft()
            if serial in worker.given_back:
                worker.given_back.discard(serial)
                continue
            window = windows.get(batch)
            if window is None:
                id_ = self._next_id(log_id, worker)
                window = _Window(id_, log_id, batch, self._first_row_of(batch), worker.length, worker.seal)
                windows[batch] = self._windows[id_] = window
            self._places[log_id, serial] = (window, len(window.rows))
            window.rows.append(row)
            window.serials.append(serial)
            worker.unreported += 1
        for window in windows.values():
            window.known = bytes(len(window.rows))
            window.verdicts = bytearray(window.known)
        return [
            Opening(window.id, window.batch, _offsets(window.rows, window.first_row), window.length, window.seal)
            for window in windows.values()
        ]

    def _next_id(self, log_id: str, worker: _Worker) -> UUID:
        worker.windows += 1
        return window_id(log_id, worker.windows)

    # -- what the store answers ------------------------------------------------------------------------------------

    def answered(self, answer: Advanced, wall_us: int) -> list[tuple[str, Admitted | NotAdmitted]]:
        """Take the answer to `step` in; what each worker is to be told."""
        step, self._under_way = self._under_way, None
        assert step is not None
        self.offset_us = answer.now_us - wall_us
        for told in step.told:
            window = self._windows.get(told.window)
            if window is not None:
                window.known = self._sent.pop(told.window)
                self._drop_if_closed(window)
        # As many outcomes as the statement held: those that came meanwhile stand behind them.
        for settled in step.settled:
            log_id = log_of(settled.window)
            worker = self._workers[log_id]  # kept while it has outcomes to tell
            said = set(_rows_of(settled.rows, self._first_row_of(settled.batch)))
            worker.settled = [t for t in worker.settled if t.batch != settled.batch or t.row not in said]
        messages: list[tuple[str, Admitted | NotAdmitted]] = []
        for opening in step.openings:
            window = self._windows[opening.window]
            if opening.window in answer.opened:
                messages.append((window.log_id, Admitted(serials=window.serials)))
                continue
            # Nothing of it is attempted, whatever became of the commit: it is closed by a report of all its rows.
            messages.append((window.log_id, NotAdmitted(serials=window.serials, is_alive=answer.is_alive)))
            for place, serial in enumerate(window.serials):
                self._note(window, place, Reported(serial, 0, 0, Verdict.UNTOUCHED, 0, 0, 0, 0, 0))
        return messages

    def refuse_all(self) -> list[tuple[str, NotAdmitted]]:
        """The store opens nothing more: what was asked for is given back; what was sent is still reported."""
        messages: list[tuple[str, NotAdmitted]] = []
        if self._under_way is not None:
            for opening in self._under_way.openings:
                window = self._windows[opening.window]
                messages.append((window.log_id, NotAdmitted(serials=window.serials, is_alive=True)))
                for place, serial in enumerate(window.serials):
                    self._note(window, place, Reported(serial, 0, 0, Verdict.UNTOUCHED, 0, 0, 0, 0, 0))
            self._under_way = msgspec.structs.replace(self._under_way, openings=[])
        for log_id, worker in self._workers.items():
            if worker.asked:
                serials = [serial for serial, _, _ in worker.asked]
                messages.append((log_id, NotAdmitted(serials=serials, is_alive=True)))
                worker.given_back.update(serials)
        return messages

    def _drop_if_closed(self, window: _Window) -> None:
        if OPEN not in window.known:
            del self._windows[window.id]
            self._dirty.pop(window.id, None)


def detail(place: int, told: Reported, offset_us: int) -> bytes:
    """The record of a verdict that a byte alone cannot tell; nothing for a plain acceptance at the first attempt."""
    if told.verdict == Verdict.UNTOUCHED or (told.verdict == Verdict.ACCEPTED and told.attempt <= 1):
        return b""
    due_us = told.due_us + offset_us if told.due_us else 0
    first_us = told.first_us + offset_us if told.first_us else 0
    serial = told.serial & 0xFFFFFFFF
    record = (place, told.verdict, told.reason, max(0, told.code), told.attempt, due_us, first_us, serial)
    return np.array([record], DETAIL).tobytes()


def _offsets(rows: Sequence[int], first_row: int) -> bytes:
    return (np.asarray(rows, np.int64) - first_row).astype("<u4").tobytes()


def _rows_of(offsets: bytes, first_row: int) -> list[int]:
    rows: list[int] = (np.frombuffer(offsets, "<u4").astype(np.int64) + first_row).tolist()
    return rows
