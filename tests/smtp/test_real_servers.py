"""Postfix and aiosmtpd: what they deliver is what was sent, whatever they offer and refuse.

One Postfix plays several servers: by the client's address it discards PIPELINING and CHUNKING, asks for a login, or
greylists; a policy service of a few lines does the latter.
"""

from __future__ import annotations

import asyncio
import socketserver
import threading
from collections.abc import Iterator

import pytest

from engine.smtp.destination import Credentials, Destination, Host
from engine.smtp.dialogue import Accepted, Event, Manner, Outgoing, Patience, Refused, Stage
from engine.smtp.handshake import Ended
from engine.smtp.probe import probe
from tests.conftest import require
from tests.peers.aiosmtpd_server import AiosmtpdServer, running_aiosmtpd
from tests.peers.postfix import Postfix, missing_postfix, running_postfix
from tests.smtp.conftest import Sender, Slots, pooling
from tests.smtp.dovecot_login import checking_passwords, missing_dovecot
from tests.smtp.test_session import limits

EVERYTHING, ONLY_PIPELINING, NOTHING, LOGIN_FIRST = "127.0.0.1", "127.0.0.2", "127.0.0.3", "127.0.0.4"


class Greylist(socketserver.ThreadingTCPServer):
    """A policy service: the first time a grey recipient is seen it is deferred."""

    allow_reuse_address = True
    daemon_threads = True

    def __init__(self) -> None:
        self.seen: set[str] = set()
        super().__init__(("127.0.0.1", 0), _Policy)


