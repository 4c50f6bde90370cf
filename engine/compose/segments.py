"""A body of static text and values: one list of encoded segments, and all values of a row encoded at once.

Encoding eight short values one by one costs more than everything else a row needs. So they are joined by line feeds,
escaped and encoded as one text by a few C calls, and split again. That works for values that stay whole lines of
quoted-printable: no line breaks or control characters in them, at most 75 characters encoded, no dot or "From " at the
start. Any other row takes the path that encodes each value by itself; the decoded message is the same.
"""

from __future__ import annotations

import binascii
from collections.abc import Callable, Sequence
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
        slots = [part for part in parts if isinstance(part, Slot)]
        self._wanted = tuple(dict.fromkeys((slot.index, slot.default) for slot in slots))
        # For values encoded together: the soft break behind each is part of the static text.
        self._static: list[str] = [""]
        self._text: list[tuple[int, int]] = []
        self._html: list[tuple[int, int]] = []
        # For values encoded one by one, soft break and all.
        self._single: list[str] = []
        self._slots: list[tuple[int, Slot]] = []
        for part in parts:
            if isinstance(part, str):
                self._static[-1] += part
                self._single.append(part)
                continue
            places = self._html if part.is_html else self._text
            places.append((len(self._static), self._wanted.index((part.index, part.default))))
            self._static += ["", SOFT_BREAK]
            self._slots.append((len(self._single), part))
            self._single.append("")

    def fill(self, values: Sequence[Any]) -> list[str]:
        """The segments of a row; their join is the body."""
        strings = [_string(values[index], default) for index, default in self._wanted]
        joined = "\n".join(strings)
        count = len(strings)
        text = _together(joined, count, self._canonical) if self._text else ()
        if text is not None:
            html = _together(_escaped(joined), count, self._canonical) if self._html else ()
            if html is not None:
                out = self._static.copy()
                for at, place in self._text:
                    out[at] = text[place]
                for at, place in self._html:
                    out[at] = html[place]
                return out
        return self._one_by_one(values)

    def _one_by_one(self, values: Sequence[Any]) -> list[str]:
        out = self._single.copy()
        for at, slot in self._slots:
            out[at] = slot.fragment(values)
        return out


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
