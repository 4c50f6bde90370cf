"""The outbox for applications: one call puts a mail into the table, and the engine sends it within seconds.

    from engine.outbox import Mail, insert, open_outbox

    with open_outbox("outbox") as outbox:                 # a folder, a SQLite file, or postgresql://...
        outbox.enqueue([Mail(address="ann@example.com", priority=1, template="welcome", fields={"name": "Ann"})])

    insert(connection, Mail(...))       # on the application's own connection, in its own transaction
    await enqueue("outbox", Mail(...))  # from asyncio

Nothing here sends. A mail that was enqueued is durable; `engine serve-outbox`, or `engine send` beside a campaign,
does the rest.
"""

from __future__ import annotations

import asyncio
from contextlib import closing
from pathlib import Path
from typing import Any, Protocol

import msgspec

from engine.clock import Clock, SystemClock
from engine.config import SETTINGS_FILE, load_settings
from engine.control.outbox import Enqueued, Mail, Outbox, OutboxRefused, values_of
from engine.control.outbox_sqlite import SqliteOutbox
from engine.control.statements import load_statements
from engine.errors import EngineError, Exit

__all__ = ["Enqueued", "Mail", "NotAnOutbox", "OutboxRefused", "connect", "enqueue", "insert", "open_outbox"]


class NotAnOutbox(EngineError):
    """{where} is no outbox: {problem}."""

    exit_code = Exit.SETTINGS
    hint = "Name the outbox folder (it has a campaign.toml), a SQLite file, or postgresql://HOST/DATABASE."


class Connection(Protocol):
    """What `insert` asks of a DB-API connection: sqlite3's or psycopg's."""

    def execute(self, sql: str, values: Any, /) -> Any:
        """Run one statement."""


def connect(where: str | Path, clock: Clock | None = None) -> Outbox:
    """The outbox of a folder with its settings, a SQLite file, or a PostgreSQL URL; raises NotAnOutbox, OutboxAway."""
    text = str(where)
    if text.startswith(("postgresql://", "postgres://")):
        try:
            from engine.control.outbox_postgres import PostgresOutbox
        except ImportError:
            raise NotAnOutbox(where=text, problem="PostgreSQL needs `pip install 'rowpost[cluster]'`") from None
        return PostgresOutbox(text)
    path = Path(text.removeprefix("sqlite:"))
    if path.is_dir():
        if not (path / SETTINGS_FILE).is_file():
            raise NotAnOutbox(where=path, problem=f"the folder has no {SETTINGS_FILE}")
        return connect(store_of(path), clock)
    if not path.parent.is_dir():
        raise NotAnOutbox(where=path, problem="there is no such file or folder")
    return SqliteOutbox(path, clock or SystemClock())


def store_of(folder: Path) -> str:
    """Where the outbox of this folder is kept, by its settings."""
    store = load_settings(folder).outbox.store
    return store if store.startswith(("postgresql://", "postgres://")) else str(folder / store.removeprefix("sqlite:"))


def open_outbox(where: str | Path) -> closing[Outbox]:
    """`connect` for a `with` block."""
    return closing(connect(where))


async def enqueue(where: str | Path, *mails: Mail) -> list[Enqueued]:
    """Add mails without blocking the event loop; a connection of its own each time."""

    def add() -> list[Enqueued]:
        with open_outbox(where) as outbox:
            return outbox.enqueue(mails)

    return await asyncio.to_thread(add)


def insert(connection: Connection, mail: Mail) -> Enqueued:
    """Add a mail on the application's own connection: it is sent if, and only if, that transaction commits.

    The tables must be there (`engine outbox init`, or `connect` once). Raises OutboxRefused.
    """
    is_sqlite = type(connection).__module__.startswith("sqlite3")
    sql = load_statements("outbox_sqlite.sql" if is_sqlite else "outbox_postgres.sql")
    values = values_of(mail)
    added = connection.execute(sql["enqueue"], values).fetchall()
    if added:
        return Enqueued(added[0][0], True)
    return Enqueued(connection.execute(sql["known"], (values[-1],)).fetchone()[0], False)


def parse_mail(raw: bytes | str) -> Mail:
    """A mail from one line of JSON; raises OutboxRefused naming what does not fit."""
    try:
        return msgspec.json.decode(raw, type=Mail)
    except msgspec.MsgspecError as problem:
        raise OutboxRefused(problem=str(problem)) from None
