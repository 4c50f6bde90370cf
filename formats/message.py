"""The bytes of a message: quoted-printable in fragments that join, and header fields by our own writer.

Knows RFC 2045 (quoted-printable, base64), 2047 (encoded words), 2231 (parameters), 5322 (fields, folding), and no
template. Everything is ASCII `str` until the last step: joining ASCII strings is a memcpy, and so is their encoding.

**Fragments.** `qp_fragment(text)` is quoted-printable that begins in column 0 and ends either with a line's CRLF or
with a soft break (`=` CRLF). So any sequence of fragments joins to a valid body whose decoded text is the joined text,
and a template can encode its static text once. In every fragment: lines of at most 76 characters, no soft break inside
an escape or inside the escapes of one character, no white space at the end of a line, no line that begins with "." (so
that nobody needs to stuff dots) or with "From " (so that no mbox quotes it), CR and LF only together. With
`canonical`, no two blanks in a row and no tab stand unescaped either: then relaxed and simple body canonicalisation
(RFC 6376 §3.4) agree.

**Fields.** `unstructured`, `phrase`, `mailbox_value`, ... return a field's value; `fold` writes "Name: value" in lines
of at most 76 where it can and 998 in any case (RFC 5322 §2.1.1), breaking only before white space that is there
already, so that unfolding gives the same text. Control characters and line breaks become spaces before anything else
is decided, so that no value can begin a field.
"""

from __future__ import annotations

import binascii
import re
from collections.abc import Iterable
from datetime import UTC, datetime

CRLF = "\r\n"
SOFT_BREAK = "=\r\n"
MAX_QP_LINE = 76
MAX_WORD = 75  # RFC 2047 §2: an encoded word, with its delimiters
SOFT_LINE = 76  # RFC 5322 §2.1.1 says 78; RFC 2047 §2 says 76 where encoded words stand
HARD_LINE = 998


class HeaderError(ValueError):
    """A field that cannot be written within the rules, in words for the report."""


# --- quoted-printable -----------------------------------------------------------------------------------------------


class _QpTable(dict[int, str]):
    """For str.translate: what must be escaped, made when first met; lone surrogates become U+FFFD."""

    def __missing__(self, code: int) -> str:
        character = "\ufffd" if 0xD800 <= code <= 0xDFFF else chr(code)
        escaped = character if _is_plain(code) else "".join(f"={octet:02X}" for octet in character.encode())
        if code < 0x3000 or len(self) < 20_000:  # bounded, whatever the list holds
            self[code] = escaped
        return escaped


def _is_plain(code: int) -> bool:
    return 32 <= code <= 126 and code != 61


_QP = _QpTable({9: "\t"})
_QP_CANONICAL = _QpTable({9: "=09"})
_BLANKS = re.compile(r"  +")


def normalise_line_ends(text: str) -> str:
    """`text` with every CR LF and lone CR as LF."""
    return text.replace("\r\n", "\n").replace("\r", "\n") if "\r" in text else text


def short_fragment(text: str, canonical: bool = False) -> str:
    """The fragment of a text that is one line of it, by a few C calls; "" for any other."""
    if not text.isprintable():
        return ""
    if not text.isascii():
        text = binascii.b2a_qp(text.encode()).decode("ascii")
    elif "=" in text:
        text = text.replace("=", "=3D")
    if len(text) > 75 or text[:1] in (".", "F", "") or (canonical and "  " in text):
        return ""
    return text + SOFT_BREAK


def qp_fragment(text: str, *, canonical: bool = False) -> str:
    """`text` as a fragment (see the module's docstring); "" for ""."""
    if not text:
        return ""
    lines = normalise_line_ends(text).translate(_QP_CANONICAL if canonical else _QP).split("=0A")
    last = len(lines) - 1
    out: list[str] = []
    for number, line in enumerate(lines):
        if number == last and not line:
            break
        if line:
            if canonical and "  " in line:
                line = _BLANKS.sub(lambda run: " " + "=20" * (len(run[0]) - 1), line)
            if number < last and line[-1] in " \t":
                line = line[:-1] + ("=20" if line[-1] == " " else "=09")
            line = _protect_start(line)
            while len(line) > MAX_QP_LINE - (number == last):
                cut = _cut(line, MAX_QP_LINE - 1)
                out.append(line[:cut])
                out.append(SOFT_BREAK)
                line = _protect_start(line[cut:])
        out.append(line)
        out.append(SOFT_BREAK if number == last else CRLF)
    return "".join(out)


