"""Rows that wait for the sending hours of their zone: a bit each, by batch, so that a hundred million fit in 13 MB.

Knows batches, rows and zones as numbers. Who wakes a batch gets all its sleepers, reads them again, and puts those
back whose zone is still closed: which row has which zone stands in the list and nowhere else.
"""

from __future__ import annotations

from collections import Counter

import msgspec
import numpy as np
import numpy.typing as npt

from engine.work.bench import OpenBatch

Flags = npt.NDArray[np.bool_]


class _Bed(msgspec.Struct):
    batch: OpenBatch
    bits: npt.NDArray[np.uint8]  # numpy.packbits order, from the batch's first row
    zones: Counter[int]


class Sleepers:
    """One worker's."""

    def __init__(self) -> None:
        self._beds: dict[int, _Bed] = {}  # by the batch's first row
        self._by_zone: dict[int, dict[int, None]] = {}  # zone -> first rows of batches, the longest asleep first
        self.by_zone: Counter[int] = Counter()  # rows

    def __len__(self) -> int:
        return self.by_zone.total()

    def add(self, batch: OpenBatch, rows: npt.NDArray[np.int64], zones: npt.NDArray[np.uint16]) -> None:
        """Rows of the batch fall asleep; none of them does already."""
        if not len(rows):
            return
        bed = self._beds.get(batch.first_row)
        if bed is None:
            bed = self._beds[batch.first_row] = _Bed(batch, np.zeros((batch.rows + 7) // 8, np.uint8), Counter())
        places = rows - batch.first_row
        np.bitwise_or.at(bed.bits, places >> 3, (128 >> (places & 7)).astype(np.uint8))
        for zone, count in zip(*(found.tolist() for found in np.unique(zones, return_counts=True)), strict=True):
            bed.zones[zone] += count
            self.by_zone[zone] += count
            self._by_zone.setdefault(zone, {})[batch.first_row] = None

    def awake(self, is_open: Flags) -> int:
        """How many sleep whose zone is open: they are to be read."""
        return sum(count for zone, count in self.by_zone.items() if is_open[zone])

    def wake(self, is_open: Flags) -> tuple[OpenBatch, Flags] | None:
        """A batch that has sleepers of an open zone, and which of its rows slept: all of them are awake now."""
        for zone, batches in self._by_zone.items():
            if is_open[zone] and batches:
                return self._empty(next(iter(batches)))
        return None

    def _empty(self, first_row: int) -> tuple[OpenBatch, Flags]:
        bed = self._beds.pop(first_row)
        for zone, count in bed.zones.items():
            del self._by_zone[zone][first_row]
            if not self._by_zone[zone]:
                del self._by_zone[zone]
            self.by_zone[zone] -= count
            if not self.by_zone[zone]:
                del self.by_zone[zone]
        return bed.batch, np.unpackbits(bed.bits, count=bed.batch.rows).astype(bool)
