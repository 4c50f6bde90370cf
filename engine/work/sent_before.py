"""What the logs here say was sent lately, by source and provider: a restart must not begin its windows empty.

Reads sealed records only and decides nothing. Each message counts when its result was written, which is later than it
left: an error on the safe side. One whose result was not written (its worker was killed) counts a second after the
last that its log says. What was given back untouched never left. Times are UTC microseconds.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from formats.sendlog import NAME_PROVIDER, NAME_SOURCE, Kind, LogDamaged, Reader, Verdict

DAY_US = 86_400_000_000
_AFTER_US = 1_000_000  # results reach the file within 50 ms; a machine under load takes longer
_FLIGHT_US = 900_000_000  # an intent this old has its result, or its connection is long gone (the dot has 10 minutes)
_GRAIN_US = 100_000  # moments nearer than this are told as one, at the later moment

Pair = tuple[str, str]  # source, provider
History = dict[Pair, list[tuple[int, int]]]  # (moment, messages), oldest first
_Numbers = npt.NDArray[Any]


def sent_before(logs: Iterable[Path], since_us: int, host_id: str) -> History:
    """What this host sent since then, by its logs; logs that end before, or cannot be read, are left out."""
    grains: dict[Pair, dict[int, int]] = {}
    for path in logs:
        try:
            if path.stat().st_mtime * 1e6 < since_us - _FLIGHT_US or not path.stat().st_size:
                continue
            reader = Reader(pa.memory_map(str(path)).read_buffer())
        except (OSError, LogDamaged):
            continue  # whoever recovers the rows tells of it
        if reader.log.header.host_id == host_id:
            _add_log(reader, since_us, grains)
    return {
        pair: [(grain * _GRAIN_US, messages) for grain, messages in sorted(found.items())]
        for pair, found in grains.items()
    }


def _add_log(reader: Reader, since_us: int, grains: dict[Pair, dict[int, int]]) -> None:
    names: dict[int, dict[int, str]] = {NAME_PROVIDER: {}, NAME_SOURCE: {}}
    # Of intents: serial, provider and source as one number; of results: serial, moment, whether it left.
    intents: list[tuple[_Numbers, _Numbers]] = []
    results: list[tuple[_Numbers, _Numbers, _Numbers]] = []
    last_us = 0
    for batch in reader:
        kind = batch.column("kind").to_numpy()
        if (kind == Kind.NAME).any():
            for index in np.flatnonzero(kind == Kind.NAME).tolist():
                told = names[batch.column("reason")[index].as_py()]
                told[batch.column("row")[index].as_py()] = batch.column("text")[index].as_py()
        at = batch.column("at").cast(pa.int64()).to_numpy()
        if not len(at):
            continue
        last_us = max(last_us, int(at.max()))
        if last_us < since_us - _FLIGHT_US:
            continue
        serial = batch.column("serial").to_numpy()
        begun = kind == Kind.INTENT
        where = batch.column("source").to_numpy().astype(np.int64) << 16 | batch.column("provider").to_numpy()
        intents.append((serial[begun], where[begun]))
        ended = (kind == Kind.RESULT) & (serial > 0)
        left = batch.column("verdict").to_numpy() != Verdict.UNTOUCHED
        results.append((serial[ended], at[ended], left[ended]))
    if not intents:
        return
    serials, where = (np.concatenate(column) for column in zip(*intents, strict=True))
    if not len(serials):
        return
    ended, at, left = (np.concatenate(column) for column in zip(*results, strict=True))
    # Intents are numbered in order, so that a result finds its own by counting.
    first = int(serials[0])
    moments = np.full(len(serials), last_us + _AFTER_US, dtype=np.int64)
    known = (ended >= first) & (ended < first + len(serials))
    places = (ended[known] - first).astype(np.int64)
    moments[places] = np.where(left[known], at[known], 0)
    for number in np.unique(where).tolist():
        pair = names[NAME_SOURCE].get(number >> 16, ""), names[NAME_PROVIDER].get(number & 0xFFFF, "")
        mine = moments[(where == number) & (moments >= max(since_us, 1))]
        found = grains.setdefault(pair, {})
        for grain, messages in zip(*np.unique(-(-mine // _GRAIN_US), return_counts=True), strict=True):
            found[int(grain)] = found.get(int(grain), 0) + int(messages)
