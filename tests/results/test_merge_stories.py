"""One situation each, as the logs of real runs would tell it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pyarrow as pa
import pytest
from conftest import T0, LogWriter, make_plan

from engine.errors import Exit
from engine.results.merge import Decision, Merged, merge
from engine.results.reports import SCHEMA as REPORTS
from formats.outcomes import WORDS
from formats.sendlog import Reason, Verdict


def words(merged: Merged) -> list[str]:
    return ["/".join(filter(None, WORDS[word])) for word in merged.word.tolist()]


def test_each_verdict_becomes_its_outcome(logs: Path) -> None:
    log = LogWriter("a")
    log.accepted(0)
    log.attempt(1, Verdict.REJECTED, reason=Reason.RECIPIENT, code=550)
    log.attempt(2, Verdict.REJECTED, reason=Reason.POLICY, code=554)
    log.attempt(3, Verdict.REJECTED, reason=Reason.CONTENT, code=554)
    log.attempt(4, Verdict.REJECTED, reason=Reason.SIZE, code=552)
    log.attempt(5, Verdict.REJECTED, reason=Reason.SENDER, code=550)
    log.attempt(6, Verdict.REJECTED, code=550)
    log.attempt(7, Verdict.DEFERRED, code=451)
    log.result(0, 7, Verdict.EXPIRED)
    log.result(0, 8, Verdict.SUPPRESSED, attempt=0)
    log.result(0, 9, Verdict.INVALID, reason=Reason.ADDRESS)
    log.result(0, 10, Verdict.INVALID, reason=Reason.RENDER)
    log.result(0, 11, Verdict.UNSENT, reason=Reason.CANCELLED)
    log.result(0, 12, Verdict.UNSENT, reason=Reason.EXPIRED)
    log.attempt(13, Verdict.DEFERRED, code=451)
    log.attempt(14, Verdict.LOST)
    log.attempt(15, Verdict.UNTOUCHED)
    log.attempt(16, Verdict.IN_DOUBT)
    log.intent(17)
    with merge(make_plan(19), [log.write(logs)]) as merged:
        assert words(merged) == [
            "accepted",
            "bounced/recipient",
            "bounced/policy",
            "bounced/content",
            "bounced/content",
            "bounced/policy",
            "bounced/policy",
            "deferred",
            "suppressed",
            "invalid/address",
            "invalid/render",
            "unsent/cancelled",
            "unsent/expired",
            "unsent/waiting",
            "unsent/not_reached",
            "unsent/not_reached",
            "in_doubt",
            "in_doubt",
            "unsent/not_reached",
        ]
        assert sum(merged.outcomes.values()) == 19
        assert merged.exit_code == Exit.IN_DOUBT
        details = merged.resolved(0)
        assert details.attempts.tolist()[:9] == [1, 1, 1, 1, 1, 1, 1, 1, 0]
        assert details.attempts[14] == 0, "a connection lost before the dot is no attempt"
        assert details.first_at[14] == 0


def test_a_later_deferral_does_not_undo_an_acceptance(logs: Path) -> None:
    first, second = LogWriter("a"), LogWriter("b", sender="host-b")
    first.accepted(0)
    second.at += 3600 * 1_000_000
    second.attempt(0, Verdict.DEFERRED, attempt=2, code=451)
    with merge(make_plan(1), [second.write(logs), first.write(logs)]) as merged:
        assert words(merged) == ["accepted"]
        assert merged.exit_code == Exit.DONE
        assert merged.resolved(0).attempts.tolist() == [2]
        assert merged.resolved(0).first_at.tolist() == [T0 + 1_000_000]


def test_lost_after_the_dot_is_in_doubt_until_any_evidence(logs: Path) -> None:
    log = LogWriter("a")
    serials = [log.attempt(row, Verdict.IN_DOUBT, text="connection closed after the dot") for row in range(4)]
    log.result(serials[1], 1, Verdict.ACCEPTED, code=250)
    log.result(serials[2], 2, Verdict.DEFERRED, code=451)
    log.result(serials[3], 3, Verdict.LOST)
    with merge(make_plan(4), [log.write(logs)]) as merged:
        assert words(merged) == ["in_doubt", "accepted", "unsent/waiting", "unsent/not_reached"]
        assert merged.resolved(0).texts()[0].as_py() == "connection closed after the dot"


def test_an_intent_in_doubt_outweighs_a_deferral_of_the_same_row(logs: Path) -> None:
    log = LogWriter("a")
    log.attempt(0, Verdict.DEFERRED, code=451)
    log.intent(0, attempt=2)
    with merge(make_plan(1), [log.write(logs, close=False)]) as merged:
        assert words(merged) == ["in_doubt"]
        assert merged.resolved(0).attempts.tolist() == [2]


def test_the_operators_word_on_doubt(logs: Path) -> None:
    log = LogWriter("a")
    serials = [log.intent(row) for row in range(3)]
    said = [
        Decision("a", serials[0], 0, "resend", "ann", T0),
        Decision("a", serials[1], 1, "accept", "ann", T0),
        Decision("other log", serials[2], 2, "accept", "ann", T0),
    ]
    with merge(make_plan(3), [log.write(logs)], decisions=said) as merged:
        assert words(merged) == ["unsent/waiting", "accepted/operator", "in_doubt"]


def test_two_accepted_are_a_duplicate(logs: Path) -> None:
    first, second = LogWriter("a"), LogWriter("b", sender="host-b")
    first.accepted(3)
    second.accepted(3)
    with merge(make_plan(5), [first.write(logs), second.write(logs)]) as merged:
        (found,) = merged.duplicates
        assert (found.row, found.times, found.ordered) == (3, 2, False)
        assert [merged.machines[number] for number in found.machines] == ["host-a", "host-b"]
        assert merged.exit_code == Exit.DUPLICATES


def test_a_duplicate_by_resend_is_marked(logs: Path) -> None:
    log, late = LogWriter("a"), LogWriter("b")
    serial = log.intent(0)
    log.result(serial, 0, Verdict.ACCEPTED)
    late.accepted(0, resent=True)
    with merge(make_plan(1), [log.write(logs), late.write(logs)]) as merged:
        assert [found.ordered for found in merged.duplicates] == [True]


def test_the_same_result_twice_is_no_duplicate(logs: Path) -> None:
    log = LogWriter("a")
    serial = log.accepted(0)
    log.result(serial, 0, Verdict.ACCEPTED, code=250)
    for batch in (1, 50):
        with merge(make_plan(1), [log.write(logs, batch=batch)]) as merged:
            assert merged.duplicates == []
            assert words(merged) == ["accepted"]
            assert merged.tally.count.sum() == 1


def test_the_same_log_twice_counts_once_and_the_longest_wins(logs: Path, tmp_path: Path) -> None:
    log = LogWriter("a")
    for row in range(6):
        log.accepted(row)
    whole = log.write(logs, batch=2)
    short = tmp_path / "copied-while-it-ran" / "a.arrows"
    short.parent.mkdir()
    short.write_bytes(whole.read_bytes()[:-900])
    for order in ([whole, short], [short, whole], [whole, whole]):
        with merge(make_plan(6), order) as merged:
            assert words(merged) == ["accepted"] * 6
            assert merged.duplicates == []
            assert merged.exit_code == Exit.DONE


def test_two_logs_with_one_id_and_other_content_are_named(logs: Path, tmp_path: Path) -> None:
    one, other = LogWriter("a"), LogWriter("a")
    one.accepted(0)
    one.accepted(1)
    other.accepted(2)
    with merge(make_plan(3), [one.write(logs), other.write(tmp_path / "other")]) as merged:
        assert words(merged) == ["accepted", "accepted", "unsent/not_reached"]
        assert "other content" in merged.damage[0].problem
        assert merged.exit_code == Exit.LOG_DAMAGED


def test_a_log_of_another_campaign_or_plan_is_refused_and_the_rest_is_merged(logs: Path) -> None:
    ours, theirs, older = LogWriter("a"), LogWriter("b", campaign="c2"), LogWriter("c", plan="plan-0")
    ours.accepted(0)
    theirs.accepted(1)
    older.accepted(1)
    paths = [ours.write(logs), theirs.write(logs), older.write(logs)]
    with merge(make_plan(2), paths, plan_fingerprint="plan-1") as merged:
        assert words(merged) == ["accepted", "unsent/not_reached"]
        assert ["c2" in d.problem or "another plan" in d.problem for d in merged.damage] == [True, True]
        assert merged.exit_code == Exit.LOG_DAMAGED


@pytest.mark.parametrize("junk", [b"PAR1 not a log", b"\0" * 4096, b"\xff\xff\xff\xff\x10\0\0\0"])
def test_a_file_that_is_no_log_is_named(logs: Path, junk: bytes) -> None:
    log = LogWriter("a")
    log.accepted(0)
    good = log.write(logs)
    (logs / "junk.arrows").write_bytes(junk)
    with merge(make_plan(1), [good, logs / "junk.arrows", logs / "gone.arrows"]) as merged:
        assert words(merged) == ["accepted"]
        assert sorted(Path(d.path).name for d in merged.damage) == ["gone.arrows", "junk.arrows"]


def test_an_empty_log_is_a_worker_that_never_began(logs: Path) -> None:
    logs.mkdir()
    (logs / "a.arrows").write_bytes(b"")
    with merge(make_plan(0), [logs / "a.arrows"]) as merged:
        assert merged.exit_code == Exit.DONE
        assert "empty" in merged.notes[0]


def test_a_row_beyond_the_plan_is_damage(logs: Path) -> None:
    log = LogWriter("a")
    log.accepted(0)
    log.accepted(5_000_000_000)
    with merge(make_plan(1), [log.write(logs)]) as merged:
        assert words(merged) == ["accepted"]
        assert "do not" in merged.damage[0].problem or "does not have" in merged.damage[0].problem


def test_a_log_from_the_future_is_merged_like_any_other(logs: Path) -> None:
    past, future = LogWriter("a"), LogWriter("b")
    past.at, future.at = 0, 4_000_000_000_000_000
    past.accepted(0)
    past.attempt(1, Verdict.DEFERRED)
    future.accepted(1)
    with merge(make_plan(2), [future.write(logs), past.write(logs)]) as merged:
        assert words(merged) == ["accepted", "accepted"]


def test_a_log_of_a_later_version_is_named_and_the_rest_is_merged(logs: Path) -> None:
    ours, later = LogWriter("a"), LogWriter("b")
    later.header = msgspec.structs.replace(later.header, format=2)
    ours.accepted(0)
    later.accepted(1)
    with merge(make_plan(2), [ours.write(logs), later.write(logs)]) as merged:
        assert words(merged) == ["accepted", "unsent/not_reached"]
        assert "send log format 2, this version reads 1" in merged.damage[0].problem
        assert merged.exit_code == Exit.LOG_DAMAGED


# Public report T057: a file format that needs its footer was unreadable after a crash.
WRITER = """
import os, sys
sys.path[:0] = sys.argv[2:]
from conftest import LogWriter
log = LogWriter("a")
for row in range(300):
    log.accepted(row)
