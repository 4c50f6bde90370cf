"""Outcomes by recipient domain, added up span by span. Pure over columns."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from engine.results.resolve import ACCEPTED
from formats.outcomes import WORDS

Numbers = npt.NDArray[Any]

NO_DOMAIN = "(no domain)"


class Coded(msgspec.Struct, frozen=True):
    """One column as numbers into a short list of words."""

    words: list[str]
    codes: Numbers


class DomainLine(msgspec.Struct, frozen=True):
    """One domain: rows per word, and how long its accepted messages took from first attempt to acceptance."""

    domain: str
    rows: int
    words: list[int]
    attempts: int
    accepted: int
    waited_s: float  # mean over the accepted


def code_domains(addresses: pa.ChunkedArray) -> Coded:
    """The domains of these addresses, lower case; what has no @ is `NO_DOMAIN`."""
    series = pl.Series(addresses).cast(pl.String)
    # The last @ counts: a quoted local part may hold others.
    parts = series.str.split("@").list
    domain = parts.last().set(parts.len().fill_null(0) < 2, None)
    encoded = domain.to_arrow().cast(pa.string()).dictionary_encode()
    return _lowered(encoded)


def code_column(column: pa.ChunkedArray) -> Coded:
    """The same of a column that holds domains."""
    plain = column.cast(pa.string()) if not pa.types.is_dictionary(column.type) else column
    encoded = plain.unify_dictionaries().combine_chunks() if isinstance(plain, pa.ChunkedArray) else plain
    if not pa.types.is_dictionary(encoded.type):
        encoded = encoded.dictionary_encode()
    return _lowered(encoded)


def _lowered(encoded: pa.Array) -> Coded:
    if isinstance(encoded, pa.ChunkedArray):
        encoded = encoded.combine_chunks()
    numbers: dict[str, int] = {}
    words = pc.utf8_rtrim(pc.utf8_lower(pc.utf8_trim_whitespace(encoded.dictionary.cast(pa.string()))), ".")
    same = [numbers.setdefault(word or NO_DOMAIN, len(numbers)) for word in words.to_pylist()]
    none = numbers.setdefault(NO_DOMAIN, len(numbers))
    mapping = np.array([*same, none], np.int32)
    index = encoded.indices.fill_null(len(same)).to_numpy().astype(np.int64)
    return Coded(list(numbers), mapping[index])


class Domains:
    """Counts of every domain seen."""

    def __init__(self) -> None:
        self._number: dict[str, int] = {}
        self._words: Numbers = np.zeros((0, len(WORDS)), np.int64)
        self._attempts: Numbers = np.zeros(0, np.int64)
        self._waited: Numbers = np.zeros(0, np.float64)

    def add(self, coded: Coded, word: Numbers, attempts: Numbers, first_at: Numbers, last_at: Numbers) -> None:
        """Take in a span."""
        here = len(coded.words)
        counts = np.bincount(coded.codes.astype(np.int64) * len(WORDS) + word, minlength=here * len(WORDS))
        tries = np.bincount(coded.codes, weights=attempts, minlength=here).astype(np.int64)
        timed = (word == ACCEPTED) & (first_at > 0)
        waited = np.bincount(coded.codes[timed], weights=(last_at - first_at)[timed] / 1e6, minlength=here)
        place = np.array([self._number.setdefault(name, len(self._number)) for name in coded.words], np.int64)
        grow = len(self._number) - len(self._words)
        if grow:
            self._words = np.concatenate((self._words, np.zeros((grow, len(WORDS)), np.int64)))
            self._attempts = np.concatenate((self._attempts, np.zeros(grow, np.int64)))
            self._waited = np.concatenate((self._waited, np.zeros(grow, np.float64)))
        self._words[place] += counts.reshape(here, len(WORDS))
        self._attempts[place] += tries
        self._waited[place] += waited

    def __len__(self) -> int:
        return int((self._words.sum(axis=1) > 0).sum())

    def largest(self, most: int) -> tuple[list[DomainLine], DomainLine | None]:
        """The domains with most rows, and the rest as one line."""
        rows = self._words.sum(axis=1)
        names = list(self._number)
        order = sorted(np.flatnonzero(rows).tolist(), key=lambda n: (-rows[n], names[n]))
        rest = order[most:]
        return [self._line(names[n], [n]) for n in order[:most]], (
            self._line(f"{len(rest):,} other domains", rest) if rest else None
        )

    def slowest(self, most: int, at_least: int) -> list[DomainLine]:
        """Of domains with `at_least` accepted rows those that kept their messages waiting longest."""
        accepted = self._words[:, ACCEPTED]
        names = list(self._number)
        able = np.flatnonzero(accepted >= max(1, at_least))
        mean = self._waited[able] / accepted[able]
        order = able[np.argsort(-mean, kind="stable")][:most].tolist()
        return [self._line(names[n], [n]) for n in order]

    def _line(self, name: str, places: list[int]) -> DomainLine:
        words = self._words[places].sum(axis=0)
        accepted = int(words[ACCEPTED])
        waited = float(self._waited[places].sum()) / accepted if accepted else 0.0
        return DomainLine(name, int(words.sum()), words.tolist(), int(self._attempts[places].sum()), accepted, waited)
