"""Schedules as published, stages that are earned, and a list spread over days with the engaged first."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.warmup import Progress, UnknownSchedule, WarmupInTheFuture, load_schedules, next_day, schedule_named, spread


def test_the_published_tables() -> None:
    sparkpost = schedule_named("sparkpost")
    assert [sparkpost.daily_cap(day) for day in (1, 6, 14, 29)] == [200, 10_000, 250_000, 10_000_000]
    assert sparkpost.daily_cap(30) is None, "warm"
    assert schedule_named("sendgrid-automated").hourly_cap(1) == 20
    assert schedule_named("ses-standard").daily_cap(45) == 50_000
    # Cumulated: 10k, 100k, 1M messages from one cold address take 6, 9, 15 days.
    total = np.cumsum(sparkpost.days)
    assert [int(np.searchsorted(total, goal)) + 1 for goal in (10_000, 100_000, 1_000_000)] == [6, 9, 15]
    for schedule in load_schedules().values():
        assert all(a <= b for a, b in zip(schedule.days, schedule.days[1:], strict=False)), schedule.name


def test_a_providers_part_of_the_day() -> None:
    caps = schedule_named("sparkpost").caps(3, 0.45)
    assert caps.daily == 450
    assert caps.hourly is not None
    assert 450 / 24 < caps.hourly <= 450 / 10
    assert schedule_named("sparkpost").caps(1, 1e-9).daily == 1
    assert schedule_named("sparkpost").caps(99, 0.5).daily is None


def test_days_that_are_none() -> None:
    with pytest.raises(WarmupInTheFuture):
        schedule_named("sparkpost").daily_cap(0)
    with pytest.raises(UnknownSchedule, match="no warm-up schedule"):
        schedule_named("nobody's")


def test_a_stage_is_earned_held_and_lost() -> None:
    here = Progress(stage=5)
    assert next_day(here, 5000, 5000, 4500).stage == 6
    assert next_day(here, 5000, 5000, 4499).stage == 5
    assert next_day(here, 5000, 5000, 4900, reputation_block=True).stage == 4
    assert next_day(Progress(1), 200, 200, 0, reputation_block=True).stage == 1
    idle = here
    for _ in range(29):
        idle = next_day(idle, 5000, 0, 0)
        assert idle.stage == 5
    assert next_day(idle, 5000, 0, 0).stage == 1


def test_the_engaged_go_first_and_caps_hold() -> None:
    providers = np.array([0, 0, 1, 0, 0, 1], dtype=np.int32)
    engagement = np.array([0.1, np.nan, 0.0, 0.9, 0.5, 0.0])
    days = spread(providers, {0: [1, 2]}, engagement)
    assert days.tolist() == [1, 2, 0, 0, 1, 0]
    assert spread(providers, {0: [0]}).tolist() == [-1, -1, 0, -1, -1, 0]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 2), max_size=200), st.lists(st.integers(0, 9), min_size=1, max_size=5))
def test_no_day_has_more_than_its_cap(codes: list[int], caps: list[int]) -> None:
    providers = np.array(codes, dtype=np.int32)
    days = spread(providers, {0: caps, 1: caps})
    for provider in (0, 1):
        mine = days[providers == provider]
        if caps[-1]:
            assert (mine >= 0).all()
        for day, count in zip(*np.unique(mine[mine >= 0], return_counts=True), strict=True):
            assert count <= caps[min(int(day), len(caps) - 1)]
