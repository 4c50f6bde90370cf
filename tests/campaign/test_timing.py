"""Runs that wait for their hours, end at their moment, or stop by themselves."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pyarrow.parquet as pq
import pytest

from engine.config import StopTable, parse_settings
from engine.schedule import ScheduleError
from engine.work.timing import Evidence, StopWatch, schedule_of

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
    told = operator.run("send")
    assert "1 rows stay unsent: the campaign expired at 2020-01-01" in told.stderr
    assert operator.received().messages == 0
    assert operator.outcomes() == {"unsent": 1}


@pytest.mark.long
def test_what_is_left_when_a_campaign_expires_is_unsent_for_that_reason_and_open_no_more(operator: Operator) -> None:
    operator.begin(["451@example.com", *(f"u{n}@example.com" for n in range(400))], plan=False, messages_per_second=10)
    operator.set("plan", ["1h"])  # the deferred one waits when the end comes
    moment = datetime.now(UTC) + timedelta(seconds=20)
    operator.set("campaign.expires_at", moment.isoformat())
    operator.run("plan", "list.parquet")
    told = operator.run("send")
    assert "rows stay unsent: the campaign expired at" in told.stderr
    took = operator.received().recipients
    assert 0 < took < 400
    merged = operator.run("merge-logs")
    summary = msgspec.json.decode((operator.campaign / "report" / "summary.json").read_bytes())
    assert summary["reasons"] == {"unsent/expired": 401 - took}
    assert summary["outcomes"]["accepted"] == took
    assert f"{401 - took:,} rows stay unsent: the campaign expired" in merged.stderr
    assert {row["reason"] for row in operator.rows() if row["outcome"] == "unsent"} == {"expired"}
    operator.run("retry-list", "--out", "next.parquet")
    assert pq.read_metadata(operator.folder / "next.parquet").num_rows == 401 - took
    operator.run("retry-list", "--out", "none.parquet", "--select", "unsent/waiting")
    assert pq.read_metadata(operator.folder / "none.parquet").num_rows == 0
    assert "it expired 20" in operator.run("status").stdout
    assert "next: engine send" not in operator.run("send").stderr  # nothing to go on with
    assert operator.received().recipients == took


@pytest.mark.slow
def test_a_list_that_is_no_good_stops_the_run_and_pauses_the_campaign(operator: Operator) -> None:
    bad = [f"550+{n}@example.com" if n % 2 else f"u{n}@example.com" for n in range(3000)]
    operator.begin(bad, connections=1, messages_per_second=400)
    add(operator, "[stop]\nerror_share = 0.2\nafter_rows = 100\n")
    told = operator.run("send", code=None)
    assert "refused for good" in told.stderr
    assert told.returncode == 75
    assert operator.received().messages < 1400


@pytest.mark.long
def test_a_run_that_stopped_by_itself_goes_on_after_a_resume_and_counts_only_what_comes_then(
    operator: Operator,
) -> None:
    half = [f"552+{n}@example.com" if n % 2 else f"u{n}@example.com" for n in range(300)]
    operator.begin([*half, *(f"u{n}@example.com" for n in range(300, 600))], connections=1, messages_per_second=40)
    add(operator, "[stop]\nerror_share = 0.2\nafter_rows = 20\n")
    assert "refused for good" in operator.run("send", code=75).stderr
    assert "paused" in operator.run("status").stdout
    refused_first = operator.outcomes(code=3)["bounced"]
    assert 10 <= refused_first < 100
    operator.run("resume")
    # Still no good: it stops again, and not before there are as many answers that say so.
    operator.set("after_rows", 60)
    assert "refused for good" in operator.run("send", code=75).stderr
    refused_again = operator.outcomes(code=3)["bounced"]
    assert refused_first + 30 <= refused_again < 150
    operator.run("resume")
    operator.set("error_share", 0.9)
    operator.set("messages_per_second", 4000)
    operator.run("send")
    assert operator.outcomes() == {"accepted": 450, "bounced": 150}
    assert operator.received().twice == ()


@pytest.mark.parametrize("table", ['hours = "8 to 9"', 'zone = "Berlin"', 'hours = "08:00-09:00"\ndays = ["someday"]'])
def test_what_is_no_schedule_is_refused(table: str) -> None:
    with pytest.raises(ScheduleError):
        schedule_of(parse_settings((NEEDED.format("") + f"[schedule]\n{table}\n").encode()))


def test_a_moment_without_offset_is_one_of_the_schedules_zone() -> None:
    text = NEEDED.format('not_before = "2024-03-10T02:30"\n') + '[schedule]\nzone = "America/New_York"\n'
    with pytest.raises(ScheduleError, match="does not exist"):
        schedule_of(parse_settings(text.encode()))


def stop_table(text: str) -> StopTable:
    return parse_settings((NEEDED.format("") + f"[stop]\n{text}\n").encode()).stop


def test_few_answers_prove_nothing_and_complaints_count(tmp_path: Path) -> None:
    stop, watch = stop_table("error_share = 0.1\ncomplaint_share = 0.003"), StopWatch(tmp_path / "stopped.json")
    assert watch.why(stop, Evidence(answered=400, refused=100)) is None
    assert watch.why(stop, Evidence(answered=1000, refused=50, complaints=3)) is None
    assert "0.40%" in (watch.why(stop, Evidence(answered=1000, refused=50, complaints=4)) or "")
    assert "12.0%" in (watch.why(stop, Evidence(answered=1000, refused=120)) or "")


def test_complaints_about_rows_of_an_earlier_run_count_for_those_rows_too(tmp_path: Path) -> None:
    stop, watch = stop_table("complaint_share = 0.003"), StopWatch(tmp_path / "stopped.json")
    assert watch.why(stop, Evidence(before=100_000, answered=600, complaints=30)) is None


def test_after_a_resume_old_evidence_counts_no_more_not_even_in_the_next_run(tmp_path: Path) -> None:
    stop = stop_table("error_share = 0.1\ncomplaint_share = 0.003")
    watch = StopWatch(tmp_path / "stopped.json")
    seen = Evidence(answered=1000, refused=50, complaints=9)
    assert watch.why(stop, seen) is not None
    watch.stopped(seen)
    watch = StopWatch(tmp_path / "stopped.json")  # the run after `engine resume`
    assert watch.why(stop, Evidence(before=1000, answered=700, complaints=10)) is None
    assert watch.why(stop, Evidence(before=1000, answered=1000, complaints=13)) is not None
    # Another machine's run was only paused, and goes on.
    watch = StopWatch(tmp_path / "other.json")
    seen = Evidence(answered=1000, refused=300, complaints=9)
    assert watch.why(stop, seen) is not None
    watch.resumed(seen)
    assert watch.why(stop, Evidence(answered=1600, refused=301, complaints=9)) is None
    assert watch.why(stop, Evidence(answered=1600, refused=400, complaints=9)) is not None


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"answered": "many"}'])
def test_a_broken_memory_of_the_last_stop_is_no_reason_to_fail(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "stopped.json").write_bytes(content)
    watch = StopWatch(tmp_path / "stopped.json")
    assert watch.why(stop_table("complaint_share = 0.003"), Evidence(answered=1000, complaints=9)) is not None
