"""The merge against a slow model that a page of dictionaries can hold, and against every order and every damage."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from conftest import LogWriter, make_plan
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.results import merged as merged_module
from engine.results import scan, spool
from engine.results.merge import Merged, merge
from formats.outcomes import WORDS
from formats.sendlog import Kind, Reader, Reason, Verdict

ROWS = 40
STRENGTH = [
    "accepted",
    "bounced",
    "in_doubt",
    "deferred",
    "unsent/cancelled",
    "suppressed",
    "invalid",
    "waiting",
    "nothing",
]


def random_log(log_id: str, rng: random.Random) -> LogWriter:
    """A worker that attempts rows several at a time, sometimes is answered twice, sometimes never."""
    log = LogWriter(log_id, sender=f"host-{rng.randrange(3)}")
    flying: list[tuple[int, int, int]] = []
    for _ in range(rng.randrange(60)):
        row = rng.randrange(ROWS)
        what = rng.random()
        if what < 0.55 or not flying:
            attempt = rng.randrange(1, 5)
            flying.append((log.intent(row, attempt, provider=rng.choice(["a", "b", None])), row, attempt))
        elif what < 0.9:
            serial, row, attempt = flying.pop(rng.randrange(len(flying)))
            verdicts = [Verdict.ACCEPTED, Verdict.REJECTED, Verdict.DEFERRED, Verdict.LOST, Verdict.UNTOUCHED]
            verdict = rng.choices([*verdicts, Verdict.IN_DOUBT], [6, 2, 4, 1, 1, 1])[0]
            log.result(serial, row, verdict, attempt=attempt, reason=Reason.RECIPIENT, code=rng.choice([250, 451, 550]))
            if verdict is Verdict.IN_DOUBT and rng.random() < 0.5:
                log.result(serial, row, rng.choice(verdicts), attempt=attempt)
            elif rng.random() < 0.1:
                log.result(serial, row, verdict, attempt=attempt, reason=Reason.RECIPIENT)
        else:
            verdict = rng.choice([Verdict.SUPPRESSED, Verdict.INVALID, Verdict.EXPIRED, Verdict.UNSENT])
            log.result(0, row, verdict, attempt=0)
    return log


def model(logs: list[LogWriter]) -> tuple[list[str], dict[int, int]]:
    """Outcome per row, and rows with more than one accepted attempt."""
    words: list[set[str]] = [set() for _ in range(ROWS)]
    accepted: dict[int, set[tuple[str, int]]] = {}
    for log in logs:
        answers: dict[int, set[int]] = {}
        rows: dict[int, int] = {}
        for kind, serial, row, _, _, verdict, *_ in log.records:
            if kind == Kind.INTENT:
                rows[serial] = row
                answers.setdefault(serial, set())
            elif kind == Kind.RESULT and serial:
                answers[serial].add(verdict)
            elif kind == Kind.RESULT:
                words[row].add(WORD[verdict])
        for serial, verdicts in answers.items():
            definite = verdicts - {Verdict.IN_DOUBT}
            words[rows[serial]] |= {WORD[verdict] for verdict in definite} or {"in_doubt"}
            if Verdict.ACCEPTED in definite:
                accepted.setdefault(rows[serial], set()).add((log.header.log_id, serial))
    best = [min(said, key=STRENGTH.index, default="nothing") for said in words]
    return best, {row: len(keys) for row, keys in accepted.items() if len(keys) > 1}


WORD = {
    Verdict.ACCEPTED: "accepted",
    Verdict.REJECTED: "bounced",
    Verdict.DEFERRED: "waiting",
    Verdict.LOST: "nothing",
    Verdict.UNTOUCHED: "nothing",
    Verdict.SUPPRESSED: "suppressed",
    Verdict.INVALID: "invalid",
    Verdict.EXPIRED: "deferred",
    Verdict.UNSENT: "unsent/cancelled",
}


def simple(merged: Merged) -> list[str]:
    names = {
        ("unsent", "not_reached"): "nothing",
        ("unsent", "waiting"): "waiting",
        ("unsent", "cancelled"): "unsent/cancelled",
    }
    return [names.get((str(WORDS[w][0]), WORDS[w][1] or ""), str(WORDS[w][0])) for w in merged.word.tolist()]


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 10**9), size=st.integers(1, 30), stretch=st.sampled_from([1, 3, 1000]))
def test_the_merge_says_what_the_model_says(
    tmp_path_factory: pytest.TempPathFactory, seed: int, size: int, stretch: int
) -> None:
    rng = random.Random(seed)
    logs = [random_log(f"log-{n}", rng) for n in range(rng.randrange(1, 5))]
    folder = tmp_path_factory.mktemp("model")
    paths = [log.write(folder, batch=size, close=rng.random() < 0.7) for log in logs]
    rng.shuffle(paths)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scan, "_STRETCH", stretch)
        with merge(make_plan(ROWS), paths) as merged:
            words, duplicates = model(logs)
            assert simple(merged) == words
            assert {d.row: d.times for d in merged.duplicates} == duplicates
            assert int(merged.counts.sum()) == ROWS
            assert merged.damage == []


@pytest.mark.slow
@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 10**9))
def test_every_order_and_every_cut_into_spans_tells_the_same(
    tmp_path_factory: pytest.TempPathFactory, seed: int
) -> None:
    rng = random.Random(seed)
    logs = [random_log(f"log-{n}", rng) for n in range(4)]
    told = []
    for bits in (2, 20):
        folder = tmp_path_factory.mktemp("order")
        paths = [log.write(folder, name=f"{rng.randrange(10**6):06}-{log.header.log_id}") for log in logs]
        rng.shuffle(paths)
        with pytest.MonkeyPatch.context() as patch:
            for module in (spool, merged_module):
                patch.setattr(module, "SPAN_ROWS", 1 << bits)
            patch.setattr(spool, "SPAN_BITS", bits)
            with merge(make_plan(ROWS), paths) as merged:
                parts = [merged.resolved(first) for first, _ in merged.spans()]
                told.append(
                    [
                        np.concatenate([getattr(part, name) for part in parts]).tolist()
                        for name in ("word", "attempts", "first_at", "last_at", "code", "log")
                    ]
                    + [
                        [t for part in parts for t in part.texts().to_pylist()],
                        sorted(d.row for d in merged.duplicates),
                    ]
                )
    assert told[0] == told[1]


def merge_module() -> object:
    import sys

    return sys.modules["engine.results.merge"]


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 10**9), at=st.floats(0, 1), how=st.sampled_from(["cut", "flip", "zeros", "zero tail"]))
def test_any_damage_leaves_what_the_good_part_says(
    tmp_path_factory: pytest.TempPathFactory, seed: int, at: float, how: str
) -> None:
    rng = random.Random(seed)
    log, other = random_log("a", rng), random_log("b", rng)
    folder = tmp_path_factory.mktemp("damage")
    path, second = log.write(folder, batch=3), other.write(folder)
    raw = bytearray(path.read_bytes())
    place = int(at * (len(raw) - 1))
    if how == "cut":
        del raw[place:]
    elif how == "flip":
        raw[place] ^= 1 << rng.randrange(8)
    elif how == "zeros":
        raw[place : place + 64] = bytes(len(raw[place : place + 64]))
    else:
        raw[place:] = bytes(4096)
    path.write_bytes(raw)
    # What is left of the log by the format's own reader is what the merge must have read of it.
    whole = LogWriter("a")
    try:
        reader = Reader(raw_buffer(raw))
        whole.records = [tuple(r.values()) for batch in reader for r in batch.to_pylist()]
    except ValueError:
        pass
    with merge(make_plan(ROWS), [second, path]) as merged:
        assert simple(merged) == model([whole, other])[0]
        assert int(merged.counts.sum()) == ROWS


def raw_buffer(raw: bytearray) -> object:
    import pyarrow as pa

    return pa.py_buffer(bytes(raw))


@pytest.mark.slow
def test_many_processes_tell_what_one_tells(logs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(7)
    paths = [random_log(f"log-{n}", rng).write(logs) for n in range(3)]
    with merge(make_plan(ROWS), paths, processes=1) as one:
        alone = one.word.tolist()
    monkeypatch.setattr(merge_module(), "_WORTH_PROCESSES", 0)
    with merge(make_plan(ROWS), paths, processes=2) as two:
        assert two.word.tolist() == alone
        assert [log.log_id for log in two.logs] == ["log-0", "log-1", "log-2"]
