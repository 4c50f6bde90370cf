"""A file of addresses (CSV, Parquet, one a line) as a suppression list for one `prepare`, without importing it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import polars as pl

from engine.lists.cleaning import CANONICAL, plain_parts, settle
from engine.lists.columns import address_column
from engine.lists.scan import BATCH_ROWS
from engine.lists.scope_index import hash_column
from engine.lists.source import Source
from formats.suppression import Hashes, Index, Mask, encode_index


def canonical_addresses(source: Source, column: str | None = None) -> Iterator[tuple[pl.Series, int]]:
    """The canonical addresses of a source in pieces, each with how many rows of the piece held none."""
    listed = source.scan()
    names = listed.collect_schema().names()
    address = address_column(names, column, file=source.name)
    asked = plain_parts(listed.select(address), address)
    for raw in asked.collect_batches(chunk_size=BATCH_ROWS, maintain_order=True, engine="streaming"):
        found = settle(raw, address).get_column(CANONICAL)
        yield found.drop_nulls(), found.null_count()


class SuppressionFile:
    """All addresses of a file, whatever their scope."""

    def __init__(self, source: Source) -> None:
        pieces = [hash_column(found.to_arrow()) for found, _ in canonical_addresses(source)]
        hashes: Hashes = np.unique(np.concatenate(pieces)) if pieces else np.empty(0, dtype=np.uint64)
        self._index = Index(b"".join(encode_index(hashes)))

    def __len__(self) -> int:
        return len(self._index)

    def check_hashed(self, hashes: Hashes, addresses: Sequence[str]) -> Mask:
        return self._index.check(hashes)


def is_suppression_folder(path: Path) -> bool:
    """A folder, or what is not there yet and would become one."""
    return path.is_dir() or (not path.exists() and not path.suffix)