def _protect_start(line: str) -> str:
    if line[0] == ".":
        return "=2E" + line[1:]
    return "=46" + line[1:] if line.startswith("From ") else line


def _cut(line: str, at: int) -> int:
    """Where to break `line` at or before `at`: not inside an escape, nor between the escapes of one character."""
    if line[at - 1] == "=":
        at -= 1
    elif line[at - 2] == "=":
        at -= 2
    while line[at] == "=" and line[at + 1] in "89AB":  # a UTF-8 continuation octet
        at -= 3
    return at


def decode_qp(fragment: str) -> str:
    """The text that fragments encode, line ends as LF."""
    return binascii.a2b_qp(fragment.encode("ascii")).decode("utf-8", "replace").replace("\r\n", "\n")


def base64_lines(content: bytes) -> str:
    """`content` as base64 in lines of 76, each with its CRLF."""
    return "".join(
        binascii.b2a_base64(content[start : start + 57], newline=False).decode("ascii") + CRLF
        for start in range(0, len(content), 57)
    )


# --- field values ---------------------------------------------------------------------------------------------------

# C0, DEL, C1, line and paragraph separators: a blank in a field. Lone surrogates and noncharacters: U+FFFD.
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029]+")
_BROKEN = re.compile("[\ud800-\udfff\ufffe\uffff]")
_PLAIN_FIELD = re.compile(r"[ -~]*\Z").match
_ATOMS = re.compile(r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+(?: [A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+)*\Z").match
_WORD_SAFE = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789!*+-/")  # RFC 2047 §5 (3)
_Q = [chr(o) if o in _WORD_SAFE else "_" if o == 32 else f"={o:02X}" for o in range(256)]


def clean_text(text: str) -> str:
    """`text` as one line: control characters and line breaks become blanks, halves of characters U+FFFD."""
    if not _PLAIN_FIELD(text):
        text = _BROKEN.sub("\ufffd", _CONTROL.sub(" ", text))
    return text.strip()


def encoded_words(text: str, *, lead: int = 0) -> str:
    """`text` as RFC 2047 words of at most 75 characters, each of whole characters, separated by a blank.

    Q where most of the text stays readable, B where that would be a quarter longer. `lead` characters stand on the line
    before the first word.
    """
    octets = text.encode()
    quoted = "".join(map(_Q.__getitem__, octets))
    is_base64 = 4 * len(quoted) > 5 * ((len(octets) + 2) // 3 * 4)
    head = "=?utf-8?b?" if is_base64 else "=?utf-8?q?"
    full = MAX_WORD - len(head) - 2
    room = max(full - max(0, lead - 1), 16)  # the first line; folding cannot help before the first word
    if not is_base64 and 0 < len(quoted) <= room:
        return f"{head}{quoted}?="
    words: list[str] = []
    piece: list[bytes] = []
    used = 0
    for character in text:
        encoded = character.encode()
        width = len(encoded) if is_base64 else sum(len(_Q[octet]) for octet in encoded)
        if used + width > (room // 4 * 3 if is_base64 else room):
            words.append(_word(head, b"".join(piece), is_base64))
            piece, used, room = [], 0, full
        piece.append(encoded)
        used += width
    if piece:
        words.append(_word(head, b"".join(piece), is_base64))
    return " ".join(words)


def _word(head: str, octets: bytes, is_base64: bool) -> str:
    body = (
        binascii.b2a_base64(octets, newline=False).decode("ascii")
        if is_base64
        else "".join(map(_Q.__getitem__, octets))
    )
    return f"{head}{body}?="


def _must_encode(text: str) -> bool:
    # "=?" in plain text would be read as an encoded word by the recipient's program; a word over 900 cannot be folded.
    return not text.isascii() or "=?" in text or (len(text) > 900 and any(len(word) > 900 for word in text.split(" ")))


def unstructured(text: str, *, lead: int = 9) -> str:
    """The value of Subject and its like: as it is where it is ASCII, else encoded as a whole.

    As a whole, because white space between two encoded words is dropped by readers, and between word and plain text
    kept: mixing them is where others lose or double blanks.
    """
    if len(text) <= 70 and text.isascii() and text.isprintable() and "=?" not in text and text == text.strip(" "):
        return text
    text = clean_text(text)
    return encoded_words(text, lead=lead) if _must_encode(text) else text


def phrase(name: str, *, lead: int = 6) -> str:
    """A display name: atoms as they are, specials quoted, anything else as encoded words (RFC 5322 §3.2.5)."""
    # The common case, words of letters and digits, without a regular expression.
    if len(name) <= 60 and name.isascii() and name.replace(" ", "").isalnum() and name == " ".join(name.split()):
        return name
    name = clean_text(name)
    if not name:
        return ""
    if _must_encode(name) or len(name) > 200:
        return encoded_words(name, lead=lead)
    if _ATOMS(name):
        return name
    return '"' + name.replace("\\", "\\\\").replace('"', '\\"') + '"'


def mailbox_value(address: str, name: str | None = None) -> str:
    """`Name <address>`, or the bare address. The address is never encoded; it must have passed `parse_mailbox`."""
    words = phrase(name) if name else ""
    return f"{words} <{address}>" if words else address


def structured(value: str) -> str:
    """A structured value, checked: printable ASCII or an error, for it must not be encoded (RFC 2047 §5)."""
    value = value.strip()
    if not _PLAIN_FIELD(value):
        raise HeaderError(f"{value[:60]!r} has characters that a structured field cannot hold")
    return value


_FIELD_NAME = re.compile(r"[!-9;-~]{1,76}\Z")


def check_field_name(name: str) -> str:
    """`name`, or HeaderError: printable ASCII without colon (RFC 5322 §2.2)."""
    if not _FIELD_NAME.match(name):
        raise HeaderError(f"{name!r} is not a header field name")
    return name


def fold(name: str, value: str) -> str:
    """The field "Name: value" with its CRLF, folded before existing blanks.

    Lines of at most 76 where blanks allow; raises HeaderError where a line would pass 998. A line never holds blanks
    alone.
    """
    line = f"{name}: {value}"
    if len(line) <= SOFT_LINE or (len(line) <= HARD_LINE and " " not in value):
        return line + CRLF
    lines: list[str] = []
    start, floor = 0, len(name) + 2  # never between the name and the value: some readers see an empty field
    while len(line) - start > SOFT_LINE:
        at = line.rfind(" ", floor, start + SOFT_LINE + 1)
        while at > 0 and line[at - 1] == " ":  # break before the run, so that no line ends in a blank
            at -= 1
        if at < floor:
            at = line.find(" ", max(floor, start + SOFT_LINE))
            if at < 0:
                break
            if not line[at:].strip():
                break
        lines.append(line[start:at])
        start, floor = at, at + 1
        while floor < len(line) and line[floor] == " ":
            floor += 1
    lines.append(line[start:])
    if any(len(one) > HARD_LINE for one in lines):
        raise HeaderError(f"{name}: a line would be longer than {HARD_LINE}")
    return "\r\n".join(lines) + CRLF


_TOKEN = re.compile(r"[A-Za-z0-9!#$&+.^_`{|}~-]+\Z")
_ATTRIBUTE_SAFE = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789!#$&+-.^_`{|}~")


def parameter(name: str, value: str) -> list[str]:
    """A MIME parameter as `name=value`, quoted, or in RFC 2231 pieces: each a piece for its own line."""
    value = clean_text(value)
    if value.isascii() and len(name) + len(value) < 70 and "  " not in value:
        if _TOKEN.match(value):
            return [f"{name}={value}"]
        quoted = value.replace("\\", "\\\\").replace('"', '\\"')
        return [f'{name}="{quoted}"']
    pieces = [""]
    for character in value:
        encoded = "".join(chr(o) if o in _ATTRIBUTE_SAFE else f"%{o:02X}" for o in character.encode())
        if len(pieces[-1]) + len(encoded) > 50:
            pieces.append("")
        pieces[-1] += encoded
    if len(pieces) == 1:
        return [f"{name}*=utf-8''{pieces[0]}"]
    return [
        f"{name}*{number}*={'' if number else chr(117) + 'tf-8' + chr(39) * 2}{piece}"
        for number, piece in enumerate(pieces)
    ]


def parameters(value: str, *more: Iterable[str]) -> str:
    """A structured value with its parameters, one a line where they do not fit together."""
    pieces = [piece for group in more for piece in group]
    return ";\r\n ".join([value, *pieces]) if sum(map(len, pieces)) + len(value) > 55 else "; ".join([value, *pieces])


_DAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")


def date_value(now_s: int) -> str:
    """RFC 5322 §3.3 date-time in UTC, of whole seconds since 1970; English whatever the locale."""
    at = datetime.fromtimestamp(now_s, UTC)
    day, month = _DAYS[at.weekday()], _MONTHS[at.month - 1]
    return f"{day}, {at.day:02d} {month} {at.year} {at.hour:02d}:{at.minute:02d}:{at.second:02d} +0000"
