"""A server that stalls in ways no patience of one command finds: it answers each of them, and never a message."""

from __future__ import annotations

import socketserver
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.campaign.conftest import Operator


class JustInTime(socketserver.StreamRequestHandler):
    """Each command is answered after two seconds; a message takes five of them."""

    def handle(self) -> None:
        self.wfile.write(b"220 slow.test\r\n")
        while line := self.rfile.readline():
            command = line[:4].upper()
            if command != b"EHLO":
                time.sleep(2.0)
            self.wfile.write(b"354 go on\r\n" if command == b"DATA" else b"250 fine\r\n")
            if command == b"DATA":
                while (line := self.rfile.readline()) not in (b".\r\n", b""):
                    pass


class Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    allow_reuse_address = True

    def handle_error(self, request: object, client_address: object) -> None:
        """It was cut: that is what we came for."""


@pytest.fixture
def just_in_time() -> Iterator[int]:
    with Server(("127.0.0.1", 0), JustInTime) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address[1]
        server.shutdown()


@pytest.mark.long
def test_it_is_found_by_clock_cut_and_told_and_its_rows_wait(tmp_path: Path, just_in_time: int) -> None:
    operator = Operator(tmp_path, None)
    operator.begin(
        ["a@slow.test"],
        relay=f"smtp://127.0.0.1:{just_in_time}",
        tls="off",
        connections=1,
        stuck_after="3s",
        dot_timeout="3s",
        max_age="1h",
    )
    operator.set("plan", ["60s"])
    said = operator.run("send", "--processes", "1", "--yes", "--max-wait", "0", code=3, within_s=100).stderr
    assert "stalled" in said
    assert "kind=connection" in said
    assert "no answer to 1 messages; cut" in said
    assert operator.outcomes(code=None) == {"unsent": 1}
