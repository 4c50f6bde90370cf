"""Suppressions from files and to files, and what is known of one address."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from engine.lists.columns import bare
from engine.lists.source import Source
from engine.lists.suppression_files import canonical_addresses
from engine.lists.suppressions import Suppressions
from engine.lists.truthfile import TRUTH, frames
from formats import suppression
from formats.suppression import SCHEMA, Entry


class Imported(msgspec.Struct, frozen=True, kw_only=True):
    """What an import did."""

    read: int
    added: int
    invalid: int


def import_source(
    source: Source, folder: Path, *, scope: str, reason: str, origin: str, now_us: int, column: str | None = None
) -> Imported:
    """Add every address of `source` in `scope`; what is suppressed already stays as it is."""
    read = invalid = 0

    def tables() -> Iterator[pa.Table]:
        nonlocal read, invalid
        for found, bad in canonical_addresses(source, column):
            read += len(found) + bad
            invalid += bad
            yield _table(found, scope, reason, origin, now_us)

    added = Suppressions(folder, list_id=scope).import_tables(tables())
    return Imported(read=read, added=added, invalid=invalid)


def _table(addresses: pl.Series, scope: str, reason: str, origin: str, now_us: int) -> pa.Table:
    count = len(addresses)
    zeros = pa.array(np.zeros(count, dtype=np.int32))
    columns = [
        addresses.to_arrow().cast(pa.large_string()),
        *(pa.DictionaryArray.from_arrays(zeros, pa.array([text], pa.string())) for text in (scope, reason, origin)),
        pa.array(np.full(count, now_us, dtype=np.int64)),
        pa.array(np.zeros(count, dtype=np.bool_)),
    ]
    return pa.Table.from_arrays(columns, schema=SCHEMA)


def is_exported(source: Source) -> bool:
    """The source has the columns of `engine suppress export`: scopes and reasons are then taken from it."""
    return {"address", "scope", "reason", "at"} <= {bare(name) for name in source.scan().collect_schema().names()}


def import_exported(source: Source, folder: Path) -> Imported:
    """Add entries as `export` wrote them, each in its own scope, with its own reason and time."""
    listed = source.scan().with_columns(pl.col("at").cast(pl.String).str.to_datetime(time_zone="UTC", strict=False))
    read = added = invalid = 0
    for scope in listed.select(pl.col("scope").unique()).collect().to_series().drop_nulls().sort().to_list():
        named = listed.filter(pl.col("scope") == scope).collect()
        is_good = named["address"].str.contains("@").fill_null(False)
        kept = named.filter(is_good)
        table = pa.Table.from_arrays(
            [
                kept["address"].to_arrow().cast(pa.large_string()),
                *(
                    pa.array(kept[name].cast(pl.String).fill_null("").to_list(), pa.string()).dictionary_encode()
                    for name in ("scope", "reason", "source")
                ),
                kept["at"].dt.epoch("us").fill_null(0).to_arrow(),
                pa.array(np.zeros(kept.height, dtype=np.bool_)),
            ],
            schema=SCHEMA,
        )
        added += Suppressions(folder, list_id=scope).import_tables([table])
        read += named.height
        invalid += named.height - kept.height
    return Imported(read=read, added=added, invalid=invalid)


def history(folder: Path, addresses: Sequence[str]) -> list[Entry]:
    """Every entry about these canonical addresses, oldest first; forgotten ones by their hash."""
    wanted = set(addresses)
    known = Suppressions(folder, list_id=None)
    if (folder / "forget.key").exists():
        wanted |= {suppression.forgotten_address(address, known.forget_key()) for address in addresses}
    if not (folder / TRUTH).exists():
        return []
    values = pa.array(sorted(wanted), pa.large_string())
    found: list[Entry] = []
    for frame in frames(folder / TRUTH, suppression.HEADER_BYTES):
        table = frame.table()
        table = table.filter(pc.is_in(table.column("address"), value_set=values))
        found += [Entry(**row) for row in table.to_pylist()]
    return found


def active(folder: Path) -> pl.LazyFrame:
    """The entries that hold, as columns address, scope, reason, source, at (UTC); the last word on each."""
    pieces = [frame.table() for frame in frames(folder / TRUTH, suppression.HEADER_BYTES)]
    table = pa.concat_tables(pieces, promote_options="permissive") if pieces else SCHEMA.empty_table()
    entries = pl.from_arrow(table)
    assert isinstance(entries, pl.DataFrame)
    text = [pl.col(name).cast(pl.String) for name in ("scope", "reason", "source")]
    listed = entries.lazy().with_columns(text)
    if entries.get_column("lifted").any():
        listed = listed.unique(subset=["address", "scope"], keep="last", maintain_order=True).filter(~pl.col("lifted"))
    return listed.with_columns(at=pl.from_epoch("at_us", time_unit="us").dt.replace_time_zone("UTC")).select(
        "address", "scope", "reason", "source", "at"
    )


def export(folder: Path, path: Path | None) -> tuple[int, str]:
    """Write what holds to `path` (.parquet, else CSV); the entries, and the CSV text where there is no path."""
    if not (folder / TRUTH).exists():
        frame = pl.DataFrame(schema=dict.fromkeys(("address", "scope", "reason", "source", "at"), pl.String))
    else:
        frame = active(folder).collect()
    if path is None:
        return frame.height, frame.write_csv(datetime_format="%Y-%m-%dT%H:%M:%S%.6fZ")
    beside = path.with_name(f".{path.name}.new")
    if path.suffix == ".parquet":
        pq.write_table(frame.to_arrow(), beside, compression="zstd")
    else:
        frame.write_csv(beside, datetime_format="%Y-%m-%dT%H:%M:%S%.6fZ")
    beside.chmod(0o600)
    beside.replace(path)
    return frame.height, ""
