"""The two numbers, and the classical arithmetic: 100 million in a day from five machines."""

from __future__ import annotations

import math
import time

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from engine.accepting import connections_take_s
from engine.capacity import DAY_S, OurRate, capacity
from engine.commands.capacity import capacity_command
from engine.errors import EngineError
from engine.pace.allowance import Purse
from engine.pace.budgets import BudgetFile, Budgets, Section, Source, load_budgets
from engine.rehearse.course import Course
from engine.rehearse.models import Model, World
from engine.rehearse.simulate import simulate
from engine.warmup import WarmupInTheFuture, schedule_named

CLASSICAL = {"google": 45_000_000, "outlook_consumer": 15_000_000, "yahoo": 12_000_000}
FIVE = OurRate(machines=5, processes=8, gigabits=1.0, per_process=500.0)


def sources(count: int, day: int | None = None) -> list[Source]:
    return [Source(f"s{n}", warmup_day=day) for n in range(count)]


def budgets(**providers: Section) -> Budgets:
    shipped = BudgetFile(default=Section(connections=10, messages_per_connection=100), provider=providers)
    return Budgets(shipped, BudgetFile())


def classical(count: int, day: int | None = None):  # type: ignore[no-untyped-def]  # its type is capacity's
    return capacity(
        CLASSICAL,
        load_budgets(),
        FIVE,
        sources=sources(count, day),
        schedule=schedule_named("sparkpost"),
        other_rows=28_000_000,
        other_domains=300_000,
    )


def test_the_classical_arithmetic() -> None:
    told = classical(5)
    assert told.rows == 100_000_000
    assert round(told.needed_per_s) == 1157
    assert round(told.needed_per_machine) == 231
    assert told.total_bytes == 2 * 10**12
    assert round(told.bytes_per_s / 1e6) == 23
    assert told.ours_per_s == 20_000
    assert told.signing_core_s / 3600 == pytest.approx(21.4, abs=0.1)


def test_a_cold_domain_cannot_and_is_told_the_days() -> None:
    told = classical(5, day=1)
    assert not told.is_possible
    assert told.eta_s is not None
    assert 20 * DAY_S < told.eta_s < 40 * DAY_S
    assert told.binding == "google: warm-up day 1"
    google = told.providers[0]
    assert google.today == 5 * int(200 * 0.45)
    assert google.today + google.spills == google.rows
    assert any("deadline of" in remedy for remedy in told.remedies)


def test_warm_sources_can_and_their_number_is_told() -> None:
    short = classical(5)
    assert not short.is_possible
    wanted = max(each.sources_needed or 0 for each in short.providers)
    enough = classical(wanted)
    assert enough.is_possible
    assert enough.remedies == ()
    assert all(each.eta_s is not None and each.eta_s <= DAY_S for each in enough.providers)
    assert not classical(wanted - 1).is_possible
    # 5 connections x 50 messages / (0.6 s + 50 x 0.5 s) = 9.77 a second and source, 843,750 a day.
    assert wanted == math.ceil(45_000_000 / 843_750)


def test_the_tightest_limit_binds_and_all_are_told() -> None:
    section = Section(connections=10, messages_per_connection=100, messages_per_minute=60, messages_per_hour=1800)
    told = capacity({"one": 3600}, budgets(one=section), OurRate(), sources=sources(2))
    one = told.providers[0]
    assert one.binding == "messages an hour"
    assert one.rate_per_s == pytest.approx(1.0)
    # 1,800 from each source, one every two seconds: 1,799 waits behind the first, which takes 0.6 + 0.5 s.
    assert one.eta_s == pytest.approx(1799 * 2 + 1.1)
    assert {bind.name for bind in one.limits} == {"connections", "messages a minute", "messages an hour"}


