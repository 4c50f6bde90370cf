"""The last pass of `prepare`: every kept row is written where the mixing put it.

Two ways, one result. A list that fits is read once and gathered. A larger one is dealt into files of a million places
each, as it is read, and each file is then put in order; memory stays flat whatever the length.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from engine.lists.cleaning import clean_addresses
from engine.lists.mixing import NOWHERE, Places
from engine.lists.rejects import Rejects, Status
from engine.lists.scan import BATCH_ROWS, Scanned, batches_of
from engine.lists.sorting import ascending
from engine.lists.source import ListUnreadable
from formats.suppression import Mask

DOMAIN_COLUMN = "domain"
BUCKET_ROWS = 1_000_000
BUCKET_BYTES, PIECE_BYTES = 512 << 20, 256 << 20
_MOST_BUCKETS = 500  # open at once
_PIECE_ROWS = 200_000
_PLACE, _NUMBER, _UNCLEAN = "__place", "__domain_number", "__unclean"

Advance = Callable[[int], object]


class ListWriter:
    """The Parquet file, written by a thread of its own while the next rows are gathered."""

    def __init__(
        self, path: Path, names: list[str], address: str, metadata: dict[bytes, bytes], row_group_rows: int
    ) -> None:
        self._path = path
        self._names = np.array(names, dtype=object)
        self._codes = np.empty(len(names), dtype=np.int32)  # by domain number, of the row group in hand
        self._address = address
        self._metadata = metadata
        self._row_group_rows = row_group_rows
        self._queue: queue.Queue[list[pa.Table] | None] = queue.Queue(maxsize=2)
        self._failed: BaseException | None = None
        self._thread = threading.Thread(target=self._write_all, name="list-writer", daemon=True)
        self._thread.start()

    def write(self, rows: pl.DataFrame, domains: npt.NDArray[np.uint32], unclean: Mask) -> None:
        """The next rows; all but the last call bring whole row groups."""
        addresses = clean_addresses(rows.get_column(self._address), np.flatnonzero(unclean))
        table = rows.with_columns(addresses.alias(self._address)).to_arrow()
        groups = []
        for start in range(0, table.num_rows, self._row_group_rows):
            piece = table.slice(start, self._row_group_rows)
            column = self._domain_column(domains[start : start + self._row_group_rows])
            groups.append(piece.append_column(DOMAIN_COLUMN, column))
        self._hand_over(groups)

    def _domain_column(self, domains: npt.NDArray[np.uint32]) -> pa.DictionaryArray:
        """Each row group gets a dictionary of its own: one for all would be written into every one of them."""
        ordered = ascending(domains.astype(np.uint64))
        present = ordered[np.concatenate(([True], ordered[1:] != ordered[:-1]))]
        self._codes[present] = np.arange(len(present), dtype=np.int32)
        names = pa.array(self._names[present].tolist(), pa.string())
        return pa.DictionaryArray.from_arrays(pa.array(self._codes[domains]), names)

    def _hand_over(self, groups: list[pa.Table] | None) -> None:
        while self._failed is None:
            try:
                self._queue.put(groups, timeout=0.2)
                return
            except queue.Full:
                continue
        raise self._failed

    def _write_all(self) -> None:
        writer: pq.ParquetWriter | None = None
        try:
            while (groups := self._queue.get()) is not None:
                for group in groups:
                    if writer is None:
                        writer = self._open(group)
                    writer.write_table(group)
            if writer is not None:
                writer.close()
        except BaseException as failed:  # handed to the thread that waits
            self._failed = failed

    def _open(self, first: pa.Table) -> pq.ParquetWriter:
        schema = first.schema.with_metadata({**(first.schema.metadata or {}), **self._metadata})
        return pq.ParquetWriter(
            self._path,
            schema,
            compression="zstd",
            compression_level=1,
            use_dictionary=_worth_a_dictionary(first),
            write_statistics=True,
        )

    def close(self) -> None:
        """The file is whole; raises what the thread met."""
        self._hand_over(None)
        self._thread.join()
        if self._failed is not None:
            raise self._failed

    def abandon(self) -> None:
        """Stop without a whole file."""
        if self._thread.is_alive() and self._failed is None:
            self._failed = RuntimeError("abandoned")
            while self._thread.is_alive():
                try:
                    self._queue.put(None, timeout=0.1)
                    self._thread.join(timeout=5)
                except queue.Full:
                    continue


def _worth_a_dictionary(table: pa.Table) -> list[str]:
    """Columns whose values repeat; a dictionary of addresses would be larger than they and slower to read."""
    worth = []
    for name, column in zip(table.column_names, table.columns, strict=True):
        kind = column.type
        if pa.types.is_dictionary(kind) or (_can_repeat(kind) and len(column.unique()) * 2 < len(column)):
            worth.append(name)
    return worth


def _can_repeat(kind: pa.DataType) -> bool:
    return bool(pa.types.is_large_string(kind) or pa.types.is_string(kind) or pa.types.is_integer(kind))


def write_in_memory(
    listed: pl.LazyFrame,
    places: Places,
    known: Scanned,
    address: str,
    *,
    writer: ListWriter,
    rejected: DuplicateWriter,
    row_group_rows: int,
    advance: Advance,
) -> None:
    """Read everything, gather it in order."""
    kept = int((places != NOWHERE).sum())
    order = np.empty(kept, dtype=np.uint32)
    rows = np.flatnonzero(places != NOWHERE)
    order[places[rows]] = rows
    del rows
    frame = _in_one_piece(_collected(listed))
    rejected.take(frame.get_column(address), 0, known.status)
    piece_rows = max(1, _PIECE_ROWS // row_group_rows) * row_group_rows
    for start in range(0, kept, piece_rows):
        wanted = order[start : start + piece_rows]
        writer.write(frame.select(pl.all().gather(pl.Series(wanted))), known.domains[wanted], known.unclean[wanted])
        advance(len(wanted))


def _collected(listed: pl.LazyFrame) -> pl.DataFrame:
    try:
        return listed.collect(engine="streaming")
    except pl.exceptions.PolarsError as problem:
        raise ListUnreadable(file="the list", problem=problem) from None


def _in_one_piece(frame: pl.DataFrame) -> pl.DataFrame:
    """Gathering from ten pieces takes eight times as long (measured). One column at a time is held twice."""
    return pl.DataFrame([frame.drop_in_place(name).rechunk() for name in list(frame.columns)])


def write_by_buckets(
    listed: pl.LazyFrame,
    places: Places,
    known: Scanned,
    address: str,
    *,
    writer: ListWriter,
    rejected: DuplicateWriter,
    row_group_rows: int,
    advance: Advance,
    work: Path,
    row_bytes: int = 0,
    bucket_rows: int = BUCKET_ROWS,
) -> None:
    """Deal the rows into files by their place, then put each file in order.

    Wide rows (`row_bytes`, decoded) make smaller pieces and files.
    """
    bucket_rows = min(bucket_rows, BUCKET_BYTES // max(1, row_bytes))
    bucket_rows = max(1, bucket_rows // row_group_rows, -(-len(places) // _MOST_BUCKETS // row_group_rows))
    bucket_rows *= row_group_rows
    piece_rows = max(1_000, min(BATCH_ROWS, PIECE_BYTES // max(1, row_bytes)))
    buckets = _Buckets(work, bucket_rows)
    for start, batch in batches_of(listed, piece_rows=piece_rows):
        here = slice(start, start + batch.height)
        rejected.take(batch.get_column(address), start, known.status[here])
        buckets.deal(batch, places[here], known.domains[here], known.unclean[here])
        advance(batch.height // 2)
    for rows, numbers, unclean in buckets.in_order():
        writer.write(rows, numbers, unclean)
        advance(rows.height // 2)


class _Buckets:
    def __init__(self, work: Path, rows: int) -> None:
        self._work = work
        self._rows = rows
        self._files: dict[int, tuple[pa.OSFile, pa.ipc.RecordBatchStreamWriter]] = {}

    def deal(self, batch: pl.DataFrame, places: Places, domains: npt.NDArray[np.uint32], unclean: Mask) -> None:
        kept = np.flatnonzero(places != NOWHERE)
        if not len(kept):
            return
        kept = kept[np.argsort(places[kept], kind="stable")]
        placed = places[kept]
        frame = (
            batch.rechunk()
            .select(pl.all().gather(pl.Series(kept.astype(np.uint32))))
            .with_columns(
                pl.Series(_PLACE, placed), pl.Series(_NUMBER, domains[kept]), pl.Series(_UNCLEAN, unclean[kept])
            )
        )
        bucket = placed // np.uint32(self._rows)
        edges = np.flatnonzero(np.concatenate(([True], bucket[1:] != bucket[:-1], [True])))
        table = frame.to_arrow().combine_chunks()
        for start, end in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
            self._writer(int(bucket[start]), table.schema).write_table(table.slice(start, end - start))

    def _writer(self, bucket: int, schema: pa.Schema) -> pa.ipc.RecordBatchStreamWriter:
        if bucket not in self._files:
            file = pa.OSFile(str(self._path(bucket)), "wb")
            options = pa.ipc.IpcWriteOptions(compression="lz4")
            self._files[bucket] = (file, pa.ipc.new_stream(file, schema, options=options))
        return self._files[bucket][1]

    def _path(self, bucket: int) -> Path:
        return self._work / f"bucket-{bucket:05d}.arrows"

    def in_order(self) -> Iterator[tuple[pl.DataFrame, npt.NDArray[np.uint32], Mask]]:
        for file, stream in self._files.values():
            stream.close()
            file.close()
        for bucket in sorted(self._files):
            with pa.OSFile(str(self._path(bucket)), "rb") as file:
                frame = pl.from_arrow(pa.ipc.open_stream(file).read_all())
            assert isinstance(frame, pl.DataFrame)
            self._path(bucket).unlink()
            by = np.argsort(frame.get_column(_PLACE).to_numpy())
            frame = frame.rechunk().select(pl.all().gather(pl.Series(by.astype(np.uint32))))
            numbers, unclean = frame.get_column(_NUMBER).to_numpy(), frame.get_column(_UNCLEAN).to_numpy()
            yield frame.drop(_PLACE, _NUMBER, _UNCLEAN), numbers, unclean


class DuplicateWriter:
    """Writes the rows that were judged after the first pass into the rejects, when their values come by again."""

    def __init__(
        self,
        rejects: Rejects,
        duplicates: npt.NDArray[np.int64],
        keepers: npt.NDArray[np.int64],
        no_mail: dict[int, str],
        domains: npt.NDArray[np.uint32],
    ) -> None:
        self._rejects = rejects
        self._duplicates = duplicates
        self._keepers = keepers
        self._no_mail = no_mail
        self._domains = domains

    def take(self, addresses: pl.Series, start: int, status: npt.NDArray[np.uint8]) -> None:
        """Addresses of the rows from `start` on, with their status."""
        rows = np.flatnonzero(status == Status.DUPLICATE)
        if len(rows):
            keepers = self._keepers[np.searchsorted(self._duplicates, rows + start)]
            self._rejects.add(
                rows + start, addresses.gather(rows), Status.DUPLICATE.label, "as " + self._rejects.named(keepers)
            )
        rows = np.flatnonzero(status == Status.NO_MAIL_DOMAIN)
        if len(rows):
            details = pl.Series([self._no_mail[number] for number in self._domains[rows + start].tolist()])
            self._rejects.add(rows + start, addresses.gather(rows), Status.NO_MAIL_DOMAIN.label, details)
