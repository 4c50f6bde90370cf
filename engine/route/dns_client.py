"""Questions to recursive name servers, many at once: one UDP socket a server, TCP where an answer is cut short.

A resolver that opens a socket for each question is limited by that; the messages are read by `formats.dnswire`. Errors
are values: a hung, lying or broken server is `Failed`, never an exception. An answer is believed when it comes from the
address that was asked (the sockets are connected), with the question's random id and its very question.

RFC 1035, RFC 2308 (negative answers and their time to live), RFC 6891 (EDNS size), RFC 7766 (TCP).
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import cast

import dns.exception
import dns.name
import dns.resolver
import msgspec

from formats import dnswire
from formats.dnswire import Reply, Value

_MAX_CHAIN = 8


class NameServer(msgspec.Struct, frozen=True):
    """A recursive server."""

    host: str
    port: int = 53


class Answer(msgspec.Struct, frozen=True):
    """What a server said: records, none of that type (`records` empty), or no such name (`exists` false)."""

    exists: bool
    records: tuple[Value, ...]
    ttl_s: float


class Failed(msgspec.Struct, frozen=True):
    """No answer that can be used: SERVFAIL, REFUSED, silence, nonsense. Ask again later."""

    why: str


def system_servers() -> list[NameServer]:
    """The servers of /etc/resolv.conf; an empty list where there are none."""
    try:
        return [NameServer(str(host)) for host in dns.resolver.Resolver().nameservers if isinstance(host, str)]
    except (dns.exception.DNSException, OSError):
        return []


class _Socket(asyncio.DatagramProtocol):
    """One connected socket: ids in flight to who waits."""

    def __init__(self) -> None:
        self.waiting: dict[int, tuple[bytes, asyncio.Future[bytes]]] = {}
        self.transport: asyncio.DatagramTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.DatagramTransport, transport)

    def datagram_received(self, packet: bytes, addr: object) -> None:
        if len(packet) < 12:
            return
        found = self.waiting.get(int.from_bytes(packet[:2], "big"))
        if (
            found is not None
            and packet[2] & 0x80
            and packet[12 : 12 + len(found[0])] == found[0]
            and not found[1].done()
        ):
            found[1].set_result(packet)

    def error_received(self, problem: Exception) -> None:
        # ECONNREFUSED from a server that is not there: all who wait need not wait longer.
        for _, future in self.waiting.values():
            if not future.done():
                future.set_exception(OSError(str(problem)))

    def connection_lost(self, problem: Exception | None) -> None:
        self.error_received(problem or OSError("closed"))


class DnsClient:
    """Asks the servers in turn; each question is bounded in time, all together in number."""

    def __init__(
        self,
        servers: Sequence[NameServer],
        *,
        try_s: float = 1.5,
        tries: int = 3,
        at_once: int = 400,
        rng: random.Random | None = None,
    ) -> None:
        self._servers = list(servers)
        self._try_s, self._tries = try_s, tries
        self._slots = asyncio.Semaphore(at_once)
        self._rng = rng or random.SystemRandom()
        self._sockets: dict[NameServer, asyncio.Task[_Socket]] = {}
        self._turn = 0

    async def ask(self, name: str, kind: int) -> Answer | Failed:
        """The records of `name`, aliases followed. Never raises; takes at most about tries * try_s for each alias."""
        async with self._slots:
            for _ in range(_MAX_CHAIN):
                try:
                    question, name = _question(name, kind)
                except (dns.exception.DNSException, UnicodeError, ValueError) as problem:
                    return Failed(f"not a name the DNS can hold: {problem}")
                reply = await self._reply(question)
                if isinstance(reply, Failed):
                    return reply
                read = _read(reply, name, kind)
                if not isinstance(read, str):
                    return read
                name = read  # an alias whose end the server left out
        return Failed("more than eight aliases, or a loop of them")

    async def close(self) -> None:
        """Closes the sockets."""
        for task in self._sockets.values():
            if task.done() and not task.cancelled() and task.exception() is None:
                transport = task.result().transport
                if transport is not None:
                    transport.close()
            task.cancel()
        self._sockets.clear()
        await asyncio.sleep(0)

    async def _reply(self, question: bytes) -> Reply | Failed:
        if not self._servers:
            return Failed("no name server is configured")
        why = "no answer"
        first = self._turn
        for turn in range(self._tries):
            server = self._servers[(first + turn) % len(self._servers)]
            try:
                packet = await self._udp(server, question)
                reply = dnswire.read_reply(packet)
                if reply.is_cut:
                    async with asyncio.timeout(self._try_s):
                        reply = await _tcp(server, question)
            except TimeoutError:
                why = f"{server.host} did not answer within {self._try_s:g} s"
            except (OSError, EOFError, ValueError) as problem:
                why = f"{server.host}: {problem or type(problem).__name__}"
            else:
                if reply.code in (dnswire.NOERROR, dnswire.NXDOMAIN):
                    return reply
                why = f"{server.host} answered {dnswire.CODES.get(reply.code, reply.code)}"
                if reply.code == dnswire.SERVFAIL and len(self._servers) == 1:
                    return Failed(why)  # the recursive server has tried for us; asking it again at once is noise
            self._turn += 1
        return Failed(why)

    async def _udp(self, server: NameServer, question: bytes) -> bytes:
        """One reply's bytes; raises TimeoutError, OSError."""
        task = self._sockets.get(server)
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            task = self._sockets[server] = asyncio.ensure_future(_connect(server))
        socket = task.result() if task.done() else await asyncio.shield(task)
        assert socket.transport is not None
        number = self._rng.getrandbits(16)
        while number in socket.waiting:
            number = self._rng.getrandbits(16)
        loop = asyncio.get_running_loop()
        future: asyncio.Future[bytes] = loop.create_future()
        socket.waiting[number] = (question, future)
        timer = loop.call_later(self._try_s, _too_late, future)
        try:
            socket.transport.sendto(dnswire.query(number, question))
            return await future
        finally:
            timer.cancel()
            del socket.waiting[number]
            if future.done() and not future.cancelled():
                future.exception()  # seen: it may have come with the timeout


