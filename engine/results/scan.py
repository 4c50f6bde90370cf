"""One log from bytes to scratch: verified, paired, counted, scattered over spans of rows. Runs in its own process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa

from engine.results.attempts import REPEATED, Attempts, Event, Pairing
from engine.results.resolve import COUNTED
from engine.results.spool import SPAN_BITS, Piece, SpoolWriter
from engine.results.tally import Replies, Tally, merged, tally
from formats.sendlog import NAME_PROVIDER, NAME_SOURCE, Header, LogDamaged, Reader

# Small batches (64 to 1,024 records) are read together: numpy costs some 20 µs a call however few the records are.
# More than this leaves the processor's cache: four times as many cost a sixth more.
_STRETCH = 65_536
_MOST_EVENTS = 20_000


class ScanTask(msgspec.Struct, frozen=True):
    """What to read, as which log, and what operators decided of it."""

    path: str
    log: int
    rows: int
    scratch: str
    decisions: dict[int, str] = {}
    row_decisions: dict[int, str] = {}


class Scanned(msgspec.Struct):
    """What a log held."""

    log: int
    path: str
    header: Header
    is_closed: bool
    damage: str | None
    torn: int
    length: int
    seal: str
    intents: int
    results: int
    in_doubt: int
    mismatched: int
    beyond: int  # records that name a row the plan does not have
    first_us: int
    last_us: int
    providers: dict[int, str]
    sources: dict[int, str]
    most_provider: int
    most_source: int
    pieces: list[Piece]
    tally: Tally
    replies: list[tuple[tuple[int, int, int, str], int, str]]
    events: list[tuple[int, int, int, str]]
    events_dropped: int


def open_log(path: str) -> Reader:
    """The log's reader; raises LogDamaged also for what cannot be opened at all."""
    try:
        with pa.memory_map(path) as file:
            return Reader(file.read_buffer())
    except (OSError, pa.ArrowException, ValueError) as problem:
        if isinstance(problem, LogDamaged):
            raise
        raise LogDamaged(str(problem)) from None


def stretches(reader: Reader) -> Iterator[list[pa.RecordBatch]]:
    """The log's batches, as many together as are worth a numpy call."""
    gathered: list[pa.RecordBatch] = []
    records = 0
    for batch in reader:
        gathered.append(batch)
        records += batch.num_rows
        if records >= _STRETCH:
            yield gathered
            gathered, records = [], 0
    if gathered:
        yield gathered


def scan(task: ScanTask) -> Scanned:
    """Read the log once, whole as far as its seals hold. Raises LogDamaged where it has no readable header."""
    reader = open_log(task.path)
    pairing = Pairing(task.decisions, task.row_decisions, span_bits=SPAN_BITS)
    spool = SpoolWriter(Path(task.scratch), task.log)
    gathering = _Gathering(task.rows, spool)
    try:
        for batches in stretches(reader):
            if (found := pairing.add(batches)) is not None:
                gathering.take(found)
        unanswered = pairing.end()
        if unanswered is not None:
            gathering.take(unanswered)
    finally:
        spool.close()
    log = reader.log
    events: list[Event] = pairing.events
    return Scanned(
        log=task.log,
        path=task.path,
        header=log.header,
        is_closed=log.is_closed,
        damage=log.damage,
        torn=log.torn,
        length=log.length,
        seal=log.seal,
        intents=pairing.intents,
        results=pairing.results,
        in_doubt=0 if unanswered is None else len(unanswered),
        mismatched=pairing.mismatched,
        beyond=gathering.beyond,
        first_us=gathering.first_us,
        last_us=gathering.last_us,
        providers=pairing.names[NAME_PROVIDER],
        sources=pairing.names[NAME_SOURCE],
        most_provider=gathering.most_provider,
        most_source=gathering.most_source,
        pieces=spool.pieces,
        tally=merged(gathering.tallies),
        replies=[(name, count, gathering.replies.examples[name]) for name, count in gathering.replies.counts.items()],
        events=[(event.at_us, event.provider, event.source, event.text) for event in events[:_MOST_EVENTS]],
        events_dropped=max(0, len(events) - _MOST_EVENTS),
    )


class _Gathering:
    """What is added up while a log's attempts pass."""

    def __init__(self, rows: int, spool: SpoolWriter) -> None:
        self._rows = rows
        self._spool = spool
        self.beyond = 0
        self.first_us, self.last_us = 0, 0
        self.most_provider = self.most_source = 0
        self.tallies: list[Tally] = []
        self.replies = Replies()

    def take(self, attempts: Attempts) -> None:
        known = attempts.row < self._rows
        if not known.all():
            self.beyond += int((~known).sum())
            attempts = attempts.take(known)
        if not len(attempts):
            return
        first, last = int(attempts.started.min()), int(attempts.ended.max())
        self.first_us = min(self.first_us, first) if self.first_us else first
        self.last_us = max(self.last_us, last)
        self.most_provider = max(self.most_provider, int(attempts.provider.max()))
        self.most_source = max(self.most_source, int(attempts.source.max()))
        made = COUNTED.take(attempts.verdict) & (attempts.flags & REPEATED == 0)
        self.tallies.append(tally(attempts, None if made.all() else np.flatnonzero(made)))
        if len(self.tallies) > 64:
            self.tallies = [merged(self.tallies)]
        self.replies.add(attempts)
        self._spool.add(attempts)


def verified_length(path: str) -> tuple[int, str, dict[int, str]]:
    """(length, seal, {length: seal} of every batch) of a log's whole prefix; used where a log was found twice."""
    reader = open_log(path)
    seals: dict[int, str] = {}
    for _ in reader:
        seals[reader.log.length] = reader.log.seal
    seals[reader.log.length] = reader.log.seal
    return reader.log.length, reader.log.seal, seals


def names(numbered: dict[int, str], most: int, number_of: dict[str, int]) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    """A log's numbers to the merge's, an array; numbers that no record names are "none"."""
    mapped = np.zeros(max([most, *numbered]) + 1, np.int32)
    for number, name in numbered.items():
        mapped[number] = number_of.setdefault(name, len(number_of) + 1)
    return mapped
