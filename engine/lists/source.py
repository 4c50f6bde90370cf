"""What every source becomes: a polars scan of a known number of rows, with names for files and rows.

Parquet is scanned where it stands. Everything else is first staged into an Arrow file in the work folder, so that the
rest of `prepare` reads one kind of thing as often as it likes, and a source that breaks half way breaks before anything
was decided.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow as pa

from engine.errors import EngineError, Exit

Skipped = npt.NDArray[np.int64]
NONE_SKIPPED: Skipped = np.empty(0, dtype=np.int64)


class ListUnreadable(EngineError):
    """{file}: {problem}."""

    exit_code = Exit.LIST
    hint = "{next}"

    def __init__(self, *, file: object, problem: object, next: str = "Correct the file, or export it again.") -> None:
        super().__init__(file=file, problem=str(problem).strip().rstrip("."), next=next)


class Rejected(msgspec.Struct, frozen=True, kw_only=True):
    """A row left out. `row` counts the source's data rows from 1; `line` is given where the source has lines."""

    file: str
    row: int
    line: int | None = None
    value: str | None
    reason: str
    detail: str = ""


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """One file (or query) of the list.

    `skipped` are the numbers (from 1, ascending) of records that never became rows, explained in `rejected`.
    """

    name: str
    rows: int
    scan: Callable[[], pl.LazyFrame]
    notes: tuple[str, ...] = ()
    skipped: Skipped = NONE_SKIPPED
    rejected: tuple[Rejected, ...] = ()
    decoded_bytes: int = 0  # about what the rows take in memory

    def row_numbers(self, indexes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The numbers, from 1, in the source's own counting, of rows 0, 1, ... as scanned."""
        before = self.skipped - np.arange(len(self.skipped)) - 1  # rows that stand before each skipped record
        return indexes + 1 + np.searchsorted(before, indexes, side="right")


def stage(batches: Iterable[pa.RecordBatch], schema: pa.Schema, path: Path) -> tuple[int, int]:
    """Write `batches` into an Arrow file at `path`; the rows, and the bytes they take."""
    rows = size = 0
    options = pa.ipc.IpcWriteOptions(compression="lz4")
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, schema, options=options) as writer:
        for batch in batches:
            writer.write_batch(batch)
            rows += batch.num_rows
            size += batch.nbytes
    return rows, size
