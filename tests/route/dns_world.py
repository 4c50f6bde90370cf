"""A name server on loopback that answers from a table, or misbehaves as it is told."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import cast

import dns.flags
import dns.message
import dns.name
import dns.rcode
import dns.rdatatype
import dns.rrset

from engine.route.dns_client import NameServer

# name -> {type: records}; a name may also be one of the words of `_misbehave`.
Zone = dict[str, dict[str, list[str]] | str]


class DnsServer:
    """Answers over UDP and TCP; counts questions."""

    def __init__(self, zone: Zone, ttl: int = 300) -> None:
        self.zone, self.ttl = zone, ttl
        self.asked: Counter[tuple[str, str]] = Counter()
        self.delay_s = 0.0
        self.at: NameServer | None = None

    def answer(self, wire: bytes, *, is_tcp: bool) -> bytes | None:
        query = dns.message.from_wire(wire)
        name = query.question[0].name.to_text(True).lower()
        kind = dns.rdatatype.to_text(query.question[0].rdtype)
        self.asked[name, kind] += 1
        reply = dns.message.make_response(query)
        entry = self.zone.get(name)
        if isinstance(entry, str):
            return self._misbehave(entry, query, reply)
        if entry is None:
            reply.set_rcode(dns.rcode.NXDOMAIN)
        self._fill(reply, query.question[0].name, kind, set())
        if not reply.answer:
            soa = "ns.test. host.test. 1 3600 600 86400 120"
            reply.authority.append(dns.rrset.from_text("test.", 600, "IN", "SOA", soa))
        packet = reply.to_wire(max_size=65535)
        if not is_tcp and len(packet) > 1232:
            short = dns.message.make_response(query)
            short.flags |= dns.flags.TC
            packet = short.to_wire()
        return packet

    def _fill(self, reply: dns.message.Message, name: dns.name.Name, kind: str, seen: set[dns.name.Name]) -> None:
        entry = self.zone.get(name.to_text(True).lower())
        if not isinstance(entry, dict) or name in seen:
            return
        seen.add(name)
        if kind in entry:
            reply.answer.append(dns.rrset.from_text_list(name, self.ttl, "IN", kind, entry[kind]))
        elif "CNAME" in entry:
            reply.answer.append(dns.rrset.from_text_list(name, self.ttl, "IN", "CNAME", entry["CNAME"]))
            self._fill(reply, dns.name.from_text(entry["CNAME"][0]), kind, seen)

    def _misbehave(self, how: str, query: dns.message.Message, reply: dns.message.Message) -> bytes | None:
        match how:
            case "hang":
                return None
            case "servfail":
                reply.set_rcode(dns.rcode.SERVFAIL)
            case "refused":
                reply.set_rcode(dns.rcode.REFUSED)
            case "garbage":
                return query.to_wire()[:2] + b"\x80\x00\xff\xff\xff" * 30
            case "truncated forever":
                reply.flags |= dns.flags.TC
            case "another question":
                other = dns.message.make_query("evil.test", "MX")
                other.id = query.id
                lie = dns.message.make_response(other)
                lie.answer.append(dns.rrset.from_text("evil.test.", 60, "IN", "MX", "1 evil.test."))
                return lie.to_wire()
            case "another id":
                reply.id = query.id ^ 1
                reply.answer.append(dns.rrset.from_text(query.question[0].name, 60, "IN", "MX", "1 evil.test."))
        return reply.to_wire()


class _Udp(asyncio.DatagramProtocol):
    def __init__(self, server: DnsServer) -> None:
        self.server = server

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.DatagramTransport, transport)

    def datagram_received(self, packet: bytes, addr: tuple[str, int]) -> None:
        reply = self.server.answer(packet, is_tcp=False)
        if reply is not None:
            asyncio.get_running_loop().call_later(self.server.delay_s, self.transport.sendto, reply, addr)


@asynccontextmanager
async def serving(zone: Zone, ttl: int = 300) -> AsyncIterator[DnsServer]:
    """A server for the length of the block; `server.at` is where it listens."""
    server = DnsServer(zone, ttl)

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            size = int.from_bytes(await reader.readexactly(2), "big")
            reply = server.answer(await reader.readexactly(size), is_tcp=True)
            if reply is not None:
                writer.write(len(reply).to_bytes(2, "big") + reply)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    tcp = await asyncio.start_server(talk, "127.0.0.1", 0)
    port = tcp.sockets[0].getsockname()[1]
    udp, _ = await asyncio.get_running_loop().create_datagram_endpoint(
        lambda: _Udp(server), local_addr=("127.0.0.1", port)
    )
    server.at = NameServer("127.0.0.1", port)
    try:
        yield server
    finally:
        udp.close()
        tcp.close()
        await tcp.wait_closed()
