"""Forgetting a person: the address goes, the promise not to write to it stays.

In a suppression folder every entry of the address becomes one keyed hash in scope `all`; the truth is written anew and
put in place by rename. In a list every value of the person's row becomes null; rows keep their numbers. With
`older_than_us`, entries become keyed hashes by age, each in its own scope (`retention_days`).
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from engine.lists.cleaning import CANONICAL, plain_parts, settle
from engine.lists.columns import address_column
from engine.lists.parquet_source import read_footer
from engine.lists.scope_index import hash_column, index_name
from engine.lists.suppressions import Suppressions
from engine.lists.truthfile import KEY, TRUTH, create, cut_torn_end, frames, locked, write_whole
from formats import suppression
from formats.suppression import ALL, Entry, Reason


class Forgotten(msgspec.Struct, frozen=True, kw_only=True):
    """What was erased: entries of the suppression folder, rows of each file."""

    entries: int
    rows: dict[str, int] = {}


class Rewritten(msgspec.Struct, frozen=True):
    """A truth that was written anew: its generation, and where each frame ended and ends now."""

    generation: bytes
    ends: list[tuple[int, int]]

    def now_at(self, end: int) -> int:
        """Where what lay before `end` ends now."""
        return max((new for old, new in self.ends if old <= end), default=suppression.HEADER_BYTES)


Told = Callable[[Rewritten], None]


def forget(folder: Path, addresses: Sequence[str], *, now_us: int, rewritten: Told | None = None) -> int:
    """Erase canonical addresses from a suppression folder; how many entries named them. They stay suppressed."""
    key = folder_key(folder)
    wanted = pa.array(sorted(set(addresses)), pa.large_string())
    hashes = [suppression.forgotten_address(address, key) for address in sorted(set(addresses))]

    def without(table: pa.Table) -> tuple[pa.Table, list[Entry]]:
        keep = pc.invert(pc.is_in(table.column("address"), value_set=wanted))
        return table.filter(keep), []

    erased = _rewrite(folder, without, rewritten)
    known = Suppressions(folder, list_id=None)
    known.add([Entry(one, ALL, Reason.FORGOTTEN, "", now_us) for one in hashes])
    return erased


def forget_older(folder: Path, before_us: int, *, rewritten: Told | None = None) -> int:
    """Turn entries made before a time into keyed hashes, each in its scope; how many."""
    key = folder_key(folder)
    # What was ever taken back has a history that only its address holds together: it keeps its address.
    lifted = {(one.address, one.scope) for one in _lifted(folder)} if (folder / TRUTH).exists() else set()

    def by_age(table: pa.Table) -> tuple[pa.Table, list[Entry]]:
        named = pc.match_substring(table.column("address"), "@")
        old = pc.and_(pc.less(table.column("at_us"), before_us), named)
        turned, kept = [], []
        for place, row in zip(np.flatnonzero(old.to_numpy()).tolist(), table.filter(old).to_pylist(), strict=True):
            if (row["address"], row["scope"]) in lifted:
                kept.append(place)
            else:
                address = suppression.forgotten_address(row["address"], key)
                turned.append(Entry(address, row["scope"], row["reason"], "", row["at_us"]))
        keep = ~old.to_numpy()
        keep[kept] = True
        return table.filter(pa.array(keep)), turned

    return _rewrite(folder, by_age, rewritten)


def _lifted(folder: Path) -> Iterator[Entry]:
    for frame in frames(folder / TRUTH, suppression.HEADER_BYTES):
        table = frame.table()
        for row in table.filter(table.column("lifted")).to_pylist():
            yield Entry(**row)


def folder_key(folder: Path) -> bytes:
    """The key of the folder's forgotten entries, made where there is none."""
    path = folder / KEY
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder):
        if not path.exists():
            write_whole(path, [secrets.token_bytes(32)])
    return path.read_bytes()


def take_key(folder: Path, key: bytes) -> bool:
    """Use `key` from now on, unless somebody was forgotten here by another one: whether it is the folder's key now."""
    with locked(folder):
        if (folder / KEY).read_bytes() == key:
            return True
        if (folder / TRUTH).exists():
            for frame in frames(folder / TRUTH, suppression.HEADER_BYTES):
                addresses = frame.table().column("address")
                if pc.any(pc.and_not(pc.starts_with(addresses, "#"), pc.match_substring(addresses, "@"))).as_py():
                    return False
        write_whole(folder / KEY, [key])
    return True


