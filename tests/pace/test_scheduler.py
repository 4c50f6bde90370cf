"""The scheduler's stories: who goes first, who waits where, and that nobody is ever in two places or none."""

from __future__ import annotations

import random
from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.pace.scheduler import RETRY_SHARE, Scheduler
from engine.pace.wheel import TICK_S


def fresh(**kwargs: int) -> Scheduler:
    return Scheduler(rng=random.Random(1), **kwargs)


def read_again(scheduler: Scheduler, limit: int = 10_000) -> list[int]:
    rows = scheduler.wanted(limit)
    for row in rows:
        scheduler.returned(row)
    return rows


def test_a_full_lane_parks_and_the_others_go_on() -> None:
    scheduler = fresh(ready_rows=100, ready_rows_per_lane=10)
    kept = [scheduler.add(row, lane=row % 2) for row in range(100)]
    assert sum(kept) == 20
    assert scheduler.counts(0).ready == 10
    assert scheduler.parked == 80
    assert scheduler.has_room()
    assert scheduler.take(1, 4, now=0.0) == [1, 3, 5, 7]
    assert scheduler.demand() == {0: 50, 1: 46}
    scheduler.check()


def test_parked_rows_come_back_in_row_order_when_their_lane_has_room() -> None:
    scheduler = fresh(ready_rows=100, ready_rows_per_lane=10)
    for row in range(100):
        scheduler.add(row, lane=row % 2)
    assert scheduler.wanted(100) == []
    taken = scheduler.take(1, 8, 0.0) + scheduler.take(0, 8, 0.0)
    wanted = scheduler.wanted(100)
    assert wanted == list(range(20, 36))
    assert scheduler.counts().reading == 16
    for row in wanted:
        assert scheduler.returned(row)
    for row in taken:
        scheduler.settle(row, row % 2)
    scheduler.check()
    assert scheduler.take(0, 100, 0.0) == [16, 18, *range(20, 36, 2)]


def test_given_back_rows_go_first() -> None:
    scheduler = fresh()
    for row in range(5):
        scheduler.add(row, 7)
    assert scheduler.take(7, 2, 0.0) == [0, 1]
    scheduler.give_back(1, 7)
    scheduler.give_back(0, 7)
    assert scheduler.take(7, 5, 0.0) == [0, 1, 2, 3, 4]
    scheduler.check()


def test_priorities_go_before_the_campaign_and_are_never_parked() -> None:
    scheduler = fresh(ready_rows=4, ready_rows_per_lane=2)
    for row in range(10):
        scheduler.add(row, 0)
    assert scheduler.add(100, 0, priority=2)
    assert scheduler.add(101, 0, priority=1)
    assert scheduler.take(0, 3, 0.0) == [101, 100, 0]
    scheduler.defer(101, 0, due_at=60.0, attempt=1, first_at=0.0, expires_at=1000.0)
    scheduler.advance(70.0)
    assert 101 in read_again(scheduler)
    assert scheduler.take(0, 1, 70.0) == [101], "its retry is as urgent as it was"
    assert scheduler.history(101) == (1, 0.0)
    scheduler.check()


def test_retries_come_after_fresh_rows_but_are_not_starved() -> None:
    scheduler = fresh(ready_rows=10_000, ready_rows_per_lane=1000)
    for row in range(10):
        scheduler.add(row, 0)
    for row in scheduler.take(0, 10, 0.0):
        scheduler.defer(row, 0, due_at=60.0, attempt=1, first_at=0.0, expires_at=86400.0)
    for row in range(100, 600):
        scheduler.add(row, 0)
    assert scheduler.advance(70.0) == []
    read_again(scheduler)
    order = [scheduler.take(0, 1, 70.0)[0] for _ in range(80)]
    retries = [at for at, row in enumerate(order) if row < 10]
    assert len(retries) == 80 // RETRY_SHARE
    assert retries[0] > 0
    scheduler.check()


