"""Webhooks of providers as values: Amazon SES (by SNS or bare) and a plain JSON of our own.

Generic JSON, one object, a list of them, or one object a line:

    {"event": "bounce" | "complaint" | "delay" | "delivered" | "unsubscribe" | "auto_reply",
     "recipient": "ann@example.org",        required where no token or message_id is given
     "status": "5.1.1", "diagnostic": "550 5.1.1 user unknown", "remote_mta": "mx.example.org",
     "message_id": "abc@example.com", "token": "...", "feedback_type": "abuse"}

SES: https://docs.aws.amazon.com/ses/latest/dg/notification-contents.html (fields by name only).
"""

from __future__ import annotations

import json
import re
from typing import Any

from formats.feedback.smtpwords import enhanced_in, reply_in, squeezed, stage_in
from formats.feedback.values import Action, Feedback, Kind, Origin, Recipient

MAX_EVENTS = 10_000
MAX_DEPTH = 3  # an SNS envelope holds its message as text

_GENERIC = {
    "bounce": (Kind.DELIVERY_REPORT, Action.FAILED),
    "complaint": (Kind.COMPLAINT, Action.NONE),
    "delay": (Kind.DELAY, Action.DELAYED),
    "delivered": (Kind.DELIVERED, Action.DELIVERED),
    "unsubscribe": (Kind.UNSUBSCRIBE, Action.NONE),
    "auto_reply": (Kind.AUTO_REPLY, Action.NONE),
}
# SES bounce subtypes -> the enhanced status they mean where the event has none of its own.
_SES_STATUS = {
    ("Permanent", "NoEmail"): "5.1.1",
    ("Permanent", "General"): "5.0.0",
    ("Permanent", "Suppressed"): "5.7.0",
    ("Permanent", "OnAccountSuppressionList"): "5.7.0",
    ("Transient", "MailboxFull"): "4.2.2",
    ("Transient", "MessageTooLarge"): "5.3.4",
    ("Transient", "ContentRejected"): "5.6.0",
    ("Transient", "AttachmentRejected"): "5.6.0",
    ("Transient", "General"): "4.0.0",
}


class EventError(ValueError):
    """Why a webhook's bytes are not events, in words for the sender."""


def read_events(raw: bytes) -> list[Feedback]:
    """The events in a webhook's body or a file of them; raises EventError where it is none of the known forms."""
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as problem:
        raise EventError(f"not UTF-8: {problem}") from None
    try:
        values = [json.loads(text)]
    except (ValueError, RecursionError):
        try:
            values = [json.loads(line) for line in text.splitlines() if line.strip()]
        except (ValueError, RecursionError):
            raise EventError("neither JSON nor one JSON object a line") from None
    if len(values) == 1 and isinstance(values[0], list):
        values = values[0]
    if not values or len(values) > MAX_EVENTS:
        raise EventError(f"{len(values)} events, expected 1 to {MAX_EVENTS}")
    return [_event(value, 0) for value in values]


def subscription_url(raw: bytes) -> str:
    """The URL that an SNS SubscriptionConfirmation asks to visit, "" where this is none.

    Whether to visit it is the operator's word: anybody can post such a message.
    """
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError):
        return ""
    if isinstance(value, dict) and value.get("Type") == "SubscriptionConfirmation":
        return str(value.get("SubscribeURL", ""))[:2000]
    return ""


def read_mailed_event(text: str) -> Feedback | None:
    """An event that SNS sent by mail: JSON, perhaps folded by a mail host, with a footer behind it."""
    for attempt in (re.sub(r"\r?\n ?", "", text), text):
        try:
            value, _ = json.JSONDecoder(strict=False).raw_decode(attempt.lstrip())
            return _event(value, 0)
        except (ValueError, RecursionError):
            continue
    return None


def _event(value: Any, depth: int) -> Feedback:
    if not isinstance(value, dict):
        raise EventError(f"an event is an object, this is {type(value).__name__}")
    if depth < MAX_DEPTH and isinstance(value.get("Message"), str) and "Type" in value:
        try:
            inner = json.loads(value["Message"], strict=False)
        except (ValueError, RecursionError):
            raise EventError("the SNS envelope's Message is not JSON") from None
        return _event(inner, depth + 1)
    if isinstance(value.get("notificationType") or value.get("eventType"), str):
        return _ses(value)
    if isinstance(value.get("event"), str):
        return _generic(value)
    raise EventError('no "event", "notificationType" or "eventType" in it')


def _text(value: Any, most: int = 600) -> str:
    return value[:most] if isinstance(value, str) else ""


def _items(value: Any) -> list[dict[str, Any]]:
    return [item for item in value if isinstance(item, dict)][:1000] if isinstance(value, list) else []


def _generic(value: dict[str, Any]) -> Feedback:
    try:
        kind, action = _GENERIC[value["event"]]
    except KeyError:
        raise EventError(f"event {value['event']!r}, expected one of {', '.join(_GENERIC)}") from None
    recipient, token, message_id = (_text(value.get(key)) for key in ("recipient", "token", "message_id"))
    if not (recipient or token or message_id):
        raise EventError("none of recipient, token and message_id is given")
    diagnostic = _text(value.get("diagnostic"))
    reported = Recipient(
        address=recipient,
        action=action,
        status=enhanced_in(diagnostic) or enhanced_in(_text(value.get("status"))),
        reply=reply_in(diagnostic),
        diagnostic=squeezed(diagnostic),
        remote_mta=_text(value.get("remote_mta")).lower(),
        stage=stage_in(diagnostic),
        origin=Origin.REPORT,
    )
    return Feedback(
        kind=kind,
        recipients=(reported,),
        feedback_type=_text(value.get("feedback_type")),
        token_texts=(token,) if token else (),
        message_ids=(message_id.strip("<>"),) if message_id else (),
        original_recipients=(recipient,) if recipient else (),
    )


