"""A failover that forgot the last commits: stop, tell again what the logs know, hold the rest."""

from __future__ import annotations

import os
import signal
import time

import psycopg
import pytest

from tests.cluster.conftest import Machines

pytestmark = pytest.mark.postgres


@pytest.mark.slow
def test_a_server_that_forgot_is_told_again_and_nobody_gets_two(machines: Machines) -> None:
    machines.plan_for([f"person{n}@example.com" for n in range(900)], 1, messages_per_second=150)
    sender = machines.send_on(0)
    machines.until_received(300)
    _fail_over(machines)
    _, err = sender.communicate(timeout=60)
    assert sender.returncode == 75, err
    assert "confirm-failover" in err
    again = machines.send_on(0)
    _, err = again.communicate(timeout=60)
    assert again.returncode == 75, err
    machines.run("machines", "--confirm-failover", "--control", machines.url)
    again = machines.send_on(0)
    _, err = again.communicate(timeout=60)
    assert again.returncode in (0, 4), err
    outcomes = machines.merged(1, code=None)
    assert machines.received().twice == ()
    assert outcomes["accepted"] + outcomes.get("in_doubt", 0) == 900
    assert outcomes.get("in_doubt", 0) <= 2 * 500


@pytest.mark.slow
def test_a_sender_that_was_killed_before_the_failover_tells_when_it_starts_again(machines: Machines) -> None:
    machines.plan_for([f"person{n}@example.com" for n in range(600)], 1, messages_per_second=150)
    sender = machines.send_on(0)
    machines.until_received(200)
    os.killpg(sender.pid, signal.SIGKILL)
    sender.communicate(timeout=30)
    _fail_over(machines)
    machines.run("machines", "--confirm-failover", "--control", machines.url)
    again = machines.send_on(0)
    _, err = again.communicate(timeout=60)
    assert again.returncode in (0, 4), err
    assert "told it again of" in err
    assert machines.received().twice == ()
    outcomes = machines.merged(1, code=None)
    assert outcomes["accepted"] + outcomes.get("in_doubt", 0) == 600
    assert outcomes.get("in_doubt", 0) <= 2 * 500
    third = machines.send_on(0)
    _, err = third.communicate(timeout=60)
    assert "told it again of" not in err


def _fail_over(machines: Machines) -> None:
    """As a standby that was behind: the last windows are gone, and it is another server."""
    schema = "rowpost_" + machines.url.rpartition("=")[2].replace("-", "$2d")
    with psycopg.connect(machines.server.url) as db:
        last = f'SELECT id FROM "{schema}".win ORDER BY at_us DESC LIMIT 100'
        db.execute(f'DELETE FROM "{schema}".win WHERE id IN ({last})'.encode())
        db.execute(f"UPDATE \"{schema}\".campaign SET server = 'old/00000001'".encode())
    _cut_connections(machines)


def _cut_connections(machines: Machines) -> None:
    machines.server.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'rowpost'")
    time.sleep(0.5)