def test_a_daily_cap_spills_into_tomorrow() -> None:
    told = capacity({"one": 250}, budgets(one=Section(messages_per_day=100)), OurRate(), sources=sources(1))
    one = told.providers[0]
    assert (one.today, one.spills, one.days) == (100, 150, 3)
    assert one.eta_s is not None
    # The third day's fifty go at the pace of a day's hundred in eight hours, as the ledger spends them.
    assert one.eta_s == pytest.approx(2 * DAY_S + 4 * 3600, abs=600)
    assert one.by_deadline == 100
    assert one.sources_needed == 3


def test_connections_that_open_one_by_one_cost_a_start() -> None:
    # Ten connections, one every 0.6 s: on the average each comes 2.7 s late.
    section = Section(connections=10, messages_per_connection=100, connections_per_minute=100)
    one = capacity({"one": 332}, budgets(one=section), OurRate(), sources=sources(1)).providers[0]
    assert one.eta_s == pytest.approx(2.7 + 0.6 + 33.2 * 0.5 + 0.25)
    # Three rows are done before more than three connections could open.
    few = capacity({"one": 3}, budgets(one=section), OurRate(), sources=sources(1)).providers[0]
    assert few.eta_s == pytest.approx(0.3 + 0.6 + 1.5 * 0.5 + 0.25)
    assert capacity({"one": 1}, budgets(one=section), OurRate(), sources=sources(1)).eta_s == pytest.approx(1.1)


@given(st.integers(1, 400), st.integers(1, 12), st.integers(1, 30), st.sampled_from([0.0, 0.1, 0.6, 2.0]))
def test_the_start_is_what_connections_told_one_by_one_would_need(
    rows: int, most: int, each: int, gap_s: float
) -> None:
    """Against a loop that hands the next row to whichever connection is free first."""
    free = [number * gap_s + 0.6 for number in range(most)]
    had = [0] * most
    done_at = 0.0
    for _ in range(rows):
        place = min(range(most), key=lambda n: free[n])
        free[place] += 0.5
        done_at = max(done_at, free[place])
        had[place] += 1
        if had[place] % each == 0:
            free[place] += 0.6
    assert connections_take_s(rows, most, each, 0.6, 0.5, gap_s) == pytest.approx(done_at, rel=0.12, abs=1.2)


def test_the_slowest_source_says_when_a_provider_is_done() -> None:
    """Rows are drawn to sources by weight: a warm one does not take over what was drawn to a young one."""
    both = [Source("old", weight=3), Source("young", weight=1, warmup_day=1)]
    told = capacity({"one": 4000}, budgets(), OurRate(), sources=both, schedule=schedule_named("sparkpost"))
    one = told.providers[0]
    # Day 1 lets the young one send 200 of its thousand, day 2 five hundred, day 3 the rest.
    assert (one.today, one.days, one.binding) == (3200, 3, "warm-up day 1")
    idle = capacity({"one": 10}, budgets(), OurRate(), sources=[Source("off", weight=0), Source("on")])
    assert idle.providers[0].sources == 1


def test_an_account_is_as_young_as_its_youngest_source() -> None:
    section = Section(scope="campaign", connections=5, messages_per_connection=100)
    mixed = [Source("old"), Source("young", warmup_day=1), Source("older", warmup_day=9)]
    told = capacity(
        {"relay": 300}, budgets(relay=section), OurRate(), sources=mixed, schedule=schedule_named("sparkpost")
    )
    assert told.providers[0].today == 200


@pytest.mark.parametrize("section", [Section(messages_per_day=400), Section(messages_per_minute=120)])
def test_a_rate_is_planned_as_the_ledger_spends_it(section: Section) -> None:
    written = budgets(one=section)
    planned = capacity({"one": 300}, written, OurRate(), sources=sources(1), connect_s=0.0, message_s=0.01).eta_s
    purse, sent, now = Purse(written.of("one").limit().rates, 0.0), 0, 0.0
    while sent < 300:
        may = purse.available(now)
        if may:
            purse.give(1, may, now)
            purse.spent(1, may, now, now)
            sent += may
        else:
            now = purse.next_at(now)
    assert planned == pytest.approx(now, rel=0.1)


