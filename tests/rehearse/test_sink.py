"""The sink as senders meet it: plain smtplib, pipelined groups, chunks, TLS, logins, steered addresses."""

from __future__ import annotations

import asyncio
import hashlib
import smtplib
import socket
import ssl
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.rehearse.conversation import Conversation
from engine.rehearse.record import read_record, tally
from engine.rehearse.running import RunningSink, run_sink_in_process
from engine.rehearse.sink import Sink, SinkCannotListen, SinkSettings

CONTENT = b"From: a@example.com\r\nMessage-ID: <1@example.com>\r\nSubject: x\r\n\r\nHello\r\n.dotted\r\n"
STUFFED = CONTENT.replace(b"\r\n.dotted", b"\r\n..dotted")


@pytest.fixture(scope="module")
def sink(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningSink]:
    """One willing sink for the stories of this module."""
    record = tmp_path_factory.mktemp("sink") / "record.tsv"
    with run_sink_in_process(SinkSettings(record=record)) as running:
        yield running


class Wire:
    """A raw client: sends bytes, reads replies."""

    def __init__(self, running: RunningSink) -> None:
        self.socket = socket.create_connection((running.host, running.port), timeout=5)
        self.file = self.socket.makefile("rb")
        assert self.reply().startswith(b"220")

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def reply(self) -> bytes:
        """The last line of the next reply; empty at the end of the connection."""
        while True:
            line = self.file.readline()
            if line[3:4] != b"-":
                return line

    def codes(self, count: int) -> list[int]:
        return [int(self.reply()[:3] or 0) for _ in range(count)]

    def ehlo(self) -> None:
        self.send(b"EHLO client.example\r\n")
        assert self.codes(1) == [250]

    def close(self) -> None:
        self.file.close()
        self.socket.close()


@pytest.fixture
def wire(sink: RunningSink) -> Iterator[Wire]:
    """A raw connection that has said EHLO."""
    client = Wire(sink)
    client.ehlo()
    yield client
    client.close()


def envelope(recipient: str, sender: str = "a@example.com") -> bytes:
    return f"MAIL FROM:<{sender}>\r\nRCPT TO:<{recipient}>\r\n".encode()


def lines(sink: RunningSink, recipient: str) -> list[dict[str, object]]:
    assert sink.record is not None
    return [row for row in read_record(sink.record).to_pylist() if row["recipient"] == recipient]


def test_plain_smtplib_is_accepted_and_recorded(sink: RunningSink) -> None:
    with smtplib.SMTP(sink.host, sink.port, timeout=5) as client:
        client.sendmail("a@example.com", ["plain@example.org", "second@example.org"], CONTENT)
    (line,) = lines(sink, "plain@example.org")
    assert line["sender"] == "a@example.com"
    assert line["message_id"] == "<1@example.com>"
    assert line["digest"] == hashlib.sha256(CONTENT).hexdigest()
    assert line["size"] == len(CONTENT)
    assert line["answer"] == "250"
    assert lines(sink, "second@example.org")[0]["session"] == line["session"]


def test_data_and_bdat_of_one_content_have_one_digest(sink: RunningSink, wire: Wire) -> None:
    wire.send(envelope("dot@example.org") + b"DATA\r\n")
    assert wire.codes(3) == [250, 250, 354]
    wire.send(STUFFED + b".\r\n" + envelope("chunk@example.org") + b"BDAT %d\r\n" % 10 + CONTENT[:10])
    wire.send(b"BDAT %d LAST\r\n" % (len(CONTENT) - 10) + CONTENT[10:] + b"NOOP\r\n")
    assert wire.codes(6) == [250] * 6
    assert lines(sink, "dot@example.org")[0]["digest"] == lines(sink, "chunk@example.org")[0]["digest"]


def test_steered_addresses_do_what_the_table_says(sink: RunningSink) -> None:
    for recipient, attempts in {
        "550@example.org": [[250, 550], [250, 550]],
        "550+anna@example.org": [[250, 550]],
        "451-once@example.org": [[250, 451], [250, 250, 354, 250], [250, 250, 354, 250]],
        "451-later.x@example.org": [[250, 451], [250, 250, 354, 250]],
        "451-twice-dot@example.org": [[250, 250, 354, 451], [250, 250, 354, 451], [250, 250, 354, 250]],
        "554-data@example.org": [[250, 250, 554]],
        "421@example.org": [[250, 421, 0]],
        "421-after-dot@example.org": [[250, 250, 354, 250, 421, 0]],
        "421-dot@example.org": [[250, 250, 354, 421, 0]],
        "drop@example.org": [[250, 0]],
        "drop-data@example.org": [[250, 250, 0]],
        "drop-before-dot@example.org": [[250, 250, 354, 0]],
        "drop-dot@example.org": [[250, 250, 354, 0]],
        "drop-once-after-dot@example.org": [[250, 250, 354, 0], [250, 250, 354, 250]],
        "anna.550@example.org": [[250, 250, 354, 250]],
    }.items():
        for expected in attempts:
            client = Wire(sink)
            client.ehlo()
            seen: list[int] = []
            for part in ("MAIL FROM:<a@example.com>\r\n", f"RCPT TO:<{recipient}>\r\n", "DATA\r\n"):
                client.send(part.encode())
                seen += client.codes(1)
                if seen[-1] not in (250, 354):
                    break
            if seen[-1] == 354:
                client.send(STUFFED + b".\r\n")
            seen += client.codes(len(expected) - len(seen))
            assert seen == expected, recipient
            client.close()
    assert [line["answer"] for line in lines(sink, "drop-once-after-dot@example.org")] == ["lost", "250"]
    assert lines(sink, "drop-before-dot@example.org") == []
    assert lines(sink, "drop-dot@example.org") == []
    assert lines(sink, "421-dot@example.org") == []
    assert len(lines(sink, "421-after-dot@example.org")) == 1
    assert sink.record is not None
    counted = tally(sink.record)
    assert counted.twice == ("451-once@example.org", "drop-once-after-dot@example.org")
    assert counted.unanswered == 1


