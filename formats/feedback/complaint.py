"""Complaints: RFC 5965 feedback reports and their relatives, redacted or not.

Bytes: a message/feedback-report part of `Name: value` fields, then the message complained about. Providers hide the
recipient (Yahoo, Microsoft's JMRP) or hash it, so its tokens and Message-ID matter more than Original-Rcpt-To.
"""

from __future__ import annotations

import re

import msgspec

from formats.feedback.mime import Headers
from formats.feedback.smtpwords import addresses_in, fold, tidy

# Fields with which providers that write no feedback report name the recipient inside the returned message.
_HIDDEN_RECIPIENT = ("x-hmxmroriginalrecipient", "x-original-recipient", "x-rcpt-to", "x-envelope-to")
_COMPLAINT_SUBJECT = re.compile(
    r"^\s*complaint\s+about\s+message|abuse\s+(?:report|complaint)|\bspam\s+(?:report|complaint)", re.I
)


class Complaint(msgspec.Struct, frozen=True, kw_only=True):
    """What a feedback report says."""

    feedback_type: str
    recipients: tuple[str, ...]
    reporting_mta: str = ""
    source_ip: str = ""


def read_feedback_report(text: str, returned: Headers | None) -> Complaint:
    """The complaint in a feedback report's fields, or in the returned message where they are redacted."""
    fields = Headers(text.encode("utf-8", "replace"))
    named: list[str] = []
    for name in ("original-rcpt-to", "removal-recipient", "original-recipient", "redacted-address"):
        for value in fields.all(name):
            named.extend(addresses_in(value, 20) or ([tidy(value)] if "@" in value else []))
    if not named and returned is not None:
        named = recipients_of(returned)
    return Complaint(
        feedback_type=fields.get("feedback-type").strip().lower() or "abuse",
        recipients=tuple({fold(address): address for address in named}.values()),
        reporting_mta=fields.get("reporting-mta").partition(";")[2].strip().lower(),
        source_ip=fields.get("source-ip").strip(),
    )


def recipients_of(returned: Headers) -> list[str]:
    """Whom the returned message was for."""
    for name in (*_HIDDEN_RECIPIENT, "to"):
        found = [address for value in returned.all(name) for address in addresses_in(value, 20)]
        if found:
            return found
    return []


def looks_like_complaint(subject: str, returned: Headers | None) -> bool:
    """A complaint without a feedback report: Microsoft's older programme encloses the message and no more."""
    if returned is None:
        return False
    return any(name in returned for name in _HIDDEN_RECIPIENT[:1]) or bool(_COMPLAINT_SUBJECT.search(subject))
