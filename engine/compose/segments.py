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
        # For values encoded together: static bytes and values in turn, each value's soft break part of what follows.
        static: list[str] = [""]
        for part in parts:
            if isinstance(part, str):
                static[-1] += part
            else:
                static += ["", SOFT_BREAK]
        self._static = [piece.encode("ascii") for piece in static]
        # For values encoded one by one, soft break and all.
        self._single = [part.encode("ascii") if isinstance(part, str) else part for part in parts]
        self._has_text = any(not slot.is_html for slot in self._slots)
        self._has_html = any(slot.is_html for slot in self._slots)
        self._values = _getter([index for index, _ in self._wanted])
        # Which of the encoded values stand in the slots: where HTML and text are encoded alike, and where they differ
        # (the values as text first, those as HTML behind them).
        alike = [self._wanted.index((slot.index, slot.default)) for slot in self._slots]
        self._alike = _getter(alike)
        self._apart = _getter(
            [at + len(self._wanted) * slot.is_html for at, slot in zip(alike, self._slots, strict=True)]
        )

    def fill(self, values: Sequence[Any]) -> list[bytes]:
        """The segments of a row; their join is the body."""
        try:
            text = "\n".join(self._values(values))
        except TypeError:  # not all of them are texts
            text = "\n".join([_string(values[index], default) for index, default in self._wanted])
        html = escaped(text) if self._has_html else text
        encoded = _together(html, len(self._wanted), self._canonical)
        if encoded is None:
            return self._one_by_one(values)
        out = self._static.copy()
        # HTML is never shorter than its text, so what fits as HTML fits as text; and mostly they are the same.
        if html is text or not self._has_text:
            out[1::2] = self._alike(encoded)
            return out
        plain = _together(text, len(self._wanted), self._canonical)
        if plain is None:
            return self._one_by_one(values)
        out[1::2] = self._apart([*plain, *encoded])
        return out

    def _one_by_one(self, values: Sequence[Any]) -> list[bytes]:
        return [part if isinstance(part, bytes) else part.fragment(values).encode("ascii") for part in self._single]


def _getter(places: list[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """What takes these places of a sequence."""
    if len(places) == 1:
        (only,) = places
        return lambda items: (items[only],)
    return itemgetter(*places) if places else lambda items: ()


def _string(value: Any, default: str) -> str:
    if type(value) is str:
        return value
    return default if value is None or value != value else str(text_of(value))


def escaped(text: str) -> str:
    """`text` escaped as markupsafe does it, but not Markup; the same object where there is nothing to do."""
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


def _together(joined: str, count: int, canonical: bool) -> list[bytes] | None:
    """The values in quoted-printable, without the soft breaks; None where one of them is no whole line."""
    if joined.isascii() and joined.replace("\n", " ").isprintable():
        encoded = joined.encode("ascii")
        if b"=" in encoded:
            encoded = encoded.replace(b"=", b"=3D")
    else:
        try:
            encoded = binascii.b2a_qp(joined.encode())
        except UnicodeEncodeError:  # a lone surrogate
            return None
        if b"\r" in encoded:
            return None
    if encoded[:1] in (b".", b"F") or b"\n." in encoded or b"\nFrom " in encoded:
        return None
    if canonical and (b"  " in encoded or b"\t" in encoded):
        return None
    lines = encoded.split(b"\n")
    if len(lines) != count or (len(encoded) > 75 and max(map(len, lines)) > 75):
        return None
    return lines
