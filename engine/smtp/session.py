"""One open connection: moves bytes between its transport and its dialogue, and watches the patience.

Callbacks only: no task, future, lock or timer per command. A `BufferedProtocol` over one buffer for the whole process,
because asyncio's plain Protocol asks the kernel for fresh pages with every read (measured: 2.4 times the CPU at 2 KB).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

from engine.smtp.destination import ConnectionLimits, Destination, Host
from engine.smtp.dialogue import Dialogue, Event, Manner, Outgoing, Stage
from engine.smtp.handshake import Connected, Ended
from engine.smtp.tls import TlsState
from formats.reply import Reply

READ_BYTES = 65_536
# What the transport may hold before it asks us to pause: one write in the pipe and one behind it.
HIGH_WATER_BYTES = 65_536
# A connection that we closed has this long to go, then it is cut.
CLOSING_S = 5.0


class Listener(Protocol):
    """Who sends: the worker. Its methods are called from the event loop and must not block."""

    def on_ready(self, session: Session) -> None:
        """`session.capacity` > 0: after connecting, and whenever capacity returned. Send now or later."""

    def on_events(self, session: Session, events: list[Event]) -> None:
        """What became of messages handed to this session, one event per ticket, batched per read."""

    def on_session_ended(
        self, subject: Session | Destination, why: Ended, stage: Stage, reply: Reply | None, error: str
    ) -> None:
        """A session is gone, all its events told; or, with a destination, a connection did not come to be."""


class Owner(Protocol):
    """Who opened the session: its pool."""

    limits: ConnectionLimits

    def session_ended(self, session: Session, why: Ended, stage: Stage, reply: Reply | None, error: str) -> None:
        """The connection is closed and its slot free."""


class Session(asyncio.BufferedProtocol):
    """An established connection. `send`, `close` and `abort` may be called at any time, also when it is gone."""

    __slots__ = (
        "_buffer", "_closing_since", "_idle_since", "_is_closing", "_is_paused", "_listener", "_mark", "_most",
        "_owner", "_since", "_transport", "_why", "address", "destination", "dialogue", "ended", "error", "host",
        "opened_at", "tls",
    )  # fmt: skip

    def __init__(
        self,
        connected: Connected,
        destination: Destination,
        owner: Owner,
        listener: Listener,
        buffer: memoryview,
        *,
        now: float,
        dialogue: Dialogue,
    ) -> None:
        self.destination = destination
        self.host: Host = connected.host
        self.address = connected.address
        self.tls: TlsState | None = connected.tls
        self.dialogue = dialogue
        self.opened_at = now
        self.ended: Ended | None = None
        self.error = ""
        self._owner = owner
        self._listener = listener
        self._buffer = buffer
        self._transport = connected.transport
        self._is_paused = False
        self._why: Ended | None = None  # decided before the connection is gone
        self._is_closing = False  # we closed or cut it; only `connection_lost` is still to come
        self._closing_since: float | None = None
        self._mark = (0, 0)
        self._since = now
        self._idle_since: float | None = now
        self._most = 0
        self.obey(owner.limits, None)
        self._transport.set_write_buffer_limits(high=HIGH_WATER_BYTES)
        # aiosmtplib's protocol goes, ours comes; reading was paused in between.
        self._transport.set_protocol(self)

    def start(self) -> None:
        """Begin to read, and tell the listener."""
        self._transport.resume_reading()
        if self.capacity > 0:
            self._listener.on_ready(self)

    # ---- what the sender asks and says

    def obey(self, limits: ConnectionLimits, manner: Manner | None) -> None:
        """Hold the connection so from now on; in the manner that the host can keep, where one is given."""
        offered = self.dialogue.mail_max
        most = limits.messages_per_connection
        self._most = most if offered is None or most < offered else offered
        if manner is not None:
            self.dialogue.adopt(manner)

    @property
    def capacity(self) -> int:
        """How many more messages it takes now. Does not know of those that you are preparing."""
        dialogue = self.dialogue
        if self.ended is not None or dialogue.is_ending:
            return 0
        room = dialogue.depth - dialogue.in_hand
        left = self._most - dialogue.taken
        if left < room:
            room = left
        return room if room > 0 else 0

    def room(self, promised: int) -> int:
        """How many more to prepare for it, so many being prepared: none while more than half of its depth is taken.

        Messages then come in twos and more, and what is done for each handful is done half as often.
        """
        dialogue = self.dialogue
        return self.capacity - promised if 2 * (dialogue.in_hand + promised) <= dialogue.depth else 0

    @property
    def is_idle(self) -> bool:
        """Nothing in hand."""
        return self.dialogue.is_idle

    @property
    def is_used_up(self) -> bool:
        """It has had as many messages as a connection may have."""
        return self.dialogue.taken >= self._most

    @property
    def sent(self) -> int:
        """How many messages the server accepted in this connection."""
        return self.dialogue.accepted

    @property
    def in_hand(self) -> int:
        """Messages handed in and without an event."""
        return self.dialogue.in_hand

    def send(self, batch: Sequence[Outgoing]) -> None:
        """Hand messages over; their intents are durable, for their last bytes may leave at once.

        Each gets exactly one event. When the connection is gone or closing meanwhile that is `Lost`.
        """
        dialogue = self.dialogue
        events = dialogue.take(batch)
        if dialogue.taken >= self._most:
            dialogue.finish()
        if events:
            # Never from within the caller's own call.
            asyncio.get_running_loop().call_soon(self._listener.on_events, self, events)
        self._flush()

    def close(self, why: Ended = Ended.FINISHED) -> None:
        """QUIT once what is in hand is answered."""
        self._why = self._why or why
        self.dialogue.finish()
        self._flush()

    def abort(self) -> None:
        """Cut the connection now; what is in hand is `Lost` or `InDoubt`."""
        self._cut(Ended.ABORTED, "aborted")

    # ---- transport callbacks

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        dialogue = self.dialogue
        events = dialogue.receive(bytes(self._buffer[:nbytes]))
        if dialogue.is_over:
            self._end_of_dialogue(events)
            return
        self._flush()
        if events:
            self._tell(events)
            if self.ended is None and self.capacity > 0:
                self._listener.on_ready(self)

    def eof_received(self) -> bool:
        return False  # close our half too: a peer that says no more answers no more

    def pause_writing(self) -> None:
        self._is_paused = True

    def resume_writing(self) -> None:
        self._is_paused = False
        self._flush()

    def connection_lost(self, exc: BaseException | None) -> None:
        if self.ended is not None:
            return
        was_idle = self.dialogue.in_hand == 0
        error = self.error or (str(exc) if exc is not None else "the server hung up")
        # A reset is the server's doing as well: closing with bytes unread makes one.
        by_peer = not self._is_closing and (exc is None or isinstance(exc, ConnectionResetError))
        events = self.dialogue.lose(error, by_peer=by_peer)
        stage = self.dialogue.last_stage
        if self._why is None and self.dialogue.has_quit:
            self._why = Ended.FINISHED
        why = self._why or (Ended.CLOSED if was_idle and exc is None else Ended.BROKEN)
        self.ended = why
        if events:
            self._tell(events)
        self._owner.session_ended(self, why, stage, self.dialogue.farewell, self.error or self.dialogue.why)

    # ---- inside

    def _flush(self) -> None:
        pull, write = self.dialogue.pull, self._transport.write
        while not (self._is_paused or self._is_closing) and self.ended is None:
            data = pull()
            if not data:
                return
            write(data)

    def _tell(self, events: list[Event]) -> None:
        self._listener.on_events(self, events)

    def _end_of_dialogue(self, events: list[Event]) -> None:
        """The dialogue is over by what the server said."""
        dialogue = self.dialogue
        farewell = dialogue.farewell
        events += dialogue.lose(dialogue.why)
        if farewell is None:
            self._why = self._why or Ended.FINISHED
        elif farewell.code == 421:
            self._why = Ended.CLOSED
        else:
            self._why = Ended.OUT_OF_STEP
        self.error = self.error or dialogue.why
        if self._why is Ended.OUT_OF_STEP:
            self._transport.abort()
        else:
            self._transport.close()
        self._is_closing = True
        if events:
            self._tell(events)

    def _cut(self, why: Ended, error: str) -> None:
        if self.ended is not None:
            return
        if not self._is_closing:
            # What QUIT is answered does not matter: all results are in hand.
            self._why = (self._why or Ended.FINISHED) if self.dialogue.has_quit else why
            self.error = self.error or error
            # Bytes still here have not left; TLS hides how many those are.
            unsent = self._transport.get_write_buffer_size() if self.tls is None else 0
            events = self.dialogue.lose(error, unsent=unsent)
            self._is_closing = True
            if events:
                self._tell(events)
        self._transport.abort()

    def tick(self, now: float) -> float:
        """Called about once a second: enforces the patience; how long it has been idle, in seconds."""
        if self._is_closing:
            since = self._closing_since = now if self._closing_since is None else self._closing_since
            if now - since > 2 * CLOSING_S:
                self.connection_lost(None)  # a transport that keeps its end to itself must not keep a slot
            elif now - since > CLOSING_S:
                self._transport.abort()
            return 0.0
        dialogue, limits = self.dialogue, self._owner.limits
        mark = (dialogue.replies, dialogue.taken)
        if dialogue.is_idle:
            if self._idle_since is None or mark != self._mark:
                self._idle_since = now
            self._mark = mark
            self._since = now
            if now - self.opened_at > limits.session_timeout_s:
                self.close()
            return now - self._idle_since
        self._idle_since = None
        # Only whole replies are progress: bytes that trickle are not.
        if mark[0] != self._mark[0] or dialogue.stage is None:
            self._since = now if mark[0] != self._mark[0] or self._mark[1] != mark[1] else self._since
        self._mark = mark
        patience_s = dialogue.patience_s(limits.patience)
        if patience_s is None:
            patience_s = limits.patience.data_s  # in hand and not written: the peer does not read
        if now - self._since > patience_s:
            self._cut(Ended.TIMED_OUT, dialogue.expire())
        elif now - self.opened_at > limits.session_timeout_s:
            self.close()
        return 0.0
