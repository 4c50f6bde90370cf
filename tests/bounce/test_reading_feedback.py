"""What came back, read: each format by a sample of our own."""

from __future__ import annotations

import base64

import pytest
from notices import FAILED, FULL, HOLIDAYS, NOTICES, RETURNED, plain, report

from engine.bounce.classify import classify, shipped_rules
from formats.feedback import Action, Kind, Origin, Stage, read_feedback


@pytest.mark.parametrize("name", NOTICES)
def test_notice_in_words_names_its_recipients_and_whether_anybody_is_there(name: str) -> None:
    raw, recipients, hard = NOTICES[name]
    feedback = read_feedback(raw)
    assert feedback.kind is Kind.DELIVERY_REPORT
    assert [one.address for one in feedback.recipients] == recipients
    findings = classify(feedback, shipped_rules())
    assert findings[-1 if len(findings) > 1 and hard else 0].hard is hard


def test_standard_report() -> None:
    feedback = read_feedback(report(FAILED))
    (one,) = feedback.recipients
    assert (feedback.kind, feedback.reporting_mta) == (Kind.DELIVERY_REPORT, "relay.example.net")
    assert (one.address, one.action, one.status, one.reply.code) == ("ann@example.org", Action.FAILED, "5.1.1", 550)
    assert one.remote_mta == "mx.example.org"
    assert feedback.message_ids == ("0123456789abcdef0123456789abcdef@example.com",)
    assert feedback.original_sender == "news@example.com"


@pytest.mark.parametrize(
    ("action", "kind"),
    [
        ("delayed", Kind.DELAY),
        ("delivered", Kind.DELIVERED),
        ("relayed (to a host that does not report)", Kind.RELAYED),
        ("expanded (to multi-recipient alias)", Kind.EXPANDED),
        ("Failed", Kind.DELIVERY_REPORT),
    ],
)
def test_kind_follows_the_action(action: str, kind: Kind) -> None:
    feedback = read_feedback(report(f"Final-Recipient: rfc822; ann@example.org\nAction: {action}\nStatus: 4.0.0"))
    assert feedback.kind is kind
    assert not any(one.hard for one in classify(feedback, shipped_rules()))


@pytest.mark.parametrize(
    "field",
    [
        "Final-Recipient: ann@example.org",  # no type
        "Final-Recipient: rfc822;<ann@example.org>",
        "Final-recipient: RFC822; ann@example.org (Ann)",
        "Original-Recipient: rfc822; ann@example.org",
        "Final-Recipient: rfc822;|/usr/bin/vacation ann\nOriginal-Recipient: rfc822;ann@example.org",
        "Final-Recipient: rfc822; ann\nX-Actual-Recipient: rfc822; ann@example.org",
    ],
)
def test_recipient_field_in_the_forms_that_hosts_write(field: str) -> None:
    feedback = read_feedback(report(f"{field}\nAction: failed\nStatus: 5.1.1"))
    assert [one.address for one in feedback.recipients] == ["ann@example.org"]


def test_address_with_equals_signs_is_kept_whole() -> None:
    feedback = read_feedback(report("Final-Recipient: rfc822; prvs=1=ann@example.org\nAction: failed\nStatus: 5.1.1"))
    assert feedback.recipients[0].address == "prvs=1=ann@example.org"


def test_international_report() -> None:
    """RFC 6533: utf-8 addresses, with non-ASCII as itself or as \\x{...}."""
    fields = "Final-Recipient: utf-8; {}\nAction: failed\nStatus: 5.1.1"
    for written in ("jürgen@example.org", r"j\x{FC}rgen@example.org"):
        raw = report(fields.format(written), status_type="message/global-delivery-status; charset=utf-8")
        assert read_feedback(raw).recipients[0].address == "jürgen@example.org"


def test_blank_lines_lost_or_too_many() -> None:
    lost = "Final-Recipient: rfc822; ann@example.org\nAction: failed\nStatus: 5.1.1\n" + FULL.replace("ann", "ben")
    assert [one.status for one in read_feedback(report(lost)).recipients] == ["5.1.1", "5.2.2"]
    many = FAILED.replace("\nAction", "\n\nAction")
    (one,) = read_feedback(report(many)).recipients
    assert (one.address, one.status) == ("ann@example.org", "5.1.1")


