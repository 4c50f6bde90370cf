"""The control store of one machine: SQLite in the campaign folder, WAL, every commit synced.

What survives: a commit that returned (synchronous = FULL). Several processes may use the file at once; each write is
one short IMMEDIATE transaction that waits up to ten seconds for its turn.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from engine.clock import SystemClock
from engine.control.statements import load_statements
from engine.control.store import (
    BatchTally,
    CampaignRecord,
    ClaimedBatch,
    Decision,
    Incarnation,
    Override,
    StoreAway,
    StoreHasPlan,
    StoreSchema,
)
from formats.plan import Plan

SCHEMA = 1
_PATIENCE_S = 10.0


class SqliteStore:
    """`Store` over one file. Not shared between threads."""

    def __init__(self, path: Path) -> None:
        """Open the store, creating it where it is missing; raises StoreAway, StoreSchema."""
        self._path, self._clock = path, SystemClock()
        self._sql = load_statements("sqlite.sql")
        with self._trouble():
            # Made with its mode, not given it afterwards: nobody else reads it in between.
            os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
            self._db = sqlite3.connect(path, timeout=_PATIENCE_S, isolation_level=None)
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = FULL")
            self._db.execute("PRAGMA foreign_keys = ON")
            self._db.executescript(self._sql["schema"])
            self._db.execute("INSERT OR IGNORE INTO meta VALUES ('schema', ?)", (str(SCHEMA),))
            (found,) = self._db.execute("SELECT value FROM meta WHERE key = 'schema'").fetchone()
        if found != str(SCHEMA):
            raise StoreSchema(where=path, found=found, known=SCHEMA)

    @contextmanager
    def _trouble(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError) as problem:
            raise StoreAway(where=self._path, problem=problem) from None

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

    def load_plan(self, plan: Plan, plan_fingerprint: str, now_us: int, *, replace: bool = False) -> None:
        with self._writing() as db:
            found = db.execute(self._sql["campaign"]).fetchone()
            if found and not replace:
                raise StoreHasPlan(where=self._path, campaign_id=found[0])
            for table in ("decision", "override", "share", "batch", "incarnation", "campaign"):
                db.execute(f"DELETE FROM {table}")
            size = (plan.rows, len(plan.partitions))
            db.execute(self._sql["add_campaign"], (plan.campaign_id, plan_fingerprint, *size, now_us))
            for number, partition in enumerate(plan.partitions):
                mine = range(partition.first_batch, partition.first_batch + partition.batches)
                rows = ((b, number, plan.batches[b].first_row, plan.batches[b].rows) for b in mine)
                db.executemany(self._sql["add_batch"], rows)

    def campaign(self) -> CampaignRecord | None:
        found = self._read("campaign")
        return CampaignRecord(*found[0]) if found else None

    def set_campaign_state(self, state: str) -> None:
        with self._writing() as db:
            db.execute(self._sql["set_campaign_state"], (state,))

    def register(self, incarnation: Incarnation) -> None:
        i = incarnation
        values = (
            i.id,
            i.sender,
            i.host_id,
            i.boot_id,
            i.pid,
            i.partition,
            i.started_at_us,
            i.renewed_at_us,
            i.lease_us,
        )
        with self._writing() as db:
            db.execute(self._sql["register"], values)

    def renew(self, incarnation: str, now_us: int, counters: dict[str, object]) -> bool:
        with self._writing() as db:
            told = msgspec.json.encode(counters).decode()
            return db.execute(self._sql["renew"], (now_us, told, incarnation)).rowcount == 1

    def leave(self, incarnation: str, now_us: int, counters: dict[str, object]) -> None:
        with self._writing() as db:
            db.execute(self._sql["leave"], (now_us, msgspec.json.encode(counters).decode(), incarnation))

    def supersede(self, incarnation: str, by: str) -> None:
        with self._writing() as db:
            db.execute(self._sql["supersede"], (by, incarnation))

    def incarnations(self) -> list[Incarnation]:
        return [Incarnation.of_row(row) for row in self._read("incarnations")]

    def claim(self, incarnation: str, partition: int, most: int) -> list[ClaimedBatch]:
        with self._writing() as db:
            open_batches = [ClaimedBatch(*row) for row in db.execute(self._sql["claimable"], (partition, most))]
            return [
                batch
                for batch in open_batches
                if db.execute(self._sql["take"], (incarnation, batch.number, incarnation)).rowcount == 1
            ]

    def begun(self, partition: int) -> list[ClaimedBatch]:
        return [ClaimedBatch(*row) for row in self._read("begun", partition)]

    def owners(self, partition: int) -> dict[int, str]:
        return dict(self._read("owners", partition))

    def done(self, incarnation: str, batch: int) -> None:
        with self._writing() as db:
            db.execute(self._sql["done"], (batch, incarnation))

    def reopen(self, row: int) -> None:
        with self._writing() as db:
            db.execute(self._sql["reopen"], (row, row))

    def batches(self) -> list[BatchTally]:
        return [BatchTally(*row) for row in self._read("batch_states")]

    def decide(self, decisions: list[Decision]) -> None:
        with self._writing() as db:
            db.executemany(self._sql["decide"], [msgspec.structs.astuple(d) for d in decisions])

    def decisions(self) -> list[Decision]:
        return [Decision(*row) for row in self._read("decisions")]

    def set_override(self, override: Override) -> None:
        o = override
        with self._writing() as db:
            db.execute(self._sql["override"], (o.scope, o.what, o.value, o.who, o.until_us))

    def overrides(self) -> list[Override]:
        return [Override(*row) for row in self._read("overrides")]

    def read_shares(self, keys: list[str]) -> tuple[int, dict[str, tuple[int, bytes]]]:
        marks = ", ".join("?" * len(keys))
        with self._trouble():
            found = self._db.execute(self._sql["read_shares"].replace(":keys", marks), keys).fetchall()
        return self._clock.wall_us(), {key: (version, body) for key, version, body in found}

    def swap_shares(self, made: dict[str, tuple[int, bytes]]) -> frozenset[str]:
        with self._writing() as db:
            return frozenset(
                key
                for key, (version, body) in made.items()
                if db.execute(self._sql["swap_share"], (key, version + 1, body)).rowcount == 1
            )

    def close(self) -> None:
        self._db.close()
