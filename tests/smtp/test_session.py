"""A connection in use: the scripts over a real socket, peers that stall, dribble or vanish."""

from __future__ import annotations

import asyncio
import gc
import sys
import tracemalloc
from collections.abc import Callable, Coroutine

import msgspec
import pytest

from engine.smtp.destination import ConnectionLimits
from engine.smtp.dialogue import Accepted, InDoubt, Lost, Manner, Outgoing, Patience, Stage
from engine.smtp.handshake import Ended
from engine.smtp.pool import HostMemory
from engine.smtp.session import Session
from tests.smtp.conftest import QUICK, Sender, Slots, greet, mail, pooling, read_line, serving
from tests.smtp.dialogue_script import Script, message, scripts, spell

Run = Callable[[Coroutine[object, object, None]], None]


def limits(**changes: object) -> ConnectionLimits:
    return msgspec.structs.replace(QUICK, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("script", scripts(), ids=lambda script: script.name)
def test_script_over_a_socket(script: Script, run: Run) -> None:
    """The server plays its half; the messages and what becomes of them are as in the script."""
    sender = Sender()
    sessions: list[Session] = []
    sender.on_ready = lambda session: sessions.append(session)  # type: ignore[method-assign]
    expected = [step.text for step in script.steps if step.kind == "event"]

    async def play(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await greet(reader, writer, *(word.replace("=", " ") for word in script.offer))
        while not sessions:
            await asyncio.sleep(0.001)
        for number, step in enumerate(script.steps):
            match step.kind:
                case "send":
                    batch = [step]
                    if number and script.steps[number - 1].kind == "send":
                        continue
                    for more in script.steps[number + 1 :]:
                        if more.kind != "send":
                            break
                        batch.append(more)
                    # Refused before anything is written: each in its own call, as the script has it.
                    sessions[0].send([message(one) for one in batch])
                case "close":
                    sessions[0].close()
                case "C":
                    assert await read_line(reader) == step.text
                case "S":
                    writer.write(step.text.encode())
                    await writer.drain()
                case "event":
                    so_far = sum(1 for earlier in script.steps[: number + 1] if earlier.kind == "event")
                    is_final = all(later.kind in ("event", "over", "hang up") for later in script.steps[number:])
                    if not is_final:
                        await sender.until(lambda heard, enough=so_far: len(heard.events) >= enough)  # type: ignore[misc]
                case "hang up":
                    return
        if any(step.kind == "no reply in time" for step in script.steps):
            await asyncio.sleep(5)

    async def story() -> None:
        patience = Patience(command_s=5, data_s=5, dot_s=0.3, quit_s=0.5, farewell_s=0.3)
        host_limits = limits(manner=script.manner, patience=patience)
        async with serving(play) as host:
            memory = {str(host): HostMemory(chunking_proven=script.proven)}
            async with pooling(sender, host, limits=host_limits) as pool:
                pool._memory.update(memory)
                await sender.until(lambda heard: len(heard.events) >= len(expected))
        said = [spell(event).replace("the server hung up", "connection lost") for event in sender.events]
        assert said == expected

    run(story())


def test_messages_go_out_and_come_back_accepted(run: Run) -> None:
    sender = Sender([mail(ticket) for ticket in range(100)])

    async def story() -> None:
        async with serving(good_server(["PIPELINING"])) as host, pooling(sender, host, want=1) as pool:
            await sender.until(lambda heard: len(heard.events) == 100)
            assert pool.open == 1
            assert pool.sessions[0].sent == 100
            assert pool.sessions[0].is_idle
        assert [event.ticket for event in sender.events] == list(range(100))
        assert all(isinstance(event, Accepted) for event in sender.events)

    run(story())


def good_server(offer: list[str], taken: list[bytes] | None = None, end_after: int | None = None, bye: bytes = b""):  # type: ignore[no-untyped-def]
    """Takes everything by DATA; after `end_after` messages says `bye` and hangs up."""

    async def converse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await greet(reader, writer, *offer)
        count = 0
        while True:
            line = await read_line(reader)
            if line == "DATA":
                writer.write(b"354 go\r\n")
                content = await reader.readuntil(b"\r\n.\r\n")
                if taken is not None:
                    taken.append(content)
                count += 1
                writer.write(b"250 queued\r\n")
                if count == end_after:
                    writer.write(bye)
                    await writer.drain()
                    return
            elif line == "QUIT":
                writer.write(b"221 bye\r\n")
                await writer.drain()
                return
            else:
                writer.write(b"250 ok\r\n")
            await writer.drain()

    return converse


@pytest.mark.slow
def test_a_peer_that_does_not_read_blocks_only_itself(run: Run) -> None:
    """20 MB to a peer with a tiny window: our memory holds it once, the loop goes on, and the patience ends it."""
    big = Outgoing(1, "v@s.test", "r@a.test", b"x" * 20_000_000 + b"\r\n")
    sender = Sender([big])

    async def stall(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await greet(reader, writer)
        for reply in (b"250 ok\r\n", b"250 ok\r\n", b"354 go\r\n"):
            await read_line(reader)
            writer.write(reply)
        await asyncio.sleep(30)

    async def story() -> None:
        other = Sender([mail(2)])
        patience = Patience(command_s=1, data_s=1, dot_s=-1999.0)  # 20 MB earn 2,000 s, see SLOWEST_BYTES_PER_S
        async with serving(stall, limit=1000) as host, pooling(sender, host, limits=limits(patience=patience)):
            await sender.until(lambda heard: not heard.queue)
            async with serving(good_server([])) as good, pooling(other, good):
                await other.until(lambda heard: heard.events)
            await sender.until(lambda heard: heard.events and heard.ends)
        # Its dot was still in this machine, so there is no doubt.
        assert [type(event) for event in sender.events] == [Lost]
        assert sender.ends[0].why is Ended.TIMED_OUT

    run(story())


def test_bytes_that_dribble_are_no_progress(run: Run) -> None:
    """A tarpit: a byte of the reply every now and then. The patience counts whole replies."""
    sender = Sender([mail(1)])

    async def dribble(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await greet(reader, writer)
        await read_line(reader)
        while True:
            writer.write(b"250-x\r\n")
            await writer.drain()
            await asyncio.sleep(0.02)

    async def story() -> None:
        async with serving(dribble) as host, pooling(sender, host):
            await sender.until(lambda heard: heard.ends)
        assert [type(event) for event in sender.events] == [Lost]
        assert sender.ends[0].why is Ended.TIMED_OUT
        assert sender.ends[0].stage is Stage.MAIL

    run(story())


def test_a_dead_idle_connection_still_gives_each_message_a_verdict(run: Run) -> None:
    """T073: the peer is gone without a word; the message sent into the silence is told lost, and goes by another."""
    sender = Sender([mail(1)])
    frozen = asyncio.Event()

    async def freeze(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if frozen.is_set():
            return await good_server([])(reader, writer)  # type: ignore[no-any-return]
        await greet(reader, writer)
        for reply in (b"250 ok\r\n", b"250 ok\r\n", b"354 go\r\n"):
            await read_line(reader)
            writer.write(reply)
        await reader.readuntil(b"\r\n.\r\n")
        writer.write(b"250 queued\r\n")
        frozen.set()
        await asyncio.sleep(30)

    async def story() -> None:
        async with serving(freeze) as host, pooling(sender, host) as pool:
            await sender.until(lambda heard: heard.events)
            pool.sessions[0].send([mail(2)])
            await sender.until(lambda heard: len(heard.events) == 2)
            assert isinstance(sender.events[1], Lost)
            sender.queue = [mail(2)]
            await sender.until(lambda heard: len(heard.events) == 3, 12)
            assert isinstance(sender.events[2], Accepted)

    run(story())


@pytest.mark.parametrize("bye", [b"", b"421 4.4.2 idle too long\r\n"], ids=["hang-up", "421"])
def test_an_idle_connection_that_closes_is_opened_again_without_an_attempt(run: Run, bye: bytes) -> None:
    sender = Sender([mail(1)])

    async def story() -> None:
        async with serving(good_server([], end_after=1, bye=bye)) as host, pooling(sender, host):
            await sender.until(lambda heard: heard.ends)
            assert sender.ends[0].why is Ended.CLOSED
            sender.queue = [mail(2)]
            await sender.until(lambda heard: len(heard.events) == 2)
        assert all(isinstance(event, Accepted) for event in sender.events)

    run(story())


def test_sending_into_a_connection_that_is_gone_is_lost(run: Run) -> None:
    """The worker's intents become durable while the connection goes: each ticket still gets its event."""
    sender = Sender()
    ready: list[Session] = []
    sender.on_ready = ready.append  # type: ignore[method-assign]

    async def story() -> None:
        async with serving(good_server([])) as host, pooling(sender, host) as pool:
            while not ready:
                await asyncio.sleep(0.01)
            session = ready[0]
            pool.want(0)
            session.close()
            session.send([mail(1)])
            assert sender.events == [], "events never come from within the call"
            await sender.until(lambda heard: heard.events and heard.ends)
            session.send([mail(2)])
            session.abort()
            await sender.until(lambda heard: len(heard.events) == 2)
            assert session.capacity == 0
        assert [type(event) for event in sender.events] == [Lost, Lost]

    run(story())


def test_aborting_tells_lost_from_in_doubt(run: Run) -> None:
    sender = Sender([mail(1), mail(2)])

    async def no_word(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await greet(reader, writer, "PIPELINING")
        for _ in range(3):
            await read_line(reader)
        writer.write(b"250 ok\r\n250 ok\r\n354 go\r\n")
        await reader.readuntil(b"\r\n.\r\n")
        got_it.set()
        await asyncio.sleep(30)

    got_it = asyncio.Event()

    async def story() -> None:
        async with serving(no_word) as host, pooling(sender, host) as pool:
            await got_it.wait()
            pool.sessions[0].abort()
            await sender.until(lambda heard: heard.ends)
        assert [type(event) for event in sender.events] == [InDoubt, Lost]

    run(story())


@pytest.mark.parametrize("loop", ["asyncio"])
def test_a_connection_costs_two_kilobytes_of_objects(loop: str) -> None:
    """Beyond the transport and its buffers: the session and its dialogue, in an established idle connection."""
    sender = Sender([mail(1)])

    async def story() -> None:
        async with serving(good_server(["PIPELINING", "SIZE 1000000"])) as host, pooling(sender, host) as pool:
            await sender.until(lambda heard: heard.events)
            session = pool.sessions[0]
            own = [session, session.dialogue, *(getattr(session, name, None) for name in Session.__slots__)]
            own += [getattr(session.dialogue, name) for name in type(session.dialogue).__slots__]
            shared = (session._transport, session._buffer, session._listener, session._owner, session.destination)
            ours = {id(part): part for part in own if not any(part is other for other in (*shared, session.host))}
            assert sum(sys.getsizeof(part) for part in ours.values()) <= 2048
            assert not hasattr(session, "__dict__")

    asyncio.run(story())


@pytest.mark.long
def test_two_thousand_connections(run: Run) -> None:
    """All open at once in one process; what they cost, transports and server's half included, is bounded."""
    sender = Sender()

    async def story() -> None:
        gc.collect()
        tracemalloc.start()
        async with (
            serving(good_server(["PIPELINING"]), backlog=2048) as host,
            pooling(sender, host, slots=Slots(2000), want=2000, limits=limits(handshake_timeout_s=30.0)) as pool,
        ):
            async with asyncio.timeout(60):
                while pool.open < 2000:
                    await asyncio.sleep(0.1)
            sender.queue = [mail(ticket) for ticket in range(4000)]
            for session in pool.ready:
                sender.on_ready(session)
            await sender.until(lambda heard: len(heard.events) == 4000, 60)
            size, _ = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            assert size / 2000 < 60_000

    run(story())


def test_limits_change_while_connections_are_open(run: Run) -> None:
    sender = Sender([mail(ticket) for ticket in range(20)])

    async def story() -> None:
        async with serving(good_server(["PIPELINING"])) as host, pooling(sender, host) as pool:
            await sender.until(lambda heard: heard.events)
            pool.set_limits(limits(manner=Manner(depth=2), messages_per_connection=10))
            assert pool.sessions[0].capacity <= 2
            await sender.until(lambda heard: len(heard.events) == 20)
            assert pool.sessions[0].sent < 20, "the old connection ended at the new number of messages"
        assert sender.ends[0].why is Ended.FINISHED

    run(story())


def test_a_connection_in_use_too_long_ends_after_what_is_in_hand(run: Run) -> None:
    sender = Sender([mail(1)])

    async def story() -> None:
        async with (
            serving(good_server(["PIPELINING"])) as host,
            pooling(sender, host, limits=limits(session_timeout_s=0.2)),
        ):
            await sender.until(lambda heard: heard.ends)
        assert [type(event) for event in sender.events] == [Accepted]
        assert sender.ends[0].why is Ended.FINISHED

    run(story())
