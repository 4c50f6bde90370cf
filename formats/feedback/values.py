"""What a message that came back says, as values. Knows no rule about what to do with it."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from formats.reply import Reply

NO_REPLY = Reply(0)


class Kind(StrEnum):
    """What sort of message came back."""

    DELIVERY_REPORT = "delivery_report"  # a recipient failed
    DELAY = "delay"  # still trying: informs, decides nothing
    DELIVERED = "delivered"  # a success report (RFC 3464 action `delivered`)
    RELAYED = "relayed"  # handed to a host that does not report back
    EXPANDED = "expanded"  # delivered to a list or alias
    COMPLAINT = "complaint"
    AUTO_REPLY = "auto_reply"
    HUMAN = "human"
    UNSUBSCRIBE = "unsubscribe"
    UNKNOWN = "unknown"


class Action(StrEnum):
    """What the reporting host did with a recipient (RFC 3464 §2.3.3)."""

    NONE = ""
    FAILED = "failed"
    DELAYED = "delayed"
    DELIVERED = "delivered"
    RELAYED = "relayed"
    EXPANDED = "expanded"


class Origin(StrEnum):
    """Where an address was read, the surest first."""

    REPORT = "report"  # a field of a delivery or feedback report
    TEXT = "text"  # the words of a report that has no fields, at a place where such reports name the recipient
    HEADER = "header"  # a field of the outer message, for instance X-Failed-Recipients
    RETURNED = "returned"  # only the returned message names it
    GUESS = "guess"  # somewhere in the text


class Stage(StrEnum):
    """The command that the reply in a diagnostic answered, as far as the report says."""

    NONE = ""
    CONNECT = "connect"
    EHLO = "ehlo"
    MAIL = "mail"
    RCPT = "rcpt"
    DATA = "data"
    CONTENT = "content"  # after the final dot


class Recipient(msgspec.Struct, frozen=True, kw_only=True):
    """One recipient of a report.

    `address` is the host's last word for it (Final-Recipient), `original` the one we sent to where that is told.
    `status` is the most specific enhanced status found, "" where none; `reply` has code 0 where the reporting host
    used its own words, which are then in `diagnostic` (one line, at most 600 characters).
    """

    address: str
    original: str = ""
    action: Action = Action.FAILED
    status: str = ""
    reply: Reply = NO_REPLY
    diagnostic: str = ""
    remote_mta: str = ""
    stage: Stage = Stage.NONE
    origin: Origin = Origin.REPORT


class Feedback(msgspec.Struct, frozen=True, kw_only=True):
    """One message that came back, read.

    `token_texts` are the addresses, URLs and subjects in which one of our own tokens may stand, the surest first;
    `message_ids` those of the message that came back with it or that it answers, without angle brackets. Both are
    copied from the message, so nothing is certain before a token's check was verified.
    """

    kind: Kind
    recipients: tuple[Recipient, ...] = ()
    reporting_mta: str = ""
    feedback_type: str = ""  # of a complaint: abuse, fraud, virus, not-spam, opt-out, auth-failure, other
    token_texts: tuple[str, ...] = ()
    message_ids: tuple[str, ...] = ()
    original_recipients: tuple[str, ...] = ()  # To and Cc of the returned message
    original_sender: str = ""
    sender: str = ""  # From of what came back
    subject: str = ""
    was_forwarded: bool = False  # found inside another message that somebody sent on
