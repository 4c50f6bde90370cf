"""Nothing waits in silence: connections, rows that nobody holds, a disk that hangs, keys and workers that stand."""

from __future__ import annotations

from typing import Any, cast

from engine.smtp.session import Session
from engine.work.watching import MachineWatch, WorkerWatch

KEY = ("first", "big")


class Talk:
    """A dialogue's counters."""

    def __init__(self) -> None:
        self.accepted = self.refused = 0


class Connection:
    """A session's counters."""

    host = "mx.big.test:25"

    def __init__(self, in_hand: int) -> None:
        self.dialogue, self.in_hand, self.was_cut = Talk(), in_hand, False

    @property
    def is_idle(self) -> bool:
        return not self.in_hand

    def abort(self) -> None:
        self.was_cut = True


def look(watch: WorkerWatch, connections: list[Connection], now: float, **said: Any) -> list[str]:
    told = {"open_rows": 0, "placed": 0, "syncing_since": None, **said}
    sessions = cast(list[Session], connections)
    return [str(stall) for stall in watch.look(sessions, now=now, stuck_after_s=100.0, **told)]


def test_a_connection_without_a_verdict_is_cut_and_one_that_gives_some_is_not() -> None:
    watch, stuck, slow, idle = WorkerWatch(), Connection(3), Connection(3), Connection(0)
    told: list[str] = []
    for now in range(0, 201, 10):
        slow.dialogue.accepted += now % 50 == 0
        told += look(watch, [stuck, slow, idle], float(now))
    assert told == ["connection mx.big.test:25 (1) has made no progress for 110 s: no answer to 3 messages; cut"]
    assert (stuck.was_cut, slow.was_cut, idle.was_cut) == (True, False, False)


def test_waiting_idle_is_no_progress_missed() -> None:
    watch, connection = WorkerWatch(), Connection(0)
    for now in (0.0, 500.0):
        assert look(watch, [connection], now) == []
    connection.in_hand = 1
    assert look(watch, [connection], 501.0) == []
    assert look(watch, [connection], 590.0) == []
    assert len(look(watch, [connection], 602.0)) == 1


def test_rows_that_nobody_holds_are_told_and_rows_on_their_way_are_not() -> None:
    watch = WorkerWatch()
    assert look(watch, [], 0.0, open_rows=10, placed=9) == []
    assert look(watch, [], 30.0, open_rows=9, placed=9) == []
    assert look(watch, [], 40.0, open_rows=9, placed=8) == []
    (told,) = look(watch, [], 101.0, open_rows=9, placed=8)
    assert "9 are open, and 8 of them in a known place" in told


def test_a_sync_that_hangs_is_told_and_one_sync_after_the_other_is_not() -> None:
    watch = WorkerWatch()
    for now in range(100):
        assert look(watch, [], float(now), syncing_since=float(now) - 0.5) == []
    told = [line for now in range(100, 150) for line in look(watch, [], float(now), syncing_since=100.0)]
    assert len(told) == 1
    assert "the disk has not synced the log" in told[0]


class Paced:
    """What pacing says of keys."""

    def __init__(self, until: float | None = None, between_s: float = 0.0) -> None:
        self.until, self.between_s = until, between_s

    def waits_until(self, key: object, now: float) -> float | None:
        return self.until if self.until is not None and self.until > now else None

    def pause_between_s(self, key: object) -> float:
        return self.between_s

    def limited_by(self, key: object) -> str:
        return "budget: 3 connections"


def stalls(
    watch: MachineWatch, paced: Paced, answers: list[tuple[float, int]], rows: int = 7
) -> list[tuple[float, str]]:
    found = []
    for now, answered in answers:
        watch.keys({KEY: rows} if rows else {}, {KEY: answered}, paced, now, 60.0)
        found += [(now, stall.doing) for stall in watch.stalled(now)]
    return found


def test_a_provider_that_answers_nothing_is_told_with_what_limits_it() -> None:
    silent = [(float(now), 5) for now in range(0, 100, 10)]
    assert stalls(MachineWatch(), Paced(), silent) == [
        (70.0, "7 rows may go, and none is answered; budget: 3 connections")
    ]
    assert stalls(MachineWatch(), Paced(), [(now, int(now)) for now, _ in silent]) == []
    assert stalls(MachineWatch(), Paced(), silent, rows=0) == []


def test_suspended_or_at_ten_messages_a_day_it_is_as_it_should_be() -> None:
    silent = [(float(now), 5) for now in range(0, 3600, 10)]
    assert stalls(MachineWatch(), Paced(until=3600.0), silent) == []
    assert stalls(MachineWatch(), Paced(between_s=8640.0), silent) == []
    assert stalls(MachineWatch(), Paced(until=3000.0), silent)[0][0] == 3070.0


def test_a_worker_that_reads_nothing_of_what_it_was_given_is_told() -> None:
    watch = MachineWatch()
    for now in range(0, 60, 10):
        watch.worker(3, 1000, 0, float(now))
        watch.worker(4, 1000 - now, 0, float(now))
        watch.worker(5, 1000, 12, float(now))  # it has enough ready
        assert watch.stalled(float(now)) == []
    watch.worker(3, 1000, 0, 61.0)
    (told,) = watch.stalled(61.0)
    assert str(told) == "worker 3 has made no progress for 61 s: 1,000 rows were assigned, and it reads none of them"
    watch.gone(3)
    assert watch.stalled(500.0)[0].name == "4"
