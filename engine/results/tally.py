"""Counts of attempts by provider, verdict, code and minute, and of the replies that were not a yes. Pure."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from engine.results.attempts import Attempts
from formats.sendlog import Verdict

Numbers = npt.NDArray[Any]

MINUTE_US = 60_000_000
_MOST_BINS = 4_000_000  # above this a sort is cheaper than the empty bins
_MOST_REPLIES = 5_000  # kinds of reply kept per log; the rarest are dropped beyond

# Words that differ by a number, a queue id or a (masked) address are the same reply.
_VARIABLE = r"<[^>\s]*>|[\w.+*-]+@[\w.*-]+|[A-Za-z_-]*\d[\w-]*"


# What is no yes.
_TOLD = np.zeros(256, bool)
_TOLD[[Verdict.DEFERRED, Verdict.REJECTED, Verdict.LOST, Verdict.IN_DOUBT]] = True


class Tally(msgspec.Struct):
    """Counts of one log or of many. `keys` are distinct; row i of every array belongs together."""

    provider: Numbers
    verdict: Numbers
    code: Numbers
    minute: Numbers  # minutes since 1970, UTC
    count: Numbers

    @classmethod
    def empty(cls) -> Tally:
        return cls(*(np.zeros(0, np.int64) for _ in range(5)))


def tally(attempts: Attempts, places: Numbers | None = None) -> Tally:
    """The counts of these attempts, or of those at `places`."""
    columns = (attempts.provider, attempts.verdict, attempts.code, attempts.ended)
    provider, verdict, code, ended = columns if places is None else (column.take(places) for column in columns)
    return _counted(provider, verdict.astype(np.int64), code.astype(np.int64), ended // MINUTE_US, None)


def merged(tallies: list[Tally]) -> Tally:
    """The sum of several."""
    if not tallies:
        return Tally.empty()
    columns = [np.concatenate([getattr(t, name) for t in tallies]) for name in Tally.__struct_fields__]
    return _counted(columns[0], columns[1], columns[2], columns[3], columns[4])


def _counted(provider: Numbers, verdict: Numbers, code: Numbers, minute: Numbers, weight: Numbers | None) -> Tally:
    if not len(provider):
        return Tally.empty()
    code = np.minimum(code, 999)
    first = int(minute.min())
    minutes, providers = int(minute.max()) - first + 1, int(provider.max()) + 1
    # Few (verdict, code) pairs occur at all; numbering them keeps the bins few.
    pair = verdict * 1000 + code
    present = np.flatnonzero(np.bincount(pair))
    number = np.zeros(int(present[-1]) + 1, np.int64)
    number[present] = np.arange(len(present))
    key = ((minute - first) * providers + provider) * len(present) + number[pair]
    if minutes * providers * len(present) <= _MOST_BINS:
        bins = np.bincount(key, weight) if weight is not None else np.bincount(key)
        keys = np.flatnonzero(bins)
        counts = bins[keys].astype(np.int64)
    else:
        keys, inverse = np.unique(key, return_inverse=True)
        counts = np.bincount(inverse, weight).astype(np.int64)
    words = present[keys % len(present)]
    rest = keys // len(present)
    return Tally(rest % providers, words // 1000, words % 1000, rest // providers + first, counts)


class Replies:
    """The refusals by (provider, verdict, code, words), each with one example as it was received."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[int, int, int, str]] = Counter()
        self.examples: dict[tuple[int, int, int, str], str] = {}

    def add(self, attempts: Attempts) -> None:
        """Count the replies of attempts that were deferred, rejected, lost or left in doubt."""
        told = np.flatnonzero(_TOLD.take(attempts.verdict) & (attempts.flags == 0))
        if not len(told):
            return
        text = attempts.text.take(pa.array(told)).dictionary_encode()
        words = pc.replace_substring_regex(text.dictionary, _VARIABLE, "…").to_pylist()
        texts = text.dictionary.to_pylist()
        index = text.indices.fill_null(len(words)).to_numpy().astype(np.int64)
        words.append("")
        texts.append("")
        provider, verdict, code = attempts.provider[told], attempts.verdict[told], attempts.code[told]
        # Texts with the same words become one number first, so that only kinds of reply reach the Python loop.
        numbers: dict[str, int] = {}
        kind_of_text = np.array([numbers.setdefault(word, len(numbers)) for word in words], np.int64)
        kinds = list(numbers)
        key = ((kind_of_text[index] * 65_536 + provider) * 256 + verdict) * 1000 + np.minimum(code, 999)
        found, first, count = np.unique(key, return_index=True, return_counts=True)
        for number, at, times in zip(found.tolist(), first.tolist(), count.tolist(), strict=True):
            rest, reply_code = divmod(number, 1000)
            rest, said = divmod(rest, 256)
            kind, at_provider = divmod(rest, 65_536)
            name = (at_provider, said, reply_code, kinds[kind])
            self.counts[name] += times
            self.examples.setdefault(name, texts[int(index[at])])
        if len(self.counts) > 2 * _MOST_REPLIES:
            self.counts = Counter(dict(self.counts.most_common(_MOST_REPLIES)))
            self.examples = {name: self.examples[name] for name in self.counts}
