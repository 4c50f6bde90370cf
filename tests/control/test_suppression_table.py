"""Two machines and one table: what one adds the other obeys, whatever order, crash or silence lies between."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from click.testing import CliRunner

from engine.cli import engine
from engine.control.opening import open_suppressions
from engine.control.store import StoreAway
from engine.lists import forgetting
from engine.lists.exchange import STATE, Exchange, Exchanged
from engine.lists.suppressions import Suppressions
from engine.lists.truthfile import TRUTH
from formats.suppression import Entry
from tests.control.postgres_server import PostgresServer

pytestmark = pytest.mark.postgres


def entry(address: str, scope: str = "all", at_us: int = 1, *, lifted: bool = False) -> Entry:
    return Entry(address, scope, "bounce", "test", at_us, lifted)


@pytest.fixture
def url(postgres_server: PostgresServer) -> str:
    with psycopg.connect(postgres_server.url, autocommit=True) as db:
        db.execute('DROP SCHEMA IF EXISTS "rowpost-suppression" CASCADE')
    return postgres_server.url


class Machine:
    """A folder and its exchange."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder = folder
        self.exchange = Exchange(folder, open_suppressions(url))

    def add(self, *entries: Entry) -> None:
        Suppressions(self.folder, list_id=None).add(entries)

    def stops(self, address: str, list_id: str | None = None) -> bool:
        return bool(Suppressions(self.folder, list_id=list_id).check([address])[0])

    def size(self) -> int:
        return (self.folder / TRUTH).stat().st_size


@pytest.fixture
def two(tmp_path: Path, url: str) -> Iterator[tuple[Machine, Machine]]:
    machines = Machine(tmp_path / "a", url), Machine(tmp_path / "b", url)
    yield machines
    for machine in machines:
        machine.exchange.close()


def test_what_one_adds_the_other_obeys(two: tuple[Machine, Machine]) -> None:
    a, b = two
    a.add(entry("ann@x.org"), entry("bob@x.org", "weekly"))
    b.add(entry("eve@x.org"))
    assert a.exchange.step() == Exchanged(2, 0)
    assert b.exchange.step() == Exchanged(1, 2)
    assert a.exchange.step() == Exchanged(0, 1)
    for machine in two:
        assert machine.stops("ann@x.org")
        assert machine.stops("eve@x.org")
        assert machine.stops("bob@x.org", "weekly")
        assert not machine.stops("bob@x.org")
    sizes = [machine.size() for machine in two]
    for machine in two:
        assert machine.exchange.step() == Exchanged(0, 0)
    assert [machine.size() for machine in two] == sizes


def test_a_lift_crosses_and_an_old_copy_does_not_undo_it(two: tuple[Machine, Machine]) -> None:
    a, b = two
    a.add(entry("ann@x.org"))
    a.exchange.step()
    b.exchange.step()
    a.add(entry("ann@x.org", at_us=2, lifted=True))
    a.exchange.step()
    # A crash cost b its memory of what it had said: it says everything again.
    (b.folder / STATE).unlink()
    b.exchange.step()
    a.exchange.step()
    assert not a.stops("ann@x.org")
    assert not b.stops("ann@x.org")


def test_opposite_words_at_once_end_alike_everywhere(two: tuple[Machine, Machine]) -> None:
    a, b = two
    a.add(entry("ann@x.org"))
    a.exchange.step()
    b.exchange.step()
    a.add(entry("ann@x.org", at_us=2, lifted=True))
    b.add(entry("ann@x.org", at_us=3, lifted=True), entry("ann@x.org", at_us=4))
    b.add(entry("ann@x.org", at_us=4))
    for machine in (b, a, b, a):
        machine.exchange.step()
    assert a.stops("ann@x.org") == b.stops("ann@x.org")
    assert not a.stops("ann@x.org")  # a spoke last in the table


