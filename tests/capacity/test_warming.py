"""The warm-up while it is sent: caps, days, restarts. Time is an argument; weeks pass in a millisecond."""

from __future__ import annotations

from engine.pace.budgets import ALL_SOURCES
from engine.warmup import Caps, lay_out, schedule_named
from engine.work.warming import Warming
from formats.plan import Warmup

KEY = ("young", "google")
DAY_US = 86_400_000_000
NOON = 1_700_000_000_000_000


def warmup(**changes: object) -> Warmup:
    known = {
        "schedule": "test",
        "daily": [100, 200, 400],
        "days": {"young": 1},
        "shares": {"google": 0.5, "yahoo": 0.3},
        "other_share": 0.2,
        "other_rows": 1000,
    }
    return Warmup(**{**known, **changes})  # type: ignore[arg-type]  # names of its own fields


def send(warming: Warming, at_us: int, messages: int, *, accepted: int | None = None) -> None:
    warming.sent(KEY, messages, at_us)
    warming.accepted(KEY, messages if accepted is None else accepted)


def test_a_cap_is_the_providers_part_of_the_day_and_a_warm_source_has_none() -> None:
    warming = Warming(warmup(), 1.0)
    assert warming.caps(KEY) == Caps(50, 5)
    assert [rate.count for rate in warming.rates(KEY)] == [50, 5]
    assert warming.caps(("old", "google")) is None
    assert warming.caps((ALL_SOURCES, "google")) == Caps(50, 5)
    assert Warming(warmup(), 0.5).caps(KEY) == Caps(25, 3)


def test_a_day_of_which_nine_tenths_were_accepted_leads_to_the_next() -> None:
    warming = Warming(warmup(), 1.0)
    send(warming, NOON, 50, accepted=45)
    assert warming.is_used_up(KEY)
    assert list(warming.tick(NOON + DAY_US - 1)) == []
    (turned,) = warming.tick(NOON + DAY_US)
    assert (turned.before, turned.after.stage) == (1, 2)
    assert warming.caps(KEY) == Caps(100, 9)
    assert not warming.is_used_up(KEY)


def test_a_day_of_which_less_were_accepted_is_held() -> None:
    warming = Warming(warmup(), 1.0)
    send(warming, NOON, 50, accepted=44)
    (turned,) = warming.tick(NOON + DAY_US)
    assert turned.after.stage == 1
    assert "held" in turned.after.reason


def test_a_reputation_block_goes_one_stage_back() -> None:
    warming = Warming(warmup(days={"young": 3}), 1.0)
    send(warming, NOON, 200)
    warming.blocked(KEY)
    (turned,) = warming.tick(NOON + DAY_US)
    assert (turned.before, turned.after.stage) == (3, 2)


def test_behind_the_last_day_the_source_is_warm() -> None:
    warming = Warming(warmup(days={"young": 3}), 1.0)
    send(warming, NOON, 200)
    list(warming.tick(NOON + DAY_US))
    assert warming.caps(KEY) is None
    assert warming.rates(KEY) == ()


def test_thirty_idle_days_start_over() -> None:
    warming = Warming(warmup(days={"young": 2}), 1.0)
    send(warming, NOON, 100)
    list(warming.tick(NOON + DAY_US))
    (turned,) = warming.tick(NOON + 32 * DAY_US)
    assert turned.after.stage == 1


def test_a_restart_goes_on_with_the_day_it_was_in() -> None:
    first = Warming(warmup(), 1.0)
    send(first, NOON, 30)
    second = Warming(warmup(), 1.0, first.to_bytes())
    assert second.sent_before(KEY) == [(NOON, 30)]
    send(second, NOON + 1, 20)
    assert second.is_used_up(KEY)
    assert "50 of 50" in second.told(KEY)


def test_small_destinations_share_a_part_and_come_day_by_day() -> None:
    warming = Warming(warmup(), 1.0)
    names = [("young", f"d{n}.example") for n in range(1000)]
    first = {key for key in names if not warming.is_used_up(key)}
    # A day's part is 20 of 1,000 rows: about one destination in fifty begins.
    assert 5 <= len(first) <= 45
    beginner = min(first)
    warming.sent(beginner, 20, NOON)
    assert all(warming.is_used_up(key) for key in names)
    warming.accepted(beginner, 20)
    list(warming.tick(NOON + DAY_US))
    second = {key for key in names if not warming.is_used_up(key)}
    assert first < second


def test_a_clock_that_jumps_gives_nobody_more_than_a_cap() -> None:
    warming = Warming(warmup(), 1.0)
    send(warming, NOON, 30)
    # Set back by a month: the day goes on, and what was sent in it stays sent.
    assert list(warming.tick(NOON - 30 * DAY_US)) == []
    send(warming, NOON - 30 * DAY_US, 20)
    assert warming.is_used_up(KEY)
    assert list(warming.tick(NOON - 29 * DAY_US)) == []
    # Set right again, it ends when it would have.
    assert list(warming.tick(NOON + DAY_US - 1)) == []
    (turned,) = warming.tick(NOON + DAY_US)
    assert turned.after.stage == 2
    # A jump ahead over weeks is one day's end, not many.
    send(warming, NOON + DAY_US, 100)
    assert [turned.after.stage for turned in warming.tick(NOON + 20 * DAY_US)] == [3]
    assert list(warming.tick(NOON + 21 * DAY_US)) == []


def test_a_rehearsals_day_is_as_long_as_its_plan_says() -> None:
    warming = Warming(warmup(day_s=24.0), 1.0)
    assert [(rate.per_s, rate.spread_s) for rate in warming.rates(KEY)] == [(24.0, 12.0), (1.0, None)]
    send(warming, NOON, 50)
    assert list(warming.tick(NOON + 23_999_999)) == []
    (turned,) = warming.tick(NOON + 24_000_000)
    assert turned.after.stage == 2


def test_days_are_laid_out_by_the_caps() -> None:
    schedule = schedule_named("sendgrid-manual")
    assert lay_out({"google": 100}, [1], schedule) == [50, 50]
    assert lay_out({"google": 100}, [1, 1], schedule) == [100]
    assert lay_out({"google": 100, "nobody": 0}, [None, 1], schedule) == [100]
    # A warm source does not take over what was drawn to a young one.
    assert lay_out({"google": 400}, [None, 1], schedule, weights=[3, 1]) == [350, 50]
    assert lay_out({"google": 400}, [None, 1], schedule) == [250, 100, 50]
    assert lay_out({}, [1], schedule) == []
