"""Slots of a worker: what the supervisor revokes comes back, whatever the connections are doing at the moment."""

from __future__ import annotations

import asyncio
import socket

import pytest

from engine.clock import SystemClock
from engine.smtp.destination import ConnectionLimits, Destination, Host
from engine.smtp.tls import TlsPolicy
from engine.work.lanes import Account, Lane


class Deaf:
    """A listener that does nothing."""

    def on_ready(self, session: object) -> None: ...
    def on_events(self, session: object, events: object) -> None: ...
    def on_session_ended(self, *told: object) -> None: ...


@pytest.mark.parametrize("revoked", [1, 3, 4])
def test_a_revoke_reaches_connections_that_are_still_being_made(revoked: int) -> None:
    async def story() -> tuple[int, int]:
        with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts, and never greets
            clock = SystemClock()
            account = Account(("", "relay"), clock, is_rated=False)
            back: list[int] = []
            account.give_slots_back = back.append
            host = Host(name="127.0.0.1", port=silent.getsockname()[1])
            destination = Destination(key="relay", hosts=(host,), tls=TlsPolicy.OFF)
            lane = Lane(
                0, account, destination, ConnectionLimits(), lambda lane: Deaf(), clock, {}, provider=1, source=1
            )
            account.grant(4)
            lane.want(100)
            await asyncio.sleep(0.05)
            assert (lane.open, account.used) == (0, 4)
            account.revoke(revoked)
            await asyncio.sleep(0.05)
            told = sum(back), account.used
            assert lane.pool is not None
            await lane.pool.close(abort=True)
            return told

    assert asyncio.run(story()) == (revoked, 4 - revoked)
