"""Which rows say the same as another: whole columns of hashes, no strings.

Sorting the values of a hundred million hashes and looking only at those that repeat takes a fifth of the time of an
argsort (measured, see benchmarks). Addresses are compared by 64-bit hash: a hundred million of them hold a false
duplicate once in four thousand lists.
"""

from __future__ import annotations

import itertools

import numpy as np
import numpy.typing as npt

from engine.lists.sorting import ascending
from formats.suppression import Hashes, Mask

Rows = npt.NDArray[np.int64]
_PART_ROWS = 16_000_000


def repeated_rows(hashes: Hashes, eligible: Mask) -> Rows:
    """The eligible rows whose hash another eligible row has too, ascending."""
    repeats = _repeated(hashes, eligible)
    if not len(repeats):
        return np.empty(0, dtype=np.int64)
    # A bitmap of 2^26 bits lets one row in many pass, and only those are searched for.
    bitmap = np.zeros(1 << 26, dtype=np.bool_)
    bitmap[repeats >> np.uint64(38)] = True
    found: list[Rows] = []
    for start in range(0, len(hashes), 1 << 22):
        piece = hashes[start : start + (1 << 22)]
        maybe = np.flatnonzero(bitmap[piece >> np.uint64(38)] & eligible[start : start + len(piece)])
        place = np.minimum(np.searchsorted(repeats, piece[maybe]), len(repeats) - 1)
        found.append(maybe[repeats[place] == piece[maybe]] + start)
    return np.concatenate(found)


def _repeated(hashes: Hashes, eligible: Mask) -> Hashes:
    """The hashes that two or more eligible rows have, ascending."""
    found: list[Hashes] = []
    # In parts by the first bits, so that no second copy of a long list's hashes is held.
    parts = max(1, len(hashes) // _PART_ROWS)
    edges = [part * (2**64 // parts) for part in range(parts)] + [2**64 - 1]
    for low, high in itertools.pairwise(edges):
        values = _between(hashes, eligible, np.uint64(low), np.uint64(high), is_last=high == edges[-1])
        ordered = ascending(values, threads=True)
        del values
        repeats = ordered[1:][ordered[1:] == ordered[:-1]]
        found.append(repeats[np.concatenate(([True], repeats[1:] != repeats[:-1]))] if len(repeats) else repeats)
    return np.concatenate(found)


def _between(hashes: Hashes, eligible: Mask, low: np.uint64, high: np.uint64, *, is_last: bool) -> Hashes:
    pieces = []
    for start in range(0, len(hashes), 1 << 22):
        piece = hashes[start : start + (1 << 22)]
        wanted = eligible[start : start + (1 << 22)] & (piece >= low) & ((piece <= high) if is_last else (piece < high))
        pieces.append(piece[wanted])
    return np.concatenate(pieces) if pieces else np.empty(0, dtype=np.uint64)


def losers(hashes: Hashes, rows: Rows, order: npt.NDArray[np.generic]) -> tuple[Rows, Rows]:
    """Of `rows` (all with repeated hashes), those to leave out, and for each the row that stays in its place.

    Of rows with one hash the one with the smallest `order` stays; between equals the first.
    """
    if not len(rows):
        return rows, rows
    value = hashes[rows]
    by = np.lexsort((rows, order, value))
    ordered = rows[by]
    is_first = np.concatenate(([True], value[by][1:] != value[by][:-1]))
    keeper = ordered[np.maximum.accumulate(np.where(is_first, np.arange(len(by)), 0))]
    out, kept = ordered[~is_first], keeper[~is_first]
    back = np.argsort(out)
    return out[back], kept[back]
