"""What the sink takes: messages a second, and its CPU time a message, by DATA with pipelining and by BDAT.

    python benchmarks/sink.py [--messages 20000] [--size 2000] [--connections 10] [--record]

The client is a thread per connection on plain sockets that sends the next envelope behind the previous dot.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import tempfile
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from engine.rehearse.record import tally
from engine.rehearse.running import run_sink_in_process
from engine.rehearse.sink import SinkSettings


def cpu_s(pid: int) -> float:
    """User and system seconds of a process (Linux)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def by_data(port: int, first: int, count: int, content: bytes) -> None:
    """Send `count` messages, one round trip a message."""
    with socket.create_connection(("127.0.0.1", port)) as wire, wire.makefile("rb") as replies:
        wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        replies.readline()
        wire.sendall(b"EHLO bench.example\r\n")
        while replies.readline()[3:4] == b"-":
            pass
        wire.sendall(b"MAIL FROM:<a@example.com>\r\nRCPT TO:<r%d@example.org>\r\nDATA\r\n" % first)
        for number in range(first + 1, first + count + 1):
            for _ in range(3):
                replies.readline()
            behind = b"MAIL FROM:<a@example.com>\r\nRCPT TO:<r%d@example.org>\r\nDATA\r\n" % number
            wire.sendall(content + b".\r\n" + (behind if number < first + count else b"QUIT\r\n"))
            assert replies.readline()[:3] == b"250"


def by_bdat(port: int, first: int, count: int, content: bytes, window: int = 4) -> None:
    """Send `count` messages, `window` of them a round trip."""
    with socket.create_connection(("127.0.0.1", port)) as wire, wire.makefile("rb") as replies:
        replies.readline()
        wire.sendall(b"EHLO bench.example\r\n")
        while replies.readline()[3:4] == b"-":
            pass
        for start in range(first, first + count, window):
            group = [
                b"MAIL FROM:<a@example.com>\r\nRCPT TO:<r%d@example.org>\r\nBDAT %d LAST\r\n%b"
                % (number, len(content), content)
                for number in range(start, min(start + window, first + count))
            ]
            wire.sendall(b"".join(group))
            for _ in range(3 * len(group)):
                assert replies.readline()[:3] == b"250"


def main() -> None:
    """Print one line a way of sending."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=20_000)
    parser.add_argument("--size", type=int, default=2_000)
    parser.add_argument("--connections", type=int, default=10)
    parser.add_argument("--no-record", action="store_true")
    options = parser.parse_args()
    head = b"From: a@example.com\r\nSubject: x\r\nMessage-ID: <1.abcdefabcdef@example.com>\r\n\r\n"
    content = head + b"0123456789abcdef" * 4 + b"\r\n"
    content += (b"0123456789abcdef" * 4 + b"\r\n") * ((options.size - len(content)) // 66)
    each = options.messages // options.connections
    for name, send in (("DATA, pipelined", by_data), ("BDAT, four at once", by_bdat)):
        with tempfile.TemporaryDirectory() as folder:
            record = None if options.no_record else Path(folder) / "record.tsv"
            with run_sink_in_process(SinkSettings(record=record)) as running:
                before, began = cpu_s(running.pid), time.perf_counter()
                threads = [
                    threading.Thread(target=send, args=(running.port, number * each, each, content))
                    for number in range(options.connections)
                ]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
                took, cpu = time.perf_counter() - began, cpu_s(running.pid) - before
                sent = running.counts().messages
            assert sent == each * options.connections
            if record is not None:
                counted = tally(record)
                assert counted.recipients == sent
                assert not counted.twice
        print(
            f"{name:20} {sent:7} messages of {len(content)} B: {sent / took:7.0f}/s, sink CPU {cpu / sent * 1e6:.1f} us"
        )


if __name__ == "__main__":
    main()
