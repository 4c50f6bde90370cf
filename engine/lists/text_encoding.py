"""Which encoding a text file is in, told from its bytes and said by name; never the machine's own.

A byte-order mark decides. Without one the whole file is valid UTF-8 or it is not (Latin text in another encoding
practically never is); zeros in every other byte are UTF-16; the rest is taken for cp1252, and said so.
"""

from __future__ import annotations

import codecs
from typing import BinaryIO

_CHUNK = 4 << 20


def detect_encoding(file: BinaryIO) -> tuple[str, int]:
    """The name of the encoding of `file`, and how many quotes it holds; the file is read to its end."""
    start = file.read(_CHUNK)
    quotes = start.count(b'"')
    chunk = start
    decoder = codecs.getincrementaldecoder("utf-8")()
    name = _by_its_start(start)
    while chunk:
        if name is None:
            try:
                decoder.decode(chunk)
            except UnicodeDecodeError:
                name = "cp1252"
        chunk = file.read(_CHUNK)
        quotes += chunk.count(b'"')
    if name is None:
        try:
            decoder.decode(b"", final=True)
        except UnicodeDecodeError:
            name = "cp1252"
    return name or "utf-8", quotes


def _by_its_start(start: bytes) -> str | None:
    if start.startswith(codecs.BOM_UTF8):
        return "utf-8-sig"
    if start.startswith(codecs.BOM_UTF16_LE):
        return "utf-16-le"
    if start.startswith(codecs.BOM_UTF16_BE):
        return "utf-16-be"
    # A tail of zeros is what a full disk leaves of an export, and zeros in both places are no text in any encoding.
    head = start[:4096].rstrip(b"\0")
    even, odd = head[0::2], head[1::2]
    if len(head) >= 7 and odd.count(0) > 0.4 * len(odd) and even.count(0) < 0.1 * len(even):
        return "utf-16-le"
    if len(head) >= 7 and even.count(0) > 0.4 * len(even) and odd.count(0) < 0.1 * len(odd):
        return "utf-16-be"
    return None


class Utf8Stream:
    """A byte stream in UTF-8 of a file in another encoding, without its byte-order mark.

    pyarrow transcodes too, but gives up at the five bytes that cp1252 leaves undefined; here they become U+FFFD.
    """

    def __init__(self, file: BinaryIO, encoding: str) -> None:
        self._file = file
        self._decoder = codecs.getincrementaldecoder(encoding)(errors="replace")
        self._ready = b""
        self._at_start = True
        self.closed = False

    def read(self, size: int = -1) -> bytes:
        while not self._ready or size < 0:
            raw = self._file.read(_CHUNK)
            text = self._decoder.decode(raw, final=not raw)
            if self._at_start and text:
                text, self._at_start = text.removeprefix("\ufeff"), False
            self._ready += text.encode()
            if not raw:
                break
        if size < 0:
            size = len(self._ready)
        given, self._ready = self._ready[:size], self._ready[size:]
        return given

    def close(self) -> None:
        self._file.close()
        self.closed = True

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return False

    def seekable(self) -> bool:
        return False
