"""The operator's database as write-back needs it: run a statement for many people, all or nothing."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from engine.errors import EngineError, Exit

Value = str | int | float | bytes | datetime | None


class BadTarget(EngineError):
    """{url} is no database that can be written to: {problem}."""

    exit_code = Exit.USAGE
    hint = (
        "sqlite:///path/to/file.db or postgresql://user@host/database; a password belongs into PGPASSWORD or ~/.pgpass."
    )


class TargetRefused(EngineError):
    """The database {url} refused: {problem}. Nothing of this batch was written."""

    exit_code = Exit.TRY_AGAIN
    hint = "Correct the statement or the database; what was written before is remembered and not repeated."


class Target(Protocol):
    """A database with one open transaction."""

    url: str  # without a password
    placeholder: str

    def run(self, text: str, values: Sequence[Sequence[Value]]) -> int:
        """Run `text` once for each line of values; the answer is how many rows of the database it changed."""

    def commit(self) -> None:
        """Make it last."""

    def rollback(self) -> None:
        """Take it back."""

    def close(self) -> None:
        """Let go; what was not committed is taken back."""


class SqliteTarget:
    """A SQLite file, which must exist: a misspelt path must not become an empty database."""

    placeholder = "?"

    def __init__(self, url: str, path: str) -> None:
        self.url = url
        if not Path(path).is_file():
            raise BadTarget(url=url, problem="there is no such file")
        self._connection = sqlite3.connect(path, timeout=30)

    def run(self, text: str, values: Sequence[Sequence[Value]]) -> int:
        try:
            with closing(self._connection.cursor()) as cursor:
                cursor.executemany(text, [[_for_sqlite(value) for value in line] for line in values])
                return max(0, cursor.rowcount)
        except sqlite3.Error as problem:
            self.rollback()
            raise TargetRefused(url=self.url, problem=problem) from None

    def commit(self) -> None:
        try:
            self._connection.commit()
        except sqlite3.Error as problem:
            raise TargetRefused(url=self.url, problem=problem) from None

    def rollback(self) -> None:
        self._connection.rollback()

    def close(self) -> None:
        self._connection.close()


class PostgresTarget:
    """PostgreSQL by psycopg (extra `cluster`)."""

    placeholder = "%s"

    def __init__(self, url: str, dsn: str) -> None:
        self.url = url
        try:
            import psycopg
        except ImportError:
            raise BadTarget(url=url, problem="it needs the extra `cluster` (pip install 'rowpost[cluster]')") from None
        self._error: type[Exception] = psycopg.Error
        try:
            self._connection: Any = psycopg.connect(dsn, connect_timeout=10)
        except psycopg.Error as problem:
            raise TargetRefused(url=url, problem=_first_line(problem)) from None

    def run(self, text: str, values: Sequence[Sequence[Value]]) -> int:
        try:
            with self._connection.cursor() as cursor:
                cursor.executemany(text, values)
                return max(0, int(cursor.rowcount))
        except self._error as problem:
            self._connection.rollback()
            raise TargetRefused(url=self.url, problem=_first_line(problem)) from None

    def commit(self) -> None:
        try:
            self._connection.commit()
        except self._error as problem:
            raise TargetRefused(url=self.url, problem=_first_line(problem)) from None

    def rollback(self) -> None:
        self._connection.rollback()

    def close(self) -> None:
        self._connection.close()


def open_target(url: str) -> Target:
    """The database at `url`; raises BadTarget, TargetRefused. No message shows a password."""
    try:
        parts = urlsplit(url)
    except ValueError:
        raise BadTarget(url="the URL", problem="it cannot be read as one") from None
    shown = without_password(url)
    match parts.scheme:
        case "sqlite":
            path = parts.path[1:] if parts.path.startswith("/") and not parts.netloc else parts.netloc + parts.path
            return SqliteTarget(shown, path)
        case "postgresql" | "postgres":
            return PostgresTarget(shown, url)
        case _:
            raise BadTarget(url=shown, problem=f"scheme {parts.scheme!r} is not known")


def without_password(url: str) -> str:
    """The URL as it may be shown and remembered."""
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    user = parts.username + "@" if parts.username else ""
    # A query may carry a password as well (?password=...), so none of it is shown.
    return f"{parts.scheme}://{user}{host}{parts.path}"


def _for_sqlite(value: Value) -> Value:
    # SQLite keeps no times; this is the form that its own datetime() writes.
    return value.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S") if isinstance(value, datetime) else value


def _first_line(problem: BaseException) -> str:
    return (str(problem).strip().splitlines() or [type(problem).__name__])[0]
