"""Attempts on their way from logs to rows: written once per log, read once per span of rows.

Rows are cut into spans of 2^20. Each log's attempts go, span by span, into one scratch file (Arrow IPC, random access,
removed when the merge is closed), so that every log is read once whatever order its rows come in, and what is in
memory at a time is one span, not the list. Scratch is no format at rest: its bytes are nobody's business but ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa

from engine.results.attempts import SCHEMA, Attempts

SPAN_BITS = 20
SPAN_ROWS = 1 << SPAN_BITS


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """Attempts of one span: the how-manieth batch of which log's scratch file."""

    log: int
    span: int
    batch: int


# What is read of a span: attempts, by number of log.
Pieces = list[tuple[int, pa.RecordBatch]]


class SpoolWriter:
    """One log's scratch file."""

    def __init__(self, path: Path, log: int) -> None:
        self._log = log
        self._file = pa.OSFile(str(path), "wb")
        # Not compressed: some 35 bytes an attempt, mostly in the page cache; lz4 cost a fifth of the whole scan.
        self._writer = pa.ipc.new_file(self._file, SCHEMA)
        self.pieces: list[Piece] = []

    def add(self, attempts: Attempts) -> None:
        """Scatter these over their spans."""
        span = attempts.row >> np.uint64(SPAN_BITS)
        if (span[1:] < span[:-1]).any():
            order = np.argsort(span, kind="stable")
            attempts, span = attempts.take(order), span[order]
        starts = np.flatnonzero(np.concatenate(([True], span[1:] != span[:-1])))
        for start, end in zip(starts.tolist(), [*starts[1:].tolist(), len(span)], strict=True):
            part = slice(start, end)
            columns = {name: getattr(attempts, name)[part] for name in Attempts.__slots__}
            self._put(int(span[start]), Attempts(**columns))

    def _put(self, span: int, attempts: Attempts) -> None:
        columns = [
            pa.array((attempts.row - np.uint64(span << SPAN_BITS)).astype(np.uint32)),
            *(
                pa.array(getattr(attempts, field.name).astype(field.type.to_pandas_dtype(), copy=False))
                for field in list(SCHEMA)[1:-1]
            ),
            attempts.text,
        ]
        self._writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=SCHEMA))
        self.pieces.append(Piece(self._log, span, len(self.pieces)))

    def close(self) -> None:
        self._writer.close()
        self._file.close()


class Spool:
    """All scratch files of a merge."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._by_span: dict[int, list[Piece]] = {}

    def path(self, log: int) -> Path:
        return self.folder / f"{log}.scratch"

    def add(self, pieces: Sequence[Piece]) -> None:
        """Let these be found."""
        for piece in pieces:
            self._by_span.setdefault(piece.span, []).append(piece)

    def read(self, span: int) -> Pieces:
        """The attempts of a span."""
        found: Pieces = []
        by_log: dict[int, list[int]] = {}
        for piece in self._by_span.get(span, []):
            by_log.setdefault(piece.log, []).append(piece.batch)
        for log, batches in sorted(by_log.items()):
            # Mapped, so that only the columns that are asked for are ever read.
            with pa.memory_map(str(self.path(log))) as file:
                reader = pa.ipc.open_file(file)
                found += [(log, reader.get_batch(batch)) for batch in batches]
        return found
