"""A fast SMTP server that takes mail and delivers nothing: for demonstrations, tests and rehearsals.

Every address is accepted unless its local part steers (`451-twice@`, `drop-after-dot@` ...: the table is in
`engine.rehearse.steering`). Each message whose content was taken is in the record (`engine.rehearse.record`) before its
250 leaves, so that duplicates and losses can be counted whatever becomes of the sender.

    sink = Sink(SinkSettings(record=Path("sink.tsv")))
    host, port = await sink.start()
    ...
    await sink.stop()

or, as a process of its own that ends with its parent:

    with run_sink_in_process(SinkSettings(record=path)) as running:
        running.host, running.port, running.counts()
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import re
import ssl
from collections.abc import Coroutine
from pathlib import Path
from typing import Literal

import msgspec

from engine.clock import Clock, SystemClock
from engine.errors import EngineError, Exit
from engine.rehearse.certificate import make_certificate
from engine.rehearse.conversation import Conversation, Offer
from engine.rehearse.record import Recorder
from engine.rehearse.steering import Act, Kind, Phase, Steering, reply_for
from formats.reply import Reply

_MESSAGE_ID = re.compile(rb"^message-id:[ \t]*(?:\r\n[ \t]+)?([^\r\n]*)", re.IGNORECASE | re.MULTILINE)


class SinkCannotListen(EngineError):
    """The sink cannot listen on {host} port {port}: {reason}."""

    exit_code = Exit.TRY_AGAIN
    hint = "Choose another port with --port, or end what listens there."


class SinkSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How the sink behaves; the defaults are a willing modern server."""

    hostname: str = "sink.test"
    pipelining: bool = True
    chunking: bool = True
    size_limit: int | None = 35_882_577  # what one large provider announces; 0: no limit, None: SIZE is not offered
    eight_bit_mime: bool = True
    smtputf8: bool = True
    enhanced_status_codes: bool = True
    tls: Literal["off", "starttls", "implicit"] = "off"
    require_tls: bool = False
    certificate: Path | None = None  # PEM; made by the sink when left out
    key: Path | None = None
    users: dict[str, str] = {}  # name -> password; AUTH is offered when there are any
    auth: tuple[str, ...] = ("PLAIN", "LOGIN", "CRAM-MD5")
    require_auth: bool = False
    max_connections: int | None = None  # more are greeted with 421
    messages_per_connection: int | None = None  # then MAIL is answered 421
    delay_s: float = 0.0  # every reply leaves so much later: the round trip of a real path
    greeting: str = ""  # in place of 220, e.g. "554 5.7.1 go away"
    steered: bool = True  # whether local parts steer
    # A share of messages, drawn from `seed`: 451 to the end of the content; taken, but the connection drops.
    defer_share: float = 0.0
    lose_share: float = 0.0
    seed: int = 0
    record: Path | None = None
    folder: Path | None = None  # each content as a file SESSION.NUMBER.eml


class Counts(msgspec.Struct):
    """What the sink has seen."""

    connections: int = 0
    open: int = 0
    peak_open: int = 0
    refused_connections: int = 0
    transactions: int = 0
    messages: int = 0  # contents taken
    recipients: int = 0  # their recipients
    bytes: int = 0
    lost: int = 0  # contents taken whose 250 never left
    acts: dict[str, int] = {}  # what was done in place of the usual, by kind and phase
    violations: dict[str, int] = {}


