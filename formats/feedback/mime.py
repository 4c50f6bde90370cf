"""A tolerant MIME reader that cannot be made to work hard: parts as slices, bounded in depth, number and size.

RFC 2045-2047, 5322. The standard library's parser builds every part of every attachment and raises on some real
mail; here a part is a range of bytes with its header block, limits cut instead of raising, and nothing in a message
makes it fail. Line ends are normalised to LF once.
"""

from __future__ import annotations

import base64
import binascii
import html
import quopri
import re
from collections.abc import Iterator

MAX_HEADER = 128 * 1024  # bytes of one header block that are looked at
MAX_FIELDS = 500
MAX_PARTS = 200  # of one message, all levels together
MAX_DEPTH = 10
MAX_TEXT = 256 * 1024  # bytes of one part's text that are decoded

_FIELD = re.compile(rb"^([!-9;-~]{1,80})[ \t]*:[ \t]*([^\n]*(?:\n[ \t][^\n]*)*)", re.M)
_FOLD = re.compile(r"\n[ \t]*")
_WORD = re.compile(r"=\?([A-Za-z0-9_.:-]{1,40})(?:\*[A-Za-z-]*)?\?([bBqQ])\?([^?\s]*(?: [^?\s]*)*)\?=")
_BETWEEN_WORDS = re.compile(r"(\?=)\s+(=\?)")
_PARAMETER = re.compile(r""";\s*([A-Za-z0-9_-]{1,40})\*?\s*=\s*("(?:[^"\\\n]|\\.)*"|[^;\s]+)""")
_NOT_BASE64 = re.compile(rb"[^A-Za-z0-9+/]")
# A body that is multipart although its header does not say so: sendmail's reports lose theirs on some paths.
_HIDDEN_BOUNDARY = re.compile(
    rb"^--([^\n]{1,100})\nContent-(?:Type|Description|Transfer-Encoding|Disposition)[ \t]*:", re.M | re.I
)
_TAG = re.compile(r"<(/?)([A-Za-z!][A-Za-z0-9]*)[^<>]*>")
_BLOCK = frozenset(
    {"br", "p", "div", "tr", "li", "h1", "h2", "h3", "h4", "td", "table", "ul", "pre", "hr", "blockquote"}
)


class Headers:
    """A header block: `get` and `all` by lower-case name, values unfolded and as they were written."""

    __slots__ = ("_fields",)

    def __init__(self, block: bytes) -> None:
        fields: dict[str, list[bytes]] = {}
        for count, found in enumerate(_FIELD.finditer(block)):
            if count >= MAX_FIELDS:
                break
            fields.setdefault(found[1].lower().decode("ascii"), []).append(found[2])
        self._fields = fields

    def __contains__(self, name: str) -> bool:
        return name in self._fields

    def __len__(self) -> int:
        return len(self._fields)

    def get(self, name: str) -> str:
        """The first field's value, "" where there is none."""
        values = self._fields.get(name)
        return _unfolded(values[0]) if values else ""

    def all(self, name: str) -> list[str]:
        """The values of every field of that name."""
        return [_unfolded(value) for value in self._fields.get(name, ())]

    def words(self, name: str) -> str:
        """The first field's value with its encoded words decoded (RFC 2047)."""
        return decode_words(self.get(name))


def _unfolded(raw: bytes) -> str:
    return _FOLD.sub(" ", guess_text(raw[:8192])).strip()


class Part:
    """One leaf of a message: its header, its kind, its still encoded body."""

    __slots__ = ("body", "content_type", "headers")

    def __init__(self, headers: Headers, content_type: str, body: bytes) -> None:
        self.headers = headers
        self.content_type = content_type
        self.body = body

    def raw(self) -> bytes:
        """The body with its transfer encoding undone, at most MAX_TEXT of it."""
        return undo_encoding(self.body[:MAX_TEXT], self.headers.get("content-transfer-encoding"))

    def text(self) -> str:
        """The body as text; HTML as what a reader would see."""
        raw = self.raw()
        text = decode_text(raw, _parameter(self.headers.get("content-type"), "charset"))
        return visible_text(text) if self.content_type == "text/html" else text


def normalised(raw: bytes) -> bytes:
    """`raw` with LF line ends, without an mbox line in front and leading blank lines."""
    if b"\r" in raw:
        raw = raw.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    raw = raw.lstrip(b"\n")
    if raw.startswith((b"From ", b">From ")):
        raw = raw[raw.find(b"\n") + 1 :] if b"\n" in raw else b""
    return raw


def split(raw: bytes) -> tuple[Headers, bytes]:
    """A message's header block and body. A block longer than MAX_HEADER is cut, the body begins behind its end."""
    if raw.startswith(b"\n"):
        return Headers(b""), raw[1:]
    end = raw.find(b"\n\n")
    if end < 0:
        return Headers(raw[:MAX_HEADER]), b""
    return Headers(raw[: min(end, MAX_HEADER)]), raw[end + 2 :]


def content_type(headers: Headers) -> str:
    """The media type in lower case, "" where none is told."""
    value = headers.get("content-type")
    return value.partition(";")[0].strip().lower() if value else ""


def leaves(headers: Headers, body: bytes) -> Iterator[Part]:
    """The parts of a message that are not containers, in order. Enclosed messages are leaves: they are not opened."""
    budget = [MAX_PARTS]
    yield from _leaves(headers, body, 0, budget)


