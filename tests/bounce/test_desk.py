"""The desk: matched, judged, suppressed, recorded."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from sent_campaign import Sent, StoppedClock

from engine.bounce.classify import shipped_rules
from engine.bounce.desk import Desk, Incoming, Taken
from engine.bounce.ours import Ours
from engine.bounce.record import feedback_tables, read_feedback_log
from engine.bounce.report import report
from engine.lists.suppressions import Suppressions
from formats.feedback import Kind
from formats.feedbacklog import Decision
from formats.sendlog import Verdict

DAY_US = 86_400_000_000


def take(desk: Desk, raw: bytes) -> Taken:
    (taken,) = desk.take([Incoming(raw=raw, source="test")])
    return taken


def suppressed(sent: Sent, address: str, list_id: str | None = None) -> bool:
    return bool(Suppressions(sent.folder / "suppression", list_id=list_id).check([address])[0])


def test_unknown_user_is_suppressed_and_recorded_for_the_merge(sent: Sent, desk: Desk) -> None:
    taken = take(desk, sent.bounce(3))
    assert taken.decisions == (Decision.SUPPRESSED,)
    assert suppressed(sent, "dora@example.org")
    desk.close()
    (path,) = (sent.folder / "feedback").glob("*.arrows")
    told = read_feedback_log(pa.py_buffer(path.read_bytes()), "weekly-31")
    assert told.log.is_closed
    assert told.rows.tolist() == [3]
    assert told.verdicts.tolist() == [Verdict.REJECTED]


def test_running_campaign_sees_the_suppression_at_its_next_refresh(sent: Sent, desk: Desk) -> None:
    running = Suppressions(sent.folder / "suppression", list_id="weekly")
    assert not running.check(["dora@example.org"])[0]
    take(desk, sent.bounce(3))
    assert running.refresh()
    assert running.check(["dora@example.org"])[0]


@pytest.mark.parametrize("action", ["delayed", "delivered", "relayed", "expanded"])
def test_whatever_did_not_fail_suppresses_nobody_and_says_that_it_arrived(sent: Sent, desk: Desk, action: str) -> None:
    taken = take(desk, sent.bounce(3, action=action))
    assert taken.findings[0].verdict is Verdict.ACCEPTED
    assert not suppressed(sent, "dora@example.org")


def test_same_message_from_two_sources_counts_once(sent: Sent, desk: Desk) -> None:
    first, second = desk.take([Incoming(raw=sent.bounce(3), source=one) for one in ("a", "b")])
    assert not first.was_known
    assert second.was_known
    assert second.is_matched
    assert report([sent.folder / "feedback"]).messages == 1


def test_next_run_knows_what_the_last_one_recorded(sent: Sent, desk: Desk, clock: StoppedClock) -> None:
    take(desk, sent.bounce(3))
    again = Desk(Ours([sent.folder]), shipped_rules(), clock)
    assert take(again, sent.bounce(3)).was_known
    assert len(list((sent.folder / "feedback").glob("*.arrows"))) == 1


def test_forged_token_is_rejected_even_when_the_address_is_on_the_list(sent: Sent, desk: Desk) -> None:
    token = sent.marks(3).return_path
    forged = token[:-1] + ("0" if token[-1] != "0" else "1")
    taken = take(desk, sent.bounce(3).replace(token.encode(), forged.encode()))
    assert taken.decisions == (Decision.FORGED,)
    assert not taken.is_matched
    assert not suppressed(sent, "dora@example.org")


def test_token_of_another_row_than_the_reported_address_counts_for_the_token(sent: Sent, desk: Desk) -> None:
    """A forward reports the address it forwards to: our row is the token's."""
    raw = sent.bounce(3).replace(b"dora@example.org", b"dora@forwarded.example")
    taken = take(desk, raw)
    assert taken.findings[0].row == 3
    assert suppressed(sent, "dora@example.org")
    assert not suppressed(sent, "dora@forwarded.example")


def test_token_of_a_campaign_that_is_not_here_is_unmatched(sent: Sent, desk: Desk, tmp_path: Path) -> None:
    other = Sent(tmp_path / "other", "other")
    raw = other.bounce(3).replace(b"dora@example.org", b"zoe@elsewhere.example")
    assert take(desk, raw).decisions == (Decision.UNMATCHED,)


