"""Sources: everything is handled once, kept until recorded, never deleted unless told."""

from __future__ import annotations

import json
import mailbox
import os
from pathlib import Path

import pytest
from sent_campaign import Sent, StoppedClock

from engine.bounce import intake
from engine.bounce.classify import shipped_rules
from engine.bounce.desk import Desk
from engine.bounce.ours import Ours
from engine.bounce.record import feedback_tables
from engine.bounce.sources import HEAD, TAIL, MaildirSource, SourceUnreadable, SpoolSource, open_source, spool
from engine.lists.suppressions import Suppressions


def deliver(path: Path, *messages: bytes) -> mailbox.Maildir:
    box = mailbox.Maildir(path)
    for raw in messages:
        box.add(raw)
    return box


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder)) if folder.exists() else []


PERSON = b"From: Zoe <zoe@elsewhere.example>\nTo: news@example.com\nSubject: Re: hello\n\nHow are you?\n"


def test_maildir_is_read_once_and_nothing_is_deleted(sent: Sent, desk: Desk, tmp_path: Path) -> None:
    box = tmp_path / "Maildir"
    deliver(box, sent.bounce(1), sent.bounce(2), PERSON)
    tally = intake.read_once([MaildirSource(box)], desk)
    assert (tally.messages, tally.unmatched) == (3, 1)
    assert names(box / "new") == names(box / "cur") == []
    assert len(names(box / ".Handled" / "cur")) == 2
    assert len(names(box / ".Unmatched" / "cur")) == 1
    assert intake.read_once([MaildirSource(box)], desk).messages == 0


def test_told_to_delete_it_deletes_only_what_was_matched(sent: Sent, desk: Desk, tmp_path: Path) -> None:
    """T107."""
    box = tmp_path / "Maildir"
    deliver(box, sent.bounce(1), PERSON)
    intake.read_once([MaildirSource(box, delete=True)], desk)
    assert not names(box / ".Handled" / "cur")
    assert len(names(box / ".Unmatched" / "cur")) == 1


def test_two_readers_of_one_maildir(sent: Sent, clock: StoppedClock, tmp_path: Path) -> None:
    """The slower one finds the messages gone and makes nothing of it."""
    box = tmp_path / "Maildir"
    deliver(box, sent.bounce(1), sent.bounce(2))
    desks = [Desk(Ours([sent.folder]), shipped_rules(), clock) for _ in range(2)]
    sources = [MaildirSource(box), MaildirSource(box)]
    batches = [next(iter(source.batches())) for source in sources]  # both have read both messages
    for source, desk, batch in zip(sources, desks, batches, strict=True):
        for found, taken in zip(batch, desk.take([one.incoming for one in batch]), strict=True):
            source.settle(found, taken)
        desk.close()
    assert len(names(box / ".Handled" / "cur")) == 2
    assert len(Suppressions(sent.folder / "suppression", list_id=None)) == 2


def test_killed_between_record_and_settle_records_once(sent: Sent, clock: StoppedClock, tmp_path: Path) -> None:
    box = tmp_path / "Maildir"
    deliver(box, sent.bounce(1))
    killed = Desk(Ours([sent.folder]), shipped_rules(), clock)
    (batch,) = MaildirSource(box).batches()
    killed.take([found.incoming for found in batch])  # and no settle, no close
    again = Desk(Ours([sent.folder]), shipped_rules(), clock)
    tally = intake.read_once([MaildirSource(box)], again)
    assert (tally.messages, tally.known) == (0, 1)
    assert len(names(box / ".Handled" / "cur")) == 1
    assert sum(table.num_rows for _, table in feedback_tables([sent.folder / "feedback"])) == 1


def test_folder_of_messages_stays_and_unmatched_ones_are_copied(sent: Sent, desk: Desk, tmp_path: Path) -> None:
    folder = tmp_path / "eml"
    folder.mkdir()
    (folder / "1.eml").write_bytes(sent.bounce(1))
    (folder / "2.eml").write_bytes(PERSON)
    unmatched = sent.folder / "feedback" / "unmatched"
    source = open_source(folder, unmatched)
    assert intake.read_once([source], desk).messages == 2
    assert names(folder) == ["1.eml", "2.eml"]
    (copy,) = unmatched.iterdir()
    assert copy.read_bytes() == PERSON
    assert intake.read_once([source], desk).messages == 0


