"""The outbox in a SQLite file, WAL, every commit synced: one host, any number of writers.

The file may be the application's own database. SQLite has no way to say "there is a new row" to another process:
`changed` looks at the file's change counter (PRAGMA data_version, a few microseconds).
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from engine.clock import Clock
from engine.control.outbox import (
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

_PATIENCE_S = 10.0


class SqliteOutbox:
    """`Outbox` over one file. One thread at a time may use it, any thread."""

    def __init__(self, path: Path, clock: Clock) -> None:
        """Open the file, creating file and tables where they are missing; raises OutboxAway."""
        self._path, self._clock = path, clock
        self._sql = load_statements("outbox_sqlite.sql")
        self._seen = -1
        with self._trouble():
            # Made with its mode, not given it afterwards: nobody else reads it in between.
            os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
            self._db = sqlite3.connect(path, timeout=_PATIENCE_S, isolation_level=None, check_same_thread=False)
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = FULL")
            self._db.executescript(self._sql["schema"])

    @contextmanager
    def _trouble(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.IntegrityError as problem:
            raise OutboxRefused(problem=str(problem)) from None
        except (sqlite3.Error, OSError, OverflowError) as problem:
            raise OutboxAway(where=self._path, problem=problem) from None

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        with self._trouble():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
            except BaseException:
                self._db.execute("ROLLBACK")
                raise
            self._db.execute("COMMIT")

    def _read(self, name: str, *values: object) -> list[tuple[Any, ...]]:
        with self._trouble():
            return self._db.execute(self._sql[name], values).fetchall()

    def _write(self, name: str, rows: Sequence[tuple[object, ...]]) -> int:
        with self._writing() as db:
            return sum(max(0, db.execute(self._sql[name], values).rowcount) for values in rows)

    # -- applications ------------------------------------------------------------------------------------------------

    def enqueue(self, mails: Sequence[Mail]) -> list[Enqueued]:
        rows = [values_of(mail) for mail in mails]
        with self._writing() as db:
            return [self._add(db, row) for row in rows]

    def _add(self, db: sqlite3.Connection, row: tuple[object, ...]) -> Enqueued:
        added = db.execute(self._sql["enqueue"], row).fetchall()
        if added:
            return Enqueued(added[0][0], True)
        return Enqueued(db.execute(self._sql["known"], (row[-1],)).fetchone()[0], False)

    # -- servers -----------------------------------------------------------------------------------------------------

    def now_us(self) -> int:
        return self._clock.wall_us()

    def claim(self, owner: str, token: str, priority: int, most: int) -> list[Claimed]:
        now = self.now_us()
        # Looking first: a poll that finds nothing takes no write lock.
        if most <= 0 or not self._read("is_due", priority, now)[0][0]:
            return []
        with self._writing() as db:
            found = db.execute(self._sql["claim"], (token, owner, priority, most, now)).fetchall()
        return sorted((Claimed(*row) for row in found), key=lambda claimed: claimed.id)

    def intend(self, rows: Sequence[tuple[int, str]]) -> set[int]:
        with self._writing() as db:
            told = msgspec.json.encode(rows).decode()
            return {row for (row,) in db.execute(self._sql["intend"], (self.now_us(), told)).fetchall()}

    def report(self, reports: Sequence[Report]) -> None:
        now = self.now_us()
        with self._writing() as db:
            db.executemany(
                self._sql["report"],
                [{**msgspec.structs.asdict(one), "state": one.state.value, "now_us": now} for one in reports],
            )

    def join(self, server: Server) -> None:
        s = server
        values = (s.id, s.kind, s.sender, s.host_id, s.boot_id, s.pid, s.started_at_us, s.renewed_at_us, s.lease_us)
        self._write("join", [values])

    def renew(self, server: str) -> bool:
        return self._write("renew", [(self.now_us(), server)]) == 1

    def leave(self, server: str) -> None:
        self._write("leave", [(self.now_us(), server)])

    def supersede(self, server: str) -> None:
        self._write("supersede", [(server,)])

    def servers(self) -> list[Server]:
        return [Server(*row) for row in self._read("servers")]

    def owners(self) -> list[str]:
        return [owner for (owner,) in self._read("owners")]

    def held(self, owner: str) -> list[Held]:
        return [
            Held(id_, token, by, bool(said), attempts) for id_, token, by, said, attempts in self._read("held", owner)
        ]

    def release(self, owner: str) -> int:
        return self._write("release", [(self.now_us(), owner)])

    # -- operators ---------------------------------------------------------------------------------------------------

    def resend(self, rows: Sequence[int]) -> int:
        now = self.now_us()
        return self._write("resend", [(now, row) for row in rows])

    def accept(self, rows: Sequence[int]) -> int:
        now = self.now_us()
        return self._write("accept", [(now, row) for row in rows])

    def cancel(self, rows: Sequence[int]) -> int:
        now = self.now_us()
        return self._write("cancel", [(now, row) for row in rows])

    def tally(self) -> list[Count]:
        return [Count(*row) for row in self._read("tally")]

    def rows(self, state: str | None, after: int, most: int) -> list[Shown]:
        return [Shown(*row) for row in self._read("rows", state, after, most)]

    def forget(self, before_us: int) -> int:
        return self._write("forget", [(before_us,)])

    def knobs(self) -> dict[str, str]:
        return dict(self._read("knobs"))

    def set_knob(self, name: str, value: str) -> None:
        self._write("set_knob", [(name, value)])

    def changed(self) -> bool:
        with self._trouble():
            (version,) = self._db.execute("PRAGMA data_version").fetchone()
        before, self._seen = self._seen, version
        return bool(version != before)

    def close(self) -> None:
        self._db.close()