def test_two_campaigns_with_one_mailbox(sent: Sent, clock: StoppedClock, tmp_path: Path) -> None:
    other = Sent(tmp_path / "weekly-32", "weekly-32")
    desk = Desk(Ours([sent.folder, other.folder]), shipped_rules(), clock)
    assert take(desk, other.bounce(2)).findings[0].campaign_id == "weekly-32"
    assert suppressed(other, "cleo@example.org")
    assert not suppressed(sent, "cleo@example.org")
    desk.close()
    assert list((other.folder / "feedback").glob("*.arrows"))


def test_test_message_counts_nowhere(sent: Sent, desk: Desk) -> None:
    raw = sent.bounce(3).replace(sent.return_path(3).encode(), sent.return_path(3, is_test=True).encode())
    assert take(desk, raw).findings[0].is_test
    assert not suppressed(sent, "dora@example.org")
    assert report([sent.folder / "feedback"]).rows_bounced == 0


def test_without_a_token_a_checked_message_id_is_as_good(sent: Sent, desk: Desk) -> None:
    raw = sent.bounce(3).replace(sent.return_path(3).encode(), b"news@example.com")
    taken = take(desk, raw)
    assert (taken.findings[0].row, taken.findings[0].confidence) == (3, "certain")
    assert suppressed(sent, "dora@example.org")


def test_without_token_and_original_the_address_in_the_list_counts(sent: Sent, desk: Desk) -> None:
    """T105: a text-only notice that names the address and nothing else."""
    raw = (
        b"Return-Path: <>\nFrom: mailer-daemon@mx.example.org\nTo: news@example.com\nSubject: Message undeliverable\n\n"
        b"Your message did not reach some of the recipients.\n\nDORA@example.org\n"
        b"   Remote server replied: 550 5.5.0 Requested action not taken: mailbox unavailable\n"
    )
    taken = take(desk, raw)
    assert (taken.findings[0].row, taken.findings[0].confidence) == (3, "likely")
    assert taken.decisions == (Decision.SUPPRESSED,)


def test_address_that_nobody_wrote_to_is_unmatched(sent: Sent, desk: Desk) -> None:
    raw = sent.bounce(3).replace(sent.return_path(3).encode(), b"news@example.com")
    raw = raw.replace(b"dora@example.org", b"zoe@elsewhere.example")
    taken = take(desk, raw)
    assert taken.decisions == (Decision.UNMATCHED,)
    (problem,) = report([sent.folder / "feedback"]).for_people
    assert problem.message == taken.key


def complaint(sent: Sent, row: int, recipient: str = "") -> bytes:
    named = f"Original-Rcpt-To: {recipient}\n" if recipient else ""
    marks = sent.marks(row)
    return (
        "From: fbl@provider.example\nTo: fbl@example.com\nSubject: complaint\nMIME-Version: 1.0\n"
        'Content-Type: multipart/report; report-type=feedback-report; boundary="=_a"\n\n--=_a\n'
        f"Content-Type: message/feedback-report\n\nFeedback-Type: abuse\nVersion: 1\n{named}\n--=_a\n"
        f"Content-Type: message/rfc822\n\nFrom: news@example.com\nTo: redacted\n"
        f"Message-ID: <{marks.message_id}@example.com>\n"
        f"List-Unsubscribe: <https://example.com/u/{marks.unsubscribe}>\n\n--=_a--\n"
    ).encode()


def test_redacted_complaint_is_matched_by_the_token_in_list_unsubscribe(sent: Sent, desk: Desk) -> None:
    taken = take(desk, complaint(sent, 5))
    assert (taken.kind, taken.findings[0].row, taken.decisions) == (Kind.COMPLAINT, 5, (Decision.SUPPRESSED,))
    assert suppressed(sent, "fay@example.org")


def test_holiday_reply_suppresses_nobody(sent: Sent, desk: Desk) -> None:
    raw = (
        f"Return-Path: <>\nFrom: Fay <fay@example.org>\nTo: {sent.return_path(5)}\nSubject: Out of office\n"
        "Auto-Submitted: auto-replied\n\nI am away.\n"
    ).encode()
    taken = take(desk, raw)
    assert (taken.kind, taken.decisions, taken.is_matched) == (Kind.AUTO_REPLY, (Decision.NONE,), True)
    assert not suppressed(sent, "fay@example.org", "weekly")


