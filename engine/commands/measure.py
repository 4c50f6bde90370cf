"""What one process of this machine composes, signs and sends: real rows, the real composer, real SMTP to a sink here.

Processor time is counted, not the clock, so that what else the machine does is no part of it; the sink runs in a
process of its own. Nothing leaves the machine, nothing is recorded but the result: `measured.json` in the campaign.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Iterator

import msgspec

from engine.campaign import Campaign, write_whole
from engine.clock import SystemClock
from engine.compose.render import Composer, RowProblem, build_composer
from engine.config import Settings
from engine.errors import EngineError, Exit
from engine.rehearse.running import run_sink_in_process
from engine.rehearse.sink import SinkSettings
from engine.rows import RowReader, first_texts, open_parquet
from engine.smtp.destination import ConnectionLimits, Destination, relay_destination
from engine.smtp.dialogue import Event, Outgoing, Stage
from engine.smtp.handshake import Ended
from engine.smtp.pool import Pool
from engine.smtp.session import Session
from formats.address import AddressError, parse_mailboxes
from formats.plan import Plan
from formats.reply import Reply

MEASURED_FILE = "measured.json"
_CONNECTIONS = 8
_AT_ONCE = 500
_PATIENCE_S = 120.0


class NothingToMeasure(EngineError):
    """The planned list has not a single row that renders."""

    exit_code = Exit.LIST
    hint = "`engine send --dry-run` names the rows and what is wrong with them."


class NotMeasured(EngineError):
    """The messages did not get through to the sink on this machine: {problem}."""

    exit_code = Exit.TRY_AGAIN


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """Messages a second of one core, and their size."""

    host: str
    at_us: int
    messages: int
    message_bytes: int
    composing_per_s: float  # rendered and signed
    per_process: float  # and sent
    signatures: int  # a message carries so many
    tls: bool


def kept_measure(campaign: Campaign, settings: Settings) -> Measured | None:
    """What was measured last on this machine with as many signatures as are set now, if anything."""
    try:
        found = msgspec.json.decode((campaign.folder / MEASURED_FILE).read_bytes(), type=Measured)
    except (OSError, msgspec.MsgspecError):
        return None
    return found if found.host == socket.gethostname() and found.signatures == _signatures(settings) else None


def _signatures(settings: Settings) -> int:
    return min(len(settings.dkim), 1) + sum(table.also for table in settings.dkim[1:])


def sample_bytes(composer: Composer, plan: Plan, rows: int = 20) -> int | None:
    """The mean size of the first messages of the list, None where no row renders."""
    sizes = [len(message.content) for message in _messages(composer, plan, rows)]
    return sum(sizes) // len(sizes) if sizes else None


def measure(campaign: Campaign, settings: Settings, plan: Plan, messages: int) -> Measured:
    """Compose, sign and send so many; the sink asks for TLS wherever the campaign's connections would use it."""
    composer = build_composer(settings, campaign.folder, open_parquet(plan.files[0].path).schema_arrow)
    warm = list(_messages(composer, plan, 20))
    if not warm:
        raise NothingToMeasure
    started = time.process_time()
    made = list(_messages(composer, plan, min(messages, _AT_ONCE)))
    composing = len(made) / max(time.process_time() - started, 1e-6)
    tls = settings.delivery.mode == "direct" or settings.delivery.tls != "off"
    with run_sink_in_process(SinkSettings(tls="starttls" if tls else "off", steered=False)) as sink:
        delivery = msgspec.structs.replace(
            settings.delivery,
            relay=sink.url,
            tls="required" if tls else "off",
            tls_ca_file=None,
            username=None,
            password_env=None,
            password_file=None,
        )
        limits = msgspec.structs.replace(ConnectionLimits.of(delivery), messages_per_connection=messages + 1)
        destination = relay_destination(delivery, {}, folder=campaign.folder)
        sent, size, took = asyncio.run(_run(destination, limits, composer, plan, messages))
    found = Measured(
        host=socket.gethostname(),
        at_us=SystemClock().wall_us(),
        messages=sent,
        message_bytes=size // sent,
        composing_per_s=round(composing, 1),
        per_process=round(sent / max(took, 1e-6), 1),
        signatures=_signatures(settings),
        tls=tls,
    )
    write_whole(campaign.folder / MEASURED_FILE, msgspec.json.encode(found))
    return found


