"""The server's side of one SMTP connection: bytes in, replies out, content to the sink.

Knows SMTP (RFC 5321), PIPELINING (RFC 2920), CHUNKING (RFC 3030), STARTTLS (RFC 3207) and AUTH (RFC 4954). What it
takes and what it refuses is its `Host`'s business. Replies of commands that came in one read leave in one write, after
the host has recorded what they accept.

Strict where a sender's mistake would show at a real server: a bare LF ends a command but never the content, a
transaction whose sole recipient was refused stays open (the next MAIL is 503 without RSET, as with Postfix), and
content that arrives before 354 was sent counts as a violation.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import hmac
import re
import socket
import struct
from collections import deque
from enum import Enum, auto
from typing import TYPE_CHECKING, Protocol

import msgspec

from engine.rehearse.steering import Act, Kind, Phase
from formats.reply import Reply

if TYPE_CHECKING:
    import ssl

LINE_LIMIT = 12_288  # RFC 4954 §4.4: base64 of authentication may take that much; other lines are shorter
BUFFER_BYTES = 262_144
_PATH = re.compile(rb"\s*<?((?:\"(?:[^\"\\\r\n]|\\.)*\"|[^\s<>\"])*)>?\s*(.*)\Z", re.DOTALL)
_NO_RECIPIENT = Reply(554, "5.5.1 No valid recipients")


class Mode(Enum):
    """What the next bytes are."""

    COMMAND = auto()
    CONTENT = auto()  # behind 354
    CHUNK = auto()  # behind BDAT
    ANSWER = auto()  # to an AUTH challenge
    OVER = auto()


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """What EHLO offers and enforces."""

    hostname: str
    pipelining: bool
    chunking: bool
    size_limit: int | None
    eight_bit_mime: bool
    smtputf8: bool
    enhanced_status_codes: bool
    starttls: bool
    require_tls: bool
    auth: tuple[str, ...]
    require_auth: bool
    delay_s: float


class Host(Protocol):
    """What a conversation asks of the sink it belongs to."""

    offer: Offer
    users: dict[str, str]
    tls_context: ssl.SSLContext | None

    def opened(self, conversation: Conversation) -> Act | Reply:
        """The greeting, or what happens in its place."""

    def closed(self, conversation: Conversation) -> None:
        """The connection is gone."""

    def mail(self, conversation: Conversation, sender: bytes) -> Act | None:
        """A transaction begins; None: 250."""

    def rcpt(self, conversation: Conversation, recipient: bytes) -> Act | None:
        """A recipient is named; None: 250. Acts of later phases are kept until then."""

    def judge(self, conversation: Conversation, content: bytes) -> Act | None:
        """The content has ended and no recipient asked for anything else; None: 250."""

    def take(self, conversation: Conversation, content: bytes, answer: bytes) -> None:
        """Record the content for the recipients of the transaction."""

    def flush(self) -> None:
        """What was taken must survive the sender: replies leave now."""

    def violated(self, what: str) -> None:
        """The sender broke a rule of SMTP."""


class Conversation(asyncio.BufferedProtocol):
    """One connection."""

    def __init__(self, host: Host, number: int) -> None:
        self.host = host
        self.offer = host.offer
        self.number = number
        self.peer = ""
        self.secure = False
        self.user: str | None = None
        self.greeted = False
        self.extended = False
        self.messages = 0  # taken on this connection
        self.sender: bytes | None = None
        self.recipients: list[bytes] = []
        self._acts: list[Act] = []
        self._mode = Mode.COMMAND
        self._transport: asyncio.Transport | None = None
        self._loop = asyncio.get_running_loop()
        self._buffer = bytearray(BUFFER_BYTES)
        self._view = memoryview(self._buffer)
        self._start = self._end = 0
        self._out: list[bytes] = []
        self._content = bytearray()
        self._content_size = 0
        self._chunk_left = 0
        self._chunk_is_last = False
        self._chunks_refused = False
        self._in_chunks = False
        self._held = False  # a reply is being waited with; nothing behind it may be read
        self._delayed: deque[tuple[bytes, str]] = deque()
        self._challenge: tuple[str, bytes] = ("", b"")
        self._trickling = False

    # -- the connection ------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        if self._transport is not None:  # the same connection, now under TLS
            self._transport = transport
            return
        self._transport = transport
        peer = transport.get_extra_info("peername")
        self.peer = peer[0] if peer else ""
        self.secure = transport.get_extra_info("sslcontext") is not None
        greeting = self.host.opened(self)
        if isinstance(greeting, Reply):
            self._say(greeting)
            if greeting.code >= 400:
                self._hang_up()
        else:
            self._carry_out(greeting, Reply(220, f"{self.offer.hostname} ESMTP sink"))
            if greeting.reply is not None and greeting.reply.code >= 400:
                self._hang_up()
        self._send()

    def connection_lost(self, exc: Exception | None) -> None:
        self._mode = Mode.OVER
        self._delayed.clear()
        self.host.closed(self)

    def cut(self) -> None:
        """Close at once."""
        self._mode = Mode.OVER
        if self._transport is not None:
            self._transport.abort()

    def eof_received(self) -> bool:
        return False

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._view[self._end :]

    def buffer_updated(self, nbytes: int) -> None:
        self._end += nbytes
        self._run()

    def _run(self) -> None:
        while not self._held and self._mode is not Mode.OVER:
            mode = self._mode
            if mode is Mode.COMMAND or mode is Mode.ANSWER:
                line_end = self._buffer.find(b"\n", self._start, self._end)
                if line_end < 0:
                    if self._end - self._start > LINE_LIMIT:
                        self._say(Reply(500, "5.5.6 Line too long"))
                        self._hang_up()
                    break
                line = bytes(self._view[self._start : line_end]).rstrip(b"\r")
                self._start = line_end + 1
                if mode is Mode.COMMAND:
                    self._command(line)
                else:
                    self._answer(line)
            elif mode is Mode.CONTENT:
                if not self._read_content():
                    break
            elif not self._read_chunk():
                break
        if self._start == self._end:
            self._start = self._end = 0
        elif self._start and self._end > BUFFER_BYTES // 2:
            rest = bytes(self._view[self._start : self._end])
            self._buffer[: len(rest)] = rest
            self._start, self._end = 0, len(rest)
        if self._end == BUFFER_BYTES and self._held and self._transport is not None:
            self._transport.pause_reading()
        self._send()

    # -- replies -------------------------------------------------------------------------------------------------

    def _say(self, reply: Reply) -> None:
        text = reply.text
        if not self.offer.enhanced_status_codes and reply.enhanced:
            text = text[len(reply.enhanced) :].lstrip()
        self._out.append(f"{reply.code} {text}\r\n".encode("utf-8", "surrogateescape"))

    def _send(self, then: str = "") -> None:
        """Record, then write what is to be said; `then` is "", "close" or "reset"."""
        if not self._out and not then:
            return
        self.host.flush()
        block = b"".join(self._out)
        self._out.clear()
        if self.offer.delay_s > 0:
            self._delayed.append((block, then))
            self._loop.call_later(self.offer.delay_s, self._send_delayed)
        else:
            self._write(block, then)

    def _send_delayed(self) -> None:
        if self._delayed:
            self._write(*self._delayed.popleft())

    def _write(self, block: bytes, then: str) -> None:
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        if block:
            if self._trickling:
                self._trickle(block)
            else:
                transport.write(block)
        if then == "close":
            transport.close()
        elif then == "reset":
            handle = transport.get_extra_info("socket")
            if handle is not None:
                handle.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            transport.abort()

    def _trickle(self, block: bytes) -> None:
        transport = self._transport
        assert transport is not None
        self._held = True

        def one(at: int) -> None:
            if transport.is_closing():
                return
            if at < len(block):
                transport.write(block[at : at + 1])
                self._loop.call_soon(one, at + 1)
            else:
                self._trickling = False
                self._resume()

        one(0)

    def _hang_up(self, how: str = "close") -> None:
        self._mode = Mode.OVER
        self._send(how)

    def _hold(self, seconds: float) -> None:
        """Nothing is read or said for so long; what was said before leaves now."""
        self._send()
        self._held = True
        self._loop.call_later(seconds, self._resume)

    def _resume(self) -> None:
        self._held = False
        if self._transport is not None and self._mode is not Mode.OVER:
            self._transport.resume_reading()
            self._run()

    def _carry_out(self, act: Act, usual: Reply) -> None:
        """Do what was asked in place of the usual reply."""
        match act.kind:
            case Kind.REPLY:
                assert act.reply is not None
                if act.seconds:
                    self._after(act.seconds, act.reply)
                    return
                self._say(act.reply)
                if act.reply.code == 421:
                    self._hang_up()
            case Kind.SLOW:
                self._after(act.seconds, usual)
            case Kind.NEVER:
                self._send()
                self._held = True
            case Kind.DROP:
                self._hang_up("close")
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
                self._trickling = True
                self._say(usual)
                self._send()

    def _after(self, seconds: float, reply: Reply) -> None:
        self._send()
        self._held = True

        def late() -> None:
            self._say(reply)
            if reply.code == 421:
                self._hang_up()
            else:
                self._resume()

        self._loop.call_later(seconds, late)

    # -- commands ------------------------------------------------------------------------------------------------

    def _command(self, line: bytes) -> None:
        verb = line[:4].upper()
        if not self.offer.pipelining and self._start < self._end and verb != b"BDAT":
            self.host.violated("pipelining that was not offered")
        if verb == b"MAIL":
            self._mail(line)
        elif verb == b"RCPT":
            self._rcpt(line)
        elif verb == b"DATA":
            self._data()
        elif verb == b"BDAT":
            self._bdat(line)
        elif verb in (b"EHLO", b"HELO"):
            self._ehlo(line, extended=verb == b"EHLO")
        elif verb == b"RSET":
            self._reset()
            self._say(Reply(250, "2.0.0 Ok"))
        elif verb == b"NOOP":
            self._say(Reply(250, "2.0.0 Ok"))
        elif verb == b"QUIT":
            self._say(Reply(221, "2.0.0 Bye"))
            self._hang_up()
        elif line[:8].upper() == b"STARTTLS":
            self._starttls()
        elif verb == b"AUTH":
            self._auth(line)
        elif verb == b"VRFY":
            self._say(Reply(252, "2.0.0 Send some mail, it may arrive"))
        else:
            self._say(Reply(500, "5.5.2 Command not recognised"))

    def _reset(self) -> None:
        self.sender = None
        self.recipients = []
        self._acts = []
        self._content.clear()
        self._content_size = 0
        self._chunks_refused = self._in_chunks = False

    def _ehlo(self, line: bytes, *, extended: bool) -> None:
        if not line[4:].strip():
            self._say(Reply(501, "5.5.4 Say your name"))
            return
        self._reset()
        self.greeted, self.extended = True, extended
        offer = self.offer
        words = [offer.hostname]
        if extended:
            if offer.pipelining:
                words.append("PIPELINING")
            if offer.size_limit is not None:
                words.append(f"SIZE {offer.size_limit}")
            if offer.starttls and not self.secure:
                words.append("STARTTLS")
            if offer.auth and self.user is None and (self.secure or not offer.require_tls):
                words.append("AUTH " + " ".join(offer.auth))
            if offer.enhanced_status_codes:
                words.append("ENHANCEDSTATUSCODES")
            if offer.eight_bit_mime:
                words.append("8BITMIME")
            if offer.smtputf8:
                words.append("SMTPUTF8")
            if offer.chunking:
                words.append("CHUNKING")
        lines = [f"250-{word}\r\n" for word in words[:-1]] + [f"250 {words[-1]}\r\n"]
        self._out.append("".join(lines).encode())

    def _mail(self, line: bytes) -> None:
        offer = self.offer
        found = _PATH.match(line[10:]) if line[:10].upper() == b"MAIL FROM:" else None
        if found is None:
            self._say(Reply(501, "5.5.4 Syntax: MAIL FROM:<address>"))
        elif not self.greeted:
            self._say(Reply(503, "5.5.1 Say EHLO first"))
        elif offer.require_tls and not self.secure:
            self._say(Reply(530, "5.7.0 Must issue a STARTTLS command first"))
        elif offer.require_auth and self.user is None:
            self._say(Reply(530, "5.7.0 Authentication required"))
        elif self.sender is not None:
            self.host.violated("nested MAIL")
            self._say(Reply(503, "5.5.1 Nested MAIL command"))
        elif refusal := self._refuse_parameters(found[2]):
            self._say(refusal)
        else:
            act = self.host.mail(self, found[1])
            if act is None or act.kind in (Kind.SLOW, Kind.TRICKLE):
                self.sender = found[1]
            usual = Reply(250, "2.1.0 Ok")
            if act is None:
                self._say(usual)
            else:
                self._carry_out(act, usual)

    def _refuse_parameters(self, parameters: bytes) -> Reply | None:
        offer = self.offer
        for parameter in parameters.split():
            name, _, value = parameter.upper().partition(b"=")
            if name == b"SIZE" and offer.size_limit and value.isdigit() and int(value) > offer.size_limit:
                return Reply(552, "5.3.4 Message size exceeds fixed limit")
            known = (
                (name == b"SIZE" and offer.size_limit is not None and value.isdigit())
                or (name == b"BODY" and offer.eight_bit_mime and value in (b"7BIT", b"8BITMIME"))
                or (name == b"SMTPUTF8" and offer.smtputf8 and not value)
                or (name == b"AUTH" and bool(offer.auth))
            )
            if not known:
                return Reply(555, f"5.5.4 Unsupported option {parameter.decode('ascii', 'replace')}")
        return None

    def _rcpt(self, line: bytes) -> None:
        found = _PATH.match(line[8:]) if line[:8].upper() == b"RCPT TO:" else None
        if found is None or b"@" not in found[1]:
            self._say(Reply(501, "5.1.3 Syntax: RCPT TO:<address>"))
        elif self.sender is None:
            self._say(Reply(503, "5.5.1 Need MAIL command"))
        elif found[2]:
            self._say(Reply(555, "5.5.4 Unsupported option"))
        else:
            act = self.host.rcpt(self, found[1])
            usual = Reply(250, "2.1.5 Ok")
            if act is None:
                self.recipients.append(found[1])
                self._say(usual)
            elif act.phase is not Phase.RCPT:
                self.recipients.append(found[1])
                self._acts.append(act)
                self._say(usual)
            else:
                if act.kind in (Kind.SLOW, Kind.TRICKLE):
                    self.recipients.append(found[1])
                self._carry_out(act, usual)

    def _act(self, *phases: Phase) -> Act | None:
        return next((act for act in self._acts if act.phase in phases), None)

    # -- content -------------------------------------------------------------------------------------------------

    def _data(self) -> None:
        usual = Reply(354, "End data with <CR><LF>.<CR><LF>")
        if self.sender is None:
            self._say(Reply(503, "5.5.1 Need MAIL command"))
        elif self._in_chunks:
            self._say(Reply(503, "5.5.1 DATA after BDAT"))
        elif not self.recipients:
            # RFC 2920 §3.1 lets a server say 354 here and refuse after the dot; we refuse at once, and as with
            # Postfix the transaction stays open until RSET.
            self._say(_NO_RECIPIENT)
        else:
            act = self._act(Phase.DATA)
            if act is not None and act.kind not in (Kind.SLOW, Kind.TRICKLE):
                self._reset()
                self._carry_out(act, usual)
                return
            if self._start < self._end:
                self.host.violated("content before 354")
            self._mode = Mode.CONTENT
            if act is not None:
                self._carry_out(act, usual)
            else:
                self._say(usual)

    def _before_dot(self) -> bool:
        """Whether the content was cut off by an act."""
        act = self._act(Phase.BEFORE_DOT) if self._acts else None
        if act is None:
            return False
        if act.kind in (Kind.SLOW, Kind.TRICKLE):
            self._acts.remove(act)
            self._hold(act.seconds)
            return True
        self._carry_out(act, Reply(451, "4.3.0 Error while reading"))
        if self._mode is not Mode.OVER and not self._held:
            self._hang_up()
        return True

    def _read_content(self) -> bool:
        """Take what is there of a message; False when more must come."""
        start, end = self._start, self._end
        if start == end or self._before_dot():
            return False
        if not self._content:
            if self._buffer.startswith(b".\r\n", start, end):
                self._start = start + 3
                self._end_of_content(b"")
                return True
            found = self._buffer.find(b"\r\n.\r\n", start, end)
            if found >= 0:
                content = bytes(self._view[start : found + 2])
                self._start = found + 5
                self._end_of_content(self._undot(content))
                return True
        held_before = len(self._content)
        self._content += self._view[start:end]
        self._start = end
        found = self._content.find(b"\r\n.\r\n", max(0, held_before - 4))
        if found < 0:
            if held_before == 0 or not self._content.startswith(b".\r\n"):
                limit = self.offer.size_limit
                if limit and len(self._content) > limit:
                    self._content_size += len(self._content) - 4
                    del self._content[:-4]
                return False
            found = -2
        content = bytes(self._content[: max(0, found + 2)])
        behind = len(self._content) - (found + 5)
        self._start = end - behind
        self._content.clear()
        self._end_of_content(self._undot(content))
        return True

    @staticmethod
    def _undot(content: bytes) -> bytes:
        if content.startswith(b"."):
            content = content[1:]
        return content.replace(b"\r\n..", b"\r\n.") if b"\r\n.." in content else content

    def _bdat(self, line: bytes) -> None:
        words = line[4:].split()
        if not self.offer.chunking:
            self._say(Reply(500, "5.5.2 Command not recognised"))
            return
        if not words or not words[0].isdigit() or (len(words) > 1 and words[1].upper() != b"LAST") or len(words) > 2:
            # The chunk's size is unknown, so nothing behind it can be understood.
            self._say(Reply(501, "5.5.4 Syntax: BDAT size [LAST]"))
            self._hang_up()
            return
        self._chunk_left = int(words[0])
        self._chunk_is_last = len(words) > 1
        self._in_chunks = True
        self._mode = Mode.CHUNK
        if self._chunk_left == 0:
            self._end_of_chunk()

    def _read_chunk(self) -> bool:
        if self._start == self._end or self._before_dot():
            return False
        size = min(self._chunk_left, self._end - self._start)
        self._content_size += size
        limit = self.offer.size_limit
        if not self._chunks_refused and self.recipients and not (limit and self._content_size > limit):
            self._content += self._view[self._start : self._start + size]
        self._start += size
        self._chunk_left -= size
        if self._chunk_left:
            return False
        self._end_of_chunk()
        return True

    def _end_of_chunk(self) -> None:
        self._mode = Mode.COMMAND
        last = self._chunk_is_last
        if self.sender is None:
            self._in_chunks = False
            self._say(Reply(503, "5.5.1 Need MAIL command"))
        elif not self.recipients or self._chunks_refused:
            self._say(_NO_RECIPIENT if not self.recipients else Reply(503, "5.5.1 A chunk was refused before"))
            self._chunks_refused = True
            if last:
                self._reset()
        elif act := self._act(Phase.DATA):
            self._chunks_refused = True
            if last:
                self._reset()
            self._carry_out(act, Reply(250, "2.0.0 Ok"))
        elif last:
            content, size = bytes(self._content), self._content_size
            self._content_size = size - len(content)
            self._end_of_content(content)
        else:
            self._say(Reply(250, "2.0.0 Ok, chunk taken"))

    def _end_of_content(self, content: bytes) -> None:
        self._mode = Mode.COMMAND
        limit = self.offer.size_limit
        if limit and len(content) + self._content_size > limit:
            self._reset()
            self._say(Reply(552, "5.3.4 Message size exceeds fixed limit"))
            return
        act = self._act(Phase.DOT, Phase.AFTER_DOT) if self._acts else None
        if act is None:
            act = self.host.judge(self, content)
        usual = Reply(250, f"2.0.0 Ok: {self.number}.{self.messages + 1}")
        if act is None:
            self.messages += 1
            self.host.take(self, content, b"250")
            self._out.append(b"250 2.0.0 Ok: %d.%d\r\n" % (self.number, self.messages))
            self._reset()
            return
        after = act.phase is Phase.AFTER_DOT
        harmless = act.kind in (Kind.SLOW, Kind.TRICKLE)
        polite = after and act.kind in (Kind.REPLY, Kind.BINARY, Kind.LONG)  # the 250 first
        if after or harmless:
            self.messages += 1
            self.host.take(self, content, b"250" if harmless or polite else b"lost")
        self._reset()
        if polite:
            self._say(usual)
        if after:
            self.host.flush()
        self._carry_out(act, usual)

    # -- TLS and AUTH --------------------------------------------------------------------------------------------

    def _starttls(self) -> None:
        context = self.host.tls_context
        if not self.offer.starttls or context is None or self.secure:
            self._say(Reply(502, "5.5.1 STARTTLS not offered"))
            return
        # What came behind STARTTLS in the clear must not be read as if it had come inside (RFC 3207 §5).
        if self._start < self._end:
            self.host.violated("commands behind STARTTLS in the clear")
        self._start = self._end = 0
        self._say(Reply(220, "2.0.0 Ready to start TLS"))
        self._send()
        self._held = True
        task = self._loop.create_task(self._upgrade(context))
        task.add_done_callback(lambda done: done.cancelled() or done.exception())

    async def _upgrade(self, context: ssl.SSLContext) -> None:
        transport = self._transport
        assert transport is not None
        await asyncio.sleep(self.offer.delay_s)
        try:
            upgraded = await self._loop.start_tls(transport, self, context, server_side=True)
        except (OSError, ConnectionError):
            transport.abort()
            return
        if upgraded is None:
            return
        self._transport = upgraded
        self.secure = True
        self.greeted = False
        self.user = None
        self._reset()
        self._held = False
        self._run()

    def _auth(self, line: bytes) -> None:
        words = line.split()
        if not self.offer.auth or (self.offer.require_tls and not self.secure):
            self._say(Reply(502, "5.5.1 AUTH not offered"))
            return
        mechanism = words[1].decode("ascii", "replace").upper() if len(words) > 1 else ""
        if self.user is not None or self.sender is not None:
            self._say(Reply(503, "5.5.1 AUTH not allowed now"))
        elif mechanism not in self.offer.auth:
            self._say(Reply(504, "5.5.4 Unknown mechanism"))
        elif mechanism in ("PLAIN", "LOGIN") and len(words) > 2:
            self._challenge = (mechanism, b"")
            self._answer(words[2])
        else:
            asked = {"PLAIN": b"", "LOGIN": b"Username:"}.get(mechanism, b"<%d.sink@sink.test>" % self.number)
            self._challenge = (mechanism, asked if mechanism == "CRAM-MD5" else b"")
            self._ask(asked)

    def _ask(self, text: bytes) -> None:
        self._mode = Mode.ANSWER
        self._out.append(b"334 " + base64.b64encode(text) + b"\r\n")

    def _answer(self, line: bytes) -> None:
        self._mode = Mode.COMMAND
        mechanism, before = self._challenge
        if line == b"*":
            self._say(Reply(501, "5.7.0 Authentication cancelled"))
            return
        try:
            raw = base64.b64decode(line, validate=True)
        except binascii.Error:
            self._say(Reply(501, "5.5.2 Not base64"))
            return
        name = password = b""
        if mechanism == "PLAIN":
            _, name, password = [*raw.split(b"\0"), b"", b"", b""][:3]
        elif mechanism == "LOGIN" and not before:
            self._challenge = (mechanism, raw)
            self._ask(b"Password:")
            return
        elif mechanism == "LOGIN":
            name, password = before, raw
        else:
            name, _, proof = raw.rpartition(b" ")
            known = self.host.users.get(name.decode("utf-8", "replace"), "")
            expected = hmac.new(known.encode(), before, hashlib.md5).hexdigest()
            if known and hmac.compare_digest(expected.encode(), proof):
                password = known.encode()
        user = name.decode("utf-8", "replace")
        if user and self.host.users.get(user) == password.decode("utf-8", "replace"):
            self.user = user
            self._say(Reply(235, "2.7.0 Authentication successful"))
        else:
            self._say(Reply(535, "5.7.8 Authentication credentials invalid"))