raw, out = log.raw(batch=8, close=False), os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT)
for start in range(0, len(raw), 100):  # a batch takes several writes
    os.write(out, raw[start : start + 100])
    if start > len(raw) // 2:
        os.kill(os.getpid(), 9)
"""


def test_what_a_killed_writer_left_is_read_up_to_its_last_whole_batch(logs: Path) -> None:
    logs.mkdir()
    path, root = logs / "a.arrows", Path(__file__).parents[2]
    ran = subprocess.run([sys.executable, "-c", WRITER, str(path), str(Path(__file__).parent), str(root)], check=False)
    assert ran.returncode == -9
    with merge(make_plan(300), [path]) as merged:
        said = words(merged)
        assert 100 < said.count("accepted") < 200
        assert said == sorted(said), "a prefix was sent, and nothing behind it"
        assert merged.damage == []
        assert "was killed" in merged.notes[0]
        assert merged.exit_code in (Exit.ROWS_OPEN, Exit.IN_DOUBT)


def test_a_missing_machine_is_named_by_its_partition(logs: Path) -> None:
    log = LogWriter("a")
    for row in range(20):
        log.accepted(row)
    with merge(make_plan(40, partitions=2), [log.write(logs)]) as merged:
        assert [part.not_reached for part in merged.partitions] == [0, 20]
        assert any(note.startswith("partition 1 (rows 20 to 39)") for note in merged.notes)
        assert merged.exit_code == Exit.ROWS_OPEN


def report(**columns: object) -> pa.RecordBatch:
    base = {"log_id": "lost", "machine": "host-z", "first_at": T0, "at": T0, "attempt": 1, "reason": 0, "code": 0}
    row = {**base, "provider": "mail", "source": "s1", **columns}
    return pa.RecordBatch.from_pylist([row], REPORTS)


def test_a_machine_lost_with_its_disk_is_known_by_its_reports(logs: Path) -> None:
    log = LogWriter("a")
    log.accepted(0)
    log.attempt(3, Verdict.DEFERRED, attempt=1)
    told = [
        report(row=0, verdict=int(Verdict.ACCEPTED), log_id="a"),  # the same attempt as the log's
        report(row=1, verdict=int(Verdict.ACCEPTED)),
        report(row=2, verdict=int(Verdict.IN_DOUBT), attempt=0),
        report(row=3, verdict=int(Verdict.IN_DOUBT), log_id="a"),  # that log is here, whole
        report(row=4, verdict=int(Verdict.REJECTED), reason=int(Reason.RECIPIENT)),
        report(row=99, verdict=int(Verdict.ACCEPTED)),
    ]
    with merge(make_plan(5), [log.write(logs)], reports=told) as merged:
        assert words(merged) == ["accepted", "accepted", "in_doubt", "unsent/waiting", "bounced/recipient"]
        assert merged.duplicates == []
        details = merged.resolved(0)
        assert [merged.providers[p] for p in details.provider.tolist()] == ["mail"] * 5
        assert [merged.machines[n] for n in details.log.tolist()] == ["host-a", "host-z", "host-z", "host-a", "host-z"]


def test_an_acceptance_by_a_lost_log_and_by_ours_is_a_duplicate(logs: Path) -> None:
    log = LogWriter("a")
    log.accepted(0)
    told = [report(row=0, verdict=int(Verdict.ACCEPTED)), report(row=0, verdict=int(Verdict.ACCEPTED))]
    with merge(make_plan(1), [log.write(logs)], reports=told) as merged:
        assert [found.times for found in merged.duplicates] == [2]


def test_a_doubt_that_the_store_has_and_a_damaged_log_answers_is_resolved(logs: Path) -> None:
    log = LogWriter("a")
    log.attempt(0, Verdict.DEFERRED, attempt=1)
    for row in range(1, 9):
        log.accepted(row)
    path = log.write(logs, batch=4)
    raw = bytearray(path.read_bytes())
    raw[-1500] ^= 1
    path.write_bytes(raw)
    told = [report(row=row, verdict=int(Verdict.IN_DOUBT), log_id="a") for row in (0, 8)]
    with merge(make_plan(9), [path], reports=told) as merged:
        assert words(merged)[0] == "unsent/waiting"
        assert words(merged)[8] == "in_doubt"
        assert merged.exit_code == Exit.LOG_DAMAGED