def test_a_refused_sole_recipient_leaves_the_transaction_open(sink: RunningSink, wire: Wire) -> None:
    wire.send(envelope("550@example.org") + b"DATA\r\n" + envelope("next@example.org") + b"RSET\r\n")
    assert wire.codes(6) == [250, 550, 554, 503, 250, 250]


def test_a_chunk_without_recipients_is_read_and_refused_and_the_next_mail_works(wire: Wire) -> None:
    wire.send(envelope("550@example.org") + b"BDAT 5 LAST\r\nhello" + envelope("fine@example.org"))
    assert wire.codes(5) == [250, 550, 554, 250, 250]


def test_content_before_354_is_noticed(sink: RunningSink, wire: Wire) -> None:
    before = sink.counts().violations.get("content before 354", 0)
    wire.send(envelope("eager@example.org") + b"DATA\r\n" + STUFFED + b".\r\n")
    assert wire.codes(4) == [250, 250, 354, 250]
    assert sink.counts().violations["content before 354"] == before + 1


def test_greylisting_ends_after_its_time(wire: Wire) -> None:
    attempt = envelope("greylist-200ms@example.org")
    wire.send(attempt + b"RSET\r\n")
    assert wire.codes(3) == [250, 451, 250]
    time.sleep(0.25)
    wire.send(attempt + b"RSET\r\n")
    assert wire.codes(3) == [250, 250, 250]


def test_slow_replies_hold_what_comes_behind_them(wire: Wire) -> None:
    began = time.monotonic()
    wire.send(envelope("slow-200ms-rcpt@example.org") + b"RSET\r\nNOOP\r\n")
    assert wire.codes(4) == [250] * 4
    assert time.monotonic() - began >= 0.2


def test_never_takes_the_content_and_says_nothing(sink: RunningSink, wire: Wire) -> None:
    wire.send(envelope("never-after-dot@example.org") + b"BDAT 5 LAST\r\nhello" + b"NOOP\r\n")
    assert wire.codes(2) == [250, 250]
    wire.socket.settimeout(0.2)
    with pytest.raises(TimeoutError):
        wire.socket.recv(1)
    assert [line["answer"] for line in lines(sink, "never-after-dot@example.org")] == ["lost"]


def test_odd_replies(wire: Wire) -> None:
    wire.send(envelope("garbage@example.org") + envelope("x@example.org")[:0])
    assert wire.codes(1) == [250]
    assert wire.reply() == b"this is no reply\r\n"
    wire.send(b"RSET\r\n" + envelope("binary@example.org"))
    assert wire.codes(2) == [250, 250]
    assert b"\xe4" in wire.reply()
    wire.send(b"RSET\r\n" + envelope("long@example.org"))
    assert wire.codes(3) == [250, 250, 550]
    wire.send(b"RSET\r\n" + envelope("trickle@example.org") + b"NOOP\r\n")
    assert wire.codes(4) == [250] * 4


def test_a_reset_is_a_reset(wire: Wire) -> None:
    wire.send(envelope("reset@example.org"))
    assert wire.codes(1) == [250]
    with pytest.raises(ConnectionResetError):
        wire.socket.recv(100)


def test_senders_steer_mail(wire: Wire) -> None:
    wire.send(envelope("a@example.org", sender="550-mail@example.com") + b"NOOP\r\n")
    assert wire.codes(3) == [550, 503, 250]


def test_content_over_the_limit_is_read_and_refused(tmp_path: Path) -> None:
    with run_sink_in_process(SinkSettings(size_limit=1000, record=tmp_path / "r")) as running:
        client = Wire(running)
        client.ehlo()
        client.send(b"MAIL FROM:<a@example.com> SIZE=1001\r\n" + envelope("a@example.org") + b"DATA\r\n")
        assert client.codes(4) == [552, 250, 250, 354]
        client.send(b"x" * 200_000 + b"\r\n.\r\n" + envelope("b@example.org"))
        assert client.codes(3) == [552, 250, 250]
        client.send(b"BDAT 200000\r\n" + b"x" * 200_000 + b"BDAT 1 LAST\r\nx" + envelope("c@example.org"))
        assert client.codes(4) == [250, 552, 250, 250]
        client.close()
        assert read_record(tmp_path / "r").num_rows == 0


