"""One log's records joined into attempts: an intent and what came out of it. Pure over Arrow batches.

PROTOCOL "Merging": intents and results are paired by (log id, intent serial), never by time or by row. An intent
without a result is in doubt, and so is one whose only result says so; any definite result resolves it, however late it
comes. Serials rise within a log and a result stands behind its intent, so what is unanswered at any moment is small:
a log of any length passes through in flat memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from formats.sendlog import NAME_PROVIDER, NAME_SOURCE, Kind, Reason, Verdict

Numbers = npt.NDArray[Any]

# Words beside the log's verdicts: what an operator said of an intent in doubt.
RESENT = 20  # cancelled by `resend`: the row is due again
TAKEN_AS_ACCEPTED = 21  # by `accept`

# Flags of an attempt.
ORDERED = 1  # it follows an operator's `resend`
REPEATED = 2  # another word on an attempt that had one already: never a second attempt, so never a duplicate
REPORTED = 4  # known from the control store alone

SCHEMA = pa.schema(
    [
        pa.field("row", pa.uint32()),  # within its span of rows
        pa.field("started", pa.int64()),
        pa.field("ended", pa.int64()),
        pa.field("attempt", pa.uint16()),
        pa.field("verdict", pa.uint8()),  # `Verdict`, or RESENT, TAKEN_AS_ACCEPTED
        pa.field("reason", pa.uint8()),
        pa.field("code", pa.uint16()),
        pa.field("provider", pa.uint16()),  # numbers of this log's names
        pa.field("source", pa.uint16()),
        pa.field("flags", pa.uint8()),
        pa.field("text", pa.string()),
    ]
)


class Attempts:
    """Columns of attempts of one log. `row` is the list's row number here."""

    __slots__ = (
        "attempt",
        "code",
        "ended",
        "flags",
        "provider",
        "reason",
        "row",
        "source",
        "started",
        "text",
        "verdict",
    )

    def __init__(self, **columns: Any) -> None:
        self.row: Numbers = columns["row"]
        self.started: Numbers = columns["started"]
        self.ended: Numbers = columns["ended"]
        self.attempt: Numbers = columns["attempt"]
        self.verdict: Numbers = columns["verdict"]
        self.reason: Numbers = columns["reason"]
        self.code: Numbers = columns["code"]
        self.provider: Numbers = columns["provider"]
        self.source: Numbers = columns["source"]
        self.flags: Numbers = columns["flags"]
        self.text: pa.Array = columns["text"]

    def __len__(self) -> int:
        return len(self.row)

    def take(self, places: Numbers) -> Attempts:
        """Those at `places`, or where a mask is true."""
        columns = {name: getattr(self, name)[places] for name in self.__slots__ if name != "text"}
        chosen = pa.array(places)
        text = self.text.filter(chosen) if places.dtype == np.bool_ else self.text.take(chosen)
        return Attempts(text=text, **columns)


class Event:
    """An event beside the results: a throttle that eased, a provider that was suspended."""

    __slots__ = ("at_us", "provider", "source", "text")

    def __init__(self, at_us: int, provider: int, source: int, text: str) -> None:
        self.at_us, self.provider, self.source, self.text = at_us, provider, source, text


_WANTED = ("kind", "serial", "row", "at", "attempt", "verdict", "reason", "code", "provider", "source")
_KEPT = (*_WANTED, "text")


