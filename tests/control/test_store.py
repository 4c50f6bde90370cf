"""The control store's promises, kept by every implementation."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from engine.control.sqlite import SqliteStore
from engine.control.store import Decision, Incarnation, Life, Store, StoreAway, StoreHasPlan, StoreSchema
from formats.plan import Batch, Partition, Plan

PLAN = Plan(
    campaign_id="spring",
    planned_at_us=1,
    rows=50,
    files=[],
    batches=[Batch(10 * n, 10) for n in range(5)],
    partitions=[Partition(0, 3), Partition(3, 2)],
    address_column="email",
    columns=["email"],
    list_fingerprint="l",
    settings_fingerprint="s",
    templates_fingerprint="t",
    key_id="k1",
)


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.postgres)])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    made: Store
    if request.param == "sqlite":
        made = SqliteStore(tmp_path / "control.sqlite")
    else:
        from engine.control.postgres import PostgresStore

        made = PostgresStore(request.getfixturevalue("control_url"), create=True)
    made.load_plan(PLAN, "print", 1)
    yield made
    made.close()


def incarnation(id_: str, partition: int = 0) -> Incarnation:
    return Incarnation(
        id=id_,
        sender="host-a",
        host_id="h",
        boot_id="b",
        pid=1,
        partition=partition,
        started_at_us=1,
        renewed_at_us=1,
        lease_us=60_000_000,
    )


def test_a_plan_is_loaded_once(store: Store) -> None:
    found = store.campaign()
    assert found is not None
    assert (found.id, found.rows, found.partitions, found.state) == ("spring", 50, 2, "ready")
    with pytest.raises(StoreHasPlan, match="spring"):
        store.load_plan(PLAN, "print", 2)
    store.load_plan(msgspec.structs.replace(PLAN, campaign_id="autumn"), "print", 2, replace=True)
    again = store.campaign()
    assert again is not None
    assert again.id == "autumn"


def test_batches_are_claimed_by_one_incarnation_lowest_first(store: Store) -> None:
    store.register(incarnation("a"))
    store.register(incarnation("b"))
    assert [batch.number for batch in store.claim("a", 0, 2)] == [0, 1]
    assert [batch.number for batch in store.claim("b", 0, 5)] == [2]
    assert store.claim("a", 0, 5) == []
    assert [batch.number for batch in store.claim("b", 1, 5)] == [3, 4]


def test_a_dead_incarnations_batches_can_be_claimed_and_are_marked_begun(store: Store) -> None:
    store.register(incarnation("a"))
    store.claim("a", 0, 1)
    store.register(incarnation("b"))
    assert [batch.number for batch in store.begun(0)] == [0]
    store.supersede("a", "b")
    claimed = store.claim("b", 0, 3)
    assert [(batch.number, batch.started) for batch in claimed] == [(0, 1), (1, 0), (2, 0)]
    assert not store.renew("a", 2, {})
    assert store.claim("a", 0, 3) == []


def test_one_that_left_gives_its_batches_back(store: Store) -> None:
    store.register(incarnation("a"))
    store.claim("a", 0, 1)
    store.leave("a", 5, {"accepted": 3})
    store.register(incarnation("b"))
    assert [batch.number for batch in store.claim("b", 0, 1)] == [0]
    (left, _) = store.incarnations()
    assert (left.state, left.counters) == (Life.ENDED, {"accepted": 3})


def test_a_done_batch_is_nobodys_until_it_is_opened_again(store: Store) -> None:
    store.register(incarnation("a"))
    store.claim("a", 0, 1)
    store.done("a", 0)
    assert [(t.partition, t.state, t.batches, t.rows) for t in store.batches()] == [
        (0, "done", 1, 10),
        (0, "pending", 2, 20),
        (1, "pending", 2, 20),
    ]
    store.leave("a", 2, {})
    store.register(incarnation("b"))
    assert 0 not in {batch.number for batch in store.claim("b", 0, 1)}
    store.reopen(7)
    assert [(batch.number, batch.started) for batch in store.claim("b", 0, 1)] == [(0, 1)]


def test_only_its_owner_says_that_a_batch_is_done(store: Store) -> None:
    store.register(incarnation("a"))
    store.register(incarnation("b"))
    store.claim("a", 0, 1)
    store.done("b", 0)
    assert {tally.state for tally in store.batches()} == {"claimed", "pending"}


def test_a_resend_stands_and_other_words_may_change(store: Store) -> None:
    def word(what: str, at: int) -> Decision:
        return Decision("a-1", 1, 7, what, "ann", at)

    store.decide([word("accept", 1)])
    store.decide([word("resend", 2)])
    store.decide([word("accept", 3)])
    assert store.decisions() == [word("resend", 2)]


def test_what_was_committed_is_there_after_opening_again(tmp_path: Path) -> None:
    path = tmp_path / "control.sqlite"
    first = SqliteStore(path)
    first.load_plan(PLAN, "print", 1)
    first.register(incarnation("a"))
    first.claim("a", 0, 1)
    second = SqliteStore(path)  # the first was never closed
    assert second.owners(0) == {0: "a"}
    assert path.stat().st_mode & 0o777 == 0o600
    first.close()
    second.close()


def test_a_store_that_is_no_database_is_away_by_name(tmp_path: Path) -> None:
    path = tmp_path / "control.sqlite"
    path.write_bytes(b"something else entirely, long enough to be looked at" * 100)
    with pytest.raises(StoreAway, match=r"control\.sqlite"):
        SqliteStore(path)


def test_a_newer_schema_is_refused(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "control.sqlite")
    store._db.execute("UPDATE meta SET value = '99' WHERE key = 'schema'")
    store.close()
    with pytest.raises(StoreSchema, match="99"):
        SqliteStore(tmp_path / "control.sqlite")


def test_an_entry_of_a_shared_limit_goes_in_over_the_version_that_was_read(store: Store) -> None:
    now_us, found = store.read_shares(["a", "b"])
    assert found == {}
    assert store.swap_shares({"a": (0, b"one"), "b": (0, b"two")}) == {"a", "b"}
    assert store.swap_shares({"a": (0, b"late")}) == frozenset()
    assert store.swap_shares({"a": (1, b"next"), "b": (0, b"late")}) == {"a"}
    later_us, found = store.read_shares(["a", "b", "c"])
    assert found == {"a": (2, b"next"), "b": (1, b"two")}
    assert later_us >= now_us > 1_600_000_000_000_000
