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
import re
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Protocol

import msgspec

from engine.rehearse.connection import Connection, Mode
from engine.rehearse.content import ContentReader
from engine.rehearse.login import Login
from engine.rehearse.steering import Act, Kind, Phase
from formats.reply import Reply

if TYPE_CHECKING:
    import ssl

_PATH = re.compile(rb"\s*<?((?:\"(?:[^\"\\\r\n]|\\.)*\"|[^\s<>\"])*)>?\s*(.*)\Z", re.DOTALL)
_NO_RECIPIENT = Reply(554, "5.5.1 No valid recipients")


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

    def spawn(self, work: Coroutine[None, None, None]) -> None:
        """Run it beside the conversation."""

    def violated(self, what: str) -> None:
        """The sender broke a rule of SMTP."""


class Conversation(Connection):
    """One connection that speaks SMTP."""

    def __init__(self, host: Host, number: int) -> None:
        super().__init__(delay_s=host.offer.delay_s, enhanced_status_codes=host.offer.enhanced_status_codes)
        self.host = host
        self.offer = host.offer
        self.number = number
        self.peer = ""
        self.secure = False
        self.user: str | None = None
        self.greeted = False
        self.messages = 0  # taken on this connection
        self.sender: bytes | None = None
        self.recipients: list[bytes] = []
        self._acts: list[Act] = []  # what recipients asked for in later phases
        self._reader = ContentReader(self.offer.size_limit)
        self._chunk_left = 0
        self._chunk_is_last = False
        self._in_chunks = False
        self._chunks_refused = False
        self._login: Login | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
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
        self._send()

    def connection_lost(self, exc: Exception | None) -> None:
        self._mode = Mode.OVER
        self._delayed.clear()
        self.host.closed(self)

    def _before_writing(self) -> None:
        self.host.flush()

    # -- commands ------------------------------------------------------------------------------------------------

    def _line(self, line: bytes) -> None:
        if self._mode is Mode.COMMAND:
            self._command(line)
        else:
            assert self._login is not None
            self._follow_login(self._login.answer(line))

    def _command(self, line: bytes) -> None:
        verb = line[:4].upper()
        if not self.offer.pipelining and self._start < self._end and verb != b"BDAT":
            self.host.violated("pipelining that was not offered")
        match verb:
            case b"MAIL":
                self._mail(line)
            case b"RCPT":
                self._rcpt(line)
            case b"DATA":
                self._data()
            case b"BDAT" if self.offer.chunking:
                self._bdat(line)
            case b"EHLO" | b"HELO":
                self._ehlo(line, extended=verb == b"EHLO")
            case b"RSET":
                self._reset()
                self._say(Reply(250, "2.0.0 Ok"))
            case b"NOOP":
                self._say(Reply(250, "2.0.0 Ok"))
            case b"QUIT":
                self._say(Reply(221, "2.0.0 Bye"))
                self._hang_up()
            case b"AUTH" if self.offer.auth:
                self._auth(line)
            case b"STAR" if self.offer.starttls:
                self._starttls()
            case b"VRFY":
                self._say(Reply(252, "2.0.0 Send some mail, it may arrive"))
            case _:
                self._say(Reply(500, "5.5.2 Command not recognised"))

    def _reset(self) -> None:
        self.sender = None
        self.recipients = []
        if self._acts:
            self._acts = []
        self._reader = ContentReader(self.offer.size_limit)
        self._chunks_refused = self._in_chunks = False

    def _ehlo(self, line: bytes, *, extended: bool) -> None:
        if not line[4:].strip():
            self._say(Reply(501, "5.5.4 Say your name"))
            return
        self._reset()
        self.greeted = True
        offer = self.offer
        words = [offer.hostname]
        if extended:
            auth = bool(offer.auth) and self.user is None and (self.secure or not offer.require_tls)
            offered = {
                "PIPELINING": offer.pipelining,
                f"SIZE {offer.size_limit}": offer.size_limit is not None,
                "STARTTLS": offer.starttls and not self.secure,
                "AUTH " + " ".join(offer.auth): auth,
                "ENHANCEDSTATUSCODES": offer.enhanced_status_codes,
                "8BITMIME": offer.eight_bit_mime,
                "SMTPUTF8": offer.smtputf8,
                "CHUNKING": offer.chunking,
            }
            words += [word for word, is_offered in offered.items() if is_offered]
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
        elif found[2] and (refusal := self._refuse_parameters(found[2])):
            self._say(refusal)
        else:
            act = self.host.mail(self, found[1])
            if act is None:
                self.sender = found[1]
                self._out.append(b"250 2.1.0 Ok\r\n" if offer.enhanced_status_codes else b"250 Ok\r\n")
                return
            if act.is_harmless:
                self.sender = found[1]
            self._carry_out(act, Reply(250, "2.1.0 Ok"))

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
            now = act is not None and act.phase is Phase.RCPT
            if act is None or not now or act.is_harmless:
                self.recipients.append(found[1])
            if act is None or not now:
                self._out.append(b"250 2.1.5 Ok\r\n" if self.offer.enhanced_status_codes else b"250 Ok\r\n")
                if act is not None:
                    self._acts.append(act)
            else:
                self._carry_out(act, Reply(250, "2.1.5 Ok"))

    def _take_act(self, *phases: Phase) -> Act | None:
        for act in self._acts:
            if act.phase in phases:
                self._acts.remove(act)
                return act
        return None

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
            if self._start < self._end:
                self.host.violated("content before 354")
            act = self._take_act(Phase.DATA) if self._acts else None
            if act is None:
                self._say(usual)
            elif not act.is_harmless:
                self._reset()
                self._carry_out(act, usual)
                return
            self._mode = Mode.CONTENT
            if act is not None:
                self._carry_out(act, usual)

    def _cut_short(self) -> bool:
        """Whether an act comes between 354 and the dot."""
        act = self._take_act(Phase.BEFORE_DOT) if self._acts else None
        if act is None:
            return False
        if act.is_harmless:
            self._after(act.seconds, None)
        else:
            self._carry_out(act, Reply(451, "4.3.0 Error while reading"))
            if self._mode is not Mode.DEAF:
                self._hang_up()
        return True

    def _read_content(self) -> None:
        if self._acts and self._cut_short():
            return
        self._start, content = self._reader.read_dotted(self._buffer, self._start, self._end)
        if content is not None:
            self._end_of_content(content)

    def _bdat(self, line: bytes) -> None:
        words = line[4:].split()
        if not words or not words[0].isdigit() or len(words) > 2 or (len(words) == 2 and words[1].upper() != b"LAST"):
            # The chunk's size is unknown, so nothing behind it can be understood.
            self._say(Reply(501, "5.5.4 Syntax: BDAT size [LAST]"))
            self._hang_up()
            return
        self._chunk_left = int(words[0])
        self._chunk_is_last = len(words) == 2
        self._in_chunks = True
        self._mode = Mode.CHUNK
        if self._chunk_left == 0:
            self._end_of_chunk()

    def _read_chunk(self) -> None:
        if self._acts and self._cut_short():
            return
        size = min(self._chunk_left, self._end - self._start)
        if self.recipients and not self._chunks_refused:
            self._reader.add_chunk(self._view[self._start : self._start + size])
        self._start += size
        self._chunk_left -= size
        if self._chunk_left == 0:
            self._end_of_chunk()

    def _end_of_chunk(self) -> None:
        self._mode = Mode.COMMAND
        last = self._chunk_is_last
        act = self._take_act(Phase.DATA) if self._acts else None
        if self.sender is None:
            self._in_chunks = False
            self._say(Reply(503, "5.5.1 Need MAIL command"))
        elif not self.recipients or self._chunks_refused:
            self._chunks_refused = True
            self._say(_NO_RECIPIENT if not self.recipients else Reply(503, "5.5.1 A chunk was refused before"))
            if last:
                self._reset()
        elif act is not None and not act.is_harmless:
            self._chunks_refused = True
            if last:
                self._reset()
            self._carry_out(act, Reply(250, "2.0.0 Ok"))
        elif last:
            self._end_of_content(self._reader.chunks(), act)
        elif act is not None:
            self._carry_out(act, Reply(250, "2.0.0 Ok, chunk taken"))
        else:
            self._say(Reply(250, "2.0.0 Ok, chunk taken"))

    def _end_of_content(self, content: bytes, act: Act | None = None) -> None:
        self._mode = Mode.COMMAND
        if self._reader.is_too_long:
            self._reset()
            self._say(Reply(552, "5.3.4 Message size exceeds fixed limit"))
            return
        if act is None and self._acts:
            act = self._take_act(Phase.DOT, Phase.AFTER_DOT)
        if act is None:
            act = self.host.judge(self, content)
        # After the dot, what is a reply comes behind the 250 that the content has earned.
        after = act is not None and act.phase is Phase.AFTER_DOT
        has_reply = act is None or act.is_harmless or act.kind in (Kind.REPLY, Kind.BINARY, Kind.LONG)
        if act is None or after or act.is_harmless:
            self.messages += 1
            self.host.take(self, content, b"250" if has_reply else b"lost")
        self._reset()
        usual = Reply(250, f"2.0.0 Ok: {self.number}.{self.messages}")
        if act is None or (after and has_reply and not act.is_harmless):
            self._say(usual)
        if act is not None:
            self.host.flush()
            self._carry_out(act, usual)

    # -- TLS and AUTH --------------------------------------------------------------------------------------------

    def _starttls(self) -> None:
        context, transport = self.host.tls_context, self._transport
        if context is None or transport is None or self.secure:
            self._say(Reply(502, "5.5.1 STARTTLS not offered"))
            return
        # What came behind STARTTLS in the clear must not be read as if it had come inside (RFC 3207 §5).
        if self._start < self._end:
            self.host.violated("commands behind STARTTLS in the clear")
        self._start = self._end = 0
        self._held = True
        transport.pause_reading()  # the client's hello is for the TLS layer
        self._say(Reply(220, "2.0.0 Ready to start TLS"))
        self._send()
        self.host.spawn(self._upgrade(transport, context))

    async def _upgrade(self, transport: asyncio.Transport, context: ssl.SSLContext) -> None:
        try:
            upgraded = await self._loop.start_tls(transport, self, context, server_side=True)
        except OSError:  # ssl.SSLError is one: the client did not like our certificate, or left
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
        self._run()  # the client's EHLO may have come with the end of its handshake, before we were told of it

    def _auth(self, line: bytes) -> None:
        words = line.split()
        mechanism = words[1].decode("ascii", "replace").upper() if len(words) > 1 else ""
        if self.offer.require_tls and not self.secure:
            self._say(Reply(530, "5.7.0 Must issue a STARTTLS command first"))
        elif self.user is not None or self.sender is not None:
            self._say(Reply(503, "5.5.1 AUTH not allowed now"))
        elif mechanism not in self.offer.auth:
            self._say(Reply(504, "5.5.4 Unknown mechanism"))
        else:
            self._login = Login(self.host.users, nonce=b"<%d.%d@sink.test>" % (self.number, id(self)))
            self._follow_login(self._login.begin(mechanism, words[2] if len(words) > 2 else None))

    def _follow_login(self, reply: Reply) -> None:
        assert self._login is not None
        self._mode = Mode.ANSWER if reply.code == 334 else Mode.COMMAND
        if self._login.user is not None:
            self.user = self._login.user
        self._say(reply)
