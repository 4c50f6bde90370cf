"""The suppressions that machines share: a table in the PostgreSQL of the control store, one for all its campaigns.

One object is one connection, made when it is needed; one thread at a time. Statements: sql/suppressions_postgres.sql.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, LiteralString

import psycopg
from psycopg import errors

from engine.control.statements import load_statements
from engine.control.store import StoreAway, StoreRefuses
from formats.suppression import Entry

_CONNECT_PATIENCE_S = 5
_STATEMENT_PATIENCE_MS = 30_000
_AT_ONCE = 10_000


class SuppressionTable:
    """Entries in the order in which they were said, by any machine."""

    def __init__(self, dsn: str, shown: str) -> None:
        """`shown` is the URL without a password, for messages."""
        self.shown = shown
        self._dsn = dsn
        self._sql = load_statements("suppressions_postgres.sql")
        self._db: psycopg.Connection[tuple[Any, ...]] | None = None

    def secret(self, wish: bytes) -> tuple[str, bytes]:
        """The table's name, and the key of its forgotten entries: `wish`, unless it has one. Makes the table."""
        with self._trouble() as db:
            ((is_there,),) = db.execute(self._text("exists")).fetchall()
            if not is_there:
                with db.transaction():
                    db.execute(self._text("lock"))
                    db.execute(self._text("schema"))
                    db.execute(self._text("keep_secret"), (secrets.token_hex(16), wish))
            ((name, key),) = db.execute(self._text("secret")).fetchall()
            return str(name), bytes(key)

    def add(self, entries: Sequence[Entry]) -> int:
        """Say entries; how many were new. Committed when it returns, and saying them again changes nothing."""
        added = 0
        for start in range(0, len(entries), _AT_ONCE):
            some = entries[start : start + _AT_ONCE]
            columns = [
                [getattr(one, name) for one in some]
                for name in ("address", "scope", "reason", "source", "at_us", "lifted")
            ]
            with self._trouble() as db, db.transaction():
                db.execute(self._text("lock"))
                added += db.execute(self._text("add"), columns).rowcount
        return added

    def after(self, id_: int, most: int) -> list[tuple[int, Entry]]:
        """The next entries behind `id_`, each with its own id."""
        with self._trouble() as db:
            found = db.execute(self._text("after"), (id_, most), binary=True).fetchall()
        return [(row[0], Entry(*row[1:])) for row in found]

    def forget(self, addresses: Sequence[str], instead: Sequence[Entry]) -> int:
        """Erase every entry of `addresses`, and say `instead`; how many named them."""
        with self._trouble() as db, db.transaction():
            db.execute(self._text("lock"))
            erased = db.execute(self._text("erase"), (list(addresses),)).rowcount
        self.add(instead)
        return erased

    def forget_older(self, before_us: int, upto_id: int) -> int:
        """Erase entries up to an id that were made before a time and never taken back; how many.

        Whoever asks has said their keyed hashes before.
        """
        with self._trouble() as db:
            return db.execute(self._text("erase_older"), (before_us, upto_id)).rowcount

    def close(self) -> None:
        """The connection is closed; the next call makes another."""
        db, self._db = self._db, None
        if db is not None:
            db.close()

    def _text(self, name: str) -> LiteralString:
        return self._sql[name]

    @contextmanager
    def _trouble(self) -> Iterator[psycopg.Connection[tuple[Any, ...]]]:
        try:
            if self._db is None or self._db.closed:
                self._db = psycopg.connect(
                    self._dsn,
                    autocommit=True,
                    connect_timeout=_CONNECT_PATIENCE_S,
                    application_name="rowpost",
                    options=f"-c synchronous_commit=on -c statement_timeout={_STATEMENT_PATIENCE_MS}",
                    tcp_user_timeout=15_000,
                )
            yield self._db
        except (errors.InsufficientPrivilege, errors.InvalidPassword, errors.InvalidCatalogName) as problem:
            self.close()
            raise StoreRefuses(where=self.shown, problem=" ".join(str(problem).split())[:300]) from None
        except psycopg.ProgrammingError:
            self.close()
            raise  # ours: a wrong statement is no store that is away
        except psycopg.Error as problem:
            self.close()
            words = " ".join(str(problem).split())[:300] or type(problem).__name__
            raise StoreAway(where=self.shown, problem=words) from None