def _leaves(headers: Headers, body: bytes, depth: int, budget: list[int]) -> Iterator[Part]:
    kind = content_type(headers)
    if depth < MAX_DEPTH:
        boundary = b""
        if kind.startswith("multipart/"):
            boundary = _parameter(headers.get("content-type"), "boundary").encode("utf-8", "surrogateescape")
        if not boundary or b"--" + boundary not in body:
            boundary = b""
            if kind in ("", "text/plain") or kind.startswith("multipart/"):
                # Only near the beginning: further down it is the returned message's own.
                found = _HIDDEN_BOUNDARY.search(body[:1024])
                boundary = found[1] if found and found.start() < 300 else b""
        if boundary:
            for chunk in _chunks(body, boundary):
                if budget[0] <= 0:
                    return
                budget[0] -= 1
                inner, rest = split(chunk)
                yield from _leaves(inner, rest, depth + 1, budget)
            return
    if kind.startswith("multipart/"):
        kind = "text/plain"  # a container whose boundary was lost: its text is still there
    yield Part(headers, kind or "text/plain", body)


def _chunks(body: bytes, boundary: bytes) -> Iterator[bytes]:
    """What stands between the boundary lines; a missing last line ends with the body."""
    start = -1
    for line_start, line_end, is_last in _boundary_lines(body, b"--" + boundary):
        if start >= 0:
            yield body[start : max(start, line_start - 1)]
        if is_last:
            return
        start = min(line_end + 1, len(body))
    if start >= 0:
        yield body[start:]


def _boundary_lines(body: bytes, mark: bytes) -> Iterator[tuple[int, int, bool]]:
    at = body.find(mark)
    while at >= 0:
        line_end = body.find(b"\n", at)
        line_end = len(body) if line_end < 0 else line_end
        # A nested part's boundary may begin with ours; only white space or "--" may follow it on its line.
        rest = body[at + len(mark) : min(line_end, at + len(mark) + 80)].strip()
        if (at == 0 or body[at - 1] == 10) and rest in (b"", b"--"):
            yield at, line_end, rest == b"--"
            at = line_end
        at = body.find(mark, at + 1)


def _parameter(value: str, name: str) -> str:
    for found in _PARAMETER.finditer(value):
        if found[1].lower() == name:
            text = found[2]
            return re.sub(r"\\(.)", r"\1", text[1:-1]) if text.startswith('"') else text
    return ""


def parameter(headers: Headers, name: str) -> str:
    """A parameter of Content-Type, "" where there is none."""
    return _parameter(headers.get("content-type"), name)


def undo_encoding(raw: bytes, encoding: str) -> bytes:
    """`raw` decoded as far as it goes; what claims to be base64 and is not stays as it is."""
    match encoding.strip().lower():
        case "base64":
            digits = _NOT_BASE64.sub(b"", raw)
            # Real base64 has few other characters than its line ends; a text that only claims it has many.
            if len(digits) < 0.9 * len(raw.replace(b"\n", b"")) - 4:
                return raw
            digits = digits[: len(digits) - (1 if len(digits) % 4 == 1 else 0)]
            try:
                return base64.b64decode(digits + b"=" * (-len(digits) % 4)).replace(b"\r\n", b"\n")
            except (binascii.Error, ValueError):
                return raw
        case "quoted-printable":
            return quopri.decodestring(raw)
        case _:
            return raw


def decode_text(raw: bytes, charset: str) -> str:
    """`raw` as text in the charset it claims, or in the one it looks like. Never fails."""
    if charset and charset.lower() not in ("us-ascii", "ascii", "utf-8", "utf8", "unknown", "8bit"):
        try:
            return raw.decode(charset, "replace")
        except (LookupError, ValueError, UnicodeError):
            pass
    return guess_text(raw)


def guess_text(raw: bytes) -> str:
    """Text of an unknown charset: ISO-2022-JP by its escapes, else UTF-8, else Latin-1."""
    if b"\x1b$" in raw:
        try:
            return raw.decode("iso2022_jp")
        except UnicodeError:
            pass
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return raw.decode("latin-1")


def decode_words(value: str) -> str:
    """A header value with its encoded words decoded (RFC 2047)."""
    if "=?" not in value:
        return value
    return _WORD.sub(_decoded_word, _BETWEEN_WORDS.sub(r"\1\2", value[:4096]))


def _decoded_word(found: re.Match[str]) -> str:
    charset, kind, text = found[1], found[2].lower(), found[3].encode("utf-8", "replace")
    raw = undo_encoding(text, "base64") if kind == "b" else binascii.a2b_qp(text, header=True)
    return decode_text(raw, charset)


def visible_text(markup: str) -> str:
    """HTML as lines of text: tags gone, blocks on lines of their own."""
    for name in ("head", "style", "script"):
        markup = _without(markup, name)
    lines = _TAG.sub(lambda tag: "\n" if tag[2].lower() in _BLOCK else "", markup)
    return html.unescape(lines)


def _without(markup: str, name: str) -> str:
    """`markup` without the elements of that name; linear in its length whatever it is."""
    lower = markup.lower()
    if f"<{name}" not in lower or len(lower) != len(markup):
        return markup
    kept, at = [], 0
    while True:
        start = lower.find(f"<{name}", at)
        end = lower.find(f"</{name}", start) if start >= 0 else -1
        if end < 0:
            kept.append(markup[at:])
            return "".join(kept)
        kept.append(markup[at:start])
        at = end
