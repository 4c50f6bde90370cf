"""The crew is never waited for without an end."""

from __future__ import annotations

import asyncio
import signal
import socket
import time

import pytest

from engine.work import crew
from engine.work.worker import WorkerStart

START = WorkerStart(
    folder="", plan_fingerprint="", incarnation="i", sender="s", host_id="", boot_id="", worker=0, number=0, seed=1
)


def deaf_worker(end: socket.socket, raw_start: bytes) -> None:
    """Ignores its supervisor and SIGTERM, as workers do, and never ends."""
    del raw_start
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    end.sendall(b"")
    time.sleep(600)


def obedient_worker(end: socket.socket, raw_start: bytes) -> None:
    """Ends when nobody leads it any more."""
    del raw_start
    while end.recv(1000):
        pass


@pytest.mark.slow
@pytest.mark.parametrize("worker", [deaf_worker, obedient_worker])
def test_a_dismissed_crew_is_dead_and_reported_once(worker: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crew, "run_worker", worker)
    lost: list[int | None] = []

    async def lead() -> None:
        led = crew.Crew(lambda hand, message: None, lambda hand: lost.append(hand.process.exitcode), time.monotonic)
        hand = await led.start(START)
        await asyncio.sleep(1.0 if worker is deaf_worker else 0.0)
        await led.dismiss(0.2 if worker is deaf_worker else 30.0)
        assert not hand.is_alive
        assert not led.hands

    asyncio.run(asyncio.wait_for(lead(), 60))
    assert lost == [-signal.SIGKILL if worker is deaf_worker else 0]
