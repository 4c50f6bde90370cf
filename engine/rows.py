"""Rows out of the list's Parquet files, a row group at a time, as tuples of Python values.

Holds two decoded row groups (compact Arrow) and turns stretches of it into tuples when asked, so that memory stays
flat however large the list is. Files are opened once per process: a footer of 10,000 row groups costs 140 ms.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import groupby

import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from engine.errors import EngineError, Exit
from formats.plan import ListFile, Plan
from formats.recipients import Numbering, Span, bare_name, values

Row = tuple[object, ...]


class ListUnreadable(EngineError):
    """{file} cannot be read: {problem}."""

    exit_code = Exit.LIST
    hint = "Check the path and that the file is whole Parquet; `engine inspect {file}` shows what can be read of it."


class ListChanged(EngineError):
    """{file} is not the file that the plan was made for: {problem}."""

    exit_code = Exit.FROZEN
    hint = "Put the planned file back; a changed list needs a new campaign folder and `engine plan`."


def open_parquet(path: str, **options: object) -> pq.ParquetFile:
    """The file, local or at any URI of pyarrow.fs; raises ListUnreadable."""
    try:
        if "://" in path:
            filesystem, inner = pafs.FileSystem.from_uri(path)
            return pq.ParquetFile(filesystem.open_input_file(inner), **options)
        # Not mapped: a file that is cut while a row group of it is read would end the process by SIGBUS, and every
        # page ever read would count as the worker's memory (100 MB more after 5 million rows).
        return pq.ParquetFile(path, memory_map=False, **options)
    except (pa.ArrowException, OSError, ValueError) as problem:
        raise ListUnreadable(file=path, problem=_first_line(problem)) from None


def file_fingerprint(path: str) -> str:
    """What tells this file from another: a hash of its size and its footer, which holds every column chunk's place.

    Reads the last bytes only. Raises ListUnreadable.
    """
    try:
        if "://" in path:
            filesystem, inner = pafs.FileSystem.from_uri(path)
            source: pa.NativeFile = filesystem.open_input_file(inner)
        else:
            source = pa.OSFile(path)
        with source as file:
            size = file.size()
            file.seek(max(0, size - 8))
            footer = int.from_bytes(file.read(8)[:4], "little")
            start = max(0, size - 8 - footer)
            file.seek(start)
            tail = file.read(size - start)
    except (pa.ArrowException, OSError, ValueError) as problem:
        raise ListUnreadable(file=path, problem=_first_line(problem)) from None
    return hashlib.sha256(size.to_bytes(8, "little") + tail).hexdigest()[:32]


def _first_line(problem: BaseException) -> str:
    return str(problem).splitlines()[0] if str(problem) else type(problem).__name__


def first_texts(rows: Sequence[Row]) -> list[str | None]:
    """The first value of each row, the address, as text; a column of another type has no address in it."""
    return [value if isinstance(value, str) else None for value, *_ in rows]


class RowReader:
    """Reads the planned list. `columns` are in the order in which a row's values come."""

    def __init__(self, plan: Plan, columns: Sequence[str]) -> None:
        self._files: Sequence[ListFile] = plan.files
        self._numbering = Numbering([file.row_groups for file in plan.files])
        self._columns = list(columns)
        self._open: dict[int, tuple[pq.ParquetFile, list[str]]] = {}
        # Two: the one that is read ahead, and the one that parked rows are picked from.
        self._groups: dict[Span, pa.Table] = {}

    def check(self, first_row: int, rows: int) -> None:
        """Refuse files that hold any of these rows and have changed since the plan; raises ListChanged."""
        for number in sorted({span.file for span in self._numbering.spans_between(first_row, rows)}):
            file = self._files[number]
            if file_fingerprint(file.path) != file.fingerprint:
                raise ListChanged(file=file.path, problem="its size or footer differs")

    def spans(self, first_row: int, rows: int) -> list[Span]:
        """The row groups of a batch."""
        return self._numbering.spans_between(first_row, rows)

    def read(self, span: Span, first: int, rows: int) -> list[Row]:
        """Rows span.first_row + first ..., at most `rows` of them, as tuples. Raises ListUnreadable, ListChanged."""
        table = self._table(span).slice(first, rows)
        if not self._columns:
            return [()] * table.num_rows
        return list(zip(*map(values, table.columns), strict=True))

    def pick(self, rows: Sequence[int]) -> list[tuple[int, Row]]:
        """Single rows by number; quick when they come sorted, for each row group is decoded once."""
        picked: list[tuple[int, Row]] = []
        for span, wanted in groupby(rows, key=self._numbering.span_of):
            numbers = list(wanted)
            places = pa.array([row - span.first_row for row in numbers], pa.int64())
            chosen = self._table(span).take(places)
            found = zip(*map(values, chosen.columns), strict=True) if self._columns else (() for _ in numbers)
            picked.extend(zip(numbers, found, strict=True))
        return picked

    def _table(self, span: Span) -> pa.Table:
        known = self._groups.pop(span, None)
        if known is not None:
            self._groups[span] = known
            return known
        file, names = self._file(span.file)
        try:
            table = file.read_row_group(span.group, columns=names, use_threads=False).select(names)
        except (pa.ArrowException, OSError, ValueError) as problem:
            raise ListUnreadable(file=self._files[span.file].path, problem=_first_line(problem)) from None
        if table.num_rows != span.rows:
            path = self._files[span.file].path
            raise ListChanged(file=path, problem=f"row group {span.group} has {table.num_rows} rows, not {span.rows}")
        # Chunks appear only in row groups of gigabytes; one array per column keeps conversion simple.
        while len(self._groups) >= 2:
            del self._groups[next(iter(self._groups))]
        whole = self._groups[span] = table.combine_chunks()
        return whole

    def _file(self, number: int) -> tuple[pq.ParquetFile, list[str]]:
        if number not in self._open:
            path = self._files[number].path
            file = open_parquet(path)
            by_bare_name = {bare_name(name): name for name in reversed(file.schema_arrow.names)}
            missing = [column for column in self._columns if column not in by_bare_name]
            if missing:
                raise ListChanged(file=path, problem=f"column {missing[0]!r} is gone")
            names = [by_bare_name[column] for column in self._columns]
            texts = [n for n in names if _is_text(file.schema_arrow.field(n).type)]
            # Repeated texts (cities, domains) decode as dictionaries at a fraction of the price.
            file = open_parquet(path, read_dictionary=[n for n in texts if _repeats(file, n)])
            self._open[number] = (file, names)
        return self._open[number]


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _repeats(file: pq.ParquetFile, column: str) -> bool:
    """Whether the writer kept this column's values in a dictionary, judged by the first row group."""
    if file.metadata.num_row_groups == 0:
        return False
    group = file.metadata.row_group(0)
    for index in range(group.num_columns):
        chunk = group.column(index)
        if chunk.path_in_schema == column:
            # A dictionary that the writer gave up on leaves data pages in PLAIN as well.
            return bool(
                chunk.has_dictionary_page and set(chunk.encodings) <= {"RLE_DICTIONARY", "PLAIN_DICTIONARY", "RLE"}
            )
    return False
