"""A connection to PostgreSQL for one campaign's schema: made when needed, made again after a failure.

Knows URLs, schemas and their versions, and what psycopg's errors mean in our words; which statements there are and what
they say is the store's business. `synchronous_commit = on` is set on every connection. A password never leaves libpq:
URLs are shown without it. Used by one thread at a time.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, LiteralString
from urllib.parse import parse_qsl, quote, urlencode, urlsplit, urlunsplit

import psycopg
from psycopg import errors

from engine.control.statements import load_statements
from engine.control.store import StoreAway, StoreChanged, StoreRefuses, StoreSchema

SCHEMA = 2
# schema version -> the statements that make the next one of it.
MIGRATIONS: dict[int, str] = {1: "schema_2"}
_CONNECT_PATIENCE_S = 5
_STATEMENT_PATIENCE_MS = 30_000  # a server that hangs is a server that is away


class ControlUrl:
    """A store's URL: `postgresql://user@host/database?campaign=ID`; the campaign may be left out."""

    def __init__(self, url: str, campaign_id: str | None = None) -> None:
        parts = urlsplit(url)
        query = dict(parse_qsl(parts.query))
        self.campaign_id = query.pop("campaign", None) or campaign_id
        self.dsn = urlunsplit(parts._replace(query=urlencode(query, quote_via=quote)))
        user = f"{quote(parts.username)}@" if parts.username else ""
        host = parts.netloc.rpartition("@")[2]
        query.pop("password", None)
        if self.campaign_id:
            query["campaign"] = self.campaign_id
        self.shown = urlunsplit(parts._replace(netloc=user + host, query=urlencode(query, quote_via=quote, safe="/")))

    @property
    def schema(self) -> str:
        assert self.campaign_id is not None
        return schema_of(self.campaign_id)


def schema_of(campaign_id: str) -> str:
    """The schema that holds a campaign: readable, and different for different ids."""
    plain = re.sub(r"[^a-z0-9_]", lambda found: f"${ord(found[0]):x}", campaign_id)
    return f"rowpost_{plain}"[:63]