class Sink:
    """A server on one event loop."""

    def __init__(self, settings: SinkSettings | None = None, *, clock: Clock | None = None) -> None:
        self.settings = settings = settings or SinkSettings()
        self.clock = clock or SystemClock()
        self.counts = Counts()
        self.users = dict(settings.users)
        self.tls_context: ssl.SSLContext | None = None
        self.certificate: Path | None = settings.certificate
        if settings.tls != "off":
            self.certificate, self.tls_context = _tls_context(settings)
        self.offer = Offer(
            hostname=settings.hostname,
            pipelining=settings.pipelining,
            chunking=settings.chunking,
            size_limit=settings.size_limit,
            eight_bit_mime=settings.eight_bit_mime,
            smtputf8=settings.smtputf8,
            enhanced_status_codes=settings.enhanced_status_codes,
            starttls=settings.tls == "starttls",
            require_tls=settings.require_tls,
            auth=settings.auth if settings.users else (),
            require_auth=settings.require_auth,
            delay_s=settings.delay_s,
        )
        self._steering = Steering()
        self._rng = random.Random(settings.seed)
        self._recorder: Recorder | None = None
        self._server: asyncio.Server | None = None
        self._conversations: set[Conversation] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> tuple[str, int]:
        """Listen; returns the address, with the port that port 0 became. Raises SinkCannotListen."""
        loop = asyncio.get_running_loop()
        if self.settings.record is not None:
            self._recorder = Recorder(self.settings.record)
        if self.settings.folder is not None:
            self.settings.folder.mkdir(parents=True, exist_ok=True)
        context = self.tls_context if self.settings.tls == "implicit" else None
        try:
            self._server = await loop.create_server(self._new, host, port, ssl=context, backlog=1024)
        except OSError as problem:
            raise SinkCannotListen(host=host, port=port, reason=problem.strerror or problem) from None
        bound = self._server.sockets[0].getsockname()
        return bound[0], bound[1]

    async def stop(self) -> None:
        """Close every connection and the record."""
        if self._server is not None:
            self._server.close()
            for conversation in list(self._conversations):
                conversation.cut()
            await self._server.wait_closed()
            while self._conversations:
                await asyncio.sleep(0.001)
            self._server = None
        if self._recorder is not None:
            self._recorder.close()
            self._recorder = None

    def _new(self) -> Conversation:
        self.counts.connections += 1
        return Conversation(self, self.counts.connections)

    # -- what a conversation asks ----------------------------------------------------------------------------------

    def opened(self, conversation: Conversation) -> Act | Reply:
        """The greeting."""
        self._conversations.add(conversation)
        counts = self.counts
        counts.open += 1
        counts.peak_open = max(counts.peak_open, counts.open)
        limit = self.settings.max_connections
        if limit is not None and counts.open > limit:
            counts.refused_connections += 1
            return Reply(421, "4.7.0 Too many concurrent connections from your address")
        if self.settings.greeting:
            code, _, text = self.settings.greeting.partition(" ")
            return Reply(int(code), text)
        return Reply(220, f"{self.offer.hostname} ESMTP sink")

    def closed(self, conversation: Conversation) -> None:
        """The connection is gone."""
        if conversation in self._conversations:
            self._conversations.discard(conversation)
            self.counts.open -= 1

    def mail(self, conversation: Conversation, sender: bytes) -> Act | None:
        """A transaction begins."""
        self.counts.transactions += 1
        limit = self.settings.messages_per_connection
        if limit is not None and conversation.messages >= limit:
            too_many = Reply(421, "4.7.0 Too many messages on this connection, closing")
            return self._noted(Act(Kind.REPLY, Phase.MAIL, too_many))
        if self.settings.steered and b"-mail@" in sender:
            return self._noted(self._steering.sender(sender.decode("utf-8", "replace")))
        return None

    def rcpt(self, conversation: Conversation, recipient: bytes) -> Act | None:
        """A recipient is named."""
        if not self.settings.steered:
            return None
        return self._noted(self._steering.attempt(recipient.decode("utf-8", "replace"), self.clock.monotonic()))

    def judge(self, conversation: Conversation, content: bytes) -> Act | None:
        """The content has ended."""
        settings = self.settings
        if settings.defer_share and self._rng.random() < settings.defer_share:
            return self._noted(Act(Kind.REPLY, Phase.DOT, reply_for(451)))
        if settings.lose_share and self._rng.random() < settings.lose_share:
            return self._noted(Act(Kind.DROP, Phase.AFTER_DOT))
        return None

    def take(self, conversation: Conversation, content: bytes, answer: bytes) -> None:
        """Record the content."""
        counts = self.counts
        counts.messages += 1
        counts.recipients += len(conversation.recipients)
        counts.bytes += len(content)
        if answer != b"250":
            counts.lost += 1
        if self._recorder is not None:
            self._recorder.add(
                time_us=self.clock.wall_us(),
                session=conversation.number,
                sender=conversation.sender or b"",
                recipients=conversation.recipients,
                message_id=message_id(content),
                digest=hashlib.sha256(content).hexdigest(),
                size=len(content),
                answer=answer,
            )
        if self.settings.folder is not None:
            name = f"{conversation.number:06d}.{conversation.messages:06d}.eml"
            (self.settings.folder / name).write_bytes(content)

    def flush(self) -> None:
        """Replies leave now."""
        if self._recorder is not None:
            self._recorder.flush()

    def spawn(self, work: Coroutine[None, None, None]) -> None:
        """Run it beside the conversation."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def violated(self, what: str) -> None:
        """The sender broke a rule."""
        self.counts.violations[what] = self.counts.violations.get(what, 0) + 1

    def _noted(self, act: Act | None) -> Act | None:
        if act is not None:
            name = f"{act.reply.code if act.reply else act.kind}-{act.phase}"
            self.counts.acts[name] = self.counts.acts.get(name, 0) + 1
        return act


def message_id(content: bytes) -> bytes:
    """The value of the content's Message-ID field; empty where it has none."""
    end = content.find(b"\r\n\r\n")
    at = content.find(b"\nMessage-ID: ", 0, end if end >= 0 else len(content))
    if at >= 0:
        value = content[at + 13 : content.find(b"\r\n", at + 13)].strip()
        if value:
            return value
    found = _MESSAGE_ID.search(content if end < 0 else content[: end + 2])
    return found[1].strip() if found else b""


def _tls_context(settings: SinkSettings) -> tuple[Path, ssl.SSLContext]:
    certificate, key = settings.certificate, settings.key
    if certificate is None:
        certificate, key = make_certificate(settings.hostname)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    return certificate, context
