"""Suppressions: nobody who asked to be left alone is written to, whatever crashed or was imported meanwhile."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from engine.lists.suppressions import Suppressions
from engine.lists.truthfile import KEY, TRUTH, SuppressionsDamaged
from formats import suppression
from formats.suppression import Entry, Index


def entry(address: str, scope: str = "all", *, lifted: bool = False, reason: str = "bounce") -> Entry:
    return Entry(address, scope, reason, "test", 1, lifted)


def asked(folder: Path, address: str, list_id: str | None = "weekly") -> bool:
    return bool(Suppressions(folder, list_id=list_id).check([address])[0])


def test_an_unsubscribe_from_the_weekly_letter_leaves_the_daily_one_alone(tmp_path: Path) -> None:
    Suppressions(tmp_path, list_id=None).add([entry("ann@x.org", "weekly"), entry("bob@x.org")])

    assert asked(tmp_path, "ann@x.org", "weekly")
    assert not asked(tmp_path, "ann@x.org", "daily")
    assert not asked(tmp_path, "ann@x.org", None)
    assert all(asked(tmp_path, "bob@x.org", scope) for scope in ("weekly", "daily", None))


def test_what_another_process_adds_is_seen_at_the_next_refresh(tmp_path: Path) -> None:
    reader = Suppressions(tmp_path, list_id="weekly")
    writer = Suppressions(tmp_path, list_id="weekly")
    assert not reader.refresh()

    writer.add([entry("ann@x.org")])

    assert not reader.check(["ann@x.org"]).any()
    assert reader.refresh()
    assert reader.check(["ann@x.org", "bob@x.org"]).tolist() == [True, False]
    assert not reader.refresh()


def test_adding_twice_keeps_the_first_word(tmp_path: Path) -> None:
    here = Suppressions(tmp_path, list_id="weekly")
    assert here.add([entry("ann@x.org"), entry("ann@x.org")]) == 1
    size = (tmp_path / TRUTH).stat().st_size
    assert here.add([entry("ann@x.org", reason="import")]) == 0
    assert Suppressions(tmp_path, list_id=None).add([entry("ann@x.org", "other"), entry("ann@x.org", "other")]) == 1
    assert Suppressions(tmp_path, list_id=None).add([entry("ann@x.org", "other")]) == 0
    assert (tmp_path / TRUTH).stat().st_size > size


def test_a_lift_is_obeyed_and_outlives_the_index(tmp_path: Path) -> None:
    here = Suppressions(tmp_path, list_id="weekly")
    here.add([entry("ann@x.org"), entry("bob@x.org")])
    here.rebuild_indexes()
    here.add([entry("ann@x.org", lifted=True)])
    assert here.check(["ann@x.org", "bob@x.org"]).tolist() == [False, True]
    assert len(here) == 1
    here.rebuild_indexes()
    assert here.check(["ann@x.org", "bob@x.org"]).tolist() == [False, True]
    here.add([entry("ann@x.org")])
    here.rebuild_indexes()
    assert Suppressions(tmp_path, list_id=None).check(["ann@x.org"]).all()


def test_a_torn_last_record_costs_nothing_before_it(tmp_path: Path) -> None:
    here = Suppressions(tmp_path, list_id=None)
    here.add([entry("ann@x.org")])
    whole = (tmp_path / TRUTH).read_bytes()
    here.add([entry("bob@x.org")])
    longer = (tmp_path / TRUTH).read_bytes()

    for cut in range(len(whole), len(longer)):
        (tmp_path / TRUTH).write_bytes(longer[:cut])
        again = Suppressions(tmp_path, list_id=None)
        assert again.check(["ann@x.org", "bob@x.org"]).tolist() == [True, False]
        again.add([entry("eve@x.org")])
        assert asked(tmp_path, "ann@x.org")
        assert asked(tmp_path, "eve@x.org")
        assert not asked(tmp_path, "bob@x.org")


def test_zeros_behind_the_last_record_are_a_torn_end_too(tmp_path: Path) -> None:
    here = Suppressions(tmp_path, list_id=None)
    here.add([entry("ann@x.org")])
    with open(tmp_path / TRUTH, "ab") as file:
        file.write(bytes(4096))
    here.add([entry("bob@x.org")])
    assert asked(tmp_path, "ann@x.org")
    assert asked(tmp_path, "bob@x.org")


def test_damage_in_the_middle_is_told_and_never_cut_off(tmp_path: Path) -> None:
    here = Suppressions(tmp_path, list_id=None)
    here.add([entry("ann@x.org")])
    start = (tmp_path / TRUTH).stat().st_size
    here.add([entry("bob@x.org")])
    here.add([entry("eve@x.org")])
    raw = bytearray((tmp_path / TRUTH).read_bytes())
    raw[start + 20] ^= 1
    (tmp_path / TRUTH).write_bytes(raw)

    with pytest.raises(SuppressionsDamaged):
        Suppressions(tmp_path, list_id=None).add([entry("new@x.org")])
    assert (tmp_path / TRUTH).read_bytes() == raw
    assert asked(tmp_path, "ann@x.org")


def test_many_appenders_at_once_lose_nothing(tmp_path: Path) -> None:
    children = []
    for writer in range(4):
        child = os.fork()
        if child == 0:
            here = Suppressions(tmp_path, list_id=None)
            for number in range(25):
                here.add([entry(f"{writer}-{number}@x.org"), entry("same@x.org")])
            os._exit(0)
        children.append(child)
    assert all(os.waitpid(child, 0)[1] == 0 for child in children)
    here = Suppressions(tmp_path, list_id=None)
    assert here.check([f"{writer}-{number}@x.org" for writer in range(4) for number in range(25)]).all()
    assert len(here) == 101


@pytest.mark.parametrize("count", [0, 1, 2, 17, 5000])
def test_the_index_finds_exactly_what_is_in_it(count: int) -> None:
    rng = np.random.default_rng(count)
    hashes = np.unique(rng.integers(0, 2**64, count, dtype=np.uint64))
    index = Index(b"".join(suppression.encode_index(hashes)))
    others = rng.integers(0, 2**64, 1000, dtype=np.uint64)
    assert index.check(hashes).all()
    assert (index.check(others) == np.isin(others, hashes)).all()
    edges = np.array([0, 2**64 - 1], dtype=np.uint64)
    assert (index.check(edges) == np.isin(edges, hashes)).all()


def test_a_forgotten_address_stays_suppressed_and_is_not_named(tmp_path: Path) -> None:
    key = b"k" * 32
    (tmp_path / KEY).write_bytes(key)
    here = Suppressions(tmp_path, list_id="weekly")
    here.add([entry(suppression.forgotten_address("ann@x.org", key), reason="forgotten")])
    assert here.check(["ann@x.org", "bob@x.org"]).tolist() == [True, False]
    here.rebuild_indexes()
    assert here.check(["ann@x.org", "bob@x.org"]).tolist() == [True, False]
    assert here.add([entry("ann@x.org", reason="import")]) == 0
    assert all(b"ann@" not in file.read_bytes() for file in tmp_path.iterdir())
