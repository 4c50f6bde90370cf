"""Which rows say the same as another: whole columns of hashes, no strings.

Sorting the values of a hundred million hashes and looking only at those that repeat takes a fifth of the time of an
argsort (measured, see benchmarks). Addresses are compared by 64-bit hash: a hundred million of them hold a false
duplicate once in four thousand lists.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from formats.suppression import Hashes, Mask

Rows = npt.NDArray[np.int64]


def repeated_rows(hashes: Hashes, eligible: Mask) -> Rows:
    """The eligible rows whose hash another eligible row has too, ascending."""
    values = hashes[eligible] if not eligible.all() else hashes.copy()
    values.sort()
    repeats = np.unique(values[1:][values[1:] == values[:-1]])
    del values
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