def test_starttls_is_a_new_start_and_login_works_inside() -> None:
    settings = SinkSettings(tls="starttls", require_tls=True, users={"ann": "secret"}, require_auth=True)
    with run_sink_in_process(settings) as running:
        assert running.certificate is not None
        context = ssl.create_default_context(cafile=str(running.certificate))
        for mechanism in ("PLAIN", "LOGIN", "CRAM-MD5"):
            with smtplib.SMTP(running.host, running.port, timeout=5) as client:
                client.ehlo()
                assert not client.has_extn("auth")
                assert client.mail("a@example.com")[0] == 530
                client.starttls(context=context)
                client.ehlo()
                assert not client.has_extn("starttls")
                assert client.mail("a@example.com")[0] == 530
                client.user, client.password = "ann", "wrong"
                with pytest.raises(smtplib.SMTPAuthenticationError):
                    client.auth(mechanism, getattr(client, "auth_" + mechanism.lower().replace("-", "_")))
                client.password = "secret"
                client.auth(mechanism, getattr(client, "auth_" + mechanism.lower().replace("-", "_")))
                client.sendmail("a@example.com", ["b@example.org"], CONTENT)
        assert running.counts().messages == 3


def test_implicit_tls() -> None:
    with run_sink_in_process(SinkSettings(tls="implicit")) as running:
        context = ssl.create_default_context(cafile=str(running.certificate))
        with smtplib.SMTP_SSL(running.host, running.port, timeout=5, context=context) as client:
            client.sendmail("a@example.com", ["b@example.org"], CONTENT)
        assert running.counts().messages == 1


def test_limits_on_connections_and_messages() -> None:
    with run_sink_in_process(SinkSettings(max_connections=1, messages_per_connection=1)) as running:
        first = Wire(running)
        with pytest.raises(smtplib.SMTPConnectError, match="421"):
            smtplib.SMTP(running.host, running.port, timeout=5)
        first.ehlo()
        first.send(envelope("a@example.org") + b"BDAT 5 LAST\r\nhello" + envelope("b@example.org"))
        assert first.codes(5) == [250, 250, 250, 421, 0]
        first.close()
        counts = running.counts()
        assert (counts.peak_open, counts.refused_connections, counts.messages) == (2, 1, 1)


def test_shares_are_drawn_from_the_seed(tmp_path: Path) -> None:
    def codes() -> list[int]:
        with run_sink_in_process(SinkSettings(defer_share=0.5, seed=7)) as running:
            client = Wire(running)
            client.ehlo()
            client.send((envelope("a@example.org") + b"BDAT 5 LAST\r\nhello") * 20)
            found = client.codes(60)[2::3]
            client.close()
            return found

    first = codes()
    assert set(first) == {250, 451}
    assert codes() == first


def test_a_round_trip_is_played() -> None:
    with run_sink_in_process(SinkSettings(delay_s=0.05)) as running:
        began = time.monotonic()
        client = Wire(running)
        client.ehlo()
        client.send(envelope("a@example.org") + b"BDAT 5 LAST\r\nhello")
        assert client.codes(3) == [250] * 3
        assert 0.15 <= time.monotonic() - began < 0.6
        client.close()


def test_two_sinks_on_one_port_is_an_error_that_names_it(sink: RunningSink) -> None:
    with pytest.raises(SinkCannotListen, match=str(sink.port)), run_sink_in_process(port=sink.port):
        pass


def test_a_full_read_buffer_behind_a_held_reply_is_not_lost(wire: Wire) -> None:
    wire.send(envelope("slow-300ms-rcpt@example.org") + b"RSET\r\n" + b"NOOP\r\n" * 30_000)
    assert wire.codes(30_003) == [250] * 30_003


class _Wire(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += bytes(data)

    def pause_reading(self) -> None:
        pass

    def is_closing(self) -> bool:
        return False


class _HastyLoop:
    """Its handshake ends with the client's EHLO in the same bytes."""

    def __init__(self, inside: _Wire) -> None:
        self.inside = inside

    async def start_tls(self, transport: object, protocol: Conversation, *_: object, **__: object) -> _Wire:
        hear(protocol, b"EHLO inside.test\r\n")
        return self.inside


def hear(conversation: Conversation, octets: bytes) -> None:
    conversation.get_buffer(len(octets))[: len(octets)] = octets
    conversation.buffer_updated(len(octets))


def test_an_ehlo_that_ends_the_handshake_is_answered() -> None:
    async def story() -> bytes:
        sink = Sink(SinkSettings(tls="starttls"))
        conversation, outside, inside = sink._new(), _Wire(), _Wire()
        conversation.connection_made(outside)
        conversation._loop = _HastyLoop(inside)  # type: ignore[assignment]
        hear(conversation, b"EHLO outside.test\r\n")
        hear(conversation, b"STARTTLS\r\n")
        await asyncio.sleep(0.01)
        return inside.written

    assert asyncio.run(story()).startswith(b"250-")
