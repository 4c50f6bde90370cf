"""`inspect`: what a list is like, from its metadata where `prepare` wrote it, else by looking.

Reads footers, and where `prepare` left nothing in them one column: all of it, or of a long list stretches all over it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from engine.lists.cleaning import DOMAIN, hashed, plain_parts, settle
from engine.lists.columns import NoAddressColumn, address_column
from engine.lists.domain_numbers import DomainNumbers
from engine.lists.mixing import Groups, MixingMeter
from engine.lists.parquet_source import LARGE_ROW_GROUP, parquet_source, read_footer
from engine.lists.scan import batches_of
from formats import listmeta
from formats.listmeta import ListMeta

EXAMPLES = 3
LOOKED_MOST = 5_000_000  # rows; what is longer is looked at in stretches
STRETCH = 100_000
NO_ADDRESS = "(no address)"


class Column(msgspec.Struct, frozen=True, kw_only=True):
    """One column: its type, how many bytes it takes in the file, how many nulls (None: the file does not say)."""

    name: str
    type: str
    bytes: int
    nulls: int | None
    examples: list[str] = []


class File(msgspec.Struct, frozen=True, kw_only=True):
    """One file of the list."""

    path: str
    bytes: int
    rows: int
    row_groups: int
    largest_row_group_rows: int
    largest_row_group_bytes: int


class Inspection(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that `inspect` shows."""

    rows: int
    files: list[File]
    columns: list[Column]
    meta: ListMeta | None
    is_prepared: bool
    warnings: list[str] = []


def inspect(paths: Sequence[Path], *, address: str | None = None) -> Inspection:
    """Look at the Parquet files of a list; raises ListUnreadable."""
    footers = [read_footer(path) for path in paths]
    schema = footers[0].schema.to_arrow_schema()
    metas = [listmeta.of_metadata(footer.metadata) for footer in footers]
    rows = sum(footer.num_rows for footer in footers)
    warnings = []
    meta: ListMeta | None
    if all(meta is not None for meta in metas) and rows:
        meta = _joined([meta for meta in metas if meta is not None])
    else:
        meta, looked = _looked(paths, address, rows) if rows else (None, 0)
        if meta is not None and looked < rows:
            warnings.append(
                f"nobody prepared this list: domains and mixing are estimated from {looked:,} of {rows:,} rows"
            )
    files = [_file(path, footer) for path, footer in zip(paths, footers, strict=True)]
    for file in files:
        if file.largest_row_group_bytes > LARGE_ROW_GROUP:
            size = file.largest_row_group_bytes / 2**30
            warnings.append(f"{file.path}: a row group of {size:.1f} GB must be held whole; `engine prepare` cuts it")
    columns = _columns(schema, footers, paths[0] if rows else None)
    for column in columns:
        if column.type in ("double", "float") and column.nulls and _looks_like_numbers_with_gaps(column):
            warnings.append(
                f"column {column.name}: whole numbers kept as {column.type}, as pandas does where values are missing; "
                "large ones have lost digits. Export it as integer."
            )
    return Inspection(
        rows=rows,
        files=files,
        columns=columns,
        meta=meta,
        is_prepared=rows > 0 and all(one is not None for one in metas),
        warnings=warnings,
    )


def _file(path: Path, footer: pq.FileMetaData) -> File:
    groups = [footer.row_group(one) for one in range(footer.num_row_groups)]
    return File(
        path=str(path),
        bytes=path.stat().st_size,
        rows=footer.num_rows,
        row_groups=footer.num_row_groups,
        largest_row_group_rows=max((group.num_rows for group in groups), default=0),
        largest_row_group_bytes=max((group.total_byte_size for group in groups), default=0),
    )


def _columns(schema: pa.Schema, footers: Sequence[pq.FileMetaData], first: Path | None) -> list[Column]:
    sizes: dict[str, int] = {}
    nulls: dict[str, int | None] = {}
    for footer in footers:
        # A nested column has several leaves; its bytes are theirs, its nulls are not told.
        tops = [footer.schema.column(leaf).path.split(".")[0] for leaf in range(footer.num_columns)]
        flat = [tops.count(top) == 1 and footer.schema.column(leaf).path == top for leaf, top in enumerate(tops)]
        for number in range(footer.num_row_groups):
            group = footer.row_group(number)
            for leaf, top in enumerate(tops):
                chunk = group.column(leaf)
                sizes[top] = sizes.get(top, 0) + chunk.total_compressed_size
                stats = chunk.statistics
                known = flat[leaf] and stats is not None and stats.has_null_count
                before = nulls.get(top, 0)
                nulls[top] = before + stats.null_count if known and before is not None else None
    examples = _examples(first) if first is not None else {}
    return [
        Column(
            name=field.name,
            type=_kind(field.type),
            bytes=sizes.get(field.name, 0),
            nulls=nulls.get(field.name),
            examples=examples.get(field.name, []),
        )
        for field in schema
    ]


