"""The sockets of the DNS client: what comes while this process does something else is not lost."""

from __future__ import annotations

import asyncio
import random
import socket
import struct
import threading
from pathlib import Path

import dns.rdatatype
import pytest

from engine.route.dns_client import Answer, DnsClient, NameServer

QUESTIONS = 600
REPLY_COST_BYTES = 1_280  # of the receive buffer, bookkeeping included


def buffer_allowed() -> int:
    """What the kernel gives at most to who asks, in bytes; it counts double."""
    try:
        return 2 * int(Path("/proc/sys/net/core/rmem_max").read_text())
    except OSError:
        return 0


@pytest.mark.skipif(buffer_allowed() < QUESTIONS * REPLY_COST_BYTES, reason="net.core.rmem_max is too small for it")
def test_six_hundred_replies_wait_while_nobody_reads() -> None:
    server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 * 1024 * 1024)
    server.bind(("127.0.0.1", 0))
    server.settimeout(20)
    nobody_reads, replied = threading.Event(), threading.Event()

    def reply_to_all_at_once() -> None:
        asked = [server.recvfrom(2048) for _ in range(QUESTIONS)]
        assert nobody_reads.wait(20)
        for packet, peer in asked:
            end = packet.index(0, 12) + 5
            record = b"\xc0\x0c" + struct.pack("!HHIH", 1, 1, 300, 4) + b"\x08\x08\x08\x08"
            server.sendto(packet[:2] + b"\x81\x80" + struct.pack("!HHHH", 1, 1, 0, 0) + packet[12:end] + record, peer)
        replied.set()

    async def ask() -> list[object]:
        client = DnsClient(
            [NameServer("127.0.0.1", server.getsockname()[1])], at_once=QUESTIONS, try_s=3.0, tries=1,
            rng=random.Random(1),
        )  # fmt: skip
        first = [asyncio.ensure_future(client.ask(f"d{n}.test", dns.rdatatype.A)) for n in range(QUESTIONS)]
        await asyncio.sleep(0.2)  # all are asked
        nobody_reads.set()
        assert replied.wait(20)  # the loop stands still meanwhile
        found = await asyncio.wait_for(asyncio.gather(*first), 10)
        await client.close()
        return list(found)

    thread = threading.Thread(target=reply_to_all_at_once)
    thread.start()
    with server:
        found = asyncio.run(ask())
        thread.join()
    assert all(isinstance(answer, Answer) and answer.records for answer in found)