def test_a_deferred_row_is_due_once_and_on_time_with_its_history() -> None:
    scheduler = fresh()
    scheduler.add(5, 1)
    scheduler.take(1, 1, 1000.25)
    scheduler.defer(5, 1, due_at=1060.0, attempt=1, first_at=1000.25, expires_at=90_000.0)
    assert scheduler.next_due() is not None
    assert scheduler.waiting == 1
    assert scheduler.advance(1059.9) == []
    assert scheduler.demand() == {}
    scheduler.advance(1060.0 + TICK_S)
    assert scheduler.waiting == 0
    assert scheduler.demand() == {1: 1}
    assert scheduler.take(1, 1, 1066.0) == [], "its values are not here yet"
    assert read_again(scheduler) == [5]
    assert scheduler.take(1, 1, 1066.0) == [5]
    assert scheduler.history(5) == (1, 1000.25)
    scheduler.settle(5, 1)
    assert scheduler.open_rows == 0
    assert scheduler.lanes() == []
    scheduler.check()


def test_rows_expire_by_clock_wherever_they_wait() -> None:
    scheduler = fresh()
    for row in range(4):
        scheduler.defer(row, 0, due_at=60.0, attempt=1, first_at=0.0, expires_at=600.0)
    scheduler.defer(9, 0, due_at=5000.0, attempt=3, first_at=0.0, expires_at=600.0)
    scheduler.advance(65.0)
    ready = scheduler.wanted(2)
    for row in ready:
        scheduler.returned(row)
    scheduler.suspend_lane(0, until=7200.0, reason="421 4.7.28")
    assert scheduler.counts(0).due == 4
    expired = scheduler.advance(700.0)
    assert sorted(expired) == [0, 1, 2, 3, 9]
    assert scheduler.history(9) == (3, 0.0), "told until the next advance"
    assert scheduler.history(0) == (1, 0.0)
    scheduler.advance(701.0)
    assert scheduler.history(9) == (0, None)
    scheduler.check()


def test_a_row_that_expired_while_ready_is_never_handed_out() -> None:
    scheduler = fresh()
    scheduler.defer(1, 0, due_at=60.0, attempt=1, first_at=0.0, expires_at=100.0)
    scheduler.advance(65.0)
    read_again(scheduler)
    assert scheduler.take(0, 5, 101.0) == []
    assert scheduler.evicted() == [1], "its values may go"
    assert scheduler.advance(101.0) == [1]
    assert scheduler.open_rows == 0
    scheduler.check()


def test_a_suspended_lane_offers_nothing_and_keeps_only_numbers() -> None:
    scheduler = fresh()
    for row in range(20):
        scheduler.add(row, row % 2)
    scheduler.take(0, 1, 0.0)
    dropped = scheduler.suspend_lane(0, until=600.0, reason="421 4.7.28 unusual rate")
    assert dropped == list(range(2, 20, 2))
    assert scheduler.demand() == {1: 10}
    assert scheduler.take(0, 5, 1.0) == []
    assert not scheduler.add(100, 0)
    scheduler.defer(0, 0, due_at=60.0, attempt=1, first_at=0.0, expires_at=86400.0)
    scheduler.advance(61.0)
    assert scheduler.wanted(100) == [], "suspension overrules the early retries"
    assert scheduler.suspension(0) is not None
    scheduler.check()
    scheduler.advance(600.0)
    assert read_again(scheduler) == [0, *range(2, 20, 2), 100]
    assert scheduler.take(0, 2, 600.0) == [2, 4]
    scheduler.check()


def test_a_longer_suspension_replaces_a_shorter_one() -> None:
    scheduler = fresh()
    scheduler.add(1, 0)
    scheduler.suspend_lane(0, until=60.0, reason="first")
    scheduler.suspend_lane(0, until=600.0, reason="second")
    scheduler.advance(61.0)
    assert scheduler.demand() == {}
    scheduler.advance(601.0)
    assert scheduler.demand() == {0: 1}


def test_a_lane_suspended_while_its_rows_are_read_drops_them_again() -> None:
    scheduler = fresh(ready_rows=4, ready_rows_per_lane=2)
    for row in range(6):
        scheduler.add(row, 0)
    scheduler.take(0, 2, 0.0)
    wanted = scheduler.wanted(10)
    assert wanted == [2, 3]
    scheduler.suspend_lane(0, None, "operator")
    assert not scheduler.returned(2)
    scheduler.gone(3)
    scheduler.resume_lane(0)
    assert read_again(scheduler) == [2, 4]
    scheduler.check()


