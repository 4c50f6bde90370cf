"""Looking costs a sender nothing: no statement, no lock, no wait of the page is in its path. Shown by counts."""

from __future__ import annotations

import contextlib
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from engine.campaign import Campaign
from engine.control.sqlite import SqliteStore
from engine.web.reading import SharedReader, SqliteReader
from engine.web.shelf import Watched
from tests.conftest import require
from tests.control.postgres_server import PostgresServer, binaries
from tests.web.conftest import Client, Sender, client_of, counters, make_campaign, provider, run


@contextlib.contextmanager
def looked_at(watched: Watched, viewers: int = 4) -> Iterator[Callable[[], int]]:
    """Threads that read the store as fast as they can; how often they did."""
    is_over, problems = threading.Event(), []

    def view() -> None:
        while not is_over.is_set():
            watched.look(fresh=True)
            if watched.problem:
                problems.append(watched.problem)

    before = watched.reads
    threads = [threading.Thread(target=view) for _ in range(viewers)]
    for thread in threads:
        thread.start()
    try:
        yield lambda: watched.reads - before
    finally:
        is_over.set()
        for thread in threads:
            thread.join()
    assert problems == []


def watched_of(client: Client, key: str) -> Watched:
    found = client.shelf.get(key)
    assert found is not None
    return found


def test_sqlite_the_page_only_selects_and_cannot_write(campaign: Campaign) -> None:
    Sender(campaign).tell(counters(1000, providers={"gmail": provider(accepted=1)}))
    reader = SqliteReader(campaign.store_file)
    reader.read(0.0)
    assert reader._db is not None
    said: Counter[str] = Counter()
    reader._db.set_trace_callback(lambda text: said.update([text.split()[0].upper()]))
    for number in range(10):
        reader.read(float(number))
    assert set(said) == {"BEGIN", "SELECT", "ROLLBACK"}
    assert said["BEGIN"] == said["ROLLBACK"] == 10
    assert said["SELECT"] <= 40  # four a look: campaign, incarnations, batches (every third), overrides
    assert not reader._db.in_transaction  # between two looks nothing is held
    with pytest.raises(sqlite3.OperationalError, match="readonly"):
        reader._db.execute("UPDATE campaign SET state = 'paused'")
    reader.close()


def test_sqlite_a_sender_that_would_not_wait_never_has_to(campaign: Campaign, client: Client) -> None:
    sender = Sender(campaign)
    watched = watched_of(client, "weekly")
    db = sender.store._db
    db.execute("PRAGMA busy_timeout = 0")  # any lock of the page would be an error here
    told = counters(1000, providers={f"p{n}": provider(accepted=n) for n in range(50)})

    def statements(times: int) -> Counter[str]:
        said: Counter[str] = Counter()
        db.set_trace_callback(lambda text: said.update([text.split()[0].upper()]))
        for _ in range(times):
            assert sender.tell(told)
            assert sender.store.campaign() is not None
        db.set_trace_callback(None)
        return said

    alone = statements(100)
    with looked_at(watched) as looks:
        seen = statements(100)
        while looks() < 20:
            assert sender.tell(told)
    assert seen == alone
    # A page in the middle of its reading holds up no commit either.
    reader = sqlite3.connect(f"{campaign.store_file.as_uri()}?mode=ro", uri=True, isolation_level=None)
    reader.execute("BEGIN")
    reader.execute("SELECT count(*) FROM incarnation").fetchone()
    assert sender.tell(told)
    reader.close()
    sender.close()


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    require("postgres", None if binaries() else "no PostgreSQL server binary here")
    server = PostgresServer()
    yield server
    server.remove()


@pytest.fixture
def shared(server: PostgresServer, tmp_path: Path) -> Iterator[Client]:
    """A server over a campaign that machines share."""
    folder = tmp_path / "site" / "shared"
    make_campaign(folder, [f"user{i}@example.com" for i in range(100)])
    (folder / "control.sqlite").unlink()
    run(folder.parent, "plan", "list.parquet", "--campaign", "shared", "--replace", "--control", server.url)
    with client_of(folder.parent) as client:
        yield client


def reader_of(watched: Watched) -> SharedReader:
    watched.look(fresh=True)
    assert isinstance(watched._reader, SharedReader)
    return watched._reader


