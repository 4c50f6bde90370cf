"""The internet on loopback: a name server, and played providers that listen at addresses of their own, all on one port.

    with run_internet(InternetSettings(world=load_world("even"), zone=zone, addresses={"bigmail": "127.1.0.1"})) as net:
        net.nameserver, net.port           # for [delivery] of a direct campaign
        net.reports()["bigmail"].accepted

It runs in a process of its own that ends with its parent: settings go in as one line of JSON, a line "reports" is
answered with what each provider has seen so far, the end of input ends it. Every address must be a loopback one:
nothing that is sent there leaves the machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from engine.errors import EngineError, Exit
from engine.rehearse.models import Model, World
from engine.rehearse.nameserver import NameServer, Zone
from engine.rehearse.player import Player, Report
from engine.rehearse.sink import SinkCannotListen, SinkSettings

_PORT_TRIES = 20


class NotLoopback(EngineError):
    """{address} is no loopback address: a played provider listens on this machine alone."""

    exit_code = Exit.USAGE


class InternetSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What to play where."""

    world: World
    zone: Zone
    addresses: dict[str, str]  # provider -> the loopback address where it listens
    port: int = 0
    dns_port: int = 0
    speed: float = 1.0
    seed: int = 0
    bound_s: float | None = None
    records: Path | None = None  # folder for a record of each provider
    sink: SinkSettings = SinkSettings()


class Listening(msgspec.Struct, frozen=True):
    """The child's first line."""

    nameserver: str = ""
    port: int = 0
    problem: str = ""


class Internet:
    """Name server and providers on one event loop."""

    def __init__(self, settings: InternetSettings) -> None:
        """Raises NotLoopback."""
        for address in settings.addresses.values():
            if not ipaddress.ip_address(address).is_loopback:
                raise NotLoopback(address=address)
        self.settings = settings
        self.player = Player(
            settings.world,
            settings=settings.sink,
            speed=settings.speed,
            seed=settings.seed,
            bound_s=settings.bound_s,
            records=settings.records,
        )
        self.names = NameServer(settings.zone)

    async def start(self) -> tuple[str, int]:
        """Listen; returns "ADDRESS:PORT" of the name server and the providers' port. Raises SinkCannotListen."""
        host, dns_port = await self.names.start(port=self.settings.dns_port)
        return f"{host}:{dns_port}", await self._start_player()

    async def _start_player(self) -> int:
        """One port that is free at every address."""
        for tries in range(_PORT_TRIES):
            try:
                places = await self.player.start_at(self.settings.addresses, self.settings.port)
                return next(iter(places.values()))[1]
            except SinkCannotListen:
                await self.player.stop()
                if self.settings.port or tries == _PORT_TRIES - 1:
                    raise
        raise AssertionError

    async def stop(self) -> None:
        """Close everything."""
        await self.names.stop()
        await self.player.stop()


class RunningInternet:
    """The internet in its process, as its parent sees it."""

    def __init__(self, process: subprocess.Popen[bytes], where: Listening) -> None:
        self._process = process
        self.nameserver, self.port = where.nameserver, where.port

    @property
    def pid(self) -> int:
        return self._process.pid

    def reports(self) -> dict[str, Report]:
        """What each provider has seen so far."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(b"reports\n")
        self._process.stdin.flush()
        return msgspec.json.decode(self._process.stdout.readline(), type=dict[str, Report])


@contextlib.contextmanager
def run_internet(settings: InternetSettings) -> Iterator[RunningInternet]:
    """An internet that listens while the block runs; raises SinkCannotListen."""
    root = str(Path(__file__).parents[2])
    paths = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    process = subprocess.Popen(
        [sys.executable, "-m", "engine.rehearse.internet"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": paths},
        start_new_session=True,  # a signal to the parent's group is not for the providers
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(msgspec.json.encode(settings, enc_hook=str) + b"\n")
        process.stdin.flush()
        line = process.stdout.readline()
        where = msgspec.json.decode(line, type=Listening) if line else Listening(problem="its process ended")
        if where.problem:
            raise SinkCannotListen(host="127.0.0.0/8", port=settings.port, reason=where.problem)
        yield RunningInternet(process, where)
    finally:
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


def zone_of(hosts: Mapping[str, str], domains: Mapping[str, str]) -> Zone:
    """A zone in which each domain has one MX host, and each host one address: host -> address, domain -> host."""
    records = {host: {"A": [address]} for host, address in hosts.items()}
    records |= {domain: {"MX": [f"10 {host}."]} for domain, host in domains.items()}
    return Zone(records=records)


def willing(name: str, *, share: float = 1.0, connections: int = 1000) -> Model:
    """A provider that takes whatever comes, at once."""
    return Model(name=name, share=share, connections=connections, connect_s=0.0, message_s=0.0)


def _path(kind: type, value: object) -> object:
    if kind is Path:
        return Path(str(value))
    raise NotImplementedError(kind)


async def _serve_parent() -> None:
    loop = asyncio.get_running_loop()
    orders = asyncio.StreamReader(limit=1 << 28)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(orders), sys.stdin)
    internet = Internet(msgspec.json.decode(await orders.readline(), type=InternetSettings, dec_hook=_path))
    try:
        nameserver, port = await internet.start()
    except (SinkCannotListen, OSError) as problem:
        _tell(Listening(problem=str(problem)))
        return
    _tell(Listening(nameserver, port))
    while await orders.readline():
        _tell(internet.player.reports())
    await internet.stop()


def _tell(value: object) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(value) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt, BrokenPipeError):
        asyncio.run(_serve_parent())
