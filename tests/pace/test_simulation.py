"""The issue's numbers at a small scale: the engine's own scheduler, slots, throttle and retries on a virtual clock.

The same at full scale: `benchmarks/pace.py --full`.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from engine.commands.simulate import simulate as command
from engine.pace.retry import RetryPlan
from engine.rehearse import models
from engine.rehearse.course import Course, Told
from engine.rehearse.models import (
    Change,
    Model,
    Outage,
    World,
    WorldError,
    bound_s,
    load_world,
    rows_of,
    shipped_worlds,
)
from engine.rehearse.simulate import simulate

HOUR = 3600.0


def course(*models: Model, rows: int, **kwargs: object) -> Course:
    settings = {"machines": 1, "workers": 4, **kwargs}
    return Course(world=World("test", models), rows=rows, **settings)  # type: ignore[arg-type]  # test settings


def told_of(told: Told, name: str) -> object:
    return next(provider for provider in told.providers if provider.name == name)


def all_settled(told: Told) -> None:
    for provider in told.providers:
        outcomes = provider.accepted + provider.bounced + provider.refused + provider.expired
        assert outcomes == provider.rows, provider.name


def hidden(**kwargs: object) -> Model:
    """One provider whose limit nobody told us: 1 a second, then 0.6, 1.4, 0.8."""
    changes = (Change(at=0.25, rate=0.6), Change(at=0.5, rate=1.4), Change(at=0.75, rate=0.8))
    settings = {
        "name": "hidden",
        "share": 1.0,
        "message_s": 3.0,
        "connections": 20,
        "rate_per_s": 1.0,
        "changes": changes,
        "greylist_share": 0.1,
        **kwargs,
    }
    return Model(**settings)  # type: ignore[arg-type]  # test settings


def test_with_limits_as_budgeted_the_duration_is_the_bound() -> None:
    world = load_world("even")
    told = simulate(Course(world=world, rows=6000, machines=1, workers=4))
    assert told.ratio <= 1.02
    assert told.limited_share == 0.0
    all_settled(told)


@pytest.mark.slow
def test_hidden_limits_are_found_and_followed_and_the_classic_rule_is_behind() -> None:
    rows = 22_000
    told = simulate(course(hidden(), rows=rows, workers=3))
    assert told.bound_s >= 6 * HOUR
    assert told.ratio <= 1.15
    assert told.limited_share < 0.05
    all_settled(told)
    classic = simulate(course(hidden(), rows=rows, workers=3, throttle="classic"))
    assert classic.ratio > told.ratio
    all_settled(classic)


def test_the_same_seed_is_the_same_campaign() -> None:
    def ran() -> list[tuple[str, float, int]]:
        told = simulate(course(hidden(), rows=1500, seed=7))
        return [(p.name, p.finished_s, p.attempts) for p in told.providers]

    assert ran() == ran()


@pytest.mark.slow
def test_a_provider_that_blocks_everything_for_an_hour_holds_up_nobody() -> None:
    steady = [Model(name=f"steady-{n}", share=1, rate_per_s=1, budget_rate_per_s=1, connections=8) for n in range(3)]
    blocked = Model(name="blocked", share=1, rate_per_s=1, budget_rate_per_s=1, connections=8)
    outage = (Outage("block", 600.0, 600.0 + HOUR),)
    rows = 12_000
    before = simulate(course(*steady, blocked, rows=rows))
    after = simulate(course(*steady, msgspec.structs.replace(blocked, outages=outage), rows=rows))
    for name in ("steady-0", "steady-1", "steady-2"):
        was, is_ = (next(p.finished_s for p in told.providers if p.name == name) for told in (before, after))
        assert is_ == pytest.approx(was, abs=2.0), "to the second"
    late = next(p for p in after.providers if p.name == "blocked")
    assert late.finished_s >= 4 * 900
    assert late.finished_s <= late.bound_s * 1.15 + 700, "and it is back soon after the block"
    assert late.limited < 200
    all_settled(after)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["refuse", "reject", "silent", "slow"])
def test_other_outages_end_well_too(kind: str) -> None:
    outage = Outage(kind, 100.0, 1000.0)  # type: ignore[arg-type]  # one of the kinds
    model = Model(name="one", share=1, rate_per_s=2, budget_rate_per_s=2, connections=4, outages=(outage,))
    other = Model(name="other", share=1, rate_per_s=2, budget_rate_per_s=2, connections=4)
    told = simulate(course(model, other, rows=4000))
    all_settled(told)
    assert next(p.finished_s for p in told.providers if p.name == "other") < 1030
    assert next(p.finished_s for p in told.providers if p.name == "one") < 3500
    if kind == "reject":
        assert 0 < told.providers[0].refused < 300, "the list is not burnt on a policy refusal"


def test_greylisted_rows_come_again_after_the_wait_they_were_told() -> None:
    model = Model(name="one", share=1, greylist_share=1.0, greylist_s=300.0)
    told = simulate(course(model, rows=200))
    assert told.providers[0].attempts == 400
    assert told.providers[0].accepted == 200
    assert told.duration_s < 400


def test_rows_that_are_always_greylisted_expire_by_clock() -> None:
    model = Model(name="one", share=1, greylist_share=1.0, greylist_s=1e9, greylist_reply="451 later")
    told = simulate(course(model, rows=50, retry=RetryPlan(max_age_s=2 * HOUR)))
    assert told.providers[0].expired == 50
    assert told.duration_s <= 2 * HOUR + 60


def test_one_provider_is_the_whole_list_and_every_row_its_own_domain() -> None:
    one = simulate(course(Model(name="one", share=1, rate_per_s=5, budget_rate_per_s=5), rows=3000))
    assert one.ratio <= 1.02
    tail = simulate(course(Model(name="tail", share=1, domains=3000, connections=1), rows=3000))
    all_settled(tail)
    assert tail.duration_s < 60


def test_a_provider_that_takes_nothing_holds_up_nobody() -> None:
    nothing = Model(name="nothing", share=1, connections=0)
    some = Model(name="some", share=1, rate_per_s=5, budget_rate_per_s=5)
    told = simulate(course(nothing, some, rows=2000, give_up_s=HOUR))
    assert next(p.finished_s for p in told.providers if p.name == "some") < 206
    assert next(p.accepted for p in told.providers if p.name == "nothing") == 0
    assert told.bound_s == float("inf")


def test_a_limit_of_no_messages_ends_by_clock() -> None:
    shut = Model(name="shut", share=1, rate_per_s=0.0, burst_s=0.0, connections=4)
    some = Model(name="some", share=1, rate_per_s=5, budget_rate_per_s=5)
    told = simulate(course(shut, some, rows=400, give_up_s=2 * HOUR))
    (told_shut, told_some) = told.providers
    assert told_shut.bound_s == float("inf")
    # The bucket's first message gets through; who refuses everything is asked some twenty times, then in ten minutes.
    assert told_shut.accepted <= 1
    assert told_shut.attempts < 400
    assert told_some.finished_s < 60


def test_a_storm_of_421_is_met_with_pauses_and_costs_nobody_else_anything() -> None:
    storm = Model(name="storm", share=1, rate_per_s=4, budget_rate_per_s=4, outages=(Outage("refuse", 0.0, HOUR),))
    other = Model(name="other", share=1, rate_per_s=4, budget_rate_per_s=4)
    told = simulate(course(storm, other, rows=4000))
    all_settled(told)
    stormed, calm = told.providers
    assert stormed.connections_refused < 400, "without pauses it would be 3,600 * 10 / 0.3"
    assert stormed.finished_s <= HOUR + 500 + 900
    assert calm.finished_s < 510


@pytest.mark.long
def test_three_hundred_thousand_destinations_of_one_row_beside_a_large_one() -> None:
    tail = Model(name="tail", share=300, domains=300_000, connections=2)
    large = Model(name="large", share=3, rate_per_s=10, budget_rate_per_s=10)
    told = simulate(course(tail, large, rows=303_000, workers=8))
    all_settled(told)
    assert next(p for p in told.providers if p.name == "large").finished_s < 1.1 * 300


def test_models_and_bound_know_no_scheduler() -> None:
    """What a course is judged by must not come from what is judged."""
    source = Path(models.__file__).read_text()
    imported = {line.split()[1] for line in source.splitlines() if line.startswith(("import engine", "from engine"))}
    assert imported == {"engine.errors"}


def test_messages_per_connection_are_learnt_once() -> None:
    model = Model(name="one", share=1, messages_per_connection=20, connections=4)
    told = simulate(course(model, rows=4000))
    refused = told.providers[0].attempts - told.providers[0].accepted
    assert refused <= 8, "each connection open at the time may learn it by itself"
    assert told.ratio <= 1.1


def test_after_a_block_the_rate_is_what_it_was_before() -> None:
    block = (Outage("block", 1800.0, 3600.0),)
    told = simulate(course(hidden(rate_per_s=2.0, changes=(), outages=block, greylist_share=0.0), rows=10_000))
    late = [s for s in told.samples if s.minute == 75]
    assert late[0].accepted >= 0.9 * 120


def test_a_connection_limit_that_drops_and_returns() -> None:
    changes = (Change(at_s=1000.0, connections=2), Change(at_s=3000.0, connections=8))
    told = simulate(course(Model(name="one", share=1, message_s=2.0, connections=8, changes=changes), rows=16_000))
    assert 1.0 <= told.ratio <= 1.25
    all_settled(told)


def test_no_course_is_quicker_than_its_bound() -> None:
    for name in shipped_worlds():
        told = simulate(Course(world=load_world(name), rows=5000, machines=1, workers=2))
        assert all(p.finished_s >= p.bound_s * 0.999 for p in told.providers if p.bound_s > 60), name


def test_a_reputation_that_falls_with_pressure_is_kept() -> None:
    told = simulate(course(hidden(reputation_cost=0.002, changes=(), greylist_share=0.0), rows=8000))
    assert told.ratio < 1.2
    all_settled(told)


@pytest.mark.slow
def test_documented_blocks_are_obeyed_and_rare() -> None:
    strict = hidden(pressure_share=0.3, pressure_least=50, pause_s=600.0, then_connections=1)
    told = simulate(course(strict, rows=22_000, workers=3))
    assert told.ratio <= 1.2
    assert told.limited_share < 0.05


def test_the_bound_is_arithmetic() -> None:
    model = Model(name="one", rate_per_s=10.0, burst_s=0.0)
    assert bound_s(model, 3601, 1) == pytest.approx(360, abs=1)
    assert bound_s(model, 36001, 5) == pytest.approx(720, abs=1)
    carried = Model(name="one", connections=2, messages_per_connection=100, connect_s=0.6, message_s=0.5)
    assert bound_s(carried, 1000, 1) == pytest.approx(1000 * 50.6 / 200)
    outage = msgspec.structs.replace(model, outages=(Outage("block", 100.0, 400.0),))
    assert bound_s(outage, 3601, 1) == pytest.approx(660, abs=1)
    halved = msgspec.structs.replace(model, changes=(Change(at_s=100.0, rate=0.5),))
    assert bound_s(halved, 3601, 1) == pytest.approx(100 + 520, abs=1)
    assert bound_s(model, 0, 1) == 0.0
    assert bound_s(Model(name="shut", rate_per_s=0.0, burst_s=0.0), 10, 1) == float("inf")


def test_shares_add_up_to_all_rows() -> None:
    for name in shipped_worlds():
        world = load_world(name)
        assert sum(rows_of(world, 9973).values()) == 9973


@pytest.mark.long
@pytest.mark.parametrize("seed", [11, 12])
def test_hidden_limits_in_the_shipped_world(seed: int) -> None:
    told = simulate(Course(world=load_world("hidden"), rows=200_000, machines=1, workers=8, seed=seed))
    assert told.ratio <= 1.15
    assert told.limited_share < 0.05


def test_the_command_prints_a_table_and_draws_a_picture(tmp_path: Path) -> None:
    svg, minutes = tmp_path / "p.svg", tmp_path / "m.csv"
    asked = ["--world", "drop", "--rows", "2000", "--picture", str(svg), "--minutes", str(minutes), "--events"]
    out = CliRunner().invoke(command, asked, catch_exceptions=False)
    assert "steady" in out.output
    assert "of bound" in out.output
    assert svg.read_text().count("<polyline") == 12
    assert minutes.read_text().startswith("minute,provider,accepted,limited")
    unknown = CliRunner().invoke(command, ["--world", "nowhere"])
    assert isinstance(unknown.exception, WorldError)
    wrong = tmp_path / "w.toml"
    wrong.write_text('title = "x"\n[[provider]]\nname = "a"\nspeed = 3\n')
    assert isinstance(CliRunner().invoke(command, ["--world", str(wrong)]).exception, WorldError)
