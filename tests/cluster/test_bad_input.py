"""What operators and machines get wrong, and what must come of it."""

from __future__ import annotations

import os
import subprocess
import time

import pyarrow.parquet as pq
import pytest

from engine.clock import SystemClock
from engine.config import RetryTable
from tests.cluster.conftest import Machines
from tests.cluster.test_cluster import people
from tests.control.postgres_server import PostgresServer

pytestmark = pytest.mark.postgres


def ended(process: subprocess.Popen[str], *codes: int) -> str:
    out, err = process.communicate(timeout=90)
    assert process.returncode in codes, err
    return out + err


@pytest.mark.slow
def test_a_wrong_password_is_never_printed(machines: Machines, cluster_server: PostgresServer) -> None:
    machines.plan_for(people(1), 1)
    url = machines.url.replace("rowpost@", "nobody-here:s3cret@")
    folder = ("--campaign", str(machines.machine(7)))
    for code, words in (
        (20, ("machines", *folder, "--control", url)),
        (20, ("send", *folder, "--partition", "0", "--control", url)),
        (6, ("merge-logs", "--control", url)),
    ):
        told = machines.run(*words, code=code)
        assert "nobody-here" in told.stderr
        assert "s3cret" not in told.stdout + told.stderr
    assert not machines.machine(7).exists() or not list(machines.machine(7).rglob("control.url"))


def test_a_plan_of_another_list_is_refused(machines: Machines) -> None:
    machines.plan_for(people(30), 1)
    ours = (machines.campaign / "plan.json").read_bytes()
    whole = pq.read_table(machines.campaign / "list.parquet")
    pq.write_table(whole.slice(1), machines.campaign / "list.parquet", row_group_size=100)
    machines.run("plan", "list.parquet", "--control", machines.url, "--replace")
    (machines.campaign / "plan.json").write_bytes(ours)  # the folder's plan is of other rows than the store's now
    told = machines.run("send", "--partition", "0", "--control", machines.url, code=22)
    assert "not the one that the store" in told.stderr
    assert machines.sink.counts().messages == 0


@pytest.mark.long
def test_a_full_disk_of_the_store_stops_attempts_until_there_is_room(machines: Machines) -> None:
    machines.plan_for(people(600), 1, messages_per_second=100)
    sender = machines.send_on(0)
    machines.until_received(50)
    schema = "rowpost_" + machines.url.rpartition("=")[2].replace("-", "$2d")
    full = "RAISE EXCEPTION 'could not extend file: no space left on device' USING ERRCODE = '53100'"
    machines.server.execute(
        f'CREATE FUNCTION "{schema}".full_disk() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN {full}; END $$'
    )
    machines.server.execute(
        f'CREATE TRIGGER full_disk BEFORE INSERT ON "{schema}".win EXECUTE FUNCTION "{schema}".full_disk()'
    )
    time.sleep(2)
    have = machines.sink.counts().messages
    time.sleep(1)
    assert machines.sink.counts().messages == have, "nothing is sent without a record"
    machines.server.execute(f'DROP TRIGGER full_disk ON "{schema}".win')
    said = ended(sender, 0)
    assert "its disk is full" in said
    assert "store_back" in said
    assert machines.merged(1) == {"accepted": 600}
    assert machines.received().twice == ()


@pytest.mark.long
def test_two_machines_with_the_same_partition_and_name(machines: Machines) -> None:
    machines.plan_for(people(1500), 1, messages_per_second=150)
    same = ("--partition", "0", "--control", machines.url, "--name", "twin", "--processes", "2")
    twins = [machines.start("send", *same, "--campaign", str(machines.machine(n))) for n in range(2)]
    for process in twins:
        ended(process, 0)
    assert machines.merged(2) == {"accepted": 1500}
    assert machines.received().twice == ()


@pytest.mark.long
def test_a_campaign_cancelled_while_windows_are_open(machines: Machines) -> None:
    slow = [f"slow-3s+{n}@example.com" for n in range(4)]
    machines.plan_for([*slow, *people(2000)], 1, messages_per_second=100)
    sender = machines.send_on(0)
    machines.until_received(40)
    machines.run("cancel", "--yes", "--control", machines.url)
    ended(sender, 0, 75)  # by the word itself, or by the lease that ended with it
    outcomes = machines.merged(1, code=None)
    # What was in windows was finished and reported, though the lease was gone; nothing else went out.
    assert set(outcomes) == {"accepted", "unsent"}
    assert machines.received().recipients == outcomes["accepted"] < 1500
    ended(machines.send_on(0), 0)
    assert machines.received().recipients == outcomes["accepted"], "cancelled stays cancelled"


@pytest.mark.long
def test_a_machine_whose_clock_is_an_hour_ahead(machines: Machines) -> None:
    """Retries are kept in the store's time: a successor with the right clock neither hurries nor waits an hour."""
    machines.plan_for([*people(300), *[f"451-once+{n}@example.com" for n in range(20)]], 1, messages_per_second=100)
    machines.set("plan", ["3s"])
    machines.run("plan", "list.parquet", "--control", machines.url, "--replace")
    site = machines.folder / "clock"
    site.mkdir()
    # The clock of every process of that machine: its wall time alone is wrong.
    (site / "sitecustomize.py").write_text(
        "import engine.clock as c\n"
        "right = c.SystemClock.wall_us\n"
        "c.SystemClock.wall_us = lambda self: right(self) + 3_600_000_000\n"
    )
    machines.environ = {**machines.environ, "PYTHONPATH": f"{site}{os.pathsep}{machines.environ['PYTHONPATH']}"}
    ahead = machines.send_on(0)
    machines.until_received(200)
    machines.lose(0, ahead)
    machines.environ = {**machines.environ, "PYTHONPATH": machines.environ["PYTHONPATH"].partition(os.pathsep)[2]}
    began = SystemClock().monotonic()
    ended(machines.send_on(0), 0)
    assert SystemClock().monotonic() - began < 60
    outcomes = machines.merged(1, code=None)
    assert set(outcomes) <= {"accepted", "in_doubt"}
    assert machines.received().twice == ()
    assert RetryTable().max_age.seconds == 86400