def _too_late(future: asyncio.Future[bytes]) -> None:
    if not future.done():
        future.set_exception(TimeoutError())


async def _connect(server: NameServer) -> _Socket:
    loop = asyncio.get_running_loop()
    _, protocol = await loop.create_datagram_endpoint(_Socket, remote_addr=(server.host, server.port))
    return protocol


def _question(name: str, kind: int) -> tuple[bytes, str]:
    """The question's bytes, and its name as replies give it back."""
    try:
        return dnswire.question(name, kind), name.rstrip(".").lower()
    except ValueError:
        # What is no host name all the same may be a name: other letters (IDNA), escapes.
        wire = dns.name.from_text(name).to_digestable()
        return wire + dnswire.question("x", kind)[3:], dnswire.name_in(wire)


async def _tcp(server: NameServer, question: bytes) -> Reply:
    """The whole answer over TCP, at most the 64 KiB it can have."""
    reader, writer = await asyncio.open_connection(server.host, server.port)
    try:
        wire = dnswire.query(1, question)  # a connection of its own: nothing to tell apart
        writer.write(len(wire).to_bytes(2, "big") + wire)
        size = int.from_bytes(await reader.readexactly(2), "big")
        packet = await reader.readexactly(size)
        reply = dnswire.read_reply(packet)
        if packet[12 : 12 + len(question)].lower() != question:
            raise ValueError("an answer to another question")
        if reply.is_cut:
            raise ValueError("cut short over TCP as well")
        return reply
    finally:
        writer.close()


def _read(reply: Reply, name: str, kind: int) -> Answer | Failed | str:
    """The records in a reply; or the alias to ask for, where the chain ends without them."""
    ttl = 86_400.0
    seen = {name}
    while True:
        found = [record for record in reply.answers if record.kind == kind and record.name == name]
        if found:
            values = tuple(dict.fromkeys(record.value for record in found))
            return Answer(True, values, min(ttl, *(float(record.ttl) for record in found)))
        alias = next((record for record in reply.answers if record.kind == dnswire.CNAME and record.name == name), None)
        if alias is None:
            break
        ttl = min(ttl, float(alias.ttl))
        name = str(alias.value)
        if name in seen:
            return Failed("a loop of aliases")
        seen.add(name)
        if len(seen) > 2 * _MAX_CHAIN:
            return Failed("a chain of aliases without end")
    negative_s = min(ttl, 300.0 if reply.negative_ttl is None else float(reply.negative_ttl))
    if reply.code == dnswire.NXDOMAIN:
        return Answer(False, (), negative_s)
    if len(seen) > 1 and not reply.has_authority:
        return name
    return Answer(True, (), negative_s)
