"""The order of the list: every domain spread evenly over it, so that no provider waits while another is flooded.

Two levels. *First*, a row's key is (rank within its domain + u) / rows of its domain, u by chance for each domain;
the keys in [0, 1) are cut into stretches of about a million rows. *Second*, within a stretch every domain (or
provider) with more than a row in 5,000 of the list is ranked anew, and all the small ones together as one: taken
alone, small domains arrive like raindrops and displace the big ones (measured: a window of 500 rows was off by 3.4
points for the biggest domain with the first level alone, by 1.4 with both).

Pure: arrays in, arrays out; chance comes from a seed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.lists.sorting import order_of
from formats.listmeta import Mixing
from formats.suppression import Mask

Groups = npt.NDArray[np.uint32]
Places = npt.NDArray[np.uint32]
NOWHERE = np.uint32(0xFFFFFFFF)

STRETCH_ROWS = 1_000_000
_SLICE = 1 << 20
_BIG_SHARE = 1 / 5000
_MEASURED_SHARE = 0.01
_MEASURED_MOST = 16


def ranks(groups: Groups, seen: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    """How many rows of the same group came before each row; `seen` carries the counts from call to call."""
    count = len(groups)
    if len(seen) <= 1 << 16:
        # A stable argsort of 16-bit numbers is a radix sort.
        place: npt.NDArray[np.int64] = np.argsort(groups.astype(np.uint16), kind="stable")
    else:
        place = order_of(groups, 32)
    sorted_groups = groups[place]
    is_start = np.concatenate(([True], sorted_groups[1:] != sorted_groups[:-1])) if count else np.empty(0, np.bool_)
    starts = np.flatnonzero(is_start)
    lengths = np.diff(np.append(starts, count))
    within = np.arange(count) - np.repeat(starts, lengths)
    rank = np.empty(count, dtype=np.uint32)
    rank[place] = within + seen[sorted_groups]
    seen[sorted_groups[starts]] += lengths.astype(np.uint32)
    return rank


def mixed(
    domains: Groups,
    keep: Mask,
    *,
    seed: int,
    providers: Groups | None = None,
    order: npt.NDArray[np.uint32] | None = None,
    stretch_rows: int = STRETCH_ROWS,
) -> Places:
    """For each row its place in the mixed list, NOWHERE for rows that are not kept.

    `domains` gives each row's domain as a number, `providers` each domain's provider where that is known (numbers of
    their own, from 0). Within a domain rows come in `order` (row numbers), as they stand by default.
    """
    total = int(keep.sum())
    places = np.full(len(domains), NOWHERE, dtype=np.uint32)
    if not total:
        return places
    counts = np.zeros(int(domains.max()) + 1, dtype=np.uint32)
    for start in range(0, len(domains), _SLICE):
        piece = slice(start, start + _SLICE)
        counts += np.bincount(domains[piece][keep[piece]], minlength=len(counts)).astype(np.uint32)
    rng = np.random.default_rng(seed)
    offset = rng.random(len(counts))
    of_domain = providers if providers is not None else np.arange(len(counts), dtype=np.uint32)
    second = _second_groups(of_domain, counts, total)
    second_offset = rng.random(int(second.max()) + 1)

    rank = _all_ranks(domains, keep, order, len(counts))
    stretches = max(1, -(-total // stretch_rows))
    stretch: npt.NDArray[Any] = np.full(len(domains), stretches, dtype=np.uint16 if stretches < 65_535 else np.uint32)
    for start in range(0, len(domains), _SLICE):
        piece = slice(start, start + _SLICE)
        key = _first_key(rank[piece], domains[piece], offset, counts)
        stretch[piece] = np.where(keep[piece], np.minimum(key * stretches, stretches - 1), stretches)
    # A group of one domain is in order already, unless the operator wants another one than the list's.
    is_crowd = np.bincount(second, weights=counts > 0, minlength=len(second_offset)) > 1
    is_crowd[:] |= order is not None

    def place(rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        groups = second[domains[rows]]
        crowd = np.flatnonzero(is_crowd[groups])
        of_crowd = rows[crowd]
        key = _first_key(rank[of_crowd], domains[of_crowd], offset, counts)
        by = crowd[_in_order(key)]
        rows = rows.copy()
        rows[crowd], groups[crowd] = rows[by], groups[by]
        within = np.bincount(groups, minlength=len(second_offset)).astype(np.float64)
        again = ranks(groups, np.zeros(len(second_offset), dtype=np.uint32))
        return rows[_in_order((again + second_offset[groups]) / within[groups])]

    base = 0
    for rows in _two_at_once(place, _rows_of_each(stretch, stretches)):
        places[rows] = np.arange(base, base + len(rows), dtype=np.uint32)
        base += len(rows)
    return places


def _two_at_once(
    act: Callable[[npt.NDArray[np.int64]], npt.NDArray[np.int64]], pieces: Iterator[npt.NDArray[np.int64]]
) -> Iterator[npt.NDArray[np.int64]]:
    """What `act` makes of each piece, in order; the arrays' libraries release the interpreter while they work."""
    with ThreadPoolExecutor(2) as pool:
        waiting: deque[Future[npt.NDArray[np.int64]]] = deque()
        for piece in pieces:
            waiting.append(pool.submit(act, piece))
            if len(waiting) > 2:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def _first_key(
    rank: npt.NDArray[np.uint32], domains: Groups, offset: npt.NDArray[np.float64], counts: npt.NDArray[np.uint32]
) -> npt.NDArray[np.float64]:
    key: npt.NDArray[np.float64] = (rank + offset[domains]) / np.maximum(counts, 1)[domains]
    return key