class PostgresLink:
    """One connection, and what may go wrong with it."""

    def __init__(self, url: str, campaign_id: str | None = None, *, create: bool = False) -> None:
        """Open the store; `create` makes its tables where they are missing.

        Without a campaign in the URL or `campaign_id` the database must hold one. Raises StoreAway, StoreRefuses,
        StoreSchema.
        """
        self._url = ControlUrl(url, campaign_id)
        self._sql = load_statements("postgres.sql")
        self._db: psycopg.Connection[tuple[Any, ...]] | None = None
        self._changed: tuple[str, str] | None = None
        self._seen: str | None = None  # the server that we work with, and when an operator confirmed it last
        with self._trouble():
            if self._url.campaign_id is None:
                self._url.campaign_id = self._only_campaign()
            self._make_schema(create)
        self.close()  # the next connection looks at the server as every later one does

    @property
    def url(self) -> str:
        """The URL without its password."""
        return self._url.shown

    def close(self) -> None:
        """Let go of the connection; the next statement makes another."""
        self._drop()

    def _only_campaign(self) -> str:
        with psycopg.connect(self._url.dsn, connect_timeout=_CONNECT_PATIENCE_S, autocommit=True) as db:
            found = [name for (name,) in db.execute(self._text("campaigns"))]
            if len(found) != 1:
                problem = f"it holds {len(found)} campaigns; name one: ?campaign=ID"
                raise StoreRefuses(where=self._url.shown, problem=problem)
            (id_,) = db.execute(f'SELECT id FROM "{found[0]}".campaign').fetchall()
            return str(id_[0])

    def _make_schema(self, create: bool) -> None:
        schema = self._url.schema
        with psycopg.connect(self._url.dsn, connect_timeout=_CONNECT_PATIENCE_S) as db:
            db.execute("SELECT pg_advisory_xact_lock(hashtextextended(%s, 1))", (schema,))
            known = db.execute("SELECT 1 FROM pg_namespace WHERE nspname = %s", (schema,)).fetchone()
            if not known:
                if not create:
                    problem = f"it holds no campaign {self._url.campaign_id!r}; `engine plan --control URL` loads it"
                    raise StoreRefuses(where=self._url.shown, problem=problem)
                db.execute(f'CREATE SCHEMA "{schema}"')
            db.execute(f'SET LOCAL search_path TO "{schema}"')
            if not known:
                db.execute(self._text("schema"))
                db.execute("INSERT INTO meta VALUES ('schema', %s)", (str(SCHEMA),))
            ((found,),) = db.execute("SELECT value FROM meta WHERE key = 'schema'").fetchall()
            if not found.isdigit() or int(found) > SCHEMA:
                raise StoreSchema(where=self._url.shown, found=found, known=SCHEMA)
            for version in range(int(found), SCHEMA):
                db.execute(self._text(MIGRATIONS[version]))
                db.execute("UPDATE meta SET value = %s WHERE key = 'schema'", (str(version + 1),))

    # -- the connection ----------------------------------------------------------------------------------------------

    def _text(self, name: str) -> LiteralString:
        return self._sql[name]

    def _connection(self) -> psycopg.Connection[tuple[Any, ...]]:
        if self._db is None or self._db.closed:
            db = psycopg.connect(
                self._url.dsn,
                autocommit=True,
                connect_timeout=_CONNECT_PATIENCE_S,
                prepare_threshold=1,
                application_name="rowpost",
                options=f'-c search_path="{self._url.schema}" -c synchronous_commit=on'
                f" -c statement_timeout={_STATEMENT_PATIENCE_MS}",
                keepalives_idle=5,
                keepalives_interval=2,
                keepalives_count=3,
                tcp_user_timeout=15_000,
            )
            self._db = db
            self._look_at_server(db)
        return self._db

    def _look_at_server(self, db: psycopg.Connection[tuple[Any, ...]]) -> None:
        """Another system id or timeline: a server that may have lost commits that were answered.

        So is one that an operator confirmed since we saw it first: we were cut off while the others stopped for it.
        """
        known = db.execute(self._text("known_server")).fetchone()
        if known is None or not known[0]:
            self._changed = None
            return
        found = self._server(db)
        mark = f"{found} {known[1]}".strip()
        if found != known[0]:
            self._changed = (known[0], found)
        elif self._seen not in (None, mark):
            self._changed = (str(self._seen), f"{found}, confirmed meanwhile")
        else:
            self._changed, self._seen = None, mark

    def _server(self, db: psycopg.Connection[tuple[Any, ...]]) -> str:
        ((found,),) = db.execute(self._text("server")).fetchall()
        return str(found)

    def _refuse_changed(self) -> None:
        self._connection()
        if self._changed is not None:
            raise StoreChanged(where=self._url.shown, known=self._changed[0], found=self._changed[1])

    @contextmanager
    def _trouble(self) -> Iterator[None]:
        """psycopg's errors in our words; the connection is not used again after one that it may not survive."""
        try:
            yield
        except (errors.InvalidPassword, errors.InvalidAuthorizationSpecification, errors.InvalidCatalogName) as problem:
            raise StoreRefuses(where=self._url.shown, problem=_words(problem)) from None
        except (errors.UndefinedTable, errors.InvalidSchemaName):
            self._drop()
            raise StoreRefuses(where=self._url.shown, problem="the campaign is not there any more") from None
        except errors.InsufficientPrivilege as problem:
            raise StoreRefuses(where=self._url.shown, problem=_words(problem)) from None
        except psycopg.ProgrammingError:
            self._drop()
            raise  # ours: a wrong statement is no store that is away
        except psycopg.Error as problem:
            self._drop()
            words = _words(problem)
            if re.search(r"password authentication failed|no password supplied|role .* does not exist|"
                         r"database .* does not exist|no pg_hba.conf entry", words):  # fmt: skip
                raise StoreRefuses(where=self._url.shown, problem=words) from None
            if isinstance(problem, errors.ReadOnlySqlTransaction):
                words = "it is read-only (a standby, or set so by its administrator)"
            elif isinstance(problem, errors.DiskFull):
                words = "its disk is full"
            raise StoreAway(where=self._url.shown, problem=words) from None
        except BaseException:
            # Whatever interrupted us may have left a statement under way.
            if self._db is not None and self._db.info.transaction_status != psycopg.pq.TransactionStatus.IDLE:
                self._drop()
            raise

    def _drop(self) -> None:
        db, self._db = self._db, None
        if db is not None:
            db.close()

    def _run(self, name: str, values: Any = ()) -> list[tuple[Any, ...]]:
        with self._trouble():
            cursor = self._connection().execute(self._text(name), values, binary=True)
            return cursor.fetchall() if cursor.description else []

    def _changed_rows(self, name: str, values: Any) -> int:
        with self._trouble():
            return self._connection().execute(self._text(name), values).rowcount


def _words(problem: BaseException) -> str:
    """The server's words on one line, without what could be a password."""
    text = " ".join(str(problem).split()) or type(problem).__name__
    return re.sub(r"password=\S+", "password=...", text)[:300]
