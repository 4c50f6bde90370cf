"""One connection of a server: bytes to lines and content, replies to writes, and acts in place of replies.

Knows no SMTP command; `engine.rehearse.conversation` does. Replies of what came in one read leave in one write, after
`_before_writing` has had its chance to record what they accept.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections import deque
from enum import Enum, auto

from engine.rehearse.steering import Act, Kind
from formats.reply import Reply

LINE_LIMIT = 12_288  # RFC 4954 §4.4: base64 of authentication may take that much; other lines are shorter
BUFFER_BYTES = 65_536


class Mode(Enum):
    """What the next bytes are."""

    COMMAND = auto()
    CONTENT = auto()  # behind 354
    CHUNK = auto()  # behind BDAT
    ANSWER = auto()  # to an AUTH challenge
    DEAF = auto()  # whatever comes is thrown away
    OVER = auto()


class Connection(asyncio.BufferedProtocol):
    """Reads into one buffer; writes at the end of each read. asyncio's plain Protocol costs 2.4 times as much."""

    def __init__(self, *, delay_s: float, enhanced_status_codes: bool) -> None:
        """Every reply leaves `delay_s` later, in order: the round trip of a real path."""
        self._delay_s = delay_s
        self._enhanced = enhanced_status_codes
        self._mode = Mode.COMMAND
        self._held = False  # a reply is being waited with; nothing behind it may be read
        self._transport: asyncio.Transport | None = None
        self._loop = asyncio.get_running_loop()
        self._buffer = bytearray(BUFFER_BYTES)
        self._view = memoryview(self._buffer)
        self._start = self._end = 0
        self._out: list[bytes] = []
        self._delayed: deque[tuple[bytes, str]] = deque()
        self._trickling = False

    # -- what a conversation adds ---------------------------------------------------------------------------------

    def _line(self, line: bytes) -> None:
        """A command, or in Mode.ANSWER an answer."""
        raise NotImplementedError

    def _read_content(self) -> None:
        """Take content from the buffer (Mode.CONTENT)."""
        raise NotImplementedError

    def _read_chunk(self) -> None:
        """Take a chunk from the buffer (Mode.CHUNK)."""
        raise NotImplementedError

    def _before_writing(self) -> None:
        """Replies leave now."""
        raise NotImplementedError

    # -- bytes in ------------------------------------------------------------------------------------------------

    def eof_received(self) -> bool:
        return False

    def cut(self) -> None:
        """Close at once."""
        self._mode = Mode.OVER
        if self._transport is not None:
            self._transport.abort()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._view[self._end :]

    def buffer_updated(self, nbytes: int) -> None:
        self._end += nbytes
        self._run()

    def _run(self) -> None:
        while not self._held and self._start < self._end:
            match self._mode:
                case Mode.COMMAND | Mode.ANSWER:
                    if not self._read_line():
                        break
                case Mode.CONTENT:
                    self._read_content()
                case Mode.CHUNK:
                    self._read_chunk()
                case Mode.DEAF | Mode.OVER:
                    self._start = self._end
        if self._start == self._end:
            self._start = self._end = 0
        elif self._end == BUFFER_BYTES:
            rest = self._end - self._start
            self._buffer[:rest] = self._buffer[self._start : self._end]
            self._start, self._end = 0, rest
            if rest == BUFFER_BYTES and self._transport is not None:
                self._transport.pause_reading()  # until `_resume`
        self._send()

    def _read_line(self) -> bool:
        end = self._buffer.find(b"\n", self._start, self._end)
        if end < 0:
            if self._end - self._start > LINE_LIMIT:
                self._say(Reply(500, "5.5.6 Line too long"))
                self._hang_up()
            return False
        line = bytes(self._view[self._start : end]).rstrip(b"\r")
        self._start = end + 1
        self._line(line)
        return True

    # -- replies -------------------------------------------------------------------------------------------------

    def _say(self, reply: Reply) -> None:
        text = reply.text
        if not self._enhanced and (enhanced := reply.enhanced):
            text = text[len(enhanced) :].lstrip()
        self._out.append(f"{reply.code} {text}\r\n".encode("utf-8", "surrogateescape"))

    def _send(self, then: str = "") -> None:
        """Record, then write what is to be said; `then` is "", "close" or "reset"."""
        if not self._out and not then:
            return
        self._before_writing()
        block = b"".join(self._out)
        self._out.clear()
        if self._delay_s > 0:
            self._delayed.append((block, then))
            self._loop.call_later(self._delay_s, self._send_delayed)
        else:
            self._write(block, then)

    def _send_delayed(self) -> None:
        if self._delayed:
            self._write(*self._delayed.popleft())

    def _write(self, block: bytes, then: str) -> None:
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        if block and self._trickling:
            self._trickle(transport, block, 0)
        elif block:
            transport.write(block)
        if then == "close":
            transport.close()
        elif then == "reset":
            handle = transport.get_extra_info("socket")
            if handle is not None:
                handle.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            transport.abort()

    def _trickle(self, transport: asyncio.Transport, block: bytes, at: int) -> None:
        if at < len(block) and not transport.is_closing():
            transport.write(block[at : at + 1])
            self._loop.call_soon(self._trickle, transport, block, at + 1)
        else:
            self._trickling = False
            self._resume()

    def _hang_up(self, how: str = "close") -> None:
        self._mode = Mode.OVER
        self._send(how)

    def _resume(self) -> None:
        self._held = False
        if self._transport is not None and self._mode is not Mode.OVER:
            self._transport.resume_reading()
            self._run()

    def _after(self, seconds: float, reply: Reply | None, closes: bool = False) -> None:
        """What was said leaves now; after so long the reply, and only then is anything more read."""
        self._send()
        self._held = True
        self._loop.call_later(seconds, self._late, reply, closes)

    def _late(self, reply: Reply | None, closes: bool) -> None:
        if self._mode is Mode.OVER:
            return
        if reply is not None:
            self._say(reply)
        if closes:
            self._hang_up()
        else:
            self._send()
            self._resume()

    def _carry_out(self, act: Act, usual: Reply) -> None:
        """Do what was asked in place of the usual reply."""
        match act.kind:
            case Kind.REPLY:
                assert act.reply is not None
                closes = act.closes or act.reply.code == 421
                if act.seconds:
                    self._after(act.seconds, act.reply, closes)
                    return
                self._say(act.reply)
                if closes:
                    self._hang_up()
            case Kind.SLOW:
                self._after(act.seconds, usual)
            case Kind.NEVER:
                self._send()
                self._mode = Mode.DEAF
            case Kind.DROP:
                self._hang_up()
            case Kind.RESET:
                self._hang_up("reset")
            case Kind.GARBAGE:
                self._out.append(b"this is no reply\r\n")
            case Kind.BINARY:
                self._out.append(b"550 5.1.1 Empf\xe4nger unbekannt \xff\xfe\r\n")
            case Kind.LONG:
                lines = [b"550-5.1.1 line %d of a long refusal\r\n" % n for n in range(119)]
                self._out.append(b"".join(lines) + b"550 5.1.1 end of a long refusal\r\n")
            case Kind.TRICKLE:
                self._send()
                self._trickling = self._held = True
                self._say(usual)
                self._send()
