"""kill -9 at random moments: nobody gets a mail twice, nobody is lost, and what nobody can know is in doubt."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pyarrow.compute as pc
import pytest

from engine.control.outbox import Mail
from engine.rehearse.record import read_record
from tests.outbox.test_beside_a_campaign import newsletter

if TYPE_CHECKING:
    from tests.outbox.conftest import PostOffice

KINDS = ("451-once", "slow-5ms", *["user"] * 14)


def outcome(state: str) -> str:
    """A state without its reason."""
    return state.partition("/")[0]


def kill_and_count(office: PostOffice, rows: int, kills: int, seed: int, campaign: Path | None = None) -> None:
    """Write rows while servers are killed; then hold the table against the sink's record.

    With a campaign its senders serve the outbox, and are killed: the whole of them, their supervisor, or its server of
    the outbox alone.
    """
    rng = random.Random(seed)
    written = 0
    while kills:
        server = office.join(lambda: office.serve() if campaign is None else office.send(campaign))
        # From then on any moment will do.
        until = time.monotonic() + rng.uniform(0.05, 0.6)
        while time.monotonic() < until:
            some = min(rng.randint(1, 40), rows - written)
            office.box.enqueue(
                [
                    Mail(
                        address=f"{KINDS[n % len(KINDS)]}+{n}@example.com",
                        priority=rng.choice((1, 2, 3)),
                        template="welcome",
                        fields={"name": str(n), "confirm_url": ""},
                    )
                    for n in range(written, written + some)
                ]
            )
            written += some
            time.sleep(0.01)
        if campaign is not None:
            kill_some(office, server.pid, rng.choice(("group", "supervisor", "outbox")))
        office.stop(server, signal.SIGKILL)
        kills -= 1
    last = office.serve_and_join()
    deadline = time.monotonic() + 40
    while (states := office.states()) and not {"queued", "sending", "waiting"}.isdisjoint(map(outcome, states)):
        assert time.monotonic() < deadline, states
        time.sleep(0.05)
    assert last.poll() is None
    assert office.stop(last) == 0

    ended = {row.address: row.state for row in office.box.rows(None, 0, rows)}
    assert office.sink.record is not None
    taken = read_record(office.sink.record)
    had = set(pc.unique(taken["recipient"]).to_pylist())
    assert office.received().twice == ()
    assert len(ended) == written
    had = {address for address in had if not address.startswith("reader")}
    assert {address for address, state in ended.items() if state == "accepted"} <= had
    assert had <= {address for address, state in ended.items() if state in ("accepted", "in_doubt")}
    assert set(ended.values()) <= {"accepted", "in_doubt"}, [
        row for row in office.box.rows(None, 0, rows) if row.state == "waiting"
    ]
    assert list(ended.values()).count("in_doubt") <= written / 2


def kill_some(office: PostOffice, pid: int, who: str) -> None:
    """SIGKILL for a sender, its children included or not, or for the process of it that serves the outbox."""
    if who == "group":
        os.killpg(pid, signal.SIGKILL)
    elif who == "outbox":
        alive = [server for server in office.box.servers() if server.state == "alive" and server.kind == "send"]
        with contextlib.suppress(ProcessLookupError):
            office.kill_pid(alive[-1].pid)
        time.sleep(0.3)


@pytest.mark.slow
def test_none_twice_none_lost(office: PostOffice) -> None:
    kill_and_count(office, rows=400, kills=3, seed=4)


@pytest.mark.long
@pytest.mark.postgres
def test_none_twice_none_lost_in_postgresql(shared_office: PostOffice) -> None:
    kill_and_count(shared_office, rows=300, kills=2, seed=5)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(2))
def test_none_twice_none_lost_beside_a_campaign_that_is_killed(office: PostOffice, tmp_path: Path, seed: int) -> None:
    office.set("store", '"sqlite:outbox.sqlite"\nlease = "2s"')
    campaign = newsletter(office, tmp_path, 1500, connections=4, per_second=150)
    kill_and_count(office, rows=200, kills=4, seed=200 + seed, campaign=campaign)
    sender = office.send(campaign)
    assert sender.wait(timeout=60) == 0
    office.run("merge-logs", "--campaign", str(campaign), code=None)
    merged = msgspec.json.decode((campaign / "report" / "summary.json").read_bytes())
    in_doubt = merged["outcomes"]["in_doubt"]
    assert merged["outcomes"]["accepted"] + in_doubt == merged["rows"] == 1500
    readers = {name for name in taken_by(office) if name.startswith("reader")}
    assert 1500 - in_doubt <= len(readers) <= 1500
    assert office.received().twice == ()


def taken_by(office: PostOffice) -> set[str]:
    assert office.sink.record is not None
    return set(read_record(office.sink.record)["recipient"].to_pylist())


@pytest.mark.slow
@pytest.mark.postgres
def test_two_servers_share_one_table(shared_office: PostOffice) -> None:
    servers = [shared_office.serve_and_join() for _ in range(2)]
    fields = {"name": "", "confirm_url": ""}
    shared_office.box.enqueue(
        [Mail(address=f"u{n}@example.com", template="welcome", fields=fields) for n in range(400)]
    )
    shared_office.until(accepted=400)
    assert [shared_office.stop(server) for server in servers] == [0, 0]
    assert shared_office.received().twice == ()


@pytest.mark.long
@pytest.mark.parametrize("seed", range(10))
def test_none_twice_none_lost_many_times(office: PostOffice, seed: int) -> None:
    kill_and_count(office, rows=3000, kills=8, seed=100 + seed)


@pytest.mark.slow
def test_a_stopped_server_loses_its_claims_and_sends_none_of_them(office: PostOffice) -> None:
    """SIGSTOP outlives the lease: rows without an intent go to the next server, and the sleeper gets none back."""
    office.set("store", '"sqlite:outbox.sqlite"\nlease = "1s"')
    office.set("connections", "1")
    sleeper = office.serve()
    office.box.enqueue(
        [
            Mail(address=f"slow-300ms+{n}@example.com", template="welcome", fields={"name": "", "confirm_url": ""})
            for n in range(12)
        ]
    )
    office.until(sending=11, accepted=1)
    sleeper.send_signal(signal.SIGSTOP)
    try:
        time.sleep(1.2)
        office.serve()
        deadline = time.monotonic() + 20
        while set(states := office.states()) - {"accepted", "in_doubt"}:
            assert time.monotonic() < deadline, states
            time.sleep(0.05)
        doubted = office.states()["in_doubt"]
        assert 1 <= doubted <= 8
    finally:
        sleeper.send_signal(signal.SIGCONT)
    # The sleeper reads the replies that came meanwhile; its late reports need no lease.
    office.until(accepted=12)
    assert office.received().twice == ()
    assert sleeper.wait(timeout=30) == 75
