"""The files with a line per recipient: `recipients.parquet`, `undeliverable.parquet`, `suppress.parquet`.

One thread or two put the columns of a span together while another encodes the one before: numpy and pyarrow let go of
the interpreter where it takes long. Rows come in the order of the list, each exactly once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from engine.results.domains import Coded, Domains, code_column, code_domains
from engine.results.listrows import ListRows
from engine.results.merged import Merged
from engine.results.resolve import Resolved
from formats import outcomes
from formats.address import AddressError, canonical, parse_mailbox
from formats.outcomes import WORDS, Outcome

Numbers = npt.NDArray[Any]
_T = TypeVar("_T")
_R = TypeVar("_R")

_GROUP_ROWS = 131_072
_ENHANCED = r"^(?P<status>[245]\.[0-9]{1,3}\.[0-9]{1,3})(?:\s|$)"
_ENHANCED_BYTES = 13  # the longest, 5.123.123, and the blank behind it, with room

_PLAIN_ADDRESS = r"^[A-Za-z0-9_+-]+(\.[A-Za-z0-9_+-]+)*@([A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?\.)+[A-Za-z]{2,63}$"

# Columns that `undeliverable.parquet` has beside the list's own.
LAST = ("last_outcome", "last_reason", "last_code", "last_reply")

_OUTCOME_OF = np.array([list(Outcome).index(outcome) for outcome, _ in WORDS], np.int32)
_REASONS: list[str] = sorted({reason for _, reason in WORDS if reason})
_REASON_OF = np.array([_REASONS.index(reason) if reason else -1 for _, reason in WORDS], np.int32)
_NOT_ACCEPTED = np.array([outcome is not Outcome.ACCEPTED for outcome, _ in WORDS])
_HARD = WORDS.index((Outcome.BOUNCED, "recipient"))

# As `formats.suppression` has it: an entry per address, in scope `all`.
SUPPRESS = pa.schema(
    [
        pa.field("address", pa.large_string(), nullable=False),
        pa.field("scope", pa.dictionary(pa.int32(), pa.string()), nullable=False),
        pa.field("reason", pa.dictionary(pa.int32(), pa.string()), nullable=False),
        pa.field("source", pa.dictionary(pa.int32(), pa.string()), nullable=False),
        pa.field("at_us", pa.int64(), nullable=False),
        pa.field("lifted", pa.bool_(), nullable=False),
    ]
)


class Written(msgspec.Struct):
    """How many lines went into each file, the domains, and what was wrong with the list."""

    recipients: int = 0
    undeliverable: int = 0
    suppress: int = 0
    domains: Domains = msgspec.field(default_factory=Domains)
    problems: list[str] = []


class _Span(msgspec.Struct):
    recipients: pa.Table
    domains: Coded
    resolved: Resolved
    undeliverable: pa.Table | None
    suppress: pa.Table | None


def write_recipients(
    merged: Merged,
    folder: Path,
    *,
    merged_at_us: int,
    threads: int = 2,
    unsent_known: bool = True,
    progress: Callable[[int, int], None] | None = None,
) -> Written:
    """Write the three files into `folder`, which exists.

    `unsent_known` False: some rows' state is in a store that was not asked; then `undeliverable.parquet`, from which
    somebody might send again, is not written.
    """
    rows = ListRows(merged.plan)
    written = Written()
    made = _Maker(merged, rows, merged_at_us, unsent_known)
    with contextlib.ExitStack() as stack:
        recipients = stack.enter_context(_writer(folder / "recipients.parquet", made.schema))
        suppress = stack.enter_context(_writer(folder / "suppress.parquet", SUPPRESS))
        undeliverable = None
        if unsent_known:
            undeliverable = stack.enter_context(
                pq.ParquetWriter(folder / "undeliverable.parquet", made.undeliverable_schema, compression="zstd")
            )
        pool = stack.enter_context(ThreadPoolExecutor(max(1, threads), thread_name_prefix="report"))
        for span in in_order(pool, made.make, (first for first, _ in merged.spans()), ahead=max(1, threads)):
            recipients.write_table(span.recipients, row_group_size=_GROUP_ROWS)
            if span.undeliverable is not None and undeliverable is not None:
                # Groups as `prepare` makes them: a batch is a run of whole row groups.
                undeliverable.write_table(span.undeliverable, row_group_size=10_000)
                written.undeliverable += span.undeliverable.num_rows
            if span.suppress is not None:
                suppress.write_table(span.suppress)
                written.suppress += span.suppress.num_rows
            found = span.resolved
            written.domains.add(span.domains, found.word, found.attempts, found.first_at, found.last_at)
            written.recipients += found.rows
            if progress is not None:
                progress(written.recipients, merged.rows)
    written.problems = [f"{path}: {problem}" for path, problem in sorted(rows.problems.items())]
    return written


def in_order(pool: Executor, work: Callable[[_T], _R], items: Iterable[_T], *, ahead: int) -> Iterator[_R]:
    """Like `pool.map`, with at most `ahead` + 1 items begun beyond the one that was taken: results are large."""
    running: list[Future[_R]] = []
    for item in items:
        running.append(pool.submit(work, item))
        if len(running) > ahead:
            yield running.pop(0).result()
    while running:
        yield running.pop(0).result()


def _writer(path: Path, schema: pa.Schema) -> pq.ParquetWriter:
    words = [field.name for field in schema if pa.types.is_dictionary(field.type)]
    # Row numbers and times rise: as differences they cost bits, and a dictionary of them would cost megabytes.
    rising = {name: "DELTA_BINARY_PACKED" for name in schema.names if name == "row" or name.endswith("_at")}
    return pq.ParquetWriter(
        path,
        schema,
        compression="zstd",
        compression_level=1,
        use_dictionary=[*words, "code", "attempts"],
        column_encoding=rising,
    )


class _Maker:
    """Puts spans together. `make` may run in several threads."""

    def __init__(self, merged: Merged, rows: ListRows, merged_at_us: int, unsent_known: bool) -> None:
        self._merged = merged
        self._rows = rows
        self._wants_undeliverable = unsent_known
        header = outcomes.Header(
            campaign_id=merged.plan.campaign_id,
            rows=merged.rows,
            list_fingerprint=merged.plan.list_fingerprint,
            merged_at_us=merged_at_us,
        )
        self.schema = outcomes.schema(header, id_type=rows.id_type)
        self._machines = list(dict.fromkeys(merged.machines))
        number = {name: place for place, name in enumerate(self._machines)}
        self._machine_of = np.array([number[name] for name in merged.machines] or [0], np.int32)
        kept = [field for field in rows.schema or [] if field.name not in LAST]
        self._list_columns = [field.name for field in kept]
        self.undeliverable_schema = pa.schema(
            [
                *kept,
                pa.field(LAST[0], pa.string()),
                pa.field(LAST[1], pa.string()),
                pa.field(LAST[2], pa.uint16()),
                pa.field(LAST[3], pa.string()),
            ]
        )

    def make(self, first: int) -> _Span:
        """All that is written of one span."""
        found = self._merged.resolved(first)
        rows = self._rows
        columns = [name for name in (rows.address, rows.id, rows.domain) if name is not None]
        listed = rows.read(first, found.rows, list(dict.fromkeys(columns)))
        addresses = listed.column(rows.address)
        address = addresses.cast(pa.string())
        domains = code_column(listed.column(rows.domain)) if rows.domain else code_domains(address)
        texts = self._texts(found)
        table = pa.table(
            [
                pa.array(np.arange(first, first + found.rows, dtype=np.uint64)),
                listed.column(rows.id).cast(rows.id_type) if rows.id else pa.nulls(found.rows, pa.null()),
                address,
                _words(found.provider - 1, self._merged.providers[1:]),
                _words(_OUTCOME_OF[found.word], [str(outcome) for outcome in Outcome]),
                _words(_REASON_OF[found.word], _REASONS),
                pa.array(found.attempts),
                _times(found.first_at),
                _times(found.last_at),
                pa.array(found.code, mask=found.code == 0),
                _enhanced(texts),
                texts,
                _words(np.where(found.log >= 0, self._machine_of[found.log], -1), self._machines),
                _words(found.source - 1, self._merged.sources[1:]),
                _times(found.bounced_at if found.bounced_at is not None else np.zeros(found.rows, np.int64)),
            ],
            schema=self.schema,
        )
        return _Span(table, domains, found, self._undeliverable(found, texts, listed), self._suppress(found, address))

    def _texts(self, found: Resolved) -> pa.Array:
        texts = found.texts()
        if not found.told:
            return texts
        mask = np.zeros(found.rows, bool)
        mask[sorted(found.told)] = True
        return pc.replace_with_mask(
            texts, pa.array(mask), pa.array([found.told[p] for p in sorted(found.told)], pa.string())
        )

    def _undeliverable(self, found: Resolved, texts: pa.Array, listed: pa.Table) -> pa.Table | None:
        if not self._wants_undeliverable:
            return None
        places = np.flatnonzero(_NOT_ACCEPTED[found.word])
        if not len(places):
            return None
        rest = [name for name in self._list_columns if name not in listed.column_names]
        others = self._pick(found.first_row, places, rest) if rest else None
        columns = [
            others.column(name) if others is not None and name in rest else listed.column(name).take(pa.array(places))
            for name in self._list_columns
        ]
        word = found.word[places]
        code = found.code[places]
        told = [
            _words(_OUTCOME_OF[word], [str(outcome) for outcome in Outcome]).cast(pa.string()),
            _words(_REASON_OF[word], _REASONS).cast(pa.string()),
            pa.array(code, mask=code == 0),
            texts.take(pa.array(places)),
        ]
        plain = [_plain(column, field.type) for column, field in zip(columns, self.undeliverable_schema, strict=False)]
        return pa.table([*plain, *told], schema=self.undeliverable_schema)

    def _pick(self, first_row: int, places: Numbers, names: list[str]) -> pa.Table:
        """These columns of these rows, in stretches: the rest of their row groups is not kept."""
        parts = []
        step = 65_536
        for start in range(0, int(places[-1]) + 1, step):
            low, high = np.searchsorted(places, (start, start + step)).tolist()
            if low == high:
                continue
            begin, end = int(places[low]), int(places[high - 1]) + 1
            table = self._rows.read(first_row + begin, end - begin, names)
            parts.append(table.take(pa.array(places[low:high] - begin)))
        return pa.concat_tables(parts)

    def _suppress(self, found: Resolved, address: pa.ChunkedArray) -> pa.Table | None:
        places = np.flatnonzero(found.word == _HARD)
        if found.soft:
            places = places[~np.isin(places, sorted(found.soft))]
        if not len(places):
            return None
        texts = address.take(pa.array(places)).combine_chunks()
        # Most addresses are plain: their canonical form is lower case. The others cost a Python call each.
        plain = pc.fill_null(pc.match_substring_regex(texts, _PLAIN_ADDRESS), False).to_pylist()
        lower = pc.ascii_lower(texts).to_pylist()
        names, times = [], []
        for text, low, is_plain, at in zip(
            texts.to_pylist(), lower, plain, found.last_at[places].tolist(), strict=True
        ):
            # What cannot be parsed was never sent, so it cannot have bounced; a changed list may still bring it here.
            with contextlib.suppress(AddressError):
                names.append(low if is_plain else canonical(parse_mailbox(text)))
                times.append(at)
        source = f"campaign {self._merged.plan.campaign_id}"
        count = len(names)
        return pa.table(
            [
                pa.array(names, pa.large_string()),
                *(_words(np.zeros(count, np.int32), [text]) for text in ("all", "bounce", source)),
                pa.array(times, pa.int64()),
                pa.array(np.zeros(count, bool)),
            ],
            schema=SUPPRESS,
        )


def _words(index: Numbers, words: list[Any]) -> pa.Array:
    return pa.DictionaryArray.from_arrays(
        pa.array(index.astype(np.int32), mask=index < 0), pa.array(words, pa.string())
    )


def _times(values: Numbers) -> pa.Array:
    return pa.array(values, pa.int64(), mask=values == 0).cast(pa.timestamp("us", tz="UTC"))


def _plain(column: pa.ChunkedArray, kind: pa.DataType) -> pa.ChunkedArray:
    return column if column.type == kind else column.cast(kind)


def _enhanced(texts: pa.Array) -> pa.Array:
    """The enhanced status codes that texts begin with. Few differ, so only their beginnings are compared."""
    raw = pc.binary_slice(texts.cast(pa.binary()), 0, _ENHANCED_BYTES).dictionary_encode()
    heads = pa.array([_ascii(head) for head in raw.dictionary.to_pylist()], pa.string())
    status = pc.struct_field(pc.extract_regex(heads, _ENHANCED), "status").to_pylist()
    words = [*dict.fromkeys(s for s in status if s)]
    number = {word: place for place, word in enumerate(words)}
    mapping = np.array([number.get(s, -1) if s else -1 for s in status] + [-1], np.int32)
    index = raw.indices.fill_null(len(status)).to_numpy().astype(np.int64)
    return _words(mapping[index], words)


def _ascii(head: bytes) -> str:
    # Behind the code may follow half a character of a longer text.
    return head.decode("ascii", "replace")
