"""Killed senders: nobody twice, nobody lost. A few runs of benchmarks/kill.py, which can do hundreds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from benchmarks import kill
from benchmarks.kill import Outcome, Plan, compare, run_once
from engine.rehearse.record import Recorder

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "chunking"), [(1, True), (2, False)])
def test_killed_and_resumed_nobody_gets_it_twice(tmp_path: Path, seed: int, chunking: bool) -> None:
    outcome = run_once(tmp_path, Plan(rows=400, kills=2, chunking=chunking), seed)
    log = (tmp_path / "engine.log").read_text()
    assert sum(outcome.kills.values()) == 2, log
    assert outcome.kept_its_promises, f"{outcome}\n{log}"


def test_the_comparison_sees_each_broken_promise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A report and a record that disagree in every way there is."""
    report = {"a": "accepted", "b": "accepted", "c": "in_doubt", "d": "in_doubt", "e": "bounced", "f": "unsent"}
    folder = tmp_path / "campaign" / "report"
    folder.mkdir(parents=True)
    outcomes = {name: list(report.values()).count(name) for name in set(report.values())}
    (folder / "summary.json").write_text(json.dumps({"rows": 7, "outcomes": outcomes}))
    pq.write_table(pa.table({"address": list(report), "outcome": list(report.values())}), folder / "recipients.parquet")
    recorder = Recorder(tmp_path / "sink.tsv")
    for recipient in (b"a", b"a", b"c", b"e"):
        recorder.add(
            time_us=0, session=1, sender=b"", recipients=[recipient], message_id=b"", digest="", size=0, answer=b"250"
        )
    recorder.close()

    def merged(folder: Path, *words: str) -> subprocess.Popen[Any]:
        return subprocess.Popen([sys.executable, "-c", ""])

    monkeypatch.setattr(kill, "engine", merged)
    outcome = Outcome(seed=0, kills={}, bound=9)
    compare(tmp_path, tmp_path / "sink.tsv", outcome)
    assert (outcome.twice, outcome.lost, outcome.unaccounted) == (1, 1, 1)
    assert (outcome.in_doubt, outcome.in_doubt_there) == (2, 1)
    assert len(outcome.problems) == 2
    assert not outcome.kept_its_promises