def _ses(value: dict[str, Any]) -> Feedback:
    name = _text(value.get("notificationType")) or _text(value.get("eventType"))
    mail = value.get("mail") if isinstance(value.get("mail"), dict) else {}
    assert isinstance(mail, dict)
    feedback_type = ""
    recipients: list[Recipient] = []
    mta = ""
    match name:
        case "Bounce":
            bounce = value.get("bounce") if isinstance(value.get("bounce"), dict) else {}
            assert isinstance(bounce, dict)
            kind = Kind.DELIVERY_REPORT
            sort = (_text(bounce.get("bounceType")), _text(bounce.get("bounceSubType")))
            mta = _text(bounce.get("reportingMTA")).partition(";")[2].strip().lower()
            # SES reports holiday replies as bounces of its own kind (ooto@simulator.amazonses.com).
            for item in _items(bounce.get("bouncedRecipients")):
                diagnostic = _text(item.get("diagnosticCode"))
                words = re.sub(r"^\s*smtp\s*;\s*", "", diagnostic, flags=re.I)
                told = enhanced_in(words) or enhanced_in(_text(item.get("status"))) or _SES_STATUS.get(sort, "")
                recipients.append(
                    Recipient(
                        address=_text(item.get("emailAddress"), 320),
                        action=Action.FAILED,
                        status=told,
                        reply=reply_in(words),
                        diagnostic=squeezed(words or "/".join(sort)),
                        stage=stage_in(words),
                    )
                )
            if sort[0] in ("Undetermined", "Transient") and not any(
                one.diagnostic and one.reply.code for one in recipients
            ):
                headers = {
                    _text(item.get("name")).lower(): _text(item.get("value")) for item in _items(mail.get("headers"))
                }
                if headers.get("auto-submitted", "").startswith("auto-replied"):
                    kind = Kind.AUTO_REPLY
        case "Complaint":
            complaint = value.get("complaint") if isinstance(value.get("complaint"), dict) else {}
            assert isinstance(complaint, dict)
            kind = Kind.COMPLAINT
            feedback_type = _text(complaint.get("complaintFeedbackType")) or "abuse"
            recipients = [
                Recipient(address=_text(item.get("emailAddress"), 320), action=Action.NONE)
                for item in _items(complaint.get("complainedRecipients"))
            ]
        case "Delivery":
            delivery = value.get("delivery") if isinstance(value.get("delivery"), dict) else {}
            assert isinstance(delivery, dict)
            kind = Kind.DELIVERED
            names = delivery.get("recipients")
            recipients = [
                Recipient(
                    address=_text(one, 320),
                    action=Action.DELIVERED,
                    reply=reply_in(_text(delivery.get("smtpResponse"))),
                )
                for one in (names if isinstance(names, list) else [])[:1000]
            ]
        case "DeliveryDelay":
            delay = value.get("deliveryDelay") if isinstance(value.get("deliveryDelay"), dict) else {}
            assert isinstance(delay, dict)
            kind = Kind.DELAY
            recipients = [
                Recipient(
                    address=_text(item.get("emailAddress"), 320),
                    action=Action.DELAYED,
                    status=_text(item.get("status"), 20),
                    diagnostic=squeezed(_text(item.get("diagnosticCode"))),
                )
                for item in _items(delay.get("delayedRecipients"))
            ]
        case (
            "AmazonSnsSubscriptionSucceeded"
            | "Received"
            | "Send"
            | "Open"
            | "Click"
            | "Reject"
            | "Rendering Failure"
            | "Subscription"
        ):
            kind = Kind.UNKNOWN
        case _:
            # Whatever SES adds next is logged, not an error: nothing of ours depends on it.
            kind = Kind.AUTO_REPLY if "auto" in name.lower() or "ooto" in name.lower() else Kind.UNKNOWN
    headers = {_text(item.get("name")).lower(): _text(item.get("value")) for item in _items(mail.get("headers"))}
    common = mail.get("commonHeaders") if isinstance(mail.get("commonHeaders"), dict) else {}
    assert isinstance(common, dict)
    ids = [headers.get("message-id", ""), _text(common.get("messageId"))]
    texts = [_text(mail.get("source"), 320), *re.findall(r"<([^<>]+)>", headers.get("list-unsubscribe", ""))]
    destination = mail.get("destination")
    return Feedback(
        kind=kind,
        recipients=tuple(recipients),
        reporting_mta=mta,
        feedback_type=feedback_type,
        token_texts=tuple(dict.fromkeys(text for text in texts if text)),
        message_ids=tuple(dict.fromkeys(one.strip().strip("<>") for one in ids if one.strip())),
        original_recipients=tuple(_text(one, 320) for one in destination[:20]) if isinstance(destination, list) else (),
        original_sender=_text(mail.get("source"), 320),
    )
