"""The list: Parquet files whose rows are numbered through, and a row group's columns as Python values.

Rows are numbered 0..N-1 over the files in their order, each file's row groups in theirs. Any Parquet file is a list
that has a column of addresses; `engine prepare` writes one in the order that sends best.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate

import msgspec
import numpy as np
import pyarrow as pa


class Span(msgspec.Struct, frozen=True):
    """One row group: which file, which group in it, and the rows it holds in the list's numbering."""

    file: int
    group: int
    first_row: int
    rows: int


class Numbering:
    """Row numbers to row groups and back."""

    def __init__(self, files: Iterable[Sequence[int]]) -> None:
        """`files` holds for each file the row counts of its row groups."""
        places = [(f, g, rows) for f, groups in enumerate(files) for g, rows in enumerate(groups)]
        starts = list(accumulate((rows for _, _, rows in places), initial=0))
        self.rows = starts.pop()
        self.spans = [Span(f, g, start, rows) for (f, g, rows), start in zip(places, starts, strict=True)]
        self._starts = starts

    def span_of(self, row: int) -> Span:
        """The row group that holds `row`; raises IndexError outside the list."""
        if not 0 <= row < self.rows:
            raise IndexError(f"row {row} is not in a list of {self.rows} rows")
        return self.spans[bisect_right(self._starts, row) - 1]

    def spans_between(self, first: int, rows: int) -> list[Span]:
        """The row groups that hold any of the rows first .. first + rows - 1."""
        if rows <= 0:
            return []
        low = bisect_right(self._starts, first) - 1
        high = bisect_right(self._starts, first + rows - 1)
        return [span for span in self.spans[low:high] if span.rows]


def values(column: pa.Array | pa.ChunkedArray) -> list[object]:
    """A column as Python values, null as None; integers keep every digit.

    Per type the quickest way measured (10 columns, 0.4 µs a row against 3.3 by `to_pylist` of the table): integers
    through numpy, dictionary columns by taking from the decoded dictionary, everything else by `to_pylist`.
    """
    if isinstance(column, pa.ChunkedArray):
        if column.num_chunks != 1:
            return [value for chunk in column.chunks for value in values(chunk)]
        column = column.chunk(0)
    kind = column.type
    if pa.types.is_dictionary(kind):
        words = np.empty(len(column.dictionary) + 1, dtype=object)
        words[:-1] = values(column.dictionary)
        words[-1] = None
        indices = column.indices
        if indices.null_count:
            indices = indices.cast(pa.int64()).fill_null(len(words) - 1)
        taken: list[object] = words[indices.to_numpy()].tolist()
        return taken
    if column.null_count == 0 and (pa.types.is_integer(kind) or kind == pa.float64()):
        numbers: list[object] = column.to_numpy().tolist()
        return numbers
    items: list[object] = column.to_pylist()
    return items


def bare_name(column: str) -> str:
    """A column's name without the byte-order mark and padding that exports leave in front of the first one."""
    return column.strip().strip("\ufeff").strip()
