"""A listener that remembers, slots that count, and servers of a few lines that live in the test's own event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from engine.clock import SystemClock
from engine.rehearse.certificate import make_certificate
from engine.smtp import watch
from engine.smtp.destination import ConnectionLimits, Destination, Host
from engine.smtp.dialogue import Event, Outgoing, Patience, Stage
from engine.smtp.handshake import Ended
from engine.smtp.pool import Pool
from engine.smtp.session import Session
from formats.reply import Reply

Conversation = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

QUICK = ConnectionLimits(
    connect_timeout_s=1.0,
    handshake_timeout_s=0.7,
    patience=Patience(command_s=0.6, data_s=0.6, dot_s=0.6, quit_s=0.5, farewell_s=1.0),
)


class End:
    """One call of `on_session_ended`."""

    def __init__(
        self, subject: Session | Destination, why: Ended, stage: Stage, reply: Reply | None, error: str
    ) -> None:
        self.subject, self.why, self.stage, self.reply, self.error = subject, why, stage, reply, error

    def __repr__(self) -> str:
        return f"End({self.why!s}, {self.stage!s}, {self.reply}, {self.error!r})"


class Slots:
    """At most `limit` connections; shows the most that were open together."""

    def __init__(self, limit: int = 1) -> None:
        self.limit = limit
        self.used = self.most = self.taken = 0

    def acquire(self) -> bool:
        if self.used >= self.limit:
            return False
        self.used += 1
        self.taken += 1
        self.most = max(self.most, self.used)
        return True

    def release(self) -> None:
        self.used -= 1
        assert self.used >= 0, "a slot was given back twice"


class Sender:
    """Sends a queue of messages as the worker would, and remembers what it hears."""

    def __init__(self, messages: list[Outgoing] | None = None) -> None:
        self.queue = list(messages or [])
        self.events: list[Event] = []
        self.ends: list[End] = []
        self.changed = asyncio.Event()

    def on_ready(self, session: Session) -> None:
        batch, self.queue = self.queue[: session.capacity], self.queue[session.capacity :]
        if batch:
            session.send(batch)
        self.changed.set()

    def on_events(self, session: Session, events: list[Event]) -> None:
        assert events
        self.events += events
        self.changed.set()

    def on_session_ended(
        self, subject: Session | Destination, why: Ended, stage: Stage, reply: Reply | None, error: str
    ) -> None:
        self.ends.append(End(subject, why, stage, reply, error))
        self.changed.set()

    async def until(self, is_so: Callable[[Sender], object], timeout_s: float = 8.0) -> None:
        """Wait for something to be heard."""
        async with asyncio.timeout(timeout_s):
            while not is_so(self):
                self.changed.clear()
                await self.changed.wait()


def mail(ticket: int, size: int = 0) -> Outgoing:
    return Outgoing(ticket, f"v{ticket}@s.test", f"r{ticket}@a.test", b"ticket %d\r\n%b\r\n" % (ticket, b"x" * size))


@asynccontextmanager
async def serving(conversation: Conversation, **options: object) -> AsyncIterator[Host]:
    """A server on loopback; its conversations end with the block."""
    tasks: set[asyncio.Task[None]] = set()
    writers: list[asyncio.StreamWriter] = []

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            await conversation(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError, OSError):
            pass
        except asyncio.CancelledError:
            pass
        finally:
            tasks.discard(task)
            writer.close()
            writers.append(writer)

    server = await asyncio.start_server(accept, "127.0.0.1", 0, **options)  # type: ignore[arg-type]
    port = server.sockets[0].getsockname()[1]
    try:
        yield Host(name="127.0.0.1", port=port)
    finally:
        server.close()
        for task in tuple(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for writer in writers:
            writer.transport.abort()  # no closing words of TLS
        for _ in range(3):
            await asyncio.sleep(0)  # transports close their sockets in a later turn of the loop
        if "ssl" in options:
            await asyncio.sleep(0.05)  # and those in the middle of a handshake when they hear of it


@asynccontextmanager
async def pooling(
    sender: Sender,
    *hosts: Host,
    slots: Slots | None = None,
    limits: ConnectionLimits = QUICK,
    want: int = 1,
    **destination: object,
) -> AsyncIterator[Pool]:
    """A pool on these hosts; afterwards every slot must be back."""
    slots = slots or Slots()
    settings = {"key": "test", "hosts": hosts, "tls": "off", "greeting_name": "client.test", **destination}
    pool = Pool(Destination(**settings), limits, slots, sender, SystemClock())  # type: ignore[arg-type]
    pool.want(want)
    try:
        yield pool
    finally:
        async with asyncio.timeout(12):
            await pool.close(abort=True)
        assert slots.used == 0, "a slot was not given back"


async def read_line(reader: asyncio.StreamReader) -> str:
    line = await reader.readuntil(b"\r\n")
    return line.decode().removesuffix("\r\n")


async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *extensions: str) -> str:
    """Greeting and EHLO; what the client called itself."""
    writer.write(b"220 test\r\n")
    line = await read_line(reader)
    words = ["test", *extensions]
    writer.writelines(
        b"250%b%b\r\n" % (b" " if number == len(words) - 1 else b"-", word.encode())
        for number, word in enumerate(words)
    )
    return line


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A self-signed certificate for localhost and 127.0.0.1, and its key."""
    return make_certificate("localhost", tmp_path_factory.mktemp("certificate"))


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Callable[[Coroutine[object, object, None]], None]:
    """Runs a coroutine on each of the event loops that the engine may use."""
    factory = pytest.importorskip("uvloop").new_event_loop if request.param == "uvloop" else None

    def run_it(story: Coroutine[object, object, None]) -> None:
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(story)

    return run_it


@pytest.fixture(autouse=True)
def quick_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The watch looks twenty times a second, so that patience can be short."""
    monkeypatch.setattr(watch, "TICK_S", 0.05)