def test_an_account_limit_is_shared_and_no_source_helps() -> None:
    section = Section(scope="campaign", messages_per_hour=100)
    told = capacity({"relay": 10_000}, budgets(relay=section), OurRate(), sources=sources(4))
    assert told.providers[0].sources == 1
    assert told.providers[0].sources_needed is None
    assert any("no number of sources" in remedy for remedy in told.remedies)


def test_our_own_side_may_be_the_limit() -> None:
    told = capacity({"one": 100_000}, budgets(), OurRate(per_process=1.0), deadline_s=3600.0)
    assert told.binding == "our own rate"
    assert not told.is_possible
    assert any("28 times" in remedy or "27.8 times" in remedy for remedy in told.remedies)
    line = capacity({"one": 100}, budgets(), OurRate(gigabits=0.001, per_process=1e6), message_bytes=1_000_000)
    assert line.ours_binding == "the line"


def test_bad_input_is_answered_not_crashed_on() -> None:
    empty = capacity({}, budgets(), OurRate())
    assert empty.rows == 0
    assert empty.is_possible
    assert capacity({"one": 0, "two": 5}, budgets(), OurRate()).providers[0].provider == "two"
    assert capacity({"never-heard-of.example": 5}, load_budgets(), OurRate()).is_possible
    with pytest.raises(WarmupInTheFuture):
        capacity({"one": 5}, budgets(), OurRate(), sources=sources(1, day=-3), schedule=schedule_named("sparkpost"))
    slow = capacity({"one": 10**9}, budgets(one=Section(messages_per_day=1)), OurRate())
    assert slow.eta_s is None
    assert not slow.is_possible


def test_a_hundred_million_with_ten_thousand_providers_in_under_five_seconds() -> None:
    rows = CLASSICAL | {f"d{n}.example": 100_000_000 // (n + 3_000) for n in range(10_000)}
    started = time.process_time()
    capacity(rows, load_budgets(), FIVE, sources=sources(5, day=3), schedule=schedule_named("sparkpost"))
    assert time.process_time() - started < 5


def test_planned_is_what_the_simulation_reaches() -> None:
    """Finish time per provider within 10 % where limits are as planned."""
    sections = {
        "a": Section(connections=4, messages_per_connection=20),
        "b": Section(connections=10, messages_per_connection=100, messages_per_minute=90),
    }
    rows = {"a": 9000, "b": 6000}
    told = capacity(rows, budgets(**sections), OurRate(), sources=sources(1))
    world = World(
        "as planned",
        (
            Model(name="a", share=60, connections=4, messages_per_connection=20, connect_s=0.6, message_s=0.5),
            Model(name="b", share=40, rate_per_s=1.5, budget_rate_per_s=1.5, connect_s=0.6, message_s=0.5),
        ),
    )
    played = simulate(Course(world=world, rows=15_000, machines=1, workers=4))
    for planned in told.providers:
        reached = next(p.finished_s for p in played.providers if p.name == planned.provider)
        assert planned.eta_s == pytest.approx(reached, rel=0.10)


def test_the_command_prints_both_numbers_and_json(tmp_path) -> None:  # type: ignore[no-untyped-def]  # pytest's
    where = ["--campaign", str(tmp_path)]
    asked = ["--rows", "100000000", "--share", "google=45", "--machines", "5", "--processes", "8", "--sources", "5"]
    out = CliRunner().invoke(capacity_command, [*where, *asked], catch_exceptions=False).output
    assert "1,157/s, / 5 machines = 231/s each" in out
    assert "2.00 TB" in out
    assert "not possible" in out
    raw = CliRunner().invoke(capacity_command, [*where, *asked, "--json"], catch_exceptions=False).output
    assert '"is_possible":false' in raw
    refused = CliRunner().invoke(capacity_command, [*where, "--rows", "5", "--share", "google=120"])
    assert refused.exit_code == 2
    nothing = CliRunner().invoke(capacity_command, where)
    assert isinstance(nothing.exception, EngineError)