class _Policy(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        recipient = ""
        for raw in self.rfile:
            line = raw.decode().strip()
            if line.startswith("recipient="):
                recipient = line.partition("=")[2]
            if line:
                continue
            assert isinstance(self.server, Greylist)
            is_new = recipient.startswith("grey") and recipient not in self.server.seen
            self.server.seen.add(recipient)
            action = "DEFER_IF_PERMIT 4.7.1 Greylisted, see you in 5 minutes" if is_new else "DUNNO"
            self.wfile.write(f"action={action}\n\n".encode())


@pytest.fixture(scope="module")
def postfix() -> Iterator[Postfix]:
    require("postfix", missing_postfix())
    policy = Greylist()
    threading.Thread(target=policy.serve_forever, daemon=True).start()
    require("dovecot", missing_dovecot())
    with checking_passwords({"ann@postfix.example": "correct horse"}) as login_socket:
        settings = {
            "smtpd_discard_ehlo_keyword_address_maps": (
                f"inline:{{ {{ {ONLY_PIPELINING} = chunking }}, {{ {NOTHING} = pipelining, chunking }} }}"
            ),
            "smtpd_sasl_auth_enable": "yes",
            "smtpd_sasl_type": "dovecot",
            "smtpd_sasl_path": str(login_socket),
            "smtpd_tls_auth_only": "yes",
            "smtpd_sender_restrictions": (
                "permit_sasl_authenticated, check_client_access inline:{ { " + LOGIN_FIRST + " = REJECT login first } }"
            ),
            "smtpd_relay_restrictions": f"check_policy_service inet:127.0.0.1:{policy.server_address[1]}, permit",
            "message_size_limit": "200000",
        }
        with running_postfix(settings) as running:
            yield running
    policy.shutdown()
    policy.server_close()


def letter(ticket: int, recipient: str, lines: int = 3) -> Outgoing:
    """With lines that begin with dots, and one that is a lone dot."""
    body = b"".join(b"line %d of %d\r\n..two\r\n.\r\n" % (line, ticket) for line in range(lines))
    head = b"From: a@sender.test\r\nMessage-ID: <%d@sender.test>\r\nSubject: %d\r\n\r\n" % (ticket, ticket)
    return Outgoing(ticket, f"v{ticket}@sender.test", recipient, head + body)


def send(messages: list[Outgoing], host: Host, connections: int = 2, depth: int = 4, **settings: object) -> Sender:
    """Send them; everything settled once."""
    sender = Sender(messages)

    async def story() -> None:
        patience = Patience(command_s=10, data_s=10, dot_s=20)
        patient = limits(manner=Manner(depth=depth), patience=patience, handshake_timeout_s=10.0, connect_timeout_s=5.0)
        async with pooling(
            sender, host, slots=Slots(connections), want=connections, limits=patient, **settings
        ) as pool:
            await sender.until(lambda heard: len(heard.events) >= len(messages) or heard.ends, 30)
            await pool.close()

    asyncio.run(story())
    return sender


def by_ticket(events: list[Event]) -> dict[int, Event]:
    found = {event.ticket: event for event in events}
    assert len(found) == len(events)
    return found


def delivered(postfix: Postfix, tickets: set[int]) -> dict[int, tuple[bytes, bytes]]:
    """Return path and content of these messages, once all are there."""
    for expected in range(1, 400):
        found: dict[int, tuple[bytes, bytes]] = {}
        for raw in postfix.contents():
            head, _, body = raw.partition(b"\n\n")
            number = int(head.split(b"Message-ID: <")[1].split(b"@")[0])
            path = head.split(b"Return-Path: <")[1].split(b">")[0]
            if number in tickets:
                assert number not in found, "delivered twice"
                found[number] = (path, body)
        if set(found) == tickets:
            return found
        postfix.wait_for(expected)
    raise AssertionError("not all arrived")


@pytest.mark.slow
@pytest.mark.postfix
@pytest.mark.dovecot
@pytest.mark.parametrize("source", [EVERYTHING, ONLY_PIPELINING, NOTHING], ids=["chunking", "pipelining", "lock-step"])
def test_postfix_delivers_the_same_bytes_in_each_manner(postfix: Postfix, source: str) -> None:
    """Good and refused recipients mixed: nothing is swapped, nothing repeated, every refusal keeps its own reply."""
    base = int(source.rpartition(".")[2]) * 1000
    recipients = {}
    for number in range(40):
        ticket = base + number
        recipients[ticket] = {1: "550@some.example", 3: "451@some.example"}.get(number % 5, "ok@some.example")
    host = Host(name="127.0.0.1", port=postfix.port)
    sender = send([letter(ticket, to) for ticket, to in recipients.items()], host, tls="off", source_address=source)
    found = by_ticket(sender.events)
    good = set()
    for ticket, recipient in recipients.items():
        event = found[ticket]
        if recipient.startswith("ok"):
            assert isinstance(event, Accepted), event
            assert "queued as" in event.reply.text
            good.add(ticket)
        else:
            assert isinstance(event, Refused), event
            assert event.stage is Stage.RCPT
            assert event.reply.code == int(recipient[:3])
    for ticket, (path, body) in delivered(postfix, good).items():
        assert path == b"v%d@sender.test" % ticket
        assert body == letter(ticket, "").content.partition(b"\r\n\r\n")[2].replace(b"\r\n", b"\n")


@pytest.mark.slow
@pytest.mark.postfix
@pytest.mark.dovecot
def test_postfix_greylists_once(postfix: Postfix) -> None:
    """T085: deferred by policy at RCPT, accepted the next time; the retry itself is the planner's."""
    host = Host(name="127.0.0.1", port=postfix.port)
    sender = send([letter(7001, "grey@some.example")], host, tls="off")
    (event,) = sender.events
    assert isinstance(event, Refused)
    assert (event.stage, event.reply.code, event.reply.enhanced) == (Stage.RCPT, 450, "4.7.1")
    assert "Greylisted" in event.reply.text
    sender = send([letter(7001, "grey@some.example")], host, tls="off")
    assert isinstance(sender.events[0], Accepted)


@pytest.mark.slow
@pytest.mark.postfix
@pytest.mark.dovecot
def test_postfix_with_tls_and_login(postfix: Postfix) -> None:
    host = Host(name="localhost", port=postfix.port, addresses=("127.0.0.1",))
    secure = {"tls": "verified", "tls_ca_file": str(postfix.certificate), "source_address": LOGIN_FIRST}
    login = Credentials("ann@postfix.example", "correct horse")
    messages = [letter(8000 + number, "ok@some.example", 400) for number in range(20)]
    sender = send(messages, host, credentials=login, **secure)
    assert [type(event) for event in sender.events] == [Accepted] * 20, sender.ends
    delivered(postfix, {message.ticket for message in messages})
    sender = send(messages[:1], host, **secure)
    assert isinstance(sender.events[0], Refused)
    assert sender.events[0].stage in (Stage.MAIL, Stage.RCPT)
    wrong = Credentials("ann@postfix.example", "wrong")
    sender = send(messages[:1], host, credentials=wrong, **secure)
    assert sender.events == []
    assert sender.ends[0].why is Ended.AUTH_REFUSED
    assert sender.ends[0].reply is not None
    assert sender.ends[0].reply.code == 535


@pytest.mark.postfix
@pytest.mark.dovecot
def test_postfix_says_what_it_takes(postfix: Postfix) -> None:
    """SIZE: known before sending. And `engine check` sees it all."""
    host = Host(name="127.0.0.1", port=postfix.port)
    sender = send([letter(9001, "ok@some.example", 20_000)], host, tls="off")
    (event,) = sender.events
    assert isinstance(event, Refused)
    assert event.reply.local
    assert event.reply.code == 552
    report = asyncio.run(probe(Destination(key="x", hosts=(host,), tls="required")))  # type: ignore[arg-type]
    assert report.problem is None
    text = "\n".join(line.text for line in report.lines)
    assert "PIPELINING, SIZE 200000" in text
    assert "CHUNKING" in text


@pytest.fixture
def aiosmtpd_server() -> Iterator[AiosmtpdServer]:
    with running_aiosmtpd() as server:
        yield server


@pytest.mark.parametrize("depth", [1, 4])
def test_aiosmtpd_takes_the_same_bytes(aiosmtpd_server: AiosmtpdServer, depth: int) -> None:
    recipients = {number: ("550@a.test" if number % 4 == 2 else f"r{number}@a.test") for number in range(20)}
    host = Host(name="127.0.0.1", port=aiosmtpd_server.port)
    messages = [letter(ticket, to) for ticket, to in recipients.items()]
    sender = send(messages, host, depth=depth, tls="off")
    found = by_ticket(sender.events)
    for ticket, to in recipients.items():
        assert isinstance(found[ticket], Refused if to.startswith("550") else Accepted), found[ticket]
    contents = {envelope.rcpt_tos[0]: envelope.content for envelope in aiosmtpd_server.envelopes}
    assert len(contents) == len(aiosmtpd_server.envelopes) == 15
    for message in messages:
        if not message.recipient.startswith("550"):
            assert contents[message.recipient] == message.content
