"""Sending hours in the recipient's own zone: which rows may go when, on a clock of our own."""

from __future__ import annotations

from datetime import datetime

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.schedule import Hours, ScheduleError, iana_name, zone_named
from engine.zones import OWN, Zones

NAMES = [
    "UTC",
    "America/New_York",
    "Europe/Berlin",
    "Australia/Lord_Howe",
    "Asia/Kolkata",
    "Africa/Casablanca",
    "Pacific/Apia",
    "America/Sao_Paulo",
]
EARLIEST, LATEST = 1_700_000_000, 1_800_000_000  # 2023 to 2027, some clock changes of each


def us(text: str) -> int:
    return round(datetime.fromisoformat(text).timestamp() * 1e6)


def all_rows(count: int) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    return np.ones(count, dtype=bool)


@given(
    st.integers(0, 1439),
    st.integers(0, 1439),
    st.lists(st.sampled_from(["mon", "wed", "sun"]), unique=True),
    st.integers(EARLIEST, LATEST),
    st.lists(st.floats(0, 40 * 3600), min_size=1, max_size=30),
)
@settings(max_examples=150, deadline=None)
def test_at_any_time_each_zone_is_open_as_its_own_clocks_say(
    start: int, end: int, days: list[str], at_s: int, steps: list[float]
) -> None:
    if start == end:
        return
    hours = Hours.parse(f"{start // 60:02}:{start % 60:02}-{end // 60:02}:{end % 60:02}", tuple(days))
    zones = Zones(hours, "UTC")
    numbers = {name: zones.number(name) for name in NAMES}
    now_us = at_s * 1_000_000
    for step in steps:
        now_us += int(step * 1e6)
        flags = zones.open_flags(now_us)
        for name, number in numbers.items():
            opens = hours.opens_at(zone_named(name), now_us)
            assert flags[number] == (opens == now_us), name
            assert zones.is_open(number, now_us) == (opens == now_us)
            assert zones.opens_at(number, now_us) == opens
            assert zones.is_open(number, opens)


@given(st.integers(EARLIEST, LATEST), st.integers(0, 3600), st.sampled_from(NAMES))
@settings(max_examples=100, deadline=None)
def test_a_clock_that_is_set_back_never_opens_a_zone_early(at_s: int, back_s: int, name: str) -> None:
    hours = Hours.parse("08:00-20:00")
    zones = Zones(hours, "UTC")
    number = zones.number(name)
    zones.open_flags(at_s * 1_000_000)
    before_us = (at_s - back_s) * 1_000_000
    if zones.open_flags(before_us)[number]:
        assert hours.opens_at(zone_named(name), before_us) == before_us


def test_eight_in_the_morning_is_twice_an_hour_apart_when_clocks_change_on_different_days() -> None:
    zones = Zones(Hours.parse("08:00-20:00"), "UTC")
    new_york, berlin = zones.number("America/New_York"), zones.number("Europe/Berlin")
    before, between, after = us("2026-03-06T02:00Z"), us("2026-03-12T02:00Z"), us("2026-03-31T02:00Z")
    gaps = [(zones.opens_at(new_york, at) - zones.opens_at(berlin, at)) / 3.6e9 for at in (before, between, after)]
    assert gaps == [6, 5, 6]


def test_hours_that_begin_in_the_gap_begin_when_clocks_have_jumped() -> None:
    zones = Zones(Hours.parse("02:30-20:00"), "UTC")
    new_york = zones.number("America/New_York")
    jump = us("2026-03-08T03:00-04:00")
    assert not zones.is_open(new_york, jump - 1)
    assert zones.is_open(new_york, jump)


def test_the_hour_that_comes_twice_is_closed_at_its_first_reading_where_hours_begin_in_it() -> None:
    zones = Zones(Hours.parse("01:30-20:00"), "UTC")
    new_york = zones.number("America/New_York")
    assert zones.opens_at(new_york, us("2026-11-01T00:00-04:00")) == us("2026-11-01T01:30-05:00")


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("Europe/Berlin", "Europe/Berlin"),
        (" america/new_york\t", "America/New_York"),
        ("utc", "UTC"),
        ("Etc/GMT-5", "Etc/GMT-5"),
        ("+02:00", None),
        ("GMT+2 (Berlin)", None),
        ("Berlin", None),
        ("../../etc/passwd", None),
        ("localtime", None),
        ("Factory", None),
        ("Europe/Berlin\0", None),
        ("\u0130stanbul", None),
        ("", None),
        (None, None),
    ],
)
def test_a_zone_is_an_iana_name_or_none(text: str | None, name: str | None) -> None:
    assert iana_name(text) == name


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())])
def test_rows_without_a_zone_follow_the_campaigns_and_are_counted(kind: pa.DataType) -> None:
    zones = Zones(Hours.parse("08:00-20:00"), "Asia/Tokyo")
    column = pa.array(["Europe/Berlin", None, "", "  ", "CET+1", "europe/berlin", "Asia/Tokyo"], pa.string()).cast(kind)
    numbers = zones.numbers(column, all_rows(7)).tolist()
    berlin = zones.number("Europe/Berlin")
    assert numbers == [berlin, OWN, OWN, OWN, OWN, berlin, OWN]
    assert zones.take_zoneless() == (3, 1)
    assert zones.take_zoneless() == (0, 0)


def test_rows_that_were_counted_before_are_not_counted_again() -> None:
    zones = Zones(None, "UTC")
    zones.numbers(pa.array([None, None, "nowhere"]), np.array([True, False, False]))
    assert zones.take_zoneless() == (1, 0)


@pytest.mark.parametrize("column", [pa.array([1, 2]), pa.nulls(2), pa.array([None, None], pa.string())])
def test_a_column_without_a_text_is_no_help(column: pa.Array) -> None:
    zones = Zones(Hours.parse("08:00-20:00"), "UTC")
    assert zones.numbers(column, all_rows(2)).tolist() == [OWN, OWN]
    assert zones.take_zoneless() == (2, 0)


def test_a_column_of_something_else_fills_no_memory() -> None:
    zones = Zones(Hours.parse("08:00-20:00"), "UTC")
    for part in range(3):
        zones.numbers(pa.array([f"address {part} {n}" for n in range(50_000)]), all_rows(50_000))
    assert len(zones.names) == 1
    assert zones.take_zoneless() == (0, 150_000)
    assert len(zones._known) <= 100_000


def test_without_hours_it_is_always_open_and_new_hours_hold_at_once() -> None:
    zones = Zones(None, "UTC")
    berlin = zones.number("Europe/Berlin")
    midnight = us("2026-12-01T00:00+01:00")
    assert zones.is_open(berlin, midnight)
    zones.set_hours(Hours.parse("08:00-20:00"), "UTC")
    assert not zones.open_flags(midnight)[berlin]
    assert zones.local(berlin, zones.opens_at(berlin, midnight)) == "Tue 2026-12-01 08:00 CET (Europe/Berlin)"


def test_the_campaigns_own_zone_must_be_one() -> None:
    with pytest.raises(ScheduleError):
        Zones(None, "Berlin")
