"""A body of static text and values: one list of encoded segments, and all values of a row encoded at once.

Encoding eight short values one by one costs more than everything else a row needs. So they are joined by line feeds,
escaped and encoded as one text by a few C calls, and split again. That works for values that stay whole lines of
quoted-printable: no line breaks or control characters in them, at most 75 characters encoded, no dot or "From " at the
start. Any other row takes the path that encodes each value by itself; the decoded message is the same.
"""

from __future__ import annotations

import binascii
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

from engine.compose.values import text_of
from formats.message import SOFT_BREAK

Encode = Callable[[Any], str]


class Slot:
    """A place for a value: which one, what text stands there for a null, whether HTML is escaped, and the encoder."""

    __slots__ = ("default", "encode", "index", "is_html")

    def __init__(self, index: int, default: str, is_html: bool, encode: Encode) -> None:
        self.index, self.default, self.is_html, self.encode = index, default, is_html, encode

    def fragment(self, values: Sequence[Any]) -> str:
        """The value's fragment, encoded by itself."""
        value = values[self.index]
        return self.encode(self.default if value is None or value != value else value)


class SegmentBody:
    """A whole body, filled by `fill`."""

    def __init__(self, parts: Sequence[str | Slot], *, canonical: bool) -> None:
        self._canonical = canonical
        self._slots = [part for part in parts if isinstance(part, Slot)]
        self._wanted = tuple(dict.fromkeys((slot.index, slot.default) for slot in self._slots))
        # For values encoded together: static text and values in turn, each value's soft break part of the text.
        self._static: list[str] = [""]
        # For values encoded one by one, soft break and all.
        self._single: list[str | Slot] = list(parts)
        for part in parts:
            if isinstance(part, str):
                self._static[-1] += part
            else:
                self._static += ["", SOFT_BREAK]
        self._has_text = any(not slot.is_html for slot in self._slots)
        self._has_html = any(slot.is_html for slot in self._slots)
        # Of the values as text, then the values as HTML, those that stand in the slots, in order.
        places = [
            self._wanted.index((slot.index, slot.default)) + (len(self._wanted) if slot.is_html else 0)
            for slot in self._slots
        ]
        self._pick: Callable[[list[str]], Sequence[str]]
        if len(places) == 1:
            (only,) = places
            self._pick = lambda both: (both[only],)
        else:
            self._pick = itemgetter(*places) if places else lambda both: ()

    def fill(self, values: Sequence[Any]) -> list[str]:
        """The segments of a row; their join is the body."""
        strings = [
            value if type(value := values[index]) is str else _string(value, default) for index, default in self._wanted
        ]
        text = joined = "\n".join(strings)
        html = _escaped(joined) if self._has_html else joined
        encoded = _together(html, len(strings), self._canonical)
        if encoded is None:
            return self._one_by_one(values)
        # HTML is never shorter than its text, so what fits as HTML fits as text; and mostly they are the same.
        plain = encoded
        if self._has_text and html is not text:
            plain = _together(text, len(strings), self._canonical) or []
            if not plain:
                return self._one_by_one(values)
        out = self._static.copy()
        out[1::2] = self._pick(plain + encoded)
        return out

    def _one_by_one(self, values: Sequence[Any]) -> list[str]:
        return [part if isinstance(part, str) else part.fragment(values) for part in self._single]


def _string(value: Any, default: str) -> str:
    if type(value) is str:
        return value
    return default if value is None or value != value else str(text_of(value))


def _escaped(text: str) -> str:
    # As markupsafe escapes, without making Markup of it.
    if "&" in text:
        text = text.replace("&", "&amp;")
    if "<" in text:
        text = text.replace("<", "&lt;")
    if ">" in text:
        text = text.replace(">", "&gt;")
    if "'" in text:
        text = text.replace("'", "&#39;")
    if '"' in text:
        text = text.replace('"', "&#34;")
    return text


def _together(joined: str, count: int, canonical: bool) -> list[str] | None:
    """The values in quoted-printable, without the soft breaks; None where one of them is no whole line."""
    if joined.isascii() and joined.replace("\n", " ").isprintable():
        if "=" in joined:
            joined = joined.replace("=", "=3D")
    else:
        try:
            joined = binascii.b2a_qp(joined.encode()).decode("ascii")
        except UnicodeEncodeError:  # a lone surrogate
            return None
        if "\r" in joined:
            return None
    if joined[:1] in (".", "F") or "\n." in joined or "\nFrom " in joined:
        return None
    if canonical and ("  " in joined or "\t" in joined):
        return None
    lines = joined.split("\n")
    if len(lines) != count or (len(joined) > 75 and max(map(len, lines)) > 75):
        return None
    return lines
