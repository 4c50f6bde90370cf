"""Providers' events: SES by SNS, and the plain JSON."""

from __future__ import annotations

import json

import pytest

from engine.bounce.classify import classify, shipped_rules
from formats.feedback import Kind, read_feedback
from formats.feedback.events import EventError, read_events, subscription_url

BOUNCE = {
    "notificationType": "Bounce",
    "bounce": {
        "bounceType": "Permanent",
        "bounceSubType": "General",
        "reportingMTA": "dsn; a1.smtp-out.example",
        "bouncedRecipients": [
            {"emailAddress": "ann@example.org", "action": "failed", "status": "5.1.1",
             "diagnosticCode": "smtp; 550 5.1.1 user unknown"}
        ],
    },
    "mail": {
        "source": "b1@bounces.example.com",
        "destination": ["ann@example.org"],
        "headers": [{"name": "Message-ID", "value": "<abc@example.com>"},
                    {"name": "List-Unsubscribe", "value": "<https://example.com/u/tok>"}],
    },
}  # fmt: skip
COMPLAINT = {
    "notificationType": "Complaint",
    "complaint": {"complainedRecipients": [{"emailAddress": "ann@example.org"}], "complaintFeedbackType": "abuse"},
    "mail": {"source": "news@example.com"},
}


def test_ses_bounce_bare_and_in_an_sns_envelope() -> None:
    envelope = {"Type": "Notification", "MessageId": "1", "Message": json.dumps(BOUNCE)}
    for value in (BOUNCE, envelope):
        (event,) = read_events(json.dumps(value).encode())
        assert event.kind is Kind.DELIVERY_REPORT
        assert event.message_ids == ("abc@example.com",)
        assert "https://example.com/u/tok" in event.token_texts
        (finding,) = classify(event, shipped_rules())
        assert (finding.address, finding.hard) == ("ann@example.org", True)


def test_ses_complaint_by_mail_folded_by_a_relay() -> None:
    text = json.dumps(COMPLAINT)
    folded = text[:60] + "\n " + text[60:] + "\n\n--\nIf you wish to stop receiving notifications ...\n"
    raw = f"From: no-reply@sns.example\nTo: ops@example.com\nSubject: AWS Notification Message\n\n{folded}".encode()
    feedback = read_feedback(raw)
    assert (feedback.kind, feedback.recipients[0].address) == (Kind.COMPLAINT, "ann@example.org")


def test_ses_holiday_reply_is_an_automatic_reply() -> None:
    """T101: logged, no error, nobody suppressed."""
    value = {
        "notificationType": "Bounce",
        "bounce": {"bounceType": "Transient", "bounceSubType": "General",
                   "bouncedRecipients": [{"emailAddress": "ooto@simulator.example"}]},
        "mail": {"headers": [{"name": "Auto-Submitted", "value": "auto-replied"}]},
    }  # fmt: skip
    assert read_events(json.dumps(value).encode())[0].kind is Kind.AUTO_REPLY
    (event,) = read_events(json.dumps({"notificationType": "AutoResponse", "mail": {}}).encode())
    assert event.kind is Kind.AUTO_REPLY


@pytest.mark.parametrize(
    "sort", [("Transient", "MailboxFull"), ("Permanent", "Suppressed"), ("Undetermined", "Undetermined")]
)
def test_ses_bounce_without_diagnostic_is_never_hard_unless_it_says_no_email(sort: tuple[str, str]) -> None:
    value = json.loads(json.dumps(BOUNCE))
    value["bounce"].update(bounceType=sort[0], bounceSubType=sort[1])
    value["bounce"]["bouncedRecipients"] = [{"emailAddress": "ann@example.org"}]
    (finding,) = classify(read_events(json.dumps(value).encode())[0], shipped_rules())
    assert not finding.hard


def test_generic_events_as_list_and_as_lines() -> None:
    events = [{"event": "complaint", "recipient": "ann@example.org"}, {"event": "delay", "token": "x"}]
    as_list = read_events(json.dumps(events).encode())
    as_lines = read_events("\n".join(json.dumps(one) for one in events).encode())
    assert [one.kind for one in as_list] == [one.kind for one in as_lines] == [Kind.COMPLAINT, Kind.DELAY]


@pytest.mark.parametrize(
    "raw",
    [b"", b"x", b"[]", b"1", b'"x"', b"{}", b'{"event": "party"}', b'{"event": "bounce"}', b"\xff", b"[" * 100_000,
     b'{"Type": "Notification", "Message": "no json"}'],
)  # fmt: skip
def test_what_is_no_event_is_refused_in_words(raw: bytes) -> None:
    with pytest.raises(EventError, match=r"\w"):
        read_events(raw)


def test_subscription_is_told_and_not_visited() -> None:
    raw = json.dumps({"Type": "SubscriptionConfirmation", "SubscribeURL": "https://sns.example/x"}).encode()
    assert subscription_url(raw) == "https://sns.example/x"
    assert subscription_url(b"[]") == subscription_url(b"x") == ""


def test_event_of_unexpected_shape_names_nobody() -> None:
    (event,) = read_events(b'{"notificationType": "Bounce", "bounce": 1, "mail": []}')
    assert event.recipients == ()