def forget_keyed(folder: Path, hashes: Sequence[str], *, rewritten: Told | None = None) -> int:
    """Erase whoever others have forgotten, known by keyed hashes of this folder's key; how many entries named them."""
    key = (folder / KEY).read_bytes()
    told = [suppression.split_forgotten(one) for one in hashes]
    keyed = {digest for _, digest in told}
    sieve = np.zeros(1 << 16, dtype=np.bool_)
    sieve[[first for first, _ in told]] = True

    def named(table: pa.Table) -> npt.NDArray[np.bool_]:
        addresses = table.column("address")
        found = sieve[suppression.sieve_of(hash_column(addresses))]
        for place in np.flatnonzero(found).tolist():
            found[place] = suppression.keyed_hash(addresses[place].as_py(), key) in keyed
        return found

    with locked(folder):
        if not any(named(frame.table()).any() for frame in frames(folder / TRUTH, suppression.HEADER_BYTES)):
            return 0
    return _rewrite(folder, lambda table: (table.filter(pa.array(~named(table))), []), rewritten)


def _rewrite(
    folder: Path, change: Callable[[pa.Table], tuple[pa.Table, list[Entry]]], rewritten: Told | None = None
) -> int:
    """Write the truth anew, every frame through `change`; how many entries lost their address."""
    path = folder / TRUTH
    erased = 0
    scopes: set[str] = set()
    with locked(folder):
        if not path.exists():
            create(path)
        known = Suppressions(folder, list_id=None)
        cut_torn_end(path, known.truth_end())
        new = path.with_name(f".{TRUTH}.{os.getpid()}-{secrets.token_hex(4)}")
        try:
            with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                generation, ends = secrets.token_bytes(8), []
                file.write(suppression.encode_header(generation))
                for frame in frames(path, suppression.HEADER_BYTES):
                    table = frame.table()
                    scopes.update(table.column("scope").unique().to_pylist())
                    kept, added = change(table)
                    erased += table.num_rows - kept.num_rows
                    if kept.num_rows:
                        file.write(suppression.encode_table(kept))
                    if added:
                        file.write(suppression.encode_entries(added))
                    ends.append((frame.end, file.tell()))
                file.flush()
                os.fsync(file.fileno())
            os.replace(new, path)
            if rewritten is not None:
                rewritten(Rewritten(generation, ends))
        finally:
            new.unlink(missing_ok=True)
        for torn in folder.glob(f"{TRUTH}.torn-*"):
            torn.unlink()  # the remains of crashed appends may name anybody
        for scope in sorted(scopes | {ALL}):
            if scope == ALL or (folder / index_name(scope)).exists():
                Suppressions(folder, list_id=scope).rebuild_indexes()
    return erased


def erase_rows(path: Path, addresses: Sequence[str], *, column: str | None = None) -> int:
    """Null every value of the rows of these canonical addresses in a Parquet list (or rejects); how many rows.

    Row numbers, row groups, schema and metadata stay. The file's fingerprint changes: a campaign that is still being
    sent from it must be planned anew.
    """
    footer = read_footer(path)
    names = footer.schema.to_arrow_schema().names
    is_rejects = {"value", "reason", "detail"} <= set(names)
    address = "value" if is_rejects and column is None else address_column(names, column, file=str(path))
    wanted = set(addresses)
    erased = 0
    new = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}")
    try:
        with pq.ParquetFile(path) as listed:
            schema = listed.schema_arrow.with_metadata(
                {**(listed.schema_arrow.metadata or {}), **(footer.metadata or {})}
            )
            with pq.ParquetWriter(new, schema, compression="zstd", compression_level=1) as writer:
                for number in range(listed.num_row_groups):
                    table = listed.read_row_group(number)
                    rows = _rows_of(table, address, wanted)
                    erased += len(rows)
                    if len(rows):
                        places = np.arange(table.num_rows, dtype=np.int64)
                        is_gone = np.zeros(table.num_rows, dtype=np.bool_)
                        is_gone[rows] = True
                        table = table.take(pa.array(places, mask=is_gone))
                    writer.write_table(table.cast(schema), row_group_size=max(1, table.num_rows))
        if erased:
            os.chmod(new, path.stat().st_mode & 0o777)
            os.replace(new, path)
    finally:
        new.unlink(missing_ok=True)
    return erased


def _rows_of(table: pa.Table, address: str, wanted: set[str]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    frame = pl.from_arrow(table.select([address]))
    assert isinstance(frame, pl.DataFrame)
    found = settle(plain_parts(frame.lazy(), address).collect(), address).get_column(CANONICAL)
    return np.flatnonzero(found.is_in(sorted(wanted)).fill_null(False).to_numpy())