def test_mbox_and_what_is_appended_to_it(sent: Sent, desk: Desk, tmp_path: Path) -> None:
    path = tmp_path / "mbox"
    line = b"From MAILER-DAEMON Mon Mar  2 10:00:00 2026\n"
    path.write_bytes(
        line + sent.bounce(1) + b"\n" + line + sent.bounce(2).replace(b"\n\n", b"\n\n>From us\n", 1) + b"\n"
    )
    source = open_source(path, tmp_path / "unmatched")
    tally = intake.read_once([source], desk)
    assert (tally.messages, tally.decisions) == (2, {"suppressed": 2})
    with path.open("ab") as file:
        file.write(line + sent.bounce(3) + b"\n")
    assert intake.read_once([source], desk).messages == 1


def test_large_message_is_read_head_and_tail_only(sent: Sent, desk: Desk, tmp_path: Path) -> None:
    folder = tmp_path / "eml"
    folder.mkdir()
    path = folder / "large.eml"
    path.write_bytes(sent.bounce(1) + b"A" * 50_000_000 + b"\nthe end\n")
    source = open_source(folder, tmp_path / "unmatched")
    ((found,),) = source.batches()
    assert len(found.incoming.raw) <= HEAD + TAIL + 1
    assert found.incoming.raw.endswith(b"the end\n")
    assert intake.read_once([open_source(folder, tmp_path / "unmatched")], desk).decisions == {"suppressed": 1}


def test_report_behind_a_large_attachment_is_found_in_the_tail(sent: Sent, desk: Desk, tmp_path: Path) -> None:
    raw = sent.bounce(1)
    head, mark, rest = raw.partition(b"--=_1\nContent-Type: message/delivery-status")
    large = b"--=_1\nContent-Type: image/jpeg\nContent-Transfer-Encoding: base64\n\n" + b"QUJD\n" * 400_000
    path = tmp_path / "large.eml"
    path.write_bytes(head + large + mark + rest)
    assert intake.read_once([open_source(path, tmp_path / "u")], desk).decisions == {"suppressed": 1}


def test_spool_takes_messages_and_events(sent: Sent, desk: Desk) -> None:
    inbox = sent.folder / "feedback" / "inbox"
    spool(inbox, sent.bounce(1), ".eml")
    events = [
        {"event": "bounce", "recipient": "cleo@example.org", "diagnostic": "550 5.1.1 user unknown"},
        {"event": "unsubscribe", "token": sent.marks(3).unsubscribe},
        {"event": "delivered", "recipient": "ida@example.org"},
    ]
    spool(inbox, json.dumps(events).encode(), ".json")
    spool(inbox, b'{"event": "party"}', ".json")
    tally = intake.read_once([SpoolSource(inbox, inbox.parent / "unmatched")], desk)
    assert tally.decisions == {"suppressed": 2, "unsubscribed": 1, "unmatched": 1}
    assert names(inbox) == []
    assert len(names(inbox.parent / "handled")) == 3


def test_source_that_is_not_there_does_not_stop_the_others(sent: Sent, desk: Desk, tmp_path: Path) -> None:
    box = tmp_path / "Maildir"
    deliver(box, sent.bounce(1))
    gone = MaildirSource(tmp_path / "gone")
    tally = intake.read_once([gone, MaildirSource(box)], desk)
    assert tally.messages == 1
    assert "cannot be read" in tally.problems[0]
    with pytest.raises(SourceUnreadable):
        open_source(tmp_path / "nowhere", tmp_path)


def test_one_intake_at_a_time(sent: Sent) -> None:
    feedback = sent.folder / "feedback"
    with intake.intake_lock([feedback]), pytest.raises(intake.AnotherIntake), intake.intake_lock([feedback]):
        pass
    with intake.intake_lock([feedback]):
        pass


def test_following_goes_on_until_it_is_stopped(sent: Sent, desk: Desk, tmp_path: Path) -> None:
    box = tmp_path / "Maildir"
    maildir = deliver(box)
    told: list[intake.Tally] = []
    waits: list[float] = []

    class Box(MaildirSource):
        def wait(self, seconds: float) -> None:
            waits.append(seconds)
            maildir.add(sent.bounce(len(waits)))

    intake.follow(
        [Box(box)],
        desk,
        is_stopped=lambda: len(told) >= 3,
        told=told.append,
        tell=lambda text: None,
        sleep=lambda seconds: None,
    )
    assert [tally.messages for tally in told] == [1, 1, 1]
