"""A rehearsal: who is played, what is compared, and that planned is what is reached where limits are as planned."""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner, Result

from engine.campaign import Campaign
from engine.cli import main
from engine.commands.plan import plan
from engine.commands.rehearse import rehearse
from engine.pace.budgets import Budget, load_budgets
from engine.rehearse.cast import TAIL, cast_of, model_of
from engine.rehearse.drawing import course_of
from engine.rehearse.player import FromSource, Report
from engine.route.provider import load_providers

ROOT = Path(__file__).parents[2]
BOOK = load_providers()


def test_known_domains_go_to_their_provider_and_large_unknown_ones_stand_for_themselves() -> None:
    rows = {"gmail.com": 50, "googlemail.com": 10, "big.example": 30, "eu.big.example": 5, "small.example": 1}
    cast = cast_of(rows | {f"d{n}.example": 1 for n in range(4)}, BOOK)
    assert cast.rows == {"google": 60, "big.example": 35, TAIL: 5}
    assert len(set(cast.addresses.values())) == 3
    zone = cast.zone()
    assert zone.records["eu.big.example"]["MX"] == ["10 mx.big.example."]
    assert zone.records["small.example"]["MX"] == ["10 mx.small.example."]
    assert BOOK.of_host(zone.records["gmail.com"]["MX"][0].split()[1].rstrip(".")) == "google"
    assert cast.tail()["small.example"] == 1
    assert "small.example" in cast_of(rows, BOOK, {"small.example"}).rows


def test_a_played_provider_never_refuses_what_its_budget_allows() -> None:
    budget = Budget(connections=5, messages_per_connection=20, messages_per_hour=3600, messages_per_day=8 * 1800)
    model = model_of("one", 100, budget)
    # A day's number is spent within eight hours: half a message a second, which is less than the hour's one.
    assert model.rate_per_s == pytest.approx(0.5 * 1.1)
    assert model_of("one", 100, load_budgets().of("google")).rate_per_s is None


def test_a_course_is_drawn_from_what_the_providers_saw() -> None:
    seen = [
        {"one": Report(now_s=8.0)},
        {"one": Report(now_s=10.0, first_opened_s=10.0)},
        {
            "one": Report(
                now_s=12.0, first_opened_s=10.0, accepted=6, answers={"rate": 2}, sources={"a": FromSource(open=3)}
            )
        },
    ]
    (moment,) = course_of(seen)
    assert (moment.at_s, moment.accepted_per_s, moment.refused_per_s, moment.connections) == (2.0, 3.0, 1.0, 3)
    assert course_of([]) == []


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The sample campaign, planned."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["engine", "init"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    shutil.copy(ROOT / "sample_data" / "list.parquet", tmp_path / "campaign" / "list.parquet")
    assert run(plan, "list.parquet").exit_code == 0
    return tmp_path


def run(command, *words: str) -> Result:  # type: ignore[no-untyped-def]  # a click command
    return CliRunner().invoke(command, list(words), catch_exceptions=False)


@pytest.mark.long
def test_planned_is_what_the_rehearsal_reaches(folder: Path) -> None:
    """The sample campaign in real time: finish time per provider within 10 % of the capacity plan.

    What a busy machine was late with its handshakes is told, and is not the plan's fault.
    """
    told = msgspec.json.decode(run(rehearse, "--json").stdout)
    assert told["exit_code"] == 0
    compared = {one["provider"]: one for one in told["providers"]}
    assert sum(one["accepted"] for one in compared.values()) == 991
    long = [one for one in compared.values() if one["planned_s"] >= 8]
    assert {one["provider"] for one in long} == {"bigmail.example", "hooli.example", "postbox.example"}
    for one in long:
        assert one["reached_s"] - one["late_s"] == pytest.approx(one["planned_s"], rel=0.10), one["provider"]
        assert one["most_connections"] == 10
        assert not one["refused"]
    assert not (folder / "campaign" / "logs").exists() or not list(Campaign(folder / "campaign").log_files())


@pytest.mark.long
def test_a_sample_in_compressed_time_draws_its_picture(folder: Path) -> None:
    pytest.importorskip("altair")
    said = run(rehearse, "--sample", "200", "--speed", "2", "--picture", "course.svg")
    assert said.exit_code == 0
    assert "bigmail.example" in said.stdout
    drawn = (folder / "course.svg").read_text()
    assert "seconds" in drawn
    assert ", time x 2" in drawn
