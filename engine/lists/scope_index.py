"""One scope of the suppressions: its index, mapped into memory and shared, and what was written after the index.

The index is derived: whoever finds it missing or of another generation of the truth can build it anew.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import polars as pl
import polars_hash as plh
import pyarrow as pa
import pyarrow.compute as pc

from engine.lists.sorting import ascending
from engine.lists.truthfile import TRUTH, frames, write_whole
from formats import suppression
from formats.suppression import Entry, Hashes, Index, Mask, SuppressionError

_MANY_LATER = 20_000


class ScopeState:
    """What is known of one scope: the mapped index, and above it what came later."""

    def __init__(self, folder: Path, scope: str) -> None:
        self.folder = folder
        self.scope = scope
        self.path = folder / index_name(scope)
        self.index: Index | None = None
        self.inode = -1
        self._opened: Index | None = None
        self._forget_all()

    def _forget_all(self) -> None:
        self.start = suppression.HEADER_BYTES  # the truth up to here is in the index
        self.later: dict[int, bool] = {}  # hash -> suppressed or lifted, behind the index
        self.keyed: dict[bytes, int] = {}  # the forgotten: keyed hash -> sieve
        self.sieve = np.zeros(1 << 16, dtype=np.bool_)

    def open_index(self, generation: bytes) -> int:
        """Map the index if it belongs to this truth; where in the truth it ends."""
        self._opened = None
        try:
            with open(self.path, "rb") as file:
                self.inode = os.fstat(file.fileno()).st_ino
                index = Index(memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)))
        except (FileNotFoundError, SuppressionError, ValueError):  # ValueError: an empty file cannot be mapped
            return suppression.HEADER_BYTES
        if index.generation != generation:
            return suppression.HEADER_BYTES
        self._opened = index
        return index.covered

    def take_index(self) -> None:
        """Begin anew from the index that `open_index` found."""
        self._forget_all()
        self.index = self._opened
        if self.index is not None:
            self.start = self.index.covered
            for sieve, keyed in self.index.forgotten:
                self._remember_forgotten(sieve, keyed)

    def remember(self, entries: Sequence[Entry], *, end: int) -> None:
        """Entries of this scope from the frame that ends at `end`."""
        if end <= self.start or not entries:
            return
        for entry in entries:
            if entry.is_forgotten:
                self._remember_forgotten(*suppression.split_forgotten(entry.address), lifted=entry.lifted)
        named = [entry for entry in entries if not entry.is_forgotten]
        hashes = suppression.hash_addresses([entry.address for entry in named])
        self.later.update(zip(hashes.tolist(), (not entry.lifted for entry in named), strict=True))

    def has_newer_index(self) -> bool:
        """Somebody wrote a newer index, and it would spare us much memory to take it."""
        return len(self.later) > _MANY_LATER and self.is_index_replaced()

    def is_index_replaced(self) -> bool:
        """The index file is another than the one we mapped."""
        with suppress(OSError):
            return self.path.stat().st_ino != self.inode
        return False

    def _remember_forgotten(self, sieve: int, keyed: bytes, *, lifted: bool = False) -> None:
        if lifted:
            self.keyed.pop(keyed, None)
        else:
            self.keyed[keyed] = sieve
            self.sieve[sieve] = True

    def check(self, hashes: Hashes) -> Mask:
        found = self.index.check(hashes) if self.index is not None else np.zeros(len(hashes), dtype=np.bool_)
        if self.later:
            later = self.later
            for place, value in enumerate(hashes.tolist()):
                if value in later:
                    found[place] = later[value]
        return found

    def count(self) -> int:
        known = np.fromiter(self.later, dtype=np.uint64, count=len(self.later))
        indexed = self.index.check(known).tolist() if self.index is not None else [False] * len(known)
        change: int = sum(now - before for now, before in zip(self.later.values(), indexed, strict=True))
        return (len(self.index) if self.index is not None else 0) + len(self.keyed) + change

    def rebuild(self, generation: bytes) -> None:
        """Write the index of this scope up to the truth's end."""
        self.open_index(generation)
        self.take_index()
        pieces = [self.index.hashes] if self.index is not None else []
        lifts = [np.zeros(len(piece), dtype=np.bool_) for piece in pieces]
        covered = self.start
        for frame in frames(self.folder / TRUTH, self.start):
            covered = frame.end
            table = frame.table()
            table = table.filter(pc.equal(table.column("scope").cast(pa.string()), self.scope))
            is_forgotten = pc.starts_with(table.column("address"), "#")
            is_forgotten = pc.and_not(is_forgotten, pc.match_substring(table.column("address"), "@"))
            for row in table.filter(is_forgotten).to_pylist():
                self._remember_forgotten(*suppression.split_forgotten(row["address"]), lifted=row["lifted"])
            table = table.filter(pc.invert(is_forgotten))
            pieces.append(hash_column(table.column("address")))
            lifts.append(table.column("lifted").to_numpy())
        if self.index is not None and covered == self.start:
            return  # somebody else was quicker
        hashes = np.concatenate(pieces) if pieces else np.empty(0, dtype=np.uint64)
        lifted = np.concatenate(lifts) if lifts else np.empty(0, dtype=np.bool_)
        del pieces, lifts
        if lifted.any():
            hashes = hashes[_last_word_suppresses(hashes, lifted)]
        hashes = ascending(hashes, threads=True)
        is_repeat = hashes[1:] == hashes[:-1]
        if is_repeat.any():
            hashes = hashes[np.concatenate(([True], ~is_repeat))]
        forgotten = [(sieve, keyed) for keyed, sieve in self.keyed.items()]
        write_whole(
            self.path, suppression.encode_index(hashes, forgotten=forgotten, covered=covered, generation=generation)
        )


def _last_word_suppresses(hashes: Hashes, lifted: Mask) -> Mask:
    """Which records say "suppressed" and are the last about their address. Only addresses ever lifted are looked at."""
    keep = ~lifted
    touched = np.flatnonzero(np.isin(hashes, hashes[lifted]))
    last = dict(zip(hashes[touched].tolist(), touched.tolist(), strict=True))
    for place in touched.tolist():
        keep[place] = not lifted[place] and last[int(hashes[place])] == place
    return keep


def index_name(scope: str) -> str:
    """The file name of a scope's index: scopes are free text, file names are not."""
    return f"index-{int(suppression.hash_addresses([scope])[0]):016x}.bin"


def hash_column(addresses: pa.ChunkedArray | pa.Array) -> Hashes:
    """XXH3-64 of a column of addresses (26 ns each), equal to `formats.suppression.hash_addresses`."""
    series = pl.Series("address", pl.from_arrow(addresses))
    return series.to_frame().select(plh.col("address").nchash.xxh3_64()).to_series().to_numpy().astype(np.uint64)