def _kind(kind: pa.DataType) -> str:
    if pa.types.is_dictionary(kind):
        return f"{_kind(kind.value_type)} (dictionary)"
    return "string" if pa.types.is_large_string(kind) or pa.types.is_string_view(kind) else str(kind)


def _examples(path: Path) -> dict[str, list[str]]:
    batch = next(pq.ParquetFile(path).iter_batches(batch_size=EXAMPLES), None)
    if batch is None:
        return {}
    return {name: [_short(value) for value in batch.column(name).to_pylist()] for name in batch.schema.names}


def _short(value: object) -> str:
    text = "" if value is None else str(value)
    return text if len(text) <= 40 else text[:39] + "…"


def _looks_like_numbers_with_gaps(column: Column) -> bool:
    given = [one for one in column.examples if one]
    return bool(given) and all(one.endswith(".0") for one in given)


def _joined(metas: Sequence[ListMeta]) -> ListMeta:
    if len(metas) == 1:
        return metas[0]
    counts: dict[str, int] = {}
    providers: dict[str, int] = {}
    for meta in metas:
        for name, rows in meta.domain_rows.items():
            counts[name] = counts.get(name, 0) + rows
        for name, rows in meta.provider_rows.items():
            providers[name] = providers.get(name, 0) + rows
    joined = listmeta.of_counts(counts)
    mixings = [meta.mixing for meta in metas if meta.mixing is not None]
    other = sum(meta.other_rows for meta in metas)
    return msgspec.structs.replace(
        joined,
        rows=sum(meta.rows for meta in metas),
        # The rest of several files overlaps by an unknown number of domains: the largest is what is certain.
        domains=max(meta.domains for meta in metas),
        other_domains=max(meta.other_domains for meta in metas) + joined.other_domains,
        other_rows=other + joined.other_rows,
        provider_rows=providers,
        mixing=max(mixings, key=lambda one: one.worst_500) if len(mixings) == len(metas) else None,
        roles=metas[0].roles,
    )


def _looked(paths: Sequence[Path], address: str | None, rows: int) -> tuple[ListMeta | None, int]:
    """Count and measure a list that nobody prepared, by its address column; None where it has none.

    Of more than `LOOKED_MOST` rows stretches all over the list are looked at, and counts are scaled. The second value
    is how many rows were looked at.
    """
    numbers = DomainNumbers()
    pieces: list[Groups] = []
    column = ""
    looked = 0
    for path in paths:
        listed = parquet_source(path).scan()
        try:
            column = address_column(listed.collect_schema().names(), address, file=str(path))
        except NoAddressColumn:
            if address is not None:
                raise
            return None, 0
        here = read_footer(path).num_rows
        for stretch in _stretches(listed.select(column), here, share=LOOKED_MOST / rows):
            found = [_numbered(raw, column, numbers) for _, raw in batches_of(plain_parts(stretch, column))]
            pieces.append(np.concatenate(found) if found else np.empty(0, dtype=np.uint32))
            looked += len(pieces[-1])
    counts = np.bincount(np.concatenate(pieces), minlength=len(numbers))
    meter = MixingMeter(counts, numbers.names)
    for piece in pieces:
        for start in range(0, len(piece), 1 << 20):
            meter.take(piece[start : start + (1 << 20)])
        if looked < rows:
            meter.interrupt()
    if looked < rows:
        counts = np.maximum(counts > 0, np.round(counts * (rows / max(1, looked))).astype(np.int64))
    meta = listmeta.of_numbers(numbers.names, counts)
    # Rounding must not change how many rows there are.
    meta = msgspec.structs.replace(meta, rows=rows, other_rows=max(0, rows - sum(meta.domain_rows.values())))
    return msgspec.structs.replace(meta, mixing=meter.result(), roles=listmeta.Roles(address=column)), looked


def _stretches(listed: pl.LazyFrame, rows: int, *, share: float) -> list[pl.LazyFrame]:
    """The whole file, or stretches of it that lie as far apart as one another and hold about `share` of its rows."""
    if share >= 1:
        return [listed]
    count = max(1, round(rows * share / STRETCH))
    size = min(STRETCH, rows // count)
    return [listed.slice(rows * number // count, size) for number in range(count)]


def _numbered(raw: pl.DataFrame, column: str, numbers: DomainNumbers) -> Groups:
    domains = settle(raw, column).select(pl.col(DOMAIN).fill_null(NO_ADDRESS).alias(DOMAIN))
    hashes = domains.select(hashed(pl.col(DOMAIN))).to_series().to_numpy()
    return numbers.take(hashes, domains.to_series())
