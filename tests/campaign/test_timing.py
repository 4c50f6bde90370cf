"""Runs that wait for their hours, end at their moment, or stop by themselves."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import pytest

from engine.config import parse_settings
from engine.schedule import ScheduleError
from engine.work.progress import Progress, ProviderProgress
from engine.work.timing import schedule_of, why_stop

if TYPE_CHECKING:
    from tests.campaign.conftest import Operator

NEEDED = '[campaign]\nid = "x"\n{}[message]\nfrom_address = "a@example.com"\nsubject = "s"\n'


def hours_from_now(first: float, last: float) -> str:
    now = datetime.now(UTC)
    return "-".join(f"{now + timedelta(hours=hours):%H:%M}" for hours in (first, last))


def add(operator: Operator, tables: str) -> None:
    file = operator.campaign / "campaign.toml"
    file.write_text(file.read_text() + tables)


@pytest.mark.slow
def test_outside_the_hours_nothing_goes_and_the_run_says_until_when(operator: Operator) -> None:
    operator.begin([f"u{n}@example.com" for n in range(5)])
    add(operator, f'[schedule]\nhours = "{hours_from_now(2, 4)}"\n')
    told = operator.run("send", "--max-wait", "0", code=3)
    assert "outside the sending hours until" in told.stderr
    assert operator.received().messages == 0
    operator.set("hours", hours_from_now(-2, 2))
    operator.run("send")
    assert operator.outcomes() == {"accepted": 5}


@pytest.mark.slow
def test_a_campaign_waits_for_its_moment_and_goes_on_alone(operator: Operator) -> None:
    operator.begin(["u@example.com"], plan=False)
    moment = datetime.now(UTC) + timedelta(seconds=6)
    file = operator.campaign / "campaign.toml"
    file.write_text(file.read_text().replace("[campaign]\n", f'[campaign]\nnot_before = "{moment.isoformat()}"\n'))
    operator.run("plan", "list.parquet")
    told = operator.run("send")
    assert "not before" in told.stderr
    assert datetime.now(UTC) >= moment
    assert operator.outcomes() == {"accepted": 1}


@pytest.mark.slow
def test_an_expired_campaign_sends_nothing(operator: Operator) -> None:
    operator.begin(["u@example.com"], plan=False)
    file = operator.campaign / "campaign.toml"
    file.write_text(file.read_text().replace("[campaign]\n", '[campaign]\nexpires_at = "2020-01-01T00:00:00Z"\n'))
    operator.run("plan", "list.parquet")
    assert "expired" in operator.run("send", code=3).stderr
    assert operator.received().messages == 0


@pytest.mark.slow
def test_a_list_that_is_no_good_stops_the_run_and_pauses_the_campaign(operator: Operator) -> None:
    bad = [f"550+{n}@example.com" if n % 2 else f"u{n}@example.com" for n in range(3000)]
    operator.begin(bad, connections=1, messages_per_second=400)
    add(operator, "[stop]\nerror_share = 0.2\nafter_rows = 100\n")
    told = operator.run("send", code=None)
    assert "refused for good" in told.stderr
    assert told.returncode == 75
    assert operator.received().messages < 1400


@pytest.mark.parametrize("table", ['hours = "8 to 9"', 'zone = "Berlin"', 'hours = "08:00-09:00"\ndays = ["someday"]'])
def test_what_is_no_schedule_is_refused(table: str) -> None:
    with pytest.raises(ScheduleError):
        schedule_of(parse_settings((NEEDED.format("") + f"[schedule]\n{table}\n").encode()))


def test_a_moment_without_offset_is_one_of_the_schedules_zone() -> None:
    text = NEEDED.format('not_before = "2024-03-10T02:30"\n') + '[schedule]\nzone = "America/New_York"\n'
    with pytest.raises(ScheduleError, match="does not exist"):
        schedule_of(parse_settings(text.encode()))


def test_few_answers_prove_nothing_and_complaints_count() -> None:
    settings = parse_settings((NEEDED.format("") + "[stop]\nerror_share = 0.1\ncomplaint_share = 0.003\n").encode())
    progress = Progress(10_000, 0.0)
    progress.providers["relay"] = ProviderProgress(accepted=300, rejected=100)
    assert why_stop(settings, progress, 0) is None
    progress.providers["relay"] = ProviderProgress(accepted=950, rejected=50)
    assert why_stop(settings, progress, 3) is None
    assert "0.40%" in (why_stop(settings, progress, 4) or "")
    progress.providers["relay"] = ProviderProgress(accepted=880, rejected=120)
    assert "12.0%" in (why_stop(settings, progress, 0) or "")
