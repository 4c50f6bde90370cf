"""Lists that are Parquet already, from any writer: looked at before anything is read, then scanned where they stand."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from engine.lists.source import ListUnreadable, Source

_MAGIC, _ENCRYPTED = b"PAR1", b"PARE"
LARGE_ROW_GROUP = 1 << 30  # decoded bytes; a reader holds whole row groups


def parquet_source(path: Path) -> Source:
    """The Parquet file at `path`; raises ListUnreadable telling truncated, encrypted and no Parquet at all apart."""
    metadata = read_footer(path)
    largest = max((metadata.row_group(one).total_byte_size for one in range(metadata.num_row_groups)), default=0)
    notes = []
    if largest > LARGE_ROW_GROUP:
        notes.append(f"a row group of {largest / 2**30:.1f} GB: reading it takes at least that much memory")
    size = sum(metadata.row_group(one).total_byte_size for one in range(metadata.num_row_groups))
    # Text is held as 16 bytes a value and more; what Parquet stores once in a dictionary stands in every row here.
    size = max(size, metadata.num_rows * metadata.num_columns * 16)
    return Source(
        name=str(path),
        rows=metadata.num_rows,
        scan=lambda: pl.scan_parquet(path, glob=False, hive_partitioning=False),
        notes=tuple(notes),
        decoded_bytes=size,
    )


def read_footer(path: Path) -> pq.FileMetaData:
    """The file's footer; raises ListUnreadable."""
    try:
        with open(path, "rb") as file:
            start = file.read(4)
            file.seek(0, 2)
            size = file.tell()
            file.seek(max(0, size - 4))
            end = file.read(4)
    except OSError as problem:
        raise ListUnreadable(file=path, problem=problem.strerror) from None
    if size == 0:
        raise ListUnreadable(file=path, problem="the file is empty")
    if _ENCRYPTED in (start, end):
        raise ListUnreadable(
            file=path, problem="encrypted Parquet (its magic is PARE)", next="Decrypt it first: export it without keys."
        )
    if start != _MAGIC:
        raise ListUnreadable(
            file=path,
            problem=f"not Parquet: it begins with {start!r}, not {_MAGIC!r}",
            next="Name the file by what it is (.csv, .jsonl, .arrow), or give --format.",
        )
    if end != _MAGIC:
        raise ListUnreadable(
            file=path,
            problem=f"cut short: {size} bytes, and no Parquet footer at the end",
            next="Copy or download it again; a Parquet file without its end cannot be read.",
        )
    try:
        metadata = pq.read_metadata(path)
        metadata.schema.to_arrow_schema()
    except (pa.ArrowException, OSError, ValueError) as problem:
        raise ListUnreadable(file=path, problem=f"damaged Parquet footer: {problem}") from None
    return metadata
