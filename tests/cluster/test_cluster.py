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
