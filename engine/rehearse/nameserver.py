"""A name server on loopback that answers MX, A, AAAA and TXT questions from a table, over UDP and TCP.

Knows names, not mail: what a zone says of a rehearsal's providers is `internet`'s business. A name may be broken on
purpose: "servfail" answers so, "hang" never answers. Names that the table lacks do not exist, unless the zone has a
`default`: then every domain has an answer, and the host names in it too.
"""

from __future__ import annotations

import asyncio
from typing import cast

import dns.exception
import dns.flags
import dns.message
import dns.name
import dns.rcode
import dns.rdatatype
import dns.rrset
import msgspec

_UDP_OCTETS = 1232  # more goes over TCP


class Zone(msgspec.Struct, kw_only=True):
    """What the server knows. Names are lower case, without the last dot; records as in a zone file."""

    records: dict[str, dict[str, list[str]]] = {}  # name -> {"MX": ["10 mx.example.test."], "A": [...]}
    broken: dict[str, str] = {}  # name -> "servfail" or "hang"
    default: dict[str, list[str]] | None = None  # what a name has that is not in `records`
    ttl_s: int = 300


class NameServer:
    """Answers from a zone; counts questions."""

    def __init__(self, zone: Zone) -> None:
        self.zone = zone
        self.asked = 0
        self._udp: asyncio.DatagramTransport | None = None
        self._tcp: asyncio.Server | None = None

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> tuple[str, int]:
        """Listen on UDP and TCP; returns where. Raises OSError."""
        self._tcp = await asyncio.start_server(self._talk, host, port)
        port = self._tcp.sockets[0].getsockname()[1]
        loop = asyncio.get_running_loop()
        try:
            self._udp, _ = await loop.create_datagram_endpoint(lambda: _Datagrams(self), local_addr=(host, port))
        except OSError:
            self._tcp.close()
            raise
        return host, port

    async def stop(self) -> None:
        """Close both."""
        if self._udp is not None:
            self._udp.close()
        if self._tcp is not None:
            self._tcp.close()
            await self._tcp.wait_closed()

    def answer(self, wire: bytes, *, is_tcp: bool) -> bytes | None:
        """The reply to a question; None: none."""
        try:
            query = dns.message.from_wire(wire)
        except dns.exception.DNSException:
            return None
        if not query.question:
            return None
        self.asked += 1
        question = query.question[0]
        name = question.name.to_text(True).lower()
        reply = dns.message.make_response(query)
        match self.zone.broken.get(name):
            case "hang":
                return None
            case "servfail":
                reply.set_rcode(dns.rcode.SERVFAIL)
                return reply.to_wire()
        self._fill(reply, question.name, dns.rdatatype.to_text(question.rdtype))
        packet = reply.to_wire(max_size=65535)
        if not is_tcp and len(packet) > _UDP_OCTETS:
            short = dns.message.make_response(query)
            short.flags |= dns.flags.TC
            return short.to_wire()
        return packet

    def _fill(self, reply: dns.message.Message, name: dns.name.Name, kind: str) -> None:
        known = self.zone.records.get(name.to_text(True).lower(), self.zone.default)
        if known is None:
            reply.set_rcode(dns.rcode.NXDOMAIN)
        elif kind in known:
            reply.answer.append(dns.rrset.from_text_list(name, self.zone.ttl_s, "IN", kind, known[kind]))
        if not reply.answer:
            soa = "ns.invalid. host.invalid. 1 3600 600 86400 120"
            reply.authority.append(dns.rrset.from_text(".", 600, "IN", "SOA", soa))

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            size = int.from_bytes(await reader.readexactly(2), "big")
            reply = self.answer(await reader.readexactly(size), is_tcp=True)
            if reply is not None:
                writer.write(len(reply).to_bytes(2, "big") + reply)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


class _Datagrams(asyncio.DatagramProtocol):
    def __init__(self, server: NameServer) -> None:
        self._server = server

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.DatagramTransport, transport)

    def datagram_received(self, packet: bytes, addr: tuple[str, int]) -> None:
        reply = self._server.answer(packet, is_tcp=False)
        if reply is not None:
            self._transport.sendto(reply, addr)