def test_report_inside_plain_text_and_inside_base64() -> None:
    inside = f"Reporting-MTA: dns; relay.example.net\n\n{FAILED}\n\n" + RETURNED.format(to="x@example.org", token="")
    assert read_feedback(plain(inside)).recipients[0].address == "ann@example.org"
    encoded = base64.encodebytes(b"Reporting-MTA: dns; relay.example.net\n\n" + FAILED.encode()).decode()
    raw = plain(encoded, headers="Content-Transfer-Encoding: base64\nReturn-Path: <>\n")
    assert read_feedback(raw).recipients[0].address == "ann@example.org"


def test_wrong_base64_and_wrong_charset_do_no_harm() -> None:
    raw = report(FAILED, headers="Content-Transfer-Encoding: base64\n").replace(b"us-ascii", b"no-such-charset")
    assert read_feedback(raw).recipients[0].status == "5.1.1"


def test_specific_status_in_the_diagnostic_beats_a_general_one() -> None:
    """T103: `Status: 5.0.0` hides the cause."""
    for status, diagnostic, hard in (
        ("5.0.0", 'smtp; 550 "Unknown User"', True),
        ("5.0.0", "smtp; 550 5.7.1 Access denied by policy", False),
        ("5.0.0", "smtp; 554 delivery error: dd This mailbox is disabled (554.30)", True),
        ("5.1.1", "smtp; 552 5.2.2 Over quota", False),
        ("5.1.1", "smtp; 550 5.1.1 <ann@example.org> 192.0.2.1 has sent to too many recipients this hour", False),
    ):
        block = (
            f"Final-Recipient: rfc822; ann@example.org\nAction: failed\nStatus: {status}\nDiagnostic-Code: {diagnostic}"
        )
        (finding,) = classify(read_feedback(report(block)), shipped_rules())
        assert finding.hard is hard, diagnostic


def test_reply_to_mail_from_is_never_about_the_recipient() -> None:
    text = "<ann@example.org>: host mx.example.org[192.0.2.7] said: 550 5.1.1 unknown (in reply to MAIL FROM command)"
    feedback = read_feedback(report(FAILED.replace("User unknown", "unknown"), text=text))
    assert feedback.recipients[0].stage is Stage.MAIL
    assert not classify(feedback, shipped_rules())[0].hard


def test_returned_message_is_not_read_as_a_report() -> None:
    """A bounce of a bounce: the inner report's recipient is not ours."""
    inner = report("Final-Recipient: rfc822; inner@example.org\nAction: failed\nStatus: 5.1.1").decode()
    feedback = read_feedback(report(FAILED, returned=inner))
    assert [one.address for one in feedback.recipients] == ["ann@example.org"]


def test_forwarded_report_is_read_and_doubted() -> None:
    raw = (
        b"From: Ben <ben@example.com>\nTo: list@example.com\nSubject: Fwd: Undelivered\nMIME-Version: 1.0\n"
        b'Content-Type: multipart/mixed; boundary="=_f"\n\n--=_f\nContent-Type: text/plain\n\nSee below.\n'
        b"--=_f\nContent-Type: message/rfc822\n\n" + report(FAILED).replace(b"=_b1", b"=_b2") + b"\n--=_f--\n"
    )
    feedback = read_feedback(raw)
    assert feedback.was_forwarded
    assert feedback.recipients[0].address == "ann@example.org"
    (finding,) = classify(feedback, shipped_rules())
    assert finding.confidence == "weak"


def arf(fields: str, returned: str) -> bytes:
    return (
        "From: fbl@provider.example\nTo: fbl@example.com\nSubject: FW: The weekly\nMIME-Version: 1.0\n"
        'Content-Type: multipart/report; report-type=feedback-report; boundary="=_a"\n\n'
        "--=_a\nContent-Type: text/plain\n\n"
        "This is an abuse report.\n--=_a\nContent-Type: message/feedback-report\n\nFeedback-Type: abuse\nVersion: 1\n"
        f"User-Agent: X/1\n{fields}\n--=_a\nContent-Type: message/rfc822\n\n{returned}\n--=_a--\n"
    ).encode()


