"""A sink in a process of its own, which ends when its parent does.

The parent writes the settings as one line of JSON to the child's standard input and reads where it listens from its
standard output; a line "counts" is answered with the counts. End of input ends the child: the pipe closes when the
parent exits, however it dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec

from engine.rehearse.certificate import make_certificate
from engine.rehearse.sink import Counts, Sink, SinkCannotListen, SinkSettings


class Listening(msgspec.Struct, frozen=True):
    """The child's first line."""

    host: str = ""
    port: int = 0
    problem: str = ""


class Order(msgspec.Struct, frozen=True):
    """The parent's first line."""

    settings: SinkSettings
    host: str
    port: int


class RunningSink:
    """Where the sink listens, and what it has seen."""

    def __init__(self, process: subprocess.Popen[bytes], where: Listening, settings: SinkSettings) -> None:
        self._process = process
        self.host, self.port = where.host, where.port
        self.record = settings.record
        self.certificate = settings.certificate
        self.url = f"{'smtps' if settings.tls == 'implicit' else 'smtp'}://{where.host}:{where.port}"

    @property
    def pid(self) -> int:
        return self._process.pid

    def counts(self) -> Counts:
        """The counts so far."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(b"counts\n")
        self._process.stdin.flush()
        return msgspec.json.decode(self._process.stdout.readline(), type=Counts)


@contextlib.contextmanager
def run_sink_in_process(
    settings: SinkSettings | None = None, *, host: str = "127.0.0.1", port: int = 0
) -> Iterator[RunningSink]:
    """A sink that listens while the block runs; raises SinkCannotListen."""
    settings = settings or SinkSettings()
    if settings.tls != "off" and settings.certificate is None:
        certificate, key = make_certificate(settings.hostname)
        settings = msgspec.structs.replace(settings, certificate=certificate, key=key)
    root = str(Path(__file__).parents[2])
    paths = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    process = subprocess.Popen(
        [sys.executable, "-m", "engine.rehearse.running"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": paths},
        start_new_session=True,  # a signal to the parent's group is not for the sink
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(msgspec.json.encode(Order(settings, host, port), enc_hook=str) + b"\n")
        process.stdin.flush()
        line = process.stdout.readline()
        where = msgspec.json.decode(line, type=Listening) if line else Listening(problem="its process ended")
        if where.problem:
            raise SinkCannotListen(host=host, port=port, reason=where.problem)
        yield RunningSink(process, where, settings)
    finally:
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


def _path(kind: type, value: object) -> object:
    if kind is Path:
        return Path(str(value))
    raise NotImplementedError(kind)


async def _serve_parent() -> None:
    loop = asyncio.get_running_loop()
    orders = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(orders), sys.stdin)
    order = msgspec.json.decode(await orders.readline(), type=Order, dec_hook=_path)
    sink = Sink(order.settings)
    try:
        host, port = await sink.start(order.host, order.port)
    except SinkCannotListen as problem:
        _tell(Listening(problem=str(problem.fields["reason"])))
        return
    _tell(Listening(host, port))
    while await orders.readline():
        _tell(sink.counts)
    await sink.stop()


def _tell(value: msgspec.Struct) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(value) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt, BrokenPipeError):
        asyncio.run(_serve_parent())