@pytest.mark.long
@pytest.mark.postgres
def test_postgres_the_page_only_selects_and_locks_nothing(shared: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    store: Any = reader_of(watched_of(shared, "shared"))._store
    said: list[str] = []
    run_ = store._run

    def note(name: str, *given: Any, **more: Any) -> Any:
        said.append(store._sql[name])
        return run_(name, *given, **more)

    monkeypatch.setattr(store, "_run", note)
    for number in range(10):
        watched_of(shared, "shared")._reader.read(float(number))  # type: ignore[union-attr]
    words = [
        [word for line in text.splitlines() if not line.startswith("--") for word in line.split()] for text in said
    ]
    assert {one[0].upper() for one in words} == {"SELECT"}
    assert not [one for one in words if {"UPDATE", "SHARE", "LOCK", "INSERT"} & {word.upper() for word in one}]
    assert len(said) <= 40
    # Each statement is its own transaction: between two looks the page has no lock on anything.
    (pid,) = store._db.execute("SELECT pg_backend_pid()").fetchone()
    with psycopg.connect(store._url.dsn, autocommit=True) as other:
        held = other.execute("SELECT count(*) FROM pg_locks WHERE pid = %s AND locktype <> 'virtualxid'", (pid,))
        assert held.fetchone() == (0,)


@pytest.mark.long
@pytest.mark.postgres
def test_postgres_neither_waits_for_the_other(shared: Client) -> None:
    watched = watched_of(shared, "shared")
    store: Any = reader_of(watched)._store
    me = shared.act("/batches/claim", {"campaign": "shared", "sender": "go-worker"})["incarnation"]
    with psycopg.connect(store._url.dsn, options=f'-c search_path="{store._url.schema}"') as sender:
        # The strictest locks a sender takes, and more: the page reads on.
        sender.execute("LOCK TABLE incarnation, batch, campaign IN EXCLUSIVE MODE")
        began = time.monotonic()
        assert watched.look(fresh=True).machines[0].incarnation == me
        assert watched.problem == ""
        assert time.monotonic() - began < 5
        sender.rollback()
        # A sender that waits for no lock longer than a millisecond is never refused while pages look.
        sender.execute("SET lock_timeout = '1ms'")
        sender.commit()
        with looked_at(watched) as looks:
            renewals = 0
            while renewals < 200 or looks() < 20:
                sender.execute("UPDATE incarnation SET renewed_at_us = renewed_at_us + 1 WHERE id = %s", (me,))
                sender.execute("SELECT 1 FROM incarnation WHERE id = %s FOR SHARE", (me,))
                sender.commit()
                renewals += 1


def test_a_store_that_hangs_holds_up_one_look_not_all(campaign: Campaign, client: Client) -> None:
    sender = Sender(campaign)
    sender.tell(counters(1000, accepted=1))
    watched = watched_of(client, "weekly")
    before = watched.look(fresh=True)
    hangs, goes_on = threading.Event(), threading.Event()

    class Hanging:
        def read(self, now: float) -> Any:
            hangs.set()
            assert goes_on.wait(20)
            raise OSError("it hung")

        def close(self) -> None:
            pass

    assert watched._reader is not None
    watched._reader.close()
    watched._reader = Hanging()
    stuck = threading.Thread(target=watched.look)
    stuck.start()
    assert hangs.wait(10)
    began = time.monotonic()
    for _ in range(20):
        assert watched.look() is before
        assert client.get("/c/weekly").status_code == 200
    assert time.monotonic() - began < 5
    goes_on.set()
    stuck.join()
    assert watched.problem == "it hung"
    sender.close()


def test_a_store_of_another_process_is_read_while_it_is_written(campaign: Campaign, client: Client) -> None:
    """A second connection of a sender, with writes that come all the time, and every look sees one whole moment."""
    watched = watched_of(client, "weekly")
    sender = Sender(campaign)
    with looked_at(watched, viewers=1):
        for number in range(40):
            sender.tell(counters(1000, accepted=number, left=1000 - number))
            seen = watched.look(fresh=True)
            assert seen.accepted + seen.left == 1000
    assert isinstance(sender.store, SqliteStore)
    sender.close()