def _in_order(key: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """The order of keys in [0, 1]: a stable argsort by their first 40 bits or more."""
    bits = 63 - max(1, len(key).bit_length())
    return order_of((key * 2.0**bits).astype(np.uint64), bits + 1)


def _second_groups(of_domain: Groups, counts: npt.NDArray[np.uint32], total: int) -> Groups:
    """Each domain's group of the second level: 0 for all small ones, else a number of its own (or its provider's)."""
    rows = np.bincount(of_domain, weights=counts)
    big = np.flatnonzero(rows > total * _BIG_SHARE)
    number = np.zeros(len(rows), dtype=np.uint32)
    number[big] = np.arange(1, len(big) + 1, dtype=np.uint32)
    return number[of_domain]


def _all_ranks(
    domains: Groups, keep: Mask, order: npt.NDArray[np.uint32] | None, groups: int
) -> npt.NDArray[np.uint32]:
    rank = np.zeros(len(domains), dtype=np.uint32)
    seen = np.zeros(groups, dtype=np.uint32)
    for start in range(0, len(domains), _SLICE):
        rows: npt.NDArray[np.integer] = (
            np.arange(start, min(start + _SLICE, len(domains))) if order is None else order[start : start + _SLICE]
        )
        rows = rows[keep[rows]]
        rank[rows] = ranks(domains[rows], seen)
    return rank


def _rows_of_each(stretch: npt.NDArray[Any], stretches: int) -> Iterator[npt.NDArray[np.int64]]:
    """The rows of stretch 0, 1, ..., ascending, sorted slice by slice: row numbers of a whole list take much memory.

    A stable argsort of 16-bit numbers is a radix sort.
    """
    counts = np.zeros(stretches + 1, dtype=np.int64)
    for start in range(0, len(stretch), _SLICE):
        counts += np.bincount(stretch[start : start + _SLICE], minlength=stretches + 1)
    ends = np.cumsum(counts)
    free = ends - counts
    ordered = np.empty(int(ends[stretches - 1]), dtype=np.uint32)
    for start in range(0, len(stretch), _SLICE):
        here = stretch[start : start + _SLICE]
        rows = np.argsort(here, kind="stable").astype(np.uint32) + np.uint32(start)
        edges = np.concatenate(([0], np.cumsum(np.bincount(here, minlength=stretches + 1))))
        for number in range(stretches):
            piece = rows[edges[number] : edges[number + 1]]
            ordered[free[number] : free[number] + len(piece)] = piece
            free[number] += len(piece)
    for number in range(stretches):
        yield ordered[ends[number] - counts[number] : ends[number]].astype(np.int64)


class MixingMeter:
    """Measures a sequence that arrives in pieces: worst window of 500 and of 10,000 for each big group, longest run."""

    def __init__(self, counts: npt.NDArray[np.integer], names: list[str], *, by: str = "domain") -> None:
        total = max(1, int(counts.sum()))
        shares = counts / total
        largest = np.argsort(-shares, kind="stable")[:_MEASURED_MOST]
        self._watched = [int(one) for one in largest if shares[one] >= _MEASURED_SHARE]
        self._share = shares
        self._names = names
        self._by = by
        self._rest = np.empty(0, dtype=np.int64)
        self._worst: dict[int, tuple[float, int]] = {500: (0.0, -1), 10_000: (0.0, -1)}
        self._run = 0
        self._last = -1
        self._longest = 0

    def take(self, groups: npt.NDArray[np.integer]) -> None:
        """The next rows' groups."""
        if not len(groups):
            return
        self._take_runs(groups)
        joined = np.concatenate((self._rest, groups))
        for group in self._watched:
            summed = np.concatenate(([0], np.cumsum(joined == group)))
            for window in self._worst:
                if len(joined) < window:
                    continue
                in_window = summed[window:] - summed[:-window]
                off = max(
                    int(in_window.max()) / window - self._share[group],
                    self._share[group] - int(in_window.min()) / window,
                )
                if off * 100 > self._worst[window][0]:
                    self._worst[window] = (float(off * 100), group)
        self._rest = joined[-9_999:]

    def interrupt(self) -> None:
        """What comes next does not follow on what came last."""
        self._rest = np.empty(0, dtype=np.int64)
        self._run, self._last = 0, -1

    def _take_runs(self, groups: npt.NDArray[np.integer]) -> None:
        edges = np.flatnonzero(groups[1:] != groups[:-1]) + 1
        starts = np.concatenate(([0], edges))
        lengths = np.diff(np.append(starts, len(groups)))
        if groups[0] == self._last:
            lengths[0] += self._run
        self._longest = max(self._longest, int(lengths.max()))
        self._run, self._last = int(lengths[-1]), int(groups[-1])

    def result(self) -> Mixing:
        """The figures. A list shorter than a window has a deviation of 0 there."""

        def name(window: int) -> str:
            group = self._worst[window][1]
            return self._names[group] if group >= 0 else ""

        return Mixing(
            worst_500=round(self._worst[500][0], 3),
            worst_500_domain=name(500),
            worst_10000=round(self._worst[10_000][0], 4),
            worst_10000_domain=name(10_000),
            longest_run=self._longest,
            by=self._by,
        )
