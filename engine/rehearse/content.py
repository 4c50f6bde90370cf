"""Reads a message's content off the wire, sans I/O: behind 354 up to the final dot, or chunk by chunk.

RFC 5321 §4.5.2 (dots; only CRLF "." CRLF ends the content, a bare LF never does), RFC 3030 (chunks). Content over the
size limit is read to its end and thrown away.
"""

from __future__ import annotations

_END = b"\r\n.\r\n"


class ContentReader:
    """The content of one transaction."""

    def __init__(self, limit: int | None) -> None:
        self._limit = limit or None
        self._held = bytearray()
        self._thrown_away = 0  # octets

    @property
    def is_too_long(self) -> bool:
        return self._thrown_away > 0

    def read_dotted(self, buffer: bytearray, start: int, end: int) -> tuple[int, bytes | None]:
        """Reads `buffer[start:end]`; returns where the next command begins and the content without its dots, or `end`
        and None while the final dot has not come."""
        held = self._held
        if not held:
            if buffer.startswith(b".\r\n", start, end):
                return start + 3, b""
            found = buffer.find(_END, start, end)
            if found >= 0:
                return found + len(_END), self._whole(bytes(buffer[start : found + 2]))
        before = len(held)
        held += memoryview(buffer)[start:end]
        if before < 3 and not self._thrown_away and held.startswith(b".\r\n"):
            found = -2  # the content is empty
        else:
            found = held.find(_END, max(0, before - 4))
        if found == -1:
            if self._limit and len(held) + self._thrown_away > self._limit:
                self._thrown_away += len(held) - 4
                del held[:-4]
            return end, None
        behind = len(held) - (found + len(_END))
        content = self._whole(bytes(held[: max(0, found + 2)]))
        held.clear()
        return end - behind, content

    def _whole(self, dotted: bytes) -> bytes:
        if self._limit and len(dotted) > self._limit:
            self._thrown_away += len(dotted)
        return undot(dotted)

    def add_chunk(self, octets: memoryview) -> None:
        """A part of a chunk."""
        if self._limit and (self._thrown_away or len(self._held) + len(octets) > self._limit):
            self._thrown_away += len(self._held) + len(octets)
            self._held.clear()
        else:
            self._held += octets

    def chunks(self) -> bytes:
        """The chunks together."""
        return bytes(self._held)


def undot(content: bytes) -> bytes:
    """The content without the dots that the sender doubled."""
    if content.startswith(b"."):
        content = content[1:]
    return content.replace(b"\r\n..", b"\r\n.") if b"\r\n.." in content else content
