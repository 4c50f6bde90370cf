"""A campaign as an operator runs it: the command line, in a folder of its own, against a sink on loopback."""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from engine.cli import main
from engine.rehearse.record import Tally, tally
from engine.rehearse.running import RunningSink, run_sink_in_process
from engine.rehearse.sink import SinkSettings

ROOT = Path(__file__).parents[2]


class Operator:
    """Types commands in a folder."""

    def __init__(self, folder: Path, sink: RunningSink | None) -> None:
        """`sink` None: the campaign goes elsewhere."""
        self.folder = folder
        self.campaign = folder / "campaign"
        self._sink = sink
        self.environ = {**os.environ, "PYTHONPATH": str(ROOT)}

    @property
    def sink(self) -> RunningSink:
        assert self._sink is not None
        return self._sink

    def start(self, *words: str) -> subprocess.Popen[str]:
        """Begin `engine WORDS` in a process group of its own."""
        return subprocess.Popen(
            [sys.executable, "-m", "engine", *words],
            cwd=self.folder,
            env=self.environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(self, *words: str, code: int | None = 0, within_s: float = 60) -> subprocess.CompletedProcess[str]:
        """`engine WORDS`; the exit code must be `code` unless that is None."""
        if words[0] in ("init", "plan", "merge-logs", "doubt", "status", "restore-store"):
            return self._run_here(*words, code=code)
        process = self.start(*words)
        try:
            out, err = process.communicate(timeout=within_s)
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
            pytest.fail(f"engine {' '.join(words)} hangs:\n{out}\n{err}")
        assert code is None or process.returncode == code, (
            f"engine {' '.join(words)}: {process.returncode}\n{out}\n{err}"
        )
        return subprocess.CompletedProcess(words, process.returncode, out, err)

    def _run_here(self, *words: str, code: int | None) -> subprocess.CompletedProcess[str]:
        """The quick commands run inside the test's process: the same entry, without a second of imports."""
        before, argv = Path.cwd(), sys.argv
        os.chdir(self.folder)
        out, err = io.StringIO(), io.StringIO()
        try:
            sys.argv = ["engine", *words]
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as ended:
                main()
        finally:
            os.chdir(before)
            sys.argv = argv
        got = int(ended.value.code or 0)
        said = f"{out.getvalue()}\n{err.getvalue()}"
        assert code is None or got == code, f"engine {' '.join(words)}: {got}\n{said}"
        return subprocess.CompletedProcess(words, got, out.getvalue(), err.getvalue())

    def begin(self, addresses: Sequence[str | None], *, plan: bool = True, **delivery: object) -> None:
        """A campaign with a short letter to these addresses, retries of half a second, planned."""
        self.run("init")
        for kind in ("txt", "html"):
            (self.campaign / "templates" / f"letter.{kind}").write_text("Hello {{ first_name }}!\n", "utf-8")
        table = pa.table(
            {
                "id": pa.array(range(1000, 1000 + len(addresses)), pa.int64()),
                "email": pa.array(addresses, pa.string()),
                "first_name": [f"Name {i}" for i in range(len(addresses))],
            }
        )
        pq.write_table(table, self.campaign / "list.parquet", row_group_size=100)
        if self._sink is not None:
            self.set("relay", f"smtp://{self._sink.host}:{self._sink.port}")
        self.set("plan", ["0.5s", "1s"])
        for key, value in delivery.items():
            self.set(key, value)
        if plan:
            self.run("plan", "list.parquet")

    def set(self, key: str, value: object) -> None:
        """One setting of campaign.toml; a new key goes into [delivery], or into the table named "table.key"."""
        file = self.campaign / "campaign.toml"
        text = file.read_text("utf-8")
        table, _, name = key.rpartition(".")
        line = f"{name} = {msgspec.json.encode(value).decode()}"
        changed, times = re.subn(rf"^{name} = .*$", line, text, flags=re.MULTILINE)
        if not times:
            changed = text.replace(f"[{table or 'delivery'}]\n", f"[{table or 'delivery'}]\n{line}\n")
        file.write_text(changed, "utf-8")

    def outcomes(self, *, code: int | None = 0) -> dict[str, int]:
        """What `merge-logs` proves: outcomes that are not zero. They add up, or it would not say so."""
        self.run("merge-logs", code=code)
        summary = msgspec.json.decode((self.campaign / "report" / "summary.json").read_bytes())
        assert sum(summary["outcomes"].values()) == summary["rows"]
        return {name: count for name, count in summary["outcomes"].items() if count}

    def rows(self) -> list[dict[str, object]]:
        """The report, row by row."""
        found: list[dict[str, object]] = pq.read_table(self.campaign / "report" / "recipients.parquet").to_pylist()
        return found

    def until_received(self, messages: int, within_s: float = 30) -> None:
        """Wait until the sink has so many messages."""
        deadline = time.monotonic() + within_s
        while self.sink.counts().messages < messages:
            assert time.monotonic() < deadline, f"the sink has {self.sink.counts().messages} messages, not {messages}"
            time.sleep(0.02)

    def received(self) -> Tally:
        """What the sink has."""
        assert self.sink.record is not None
        return tally(self.sink.record)


@pytest.fixture
def sink(tmp_path: Path) -> Iterator[RunningSink]:
    with run_sink_in_process(SinkSettings(record=tmp_path / "sink.record")) as running:
        yield running


@pytest.fixture
def operator(tmp_path: Path, sink: RunningSink) -> Operator:
    return Operator(tmp_path, sink)
