"""Questions to recursive name servers, many at once: one UDP socket a server, TCP where an answer is cut short.

dnspython reads and writes the messages; its resolver opens a socket for each question, which is what limits it. Errors
are values: a hung, lying or broken server is `Failed`, never an exception. An answer is believed when it comes from the
address that was asked (the sockets are connected), with the question's random id and its very question.

RFC 1035, RFC 2308 (negative answers and their time to live), RFC 6891 (EDNS size), RFC 7766 (TCP).
"""

from __future__ import annotations

import asyncio
import random
import socket
import struct
from collections.abc import Sequence
from typing import cast

import dns.exception
import dns.flags
import dns.message
import dns.name
import dns.rcode
import dns.rdataclass
import dns.rdatatype
import dns.resolver
import dns.rrset
import msgspec

_PAYLOAD = 1232  # bytes that pass without fragments (DNS flag day 2020)
_MAX_CHAIN = 8
RECEIVE_BUFFER_BYTES = 4 * 1024 * 1024


class NameServer(msgspec.Struct, frozen=True):
    """A recursive server."""

    host: str
    port: int = 53


class Answer(msgspec.Struct, frozen=True):
    """What a server said: records, none of that type (`records` empty), or no such name (`exists` false)."""

    exists: bool
    records: tuple[object, ...]  # dnspython rdata
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
        # The question must be ours, letter by letter: it was sent in mixed case (0x20), which a forger has to guess.
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

    async def ask(self, name: str, kind: dns.rdatatype.RdataType) -> Answer | Failed:
        """The records of `name`, aliases followed. Never raises; takes at most about tries * try_s for each alias."""
        try:
            target = dns.name.from_text(name)
        except (dns.exception.DNSException, UnicodeError, ValueError) as problem:
            return Failed(f"not a name the DNS can hold: {problem}")
        async with self._slots:
            for _ in range(_MAX_CHAIN):
                message = await self._message(target, kind)
                if isinstance(message, Failed):
                    return message
                read = _read(message, target, kind)
                if isinstance(read, Answer | Failed):
                    return read
                target = read  # an alias whose end the server left out
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

    async def _message(self, name: dns.name.Name, kind: dns.rdatatype.RdataType) -> dns.message.Message | Failed:
        if not self._servers:
            return Failed("no name server is configured")
        why = "no answer"
        question = name.to_digestable() + struct.pack("!HH", kind, dns.rdataclass.IN)
        first = self._turn
        for turn in range(self._tries):
            server = self._servers[(first + turn) % len(self._servers)]
            try:
                async with asyncio.timeout(self._try_s):
                    packet = await self._udp(server, question)
                    message = dns.message.from_wire(packet, ignore_trailing=True)
                    if message.flags & dns.flags.TC:
                        message = await _tcp(server, question)
            except TimeoutError:
                why = f"{server.host} did not answer within {self._try_s:g} s"
            except Exception as problem:  # whatever a stranger's bytes make the parser raise
                why = f"{server.host}: {problem or type(problem).__name__}"
            else:
                rcode = message.rcode()
                if rcode in (dns.rcode.NOERROR, dns.rcode.NXDOMAIN):
                    return message
                why = f"{server.host} answered {dns.rcode.to_text(rcode)}"
                if rcode == dns.rcode.SERVFAIL and len(self._servers) == 1:
                    return Failed(why)  # the recursive server has tried for us; asking it again at once is noise
            self._turn += 1
        return Failed(why)

    async def _udp(self, server: NameServer, question: bytes) -> bytes:
        task = self._sockets.get(server)
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            task = self._sockets[server] = asyncio.ensure_future(_connect(server))
        socket = await asyncio.shield(task)
        assert socket.transport is not None
        number = self._rng.getrandbits(16)
        while number in socket.waiting:
            number = self._rng.getrandbits(16)
        wire = _query(number, question)
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        socket.waiting[number] = (question, future)
        try:
            socket.transport.sendto(wire)
            return await future
        finally:
            del socket.waiting[number]
            if future.done() and not future.cancelled():
                future.exception()  # seen: it may have come with the timeout


async def _connect(server: NameServer) -> _Socket:
    loop = asyncio.get_running_loop()
    transport, protocol = await loop.create_datagram_endpoint(_Socket, remote_addr=(server.host, server.port))
    # The usual buffer holds some 270 replies: while this process does something else for a moment, the rest is dropped
    # (one question in a thousand, twice in a row, at 600 questions at once). The kernel gives what its rmem_max allows.
    transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES)
    return protocol


def _query(number: int, question: bytes) -> bytes:
    """A query's bytes: recursion desired, one question, EDNS with our payload size. By hand: it is most of the cost."""
    head = struct.pack("!HHHHHH", number, dns.flags.RD, 1, 0, 0, 1)
    return head + question + struct.pack("!BHHIH", 0, dns.rdatatype.OPT, _PAYLOAD, 0, 0)


async def _tcp(server: NameServer, question: bytes) -> dns.message.Message:
    """The whole answer over TCP, at most the 64 KiB it can have."""
    reader, writer = await asyncio.open_connection(server.host, server.port)
    try:
        wire = _query(1, question)  # a connection of its own: nothing to tell apart
        writer.write(len(wire).to_bytes(2, "big") + wire)
        size = int.from_bytes(await reader.readexactly(2), "big")
        packet = await reader.readexactly(size)
        message = dns.message.from_wire(packet, ignore_trailing=True)
        if packet[12 : 12 + len(question)].lower() != question:
            raise ValueError("an answer to another question")
        if message.flags & dns.flags.TC:
            raise ValueError("cut short over TCP as well")
        return message
    finally:
        writer.close()


def _read(
    message: dns.message.Message, name: dns.name.Name, kind: dns.rdatatype.RdataType
) -> Answer | Failed | dns.name.Name:
    """The records in a message; or the alias to ask for, where the chain ends without them."""
    ttl = 86_400.0
    seen = {name}
    while True:
        found = message.get_rrset(message.answer, name, dns.rdataclass.IN, kind)
        if found is not None:
            return Answer(True, tuple(found), min(ttl, float(found.ttl)))
        alias = message.get_rrset(message.answer, name, dns.rdataclass.IN, dns.rdatatype.CNAME)
        if alias is None:
            break
        ttl = min(ttl, float(alias.ttl))
        name = alias[0].target
        if name in seen:
            return Failed("a loop of aliases")
        seen.add(name)
        if len(seen) > 2 * _MAX_CHAIN:
            return Failed("a chain of aliases without end")
    negative_s = min(ttl, _negative_ttl_s(message))
    if message.rcode() == dns.rcode.NXDOMAIN:
        return Answer(False, (), negative_s)
    if len(seen) > 1 and not message.authority:
        return name
    return Answer(True, (), negative_s)


def _negative_ttl_s(message: dns.message.Message) -> float:
    """How long "there is none" holds: the lesser of the SOA's time to live and its minimum (RFC 2308 §5)."""
    for rrset in message.authority:
        if rrset.rdtype == dns.rdatatype.SOA:
            return float(min(rrset.ttl, rrset[0].minimum))
    return 300.0
