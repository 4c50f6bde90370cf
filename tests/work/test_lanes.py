"""Slots of a worker: what the supervisor revokes comes back, whatever the connections are doing at the moment."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable

import pytest

from engine.clock import SystemClock
from engine.rehearse.sink import Sink
from engine.smtp.destination import ConnectionLimits, Destination, Host
from engine.smtp.tls import TlsPolicy
from engine.work import lanes
from engine.work.lanes import Account, Lane, LaneTable


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


class Machine:
    """An account at a willing server, with some lanes; its supervisor gives back each slot that it gets."""

    def __init__(self, port: int, lanes: int, slots: int) -> None:
        clock = SystemClock()
        self.table = LaneTable()
        self.account = account = Account(("s", "big"), clock, is_rated=False)
        account.holds = lambda account: self.table.holding.__setitem__(account.key, account)
        loop = asyncio.get_running_loop()
        account.give_slots_back = lambda n: (loop.call_later(0.01, account.grant, n), None)[1]
        self.lanes = []
        for index in range(lanes):
            host = Host(name="127.0.0.1", port=port)
            destination = Destination(key=f"tenant{index}", hosts=(host,), tls=TlsPolicy.OFF)
            limits = ConnectionLimits(messages_per_connection=100)
            lane = Lane(index, account, destination, limits, lambda lane: Deaf(), clock, {}, provider=1, source=1)
            self.lanes.append(lane)
        self.table.lanes = self.lanes
        self.clock = clock
        account.grant(slots)

    async def run(self, rows: dict[int, int], seconds: float) -> list[int]:
        """Ticks as a worker does; the connections that each lane has afterwards."""
        until = self.clock.monotonic() + seconds
        while self.clock.monotonic() < until:
            self.table.want(rows, self.clock.monotonic())
            await asyncio.sleep(0.02)
        return [lane.open for lane in self.lanes]

    async def close(self) -> None:
        self.account.give_slots_back = lambda n: None
        for lane in self.lanes:
            if lane.pool is not None:
                await lane.pool.close(abort=True)


async def at_a_sink(story: Callable[[int], Awaitable[None]]) -> None:
    sink = Sink()
    _, port = await sink.start()
    try:
        await story(port)
    finally:
        await sink.stop()


def test_an_idle_neighbour_s_connection_does_not_keep_the_slot_from_who_has_rows() -> None:
    async def story(port: int) -> None:
        machine = Machine(port, lanes=2, slots=1)
        assert await machine.run({0: 5}, 0.3) == [1, 0]
        assert await machine.run({1: 5}, 1.0) == [0, 1]  # the idle time-out is 30 seconds
        await machine.close()

    asyncio.run(at_a_sink(story))


@pytest.mark.slow
def test_a_busy_neighbour_gives_the_only_slot_up_after_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "_TURN_S", 0.5)

    async def story(port: int) -> None:
        machine = Machine(port, lanes=3, slots=1)
        had = [0, 0, 0]
        for _ in range(60):
            for index, open_ in enumerate(await machine.run({0: 9, 1: 9, 2: 9}, 0.1)):
                had[index] += open_
        assert min(had) >= 5, had
        await machine.close()

    asyncio.run(at_a_sink(story))


def test_the_throttle_s_word_on_messages_holds_for_connections_opened_later() -> None:
    async def story(port: int) -> None:
        machine = Machine(port, lanes=2, slots=4)
        await machine.run({0: 1}, 0.1)
        machine.account.per_connection = 7
        for lane in machine.lanes:
            lane.ease()
        await machine.run({0: 1, 1: 1}, 0.2)
        assert [lane.pool.limits.messages_per_connection for lane in machine.lanes if lane.pool] == [7, 7]
        machine.lanes[1].set_limits(ConnectionLimits(messages_per_connection=5))  # the operator's is lower still
        machine.account.per_connection = None
        machine.lanes[0].ease()
        assert [lane.pool.limits.messages_per_connection for lane in machine.lanes if lane.pool] == [100, 5]
        await machine.close()

    asyncio.run(at_a_sink(story))


def test_only_accounts_that_hold_something_are_looked_at() -> None:
    async def story(port: int) -> None:
        machine = Machine(port, lanes=1, slots=2)
        await machine.run({0: 1}, 0.1)
        assert machine.table.demand({0: 3}) == {("s", "big"): 3}
        assert machine.table.demand({}) == {("s", "big"): 0}, "the last word is that there is nothing"
        assert machine.table.demand({}) == {}
        machine.account.give_slots_back = lambda n: None
        machine.account.revoke(2)
        await machine.run({}, 0.2)
        assert machine.table.holding == {}
        await machine.close()

    asyncio.run(at_a_sink(story))
