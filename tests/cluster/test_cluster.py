"""Machines that know a store's URL and their partition alone; some are lost with their disks."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest

from benchmarks.cluster import run_kill
from tests.cluster.conftest import Machines

pytestmark = pytest.mark.postgres


def people(count: int) -> list[str | None]:
    return [f"person{n}@example.com" for n in range(count)]


@pytest.mark.slow
def test_two_machines_send_their_partitions(machines: Machines) -> None:
    machines.plan_for([*people(600), "550@example.com", "451-once@example.com", None], 2)
    running = [machines.send_on(number) for number in range(2)]
    for process in running:
        _, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
    assert machines.merged(2) == {"accepted": 601, "bounced": 1, "invalid": 1}
    assert machines.received().twice == ()


@pytest.mark.slow
def test_a_machine_lost_with_its_disk_is_replaced_and_nobody_gets_two(machines: Machines) -> None:
    machines.plan_for(people(3000), 2, messages_per_second=600)
    first = machines.send_on(0)
    second = machines.send_on(1)
    machines.until_received(500)
    machines.lose(0, first)
    again = machines.send_on(0)  # a fresh machine: URL and partition alone
    for process in (again, second):
        _, err = process.communicate(timeout=60)
        assert process.returncode in (0, 3), err
    outcomes = machines.merged(2, code=None)
    received = machines.received()
    assert received.twice == ()
    assert set(outcomes) <= {"accepted", "in_doubt"}
    assert outcomes["accepted"] <= received.recipients
    assert received.recipients <= outcomes["accepted"] + outcomes.get("in_doubt", 0)
    assert outcomes.get("in_doubt", 0) <= 2 * 500


@pytest.mark.slow
def test_the_operators_commands(machines: Machines) -> None:
    machines.plan_for(people(1500), 2, messages_per_second=150)
    assert "campaign" in machines.run("plan", "list.parquet", "--control", machines.url, code=22).stderr
    sender = machines.send_on(0)
    machines.until_received(30)
    shown = machines.run("machines", "--control", machines.url).stdout
    assert "machine-0" in shown
    assert "sending" in shown
    assert "claimed" in machines.run("batches", "--control", machines.url).stdout
    machines.run("pause", "--control", machines.url)
    time.sleep(2.5)
    have = machines.sink.counts().messages
    time.sleep(1)
    assert machines.sink.counts().messages == have
    assert "resumed; 1" in machines.run("resume", "--control", machines.url).stdout
    machines.until_received(have + 20)
    told = machines.run("release", "--machine", "machine-0", "--control", machines.url).stdout
    assert "may still be running" in told
    _, err = sender.communicate(timeout=30)
    assert sender.returncode == 75, err
    machines.run("cancel", "--yes", "--control", machines.url)
    outcomes = machines.merged(1, code=None)
    assert set(outcomes) == {"accepted", "unsent"}
    assert machines.received().recipients == outcomes["accepted"]


@pytest.mark.slow
def test_without_the_store_its_rows_are_unknown_and_the_exit_code_says_so(machines: Machines) -> None:
    machines.plan_for(people(50), 1)
    machines.send_on(0).communicate(timeout=60)
    (machines.campaign / "control.url").unlink()
    text = (machines.campaign / "campaign.toml").read_text("utf-8")
    assert "postgresql" not in text
    folder = str(machines.machine(0))
    machines.run("merge-logs", folder, code=6)
    assert machines.merged(1) == {"accepted": 50}


@pytest.mark.slow
def test_doubt_of_a_lost_machine_is_listed_and_sent_again_by_order(machines: Machines) -> None:
    # So many connections that what the lost machine holds of them until the longest answer hinders nobody.
    wide = {"dot_timeout": "11s", "connections": 300}
    machines.plan_for([*people(200), "slow-10s+1@example.com", "slow-10s+2@example.com"], 1, **wide)
    first = machines.send_on(0)
    machines.until_received(200)
    time.sleep(1)
    machines.lose(0, first)
    again = machines.send_on(0)
    _, err = again.communicate(timeout=60)
    assert again.returncode == 0, err
    outcomes = machines.merged(1, code=4)
    assert outcomes == {"accepted": 200, "in_doubt": 2}
    assert "2 in doubt" in machines.run("doubt", "list").stderr
    assert "2 rows to be sent again" in machines.run("doubt", "resend", "--all", "--now").stdout
    machines.send_on(0).communicate(timeout=60)
    assert machines.merged(1) == {"accepted": 202}
    assert set(machines.received().twice) <= {"slow-10s+1@example.com", "slow-10s+2@example.com"}


@pytest.mark.slow
def test_killed_cut_off_stopped_restarted_and_failed_over_nobody_gets_two(machines: Machines) -> None:
    verdict = run_kill(rows=4000, machines=3, seconds=30, rate=150, seed=2, troubles=6)
    assert verdict["adds_up"]
    assert (verdict["twice"], verdict["lost"]) == (0, 0), verdict
    assert int(str(verdict["in_doubt"])) <= int(str(verdict["in_doubt_may_be"]))


@pytest.mark.slow
def test_logs_in_an_object_store_are_enough_to_merge(machines: Machines, tmp_path: Path) -> None:
    machines.plan_for(people(60), 1)
    machines.set("log.log_store", f"file://{tmp_path}/bucket")
    machines.run("plan", "list.parquet", "--control", machines.url, "--replace")
    process = machines.send_on(0)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert "logs copied" in err
    shutil.rmtree(machines.machine(0))
    assert machines.merged(0) == {"accepted": 60}
    assert len(machines.rows()) == 60
