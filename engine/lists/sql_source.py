"""Lists from a database: one query, its rows staged as they arrive.

PostgreSQL and SQLite through ADBC, whatever else connectorx reads (MySQL, SQL Server, ...) through connectorx. A
connection that drops half way leaves nothing behind: the stage is thrown away, and no output was begun.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa

from engine.errors import EngineError, Exit
from engine.lists.source import Source, stage


class DatabaseFailed(EngineError):
    """{url}: {problem}."""

    exit_code = Exit.LIST
    hint = "Try the query in the database's own client; nothing was written."


class DriverMissing(EngineError):
    """Reading from {url} needs the extra "database" ({problem})."""

    exit_code = Exit.USAGE
    hint = 'pip install "rowpost[database]"'


def sql_source(url: str, query: str, work: Path) -> Source:
    """The rows of `query` at the database `url`, staged in `work`; raises DatabaseFailed."""
    shown = redacted(url)
    staged_at = work / "query.arrow"
    try:
        if url.startswith(("postgresql://", "postgres://")):
            from adbc_driver_postgresql import dbapi as postgres

            rows, size = _stage_adbc(postgres.connect(url), query, staged_at)
        elif url.startswith("sqlite:"):
            from adbc_driver_sqlite import dbapi as sqlite

            rows, size = _stage_adbc(sqlite.connect(str(_sqlite_file(url))), query, staged_at)
        else:
            import connectorx

            table = connectorx.read_sql(url, query, return_type="arrow")
            rows, size = stage(*_plain(table.schema, table.to_batches()), staged_at)
    except ImportError as problem:
        raise DriverMissing(url=shown, problem=problem) from None
    except EngineError:
        raise
    except Exception as problem:  # each driver has its own errors, with no common base
        text = " ".join(str(problem).split()).replace(url, shown)
        raise DatabaseFailed(url=shown, problem=text[:500].rstrip(".")) from None
    return Source(name=shown, rows=rows, scan=lambda: pl.scan_ipc(staged_at), decoded_bytes=size)


def _sqlite_file(url: str) -> Path:
    """sqlite:///relative.db, sqlite:////absolute.db, and sqlite:///absolute.db where that is what is there."""
    rest = url.removeprefix("sqlite:").removeprefix("//")
    relative, absolute = Path(rest[1:] if rest.startswith("/") else rest), Path(rest)
    for path in (relative, absolute):
        if path.is_file():
            return path
    # SQLite would make an empty database of a misspelt name.
    raise DatabaseFailed(url=url, problem=f"there is no file {relative}")


def redacted(url: str) -> str:
    """The URL without its password."""
    return re.sub(r"(://[^:/@]*):[^@]*@", r"\1:***@", url)


def _stage_adbc(connection: Any, query: str, path: Path) -> tuple[int, int]:
    with closing(connection), closing(connection.cursor()) as cursor:
        cursor.execute(query)
        reader = cursor.fetch_record_batch()
        return stage(*_plain(reader.schema, reader), path)


def _plain(schema: pa.Schema, batches: Any) -> tuple[Iterator[pa.RecordBatch], pa.Schema]:
    """Batches whose types polars knows: what a driver could not map (an enum, a citext) becomes its storage, as text.

    ADBC's SQLite driver also sends a column without any value as type null.
    """

    def storage(kind: pa.DataType) -> pa.DataType:
        if isinstance(kind, pa.BaseExtensionType):
            kind = kind.storage_type
        if pa.types.is_binary(kind) or pa.types.is_null(kind):
            return pa.large_string()
        return kind

    plain = pa.schema([pa.field(field.name, storage(field.type)) for field in schema])

    def cast() -> Iterator[pa.RecordBatch]:
        for batch in batches:
            columns = []
            for column, field in zip(batch.columns, plain, strict=True):
                values = column.storage if isinstance(column, pa.ExtensionArray) else column
                columns.append(values if values.type == field.type else values.cast(field.type))
            yield pa.RecordBatch.from_arrays(columns, schema=plain)

    return cast(), plain
