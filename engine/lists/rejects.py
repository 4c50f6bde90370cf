"""`rejects.parquet`: every row that was left out, with its number, its value and the reason.

Columns: `file`, `row` (the source's data rows counted from 1), `line` (where known), `value` (the address, or the raw
record), `reason`, `detail`. Appears by rename with the list; rows that `--where` filtered away are only counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from pathlib import Path

import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from engine.lists.source import Source

Rows = npt.NDArray[np.int64]


class Status(IntEnum):
    """What became of a row, one byte each."""

    KEPT = 0
    FILTERED = 1
    EMPTY = 2
    INVALID = 3
    NO_MAIL_DOMAIN = 4
    SUPPRESSED = 5
    DUPLICATE = 6

    @property
    def label(self) -> str:
        return self.name.lower()


SCHEMA = pa.schema(
    [
        ("file", pa.dictionary(pa.int32(), pa.string())),
        ("row", pa.int64()),
        ("line", pa.int64()),
        ("value", pa.large_string()),
        ("reason", pa.dictionary(pa.int32(), pa.string())),
        ("detail", pa.large_string()),
    ]
)


class Rejects:
    """Writes the file as the rejected rows come up, in any order."""

    def __init__(self, path: Path, sources: Sequence[Source]) -> None:
        self._writer = pq.ParquetWriter(path, SCHEMA, compression="zstd", compression_level=1)
        self._sources = sources
        self._names = [source.name for source in sources]
        self._starts = np.cumsum([0, *(source.rows for source in sources)])
        for source in sources:
            if source.rejected:
                reasons = pa.array([one.reason for one in source.rejected])
                self._write(
                    pa.array([source.name] * len(reasons)).dictionary_encode(),
                    pa.array([one.row for one in source.rejected], pa.int64()),
                    pa.array([one.line for one in source.rejected], pa.int64()),
                    pl.Series([one.value for one in source.rejected], dtype=pl.String),
                    reasons.dictionary_encode(),
                    pl.Series([one.detail for one in source.rejected], dtype=pl.String),
                )

    def add(self, rows: Rows, values: pl.Series, reason: str, details: pl.Series) -> None:
        """Rows by their number over all sources, from 0."""
        if not len(rows):
            return
        which, numbers = self._located(rows)
        zeros = pa.array(np.zeros(len(rows), dtype=np.int32))
        self._write(
            pa.DictionaryArray.from_arrays(pa.array(which), pa.array(self._names, pa.string())),
            pa.array(numbers),
            pa.nulls(len(rows), pa.int64()),
            values,
            pa.DictionaryArray.from_arrays(zeros, pa.array([reason], pa.string())),
            details,
        )

    def named(self, rows: Rows) -> pl.Series:
        """These rows in words: the number and the source of each."""
        which, numbers = self._located(rows)
        told = pl.DataFrame({"row": numbers, "file": pl.Series(self._names, dtype=pl.String).gather(which)})
        return told.select(pl.format("row {} of {}", "row", "file")).to_series()

    def _located(self, rows: Rows) -> tuple[npt.NDArray[np.int32], Rows]:
        """The source of each row, and the row's number in it."""
        which = (np.searchsorted(self._starts, rows, side="right") - 1).astype(np.int32)
        numbers = np.empty(len(rows), dtype=np.int64)
        for one in np.unique(which).tolist():
            here = which == one
            numbers[here] = self._sources[one].row_numbers(rows[here] - self._starts[one])
        return which, numbers

    def _write(
        self,
        files: pa.DictionaryArray,
        rows: pa.Array,
        lines: pa.Array,
        values: pl.Series,
        reasons: pa.DictionaryArray,
        details: pl.Series,
    ) -> None:
        texts = [one.cast(pl.String).to_arrow().cast(pa.large_string()) for one in (values, details)]
        columns = [files, rows, lines, texts[0], reasons, texts[1]]
        self._writer.write_table(pa.Table.from_arrays(columns, schema=SCHEMA))

    def close(self) -> None:
        """The file is whole."""
        self._writer.close()
