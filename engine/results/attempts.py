"""One log's records joined into attempts: an intent and what came out of it. Pure over Arrow batches.

PROTOCOL "Merging": intents and results are paired by (log id, intent serial), never by time or by row. An intent
without a result is in doubt, and so is one whose only result says so; any definite result resolves it, however late it
comes. Serials rise within a log and a result stands behind its intent, so what is unanswered at any moment is small:
a log of any length passes through in flat memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

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


_PENDING = ("serial", "row", "started", "ended", "attempt", "provider", "source", "ordered")
_WANTED = ("kind", "serial", "row", "at", "attempt", "verdict", "reason", "code", "provider", "source")


class Pairing:
    """Takes in one log batch by batch; gives attempts as they are answered, and at the end what is in doubt."""

    def __init__(
        self, decisions: Mapping[int, str] | None = None, row_decisions: Mapping[int, str] | None = None
    ) -> None:
        """`decisions`: intent serial -> "resend" or "accept"; `row_decisions` the same by row."""
        self._decisions = decisions or {}
        self._row_decisions = row_decisions or {}
        self._pending: dict[str, Numbers] = {name: np.zeros(0, np.int64) for name in _PENDING}
        self._pending["serial"] = np.zeros(0, np.uint64)
        self._pending["row"] = np.zeros(0, np.uint64)
        self._doubt_texts: dict[int, str] = {}
        self.names: dict[int, dict[int, str]] = {NAME_PROVIDER: {}, NAME_SOURCE: {}}
        self.events: list[Event] = []
        self.intents = 0
        self.results = 0
        self.mismatched = 0  # results that name another row than their intent

    def add(self, table: pa.RecordBatch | pa.Table) -> Attempts | None:
        """The attempts that this stretch of the log answers, or None."""
        column = {name: _numbers(table, name) for name in _WANTED}
        kind = column["kind"]
        is_intent, is_result = kind == Kind.INTENT, kind == Kind.RESULT
        if (kind > Kind.RESULT).any():
            self._add_words(table, kind)
        self._expect(column, is_intent)
        if not is_result.any():
            return None
        # Places, not masks: taking by index is several times quicker where half of the records are wanted.
        places = np.flatnonzero(is_result)
        result = {name: values.take(places) for name, values in column.items() if name != "kind"}
        self.results += len(result["row"])
        text = _text(table).take(pa.array(places))
        return self._answer(result, text)

    def _expect(self, column: dict[str, Numbers], is_intent: Numbers) -> None:
        places = np.flatnonzero(is_intent)
        fresh = {name: column[name].take(places) for name in ("serial", "row", "attempt", "provider", "source")}
        fresh["started"] = fresh["ended"] = column["at"].take(places)
        fresh["ordered"] = column["reason"].take(places) == Reason.RESENT
        count = len(fresh["serial"])
        if not count:
            return
        self.intents += count
        if len(self._pending["serial"]):
            self._pending = {name: np.concatenate((self._pending[name], fresh[name])) for name in _PENDING}
        else:
            self._pending = fresh
        serial = self._pending["serial"]
        if count > 1 and not (serial[1:] > serial[:-1]).all():
            order = np.argsort(serial, kind="stable")
            self._pending = {name: values[order] for name, values in self._pending.items()}

    def _answer(self, result: dict[str, Numbers], text: pa.Array) -> Attempts:
        pending, serial = self._pending, result["serial"]
        count = len(pending["serial"])
        flags = np.zeros(len(serial), np.uint8)
        started = result["at"]
        definite = result["verdict"] != Verdict.IN_DOUBT
        if count:
            place, known = _places(pending["serial"], serial)
        else:
            place, known = np.zeros(len(serial), np.int64), np.zeros(len(serial), bool)
        if count:
            started = np.where(known, pending["started"][place], started)
            wrong = known & (pending["row"][place] != result["row"])
            self.mismatched += int(wrong.sum())
            flags[known & (pending["ordered"][place] != 0)] |= ORDERED
        answers = known & definite
        # What has a serial that nothing waits for was answered before: the same attempt once more.
        flags[~known & (serial > 0)] |= REPEATED
        answered = np.bincount(place[answers], minlength=count) if count else np.zeros(0, np.int64)
        if (answered > 1).any():
            _, first = np.unique(np.where(answers, serial, 0), return_index=True)
            again = answers.copy()
            again[first] = False
            flags[again] |= REPEATED
        doubtful = known & ~definite
        if doubtful.any():
            for at in np.flatnonzero(doubtful).tolist():
                pending["ended"] = pending["ended"].copy()
                pending["ended"][place[at]] = result["at"][at]
                if (words := text[at].as_py()) is not None:
                    self._doubt_texts[int(serial[at])] = words
        if count:
            left = np.flatnonzero(answered == 0)
            self._pending = {name: values.take(left) for name, values in pending.items()}
        # A doubt on an attempt that has its answer says nothing; without a serial it stands for itself.
        keep = definite | (serial == 0)
        found = Attempts(
            row=result["row"],
            started=started,
            ended=result["at"],
            attempt=result["attempt"],
            verdict=result["verdict"],
            reason=result["reason"],
            code=result["code"],
            provider=result["provider"],
            source=result["source"],
            flags=flags,
            text=text,
        )
        return found if keep.all() else found.take(keep)

    def end(self) -> Attempts | None:
        """What has no definite result: in doubt, or what an operator decided of it."""
        pending = self._pending
        count = len(pending["serial"])
        if not count:
            return None
        verdict = np.full(count, Verdict.IN_DOUBT, np.uint8)
        if self._decisions or self._row_decisions:
            for place, (serial, row) in enumerate(
                zip(pending["serial"].tolist(), pending["row"].tolist(), strict=True)
            ):
                what = self._decisions.get(serial) or self._row_decisions.get(row)
                if what is not None:
                    verdict[place] = TAKEN_AS_ACCEPTED if what == "accept" else RESENT
        texts = [self._doubt_texts.get(serial) for serial in pending["serial"].tolist()]
        return Attempts(
            row=pending["row"],
            started=pending["started"],
            ended=pending["ended"],
            attempt=pending["attempt"],
            verdict=verdict,
            reason=np.zeros(count, np.uint8),
            code=np.zeros(count, np.uint16),
            provider=pending["provider"],
            source=pending["source"],
            flags=np.where(pending["ordered"] != 0, ORDERED, 0).astype(np.uint8),
            text=pa.array(texts, pa.string()),
        )

    def doubts(self) -> Iterator[tuple[int, int]]:
        """(serial, row) of what is unanswered so far."""
        yield from zip(self._pending["serial"].tolist(), self._pending["row"].tolist(), strict=True)

    def _add_words(self, table: pa.RecordBatch | pa.Table, kind: Numbers) -> None:
        chosen = table.filter(pa.array(kind > Kind.RESULT))
        for record in chosen.select(["kind", "row", "at", "reason", "provider", "source", "text"]).to_pylist():
            text = record["text"] or ""
            if record["kind"] == Kind.NAME:
                self.names.setdefault(record["reason"], {})[record["row"]] = text
            elif record["kind"] == Kind.EVENT:
                at_us = int(record["at"].timestamp() * 1_000_000) if record["at"] else 0
                self.events.append(Event(at_us, record["provider"], record["source"], text))


def _places(rising: Numbers, wanted: Numbers) -> tuple[Numbers, Numbers]:
    """(place in `rising` of each wanted number, 0 where it is not there; whether it is there)."""
    first, reach = int(rising[0]), int(rising[-1]) - int(rising[0]) + 1
    if reach > 16 * (len(rising) + len(wanted)):
        place = np.searchsorted(rising, wanted)
        place[place == len(rising)] = 0
        return place, rising[place] == wanted
    # Serials are all but dense, so a table answers at a third of a search's price.
    table = np.full(reach + 1, -1, np.int32)
    table[(rising - rising[0]).view(np.int64)] = np.arange(len(rising), dtype=np.int32)
    # What is below the first wraps around to a number beyond the last: both are asked at the table's empty end.
    offset = np.minimum(wanted - np.uint64(first), np.uint64(reach)).view(np.int64)
    found = table[offset]
    known = found >= 0
    return np.where(known, found, 0).astype(np.int64), known


def _numbers(table: pa.RecordBatch | pa.Table, name: str) -> Numbers:
    column = table.column(name)
    if name == "at":
        column = column.cast(pa.int64())
    return np.asarray(column.to_numpy())


def _text(table: pa.RecordBatch | pa.Table) -> pa.Array:
    column = table.column("text")
    return pc.cast(column, pa.string()) if isinstance(column, pa.Array) else column.combine_chunks()