def test_the_store_away_costs_nothing_but_time(tmp_path: Path, postgres_server: PostgresServer, url: str) -> None:
    a, b = Machine(tmp_path / "a", url), Machine(tmp_path / "b", url)
    a.exchange.step()
    with psycopg.connect(url, autocommit=True) as db:
        db.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid()"
                   " AND application_name = 'rowpost'")  # fmt: skip
    a.add(entry("ann@x.org"))
    with pytest.raises(StoreAway):
        a.exchange.step()
    assert a.stops("ann@x.org")
    a.exchange.step()
    b.exchange.step()
    assert b.stops("ann@x.org")
    for machine in (a, b):
        machine.exchange.close()
    nowhere = Machine(tmp_path / "c", "postgresql://rowpost@127.0.0.1:1/nowhere")
    with pytest.raises(StoreAway):
        nowhere.exchange.step()


def test_who_is_forgotten_on_one_machine_is_forgotten_on_all(two: tuple[Machine, Machine], url: str) -> None:
    a, b = two
    a.add(entry("ann@x.org", "weekly"), entry("bob@x.org"))
    a.exchange.step()
    b.exchange.step()
    assert b.exchange.forget(["ann@x.org"], now_us=5) == 1
    b.exchange.step()
    assert a.exchange.step().taken == 1
    with psycopg.connect(url) as db:
        names = [row[0] for row in db.execute('SELECT address FROM "rowpost-suppression".entry')]
    assert [name for name in names if "@" in name] == ["bob@x.org"]
    for machine in two:
        assert machine.stops("ann@x.org")
        assert machine.stops("bob@x.org")
        assert all(b"ann@" not in path.read_bytes() for path in machine.folder.iterdir())
    assert a.exchange.step() == Exchanged(0, 0)


def test_old_names_go_from_the_table_too(two: tuple[Machine, Machine], url: str) -> None:
    a, b = two
    a.add(entry("ann@x.org", "weekly", 10), entry("new@x.org", at_us=1000))
    a.exchange.step()
    assert a.exchange.forget_older(500) == 1
    with psycopg.connect(url) as db:
        names = [row[0] for row in db.execute('SELECT address FROM "rowpost-suppression".entry')]
    assert [name for name in names if "@" in name] == ["new@x.org"]
    b.exchange.step()
    assert b.stops("ann@x.org", "weekly")
    assert not b.stops("ann@x.org")
    assert b.stops("new@x.org")


def test_a_folder_that_forgot_by_another_key_keeps_it(two: tuple[Machine, Machine]) -> None:
    a, b = two
    a.exchange.step()
    forgetting.forget(b.folder, ["old@x.org"], now_us=1)
    b.add(entry("ann@x.org"))
    b.exchange.step()
    a.exchange.step()
    assert b.stops("old@x.org")
    assert a.stops("ann@x.org")
    assert not a.stops("old@x.org")


def test_the_commands_of_two_machines(tmp_path: Path, url: str) -> None:
    def run(*words: str, code: int = 0) -> str:
        done = CliRunner().invoke(engine, [*words, "--control", url])
        assert done.exit_code == code, (done.output, done.exception)
        return done.stdout

    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    run("suppress", "add", "ann@x.org", "eve@x.org", "--folder", a)
    assert "ann@x.org: suppressed" in run("suppress", "check", "ann@x.org", "--folder", b)
    run("suppress", "remove", "ann@x.org", "--folder", b)
    assert "not suppressed" in run("suppress", "check", "ann@x.org", "--folder", a)
    (tmp_path / "list.csv").write_text("email\nann@x.org\neve@x.org\n")
    output = str(tmp_path / "list.parquet")
    assert "1 suppressed" in run("prepare", str(tmp_path / "list.csv"), "-o", output)
    run("forget", "eve@x.org", "--folder", a)
    run("suppress", "sync", "--folder", b)
    assert b"eve@" not in (tmp_path / "b" / TRUTH).read_bytes()
