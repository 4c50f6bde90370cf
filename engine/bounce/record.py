"""Feedback on disk: written by `engine bounces`, read by it again and by `merge-logs`.

A record is durable before the message it came from is touched, so a crash between the two reads a message twice and
records it once: the message's key tells.
"""

from __future__ import annotations

import fcntl
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from engine.errors import EngineError, Exit
from formats.feedbacklog import SCHEMA, FeedbackRecord, LogDamaged, feedback_encoder, feedback_reader
from formats.sendlog import Header, Log


class FeedbackUnwritable(EngineError):
    """The feedback log {file} cannot be written: {problem}. The messages stay where they are."""

    exit_code = Exit.TRY_AGAIN
    hint = "Make room or repair the disk, then run `engine bounces` again: nothing is lost."


class FeedbackLog(msgspec.Struct, frozen=True, kw_only=True):
    """What one feedback log says about rows of a campaign, as columns of equal length.

    Only what a checked token names, no test messages. `verdict` is `sendlog.Verdict`: REJECTED (the row was accepted
    and bounced later, or its doubt is resolved by a bounce) or ACCEPTED (it arrived somewhere: a delay or success
    report, a reply, a complaint resolve doubt). A row may come several times; ACCEPTED says less than REJECTED here:
    a relay's "accepted" or a delay does not outweigh the bounce that follows.
    """

    log: Log
    rows: npt.NDArray[np.uint64]
    verdicts: npt.NDArray[np.uint8]
    reasons: npt.NDArray[np.uint8]
    codes: npt.NDArray[np.uint16]
    at_us: npt.NDArray[np.int64]
    is_complaint: npt.NDArray[np.bool_]
    texts: pa.Array


def read_feedback_log(buffer: pa.Buffer, campaign_id: str | None = None) -> FeedbackLog:
    """The rows that a feedback log is about; raises LogDamaged where its header is gone.

    Damage behind the header is told in `log`, what precedes it is given. `campaign_id`: rows of this campaign only.
    """
    reader = feedback_reader(buffer)
    batches = list(reader)
    table = pa.Table.from_batches(batches, SCHEMA.with_metadata(batches[0].schema.metadata) if batches else SCHEMA)
    keep = np.asarray(table["row"].is_valid()) & ~np.asarray(table["is_test"]) & (np.asarray(table["verdict"]) > 0)
    if campaign_id is not None:
        keep &= np.asarray(pa.compute.equal(table["campaign"], campaign_id))
    table = table.filter(pa.array(keep))
    return FeedbackLog(
        log=reader.log,
        rows=np.asarray(table["row"], dtype=np.uint64),
        verdicts=np.asarray(table["verdict"], dtype=np.uint8),
        reasons=np.asarray(table["reason"], dtype=np.uint8),
        codes=np.asarray(table["code"], dtype=np.uint16),
        at_us=np.asarray(table["at"].cast(pa.int64()), dtype=np.int64),
        is_complaint=np.asarray(pa.compute.equal(table["kind"], "complaint"), dtype=np.bool_),
        texts=table["text"].combine_chunks(),
    )


class FeedbackWriter:
    """One feedback log, written by one process; `append` returns once its records are durable."""

    def __init__(self, path: Path, header: Header) -> None:
        self.path = path
        self._encoder = feedback_encoder(header)
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as problem:
            raise FeedbackUnwritable(file=path, problem=problem.strerror) from None

    def append(self, records: Sequence[FeedbackRecord]) -> None:
        """Write and sync `records`; raises FeedbackUnwritable."""
        if records:
            self._write(self._encoder.batch(records))

    def close(self) -> None:
        """Seal the log. Without it nothing is lost: the log then ends without its end."""
        try:
            self._write(self._encoder.end())
        finally:
            os.close(self._file)

    def _write(self, raw: bytes) -> None:
        try:
            view = memoryview(raw)
            while view:
                view = view[os.write(self._file, view) :]
            if sys.platform == "darwin":
                fcntl.fcntl(self._file, fcntl.F_FULLFSYNC)
            else:
                os.fdatasync(self._file)
        except OSError as problem:
            raise FeedbackUnwritable(file=self.path, problem=problem.strerror) from None


def feedback_tables(folders: Iterable[Path]) -> Iterator[tuple[Path, pa.Table]]:
    """The records of every feedback log in `folders`, log by log, as far as each is whole."""
    for folder in folders:
        for path in sorted(folder.glob("*.arrows")):
            try:
                with pa.memory_map(str(path)) as mapped:
                    batches = list(feedback_reader(mapped.read_buffer()))
                    yield (
                        path,
                        pa.Table.from_batches(
                            [pa.RecordBatch.from_arrays(b.columns, schema=SCHEMA) for b in batches], SCHEMA
                        ),
                    )
            except (LogDamaged, OSError):
                continue  # a file that another run has just made, or damage that `merge-logs` reports
