"""IMAP against a real Dovecot: fetched once, moved, IDLE, a server that goes away."""

from __future__ import annotations

import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from sent_campaign import Sent, StoppedClock

pytest.importorskip("imapclient")
from private_dovecot import PASSWORD, PrivateDovecot

from engine.bounce import intake
from engine.bounce.classify import shipped_rules
from engine.bounce.desk import Desk
from engine.bounce.imap import ImapSource
from engine.bounce.ours import Ours
from engine.bounce.sources import HEAD, TAIL, SourceUnreadable
from engine.config import ImapTable, SettingsError
from engine.lists.suppressions import Suppressions

pytestmark = [pytest.mark.dovecot, pytest.mark.slow]


@pytest.fixture
def dovecot() -> Iterator[PrivateDovecot]:
    # A short path: Dovecot's sockets must fit into 108 bytes.
    with tempfile.TemporaryDirectory(prefix="dc") as folder:
        server = PrivateDovecot(Path(folder))
        yield server
        server.stop()


def source(server: PrivateDovecot, mailbox_name: str = "INBOX", *, delete: bool = False) -> ImapSource:
    table = ImapTable(url=server.url, tls="off", password_env="BOUNCES_PASSWORD")
    return ImapSource(table, mailbox_name, delete=delete)


@pytest.fixture(autouse=True)
def password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BOUNCES_PASSWORD", PASSWORD)


def deliver(server: PrivateDovecot, *messages: bytes) -> None:
    server.deliver(*messages)


def count(server: PrivateDovecot, folder: str = "") -> int:
    path = server.maildir / folder if folder else server.maildir
    return sum(len(list((path / part).iterdir())) for part in ("new", "cur") if (path / part).exists())


PERSON = b"From: Zoe <zoe@elsewhere.example>\nTo: news@example.com\nSubject: Re: hello\n\nHow are you?\n"


def test_read_once_moved_and_never_deleted(dovecot: PrivateDovecot, sent: Sent, desk: Desk) -> None:
    deliver(dovecot, *(sent.bounce(row) for row in range(3)), PERSON)
    box = source(dovecot)
    tally = intake.read_once([box], desk)
    box.close()
    assert (tally.messages, tally.unmatched, tally.problems) == (4, 1, [])
    assert (count(dovecot), count(dovecot, ".Handled"), count(dovecot, ".Unmatched")) == (0, 3, 1)
    assert len(Suppressions(sent.folder / "suppression", list_id=None)) == 3


def test_told_to_delete(dovecot: PrivateDovecot, sent: Sent, desk: Desk) -> None:
    deliver(dovecot, sent.bounce(1), PERSON)
    box = source(dovecot, delete=True)
    intake.read_once([box], desk)
    box.close()
    assert (count(dovecot), count(dovecot, ".Handled"), count(dovecot, ".Unmatched")) == (0, 0, 1)


def test_several_mailboxes(dovecot: PrivateDovecot, sent: Sent, desk: Desk) -> None:
    deliver(dovecot, sent.bounce(1))
    dovecot.deliver(sent.bounce(2), folder=".Complaints")
    boxes = [source(dovecot), source(dovecot, "Complaints")]
    assert intake.read_once(boxes, desk).messages == 2
    for box in boxes:
        box.close()


def test_large_message_is_fetched_head_and_tail(dovecot: PrivateDovecot, sent: Sent, desk: Desk) -> None:
    deliver(dovecot, sent.bounce(1) + b"A" * 9_000_000 + b"\nthe end\n")
    box = source(dovecot)
    ((found,),) = box.batches()
    assert len(found.incoming.raw) <= HEAD + TAIL + 1
    assert b"the end" in found.incoming.raw[-20:]
    assert desk.take([found.incoming])[0].is_matched
    box.close()


def test_two_readers_on_one_mailbox(dovecot: PrivateDovecot, sent: Sent, clock: StoppedClock) -> None:
    deliver(dovecot, *(sent.bounce(row) for row in range(6)))
    boxes = [source(dovecot), source(dovecot)]
    desks = [Desk(Ours([sent.folder]), shipped_rules(), clock) for _ in boxes]
    fetched = [next(iter(box.batches())) for box in boxes]
    for box, desk, batch in zip(boxes, desks, fetched, strict=True):
        for found, taken in zip(batch, desk.take([one.incoming for one in batch]), strict=True):
            box.settle(found, taken)
        desk.close()
        box.close()
    assert (count(dovecot), count(dovecot, ".Handled")) == (0, 6)
    assert len(Suppressions(sent.folder / "suppression", list_id=None)) == 6


def test_server_goes_away_between_fetch_and_settle(dovecot: PrivateDovecot, sent: Sent, desk: Desk) -> None:
    """Recorded, not settled; found again when the server is back, known by its key, and settled then."""
    deliver(dovecot, *(sent.bounce(row) for row in range(3)))
    box = source(dovecot)
    (batch,) = box.batches()
    taken = desk.take([found.incoming for found in batch])
    dovecot.stop()
    box._client.socket().shutdown(socket.SHUT_RDWR)
    with pytest.raises(SourceUnreadable):
        box.settle(batch[0], taken[0])
    assert "cannot be read" in intake.read_once([box], desk).problems[0]
    dovecot.start()
    tally = intake.read_once([box], desk)
    box.close()
    assert (tally.messages, tally.known) == (0, 3)
    assert (count(dovecot), count(dovecot, ".Handled")) == (0, 3)


def test_idle_tells_of_a_new_message(dovecot: PrivateDovecot, sent: Sent, desk: Desk) -> None:
    box = source(dovecot)
    assert intake.read_once([box], desk).problems == []

    def later() -> None:
        time.sleep(0.5)
        deliver(dovecot, sent.bounce(4))

    thread = threading.Thread(target=later)
    thread.start()
    start = time.monotonic()
    box.wait(20.0)
    assert time.monotonic() - start < 15
    assert intake.read_once([box], desk).messages == 1
    thread.join()
    box.close()


def test_wrong_password_is_told(dovecot: PrivateDovecot, desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BOUNCES_PASSWORD", "wrong")
    (problem,) = intake.read_once([source(dovecot)], desk).problems
    assert "127.0.0.1" in problem


def test_settings_that_cannot_work_are_refused() -> None:
    for table in (
        ImapTable(url="imap://host", password_env="BOUNCES_PASSWORD"),
        ImapTable(url="pop3://u@host", password_env="BOUNCES_PASSWORD"),
        ImapTable(url="imaps://u:secret@host"),
        ImapTable(url="imaps://u@host"),
        ImapTable(url="imaps://u@host", password_env="NOT_SET_ANYWHERE"),
        ImapTable(url="imaps://u@host", password_file="nowhere"),
    ):
        with pytest.raises(SettingsError):
            ImapSource(table, "INBOX")
