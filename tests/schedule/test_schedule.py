"""Moments in zones and sending hours, also on the days when clocks change."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.schedule import Hours, Schedule, ScheduleError, moment_us, zone_named

NEW_YORK = ZoneInfo("America/New_York")
ZONES = ["UTC", "America/New_York", "Europe/Berlin", "Australia/Lord_Howe", "Asia/Kolkata", "Africa/Casablanca"]


def us(text: str) -> int:
    return round(datetime.fromisoformat(text).timestamp() * 1e6)


def test_a_time_that_does_not_exist_is_refused_with_what_follows() -> None:
    with pytest.raises(ScheduleError, match=r"2024-03-10 02:30: does not exist in America/New_York.*03:30"):
        moment_us("2024-03-10T02:30", "America/New_York")


def test_a_time_that_exists_twice_is_refused_with_both_readings() -> None:
    with pytest.raises(ScheduleError, match=r"-04:00 or 2024-11-03T01:30:00-05:00"):
        moment_us("2024-11-03T01:30", "America/New_York")
    assert moment_us("2024-11-03T01:30:00-05:00") == us("2024-11-03T06:30:00+00:00")


@pytest.mark.parametrize("text", ["tomorrow", "2024-03-10T02:30", "2024-13-01T00:00+00:00", ""])
def test_what_is_no_moment_is_refused(text: str) -> None:
    with pytest.raises(ScheduleError):
        moment_us(text)


@pytest.mark.parametrize("name", ["Berlin", "+02:00", "", "../etc/passwd", "/etc/localtime", "Europe/Berlin\0"])
def test_what_is_no_zone_is_refused(name: str) -> None:
    with pytest.raises(ScheduleError):
        zone_named(name)


@pytest.mark.parametrize("text", ["8-20", "08:00-08:00", "25:00-26:00", "08:61-09:00", "08:00-24:01", ""])
def test_what_are_no_hours_is_refused(text: str) -> None:
    with pytest.raises(ScheduleError):
        Hours.parse(text)


def test_hours_open_and_close_by_the_clock_on_the_wall() -> None:
    hours = Hours.parse("08:00-20:00", ("mon", "Thursday"))
    monday = us("2026-03-30T07:59:59-04:00")
    assert hours.opens_at(NEW_YORK, monday) == us("2026-03-30T08:00:00-04:00")
    assert hours.opens_at(NEW_YORK, us("2026-03-30T12:00:00-04:00")) == us("2026-03-30T12:00:00-04:00")
    assert hours.opens_at(NEW_YORK, us("2026-03-30T20:00:00-04:00")) == us("2026-04-02T08:00:00-04:00")
    assert hours.closes_at(NEW_YORK, monday) == us("2026-03-30T20:00:00-04:00")


def test_hours_over_midnight_belong_to_the_day_they_begin() -> None:
    hours = Hours.parse("22:00-06:00", ("sat",))
    at = us("2026-08-02T05:00:00+00:00")  # Sunday morning
    assert hours.opens_at(ZoneInfo("UTC"), at) == at
    assert hours.closes_at(ZoneInfo("UTC"), at) == us("2026-08-02T06:00:00+00:00")


def test_hours_that_begin_in_the_gap_begin_when_clocks_have_jumped() -> None:
    hours = Hours.parse("02:30-05:00")
    assert hours.opens_at(NEW_YORK, us("2024-03-10T01:00:00-05:00")) == us("2024-03-10T03:00:00-04:00")


def test_the_repeated_hour_is_never_outside_the_hours() -> None:
    begins = Hours.parse("01:30-05:00")
    assert begins.opens_at(NEW_YORK, us("2024-11-03T00:00:00-04:00")) == us("2024-11-03T01:30:00-05:00")
    ends = Hours.parse("00:10-01:30")
    assert ends.closes_at(NEW_YORK, us("2024-11-03T00:20:00-04:00")) == us("2024-11-03T01:30:00-04:00")


@settings(deadline=None, max_examples=150)
@given(
    zone=st.sampled_from(ZONES),
    at=st.datetimes(datetime(2020, 1, 1), datetime(2030, 1, 1)),
    start=st.integers(0, 1439),
    length=st.integers(1, 1439),
    days=st.sets(st.integers(0, 6), min_size=1),
)
def test_whenever_they_open_the_wall_clock_is_within_them(
    zone: str, at: datetime, start: int, length: int, days: set[int]
) -> None:
    where = ZoneInfo(zone)
    hours = Hours(start, (start + length) % 1440 or 1440, frozenset(days))
    now = round(at.replace(tzinfo=UTC).timestamp() * 1e6)
    opens, closes = hours.opens_at(where, now), hours.closes_at(where, now)
    assert now <= opens < closes
    assert opens - now <= timedelta(days=9) / timedelta(microseconds=1)
    assert hours.opens_at(where, opens) == opens
    local = datetime.fromtimestamp(opens / 1e6, where)
    minute = local.hour * 60 + local.minute
    begun_today = start <= minute and (hours.end <= hours.start or minute < hours.end)
    begun_yesterday = hours.end <= hours.start and minute < hours.end
    assert begun_today or begun_yesterday
    assert (local.weekday() if begun_today else (local.weekday() - 1) % 7) in days


def test_a_schedule_says_until_when_it_waits() -> None:
    schedule = Schedule(
        not_before_us=us("2026-06-01T10:00:00+00:00"),
        expires_at_us=us("2026-06-03T10:00:00+00:00"),
        hours=Hours.parse("08:00-20:00"),
        zone="Europe/Berlin",
    )
    assert schedule.why_closed(us("2026-06-01T09:00:00+00:00")) == "not before Mon 2026-06-01 12:00 CEST"
    assert schedule.why_closed(us("2026-06-01T19:00:00+00:00")) == (
        "outside the sending hours until Tue 2026-06-02 08:00 CEST"
    )
    assert schedule.why_closed(us("2026-06-02T12:00:00+00:00")) is None
    assert schedule.is_over(us("2026-06-03T10:00:00+00:00"))
