"""The control store of several machines: PostgreSQL 14 or newer, a schema of its own for each campaign.

What survives: a commit that returned, for `synchronous_commit = on` is set on every connection. One object is one
connection, made when it is first needed and made again after a failure; it may be used by one thread at a time. Every
statement is in sql/postgres.sql. A password never leaves libpq: URLs are shown without it.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, LiteralString, cast
from urllib.parse import parse_qsl, quote, urlencode, urlsplit, urlunsplit
from uuid import UUID

import msgspec
import psycopg
from psycopg import errors

from engine.control.entries import compacted, window_bounds
from engine.control.statements import load_statements
from engine.control.store import (
    Advance,
    Advanced,
    BatchOwner,
    BatchTally,
    CampaignRecord,
    ClaimedBatch,
    Decision,
    Entry,
    Incarnation,
    Life,
    Override,
    StoreAway,
    StoreChanged,
    StoreHasPlan,
    StoreRefuses,
    StoreSchema,
)
from formats.plan import Plan

SCHEMA = 2
# schema version -> the statements that make the next one of it.
MIGRATIONS: dict[int, str] = {1: "schema_2"}
_PART_BYTES = 8 * 1024 * 1024
_CONNECT_PATIENCE_S = 5
_PAGE = 2000  # windows read by one statement
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


class PostgresStore:
    """`SharedStore` over one connection."""

    def __init__(self, url: str, campaign_id: str | None = None, *, create: bool = False) -> None:
        """Open the store; `create` makes its tables where they are missing.

        Without a campaign in the URL or `campaign_id` the database must hold one. Raises StoreAway, StoreRefuses,
        StoreSchema.
        """
        self._url = ControlUrl(url, campaign_id)
        self._sql = load_statements("postgres.sql")
        self._db: psycopg.Connection[tuple[Any, ...]] | None = None
        self._changed: tuple[str, str] | None = None
        with self._trouble():
            if self._url.campaign_id is None:
                self._url.campaign_id = self._only_campaign()
            self._make_schema(create)
        self.close()  # the next connection looks at the server as every later one does

    @property
    def url(self) -> str:
        """The URL without its password."""
        return self._url.shown

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
        """Another system id or timeline: a server that may have lost commits that were answered."""
        known = db.execute(self._text("known_server")).fetchone()
        if known is None or not known[0]:
            self._changed = None
            return
        found = self._server(db)
        self._changed = None if found == known[0] else (known[0], found)

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

    # -- Store -------------------------------------------------------------------------------------------------------

    def load_plan(self, plan: Plan, plan_fingerprint: str, now_us: int, *, replace: bool = False) -> None:
        self.load_bundle(plan, plan_fingerprint, now_us, {}, replace=replace)

    def load_bundle(
        self, plan: Plan, plan_fingerprint: str, now_us: int, files: dict[str, bytes], *, replace: bool
    ) -> None:
        with self._trouble(), self._connection().transaction():
            db = self._connection()
            db.execute(self._text("lock_key"), ("plan",))
            found = db.execute(self._text("campaign")).fetchone()
            if found and not replace:
                raise StoreHasPlan(where=self._url.shown, campaign_id=found[0])
            for table in ("decision", "win", "share", "override", "batch", "incarnation", "bundle"):
                db.execute(f"DELETE FROM {table}")
            db.execute("DELETE FROM campaign")
            size = (plan.rows, len(plan.partitions))
            values = (plan.campaign_id, plan_fingerprint, *size, now_us, self._server(db))
            db.execute(self._text("add_campaign"), values)
            partition_of = [n for n, partition in enumerate(plan.partitions) for _ in range(partition.batches)]
            db.execute(
                self._text("add_batches"),
                (
                    list(range(len(plan.batches))),
                    partition_of,
                    [batch.first_row for batch in plan.batches],
                    [batch.rows for batch in plan.batches],
                ),
            )
            for name, body in files.items():
                for part, start in enumerate(range(0, max(1, len(body)), _PART_BYTES)):
                    db.execute(self._text("add_bundle"), (name, part, body[start : start + _PART_BYTES]))

    def campaign(self) -> CampaignRecord | None:
        found = self._run("campaign")
        return CampaignRecord(*found[0]) if found else None

    def set_campaign_state(self, state: str) -> None:
        self._run("set_campaign_state", (state,))

    def register(self, incarnation: Incarnation) -> None:
        i = incarnation
        with self._trouble():
            self._refuse_changed()
        self._run("register", (i.id, i.sender, i.host_id, i.boot_id, i.pid, i.partition, i.lease_us))

    def renew(self, incarnation: str, now_us: int, counters: dict[str, object]) -> bool:
        return self._changed_rows("renew", (msgspec.json.encode(counters).decode(), incarnation)) == 1

    def leave(self, incarnation: str, now_us: int, counters: dict[str, object]) -> None:
        self._run("leave", (msgspec.json.encode(counters).decode(), incarnation))

    def supersede(self, incarnation: str, by: str) -> None:
        self._run("supersede", (by, incarnation))

    def incarnations(self) -> list[Incarnation]:
        return [
            Incarnation(
                id=id_,
                sender=sender,
                host_id=host,
                boot_id=boot,
                pid=pid,
                partition=partition,
                state=Life(state),
                started_at_us=started,
                renewed_at_us=renewed,
                lease_us=lease,
                counters=msgspec.json.decode(counters),
            )
            for id_, sender, host, boot, pid, partition, state, started, renewed, lease, counters in self._run(
                "incarnations"
            )
        ]

    def claim(self, incarnation: str, partition: int, most: int) -> list[ClaimedBatch]:
        with self._trouble():
            self._refuse_changed()
        claimed = self._run("claim", {"me": incarnation, "partition": partition, "most": most})
        return sorted((ClaimedBatch(*row) for row in claimed), key=lambda batch: batch.number)

    def begun(self, partition: int) -> list[ClaimedBatch]:
        return [ClaimedBatch(*row) for row in self._run("begun", (partition,))]

    def owners(self, partition: int) -> dict[int, str]:
        return dict(cast(list[tuple[int, str]], self._run("owners", (partition,))))

    def done(self, incarnation: str, batch: int) -> None:
        self._run("done", (batch, incarnation))

    def reopen(self, row: int) -> None:
        self._run("reopen", (row, row))

    def batches(self) -> list[BatchTally]:
        return [BatchTally(*row) for row in self._run("batch_states")]

    def decide(self, decisions: list[Decision]) -> None:
        if decisions:
            columns = zip(*(msgspec.structs.astuple(d) for d in decisions), strict=True)
            self._run("decide", [list(column) for column in columns])

    def decisions(self) -> list[Decision]:
        return [Decision(*row) for row in self._run("decisions")]

    def close(self) -> None:
        self._drop()

    # -- SharedStore -------------------------------------------------------------------------------------------------

    def now_us(self) -> int:
        return int(self._run("now")[0][0])

    def supersede_expired(self, by: str, partition: int | None = None) -> list[tuple[str, str, int | None]]:
        with self._trouble():
            self._refuse_changed()
        return cast(list[tuple[str, str, int | None]], self._run("supersede_expired", (by, by, partition, partition)))

    def mine(self, incarnation: str) -> list[ClaimedBatch]:
        return [ClaimedBatch(*row) for row in self._run("mine", (incarnation,))]

    def fullest(self) -> list[int]:
        return [partition for (partition,) in self._run("fullest")]

    def unfinished_of_others(self, incarnation: str) -> int:
        return int(self._run("unfinished", (incarnation,))[0][0])

    def done_unless_late(self, incarnation: str, batch: int, late: int) -> bool:
        return self._changed_rows("done_unless_late", (batch, incarnation, late)) == 1

    def late(self, incarnation: str, batch: int) -> int | None:
        found = self._run("late", (batch, incarnation))
        return int(found[0][0]) if found else None

    def advance(self, incarnation: str, step: Advance) -> Advanced:
        told, settled, openings = step.told, step.settled, step.openings
        if openings:
            with self._trouble():
                self._refuse_changed()
        values = {
            "me": incarnation,
            "r_id": [t.window for t in told],
            "r_known": [t.known for t in told],
            "r_verdicts": [t.verdicts for t in told],
            "r_details": [t.details for t in told],
            "r_due": [t.is_due for t in told],
            "s_id": [s.window for s in settled],
            "s_batch": [s.batch for s in settled],
            "s_rows": [s.rows for s in settled],
            "s_verdicts": [s.verdicts for s in settled],
            "s_details": [s.details for s in settled],
            "o_id": [o.window for o in openings],
            "o_batch": [o.batch for o in openings],
            "o_rows": [o.rows for o in openings],
            "o_verdicts": [bytes(len(o.rows) // 4) for o in openings],
            "o_length": [o.log_length for o in openings],
            "o_seal": [o.log_seal for o in openings],
        }
        ((is_alive, now_us, opened),) = self._run("advance", values)
        return Advanced(is_alive, now_us, frozenset(opened))

    def entries(self, batches: list[int]) -> list[Entry]:
        return [Entry(*row) for row in self._run("entries", (batches,))]

    def compact(self, batch: int) -> int:
        with self._trouble(), self._connection().transaction():
            db = self._connection()
            # While we hold the batch nobody opens it again, and nobody claims it.
            if db.execute(self._text("lock_done"), (batch,)).fetchone() is None:
                return 0
            found = db.execute(self._text("entries_locked"), (batch,), binary=True)
            gone, made = compacted(Entry(*row) for row in found)
            if gone:
                db.execute(self._text("delete_windows"), (gone,))
                columns = zip(*(msgspec.structs.astuple(entry) for entry in made), strict=True)
                db.execute(self._text("add_windows"), [list(column) for column in columns])
            return len(gone) - len(made)

    def entries_of_log(self, log_id: str) -> list[Entry]:
        return [Entry(*row) for row in self._run("entries_of_log", window_bounds(log_id))]

    def all_entries(self) -> Iterator[Entry]:
        last = UUID(int=0)
        while found := self._run("entries_after", (last, _PAGE)):
            for row in found:
                yield Entry(*row)
            last = found[-1][0]

    def held_entries(self) -> list[Entry]:
        return [Entry(*row) for row in self._run("held_entries")]

    def decisions_between(self, first_row: int, end_row: int) -> list[Decision]:
        return [Decision(*row) for row in self._run("decisions_between", (first_row, end_row))]

    def batch_owners(self) -> list[BatchOwner]:
        return [BatchOwner(*row) for row in self._run("batch_owners")]

    def bundle(self) -> dict[str, bytes]:
        files: dict[str, bytes] = {}
        for name, body in self._run("bundle"):
            files[name] = files.get(name, b"") + bytes(body)
        return files

    def confirm_server(self) -> str:
        with self._trouble():
            found = self._server(self._connection())
            self._connection().execute(self._text("confirm_server"), (found,))
            self._changed = None
        return found

    def is_failover_safe(self) -> bool:
        ((names, standbys),) = self._run("standbys")
        return not standbys or bool(names)

    def set_override(self, override: Override) -> None:
        o = override
        self._run("override", (o.scope, o.what, o.value, o.who, o.until_us))

    def overrides(self) -> list[Override]:
        return [Override(*row) for row in self._run("overrides")]

    def read_shares(self, keys: list[str]) -> tuple[int, dict[str, tuple[int, bytes]]]:
        with self._trouble():
            self._refuse_changed()
        (_, _, _, now_us), *found = self._run("read_shares", (keys,))
        return int(now_us), {key: (version, bytes(body)) for key, version, body, _ in found}

    def swap_shares(self, made: dict[str, tuple[int, bytes]]) -> frozenset[str]:
        with self._trouble():
            self._refuse_changed()
        keys = sorted(made)  # one order for all: nobody waits in a circle
        values = (keys, [made[key][0] + 1 for key in keys], [made[key][1] for key in keys])
        return frozenset(key for (key,) in self._run("swap_shares", values))


def _words(problem: BaseException) -> str:
    """The server's words on one line, without what could be a password."""
    text = " ".join(str(problem).split()) or type(problem).__name__
    return re.sub(r"password=\S+", "password=...", text)[:300]


def wait_for_server(url: str, patience_s: float) -> None:
    """Until the server lets us in; raises StoreAway."""
    deadline = time.monotonic() + patience_s
    while True:
        try:
            psycopg.connect(ControlUrl(url).dsn, connect_timeout=2).close()
            return
        except psycopg.Error as problem:
            if time.monotonic() > deadline:
                raise StoreAway(where=ControlUrl(url).shown, problem=_words(problem)) from None
            time.sleep(0.1)
