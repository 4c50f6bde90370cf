"""Domains as numbers 0, 1, ... in the order in which they come up, told apart by the XXH3-64 of their names.

A big domain is found by one look into a table of 2^20 slots; where two share a slot the later one is searched for.
(polars' categories would do, but their codes hold within one series only, unless somebody keeps an earlier one alive:
codes that changed without an error mixed a list wrongly.)
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import polars as pl

from formats.suppression import Hashes

_SLOT_BITS = 20
_SHIFT = np.uint64(64 - _SLOT_BITS)
_NO_DOMAIN = np.uint64(0)


class DomainNumbers:
    """`names[number]` is the domain."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self._hashes = np.empty(0, dtype=np.uint64)  # by number
        self._slots = np.zeros(1 << _SLOT_BITS, dtype=np.uint32)
        self._is_taken = np.zeros(1 << _SLOT_BITS, dtype=np.bool_)
        self._ordered = np.empty(0, dtype=np.uint64)  # the hashes ascending, and their numbers
        self._numbers = np.empty(0, dtype=np.uint32)

    def __len__(self) -> int:
        return len(self.names)

    def take(self, hashes: Hashes, domains: pl.Series) -> npt.NDArray[np.uint32]:
        """Each row's number; `hashes` are those of `domains`. A hash of 0 is no domain, and gets any number."""
        if not len(self.names):
            self._add(hashes, domains)
        if not len(self.names):
            return np.zeros(len(hashes), dtype=np.uint32)
        found: npt.NDArray[np.uint32] = self._slots[hashes >> _SHIFT]
        rest = np.flatnonzero(self._hashes[found] != hashes)
        rest = rest[hashes[rest] != _NO_DOMAIN]
        place, is_known = self._search(hashes[rest])
        if not is_known.all():
            new = rest[~is_known]
            self._add(hashes[new], domains.gather(new))
            place, _ = self._search(hashes[rest])
        found[rest] = self._numbers[place]
        return found

    def _search(self, hashes: Hashes) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.bool_]]:
        place = np.minimum(np.searchsorted(self._ordered, hashes), max(0, len(self._ordered) - 1))
        return place, self._ordered[place] == hashes

    def _add(self, hashes: Hashes, domains: pl.Series) -> None:
        """Rows of domains that are new to us."""
        values, first = np.unique(hashes, return_index=True)
        in_order = np.argsort(first[values != _NO_DOMAIN])
        values, first = values[values != _NO_DOMAIN][in_order], first[values != _NO_DOMAIN][in_order]
        start = len(self.names)
        self.names += domains.gather(first).to_list()
        self._hashes = np.concatenate((self._hashes, values))
        slots = (values >> _SHIFT).astype(np.int64)
        free = ~self._is_taken[slots]
        # Backwards, so that of two new ones in a slot the first keeps it: big domains come up early.
        self._slots[slots[free][::-1]] = np.arange(start, start + len(values), dtype=np.uint32)[free][::-1]
        self._is_taken[slots] = True
        by = np.argsort(self._hashes)
        self._ordered, self._numbers = self._hashes[by], by.astype(np.uint32)
