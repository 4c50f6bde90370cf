"""The connections to one destination: as many as are wanted and slots allow, reused, reopened, given back.

Knows slots and reasons, not budgets: how many connections a provider bears is decided elsewhere.
"""

from __future__ import annotations

import asyncio
import random
from typing import Protocol

import msgspec

from engine.clock import Clock
from engine.smtp.destination import ConnectionLimits, Destination, Host
from engine.smtp.dialogue import Dialogue, Manner, Stage
from engine.smtp.handshake import Connected, Ended, Failure, establish
from engine.smtp.session import Listener, Session
from engine.smtp.tls import TlsPolicy
from engine.smtp.watch import Watch
from formats.reply import Reply

# After the first failure a second, then twice as long each time. A relay that restarts is back within seconds.
FIRST_BACK_OFF_S = 1.0
MAX_BACK_OFF_S = 300.0
# A server that refuses the greeting wants to be left alone, not knocked at.
FIRST_BACK_OFF_REFUSED_S = 10.0
# Broken TLS or a lying extension is remembered this long (one campaign), then tried anew.
MEMORY_S = 24 * 3600.0
# New connections at the same time: enough for a fast start, few enough not to look like a flood.
MAX_CONNECTING = 20
# A connection that ends within this time and did nothing counts as a failure of the host.
HASTY_S = 5.0


class SlotSource(Protocol):
    """Permission to have a connection, one slot each. Neither call blocks."""

    def acquire(self) -> bool:
        """Take a slot; False where there is none now."""

    def release(self) -> object:
        """Give one back."""


class HostMemory(msgspec.Struct):
    """What was learned about one host in this process."""

    failures: int = 0
    dead_until: float = 0.0
    tls_broken_until: float = 0.0
    no_chunking_until: float = 0.0
    no_pipelining_until: float = 0.0
    chunking_proven: bool = False


class PoolFailure(msgspec.Struct, frozen=True):
    """The last thing that went wrong, for the operator. Times are monotonic seconds."""

    host: Host
    why: Ended
    stage: Stage
    reply: Reply | None
    error: str
    at: float
    again_at: float

    def __str__(self) -> str:
        said = f": {self.reply}" if self.reply is not None else f": {self.error}" if self.error else ""
        return f"{self.host}: {self.why} at {self.stage.upper()}{said}"


