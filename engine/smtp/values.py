"""The values of a conversation: messages in, events out, what the server offered, how we wish to speak.

RFC 5321, 1870 (SIZE), 2920 (PIPELINING), 3030 (CHUNKING), 6152 (8BITMIME), 6531 (SMTPUTF8), 9422 (LIMITS).
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from formats.reply import Reply


class Stage(StrEnum):
    """Where in a conversation something happened. DOT is the end of the content, by dot or by BDAT LAST."""

    CONNECT = "connect"
    GREETING = "greeting"
    EHLO = "ehlo"
    STARTTLS = "starttls"
    AUTH = "auth"
    MAIL = "mail"
    RCPT = "rcpt"
    DATA = "data"
    DOT = "dot"
    RSET = "rset"
    QUIT = "quit"


class Outgoing(msgspec.Struct, gc=False):
    """One message to one recipient, ready for the wire.

    `ticket` is the caller's number for it. `content` is complete, with CRLF line ends. `dot_free` is the caller's
    promise that no line begins with a dot; without it the dialogue looks, which costs 6 µs for 20 KB.
    """

    ticket: int
    return_path: str
    recipient: str
    content: bytes
    smtputf8: bool = False
    dot_free: bool = False


class Accepted(msgspec.Struct, frozen=True, gc=False):
    """The server took responsibility: 2xx to the end of the content."""

    ticket: int
    reply: Reply


class Refused(msgspec.Struct, frozen=True, gc=False):
    """4xx or 5xx to this message's MAIL, RCPT, DATA or DOT. Whether it is about the recipient is judged elsewhere."""

    ticket: int
    stage: Stage
    reply: Reply


class Lost(msgspec.Struct, frozen=True, gc=False):
    """Not sent, nobody's fault: safe to send again, no attempt counted. `reply` is the server's last word, if any."""

    ticket: int
    stage: Stage
    why: str
    reply: Reply | None = None


class InDoubt(msgspec.Struct, frozen=True, gc=False):
    """The end of the content left, and its reply did not come or cannot be trusted."""

    ticket: int
    why: str
    reply: Reply | None = None


Event = Accepted | Refused | Lost | InDoubt


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """What the server's EHLO answer offered."""

    pipelining: bool = False
    chunking: bool = False
    size: int | None = None  # None: not offered; 0: no fixed limit
    eight_bit: bool = False
    smtputf8: bool = False
    enhanced_status_codes: bool = False
    mail_max: int | None = None  # RFC 9422: transactions in one connection

    @classmethod
    def read(cls, extensions: dict[str, str]) -> Offer:
        """From EHLO keywords (lower case) and their parameters; what makes no sense counts as not offered."""
        limits = dict(word.upper().partition("=")[::2] for word in extensions.get("limits", "").split())
        size = extensions.get("size")
        return cls(
            pipelining="pipelining" in extensions,
            chunking="chunking" in extensions,
            size=None if size is None else _number(size) or 0,
            eight_bit="8bitmime" in extensions,
            smtputf8="smtputf8" in extensions,
            enhanced_status_codes="enhancedstatuscodes" in extensions,
            mail_max=_number(limits.get("MAILMAX", "")) or None,
        )


def _number(text: str) -> int | None:
    """The digits of `text` as a number; None where they are none or more than a size can have (RFC 1870: 20)."""
    text = text.strip()
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 20 else None


class Manner(msgspec.Struct, frozen=True, kw_only=True):
    """How we wish to hold the conversation; what the server did not offer is not done."""

    depth: int = 4
    pipelining: bool = True
    ahead: bool = True  # write the next envelope behind a dot whose reply is owed
    chunking: bool = True


class Patience(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds to wait for the reply owed next (RFC 5321 §4.5.3.2)."""

    command_s: float = 300.0
    data_s: float = 120.0
    dot_s: float = 600.0
    quit_s: float = 5.0  # ours: nothing depends on this reply
    farewell_s: float = 60.0  # ours: after a 421, for dots that have left
