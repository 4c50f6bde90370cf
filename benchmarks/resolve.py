"""Domains a second that `engine resolve` asks, over a name server in a process of its own on loopback.

python benchmarks/resolve.py                  3,000 domains
python benchmarks/resolve.py --full           300,000 domains
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import socket
import struct
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from engine.clock import SystemClock
from engine.route.answers import ask_all, read_answers
from engine.route.dns_client import DnsClient, NameServer
from engine.route.provider import load_providers
from engine.route.resolver import Resolver

_MX, _A, _AAAA = 15, 1, 28


def serve(pipe: Connection) -> None:
    """Answers MX with one of 3,000 hosts, A with one address, AAAA with nothing; bytes by hand, to cost little."""
    server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 22)
    server.bind(("127.0.0.1", 0))
    pipe.send(server.getsockname()[1])
    while True:
        packet, peer = server.recvfrom(2048)
        end = packet.index(0, 12) + 5
        kind = int.from_bytes(packet[end - 4 : end - 2], "big")
        count = 0 if kind == _AAAA else 1
        body = b""
        if kind == _MX:
            name = b"mx%d" % (sum(packet[12:20]) * 7 % 3000)
            target = bytes([len(name)]) + name + b"\x04bulk\x04test\x00"
            body = b"\xc0\x0c" + struct.pack("!HHIHH", _MX, 1, 300, 2 + len(target), 10) + target
        elif kind == _A:
            body = b"\xc0\x0c" + struct.pack("!HHIH", _A, 1, 300, 4) + b"\x08\x08\x08\x08"
        head = packet[:2] + b"\x81\x80" + struct.pack("!HHHH", 1, count, 0, 0)
        server.sendto(head + packet[12:end] + body, peer)


async def ask(domains: list[str], port: int, path: Path) -> None:
    client = DnsClient([NameServer("127.0.0.1", port)], at_once=600)
    await ask_all(domains, Resolver(client, load_providers(), SystemClock()), path, SystemClock(), at_once=300)
    await client.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--full", action="store_true")
    number = 300_000 if parser.parse_args().full else 3_000
    here, there = multiprocessing.get_context("spawn").Pipe()
    server = multiprocessing.get_context("spawn").Process(target=serve, args=(there,), daemon=True)
    server.start()
    port = here.recv()
    domains = [f"customer{n}.example{n % 97}.test" for n in range(number)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "domains.jsonl"
        begin, cpu = time.perf_counter(), time.process_time()
        asyncio.run(ask(domains, port, path))
        spent, cpu = time.perf_counter() - begin, time.process_time() - cpu
        answers = read_answers(path)
        assert len(answers) == number
        failed = [answer for answer in answers.values() if answer.kind != "route"]
        assert not failed, f"{len(failed)} failed, {failed[0]}"
    server.terminate()
    server.join()
    rate, each_us = number / spent, cpu / number * 1e6
    print(f"{number:,} domains in {spent:.1f} s: {rate:,.0f} domains/s, {each_us:.0f} µs of CPU a domain")


if __name__ == "__main__":
    main()
