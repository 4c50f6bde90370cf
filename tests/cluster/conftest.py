"""Several machines as an operator runs them: folders of their own, one PostgreSQL, one sink that all send to."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from engine.rehearse.running import RunningSink, run_sink_in_process
from engine.rehearse.sink import SinkSettings
from tests.campaign.conftest import Operator
from tests.conftest import require
from tests.control.postgres_server import PostgresServer, binaries

_numbers = itertools.count()


class Machines(Operator):
    """The machine that plans, and others that know the store's URL alone."""

    def __init__(self, folder: Path, sink: RunningSink, server: PostgresServer) -> None:
        super().__init__(folder, sink)
        self.server = server
        self.url = f"{server.url}?campaign=cluster-{os.getpid()}-{next(_numbers)}"

    def plan_for(self, addresses: list[str | None], partitions: int, *, lease: str = "3s", **delivery: object) -> None:
        """A planned campaign whose store is the server's.

        Connections of a lost machine are given again after the longest answer to a final dot: five seconds here.
        """
        self.begin(addresses, plan=False, **{"dot_timeout": "5s", **delivery})
        self.plan_with_store(partitions, lease=lease)

    def plan_with_store(self, partitions: int, *, lease: str = "3s") -> None:
        """Plan what was begun, into the server."""
        self.set("id", self.url.rpartition("=")[2])
        file = self.campaign / "campaign.toml"
        text = file.read_text("utf-8")
        file.write_text(text + ("" if "[control]" in text else "\n[control]\n"), "utf-8")
        self.set("control.lease", lease)
        self.set("list.batch_rows", 100)
        self.run("plan", "list.parquet", "--partitions", str(partitions), "--control", self.url)

    def run(self, *words: str, code: int | None = 0, within_s: float = 60) -> subprocess.CompletedProcess[str]:
        """As an operator does; the quick commands inside the test's process."""
        if words[0] in ("machines", "batches", "pause", "resume", "release", "cancel"):
            return self._run_here(*words, code=code)
        return super().run(*words, code=code, within_s=within_s)

    def machine(self, number: int) -> Path:
        """The campaign folder of another machine."""
        return self.folder / f"machine-{number}"

    def send_on(self, number: int, *words: str) -> subprocess.Popen[str]:
        """`engine send --partition NUMBER` on that machine."""
        folder = str(self.machine(number))
        fixed = ("--partition", str(number), "--campaign", folder, "--control", self.url, "--name", f"machine-{number}")
        return self.start("send", *fixed, "--processes", "2", *words)

    def lose(self, number: int, process: subprocess.Popen[str]) -> None:
        """The machine dies with its disk."""
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=30)
        shutil.rmtree(self.machine(number), ignore_errors=True)

    def merged(self, numbers: int, *, code: int | None = 0) -> dict[str, int]:
        """What `merge-logs` proves from the logs of all machines and the store."""
        folders = [str(self.machine(n)) for n in range(numbers) if self.machine(n).exists()]
        self.run("merge-logs", *folders, "--control", self.url, code=None)
        return self.outcomes_of_report(code)

    def outcomes_of_report(self, code: int | None) -> dict[str, int]:
        summary = msgspec.json.decode((self.campaign / "report" / "summary.json").read_bytes())
        assert sum(summary["outcomes"].values()) == summary["rows"]
        assert code is None or summary["exit_code"] == code, summary
        return {name: count for name, count in summary["outcomes"].items() if count}


@pytest.fixture(scope="session")
def cluster_server() -> Iterator[PostgresServer]:
    require("postgres", None if binaries() else "no PostgreSQL server binary here")
    server = PostgresServer()
    yield server
    server.remove()


@pytest.fixture
def cluster_sink(tmp_path: Path) -> Iterator[RunningSink]:
    with run_sink_in_process(SinkSettings(record=tmp_path / "sink.record")) as running:
        yield running


@pytest.fixture
def machines(tmp_path: Path, cluster_sink: RunningSink, cluster_server: PostgresServer) -> Machines:
    return Machines(tmp_path, cluster_sink, cluster_server)