def test_a_fast_lane_makes_idle_ones_give_up_their_room() -> None:
    scheduler = fresh(ready_rows=50, ready_rows_per_lane=10)
    for lane in range(1, 200):
        scheduler.add(lane, lane)
    for row in range(1000, 1100):
        scheduler.add(row, 0)
    assert scheduler.ready == 50
    assert scheduler.counts(0).ready == 0
    assert scheduler.take(0, 8, 0.0) == []
    wanted = scheduler.wanted(100)
    dropped = scheduler.evicted()
    assert wanted
    assert all(row >= 1000 for row in wanted)
    assert dropped
    for row in wanted:
        scheduler.returned(row)
    assert scheduler.take(0, 8, 0.0)
    assert scheduler.ready + scheduler.counts().reading <= 50
    scheduler.check()


def test_the_reader_runs_ahead_while_a_connection_has_nothing_to_do() -> None:
    scheduler = fresh(ready_rows=8, ready_rows_per_lane=8)
    for row in range(20):
        scheduler.add(row, row)
    assert not scheduler.has_room()
    assert scheduler.take(99, 1, 0.0) == []
    assert scheduler.has_room()
    for row in range(20, 20 + 16):
        scheduler.add(row, row)
    assert not scheduler.has_room()


def test_after_stop_nothing_is_handed_out_and_what_flies_may_land() -> None:
    scheduler = fresh()
    for row in range(4):
        scheduler.add(row, 0)
    scheduler.take(0, 2, 0.0)
    scheduler.stop()
    assert scheduler.take(0, 2, 0.0) == []
    assert scheduler.demand() == {}
    scheduler.settle(0, 0)
    scheduler.give_back(1, 0)
    assert sorted(row for row, _, _ in scheduler.rows()) == [1, 2, 3]
    scheduler.check()


def test_rows_deferred_before_a_restart_keep_their_first_attempt() -> None:
    scheduler = fresh()
    scheduler.defer(3, 0, due_at=100.0, attempt=4, first_at=-80_000.0, expires_at=6400.0)
    scheduler.advance(105.0)
    read_again(scheduler)
    assert scheduler.take(0, 1, 105.0) == [3]
    assert scheduler.history(3) == (4, -80_000.0)


def test_what_is_due_is_due_at_the_time_told() -> None:
    rng = random.Random(5)
    for _ in range(500):
        scheduler = fresh()
        now = rng.uniform(0, 1e6)
        scheduler.defer(1, 0, due_at=now + rng.uniform(0, 4000), attempt=1, first_at=now, expires_at=now + 1e5)
        due = scheduler.next_due()
        assert due is not None
        scheduler.advance(due)
        assert scheduler.waiting == 0


def test_a_clock_that_jumps_ahead_brings_everything_due_at_once() -> None:
    scheduler = fresh()
    for row in range(100):
        scheduler.defer(row, row % 3, due_at=60.0 * row, attempt=1, first_at=0.0, expires_at=1e6)
    scheduler.advance(-5.0)
    scheduler.advance(90_000.0)
    assert scheduler.waiting == 0
    assert sum(scheduler.demand().values()) == 100
    scheduler.advance(10.0)
    scheduler.check()


def size_of(arrays: list[array[int]]) -> int:
    return sum(a.buffer_info()[1] * a.itemsize + 80 for a in arrays)