def test_complaint_names_its_recipient() -> None:
    raw = arf("Original-Rcpt-To: <ann@example.org>\n", RETURNED.format(to="x@y.example", token=""))
    feedback = read_feedback(raw)
    assert (feedback.kind, feedback.feedback_type) == (Kind.COMPLAINT, "abuse")
    assert [one.address for one in feedback.recipients] == ["ann@example.org"]


def test_redacted_complaint_keeps_our_message_id_and_tokens() -> None:
    feedback = read_feedback(arf("", RETURNED.format(to="redacted", token="tok")))
    assert feedback.kind is Kind.COMPLAINT
    assert feedback.recipients == ()
    assert feedback.message_ids == ("0123456789abcdef0123456789abcdef@example.com",)
    assert "btok@bounces.example.com" in feedback.token_texts
    assert "https://example.com/u/none" in feedback.token_texts


def test_authentication_report_is_no_complaint() -> None:
    raw = arf("Original-Rcpt-To: ann@example.org\n", "To: ann@example.org\n\nx").replace(b": abuse", b": auth-failure")
    (finding,) = classify(read_feedback(raw), shipped_rules())
    assert finding.kind is Kind.UNKNOWN


@pytest.mark.parametrize(("subject", "text"), HOLIDAYS)
def test_holiday_replies_suppress_nobody(subject: str, text: str) -> None:
    for headers in ("", "Auto-Submitted: auto-replied\nReturn-Path: <>\n"):
        feedback = read_feedback(plain(text, sender="Ann <ann@example.org>", subject=subject, headers=headers))
        assert feedback.kind is Kind.AUTO_REPLY
        assert not any(one.hard or one.counts for one in classify(feedback, shipped_rules()))


def test_holiday_reply_that_quotes_a_bounce_is_still_one() -> None:
    text = "I am out of the office.\n\n> 550 5.1.1 <ben@example.org>: user unknown\n> could not be delivered"
    raw = plain(text, sender="ann@example.org", subject="Automatic reply: x", headers="Auto-Submitted: auto-replied\n")
    assert read_feedback(raw).kind is Kind.AUTO_REPLY


def test_person_who_writes_about_a_failed_delivery_is_a_person() -> None:
    raw = plain(
        "Hello, my last message to you could not be delivered. Is ann@example.org still right?",
        sender="Ben <ben@example.org>",
        subject="Re: The weekly",
        headers="",
    )
    feedback = read_feedback(raw)
    assert feedback.kind is Kind.HUMAN
    assert [one.address for one in feedback.recipients] == ["ben@example.org"]


@pytest.mark.parametrize("subject", ["unsubscribe", "Abmelden bitte", "Désabonner", "please remove me", "配信停止"])
def test_unsubscribe_by_mail(subject: str) -> None:
    raw = plain("", sender="Ann <ann@example.org>", subject=subject, headers="")
    assert read_feedback(raw).kind is Kind.UNSUBSCRIBE


def test_delay_in_words_is_a_delay() -> None:
    raw = plain(
        "This is the mail system at host relay.example.net.\n\n"
        "# THIS IS A WARNING ONLY.  YOU DO NOT NEED TO RESEND.\n\n"
        "Your message could not be delivered for more than 4 hour(s).\nIt will be retried until it is 5 day(s) old.\n\n"
        "<ann@example.org>: connect to mx.example.org[192.0.2.7]:25: Connection timed out\n",
        subject="Delayed Mail (still being retried)",
    )
    feedback = read_feedback(raw)
    assert feedback.kind is Kind.DELAY
    assert [one.address for one in feedback.recipients] == ["ann@example.org"]
    assert not any(one.hard or one.counts for one in classify(feedback, shipped_rules()))


def test_report_that_names_nobody_takes_the_only_recipient_of_the_returned_message() -> None:
    raw = report("X-Nothing: here", text="--- Delivery report unavailable ---")
    feedback = read_feedback(raw)
    assert [(one.address, one.origin) for one in feedback.recipients] == [("ann@example.org", Origin.RETURNED)]
    assert not classify(feedback, shipped_rules())[0].hard
