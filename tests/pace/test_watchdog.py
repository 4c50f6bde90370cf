"""Public reports of campaigns that hung without a word, and what the clock finds (areas `stuck` and `rate`)."""

from __future__ import annotations

import random

from engine.pace.scheduler import Scheduler
from engine.pace.throttle import Key, Limits, Observation, Signal, Throttle
from engine.pace.watchdog import Watchdog, Watched


def test_a_silent_worker_connection_and_destination_are_found_by_clock() -> None:
    dog = Watchdog()
    dog.progress(Watched.WORKER, "3", 0.0, "sending")
    dog.progress(Watched.CONNECTION, "mx.example", 0.0, "waiting for the reply to the final dot")
    dog.progress(Watched.DESTINATION, "example", 0.0, "waiting for a slot")
    assert dog.stalled(59.0) == []
    assert [stall.kind for stall in dog.stalled(61.0)] == [Watched.WORKER]
    assert dog.stalled(62.0) == [], "told once"
    dog.progress(Watched.WORKER, "3", 100.0)
    assert {stall.name for stall in dog.stalled(1201.0)} == {"3", "mx.example", "example"}
    assert "reply to the final dot" in (dog.reason(Watched.CONNECTION, "mx.example") or "")
    dog.done(Watched.CONNECTION, "mx.example")
    assert dog.reason(Watched.CONNECTION, "mx.example") is None


def test_eleven_campaigns_at_once_each_say_what_they_wait_for() -> None:
    """T067: most stayed "running" without progress or reason."""
    dog = Watchdog({Watched.DESTINATION: 300.0})
    for number in range(11):
        dog.progress(Watched.DESTINATION, f"campaign-{number}", 0.0, "waiting for a connection" if number > 3 else "")
    dog.progress(Watched.DESTINATION, "campaign-0", 250.0)
    stalls = dog.stalled(301.0)
    assert len(stalls) == 10
    assert all(stall.doing for stall in stalls)


def test_a_wrong_host_is_suspended_with_its_reason_instead_of_trying_for_ever() -> None:
    """T069: 0 of 1 sent for ever, nothing logged."""
    key = Key("192.0.2.1", "smtp.example.invalid")
    throttle = Throttle(lambda _: Limits(connections=2))
    for n in range(5):
        throttle.observe(key, Observation(Signal.UNREACHABLE, float(n)))
    event = throttle.tick(5.0)[0]
    assert "no connection" in event.reason
    assert throttle.ceiling(key).suspended_until is not None


def test_one_refused_row_fails_nobody_else() -> None:
    """T071: one suppressed address failed the whole sending."""
    scheduler = Scheduler(rng=random.Random(1))
    for row in range(100):
        scheduler.add(row, 0)
    for row in scheduler.take(0, 50, 0.0):
        scheduler.settle(row, 0)
    key = Key("192.0.2.1", "example")
    throttle = Throttle()
    throttle.observe(key, Observation(Signal.BOUNCED, 0.0))
    assert throttle.tick(1.0) == []
    assert len(scheduler.take(0, 100, 1.0)) == 50


def test_waiting_for_a_slot_is_no_error() -> None:
    """T099: a pool smaller than its workers paused the campaign."""
    scheduler = Scheduler(rng=random.Random(1))
    for row in range(20):
        scheduler.add(row, 0)
    assert scheduler.demand() == {0: 20}
    scheduler.advance(86_400.0)
    assert scheduler.demand() == {0: 20}, "rows that wait for a connection do not age"


def test_a_suspension_is_no_stall_until_it_should_have_ended() -> None:
    dog = Watchdog()
    dog.waits(Watched.DESTINATION, "example", 0.0, until=7200.0, reason="421 4.7.28")
    assert dog.stalled(8000.0) == []
    assert dog.stalled(8401.0)[0].doing == "421 4.7.28"


def test_a_clock_that_jumps_back_breaks_nothing() -> None:
    dog = Watchdog()
    dog.progress(Watched.WORKER, "1", 1000.0)
    assert dog.stalled(10.0) == []
