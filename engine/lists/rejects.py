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
        self._starts = np.cumsum([0, *(source.rows for source in sources)])
        for source in sources:
            if source.rejected:
                rows = [one.row for one in source.rejected]
                lines = [one.line for one in source.rejected]
                values = pl.Series([one.value for one in source.rejected], dtype=pl.String)
                details = pl.Series([one.detail for one in source.rejected], dtype=pl.String)
                by_reason = [one.reason for one in source.rejected]
                self._write([source.name] * len(rows), rows, lines, values, by_reason, details)

    def add(self, rows: npt.NDArray[np.int64], values: pl.Series, reason: str, details: pl.Series) -> None:
        """Rows by their number over all sources, from 0."""
        if not len(rows):
            return
        names, numbers = self.named(rows)
        self._write(names, numbers, [None] * len(rows), values, [reason] * len(rows), details)

    def named(self, rows: npt.NDArray[np.int64]) -> tuple[list[str], list[int]]:
        """The sources of these rows, and the rows' numbers in them."""
        which = np.searchsorted(self._starts, rows, side="right") - 1
        numbers = np.empty(len(rows), dtype=np.int64)
        for one in np.unique(which).tolist():
            here = which == one
            numbers[here] = self._sources[one].row_numbers(rows[here] - self._starts[one])
        return [self._sources[one].name for one in which.tolist()], numbers.tolist()

    def _write(
        self,
        names: list[str],
        rows: list[int],
        lines: Sequence[int | None],
        values: pl.Series,
        reasons: list[str],
        details: pl.Series,
    ) -> None:
        columns = [
            pa.array(names).dictionary_encode(),
            pa.array(rows, pa.int64()),
            pa.array(lines, pa.int64()),
            values.cast(pl.String).to_arrow().cast(pa.large_string()),
            pa.array(reasons).dictionary_encode(),
            details.cast(pl.String).to_arrow().cast(pa.large_string()),
        ]
        self._writer.write_table(pa.Table.from_arrays(columns, schema=SCHEMA))

    def close(self) -> None:
        """The file is whole."""
        self._writer.close()
