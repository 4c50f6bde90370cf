"""Columns of the planned list by row number, a span at a time, for whoever puts names to outcomes.

Reads the files that the plan names, row group by row group. A list that is gone or changed does not stop a report: its
rows come as nulls and `problems` says so.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

import msgspec
import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from formats.plan import Plan

_META_KEY = b"rowpost"  # what `prepare` tells of the list


class _Roles(msgspec.Struct, frozen=True):
    domain: str | None = None


class _Meta(msgspec.Struct, frozen=True):
    roles: _Roles = _Roles()


class ListRows:
    """The list's columns. May be read from several threads."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._starts = list(accumulate((file.rows for file in plan.files), initial=0))
        self._local = threading.local()
        self.problems: dict[str, str] = {}  # path -> what is wrong
        self.schema = self._first_schema()
        self.address = self._named(plan.address_column)
        self.id = self._named(plan.id_column) if plan.id_column else None
        self.domain = self._domain_column()

    @property
    def id_type(self) -> pa.DataType:
        """The id column's type; null where there is none."""
        if self.id is None:
            return pa.null()
        if self.schema is None:
            return pa.string()
        kind = self.schema.field(self.id).type
        return kind.value_type if pa.types.is_dictionary(kind) else kind

    def read(self, first_row: int, rows: int, columns: Sequence[str]) -> pa.Table:
        """`columns` of these rows, each of the first file's type; nulls where a file cannot be read."""
        parts: list[pa.Table] = []
        at, end = first_row, first_row + rows
        while at < end:
            number = min(bisect_right(self._starts, at) - 1, len(self._plan.files) - 1)
            upto = min(end, self._starts[number + 1]) if number >= 0 else end
            if number < 0 or upto <= at:
                upto, number = end, -1
            parts.append(self._part(number, at, upto, columns))
            at = upto
        return pa.concat_tables(parts) if parts else self._nulls(0, columns)

    def _part(self, number: int, first: int, end: int, columns: Sequence[str]) -> pa.Table:
        if number < 0 or self.schema is None:
            return self._nulls(end - first, columns)
        planned = self._plan.files[number]
        if planned.path in self.problems:
            return self._nulls(end - first, columns)
        try:
            file = self._file(planned.path)
            edges = list(accumulate(planned.row_groups, initial=self._starts[number]))
            low = bisect_right(edges, first) - 1
            high = bisect_right(edges, end - 1)
            wanted = [name for name in dict.fromkeys(columns) if name in file.schema_arrow.names]
            table = file.read_row_groups(list(range(low, high)), columns=wanted, use_threads=False)
            if table.num_rows != edges[high] - edges[low]:
                raise ValueError("its row groups have other rows than the plan says")
            table = table.slice(first - edges[low], end - first)
            return pa.table(
                [
                    _as(table.column(name), self.schema.field(name).type)
                    if name in wanted
                    else pa.nulls(end - first, self.schema.field(name).type)
                    for name in columns
                ],
                names=list(columns),
            )
        except (pa.ArrowException, OSError, ValueError, IndexError) as problem:
            self.problems[planned.path] = str(problem).splitlines()[0] if str(problem) else type(problem).__name__
            return self._nulls(end - first, columns)

    def _nulls(self, rows: int, columns: Sequence[str]) -> pa.Table:
        kinds = [self.schema.field(name).type if self.schema is not None else pa.string() for name in columns]
        return pa.table([pa.nulls(rows, kind) for kind in kinds], names=list(columns))

    def _file(self, path: str) -> pq.ParquetFile:
        opened: dict[str, pq.ParquetFile] = self._local.__dict__.setdefault("files", {})
        if path not in opened:
            # One open file per thread: a reader keeps a position.
            opened[path] = _open(path, [self.domain] if self.domain else [])
        return opened[path]

    def _first_schema(self) -> pa.Schema | None:
        for planned in self._plan.files:
            try:
                file = _open(planned.path, [])
            except (pa.ArrowException, OSError, ValueError) as problem:
                self.problems[planned.path] = str(problem).splitlines()[0]
                continue
            return file.schema_arrow
        return None

    def _named(self, bare: str) -> str:
        """The file's own spelling of a column: exports put a byte-order mark before the first one."""
        for name in self.schema.names if self.schema is not None else ():
            if name == bare or name.strip().strip("\ufeff").strip() == bare:
                return str(name)
        return bare

    def _domain_column(self) -> str | None:
        """The column that holds the addresses' domains, where `prepare` says that there is one."""
        raw = (self.schema.metadata or {}).get(_META_KEY) if self.schema is not None else None
        if raw is None or self.schema is None:
            return None
        try:
            name = msgspec.json.decode(raw, type=_Meta).roles.domain
        except msgspec.MsgspecError:
            return None
        return name if name in self.schema.names else None


def _as(column: pa.ChunkedArray, kind: pa.DataType) -> pa.ChunkedArray:
    if column.type == kind or pa.types.is_dictionary(column.type):
        return column
    return column.cast(kind)


def _open(path: str, dictionaries: list[str]) -> pq.ParquetFile:
    if "://" in path:
        filesystem, inner = pafs.FileSystem.from_uri(path)
        return pq.ParquetFile(filesystem.open_input_file(inner), read_dictionary=dictionaries)
    return pq.ParquetFile(path, read_dictionary=dictionaries)
