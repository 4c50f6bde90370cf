"""The sink as senders meet it: plain smtplib, pipelined groups, chunks, TLS, logins, steered addresses."""

from __future__ import annotations

import hashlib
import smtplib
import socket
from collections.abc import Iterator

import pytest

from engine.rehearse.record import read_record, tally
from engine.rehearse.running import RunningSink, run_sink_in_process
from engine.rehearse.sink import SinkSettings

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
