"""Machines that share a store obey each other's suppressions within seconds."""

from __future__ import annotations

import time

import pytest

from engine.lists.suppressions import Suppressions
from tests.cluster.conftest import Machines

pytestmark = [pytest.mark.postgres, pytest.mark.long]


def test_a_refusal_on_one_machine_and_an_operators_word_reach_the_other(machines: Machines) -> None:
    people = [f"person{n}@example.com" for n in range(1500)]
    machines.plan_for([*people, "550@example.com"], 2, messages_per_second=60)
    first, second = machines.send_on(0), machines.send_on(1)
    machines.until_received(60)
    # A third machine, that sends nothing: the last rows of both partitions must not be sent.
    last = [f"person{n}@example.com" for n in (748, 749, 750, 1498, 1499)]
    elsewhere = str(machines.folder / "elsewhere")
    machines.run("suppress", "add", *last, "--folder", elsewhere, "--control", machines.url)

    def both_know(address: str) -> bool:
        folders = [machines.machine(number) / "suppression" for number in range(2)]
        return all(Suppressions(folder, list_id=None).check([address])[0] for folder in folders)

    began = time.monotonic()
    while not both_know(last[0]):
        assert time.monotonic() - began < 20, "an addition did not reach the machines"
        time.sleep(0.1)
    for process in (first, second):
        _, err = process.communicate(timeout=90)
        assert process.returncode == 0, err
    outcomes = machines.merged(2)
    assert outcomes["suppressed"] >= 2, outcomes  # the rows that nobody had in hand yet
    assert outcomes["bounced"] == 1
    machines.run("suppress", "sync", "--folder", elsewhere, "--control", machines.url)
    assert Suppressions(machines.folder / "elsewhere", list_id=None).check(["550@example.com"]).all()
