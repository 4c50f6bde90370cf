"""`engine send --metrics HOST:PORT`: the run's own counters for Prometheus, where no `engine serve` runs.

A thread of the supervisor's process that reads the dict of the last second, which nobody changes any more: the event
loop is not asked, no store, no lock.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client import start_http_server

from engine.errors import EngineError, Exit
from engine.web.metrics import Source, Start, registry
from engine.web.told import read_told


class NoMetricsThere(EngineError):
    """Metrics cannot be served at {listen}: {problem}."""

    exit_code = Exit.USAGE
    hint = "HOST:PORT of this machine, for instance --metrics 127.0.0.1:9108"


@contextlib.contextmanager
def serve_metrics(
    listen: str, campaign: str, sender: str, lease_s: float, counters: Callable[[], dict[str, Any]]
) -> Iterator[int]:
    """Serve while the block runs; the port. Raises NoMetricsThere."""
    host, colon, port = listen.rpartition(":")
    if not colon or not port.isdigit() or not host:
        raise NoMetricsThere(listen=listen, problem="that is not HOST:PORT")

    def sources() -> list[Source]:
        return [Source(campaign, [Start(sender, True, False, 0.0, lease_s, read_told(counters()))])]

    try:
        server, thread = start_http_server(int(port), host.strip("[]"), registry(sources))
    except (OSError, OverflowError) as problem:
        raise NoMetricsThere(listen=listen, problem=getattr(problem, "strerror", None) or problem) from None
    try:
        yield int(server.server_port)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
