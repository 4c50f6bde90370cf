"""A worker's send log on disk: intents durable before a dot may leave, results behind them.

PROTOCOL "Before a message may end": the file is locked (flock) for the worker's life; a new one per process start;
intents of a group are appended and synced once (`durability = "disk"`), results are appended within 50 ms and become
durable with the next group or at the end. What survives a kill: everything written. What survives a power cut:
everything up to the last `commit` that returned.

A full disk must not cost a record of what is in flight. So each log keeps a *ballast* file beside it; when a write
finds no space, the ballast is deleted, the record is written into its room, and `is_full` tells the worker to attempt
nothing more.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import sys
from bisect import bisect_left
from collections.abc import Callable
from pathlib import Path

from engine.campaign import sync_folder
from engine.clock import Clock
from engine.errors import EngineError, Exit
from formats.sendlog import NAME_PROVIDER, NAME_SOURCE, Encoder, Header, Kind, Reason, Record, Verdict

BALLAST_BYTES = 256 * 1024  # results of some 5,000 messages in flight, far more than a worker may have
COMMIT_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)  # of `commit_times`; then +Inf
_MOST_RECORDS = 4096  # a batch of the log; larger ones only delay the sync
_NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class LogUnwritable(EngineError):
    """The send log {file} cannot be written: {problem}. Nothing more is attempted."""

    exit_code = Exit.TRY_AGAIN
    hint = "Make room or repair the disk, then run the same command again: it goes on where it stopped."


def _sync_data(descriptor: int) -> None:
    if sys.platform == "darwin":
        # fsync on macOS reaches the drive's cache only.
        fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
    else:
        os.fdatasync(descriptor)


def _skip_sync(descriptor: int) -> None:
    """`durability = "process"`: survives a killed process, not a power cut."""


class Logbook:
    """One log, written by one process."""

    def __init__(self, path: Path, header: Header, clock: Clock, *, durability: str = "disk") -> None:
        """Create and lock the log; raises LogUnwritable."""
        self.path = path
        self.is_full = False
        self.problem: str | None = None
        # Commits by the time they took, and last the sum of their seconds. The reader may set it to zeros.
        self.commit_times = [0.0] * (len(COMMIT_BUCKETS_S) + 2)
        self._clock = clock
        self._encoder = Encoder(header)
        self._pending: list[Record] = []
        self._serial = 0
        self._names: dict[tuple[int, str], int] = {}
        self._length = 0
        self._sync: Callable[[int], None] = _sync_data if durability == "disk" else _skip_sync
        self._ballast = path.with_suffix(".ballast")
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            ballast = os.open(self._ballast, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            try:
                self._write_all(ballast, b"\0" * BALLAST_BYTES)
            finally:
                os.close(ballast)
            sync_folder(path.parent)
        except OSError as problem:
            self._ballast.unlink(missing_ok=True)
            raise LogUnwritable(file=path, problem=problem.strerror) from None

    # -- what is said; nothing here touches the disk ------------------------------------------------------------

    def intent(self, row: int, attempt: int, provider: int, source: int, reason: int = Reason.NONE) -> int:
        """Say that `row` is about to be attempted; the answer is the intent's serial. Durable after `commit`."""
        self._serial += 1
        at = self._clock.wall_us()
        self._pending.append((Kind.INTENT, self._serial, row, at, attempt, 0, reason, 0, provider, source, 0, None))
        return self._serial

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
        """Say how it came out. `serial` 0: the row got its outcome without an attempt."""
        at = self._clock.wall_us()
        self._pending.append(
            (Kind.RESULT, serial, row, at, attempt, verdict, reason, code, provider, source, wait_s, text)
        )

    def event(self, text: str, provider: int = 0, source: int = 0) -> None:
        """Put an event (a throttle that eased, a provider that was suspended) beside the results it explains."""
        self._pending.append((Kind.EVENT, 0, 0, self._clock.wall_us(), 0, 0, 0, 0, provider, source, 0, text))

    def provider(self, name: str) -> int:
        """The number that stands for this provider in this log."""
        return self._name(NAME_PROVIDER, name)

    def source(self, name: str) -> int:
        """The number that stands for this source in this log."""
        return self._name(NAME_SOURCE, name)

    def _name(self, kind: int, name: str) -> int:
        number = self._names.get((kind, name))
        if number is None:
            # 65,535 names of a kind fit; a list with more providers than that shares the last number.
            number = min(sum(1 for known, _ in self._names if known == kind) + 1, 65_535)
            self._names[kind, name] = number
            shown = name if number < 65_535 else "others"
            self._pending.append((Kind.NAME, 0, number, self._clock.wall_us(), 0, 0, kind, 0, 0, 0, 0, shown))
        return number

    @property
    def pending(self) -> int:
        """Records said and not yet written."""
        return len(self._pending)

    # -- what reaches the disk ------------------------------------------------------------------------------------

    def write(self) -> None:
        """Append what is pending. Survives a killed process when it returns; raises LogUnwritable."""
        while self._pending:
            group, self._pending = self._pending[:_MOST_RECORDS], self._pending[_MOST_RECORDS:]
            self._append(self._encoder.batch(group))

    async def commit(self) -> None:
        """Append and sync, off the loop: after it returns a successor finds what was said. Raises LogUnwritable."""
        began = self._clock.monotonic()
        self.write()
        if self._sync is not _skip_sync:
            await asyncio.get_running_loop().run_in_executor(None, self._sync_now)
        took = self._clock.monotonic() - began
        self.commit_times[bisect_left(COMMIT_BUCKETS_S, took)] += 1
        self.commit_times[-1] += took

    def _sync_now(self) -> None:
        try:
            self._sync(self._file)
        except OSError as problem:
            # After a failed sync nobody knows what is on the disk: this log is over.
            self.problem = f"sync failed: {problem.strerror}"
            raise LogUnwritable(file=self.path, problem=self.problem) from None

    def close(self) -> None:
        """Write what is pending, seal the end, sync, unlock."""
        try:
            if self.problem is None:
                self.write()
                self._append(self._encoder.end())
                self._sync_now()
        finally:
            self._ballast.unlink(missing_ok=True)
            os.close(self._file)

    def _append(self, raw: bytes) -> None:
        if self.problem is not None:
            raise LogUnwritable(file=self.path, problem=self.problem)
        try:
            self._write_all(self._file, raw)
        except OSError as problem:
            self._cut()
            if problem.errno not in _NO_SPACE or self.is_full:
                self.problem = problem.strerror or str(problem)
                raise LogUnwritable(file=self.path, problem=self.problem) from None
            self.is_full = True
            self._ballast.unlink(missing_ok=True)
            try:
                self._write_all(self._file, raw)
            except OSError as again:
                self._cut()
                self.problem = again.strerror or str(again)
                raise LogUnwritable(file=self.path, problem=self.problem) from None
        self._length += len(raw)

    @staticmethod
    def _write_all(descriptor: int, raw: bytes) -> None:
        rest = memoryview(raw)
        while rest:
            rest = rest[os.write(descriptor, rest) :]

    def _cut(self) -> None:
        """Take back half a batch: what follows it in the file could never be read."""
        with contextlib.suppress(OSError):
            os.ftruncate(self._file, self._length)