def test_person_who_answers_is_for_people(sent: Sent, desk: Desk) -> None:
    """T107: never deleted, never counted as a bounce."""
    raw = (
        b"From: Fay <fay@example.org>\nTo: news@example.com\nSubject: Re: The weekly\n\nThank you, very interesting!\n"
    )
    taken = take(desk, raw)
    assert (taken.kind, taken.is_matched) == (Kind.HUMAN, False)


def test_unsubscribe_by_mail_with_the_token_as_subject(sent: Sent, desk: Desk) -> None:
    raw = f"From: f@forwarded.example\nTo: unsubscribe@example.com\nSubject: {sent.marks(5).unsubscribe}\n\n".encode()
    assert take(desk, raw).decisions == (Decision.UNSUBSCRIBED,)
    assert suppressed(sent, "fay@example.org", "weekly")
    assert not suppressed(sent, "fay@example.org", "other-list")


def test_soft_bounces_suppress_after_several_days_and_over_campaigns(sent: Sent, clock: StoppedClock) -> None:
    full = ("5.2.2", "552 5.2.2 Mailbox full")
    for day in range(5):
        clock.now_us += 2 * DAY_US
        desk = Desk(Ours([sent.folder]), shipped_rules(), clock)
        for repeat in range(3):  # three of one day count once
            raw = sent.bounce(4, *full) + f"{day} {repeat}\n".encode()
            taken = take(desk, raw)
        desk.close()
        assert suppressed(sent, "emil@example.org") is (day == 4), day
    assert taken.decisions == (Decision.SUPPRESSED,)


def test_policy_refusals_never_count(sent: Sent, desk: Desk, clock: StoppedClock) -> None:
    for day in range(12):
        clock.now_us += DAY_US
        raw = sent.bounce(4, "5.7.1", f"554 5.7.1 blocked using bl.example, day {day}")
        assert take(desk, raw).decisions == (Decision.NONE,)
    assert not suppressed(sent, "emil@example.org")


def test_breaker_holds_back_what_a_broken_provider_says(sent: Sent, clock: StoppedClock) -> None:
    """Gmail, 2020-12-14: `550 5.1.1` to valid users for hours."""
    (sent.folder / "campaign.toml").write_text(
        (sent.folder / "campaign.toml").read_text() + "\n[bounces]\nbreaker_bounces = 3\nbreaker_share = 0.2\n"
    )
    desk = Desk(Ours([sent.folder]), shipped_rules(), clock, provider_of=lambda host: "bigmail")
    decisions = [take(desk, sent.bounce(row)).decisions[0] for row in range(5)]
    assert decisions == [Decision.SUPPRESSED] * 2 + [Decision.PROVISIONAL] * 3
    assert desk.breakers.open_ones() == ["bigmail"]
    assert not suppressed(sent, "emil@example.org")
    desk.close()
    assert report([sent.folder / "feedback"]).provisional == {"bigmail": 3}

    from engine.bounce.confirm import confirm

    assert confirm(Ours([sent.folder]).campaigns, "bigmail", clock.now_us) == 3
    assert suppressed(sent, "emil@example.org")


def test_damaged_feedback_log_is_read_as_far_as_it_is_whole(sent: Sent, desk: Desk) -> None:
    for row in range(3):
        take(desk, sent.bounce(row))
    (path,) = (sent.folder / "feedback").glob("*.arrows")
    path.write_bytes(path.read_bytes()[:-100])
    told = read_feedback_log(pa.py_buffer(path.read_bytes()))
    assert told.rows.tolist() == [0, 1]
    assert sum(table.num_rows for _, table in feedback_tables([sent.folder / "feedback"])) == 2


def test_suppression_that_fails_leaves_nothing_recorded(sent: Sent, desk: Desk) -> None:
    """The order: suppression, record, then the message is settled. A crash between repeats, and loses nothing."""
    (sent.folder / "suppression").write_text("in the way")
    with pytest.raises(Exception, match=r"."):
        take(desk, sent.bounce(3))
    assert not list(feedback_tables([sent.folder / "feedback"]))
    (sent.folder / "suppression").unlink()
    assert take(desk, sent.bounce(3)).decisions == (Decision.SUPPRESSED,)
