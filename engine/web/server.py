"""What uvicorn leaves to others: a client that takes its time with the request line and headers is hung up on."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from engine.errors import EngineError, Exit

HEADER_PATIENCE_S = 10.0


class CannotListen(EngineError):
    """Cannot listen on {host} port {port}: {problem}."""

    exit_code = Exit.TRY_AGAIN
    hint = "Choose another with --listen, or end what listens there."


class Patient(H11Protocol):
    """uvicorn's h11 protocol with a deadline for the first request of a connection."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(transport)
        self._first = self.loop.call_later(HEADER_PATIENCE_S, self._hang_up)

    def _hang_up(self) -> None:
        if self.cycle is None and self.conn.their_state is h11.IDLE and not self.transport.is_closing():
            self.transport.close()


class Ending(uvicorn.Server):
    """uvicorn's server; streams of events end first, for it waits for every answer before it stops."""

    def __init__(self, config: uvicorn.Config, end_streams: Callable[[], None]) -> None:
        super().__init__(config)
        self._end_streams = end_streams

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's."""
        self._end_streams()
        await super().shutdown(sockets)


@contextlib.contextmanager
def bind(host: str, port: int) -> Iterator[socket.socket]:
    """A listening socket; raises CannotListen."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((host, port))
        made.listen(1024)  # whoever reads the printed address may connect at once
    except OSError as problem:
        made.close()
        raise CannotListen(host=host, port=port, problem=problem.strerror) from None
    with made:
        yield made
