"""What a shared control store knows of attempts whose log may never return: its reports, and its open windows. Pure.

Record batches of these columns, in any order; `None` or 0 where the store does not know:

    log_id    string     the worker's log that the attempt was, or would have been, written to
    machine   string     the sender's name
    row       uint64
    first_at  timestamp[us, UTC]   when the attempt began
    at        timestamp[us, UTC]   when the word was reported, or the row joined the window
    attempt   uint16
    verdict   uint8      `formats.sendlog.Verdict`; IN_DOUBT for a row in a window that is still open
    reason    uint8      `formats.sendlog.Reason`
    code      uint16
    provider  string
    source    string

A definite verdict counts beside what the logs say; where a log tells the same attempt (same log id, row and attempt)
both are one. A doubt of a log that is here, whole, says nothing: the log itself tells which of the window's rows were
attempted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from engine.results.attempts import REPORTED, RESENT, TAKEN_AS_ACCEPTED, Attempts
from formats.sendlog import Verdict

SCHEMA = pa.schema(
    [
        pa.field("log_id", pa.string()),
        pa.field("machine", pa.string()),
        pa.field("row", pa.uint64()),
        pa.field("first_at", pa.timestamp("us", tz="UTC")),
        pa.field("at", pa.timestamp("us", tz="UTC")),
        pa.field("attempt", pa.uint16()),
        pa.field("verdict", pa.uint8()),
        pa.field("reason", pa.uint8()),
        pa.field("code", pa.uint16()),
        pa.field("provider", pa.string()),
        pa.field("source", pa.string()),
    ]
)


class Part(msgspec.Struct, frozen=True):
    """What the store knows of one log."""

    log_id: str
    machine: str
    attempts: Attempts


def reported(
    reports: Iterable[pa.RecordBatch],
    rows: int,
    whole_logs: set[str],
    decisions: Mapping[str, Mapping[int, str]],
    providers: dict[str, int],
    sources: dict[str, int],
) -> Iterator[Part]:
    """The reports log by log. Names get numbers in `providers` and `sources`; `decisions` are log id -> row -> what."""
    table = pa.Table.from_batches(list(reports), SCHEMA)
    known = np.asarray(table.column("row").fill_null(rows).to_numpy() < rows)
    table = table.filter(pa.array(known))
    log_ids = table.column("log_id").fill_null("").to_numpy()
    for log_id in sorted(set(log_ids.tolist())):
        mine = table.filter(pa.array(log_ids == log_id))
        if log_id in whole_logs:
            definite = mine.column("verdict").to_numpy() != Verdict.IN_DOUBT
            mine = mine.filter(pa.array(definite))
        if mine.num_rows:
            machine = mine.column("machine")[0].as_py() or log_id
            yield Part(log_id, machine, _attempts(mine, decisions.get(log_id, {}), providers, sources))


def _attempts(
    table: pa.Table, decisions: Mapping[int, str], providers: dict[str, int], sources: dict[str, int]
) -> Attempts:
    row = table.column("row").to_numpy()
    ended = _times(table, "at")
    started = _times(table, "first_at")
    verdict = _small(table, "verdict").copy()
    if decisions:
        for place in np.flatnonzero(verdict == Verdict.IN_DOUBT).tolist():
            if (what := decisions.get(int(row[place]))) is not None:
                verdict[place] = TAKEN_AS_ACCEPTED if what == "accept" else RESENT
    return Attempts(
        row=row,
        started=np.where(started > 0, started, ended),
        ended=ended,
        attempt=_small(table, "attempt"),
        verdict=verdict,
        reason=_small(table, "reason"),
        code=_small(table, "code"),
        provider=_numbered(table, "provider", providers),
        source=_numbered(table, "source", sources),
        flags=np.full(table.num_rows, REPORTED, np.uint8),
        text=pa.nulls(table.num_rows, pa.string()),
    )


def _times(table: pa.Table, name: str) -> Any:
    return table.column(name).cast(pa.int64()).fill_null(0).to_numpy()


def _small(table: pa.Table, name: str) -> Any:
    return table.column(name).fill_null(0).to_numpy()


def _numbered(table: pa.Table, name: str, numbers: dict[str, int]) -> Any:
    texts = table.column(name).to_pylist()
    return np.array([0 if t is None else numbers.setdefault(t, len(numbers) + 1) for t in texts], np.uint16)
