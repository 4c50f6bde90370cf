"""An outbox as an operator and an application see it, against a sink on loopback."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import uuid4

import psycopg
import pytest
from click.testing import CliRunner

from engine import cli
from engine.control.outbox import Outbox, Shown
from engine.errors import EngineError
from engine.outbox import connect
from engine.rehearse.record import Tally, tally
from engine.rehearse.running import RunningSink, run_sink_in_process
from engine.rehearse.sink import SinkSettings
from tests.conftest import require
from tests.control.postgres_server import PostgresServer, binaries

ROOT = Path(__file__).parents[2]


class PostOffice:
    """An outbox folder, its sink, and the servers that a test starts."""

    def __init__(self, folder: Path, sink: RunningSink) -> None:
        self.home = folder / "outbox"
        self.sink = sink
        self._servers: list[subprocess.Popen[bytes]] = []
        self.environ = {**os.environ, "PYTHONPATH": str(ROOT)}
        self.run("outbox", "init", str(self.home))
        self.set("relay", f'"smtp://{sink.host}:{sink.port}"')
        self.set("plan", '["0.3s", "0.5s"]')
        self.box: Outbox = connect(self.home)

    def set(self, key: str, value: str) -> None:
        """One setting of campaign.toml that is there already; the value is TOML."""
        file = self.home / "campaign.toml"
        changed, times = re.subn(rf"^{key} = .*$", f"{key} = {value}", file.read_text(), flags=re.MULTILINE)
        assert times == 1, key
        file.write_text(changed)

    def run(self, *words: str, stdin: str = "", code: int | None = 0) -> str:
        """`engine WORDS`, in this process: the same entry without a second of imports; what it printed."""
        done = CliRunner().invoke(cli.engine, words, input=stdin)
        raised = done.exception.exit_code if isinstance(done.exception, EngineError) else done.exit_code
        assert code is None or raised == code, f"{done.output}\n{done.exception!r}"
        return done.output + (f"{done.exception}" if isinstance(done.exception, EngineError) else "")

    def serve(self) -> subprocess.Popen[bytes]:
        """Start a server."""
        return self._start("serve-outbox", "--campaign", str(self.home))

    def send(self, campaign: Path) -> subprocess.Popen[bytes]:
        """Start a campaign's sender."""
        return self._start("send", "--campaign", str(campaign), "--processes", "2")

    def _start(self, *words: str) -> subprocess.Popen[bytes]:
        with (self.home / "server.log").open("ab") as log:
            server = subprocess.Popen(
                [sys.executable, "-m", "engine", *words],
                env=self.environ,
                stdout=subprocess.DEVNULL,
                stderr=log,
                start_new_session=True,
            )
        self._servers.append(server)
        return server

    def serve_and_join(self) -> subprocess.Popen[bytes]:
        """Start a server; it has its lease when this returns."""
        return self.join(self.serve)

    def join(self, start: Callable[[], subprocess.Popen[bytes]]) -> subprocess.Popen[bytes]:
        """The same for whoever serves the outbox."""
        before = len(self.box.servers())
        server = start()
        while len(self.box.servers()) == before and server.poll() is None:
            time.sleep(0.02)
        return server

    def stop(self, server: subprocess.Popen[bytes], how: signal.Signals = signal.SIGTERM) -> int:
        """Signal a server and wait for its end."""
        with contextlib.suppress(ProcessLookupError):
            server.send_signal(how)
        return server.wait(timeout=30)

    def states(self) -> Counter[str]:
        """Rows by state and reason."""
        counts: Counter[str] = Counter()
        for count in self.box.tally():
            counts[f"{count.state}/{count.reason}" if count.reason else count.state] += count.rows
        return counts

    def row(self, number: int) -> Shown:
        return self.box.rows(None, number - 1, 1)[0]

    def until(self, within_s: float = 20, **states: int) -> None:
        """Wait until so many rows are in these states."""
        deadline = time.monotonic() + within_s
        while any(self.states()[state.replace("__", "/")] != rows for state, rows in states.items()):
            assert time.monotonic() < deadline, f"{self.states()}\n{(self.home / 'server.log').read_text()}"
            time.sleep(0.03)

    def until_taken(self, messages: int, within_s: float = 20) -> None:
        """Wait until the sink has so many."""
        deadline = time.monotonic() + within_s
        while self.sink.counts().messages < messages:
            assert time.monotonic() < deadline, (self.home / "server.log").read_text()
            time.sleep(0.02)

    def until_said(self, words: str, within_s: float = 20) -> None:
        """Wait until a server or sender wrote these words."""
        deadline = time.monotonic() + within_s
        while words not in (text := (self.home / "server.log").read_text()):
            assert time.monotonic() < deadline, text
            time.sleep(0.05)

    def kill_pid(self, pid: int) -> None:
        """SIGKILL for a process that a server of ours started."""
        os.kill(pid, signal.SIGKILL)

    def received(self) -> Tally:
        """What the sink has."""
        assert self.sink.record is not None
        return tally(self.sink.record)

    def close(self) -> None:
        for server in self._servers:
            if server.poll() is None:
                server.kill()
                server.wait()
        self.box.close()


@pytest.fixture(scope="session")
def database() -> Iterator[PostgresServer]:
    """One PostgreSQL server for the tests of this room."""
    require("postgres", None if binaries() else "no PostgreSQL server binary here")
    found = PostgresServer()
    yield found
    found.remove()


@pytest.fixture
def shared_office(office: PostOffice, database: PostgresServer) -> PostOffice:
    """The same with its table in PostgreSQL, in a schema of its own."""
    schema = f"office{uuid4().hex[:8]}"
    with psycopg.connect(database.url, autocommit=True) as db:
        db.execute(f"CREATE SCHEMA {schema}")  # type: ignore[arg-type]  # a name of ours
    office.set("store", f'"{database.url}?options=-csearch_path%3D{schema}"')
    office.box.close()
    office.box = connect(office.home)
    return office


@pytest.fixture
def office(tmp_path: Path) -> Iterator[PostOffice]:
    settings = SinkSettings(record=tmp_path / "sink.record", folder=tmp_path / "mails")
    (tmp_path / "mails").mkdir()
    with run_sink_in_process(settings) as sink:
        office = PostOffice(tmp_path, sink)
        yield office
        office.close()
