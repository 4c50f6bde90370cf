"""Delivery reports by their fields: RFC 3464 message/delivery-status, RFC 6533 message/global-delivery-status, and the
same fields where hosts put them into plain text.

Bytes: groups of `Name: value` fields, separated by blank lines; the first group is of the message, each further one of
a recipient. Real reports leave out types (`Final-Recipient: a@b`), put angle brackets and comments where none belong,
lose blank lines, or name a program in place of the recipient: the reader starts a recipient at each Final-Recipient
and takes what stands near it.
"""

from __future__ import annotations

import re

import msgspec

from formats.feedback.smtpwords import (
    addresses_in,
    enhanced_in,
    fold,
    reply_in,
    squeezed,
    stage_in,
    tidy,
    typed,
)
from formats.feedback.values import Action, Origin, Recipient

MAX_RECIPIENTS = 1000

_FIELD = re.compile(r"^([A-Za-z][A-Za-z0-9-]{2,40})[ \t]*:[ \t]*([^\n]*(?:\n[ \t]+\S[^\n]*)*)", re.M)
_OF_RECIPIENT = frozenset(
    {
        "final-recipient",
        "original-recipient",
        "action",
        "status",
        "remote-mta",
        "diagnostic-code",
        "x-actual-recipient",
        "last-attempt-date",
        "will-retry-until",
        "final-log-id",
    }
)
_BLANK = re.compile(r"\n[ \t]*\n")
_UNITEXT = re.compile(r"\\x\{([0-9A-Fa-f]{2,6})\}")
_STATUS = re.compile(r"([245])\s*\.\s*(\d{1,3})\s*\.\s*(\d{1,3})")


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What the fields say."""

    recipients: tuple[Recipient, ...] = ()
    reporting_mta: str = ""
    envelope_id: str = ""
    message_id: str = ""  # X-Original-Message-ID, which Gmail writes


def read_report(text: str) -> Report:
    """The report in `text`, with no recipients where it holds none."""
    head: dict[str, str] = {}
    groups: list[dict[str, str]] = []
    pending: dict[str, str] = {}
    for block in _BLANK.split(text):
        for group in _groups(block, head):
            if "final-recipient" in group or "original-recipient" in group:
                if len(groups) >= MAX_RECIPIENTS:
                    break
                groups.append(pending | group)
                pending = {}
            elif groups and not groups[-1].keys() & group.keys():
                groups[-1].update(group)  # a blank line inside a recipient's fields
            else:
                pending.update(group)
    recipients = tuple(_recipient(group) for group in groups)
    return Report(
        recipients=_without_repeats(recipients),
        reporting_mta=host_in(head.get("reporting-mta", "")),
        envelope_id=head.get("original-envelope-id", "").strip()[:200],
        message_id=head.get("x-original-message-id", "").strip().strip("<>")[:300],
    )


def _groups(block: str, head: dict[str, str]) -> list[dict[str, str]]:
    """The recipients' fields of one block, a new group where a field comes again; the message's own go to `head`."""
    groups: list[dict[str, str]] = []
    for found in _FIELD.finditer(block):
        name, value = found[1].lower(), found[2].replace("\n", " ")
        if name not in _OF_RECIPIENT:
            head.setdefault(name, value)
        elif not groups or name in groups[-1]:
            groups.append({name: value})
        else:
            groups[-1][name] = value
    return groups


def _without_repeats(recipients: tuple[Recipient, ...]) -> tuple[Recipient, ...]:
    seen: dict[str, Recipient] = {}
    for recipient in recipients:
        seen.setdefault(fold(recipient.address), recipient)
    return tuple(seen.values())


def host_in(value: str) -> str:
    """The host of an `dns; mx.example.org (comment)` field."""
    name = typed(value)[1].partition("(")[0].strip().strip("<>").rstrip(".").lower()
    return name.split()[0][:255] if name else ""


def address_in(value: str) -> str:
    """The address of a recipient field, "" where it names something else (a program, a file, a bare name)."""
    kind, rest = typed(value)
    if kind not in ("", "rfc822", "utf-8", "x-local", "smtp", "x-actual", "local"):
        return ""
    rest = _UNITEXT.sub(lambda found: _character(found[1]), rest)
    rest = rest.partition(" (")[0].strip()
    if not rest or rest.startswith(("|", "/")):
        return ""
    if " " in rest or rest.count("@") != 1:
        found = addresses_in(rest, 1)
        rest = found[0] if found else ""
    address = tidy(rest)
    if "@" not in address and kind == "rfc822":
        return ""
    return address[:320] if "@" in address else ""


def _character(digits: str) -> str:
    number = int(digits, 16)
    return chr(number) if number < 0x110000 and not 0xD800 <= number < 0xE000 else "\ufffd"


def _recipient(group: dict[str, str]) -> Recipient:
    final = address_in(group.get("final-recipient", ""))
    original = address_in(group.get("original-recipient", ""))
    actual = address_in(group.get("x-actual-recipient", ""))
    address = final or original or actual
    raw = group.get("diagnostic-code", "")
    words = typed(raw)[1] or raw
    status_field = group.get("status", "")
    return Recipient(
        address=address,
        original=original,
        action=_action(group.get("action", ""), status_field),
        status=best_status(status_field, words),
        reply=reply_in(words),
        diagnostic=squeezed(words or status_field.partition("(")[2].rstrip(")")),
        remote_mta=host_in(group.get("remote-mta", "")),
        stage=stage_in(words),
        origin=Origin.REPORT,
    )


def _action(value: str, status: str) -> Action:
    word = value.strip().lower()
    for action in (Action.FAILED, Action.DELAYED, Action.DELIVERED, Action.RELAYED, Action.EXPANDED):
        if word.startswith(action.value):
            return action
    if word.startswith(("delay", "defer", "warn")):
        return Action.DELAYED
    if status.strip().startswith("2"):
        return Action.DELIVERED
    return Action.FAILED


def best_status(field: str, diagnostic: str) -> str:
    """The most specific enhanced status of a Status field and the diagnostic beside it.

    The diagnostic is the remote host's own word; Status is what the reporting host made of it, often only x.0.0.
    """
    found = _STATUS.search(field)
    told = f"{found[1]}.{int(found[2])}.{int(found[3])}" if found else ""
    quoted = enhanced_in(reply_in(diagnostic).text) or enhanced_in(diagnostic)
    if quoted and not quoted.endswith(".0.0"):
        return quoted
    return told or quoted
