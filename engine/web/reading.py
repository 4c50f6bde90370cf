"""Reading a campaign's counters without touching its senders: one read-only snapshot of the store, never the logs.

SQLite: a connection of its own, `mode=ro`, short reads under WAL: they take no lock that a sender waits for, and no
statement of theirs is in the senders' path. PostgreSQL: the same statements on a connection of their own.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import msgspec

from engine.campaign import Campaign
from engine.control.opening import open_store
from engine.control.statements import load_statements
from engine.control.store import BatchTally, CampaignRecord, Life, Override, Store, StoreAway
from engine.web.told import Heard, Hearing

_PATIENCE_S = 2.0
TALLY_S = 3.0  # counting ten thousand batches costs more than all the rest, and a batch takes minutes


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """What the store says at one moment."""

    campaign: CampaignRecord | None
    batches: list[BatchTally]
    incarnations: list[Heard]
    overrides: list[Override]
    is_shared: bool = False  # several machines, which take over each other's batches


class Reader(Protocol):
    """Whoever reads a store's counters. May be called from one thread at a time; raises StoreAway."""

    def read(self, now: float) -> Reading:
        """All of it, as it is now (monotonic seconds)."""

    def close(self) -> None:
        """Let go of the store."""


class _Tallies:
    """The counts of batches: taken again where a sender came or went, else every few seconds."""

    def __init__(self) -> None:
        self._taken: tuple[float, list[tuple[str, str]]] = (-1e9, [])
        self._batches: list[BatchTally] = []

    def of(self, heard: list[Heard], now: float, count: Callable[[], list[BatchTally]]) -> list[BatchTally]:
        lives = [(one.id, str(one.state)) for one in heard]
        if now - self._taken[0] >= TALLY_S or lives != self._taken[1]:
            self._batches, self._taken = count(), (now, lives)
        return self._batches


class SqliteReader:
    """Over the `control.sqlite` of a campaign folder."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._sql = load_statements("sqlite.sql")
        self._db: sqlite3.Connection | None = None
        self._hearing, self._tallies = Hearing(), _Tallies()

    def read(self, now: float) -> Reading:
        try:
            db = self._open()
            db.execute("BEGIN")
            try:
                return self._read(db, now)
            finally:
                db.execute("ROLLBACK")
        except sqlite3.Error as problem:
            self.close()
            raise StoreAway(where=self._path, problem=problem) from None

    def _open(self) -> sqlite3.Connection:
        if self._db is None:
            where = self._path.resolve().as_uri()
            self._db = sqlite3.connect(
                f"{where}?mode=ro", uri=True, timeout=_PATIENCE_S, isolation_level=None, check_same_thread=False
            )
        return self._db

    def _read(self, db: sqlite3.Connection, now: float) -> Reading:
        found = db.execute(self._sql["campaign"]).fetchone()
        incarnations = [self._heard(*row) for row in db.execute(self._sql["incarnations"])]

        def count() -> list[BatchTally]:
            return [BatchTally(*row) for row in db.execute(self._sql["batch_states"])]

        batches = self._tallies.of(incarnations, now, count)
        try:
            overrides = [Override(*row) for row in db.execute(self._sql["overrides"])]
        except sqlite3.OperationalError:  # a store of before there were any
            overrides = []
        return Reading(
            campaign=CampaignRecord(*found) if found else None,
            batches=batches,
            incarnations=incarnations,
            overrides=overrides,
        )

    def _heard(
        self,
        id_: str,
        sender: str,
        host: str,
        boot: str,
        pid: int,
        partition: int | None,
        state: str,
        started: int,
        renewed: int,
        lease: int,
        counters: str,
    ) -> Heard:
        return Heard(
            id=id_,
            sender=sender,
            pid=pid,
            partition=partition,
            state=Life(state),
            started_at_us=started,
            renewed_at_us=renewed,
            lease_us=lease,
            told=self._hearing.told(id_, counters, counters),
            has_told=len(counters) > 2,  # no bare {}
        )

    def close(self) -> None:
        db, self._db = self._db, None
        if db is not None:
            db.close()


class SharedReader:
    """Over a store that machines share, by a connection of our own."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._hearing, self._tallies = Hearing(), _Tallies()

    def read(self, now: float) -> Reading:
        store = self._store
        heard = [self._hearing.of_incarnation(one) for one in store.incarnations()]
        return Reading(
            campaign=store.campaign(),
            batches=self._tallies.of(heard, now, store.batches),
            incarnations=heard,
            overrides=store.overrides(),
            is_shared=True,
        )

    def close(self) -> None:
        self._store.close()


def open_reader(campaign: Campaign) -> Reader | None:
    """A reader of the campaign's store, or None where nothing was planned yet. Raises the stores' errors."""
    if campaign.store_file.exists():
        return SqliteReader(campaign.store_file)
    if not campaign.plan_file.exists() or campaign.plan().store == "sqlite":
        return None
    return SharedReader(open_store(campaign))


OpenReader = Callable[[Campaign], Reader | None]
