"""The body's structure: parts, boundaries, attachments. What is the same for all rows is encoded once.

    mixed( alternative( text, related( html, inline images ) ), attachments )

with every level left out that would hold one part. Boundaries begin with `=_`, which neither quoted-printable nor
base64 can contain (RFC 2045 §6.7), so no text can end a part.
"""

from __future__ import annotations

import mimetypes
import re
from collections import OrderedDict
from collections.abc import Sequence
from enum import Enum
from pathlib import Path

import msgspec

from engine.compose.sandbox import FolderLoader, OutsideFolder
from engine.compose.template import TemplateError
from engine.config import Attachment, InlineImage
from formats.message import HeaderError, base64_lines, parameter, parameters

_MEDIA_TYPE = re.compile(
    r"[a-z0-9!#$&^_.+-]+/[a-z0-9!#$&^_.+-]+(?:; *[a-z0-9-]+=[A-Za-z0-9!#$&^_.+-]+)*\Z", re.IGNORECASE
)
_CONTENT_ID = re.compile(r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~.@-]{1,200}\Z")
_CACHE_BYTES = 32 << 20


class Hole(Enum):
    """A place in the body that each row fills."""

    TEXT = "text"
    HTML = "html"
    ATTACHMENTS = "attachments"


Piece = str | Hole


class Part(msgspec.Struct, frozen=True):
    """A part: the value of its Content-Type, its other fields, and its body in pieces."""

    content_type: str
    fields: tuple[tuple[str, str], ...]
    pieces: tuple[Piece, ...]

    @property
    def head(self) -> str:
        """The part's header, with the empty line."""
        lines = [f"Content-Type: {self.content_type}\r\n", *(f"{name}: {value}\r\n" for name, value in self.fields)]
        return "".join(lines) + "\r\n"


def text_part(hole: Hole) -> Part:
    """The text or HTML part."""
    subtype = "plain" if hole is Hole.TEXT else "html"
    return Part(f"text/{subtype}; charset=utf-8", (("Content-Transfer-Encoding", "quoted-printable"),), (hole,))


def multipart(
    subtype: str, boundary: str, parts: Sequence[Part], *, has_row_parts: bool = False, more: str = ""
) -> Part:
    """Parts between boundaries; with `has_row_parts` a hole for those of the row behind them."""
    pieces: list[Piece] = []
    for part in parts:
        pieces += [f"--{boundary}\r\n{part.head}", *part.pieces, "\r\n"]
    if has_row_parts:
        pieces.append(Hole.ATTACHMENTS)
    pieces.append(f"--{boundary}--\r\n")
    return Part(f'multipart/{subtype};{more}\r\n boundary="{boundary}"', (), tuple(_joined(pieces)))


def _joined(pieces: Sequence[Piece]) -> list[Piece]:
    out: list[Piece] = []
    for piece in pieces:
        if isinstance(piece, str) and out and isinstance(out[-1], str):
            out[-1] += piece
        else:
            out.append(piece)
    return out


def file_part(content: bytes, *, filename: str, content_type: str | None, cid: str | None = None) -> Part:
    """A file in base64: an attachment, or with `cid` an inline image."""
    kind = content_type or mimetypes.guess_type(filename)[0] or "application/octet-stream"
    if not _MEDIA_TYPE.match(kind):
        raise HeaderError(f"{kind!r} is no media type")
    fields = [("Content-Transfer-Encoding", "base64")]
    if cid is not None:
        if not _CONTENT_ID.match(cid):
            raise HeaderError(f"{cid!r} is no content id")
        fields.append(("Content-ID", f"<{cid}>"))
    disposition = "attachment" if cid is None else "inline"
    fields.append(("Content-Disposition", parameters(disposition, parameter("filename", filename))))
    return Part(kind, tuple(fields), (base64_lines(content),))


class Files:
    """Images and attachments of the campaign folder: fixed ones, and those that rows name."""

    def __init__(self, loader: FolderLoader) -> None:
        self._loader = loader
        self.read: dict[str, bytes] = {}  # for the fingerprint
        self._cache: OrderedDict[tuple[str, str | None, str | None], str] = OrderedDict()
        self._cached = 0

    def fixed(self, path: str, where: str) -> bytes:
        """The content of a file that the settings name; raises TemplateError."""
        try:
            content = self._loader.path(path).read_bytes()
        except OutsideFolder as problem:
            raise TemplateError(place=where, problem=problem.message) from None
        except OSError as problem:
            raise TemplateError(place=where, problem=f"{path!r}: {problem.strerror}") from None
        self.read[path] = content
        return content

    def inline(self, image: InlineImage) -> Part:
        """The part of an inline image."""
        where = "campaign.toml [[message.inline]]"
        try:
            return file_part(
                self.fixed(image.path, where), filename=Path(image.path).name, content_type=None, cid=image.cid
            )
        except HeaderError as problem:
            raise TemplateError(place=where, problem=str(problem)) from None

    def attached(self, attachment: Attachment) -> Part:
        """The part of a fixed attachment."""
        where = "campaign.toml [[message.attachments]]"
        assert attachment.path
        try:
            return file_part(
                self.fixed(attachment.path, where),
                filename=attachment.filename or Path(attachment.path).name,
                content_type=attachment.content_type,
            )
        except HeaderError as problem:
            raise TemplateError(place=where, problem=str(problem)) from None

    def of_row(self, path: str, attachment: Attachment) -> str:
        """Header and body of an attachment that a row names; raises OSError, OutsideFolder, HeaderError.

        Recently used files stay encoded, up to 32 MB.
        """
        key = (path, attachment.filename, attachment.content_type)
        if key in self._cache:
            self._cache.move_to_end(key)
            return self._cache[key]
        content = self._loader.path(path).read_bytes()
        filename = attachment.filename or Path(path).name
        part = file_part(content, filename=filename, content_type=attachment.content_type)
        text = part.head + "".join(piece for piece in part.pieces if isinstance(piece, str))
        self._cache[key] = text
        self._cached += len(text)
        while self._cached > _CACHE_BYTES:
            self._cached -= len(self._cache.popitem(last=False)[1])
        return text
