"""The outbox in PostgreSQL 14 or newer: any number of writers and servers on any number of hosts.

Claims skip rows that another server is claiming; a trigger tells of new rows (NOTIFY `rowpost_outbox`), so that a
sign-up mail waits for no poll. What survives: a commit that returned, for `synchronous_commit = on` is set on every
connection. All times are the server's. A password never leaves libpq: URLs are shown without it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, LiteralString, cast
from urllib.parse import urlsplit, urlunsplit

import msgspec
import psycopg

from engine.control.outbox import (
    OPEN,
    Claimed,
    Count,
    Enqueued,
    Held,
    Mail,
    OutboxAway,
    OutboxRefused,
    Report,
    Server,
    Shown,
    values_of,
)
from engine.control.statements import load_statements

_CONNECT_PATIENCE_S = 5
_STATEMENT_PATIENCE_MS = 30_000  # a server that hangs is a server that is away
CHANNEL = "rowpost_outbox"

Db = psycopg.Connection[tuple[Any, ...]]


class PostgresOutbox:
    """`Outbox` over two connections, made when first needed and again after a failure: one speaks, one listens."""

    def __init__(self, url: str) -> None:
        """Open the outbox, making its tables where they are missing; raises OutboxAway."""
        parts = urlsplit(url)
        user = f"{parts.username}@" if parts.username else ""
        self._url = url
        self._shown = urlunsplit(parts._replace(netloc=user + parts.netloc.rpartition("@")[2], query=""))
        self._sql = load_statements("outbox_postgres.sql")
        self._db: Db | None = None
        self._ear: Db | None = None
        with self._speaking() as db:
            if not db.execute(self._text("is_there")).fetchall()[0][0]:
                with db.transaction():
                    db.execute("SELECT pg_advisory_xact_lock(hashtextextended('rowpost outbox', 1))")
                    db.execute(self._text("schema"))

    def _text(self, name: str) -> LiteralString:
        # Ours, out of a file of the package.
        return self._sql[name]

    def _connect(self) -> Db:
        db: Db = psycopg.connect(self._url, connect_timeout=_CONNECT_PATIENCE_S, autocommit=True)
        db.execute("SET synchronous_commit = on")
        db.execute("SELECT set_config('statement_timeout', %s, false)", (str(_STATEMENT_PATIENCE_MS),))
        return db

    @contextmanager
    def _trouble(self) -> Iterator[None]:
        try:
            yield
        except (psycopg.IntegrityError, psycopg.DataError) as problem:
            raise OutboxRefused(problem=" ".join(str(problem).split())) from None
        except (psycopg.Error, OSError) as problem:
            self._let_go()
            raise OutboxAway(where=self._shown, problem=" ".join(str(problem).split())) from None

    @contextmanager
    def _speaking(self) -> Iterator[Db]:
        with self._trouble():
            if self._db is None or self._db.closed:
                self._db = self._connect()
            yield self._db

    def _read(self, name: str, values: Any = ()) -> list[tuple[Any, ...]]:
        with self._speaking() as db:
            return db.execute(self._text(name), values).fetchall()

    def _write(self, name: str, values: Any) -> int:
        with self._speaking() as db:
            return max(0, db.execute(self._text(name), values).rowcount)

    # -- applications ------------------------------------------------------------------------------------------------

    def enqueue(self, mails: Sequence[Mail]) -> list[Enqueued]:
        rows = [values_of(mail) for mail in mails]
        with self._speaking() as db, db.transaction():
            return [self._add(db, row) for row in rows]

    def _add(self, db: Db, row: tuple[object, ...]) -> Enqueued:
        added = db.execute(self._text("enqueue"), row).fetchall()
        if added:
            return Enqueued(added[0][0], True)
        return Enqueued(db.execute(self._text("known"), (row[-1],)).fetchall()[0][0], False)

    # -- servers -----------------------------------------------------------------------------------------------------

    def now_us(self) -> int:
        (now,) = self._read("now_us")[0]
        return int(now)

    def claim(self, owner: str, token: str, priority: int, most: int) -> list[Claimed]:
        if most <= 0:
            return []
        wanted = {"owner": owner, "token": token, "priority": priority, "most": most}
        return sorted((Claimed(*row) for row in self._read("claim", wanted)), key=lambda claimed: claimed.id)

    def intend(self, rows: Sequence[tuple[int, str]]) -> set[int]:
        told = ([row for row, _ in rows], [token for _, token in rows])
        return {row for (row,) in self._read("intend", told)}

    def report(self, reports: Sequence[Report]) -> None:
        rows = [
            {**msgspec.structs.asdict(one), "state": one.state.value, "is_open": one.state in OPEN} for one in reports
        ]
        with self._speaking() as db, db.transaction(), db.cursor() as cursor:
            cursor.executemany(self._text("report"), rows)

    def join(self, server: Server) -> None:
        s = server
        self._write("join", (s.id, s.kind, s.sender, s.host_id, s.boot_id, s.pid, s.lease_us))

    def renew(self, server: str) -> bool:
        return self._write("renew", (server,)) == 1

    def leave(self, server: str) -> None:
        self._write("leave", (server,))

    def supersede(self, server: str) -> None:
        self._write("supersede", (server,))

    def servers(self) -> list[Server]:
        return [Server(*row) for row in self._read("servers")]

    def owners(self) -> list[str]:
        return [owner for (owner,) in self._read("owners")]

    def held(self, owner: str) -> list[Held]:
        return [Held(*row) for row in self._read("held", (owner,))]

    def release(self, owner: str) -> int:
        return self._write("release", (owner,))

    # -- operators ---------------------------------------------------------------------------------------------------

    def resend(self, rows: Sequence[int]) -> int:
        return self._write("resend", (list(rows),))

    def accept(self, rows: Sequence[int]) -> int:
        return self._write("accept", (list(rows),))

    def cancel(self, rows: Sequence[int]) -> int:
        return self._write("cancel", (list(rows),))

    def tally(self) -> list[Count]:
        return [Count(*row) for row in self._read("tally")]

    def rows(self, state: str | None, after: int, most: int) -> list[Shown]:
        return [Shown(*row) for row in self._read("rows", {"state": state, "after": after, "most": most})]

    def forget(self, before_us: int) -> int:
        return self._write("forget", (before_us,))

    def knobs(self) -> dict[str, str]:
        return dict(cast("list[tuple[str, str]]", self._read("knobs")))

    def set_knob(self, name: str, value: str) -> None:
        self._write("set_knob", (name, value))

    def changed(self) -> bool:
        with self._trouble():
            if self._ear is None or self._ear.closed:
                self._ear = self._connect()
                self._ear.execute(f"LISTEN {CHANNEL}")
                return True  # whatever was written before we listened
            return any(True for _ in self._ear.notifies(timeout=0))

    def _let_go(self) -> None:
        for db in (self._db, self._ear):
            if db is not None:
                with suppress(psycopg.Error, OSError):
                    db.close()
        self._db = self._ear = None

    def close(self) -> None:
        self._let_go()
