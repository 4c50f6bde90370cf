"""Replies as the server sent them. Knows bytes, not policy: whether 452 means "later" is pace.rules' business.

RFC 5321 §4.2 (replies), RFC 2034 and 3463 (enhanced status codes).
"""

from __future__ import annotations

import re

import msgspec

_ENHANCED = re.compile(r"([245]\.\d{1,3}\.\d{1,3})(?=\s|$)")


class Reply(msgspec.Struct, frozen=True):
    """One complete reply: its code and the text of all its lines.

    `code` is 200..599, or 0 where the server sent something that is no reply at all; `text` is one line, lines joined
    by a space, without the codes, valid Unicode (what was not UTF-8 became U+FFFD).
    """

    code: int
    text: str = ""

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
