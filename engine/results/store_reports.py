"""The windows of a shared store as `results.reports` wants them, and the operator's words on them.

A log that never returns is told by this alone: the verdicts that were reported, and doubt for rows whose window is
still open. Replies' texts, providers and exact times are lost with the log.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any
from uuid import UUID

import msgspec
import numpy as np
import pyarrow as pa

from engine.control.entries import DETAIL, OPEN, details_of, log_of
from engine.control.store import Decision as StoreDecision
from engine.control.store import Entry, Incarnation, SharedStore
from engine.results.merge import Decision
from engine.results.reports import SCHEMA
from formats.plan import Plan
from formats.sendlog import Verdict

_WINDOWS = 2000  # entries made into one record batch


class StoreSays(msgspec.Struct, frozen=True):
    """Everything that merging wants of a shared store."""

    reports: list[pa.RecordBatch]
    decisions: list[Decision]


def read_store(store: SharedStore, plan: Plan) -> StoreSays:
    """All reports of the campaign."""
    senders = {incarnation.id: incarnation for incarnation in store.incarnations()}
    told = store.decisions()
    decided = {(decision.log_id, decision.serial) for decision in told}
    undecided: set[tuple[str, int]] = set()
    batches, some = [], []
    for entry in store.all_entries():
        first_row = plan.batches[entry.batch].first_row
        rows = np.frombuffer(entry.rows, "<u4").astype(np.int64) + first_row
        for place, verdict in enumerate(entry.verdicts):
            if verdict in (OPEN, Verdict.IN_DOUBT) and (str(entry.window), place) not in decided:
                undecided.add((log_of(entry.window), int(rows[place])))
        some.append((entry, rows))
        if len(some) == _WINDOWS:
            batches.append(_batch(some, senders))
            some = []
    if some:
        batches.append(_batch(some, senders))
    return StoreSays(batches, list(_decisions(told, undecided)))


def _decisions(told: Iterable[StoreDecision], undecided: set[tuple[str, int]]) -> Iterator[Decision]:
    """By log and row; a row that is in doubt once more in the same log stays in doubt."""
    for decision in told:
        try:
            log_id = log_of(UUID(decision.log_id))
        except ValueError:
            continue
        if (log_id, decision.row) not in undecided:
            yield Decision(log_id, 0, decision.row, decision.what, decision.who, decision.at_us)


def _batch(windows: list[tuple[Entry, Any]], senders: dict[str, Incarnation]) -> pa.RecordBatch:
    logs: list[str] = []
    machines: list[str | None] = []
    at: list[int] = []
    counts = []
    details = []
    start = 0
    for entry, rows in windows:
        log_id = log_of(entry.window)
        sender = senders.get(log_id.partition("-")[0])
        logs.append(log_id)
        machines.append(sender.sender if sender else None)
        at.append(entry.at_us)
        counts.append(len(rows))
        details += [(start + place, record) for place, record in details_of(entry).items()] if entry.details else []
        start += len(rows)
    verdict = np.frombuffer(b"".join(entry.verdicts for entry, _ in windows), np.uint8).copy()
    verdict[verdict == OPEN] = Verdict.IN_DOUBT
    attempt = np.ones(start, np.uint16)
    attempt[np.isin(verdict, (Verdict.INVALID, Verdict.SUPPRESSED, Verdict.UNTOUCHED, Verdict.IN_DOUBT))] = 0
    reason, code, first = np.zeros(start, np.uint8), np.zeros(start, np.uint16), np.zeros(start, np.int64)
    if details:
        where = np.array([place for place, _ in details])
        records = np.array([record for _, record in details], DETAIL)
        attempt[where], reason[where], code[where] = records["attempt"], records["reason"], records["code"]
        first[where] = records["first_us"]
    when = np.repeat(np.array(at, np.int64), counts)
    numbers = np.repeat(np.arange(len(windows)), counts)
    nothing = pa.nulls(start, pa.string())
    columns = [
        pa.array(logs, pa.string()).take(pa.array(numbers)),
        pa.array(machines, pa.string()).take(pa.array(numbers)),
        pa.array(np.concatenate([rows for _, rows in windows]).astype(np.uint64)),
        pa.array(np.where(first > 0, first, when)).cast(pa.timestamp("us", tz="UTC")),
        pa.array(when).cast(pa.timestamp("us", tz="UTC")),
        pa.array(attempt),
        pa.array(verdict),
        pa.array(reason),
        pa.array(code),
        nothing,
        nothing,
    ]
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)
