"""Two zones, one open and one asleep: `engine send` writes to nobody outside their own hours, and says until when."""

from __future__ import annotations

import subprocess
import time
from datetime import UTC, datetime, timedelta

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.campaign.conftest import Operator

HERE, FAR = "UTC", "Etc/GMT-6"  # six hours ahead of UTC, all year


def hours_around_now() -> str:
    """An hour before to two hours after now, by clocks of UTC: closed for who is six hours ahead."""
    now = datetime.now(UTC)
    return f"{now - timedelta(hours=1):%H:%M}-{now + timedelta(hours=2):%H:%M}"


def begin(operator: Operator, zones: list[str | None]) -> subprocess.CompletedProcess[str]:
    operator.begin([f"r{n}@example.com" for n in range(len(zones))], plan=False)
    file = operator.campaign / "list.parquet"
    table = pq.read_table(file).append_column("timezone", pa.array(zones, pa.string()))
    pq.write_table(table, file, row_group_size=100)
    operator.set("list.zone_column", "timezone")
    with (operator.campaign / "campaign.toml").open("a") as toml:
        toml.write(f'\n[schedule]\nhours = "{hours_around_now()}"\n')
    return operator.run("plan", "list.parquet")


@pytest.mark.long
def test_rows_wait_for_their_own_hours_without_an_attempt(operator: Operator) -> None:
    planned = begin(operator, [FAR if n % 2 else HERE for n in range(400)])
    assert "2 zones in the sample" in planned.stdout
    assert f"{FAR} 50.0 %" in planned.stdout
    ended = operator.run("send", "--max-wait", "0", code=3)
    assert "waiting_for_hours rows=200 until=" in ended.stderr
    assert "200 rows wait for the sending hours of their zones, the first until" in ended.stderr
    assert f"({FAR})" in ended.stderr
    assert operator.received().recipients == 200
    assert operator.outcomes(code=3) == {"accepted": 200, "unsent": 200}
    rows = operator.rows()
    assert {(row["row"] % 2, row["outcome"], row["attempts"]) for row in rows} == {  # type: ignore[operator]
        (0, "accepted", 1),
        (1, "unsent", 0),
    }
    # Where nobody waits any more it ends, and nobody got two.
    operator.set("schedule.hours", "00:00-24:00")
    operator.run("send")
    assert operator.outcomes() == {"accepted": 400}
    assert operator.received().twice == ()


@pytest.mark.long
def test_a_waiting_sender_goes_on_when_the_hours_open(operator: Operator) -> None:
    begin(operator, [FAR if n < 150 else HERE for n in range(300)])
    sender = operator.start("send", "--processes", "2")
    operator.until_received(150)
    time.sleep(1.0)  # it would have gone on
    assert sender.poll() is None
    assert operator.sink.counts().messages == 150
    assert "150 rows wait for the sending hours of their zones" in operator.run("status").stdout
    operator.set("schedule.hours", "00:00-24:00")
    _, err = sender.communicate(timeout=30)
    assert sender.returncode == 0, err
    assert operator.outcomes() == {"accepted": 300}


@pytest.mark.slow
def test_rows_without_a_zone_follow_the_campaigns_and_are_told(operator: Operator) -> None:
    planned = begin(operator, [HERE, None, "", "Atlantis/Capital", "utc", FAR])
    assert "2 rows of the sample have no zone; they follow UTC" in planned.stderr
    assert "1 rows of the sample have what is no IANA zone ('Atlantis/Capital'); they follow UTC" in planned.stderr
    ended = operator.run("send", "--max-wait", "0", code=3)
    assert "2 rows had no zone and 1 what is no IANA zone" in ended.stderr
    assert operator.outcomes(code=3) == {"accepted": 5, "unsent": 1}


def test_a_zone_column_that_the_list_lacks_is_found_by_plan(operator: Operator) -> None:
    operator.begin(["ann@example.com"], plan=False)
    operator.set("list.zone_column", "tz")
    assert "'tz'" in operator.run("plan", "list.parquet", code=21).stderr


def test_hours_that_are_none_are_found_by_plan(operator: Operator) -> None:
    operator.begin(["ann@example.com"], plan=False)
    with (operator.campaign / "campaign.toml").open("a") as toml:
        toml.write('\n[schedule]\nzone = "Berlin"\n')
    assert "Berlin" in operator.run("plan", "list.parquet", code=20).stderr
