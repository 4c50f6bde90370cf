"""What a merge came to: the last word on every row, and what happened on the way.

`Merged` holds a byte per row; the details of a span of rows are put together when they are asked for.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import msgspec
import numpy.typing as npt

from engine.errors import Exit, worst
from engine.results.feedback import Feedback
from engine.results.resolve import NOT_REACHED, WAITING, Duplicate, Resolved, resolve
from engine.results.spool import SPAN_ROWS, Spool
from engine.results.tally import Tally
from formats.outcomes import WORDS, Outcome
from formats.plan import Plan

Numbers = npt.NDArray[Any]


class Decided(Protocol):
    """An operator's word on one intent in doubt; `Decision`, or the control store's own."""

    @property
    def log_id(self) -> str: ...
    @property
    def serial(self) -> int: ...
    @property
    def row(self) -> int: ...
    @property
    def what(self) -> str: ...


class Decision(msgspec.Struct, frozen=True):
    """An operator's word on one intent in doubt. `serial` 0: on whatever is in doubt for `row` in that log."""

    log_id: str
    serial: int
    row: int
    what: str  # "resend" or "accept"
    who: str
    at_us: int


class Damage(msgspec.Struct, frozen=True):
    """Something that a file which should be whole has lost, or a file that does not belong here."""

    path: str
    problem: str
    log_id: str | None = None


class LogSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One log that was merged."""

    log_id: str
    path: str
    machine: str
    worker: int
    records: int
    in_doubt: int
    is_closed: bool
    torn: int
    bytes: int
    first_us: int
    last_us: int


class PartitionSummary(msgspec.Struct, frozen=True):
    """A partition's rows, and how many of them no log names."""

    number: int
    first_row: int
    rows: int
    not_reached: int


class Reply(msgspec.Struct, frozen=True):
    """A kind of reply that was no yes: how often, and one as it was received."""

    provider: str | None
    verdict: int
    code: int
    words: str
    count: int
    example: str


class Event(msgspec.Struct, frozen=True):
    """Something the engine noted beside its results."""

    at_us: int
    provider: str | None
    source: str | None
    machine: str
    text: str


class Merged(msgspec.Struct, kw_only=True):
    """What the logs prove. `word[row]` is the row's last word, a place in `formats.outcomes.WORDS`."""

    plan: Plan
    word: Numbers
    counts: Numbers  # rows per word
    provider_counts: Numbers  # [provider, word], provider 0 is "none"
    providers: list[str | None]
    sources: list[str | None]
    machines: list[str]  # by number of log
    logs: list[LogSummary]
    damage: list[Damage]
    notes: list[str]
    duplicates: list[Duplicate]
    partitions: list[PartitionSummary]
    tally: Tally
    replies: list[Reply]
    events: list[Event]
    feedback: Feedback
    store_missing: bool = False  # the plan used a shared store and it was not asked: unsent rows are unknown
    # The campaign has expired or was cancelled: no row of it is open any more, and this is the word of those that were.
    open_word: int | None = None
    _spool: Spool
    _provider_maps: list[Numbers]
    _source_maps: list[Numbers]
    _same_log: Numbers
    _resent: frozenset[int]
    _scratch: Any

    @property
    def rows(self) -> int:
        return self.plan.rows

    @property
    def outcomes(self) -> dict[Outcome, int]:
        """Rows per outcome, all seven of them."""
        found = dict.fromkeys(Outcome, 0)
        for (outcome, _), count in zip(WORDS, self.counts.tolist(), strict=True):
            found[outcome] += count
        return found

    @property
    def reasons(self) -> dict[str, int]:
        """Rows per `outcome/reason`, where there are any."""
        return {
            f"{outcome}/{reason}": count
            for (outcome, reason), count in zip(WORDS, self.counts.tolist(), strict=True)
            if reason is not None and count
        }

    @property
    def adds_up(self) -> bool:
        """Whether the seven outcomes sum to the rows of the plan."""
        return sum(self.outcomes.values()) == self.plan.rows and not self.gaps()

    def gaps(self) -> list[str]:
        """Where the plan itself does not add up: files, batches and rows must tell the same number."""
        told = {
            "the files": sum(file.rows for file in self.plan.files),
            "the batches": sum(batch.rows for batch in self.plan.batches),
        }
        return [
            f"{who} of the plan have {n} rows, the plan {self.plan.rows}"
            for who, n in told.items()
            if n != self.plan.rows
        ]

    @property
    def exit_code(self) -> Exit:
        """The worst that is so."""
        codes = [Exit.DONE]
        outcomes = self.outcomes
        if not self.adds_up:
            codes.append(Exit.BUG)
        if self.duplicates:
            codes.append(Exit.DUPLICATES)
        if self.damage or self.store_missing:
            codes.append(Exit.LOG_DAMAGED)
        if outcomes[Outcome.IN_DOUBT]:
            codes.append(Exit.IN_DOUBT)
        if self.counts[NOT_REACHED] or self.counts[WAITING]:
            codes.append(Exit.ROWS_OPEN)
        return worst(*codes)

    def spans(self) -> Iterator[tuple[int, int]]:
        """(first row, rows) of each span, in order."""
        for first in range(0, self.plan.rows, SPAN_ROWS):
            yield first, min(SPAN_ROWS, self.plan.rows - first)

    def resolved(self, first_row: int, *, words_only: bool = False) -> Resolved:
        """The details of the span that begins at `first_row`. May be called from several threads."""
        rows = min(SPAN_ROWS, self.plan.rows - first_row)
        pieces = self._spool.read(first_row // SPAN_ROWS)
        found = resolve(
            first_row,
            rows,
            pieces,
            self._provider_maps,
            self._source_maps,
            self._same_log,
            self._resent,
            words_only=words_only,
        )
        if self.open_word is not None:
            found.word[(found.word == NOT_REACHED) | (found.word == WAITING)] = self.open_word
        self.feedback.apply(found)
        return found

    def close(self) -> None:
        """Remove the scratch files. `resolved` cannot be asked afterwards."""
        self._scratch.cleanup()

    def __enter__(self) -> Merged:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