def _messages(composer: Composer, plan: Plan, wanted: int) -> Iterator[Outgoing]:
    """So many messages of the list's first rows, over and over where the list is short."""
    reader = RowReader(plan, [plan.address_column, *composer.columns])
    now_us = SystemClock().wall_us()
    made = 0
    while made < wanted:
        before = made
        for part in reader.spans(0, min(plan.rows, 20 * wanted)):
            found = reader.read(part, 0, min(part.rows, 4 * wanted))
            for place, (row, mailbox) in enumerate(zip(found, parse_mailboxes(first_texts(found)), strict=True)):
                if isinstance(mailbox, AddressError):
                    continue
                try:
                    message = composer.compose(part.first_row + place, mailbox, row[1:], now_us)
                except RowProblem:
                    continue
                yield Outgoing(made, message.return_path, message.recipient, message.content, message.smtputf8)
                made += 1
                if made == wanted:
                    return
        if made == before:
            return


class _Slots:
    """So many connections."""

    def __init__(self, free: int) -> None:
        self._free = free

    def acquire(self) -> bool:
        if not self._free:
            return False
        self._free -= 1
        return True

    def release(self) -> None:
        self._free += 1


class _Ear:
    """Hands messages to whoever has room and counts the answers."""

    def __init__(self) -> None:
        self._left: list[Outgoing] = []
        self._owed = 0
        self._sessions: dict[int, Session] = {}
        self._done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def all_connected(self) -> None:
        """Every connection has shaken hands: that is no message's cost."""
        while len(self._sessions) < _CONNECTIONS:
            if self._done.done():
                self._done.result()
            await asyncio.sleep(0.01)

    async def send(self, group: list[Outgoing]) -> None:
        """Until each of these has its answer."""
        if self._done.done():
            self._done.result()
        self._left, self._owed = list(reversed(group)), len(group)
        self._done = asyncio.get_running_loop().create_future()
        for session in self._sessions.values():
            self.on_ready(session)
        await asyncio.wait_for(self._done, _PATIENCE_S)

    def on_ready(self, session: Session) -> None:
        self._sessions[id(session)] = session
        while self._left and session.capacity > 0:
            session.send([self._left.pop()])

    def on_events(self, session: Session, events: list[Event]) -> None:
        self._owed -= len(events)
        if self._owed <= 0 and not self._done.done():
            self._done.set_result(None)

    def on_session_ended(
        self, subject: Session | Destination, why: Ended, stage: Stage, reply: Reply | None, error: str
    ) -> None:
        self._sessions.pop(id(subject), None)
        if not self._done.done() and (self._owed > 0 or isinstance(subject, Destination)):
            self._done.set_exception(NotMeasured(problem=f"{why} at {stage.upper()}: {reply or error}"))


async def _run(
    destination: Destination, limits: ConnectionLimits, composer: Composer, plan: Plan, messages: int
) -> tuple[int, int, float]:
    """(messages, bytes, seconds of processor time), composed as they go out, a group at a time, as a worker does it."""
    ear = _Ear()
    pool = Pool(destination, limits, _Slots(_CONNECTIONS), ear, SystemClock())
    pool.want(_CONNECTIONS)
    sent = size = 0
    try:
        await asyncio.wait_for(ear.all_connected(), _PATIENCE_S)
        started = time.process_time()
        while sent < messages:
            group = list(_messages(composer, plan, min(_AT_ONCE, messages - sent)))
            await ear.send(group)
            sent += len(group)
            size += sum(len(message.content) for message in group)
        return sent, size, time.process_time() - started
    finally:
        await pool.close()
