"""A throttle signal about the campaign's account, learnt by one machine, is obeyed by the other within a heartbeat."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from datetime import datetime

import msgspec
import pytest

from engine.rehearse.conversation import Conversation
from engine.rehearse.running import RunningSink
from engine.rehearse.sink import Sink
from engine.rehearse.steering import Act, Kind, Phase
from formats.reply import Reply
from tests.cluster.conftest import Machines

pytestmark = [pytest.mark.postgres, pytest.mark.long]


class Strict(Sink):
    """Who asks for quota@ hears that the account's quota is used up."""

    def rcpt(self, conversation: Conversation, recipient: bytes) -> Act | None:
        if recipient.startswith(b"quota"):
            return Act(Kind.REPLY, Phase.RCPT, Reply(454, "Throttling failure: Maximum sending rate exceeded."))
        return super().rcpt(conversation, recipient)


@pytest.fixture
def strict_port() -> Iterator[int]:
    loop, sink = asyncio.new_event_loop(), Strict()
    _, port = loop.run_until_complete(sink.start())
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield port
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.run_until_complete(sink.stop())
    loop.close()


def test_one_learns_and_the_other_obeys(machines: Machines, strict_port: int, cluster_sink: RunningSink) -> None:
    addresses = [f"quota{n}@example.com" for n in range(100)] + [f"person{n}@example.com" for n in range(2900)]
    machines.begin(list(addresses), plan=False)
    machines.set("relay", f"smtp://127.0.0.1:{strict_port}")
    machines.set("messages_per_second", 40)
    machines.set("plan", ["1h"])
    machines.plan_with_store(2, lease="10s")
    words = ("--log-format", "json", "--no-steal")
    # The second begins with plain recipients; the first has nothing but refused ones.
    second = machines.send_on(1, *words)
    first = machines.send_on(0, *words)
    try:
        learnt, obeyed = _until_eased(first), _until_eased(second)
    finally:
        for process in (first, second):
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate(timeout=30)
    assert "Throttling failure" in learnt["reason"]
    assert "Throttling failure" in obeyed["reason"]
    later = datetime.fromisoformat(obeyed["at"]) - datetime.fromisoformat(learnt["at"])
    assert obeyed["source"] == learnt["source"] == machines.url.rpartition("=")[2]
    assert -1 < later.total_seconds() < 10


def _until_eased(process: subprocess.Popen[str]) -> dict[str, str]:
    """The first word of the throttle about the whole campaign: a rate, or a pause."""
    assert process.stderr is not None
    patience = threading.Timer(60, process.kill)
    patience.start()
    try:
        for line in process.stderr:
            event = msgspec.json.decode(line) if line.startswith("{") else {}
            if event.get("event") in ("throttle_eased", "throttle_suspended") and event.get("source"):
                return dict(event)
    finally:
        patience.cancel()
    pytest.fail("it ended before it obeyed")
