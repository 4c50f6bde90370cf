"""What a recipient's local part asks the sink to do. Pure: names in, acts out; `now` is an argument.

A local part is steered when it reads as below, with anything behind a `+` or a `.` to tell recipients apart
(`451-twice+17@example.com`, `550.anna@example.com`). Every other address is accepted.

    KIND[-LENGTH][-TIMES][-PHASE]

    kind        what happens                                                        default phase
    ---------   ------------------------------------------------------------------  -------------
    4xx, 5xx    that code is the reply; 421 also closes the connection              rcpt
    greylist    451 until LENGTH (2s, 500ms) has passed since the first attempt     rcpt
    slow        the reply comes after LENGTH                                        dot
    never       no reply ever comes; the connection stays open                      dot
    drop        the connection is closed without a reply                            rcpt
    reset       the same by RST                                                     rcpt
    garbage     the reply is a line that is no SMTP reply                           rcpt
    binary      550 with a text that is not UTF-8                                   rcpt
    long        550 in 120 lines                                                    rcpt
    trickle     the usual reply, one byte at a time                                 rcpt

    times       once, twice, thrice, Nx: only the first attempts, then accepted; `later` is `once`. Left out: always
    phase       rcpt         the reply to RCPT
                data         the reply to DATA; with BDAT the reply to the first chunk
                before-dot   when the content begins, after 354; with BDAT when the chunk begins
                dot          the reply to the end of the content, which is NOT recorded (for slow: it is, as usual)
                after-dot    the content is recorded as accepted first. drop, reset, never, garbage: no 250 leaves.
                             421-after-dot: 250, then at once 421 and the connection closes

So `drop-before-dot` is a message in doubt that the sink never had, `drop-after-dot` one that it had.
In MAIL a sender's local part steers too, with the phase `mail`: `550-mail@`, `421-mail@`.
"""

from __future__ import annotations

import re
from enum import StrEnum

import msgspec

from formats.reply import Reply


class Phase(StrEnum):
    """The place in a transaction at which an act happens."""

    MAIL = "mail"
    RCPT = "rcpt"
    DATA = "data"
    BEFORE_DOT = "before-dot"
    DOT = "dot"
    AFTER_DOT = "after-dot"


class Kind(StrEnum):
    """What happens there."""

    REPLY = "reply"
    SLOW = "slow"
    NEVER = "never"
    DROP = "drop"
    RESET = "reset"
    GARBAGE = "garbage"
    BINARY = "binary"
    LONG = "long"
    TRICKLE = "trickle"


_HARMLESS = frozenset({Kind.SLOW, Kind.TRICKLE})


class Act(msgspec.Struct, frozen=True):
    """One thing to do in place of the usual reply."""

    kind: Kind
    phase: Phase
    reply: Reply | None = None
    seconds: float = 0.0  # the reply comes so much later
    closes: bool = False  # the connection closes behind the reply, as it does behind every 421

    @property
    def is_harmless(self) -> bool:
        """The usual reply comes all the same, only not as usual."""
        return self.kind in _HARMLESS


class Wish(msgspec.Struct, frozen=True):
    """A local part as read: the act, and for how many attempts or how long it holds."""

    act: Act
    times: int | None = None  # None: always
    greylist_s: float | None = None


# Texts in the words that providers use, so that classifiers have something to read.
_REPLIES = {
    421: "4.3.2 Service shutting down, closing transmission channel",
    450: "4.2.0 Mailbox temporarily unavailable",
    451: "4.7.1 Try again later",
    452: "4.2.2 Mailbox full",
    454: "4.7.0 Temporary authentication failure",
    550: "5.1.1 No such user here",
    551: "5.1.6 User has moved",
    552: "5.2.2 Mailbox full",
    553: "5.1.3 Mailbox name not allowed",
    554: "5.7.1 Message refused by policy",
    555: "5.5.4 Parameters not recognised",
}
_TIMES = {"once": 1, "later": 1, "twice": 2, "thrice": 3}
_AFTER_CONTENT = frozenset({Kind.SLOW, Kind.NEVER})

_GRAMMAR = re.compile(
    r"(?P<kind>[45]\d\d|greylist|slow|never|drop|reset|garbage|binary|long|trickle)"
    r"(?:-(?P<length>\d+(?:\.\d+)?)(?P<unit>ms|s))?"
    r"(?:-(?P<times>once|later|twice|thrice|\d+x))?"
    r"(?:-(?P<phase>mail|rcpt|data|before-dot|dot|after-dot))?"
    r"(?:[+.].*)?\Z",
    re.DOTALL | re.IGNORECASE,
)


def reply_for(code: int) -> Reply:
    """The sink's reply of that code, with an enhanced status code and a text."""
    return Reply(code, _REPLIES.get(code, f"{code // 100}.0.0 As you asked"))


def read_wish(local: str) -> Wish | None:
    """What the local part asks for; None when it is an ordinary name."""
    found = _GRAMMAR.match(local)
    if not found:
        return None
    word = found["kind"].lower()
    seconds = float(found["length"]) / (1000 if found["unit"].lower() == "ms" else 1) if found["length"] else None
    if (word in ("slow", "greylist")) != (seconds is not None):
        return None
    times = found["times"] and found["times"].lower()
    count = None if times is None else _TIMES.get(times) or int(times.rstrip("x"))
    if word.isdigit() or word == "greylist":
        kind, reply = Kind.REPLY, reply_for(int(word) if word.isdigit() else 451)
    else:
        kind, reply = Kind(word), None
    default = Phase.DOT if kind in _AFTER_CONTENT else Phase.RCPT
    phase = Phase(found["phase"].lower()) if found["phase"] else default
    if word == "greylist":
        return Wish(Act(kind, phase, reply), count, seconds)
    return Wish(Act(kind, phase, reply, seconds or 0.0), count)


class Steering:
    """Remembers how often each steered recipient was tried; ordinary recipients cost no memory."""

    def __init__(self) -> None:
        self._tried: dict[str, int] = {}
        self._first_tried: dict[str, float] = {}

    def attempt(self, recipient: str, now: float) -> Act | None:
        """What to do in this attempt at the recipient, counting it; None: accept."""
        wish = read_wish(recipient.rpartition("@")[0])
        if wish is None or wish.act.phase is Phase.MAIL:
            return None
        if wish.greylist_s is not None:
            first = self._first_tried.setdefault(recipient, now)
            return wish.act if now - first < wish.greylist_s else None
        if wish.times is None:
            return wish.act
        tried = self._tried.get(recipient, 0)
        if tried >= wish.times:
            return None
        self._tried[recipient] = tried + 1
        return wish.act

    def sender(self, address: str) -> Act | None:
        """What to do at MAIL for this return path."""
        wish = read_wish(address.rpartition("@")[0])
        return wish.act if wish is not None and wish.act.phase is Phase.MAIL else None
