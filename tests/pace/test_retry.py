"""Waits between attempts: the plan, its jitter, hints, and the age at which a row is given up."""

from __future__ import annotations

import random

from engine.config import Duration, RetryTable
from engine.pace.retry import NEVER_SOONER_S, RetryPlan

EXACT = RetryPlan(jitter=0.0)


def attempts_of(plan: RetryPlan, seed: int = 1) -> list[float]:
    """Minutes at which a row is attempted that is always deferred."""
    rng, now, times = random.Random(seed), 0.0, []
    for attempt in range(1, 100):
        times.append(now / 60)
        wait = plan.next_wait(attempt, 0.0, now, rng)
        if wait is None:
            break
        now += wait
    return times


def test_one_five_thirty_minutes_then_hourly_for_a_day() -> None:
    times = attempts_of(EXACT)
    assert times[:6] == [0, 1, 6, 36, 96, 156]
    assert times[-1] == 1416
    assert len(times) == 27


def test_jitter_spreads_every_wait_by_at_most_its_share() -> None:
    plan = RetryPlan(jitter=0.1)
    waits = {plan.next_wait(2, 0.0, 0.0, random.Random(seed)) for seed in range(200)}
    assert len(waits) > 150
    assert all(wait is not None and 270 <= wait <= 330 for wait in waits)


def test_a_hint_wins_over_the_plan_and_is_never_undercut() -> None:
    plan = RetryPlan(jitter=0.1)
    for seed in range(50):
        wait = plan.next_wait(1, 0.0, 0.0, random.Random(seed), hint_s=300)
        assert wait is not None
        assert 300 <= wait <= 330
    wait = plan.next_wait(3, 0.0, 0.0, random.Random(1), hint_s=120)
    assert wait is not None
    assert 120 <= wait <= 132
    assert EXACT.next_wait(1, 0.0, 0.0, random.Random(1), hint_s=0) == NEVER_SOONER_S


def test_a_wait_beyond_the_maximum_age_is_the_end() -> None:
    plan = RetryPlan(max_age_s=600.0, jitter=0.0)
    assert attempts_of(plan) == [0, 1, 6]
    assert plan.next_wait(1, 0.0, 0.0, random.Random(1), hint_s=3600) is None


def test_settings_are_the_plan() -> None:
    table = RetryTable(plan=(Duration(2.0), Duration(4.0)), max_age=Duration(100.0), jitter=0.0)
    plan = RetryPlan.from_settings(table)
    assert [plan.next_wait(n, 0.0, 0.0, random.Random(1)) for n in (1, 2, 3)] == [2.0, 4.0, 4.0]
    assert RetryPlan.from_settings(RetryTable()) == RetryPlan()


def test_greylisted_first_time_accepted_after_five_minutes() -> None:
    """A greylister that opens after 5 minutes and forgets after 24 hours takes the third attempt (corpus T085)."""
    opened = [minute for minute in attempts_of(EXACT) if minute >= 5]
    assert opened[0] == 6
