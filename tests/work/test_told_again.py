"""The last look at the store: whoever ends in the moment of a failover tells the new server what its logs know."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from engine.clock import SystemClock
from engine.control.entries import window_id
from engine.control.store import Advance, ClaimedBatch, Decision, Entry, Incarnation, StoreAway, StoreChanged
from engine.work.logbook import Logbook
from engine.work.shared import Shared
from formats.sendlog import Header, Verdict

ME = f"{7:016x}"


class Forgetful:
    """A store that fails over while we end: the connections are cut, and another server answers the next ones."""

    def __init__(self, *answers: Exception | None) -> None:
        self._answers = list(answers)
        self.told: dict[int, int] = {}

    def _answer(self) -> None:
        if self._answers and (problem := self._answers.pop(0)) is not None:
            raise problem

    def server_mark(self) -> str:
        self._answer()
        return "1/00000001"

    def advance(self, incarnation: str, step: Advance) -> None:
        self._answer()
        for settled in step.settled:
            offsets = np.frombuffer(settled.rows, "<u4").tolist()
            self.told.update(zip(offsets, settled.verdicts, strict=True))


class Hearer:
    def __init__(self) -> None:
        self.heard: dict[str, dict[str, object]] = {}

    def event(self, name: str, **fields: object) -> None:
        self.heard[name] = fields


def ended(store: Forgetful, folder: Path, *, lost_lease: bool = False) -> Hearer:
    """An incarnation with one log (row 3 accepted, row 4 without a reply) ends."""
    header = Header(log_id=f"{ME}-001", campaign_id="c", plan_fingerprint="p", incarnation=ME, sender="a", host_id="h",
                    boot_id="b", worker=0, started_at_us=1)  # fmt: skip
    log = Logbook(folder / f"{ME}-001.arrows", header, SystemClock())
    log.result(log.intent(3, 1, 0, 0), 3, 1, Verdict.ACCEPTED, code=250)
    log.intent(4, 1, 0, 0)
    log.close()
    me = Incarnation(id=ME, sender="a", host_id="h", boot_id="b", pid=1, partition=0, started_at_us=1,
                     renewed_at_us=1, lease_us=1_000_000)  # fmt: skip
    plan = SimpleNamespace(batches=[SimpleNamespace(first_row=0, rows=10)])
    hearer = Hearer()
    shared = Shared(cast(Any, SimpleNamespace(logs=folder)), cast(Any, None), cast(Any, plan), cast(Any, store),
                    cast(Any, store), me, hearer, SystemClock(), steal=False, resend_doubt=False)  # fmt: skip
    shared.lost_lease = lost_lease
    asyncio.run(shared.finish(0.1))
    return hearer


def changed() -> StoreChanged:
    return StoreChanged(where="db", known="1/00000001", found="1/00000002")


def away() -> StoreAway:
    return StoreAway(where="db", problem="terminating connection")


def test_one_that_lost_its_lease_finds_out_that_the_server_changed(tmp_path: Path) -> None:
    store = Forgetful(away(), changed(), None)
    hearer = ended(store, tmp_path, lost_lease=True)
    assert store.told == {3: Verdict.ACCEPTED, 4: Verdict.IN_DOUBT}
    assert hearer.heard["told_again"] == {"rows": 2}
    assert "store_away" in hearer.heard


def test_a_connection_that_the_failover_cut_is_no_reason_to_say_nothing(tmp_path: Path) -> None:
    store = Forgetful(changed(), away(), away())
    ended(store, tmp_path)
    assert store.told == {3: Verdict.ACCEPTED, 4: Verdict.IN_DOUBT}


def test_a_server_that_is_the_same_hears_nothing_twice(tmp_path: Path) -> None:
    store = Forgetful()
    assert ended(store, tmp_path).heard == {}
    assert store.told == {}


def test_a_batch_whose_claim_was_forgotten_is_not_begun_anew(tmp_path: Path) -> None:
    """The new server has never heard that it was claimed; what was told again says that rows of it were sent."""

    class ToldAgain:
        def entries(self, batches: list[int]) -> list[Entry]:
            rows = np.array([1, 2], "<u4").tobytes()
            return [Entry(window_id(f"{9:016x}-001", 1), 0, 1, 0, "", rows, bytes([Verdict.ACCEPTED, 0]), b"")]

        def decisions_between(self, first_row: int, end_row: int) -> list[Decision]:
            return []

        def now_us(self) -> int:
            return 1

    plan = SimpleNamespace(batches=[SimpleNamespace(first_row=0, rows=4)])
    campaign = SimpleNamespace(logs=tmp_path)
    settings = SimpleNamespace(log=SimpleNamespace(durability="disk"))
    me = Incarnation(id=ME, sender="a", host_id="h", boot_id="b", pid=1, partition=0, started_at_us=1,
                     renewed_at_us=1, lease_us=1_000_000)  # fmt: skip
    store = cast(Any, ToldAgain())
    shared = Shared(cast(Any, campaign), cast(Any, settings), cast(Any, plan), store, store, me, Hearer(),
                    SystemClock(), steal=False, resend_doubt=False)  # fmt: skip
    claimed = ClaimedBatch(number=0, first_row=0, rows=4, started=0, late=0)
    shared._derive([claimed])
    taken = shared.take()
    assert taken is not None
    assert np.unpackbits(np.frombuffer(taken[1].assign.skip, np.uint8), count=4).tolist() == [0, 1, 1, 0]
    assert (taken[1].final, taken[1].in_doubt) == (1, 1)
