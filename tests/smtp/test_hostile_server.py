"""A hostile server on a real socket, in plain text and behind TLS, driven by hypothesis.

Whatever it does, at whatever point: each message handed over gets exactly one event, nothing hangs past its patience,
every slot comes back.
"""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.smtp import pool as pool_module
from engine.smtp import watch
from engine.smtp.dialogue import Accepted, InDoubt, Outgoing, Patience
from tests.smtp.conftest import QUICK, Sender, Slots, greet, pooling, serving

# Each word is something the server does next.
SAYINGS = {
    "yes": b"250 ok\r\n",
    "go on": b"354 go on\r\n",
    "later": b"451 4.3.0 later\r\n",
    "no": b"550 5.1.1 no\r\n",
    "nested": b"503 5.5.1 nested\r\n",
    "bye": b"421 4.3.2 closing\r\n",
    "more": b"250-more\r\n",
    "mixed": b"250-yes\r\n550 no\r\n",
    "half": b"25",
    "bare": b"250\n",
    "garbage": b"\x80\x00what?\r\n",
    "long": b"250-" + b"x" * 40_000 + b"\r\n",
    "whole": b"250 ok\r\n250 ok\r\n354 go on\r\n",
}
DEEDS = ("read", "read all", "close", "reset", "wait")
acts = st.lists(st.sampled_from([*SAYINGS, *DEEDS, "read", "read all", "whole", "yes", "yes"]), max_size=14)
offers = st.sampled_from(
    [(), ("PIPELINING",), ("PIPELINING", "CHUNKING", "SIZE 100000"), ("SIZE x", "LIMITS MAILMAX=2")]
)
BEFORE_GREETING = st.sampled_from([False, False, False, True])


async def act(script: list[str], reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    for word in script:
        match word:
            case "read":
                await reader.readline()
            case "read all":
                await reader.read(100_000)
            case "close":
                return
            case "reset":
                writer.transport.abort()
                return
            case "wait":
                await asyncio.sleep(0.05)
            case saying:
                writer.write(SAYINGS[saying])
                await writer.drain()
    await asyncio.sleep(5)


def play(script: list[str], offer: tuple[str, ...], at_once: bool, tls: tuple[Path, Path] | None) -> Sender:
    sender = Sender([Outgoing(ticket, "v@s.test", f"r{ticket}@a.test", b"x" * 3000 + b"\r\n") for ticket in range(5)])
    patience = Patience(command_s=0.12, data_s=0.12, dot_s=0.12, quit_s=0.1, farewell_s=0.12)
    limits = msgspec.structs.replace(QUICK, patience=patience, handshake_timeout_s=0.3)
    slots = Slots(1)

    async def converse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not at_once:
            await greet(reader, writer, *offer)
        await act(script, reader, writer)

    async def story() -> None:
        options: dict[str, object] = {}
        if tls is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(*tls)
            options["ssl"] = context
        async with serving(converse, **options) as host:
            host = msgspec.structs.replace(host, implicit_tls=tls is not None)
            policy = "required" if tls is not None else "off"
            async with pooling(sender, host, slots=slots, limits=limits, tls=policy) as pool:
                handed = 5
                async with asyncio.timeout(3.0):
                    # Until this connection, or the attempt at one, has come to its end.
                    while not sender.ends and len(sender.events) < handed:
                        await asyncio.sleep(0.01)
                pool.want(0)

    asyncio.run(story())
    return sender


def check(sender: Sender) -> None:
    handed = 5 - len(sender.queue)
    tickets = [event.ticket for event in sender.events]
    assert sorted(tickets) == sorted(set(tickets))
    assert len(tickets) == handed
    for event in sender.events:
        if isinstance(event, Accepted):
            assert 200 <= event.reply.code < 300
        assert isinstance(event, InDoubt) or event.reply is None or len(str(event.reply)) < 1100


@pytest.fixture(scope="module", autouse=True)
def module_is_quick() -> object:
    patch = pytest.MonkeyPatch()
    patch.setattr(watch, "TICK_S", 0.02)
    patch.setattr(pool_module, "FIRST_BACK_OFF_S", 0.05)
    yield
    patch.undo()


quick = settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])


@given(acts, offers, BEFORE_GREETING)
@quick
def test_hostile_in_plain_text(script: list[str], offer: tuple[str, ...], at_once: bool) -> None:
    check(play(script, offer, at_once, None))


@pytest.mark.slow
@given(acts, offers, BEFORE_GREETING)
@settings(quick, max_examples=20)
def test_hostile_behind_tls(
    certificate: tuple[Path, Path], script: list[str], offer: tuple[str, ...], at_once: bool
) -> None:
    check(play(script, offer, at_once, certificate))


@pytest.mark.long
@given(acts, offers, BEFORE_GREETING)
@settings(quick, max_examples=500)
def test_hostile_for_long(script: list[str], offer: tuple[str, ...], at_once: bool) -> None:
    check(play(script, offer, at_once, None))
