"""Replies as the server sent them. Knows bytes, not policy: whether 452 means "later" is pace.rules' business.

RFC 5321 §4.2 (replies), RFC 2034 and 3463 (enhanced status codes).

Bytes: lines that end in CRLF (a bare LF is taken too), each a three-digit code 200..599 and then

    "-" text     another line follows
    " " text     the last line
    (nothing)    the last line

Lines of one reply that disagree about the code are a fact of life: the last one counts.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

_ENHANCED = re.compile(r"([245]\.\d{1,3}\.\d{1,3})(?=\s|$)")

# Looked up instead of converted: what is no key here is no reply code, "+25" and "2 5" included.
CODES: dict[bytes, int] = {b"%d" % code: code for code in range(200, 600)}

# A reply may carry 32 KB (an EHLO answer is a few hundred bytes); the log keeps this much of the text.
MAX_TEXT = 1000

# Controls would let a server write to the operator's terminal.
_CONTROLS = dict.fromkeys([*range(32), *range(127, 160)], " ")


class Reply(msgspec.Struct, frozen=True, gc=False):
    """One complete reply: its code and the text of all its lines.

    `code` is 200..599, or 0 where the server sent something that is no reply at all; `text` is one line, lines joined
    by a space, without the codes, valid Unicode (what was not UTF-8 became U+FFFD). `local` marks a reply that we wrote
    ourselves, for what needed no server to refuse (a message above the announced SIZE): rules about servers must not
    learn from it.
    """

    code: int
    text: str = ""
    local: bool = False

    @property
    def enhanced(self) -> str | None:
        """The enhanced status code the text begins with (RFC 2034), or None."""
        found = _ENHANCED.match(self.text)
        return found.group(1) if found else None

    @property
    def is_positive(self) -> bool:
        return 200 <= self.code < 400

    @property
    def is_transient(self) -> bool:
        return 400 <= self.code < 500

    @property
    def is_permanent(self) -> bool:
        return 500 <= self.code < 600

    def __str__(self) -> str:
        return f"{self.code} {self.text}".rstrip()


def clean_text(raw: bytes) -> str:
    """Server bytes as one printable line of at most MAX_TEXT characters."""
    text = raw.strip().decode("utf-8", "replace")
    if not text.isprintable():
        text = text.translate(_CONTROLS).strip()
    return text if len(text) <= MAX_TEXT else text[: MAX_TEXT - 1] + "…"


def parse_reply(lines: Sequence[bytes]) -> Reply:
    """The reply in its lines, line ends on or off; code 0 and the whole text where the last line is no reply line.

    Where every line repeats the first one's enhanced status code, as RFC 2034 §4 asks, it is kept once.
    """
    last = lines[-1]
    code = CODES.get(last[:3], 0)
    if len(lines) == 1:
        return Reply(code, clean_text(last[4:] if code else last))
    texts = [line[4:].strip() if line[:3] in CODES else line.strip() for line in lines]
    status = texts[0].partition(b" ")[0]
    if _ENHANCED.fullmatch(status.decode("latin-1")):
        texts[1:] = [text.removeprefix(status).lstrip() for text in texts[1:]]
    return Reply(code, clean_text(b" ".join(text for text in texts if text)))