def test_a_parked_row_costs_at_most_16_bytes_and_a_waiting_one_32() -> None:
    rows = 20_000
    scheduler = fresh(ready_rows=10)
    for row in range(rows):
        scheduler.add(row, row % 7)
    places = scheduler._lanes.values()
    assert size_of([p.parked for p in places if p.parked is not None]) / rows <= 16
    scheduler = fresh(ready_rows=10)
    for row in range(rows):
        scheduler.defer(row, row % 7, due_at=row % 3600, attempt=1, first_at=0.0, expires_at=86400.0)
    assert size_of(list(scheduler._wheel.buckets.values())) / rows <= 32
    scheduler.advance(4000.0)
    places = scheduler._lanes.values()
    assert size_of([p.due for p in places if p.due is not None]) / rows <= 16


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**32),
    st.integers(1, 30),
    st.integers(1, 8),
    st.integers(1, 12),
)
def test_any_course_of_events_settles_every_row_exactly_once(seed: int, ready: int, per_lane: int, lanes: int) -> None:
    rng = random.Random(seed)
    scheduler = Scheduler(ready_rows=ready, ready_rows_per_lane=per_lane, rng=rng)
    rows = 60
    unread = list(range(rows))
    lane_of = [rng.randrange(lanes) for _ in range(rows)]
    values: set[int] = set()
    reading: list[int] = []
    flying: list[int] = []
    ended: list[int] = []
    now = 0.0
    for step in range(4000):
        if len(ended) == rows:
            break
        match rng.randrange(10):
            case 0 if unread and scheduler.has_room():
                row = unread.pop(0)
                if scheduler.add(row, lane_of[row], priority=rng.choice((1, 2, 3, 3, 3, 3, 3, 3))):
                    values.add(row)
            case 1 | 2:
                lane = rng.randrange(lanes)
                taken = scheduler.take(lane, rng.randrange(1, 12), now)
                assert all(lane_of[row] == lane for row in taken)
                values.difference_update(scheduler.evicted())
                assert values.issuperset(taken), "what is handed out has its values"
                flying.extend(taken)
            case 3 | 4 if flying:
                row = flying.pop(rng.randrange(len(flying)))
                verdict = rng.randrange(6)
                attempt, first_at = scheduler.history(row)
                if verdict == 0:
                    scheduler.give_back(row, lane_of[row])
                elif verdict < 3:
                    first_at = now if first_at is None else first_at
                    due = now + rng.choice((1, 60, 300, 2000))
                    scheduler.defer(row, lane_of[row], due, attempt + 1, first_at, first_at + 3000)
                    values.discard(row)
                else:
                    scheduler.settle(row, lane_of[row])
                    values.discard(row)
                    ended.append(row)
            case 5:
                now += rng.choice((0.0, 1.0, 70.0, 400.0))
                gone = scheduler.advance(now)
                values.difference_update(gone)
                ended.extend(gone)
            case 6:
                reading.extend(scheduler.wanted(rng.randrange(1, 20)))
            case 7 if reading:
                row = reading.pop(0)
                if rng.randrange(20) == 0:
                    scheduler.gone(row)
                    ended.append(row)
                elif scheduler.returned(row):
                    values.add(row)
            case 8 if rng.randrange(4) == 0:
                lane = rng.randrange(lanes)
                values.difference_update(scheduler.suspend_lane(lane, now + rng.choice((10, 500)), "test"))
            case 9 if rng.randrange(4) == 0:
                scheduler.resume_lane(rng.randrange(lanes))
            case _:
                pass
        values.difference_update(scheduler.evicted())
        if step % 7 == 0:
            scheduler.check()
            ready_now = {row for row, _, where in scheduler.rows() if where == "ready"}
            assert ready_now <= values
    scheduler.check()
    still_open = [row for row, _, _ in scheduler.rows()] + unread
    assert sorted(ended + still_open) == list(range(rows))


@pytest.mark.parametrize("lanes", [1, 3000])
def test_one_lane_or_a_lane_a_row_all_get_out(lanes: int) -> None:
    scheduler = fresh(ready_rows=256, ready_rows_per_lane=64)
    rows = 3000
    out: list[int] = []
    at = 0
    for _ in range(rows * 4):
        while at < rows and scheduler.has_room():
            scheduler.add(at, at % lanes)
            at += 1
        for lane in list(scheduler.demand())[:50]:
            for row in scheduler.take(lane, 16, 0.0):
                scheduler.settle(row, lane)
                out.append(row)
        read_again(scheduler, 100)
        if len(out) == rows:
            break
    assert sorted(out) == list(range(rows))
    scheduler.check()


def test_the_only_lane_reads_each_row_once() -> None:
    """Nothing lies further on that another lane could want: rows beyond the share would be parked and read again."""
    scheduler = fresh(ready_rows=100, ready_rows_per_lane=100)
    row = 0
    for _ in range(50):
        while scheduler.has_room(10):
            assert all(scheduler.add(row + place, 0) for place in range(10))
            row += 10
        for taken in scheduler.take(0, 20, 0.0):
            scheduler.settle(taken, 0)
    assert scheduler.parked == 0
    assert row >= 1000
