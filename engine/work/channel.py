"""A framed, ordered, non-blocking channel between supervisor and worker over a socket pair.

A frame is its length (uint32, little-endian) and the msgpack of one message. Writing never blocks: what the peer does
not read yet waits in memory, and both sides send little. The end of the peer is the end of the stream.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from typing import Generic, TypeVar

import msgspec

Incoming = TypeVar("Incoming")

_MOST_BYTES = 64 * 1024 * 1024  # an Assign of a batch of a million waiting rows is 30 MB; anything larger is a bug


class Channel(Generic[Incoming]):
    """One end. `Incoming` is the union of messages that the peer sends."""

    def __init__(self, end: socket.socket, incoming: object) -> None:
        self._socket = end
        self._decoder: msgspec.msgpack.Decoder[Incoming] = msgspec.msgpack.Decoder(incoming)
        self._encoder = msgspec.msgpack.Encoder()
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def open(self) -> None:
        """Attach to the running loop."""
        self._socket.setblocking(False)
        self._reader, self._writer = await asyncio.open_connection(sock=self._socket)

    def send(self, message: msgspec.Struct) -> None:
        """Queue one message; silently nothing when the peer is gone: its end shows in `messages`."""
        if self._writer is None or self._writer.is_closing():
            return
        raw = self._encoder.encode(message)
        self._writer.write(len(raw).to_bytes(4, "little") + raw)

    async def messages(self) -> AsyncIterator[Incoming]:
        """The peer's messages, until it is gone."""
        assert self._reader is not None
        try:
            while True:
                size = int.from_bytes(await self._reader.readexactly(4), "little")
                if size > _MOST_BYTES:
                    return
                yield self._decoder.decode(await self._reader.readexactly(size))
        except (asyncio.IncompleteReadError, ConnectionError, OSError):
            return

    async def flush(self) -> None:
        """Wait until what was sent has left, or the peer is gone."""
        if self._writer is not None:
            try:
                await self._writer.drain()
            except (ConnectionError, OSError):
                return

    def close(self) -> None:
        """Let go of the channel."""
        if self._writer is not None:
            self._writer.close()
