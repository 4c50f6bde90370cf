"""Connections opened, reused, given back and opened again."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from pathlib import Path

import msgspec
import pytest

from engine.config import DeliveryTable
from engine.smtp import pool as pool_module
from engine.smtp import session as session_module
from engine.smtp.destination import ConnectionLimits, Host, RelayError, relay_destination
from engine.smtp.dialogue import Accepted, Lost, Outgoing, Refused, Stage
from engine.smtp.handshake import Ended
from engine.smtp.pool import Pool
from engine.smtp.tls import TlsPolicy
from tests.smtp.conftest import QUICK, Sender, Slots, greet, mail, pooling, read_line, serving
from tests.smtp.test_handshake import server_context
from tests.smtp.test_session import good_server, limits

Run = Callable[[Coroutine[object, object, None]], None]


@pytest.fixture(autouse=True)
def short_back_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "FIRST_BACK_OFF_S", 0.1)
    monkeypatch.setattr(pool_module, "FIRST_BACK_OFF_REFUSED_S", 0.1)


def test_slots_bound_the_connections(run: Run) -> None:
    async def story() -> None:
        slots, sender = Slots(2), Sender([mail(ticket) for ticket in range(50)])
        async with serving(good_server([])) as host, pooling(sender, host, slots=slots, want=8) as pool:
            await sender.until(lambda heard: len(heard.events) == 50)
            assert slots.most == 2
            slots.limit = 4
            pool.slots_changed()
            while pool.open < 4:
                await asyncio.sleep(0.01)

    run(story())


def test_a_connection_is_reused_for_n_messages(run: Run) -> None:
    async def story() -> None:
        slots, sender = Slots(1), Sender([mail(ticket) for ticket in range(20)])
        async with (
            serving(good_server(["PIPELINING"])) as host,
            pooling(sender, host, slots=slots, limits=limits(messages_per_connection=5)),
        ):
            await sender.until(lambda heard: len(heard.events) == 20)
        assert slots.taken >= 4
        assert slots.most == 1
        assert {end.why for end in sender.ends} <= {Ended.FINISHED, Ended.ABORTED}
        assert [event.ticket for event in sender.events] == list(range(20))

    run(story())


def test_the_server_may_set_a_lower_number(run: Run) -> None:
    """RFC 9422: LIMITS MAILMAX=2."""

    async def story() -> None:
        slots, sender = Slots(1), Sender([mail(ticket) for ticket in range(6)])
        async with (
            serving(good_server(["PIPELINING", "LIMITS MAILMAX=2 RCPTMAX=1"])) as host,
            pooling(sender, host, slots=slots),
        ):
            await sender.until(lambda heard: len(heard.events) == 6)
        assert slots.taken >= 3

    run(story())


def test_a_421_after_some_messages_costs_no_attempt(run: Run) -> None:
    """The server ends each connection after three messages, in its own way; every message arrives once."""
    taken: list[bytes] = []
    sender = Sender([mail(ticket) for ticket in range(12)])

    def again(events: object) -> None:
        for event in events:  # type: ignore[attr-defined]
            if isinstance(event, Lost):
                sender.queue.append(mail(event.ticket))

    async def story() -> None:
        heard_before = sender.on_events
        sender.on_events = lambda session, events: (heard_before(session, events), again(events))[0]  # type: ignore
        server = good_server(["PIPELINING"], taken, end_after=3, bye=b"421 4.7.0 enough\r\n")
        async with serving(server) as host, pooling(sender, host):
            await sender.until(lambda heard: sum(isinstance(event, Accepted) for event in heard.events) == 12)
        assert len(taken) == len(set(taken)) == 12
        assert not [event for event in sender.events if not isinstance(event, Accepted | Lost)]

    run(story())


def test_a_dead_host_is_left_alone_and_tried_again(run: Run) -> None:
    """One connection at a time asks whether it is back, ever less often; mail flows when it is."""

    async def story() -> None:
        sender, slots = Sender([mail(1)]), Slots(20)
        async with serving(good_server([])) as host:
            pass
        async with pooling(sender, host, slots=slots, want=20) as pool:
            await sender.until(lambda heard: len(heard.ends) >= 22)
            assert all(end.why is Ended.COULD_NOT_CONNECT for end in sender.ends)
            assert slots.used <= 1, "a dead host holds no slots"
            assert pool.last_failure is not None
            assert "could not connect" in str(pool.last_failure)
            assert pool.last_failure.again_at > 0
            assert sender.events == [], "no message was touched"

    run(story())


def test_a_relay_that_restarts_is_found_again(run: Run) -> None:
    async def story() -> None:
        sender = Sender([mail(1)])
        async with serving(good_server([])) as host:
            pass
        async with pooling(sender, host):
            await sender.until(lambda heard: heard.ends)
            server = await asyncio.start_server(good_server([]), "127.0.0.1", host.port)
            await sender.until(lambda heard: heard.events)
            server.close()
        assert isinstance(sender.events[0], Accepted)

    run(story())


def test_hosts_take_turns_and_the_dead_are_passed_over(run: Run) -> None:
    counts = [0, 0]

    def counting(index: int):  # type: ignore[no-untyped-def]
        async def converse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            counts[index] += 1
            await good_server([])(reader, writer)

        return converse

    async def story() -> None:
        sender = Sender()
        async with serving(good_server([])) as dead:
            pass
        async with serving(counting(0)) as one, serving(counting(1)) as two:
            spare = msgspec.structs.replace(two, preference=10)
            async with pooling(sender, dead, one, two, slots=Slots(6), want=6) as pool:
                while pool.open < 6:
                    await asyncio.sleep(0.01)
            assert min(counts) >= 2
            counts[:] = [0, 0]
            async with pooling(sender, one, spare, slots=Slots(4), want=4) as pool:
                while pool.open < 4:
                    await asyncio.sleep(0.01)
            assert counts == [4, 0], "the higher preference is for when the lower fails"
            async with pooling(sender, dead, spare, slots=Slots(2), want=2) as pool:
                while pool.open < 2:
                    await asyncio.sleep(0.01)

    run(story())


def test_greetings_that_refuse_reach_the_listener_and_no_recipient(run: Run) -> None:
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"554 5.7.1 not you\r\n")
        await writer.drain()

    async def story() -> None:
        sender = Sender([mail(1)])
        async with serving(refuse) as host, pooling(sender, host):
            await sender.until(lambda heard: len(heard.ends) >= 2)
        assert sender.events == []
        assert sender.ends[0].why is Ended.REFUSED
        assert sender.ends[0].stage is Stage.GREETING
        assert str(sender.ends[0].reply) == "554 5.7.1 not you"

    run(story())


def test_a_host_that_lies_about_chunking_is_remembered(run: Run) -> None:
    offers: list[str] = []

    async def converse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await greet(reader, writer, "PIPELINING", "CHUNKING")
        while True:
            line = await read_line(reader)
            offers.append(line.split(" ")[0])
            if line == "DATA":
                writer.write(b"354 go\r\n")
                await reader.readuntil(b"\r\n.\r\n")
                writer.write(b"250 queued\r\n")
            elif line.startswith(("MAIL", "RCPT", "RSET")):
                writer.write(b"250 ok\r\n")
            else:
                writer.write(b"500 what?\r\n")

    async def story() -> None:
        sender = Sender([mail(1), mail(2)])
        async with serving(converse) as host, pooling(sender, host):
            await sender.until(lambda heard: len(heard.events) == 2)
            assert [type(event) for event in sender.events] == [Lost, Lost]
            sender.queue = [mail(1), mail(2)]
            await sender.until(lambda heard: len(heard.events) == 4)
        assert [type(event) for event in sender.events[2:]] == [Accepted, Accepted]
        assert "DATA" in offers

    run(story())


def test_a_host_that_drops_pipelined_commands_is_remembered(run: Run) -> None:
    """It throws away what it has not read when it answers MAIL: after the patience, one command at a time."""

    async def converse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await greet(reader, writer, "PIPELINING")
        while True:
            heard = await reader.read(4096)
            if not heard:
                return
            first = heard.split(b"\r\n")[0]
            if first == b"DATA":
                writer.write(b"354 go\r\n")
                await reader.readuntil(b"\r\n.\r\n")
            writer.write(b"250 ok\r\n")
            await writer.drain()

    async def story() -> None:
        sender = Sender([mail(1)])
        async with serving(converse) as host, pooling(sender, host):
            await sender.until(lambda heard: heard.events)
            assert isinstance(sender.events[0], Lost)
            sender.queue = [mail(1)]
            await sender.until(lambda heard: len(heard.events) == 2)
        assert isinstance(sender.events[1], Accepted)

    run(story())


def test_idle_connections_above_what_is_wanted_close(run: Run) -> None:
    async def story() -> None:
        sender, slots = Sender([mail(ticket) for ticket in range(9)]), Slots(3)
        async with (
            serving(good_server([])) as host,
            pooling(sender, host, slots=slots, want=3, limits=limits(idle_timeout_s=0.2)) as pool,
        ):
            await sender.until(lambda heard: len(heard.events) == 9)
            while pool.open < 3:
                await asyncio.sleep(0.01)
            pool.want(1)
            await sender.until(lambda heard: len(heard.ends) == 2)
            assert [end.why for end in sender.ends] == [Ended.IDLE, Ended.IDLE]
            await asyncio.sleep(0.4)
            assert pool.open == slots.used == 1

    run(story())


def test_a_revoke_closes_the_idle_first_and_the_busy_after_what_is_in_hand(run: Run) -> None:
    release = asyncio.Event()

    async def converse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await greet(reader, writer)
        while True:
            line = await read_line(reader)
            if line == "DATA":
                writer.write(b"354 go\r\n")
                await reader.readuntil(b"\r\n.\r\n")
                await release.wait()
                writer.write(b"250 queued\r\n")
            else:
                writer.write(b"221 bye\r\n" if line == "QUIT" else b"250 ok\r\n")
            if line == "QUIT":
                await writer.drain()
                return

    async def story() -> None:
        sender, slots = Sender(), Slots(2)
        patient = limits(patience=msgspec.structs.replace(QUICK.patience, dot_s=10.0))
        async with serving(converse) as host, pooling(sender, host, slots=slots, want=2, limits=patient) as pool:
            while len(pool.ready) < 2:
                await asyncio.sleep(0.01)
            pool.ready[0].send([mail(1)])
            pool.shrink(1)
            await sender.until(lambda heard: heard.ends)
            assert sender.events == []
            pool.shrink(1)
            assert pool.ready == []
            await asyncio.sleep(0.05)
            assert slots.used == 1, "the slot is held until its message is answered"
            release.set()
            await sender.until(lambda heard: len(heard.ends) == 2)
            assert isinstance(sender.events[0], Accepted)
            assert slots.used == 0
            assert pool.open == 0

    run(story())


def test_closing_the_pool_waits_for_what_is_in_hand(run: Run) -> None:
    async def story() -> None:
        sender, slots = Sender([mail(ticket) for ticket in range(4)]), Slots(1)
        async with serving(good_server(["PIPELINING"])) as host, pooling(sender, host, slots=slots) as pool:
            await sender.until(lambda heard: not heard.queue)
            await pool.close()
            assert [type(event) for event in sender.events] == [Accepted] * 4
            assert slots.used == 0

    run(story())


def test_refused_recipients_get_their_own_reply_each(run: Run) -> None:
    """T029: each recipient its own result with its own code and text; CRLF and no bare LF on the wire."""
    bodies: list[bytes] = []

    async def converse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await greet(reader, writer, "PIPELINING")
        while True:
            line = await read_line(reader)
            if line.startswith("RCPT") and "r2@" in line:
                writer.write(b"550 5.1.1 no r2 here\r\n")
            elif line == "DATA" and not bodies:
                writer.write(b"354 go\r\n")
                bodies.append(await reader.readuntil(b"\r\n.\r\n"))
                writer.write(b"250 queued\r\n")
            else:
                writer.write(b"554 no recipients\r\n" if line == "DATA" else b"250 ok\r\n")

    async def story() -> None:
        sender = Sender([mail(1), mail(2)])
        async with serving(converse) as host, pooling(sender, host):
            await sender.until(lambda heard: len(heard.events) == 2)
        first, second = sender.events
        assert isinstance(first, Accepted)
        assert isinstance(second, Refused)
        assert (second.ticket, second.stage, str(second.reply)) == (2, Stage.RCPT, "550 5.1.1 no r2 here")
        assert bodies[0].count(b"\n") == bodies[0].count(b"\r\n")

    run(story())


def test_back_off_doubles_with_jitter_and_has_an_end() -> None:
    async def story() -> None:
        sender = Sender()
        async with serving(good_server([])) as host, pooling(sender, host, want=0) as pool:
            pool._rng = random.Random(4)
            memory = pool._of(host)
            waits = []
            for _ in range(20):
                now = memory.dead_until
                pool._back_off(host, now, 1.0)
                pool._back_off(host, now, 1.0)  # failed together with the one before
                waits.append(memory.dead_until - now)
            assert 0.8 <= waits[0] <= 1.2
            assert 1.6 <= waits[1] <= 2.4
            assert max(waits) <= pool_module.MAX_BACK_OFF_S * 1.2
            assert waits[-1] >= pool_module.MAX_BACK_OFF_S * 0.8

    asyncio.run(story())


# ---- the destination that [delivery] describes


def relay(environ: dict[str, str] | None = None, **keys: object):  # type: ignore[no-untyped-def]
    return relay_destination(DeliveryTable(**keys), environ or {})  # type: ignore[arg-type]


def test_the_relay_of_the_settings(tmp_path: object) -> None:
    found = relay(relay="smtps://mail.example.org", tls="verified", greeting_name="out.example.org")
    assert found.hosts == (Host(name="mail.example.org", port=465, implicit_tls=True),)
    assert found.tls is TlsPolicy.VERIFIED
    found = relay({"PW": "s3cret"}, relay="smtp://mail.example.org:587", username="ann", password_env="PW")
    assert found.credentials is not None
    assert found.credentials.password == "s3cret"
    assert "s3cret" not in repr(found)
    assert relay(relay="smtps://mail.example.org", tls="off").tls is TlsPolicy.REQUIRED
    table = DeliveryTable(messages_per_connection=7, pipeline_depth=3, chunking=False)
    assert ConnectionLimits.of(table).manner.depth == 3
    assert not ConnectionLimits.of(table).manner.chunking


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"relay": "mail.example.org"}, "smtp://HOST:PORT"),
        ({"relay": "http://mail.example.org"}, "smtp://HOST:PORT"),
        ({"relay": "smtp://mail.example.org:99999"}, "relay"),
        ({"relay": "smtp://ann:s3cret@mail.example.org"}, "does not belong into the URL"),
        ({"username": "ann", "password_env": "PW"}, "variable PW is not set"),
        ({"username": "ann", "password_file": "/nonexistent/pw"}, "/nonexistent/pw"),
        ({"username": "ann"}, "needs password_env or password_file"),
        ({"password_env": "PW"}, "no username"),
        ({"tls_ca_file": "/nonexistent/ca.pem"}, "/nonexistent/ca.pem"),
        ({"greeting_name": "two words"}, "greeting_name"),
    ],
)
def test_a_wrong_relay_is_named_without_its_secret(keys: dict[str, object], named: str) -> None:
    with pytest.raises(RelayError) as raised:
        relay(**keys)
    assert named in str(raised.value)
    assert "s3cret" not in str(raised.value)


def test_a_message_that_no_server_takes_comes_back_at_once(run: Run) -> None:
    async def story() -> None:
        sender = Sender([mail(1, 2000), Outgoing(2, "b@s.test", "r\r\nRCPT TO:<x@a.test>", b"x\r\n"), mail(3)])
        async with serving(good_server(["PIPELINING", "SIZE 1000"])) as host, pooling(sender, host):
            await sender.until(lambda heard: len(heard.events) == 3)
        by_ticket = {event.ticket: event for event in sender.events}
        for ticket, code in ((1, 552), (2, 553)):
            event = by_ticket[ticket]
            assert isinstance(event, Refused)
            assert event.reply.code == code
            assert event.reply.local
        assert isinstance(by_ticket[3], Accepted)

    run(story())


def test_a_pool_needs_no_host_to_be_reachable_to_be_closed() -> None:
    async def story() -> None:
        sender, slots = Sender(), Slots(3)
        unreachable = Host(name="192.0.2.1", port=25, addresses=("192.0.2.1",))
        async with pooling(sender, unreachable, slots=slots, want=3) as pool:
            assert isinstance(pool, Pool)
            assert slots.used == 3
        assert slots.used == 0

    asyncio.run(story())


def test_a_connection_that_dies_between_handshake_and_handover(
    run: Run, certificate: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Told to the protocol that was there before ours; found by hypothesis as a session without end."""
    monkeypatch.setattr(session_module, "CLOSING_S", 0.1)

    async def reset(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await greet(reader, writer, "PIPELINING")
        writer.transport.abort()

    async def story() -> None:
        sender = Sender()
        async with serving(reset, ssl=server_context(certificate)) as host:
            implicit = msgspec.structs.replace(host, implicit_tls=True)
            async with pooling(sender, implicit, tls="required"):
                await sender.until(lambda heard: len(heard.ends) >= 3)

    run(story())


def test_a_quit_that_nobody_answers_changes_nothing(run: Run) -> None:
    """T079: the result is fixed by the reply to the dot; the connection counts as finished."""

    async def rude(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await greet(reader, writer)
        for reply in (b"250 ok\r\n", b"250 ok\r\n", b"354 go\r\n"):
            await read_line(reader)
            writer.write(reply)
        await reader.readuntil(b"\r\n.\r\n")
        writer.write(b"250 queued\r\n")
        await asyncio.sleep(5)

    async def story() -> None:
        sender = Sender([mail(1)])
        async with serving(rude) as host, pooling(sender, host, limits=limits(messages_per_connection=1)):
            await sender.until(lambda heard: heard.ends)
        assert [type(event) for event in sender.events] == [Accepted]
        assert sender.ends[0].why is Ended.FINISHED

    run(story())