class Pairing:
    """Takes in one log stretch by stretch; gives attempts as they are answered, and at the end what is in doubt.

    Intents that a stretch does not answer are put in front of the next one, as records. So everything else is asked of
    a stretch as a whole, by place, and only the columns of results are ever copied.
    """

    def __init__(
        self,
        decisions: Mapping[int, str] | None = None,
        row_decisions: Mapping[int, str] | None = None,
        *,
        span_bits: int = 63,
    ) -> None:
        """`decisions`: intent serial -> "resend" or "accept"; `row_decisions` the same by row.

        Attempts come grouped by spans of 2^`span_bits` rows, in the order of the log within each.
        """
        self._decisions = decisions or {}
        self._row_decisions = row_decisions or {}
        self._span_bits = np.uint64(span_bits)
        self._carried: pa.Table | None = None  # intents without a definite result so far
        self._doubts: dict[int, tuple[int, str | None]] = {}  # serial -> when the doubt was noted, and its text
        self.names: dict[int, dict[int, str]] = {NAME_PROVIDER: {}, NAME_SOURCE: {}}
        self.events: list[Event] = []
        self.intents = 0
        self.results = 0
        self.mismatched = 0  # results that name another row than their intent

    def add(self, batches: Sequence[pa.RecordBatch]) -> Attempts | None:
        """The attempts that this stretch of the log answers, or None."""
        table, carried = pa.Table.from_batches(batches).select(_KEPT), 0
        if self._carried is not None:
            carried = self._carried.num_rows
            table = pa.concat_tables([self._carried, table])
        table = table.combine_chunks()
        column = {name: _numbers(table, name) for name in _WANTED}
        kind = column["kind"]
        if len(kind) and kind.max() > Kind.RESULT:
            self._add_words(table, kind)
        # Places, not masks: taking by index is several times quicker where half of the records are wanted.
        intents, results = np.flatnonzero(kind == Kind.INTENT), np.flatnonzero(kind == Kind.RESULT)
        self.intents += len(intents) - carried
        self.results += len(results)
        serial = column["serial"].take(intents)
        if len(serial) > 1 and not (serial[1:] > serial[:-1]).all():
            order = np.argsort(serial, kind="stable")
            intents, serial = intents[order], serial[order]
        if not len(results):
            self._carried = table.take(pa.array(np.sort(intents))) if len(intents) else None
            return None
        results = self._grouped(results, column["row"])
        found, answered = self._answer(table, column, intents, serial, results)
        left = np.flatnonzero(~answered)
        self._carried = table.take(pa.array(np.sort(intents[left]))) if len(left) else None
        return found

    def _grouped(self, results: Numbers, row: Numbers) -> Numbers:
        span = row.take(results) >> self._span_bits
        low, high = int(span.min()), int(span.max())
        if low == high or not (span[1:] < span[:-1]).any():
            return results
        # Sixteen bits are sorted by counting.
        narrow = (span - np.uint64(low)).astype(np.uint16) if high - low < 65_536 else span
        grouped: Numbers = results.take(np.argsort(narrow, kind="stable"))
        return grouped

    def _answer(
        self, table: pa.Table, column: dict[str, Numbers], intents: Numbers, rising: Numbers, results: Numbers
    ) -> tuple[Attempts, Numbers]:
        """The attempts, and which of the intents have a definite result now."""
        told = {name: column[name].take(results) for name in _WANTED[1:]}
        serial, ended = told["serial"], told["at"]
        flags = np.zeros(len(results), np.uint8)
        text = _text(table).take(pa.array(results))
        answered = np.zeros(len(intents), bool)
        definite = told["verdict"] != Verdict.IN_DOUBT
        started = ended
        known: Numbers = np.zeros(len(results), bool)
        if len(intents):
            place = _places(rising, serial)
            known = place >= 0
            where = intents.take(place, mode="clip")
            started = column["at"].take(where)
            wrong = column["row"].take(where) != told["row"]
            if not known.all():
                started = np.where(known, started, ended)
                wrong &= known
            self.mismatched += int(np.count_nonzero(wrong))
            if (column["reason"] == Reason.RESENT).any():
                flags[known & (column["reason"].take(where) == Reason.RESENT)] |= ORDERED
            answers = known & definite
            of = place if answers.all() else place[answers]
            answered[of] = True
            if np.count_nonzero(answered) < len(of):
                _, first = np.unique(np.where(answers, serial, 0), return_index=True)
                again = answers.copy()
                again[first] = False
                flags[again] |= REPEATED
        # What has a serial that nothing waits for was answered before: the same attempt once more.
        flags[~known & (serial > 0)] |= REPEATED
        for at in np.flatnonzero(known & ~definite).tolist():
            words, before = text[at].as_py(), self._doubts.get(int(serial[at]))
            self._doubts[int(serial[at])] = (int(ended[at]), words if words is not None or not before else before[1])
        attempts = Attempts(started=started, ended=ended, flags=flags, text=text, **told)
        # A doubt on an attempt that has its answer says nothing; without a serial it stands for itself.
        keep = definite | (serial == 0)
        return (attempts if keep.all() else attempts.take(keep)), answered

    def end(self) -> Attempts | None:
        """What has no definite result: in doubt, or what an operator decided of it."""
        if self._carried is None:
            return None
        column = {name: _numbers(self._carried, name) for name in _WANTED}
        count = len(column["serial"])
        verdict = np.full(count, Verdict.IN_DOUBT, np.uint8)
        ended = column["at"].copy()
        texts: list[str | None] = [None] * count
        if self._decisions or self._row_decisions or self._doubts:
            pairs = zip(column["serial"].tolist(), column["row"].tolist(), strict=True)
            for place, (serial, row) in enumerate(pairs):
                what = self._decisions.get(serial) or self._row_decisions.get(row)
                if what is not None:
                    verdict[place] = TAKEN_AS_ACCEPTED if what == "accept" else RESENT
                if (noted := self._doubts.get(serial)) is not None:
                    ended[place], texts[place] = noted
        return Attempts(
            row=column["row"],
            started=column["at"],
            ended=ended,
            attempt=column["attempt"],
            verdict=verdict,
            reason=np.zeros(count, np.uint8),
            code=np.zeros(count, np.uint16),
            provider=column["provider"],
            source=column["source"],
            flags=np.where(column["reason"] == Reason.RESENT, ORDERED, 0).astype(np.uint8),
            text=pa.array(texts, pa.string()),
        )

    def _add_words(self, table: pa.Table, kind: Numbers) -> None:
        chosen = table.filter(pa.array(kind > Kind.RESULT)).select(
            ["kind", "row", "at", "reason", "provider", "source", "text"]
        )
        # Times as numbers: one from a broken clock may lie beyond what a datetime holds.
        for record in chosen.set_column(2, "at", chosen.column("at").cast(pa.int64())).to_pylist():
            text = record["text"] or ""
            if record["kind"] == Kind.NAME:
                self.names.setdefault(record["reason"], {})[record["row"]] = text
            elif record["kind"] == Kind.EVENT:
                self.events.append(Event(record["at"] or 0, record["provider"], record["source"], text))


def _places(rising: Numbers, wanted: Numbers) -> Numbers:
    """The place in `rising` of each wanted number, -1 where it is not there."""
    first, reach = int(rising[0]), int(rising[-1]) - int(rising[0]) + 1
    if reach > 16 * (len(rising) + len(wanted)):
        place = np.searchsorted(rising, wanted)
        place[place == len(rising)] = 0
        return np.where(rising[place] == wanted, place, -1)
    # Serials are all but dense, so a table answers at a third of a search's price.
    table = np.full(reach + 1, -1, np.int32)
    table[(rising - rising[0]).view(np.int64)] = np.arange(len(rising), dtype=np.int32)
    # What is below the first wraps around to a number beyond the last: both are asked at the table's empty end.
    offset = wanted - np.uint64(first)
    np.minimum(offset, np.uint64(reach), out=offset)
    return table.take(offset.view(np.int64))


def _numbers(table: pa.Table, name: str) -> Numbers:
    column = table.column(name)
    if name == "at":
        column = column.cast(pa.int64())
    return np.asarray(column.to_numpy())


def _text(table: pa.Table) -> pa.Array:
    column = table.column("text")
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
