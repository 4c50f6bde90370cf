"""The grammar of steered local parts, and the record's lines."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.rehearse.record import Recorder, read_record, tally
from engine.rehearse.steering import Act, Kind, Phase, Steering, Wish, read_wish, reply_for


@pytest.mark.parametrize(
    ("local", "wish"),
    [
        ("550", Wish(Act(Kind.REPLY, Phase.RCPT, reply_for(550)))),
        ("550-dot+17", Wish(Act(Kind.REPLY, Phase.DOT, reply_for(550)))),
        ("451-Twice", Wish(Act(Kind.REPLY, Phase.RCPT, reply_for(451)), 2)),
        ("452-7x-data.anna", Wish(Act(Kind.REPLY, Phase.DATA, reply_for(452)), 7)),
        ("451-later", Wish(Act(Kind.REPLY, Phase.RCPT, reply_for(451)), 1)),
        ("slow-3s", Wish(Act(Kind.SLOW, Phase.DOT, None, 3.0))),
        ("slow-250ms-once-rcpt", Wish(Act(Kind.SLOW, Phase.RCPT, None, 0.25), 1)),
        ("never", Wish(Act(Kind.NEVER, Phase.DOT))),
        ("drop-before-dot", Wish(Act(Kind.DROP, Phase.BEFORE_DOT))),
        ("reset-once-after-dot+x+y", Wish(Act(Kind.RESET, Phase.AFTER_DOT), 1)),
        ("greylist-2s", Wish(Act(Kind.REPLY, Phase.RCPT, reply_for(451)), None, 2.0)),
    ],
)
def test_steered(local: str, wish: Wish) -> None:
    assert read_wish(local) == wish


@pytest.mark.parametrize(
    "local", ["anna", "5500", "250", "550x", "slow", "greylist", "550-2s", "drop-in", "never-ending", "slow-3m", ""]
)
def test_ordinary(local: str) -> None:
    assert read_wish(local) is None


def test_attempts_are_counted_for_each_recipient() -> None:
    steering = Steering()
    told = [steering.attempt("451-twice+a@example.org", 0.0) is None for _ in range(4)]
    assert told == [False, False, True, True]
    assert steering.attempt("451-twice+b@example.org", 0.0) is not None


def test_the_record_keeps_odd_values_and_drops_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "record.tsv"
    for attempt in range(2):
        recorder = Recorder(path)
        recorder.add(
            time_us=5,
            session=attempt,
            sender=b"",
            recipients=[b'"a\tb\\"@example.org', "jürgen@example.org".encode(), b"\xff@example.org"],
            message_id=b"<x@y>",
            digest="00",
            size=3,
            answer=b"250" if attempt else b"lost",
        )
        recorder.close()
    with path.open("ab") as file:
        file.write(b"5\t1\ta@example.com\ttorn@exam")
    table = read_record(path)
    assert table["recipient"].to_pylist()[:3] == ['"a\\tb\\\\"@example.org', "jürgen@example.org", "�@example.org"]
    assert table["session"].to_pylist() == [0, 0, 0, 1, 1, 1]
    counted = tally(path)
    assert (counted.messages, counted.recipients, len(counted.twice), counted.unanswered) == (6, 3, 3, 3)


def test_an_empty_record_is_an_empty_table(tmp_path: Path) -> None:
    path = tmp_path / "record.tsv"
    path.write_bytes(b"")
    assert read_record(path).num_rows == 0
    Recorder(path).close()
    assert tally(path).twice == ()
