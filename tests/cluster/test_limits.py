"""Limits of the campaign over several real supervisors: the receiver counts."""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import pytest

from engine.rehearse.counting import Times, fullest_window, share_used
from engine.rehearse.record import read_record
from engine.rehearse.running import RunningSink
from tests.campaign.conftest import Operator
from tests.cluster.conftest import Machines
from tests.cluster.test_cluster import people


def times_of(sink: RunningSink) -> Times:
    assert sink.record is not None
    return np.sort(read_record(sink.record)["time_us"].to_numpy())


def all_end(running: list[subprocess.Popen[str]]) -> None:
    for process in running:
        _, err = process.communicate(timeout=120)
        assert process.returncode == 0, err


def judge_rate(sink: RunningSink, count: int, per_s: float, *, at_least: float) -> None:
    """Never above; used from when all were there, and the window with them, until the first had nothing left.

    That 95 % and more are used is proved on a virtual clock (tests/work/test_sharing.py); here that nobody is idle.
    """
    times = times_of(sink)
    assert fullest_window(times, per_s) <= count
    second = 1_000_000
    steady = times[(times > times.min() + 12 * second) & (times < times.max() - 3 * second)]
    assert share_used(steady, count / per_s) >= at_least


@pytest.mark.long
@pytest.mark.postgres
def test_three_machines_share_a_rate_and_connections(machines: Machines) -> None:
    # With a fraction: at most 605 in any ten seconds.
    machines.plan_for(people(1700), 3, messages_per_second=60.5, connections=4)
    all_end([machines.send_on(number) for number in range(3)])
    assert machines.sink.counts().peak_open <= 4
    judge_rate(
        machines.sink, 605, 10.0, at_least=0.7
    )  # how much is used without a machine in the way: tests/work/test_sharing.py
    assert machines.merged(3) == {"accepted": 1700}
    assert machines.received().twice == ()


@pytest.mark.long
@pytest.mark.postgres
def test_one_connection_for_three_machines(machines: Machines) -> None:
    machines.plan_for(people(600), 3, connections=1, messages_per_second=60)
    all_end([machines.send_on(number) for number in range(3)])
    assert machines.sink.counts().peak_open == 1
    assert fullest_window(times_of(machines.sink), 1.0) <= 60
    assert machines.merged(3) == {"accepted": 600}


@pytest.mark.long
@pytest.mark.postgres
def test_what_a_lost_machine_held_is_not_given_to_others_too_early(machines: Machines) -> None:
    machines.plan_for(people(2400), 2, messages_per_second=100, connections=6)
    first, second = (machines.send_on(number) for number in range(2))
    machines.until_received(600)
    machines.lose(0, first)
    again = machines.send_on(0)
    for process in (again, second):
        _, err = process.communicate(timeout=120)
        assert process.returncode in (0, 3), err
    assert machines.sink.counts().peak_open <= 6
    assert fullest_window(times_of(machines.sink), 1.0) <= 100
    assert machines.received().twice == ()


@pytest.mark.long
def test_two_senders_on_one_host_share_the_limits_by_sqlite(tmp_path: Path, cluster_sink: RunningSink) -> None:
    operator = Operator(tmp_path, cluster_sink)
    operator.begin([f"person{n}@example.com" for n in range(1100)], plan=False, messages_per_second=40.5, connections=3)
    operator.run("plan", "list.parquet", "--partitions", "2")
    all_end([operator.start("send", "--partition", str(n), "--processes", "2") for n in range(2)])
    assert operator.sink.counts().peak_open <= 3
    judge_rate(operator.sink, 405, 10.0, at_least=0.7)
    assert operator.outcomes() == {"accepted": 1100}
