"""aiosmtpd on a loopback port, in a thread: an SMTP server that we did not write, without PIPELINING and CHUNKING."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from aiosmtpd.controller import Controller
from aiosmtpd.smtp import Envelope, Session

from tests.peers.postfix import free_port


class AiosmtpdServer:
    """Keeps the envelopes it was given; `550@` and `451@` are refused at RCPT."""

    def __init__(self) -> None:
        self.host, self.port = "127.0.0.1", free_port()  # its controller cannot take port 0
        self.envelopes: list[Envelope] = []

    async def handle_RCPT(
        self, server: Any, session: Session, envelope: Envelope, address: str, options: list[str]
    ) -> str:
        """The reply to RCPT."""
        if address.startswith(("550@", "550+")):
            return "550 5.1.1 No such user here"
        if address.startswith(("451@", "451+")):
            return "451 4.7.1 Try again later"
        envelope.rcpt_tos.append(address)
        return "250 OK"

    async def handle_DATA(self, server: Any, session: Session, envelope: Envelope) -> str:
        """The reply to the final dot."""
        self.envelopes.append(envelope)
        return "250 OK"


@contextlib.contextmanager
def running_aiosmtpd() -> Iterator[AiosmtpdServer]:
    """A server while the block runs."""
    server = AiosmtpdServer()
    controller = Controller(server, hostname=server.host, port=server.port)
    controller.start()
    try:
        yield server
    finally:
        controller.stop()
