"""Machines that know a store's URL and their partition alone; some are lost with their disks."""

from __future__ import annotations

import pytest

from tests.cluster.conftest import Machines

pytestmark = pytest.mark.postgres


def people(count: int) -> list[str | None]:
    return [f"person{n}@example.com" for n in range(count)]


def test_two_machines_send_their_partitions(machines: Machines) -> None:
    machines.plan_for([*people(600), "550@example.com", "451-once@example.com", None], 2)
    running = [machines.send_on(number) for number in range(2)]
    for process in running:
        _, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
    assert machines.merged(2) == {"accepted": 601, "bounced": 1, "invalid": 1}
    assert machines.received().twice == ()


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