class Pool:
    """Connections of one destination. All methods are called from the event loop."""

    def __init__(
        self,
        destination: Destination,
        limits: ConnectionLimits,
        slots: SlotSource,
        listener: Listener,
        clock: Clock,
        *,
        memory: dict[str, HostMemory] | None = None,
        rng: random.Random | None = None,
    ) -> None:
        """`memory` may be shared by pools, for hosts are."""
        self.destination = destination
        self.limits = limits
        self.last_failure: PoolFailure | None = None
        self.is_stopped = False  # the login was refused: nothing is tried any more
        self._slots = slots
        self._listener = listener
        self._clock = clock
        self._memory = {} if memory is None else memory
        self._rng = rng or random.Random()
        self._wanted = 0
        self._sessions: list[Session] = []
        self._connecting: dict[asyncio.Task[Connected | Failure], Host] = {}
        self._turn = 0
        self._retry_at: float | None = None
        self._is_closed = False
        self._all_gone: asyncio.Event | None = None
        self._watch = Watch.of_this_loop()
        self._watch.add(self)

    # ---- what the sender asks and says

    @property
    def open(self) -> int:
        return len(self._sessions)

    @property
    def connecting(self) -> int:
        return len(self._connecting)

    @property
    def wanted(self) -> int:
        return self._wanted

    @property
    def sessions(self) -> tuple[Session, ...]:
        return tuple(self._sessions)

    @property
    def ready(self) -> list[Session]:
        """Sessions that take messages now."""
        return [session for session in self._sessions if session.capacity > 0]

    @property
    def retry_at(self) -> float | None:
        """When a connection will be tried again (monotonic), while none may be before."""
        return self._retry_at

    def dead_until(self, now: float) -> float | None:
        """When the first of the hosts may be tried again (monotonic); None while one may be tried now."""
        first = min((self._of(host).dead_until for host in self.destination.hosts), default=now)
        return first if first > now else None

    def want(self, connections: int) -> None:
        """How many connections there is work for. More open as slots allow; idle ones above it close in time."""
        self._wanted = connections
        self._fill()

    def slots_changed(self) -> None:
        """New slots may be had."""
        self._fill()

    def set_limits(self, limits: ConnectionLimits) -> None:
        """Hold connections so from now on, the open ones included."""
        self.limits = limits
        for session in tuple(self._sessions):
            session.obey(limits, self._manner(session.host))
            if session.is_used_up:
                session.close()  # the limit was lowered below what it has had: it would stand there and take nothing

    def shrink(self, connections: int) -> None:
        """A revoke: close so many, idle ones first, the others after what they have in hand."""
        self._wanted = max(0, min(self._wanted, self.open + self.connecting - connections))
        closable = [session for session in self._sessions if not session.dialogue.is_ending]
        closable.sort(key=lambda session: session.in_hand)
        for session in closable[: max(0, connections - self._cancel_connecting(connections))]:
            session.close()

    async def close(self, *, abort: bool = False) -> None:
        """Close all connections; returns when the last one is gone and its slot given back."""
        self._is_closed = True
        self._wanted = 0
        self._cancel_connecting(self.connecting)
        for session in tuple(self._sessions):
            if abort:
                session.abort()
            else:
                session.close()
        while self._sessions or self._connecting:
            self._all_gone = asyncio.Event()
            await self._all_gone.wait()
        self._watch.remove(self)

    def retire(self) -> None:
        """The pool holds nothing and is not needed: stop watching it."""
        self._is_closed = True
        self._watch.remove(self)

    # ---- inside

    def _fill(self) -> None:
        while not (self._is_closed or self.is_stopped) and self._usable() + self.connecting < self._wanted:
            now = self._clock.monotonic()
            host = self._choose_host(now)
            if host is None or self.connecting >= self._most_connecting(host) or not self._slots.acquire():
                return
            task = asyncio.get_running_loop().create_task(self._connect(host))
            self._connecting[task] = host
            task.add_done_callback(self._connect_done)

    def _usable(self) -> int:
        return sum(1 for session in self._sessions if not session.dialogue.is_ending)

    def _most_connecting(self, host: Host) -> int:
        """While the host's last word was a failure, one connection at a time asks whether it is back."""
        return 1 if self._of(host).failures else MAX_CONNECTING

    def _choose_host(self, now: float) -> Host | None:
        """The next host in turn among the living of the lowest preference; None, and when to ask again, where none."""
        living = [host for host in self.destination.hosts if self._of(host).dead_until <= now]
        if not living:
            self._retry_at = min((self._of(host).dead_until for host in self.destination.hosts), default=None)
            return None
        self._retry_at = None
        best = min(host.preference for host in living)
        peers = [host for host in living if host.preference == best]
        self._turn += 1
        return peers[self._turn % len(peers)]

    def _of(self, host: Host) -> HostMemory:
        return self._memory.setdefault(str(host), HostMemory())

    def _manner(self, host: Host) -> Manner:
        """As the limits say, less what the host was found not to keep."""
        memory, now, manner = self._of(host), self._clock.monotonic(), self.limits.manner
        return msgspec.structs.replace(
            manner,
            chunking=manner.chunking and memory.no_chunking_until <= now,
            pipelining=manner.pipelining and memory.no_pipelining_until <= now,
        )

    async def _connect(self, host: Host) -> Connected | Failure:
        plain = self._of(host).tls_broken_until > self._clock.monotonic()
        try:
            return await establish(self.destination, host, self.limits, plain=plain)
        except Exception as bug:  # e.g. a file limit while making a socket; it must not stop the run
            return Failure(Ended.COULD_NOT_CONNECT, Stage.CONNECT, None, f"{type(bug).__name__}: {bug}")

    def _connect_done(self, task: asyncio.Task[Connected | Failure]) -> None:
        """Called once for each task, also for one that was cancelled before it began."""
        host = self._connecting.pop(task)
        outcome = None if task.cancelled() else task.result()
        if isinstance(outcome, Connected) and outcome.transport.is_closing():
            # It went between the handshake and now, and told aiosmtplib's protocol so: ours would never hear of it.
            outcome = Failure(Ended.BROKEN, Stage.EHLO, None, "the server hung up after its greeting")
        if isinstance(outcome, Connected) and not self._is_closed:
            self._opened(host, outcome)
            return
        if isinstance(outcome, Connected):
            outcome.transport.abort()
        self._slots.release()
        self._note_gone()
        if isinstance(outcome, Failure):
            self._failed(host, outcome)

    def _opened(self, host: Host, connected: Connected) -> None:
        now = self._clock.monotonic()
        memory = self._of(host)
        dialogue = Dialogue(connected.offer, self._manner(host), chunking_proven=memory.chunking_proven)
        session = Session(
            connected, self.destination, self, self._listener, self._watch.buffer, now=now, dialogue=dialogue
        )
        self._sessions.append(session)
        session.start()

    def _failed(self, host: Host, failure: Failure) -> None:
        memory = self._of(host)
        now = self._clock.monotonic()
        if failure.tls_broken and self.destination.tls is TlsPolicy.OPPORTUNISTIC and not host.implicit_tls:
            memory.tls_broken_until = now + MEMORY_S  # and at once again, in plain text
        else:
            self._back_off(host, now, FIRST_BACK_OFF_REFUSED_S if failure.why is Ended.REFUSED else FIRST_BACK_OFF_S)
        if failure.why is Ended.AUTH_REFUSED:
            self.is_stopped = True
        self._remember(host, failure.why, failure.stage, failure.reply, failure.error, now)
        self._listener.on_session_ended(
            self.destination, failure.why, failure.stage, failure.reply, failure.error or str(failure.why)
        )
        self._fill()

    def _back_off(self, host: Host, now: float, first_s: float) -> None:
        memory = self._of(host)
        if now < memory.dead_until:
            return  # connections that fail together are one failure
        memory.failures += 1
        wait_s = min(first_s * 2 ** min(memory.failures - 1, 16), MAX_BACK_OFF_S)
        memory.dead_until = now + wait_s * self._rng.uniform(0.8, 1.2)

    def _remember(self, host: Host, why: Ended, stage: Stage, reply: Reply | None, error: str, now: float) -> None:
        again_at = max(now, self._of(host).dead_until)
        self.last_failure = PoolFailure(host, why, stage, reply, error, now, again_at)

    def session_ended(self, session: Session, why: Ended, stage: Stage, reply: Reply | None, error: str) -> None:
        """Its connection is closed."""
        self._sessions.remove(session)
        self._slots.release()
        now = self._clock.monotonic()
        host, memory, dialogue = session.host, self._of(session.host), session.dialogue
        if dialogue.lies == "chunking":
            memory.no_chunking_until = now + MEMORY_S
        elif dialogue.lies == "pipelining":
            memory.no_pipelining_until = now + MEMORY_S
        memory.chunking_proven = memory.chunking_proven or dialogue.chunking_proven
        if dialogue.accepted or dialogue.refused:
            memory.failures = 0
        elif (
            why not in (Ended.FINISHED, Ended.IDLE, Ended.ABORTED)
            and not dialogue.lies
            and (dialogue.taken or now - session.opened_at < HASTY_S)
        ):
            self._back_off(host, now, FIRST_BACK_OFF_S)
        if why not in (Ended.FINISHED, Ended.IDLE, Ended.ABORTED):
            self._remember(host, why, stage, reply, error, now)
        self._listener.on_session_ended(session, why, stage, reply, error)
        self._note_gone()
        self._fill()

    def tick(self) -> None:
        """About once a second: patience, idle connections, and hosts that may be tried again."""
        now = self._clock.monotonic()
        idle: list[Session] = []
        for session in tuple(self._sessions):
            if session.tick(now) >= self.limits.idle_timeout_s:
                idle.append(session)
        # Counted once: of thousands of idle connections each would count all.
        for session in idle[: max(0, self._usable() - self._wanted)] if idle else ():
            session.close(Ended.IDLE)
        self._fill()

    def _cancel_connecting(self, most: int) -> int:
        tasks = list(self._connecting)[:most]
        for task in tasks:
            task.cancel()
        return len(tasks)

    def _note_gone(self) -> None:
        if self._all_gone is not None:
            self._all_gone.set()
