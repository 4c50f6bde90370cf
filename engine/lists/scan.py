"""The first pass of `prepare`: addresses and the columns that filters name are read once, and every row is judged.

What stays is a few bytes a row (a hash, a domain number, a status) whatever the list's width, so that everything after
can look at the whole list at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, cast

import numpy as np
import numpy.typing as npt
import polars as pl

from engine.errors import EngineError, Exit
from engine.lists.cleaning import CANONICAL, DOMAIN, HARD, PROBLEM, hashed, plain_parts, settle
from engine.lists.domain_numbers import DomainNumbers
from engine.lists.folding import folded
from engine.lists.rejects import Rejects, Status
from engine.lists.source import ListUnreadable
from formats.suppression import Hashes, Mask

BATCH_ROWS = 1_000_000
_HASH, _DOMAIN_HASH, _UNCLEAN = "__hash", "__domain_hash", "__unclean"


class FilterWrong(EngineError):
    """--where {where!r}: {problem}."""

    exit_code = Exit.USAGE
    hint = "Write a condition in SQL over the list's columns, for instance: --where \"active and language = 'de'\""


class SuppressionList(Protocol):
    """What a scan asks of a suppression list."""

    def check_hashed(self, hashes: Hashes, addresses: Sequence[str]) -> Mask: ...


class DomainChecker(Protocol):
    """What a scan asks of the DNS: for each domain that cannot take mail, why. Temporary failures are no answer."""

    def __call__(self, domains: Sequence[str]) -> dict[str, str]: ...


class Scanned:
    """What the first pass knows of `rows` rows. Numbers of domains index `names`."""

    def __init__(self, rows: int) -> None:
        self.hashes: Hashes = np.zeros(rows, dtype=np.uint64)
        self.domains = np.zeros(rows, dtype=np.uint32)
        self.status = np.zeros(rows, dtype=np.uint8)
        self.unclean: Mask = np.zeros(rows, dtype=np.bool_)  # the list has these addresses in another spelling
        self.numbers = DomainNumbers()

    @property
    def names(self) -> list[str]:
        return self.numbers.names

    @property
    def kept(self) -> Mask:
        kept: Mask = self.status == Status.KEPT
        return kept

    def counts(self) -> dict[str, int]:
        """Rows by status, the kept ones among them."""
        by_status = np.bincount(self.status, minlength=len(Status))
        return {one.label: int(by_status[one]) for one in Status}


def scan(
    listed: pl.LazyFrame,
    rows: int,
    address: str,
    *,
    where: str | None = None,
    suppressions: Sequence[SuppressionList] = (),
    fold_local: bool = True,
    fold_provider: bool = False,
    rejects: Rejects,
    advance: Callable[[int], object] = lambda rows: None,
) -> Scanned:
    """Judge every row: filtered, empty, invalid, suppressed, or kept so far; the rejected ones are written."""
    known = Scanned(rows)
    wanted = [pl.col(address), *([_condition(listed, where)] if where else [])]
    asked = plain_parts(listed.select(wanted), address, fold_local=fold_local).with_columns(
        hashed(pl.col(CANONICAL)).fill_null(0).alias(_HASH),
        hashed(pl.col(DOMAIN)).fill_null(0).alias(_DOMAIN_HASH),
        (pl.col(CANONICAL) != pl.col(address).cast(pl.String)).fill_null(True).alias(_UNCLEAN),
    )
    read = 0
    for start, raw in batches_of(asked):
        batch = settle(raw, address, fold_local=fold_local)
        _judge(batch, start, known, address, suppressions, fold_local, fold_provider, rejects)
        read = start + batch.height
        advance(batch.height)
    if read != rows:
        raise ListUnreadable(file="the list", problem=f"{rows} rows announced, {read} read")
    return known


def batches_of(listed: pl.LazyFrame, *, piece_rows: int | None = None) -> Iterator[tuple[int, pl.DataFrame]]:
    """The rows in pieces of about a million, each with the number of its first row; raises ListUnreadable.

    polars reads ahead of a slow taker by a few pieces and no more (measured).
    """
    start = 0
    try:
        for batch in listed.collect_batches(
            chunk_size=piece_rows or BATCH_ROWS, maintain_order=True, engine="streaming"
        ):
            yield start, batch
            start += batch.height
    except pl.exceptions.PolarsError as problem:
        raise ListUnreadable(file="the list", problem=problem) from None


def _condition(listed: pl.LazyFrame, where: str) -> pl.Expr:
    try:
        condition = pl.sql_expr(where).fill_null(False).alias("__where")
        kind = listed.select(condition).collect_schema()["__where"]
    except pl.exceptions.PolarsError as problem:
        raise FilterWrong(where=where, problem=str(problem).split("\n")[0]) from None
    if kind != pl.Boolean:
        raise FilterWrong(where=where, problem=f"is {kind}, not true or false")
    return condition


def _judge(
    batch: pl.DataFrame,
    start: int,
    known: Scanned,
    address: str,
    suppressions: Sequence[SuppressionList],
    fold_local: bool,
    fold_provider: bool,
    rejects: Rejects,
) -> None:
    here = slice(start, start + batch.height)
    status = np.zeros(batch.height, dtype=np.uint8)
    is_bad = batch.get_column(CANONICAL).is_null().to_numpy()
    is_empty = is_bad & (batch.get_column(HARD) == "").fill_null(False).to_numpy()
    status[is_bad] = Status.INVALID
    status[is_empty] = Status.EMPTY

    canonical = batch.get_column(CANONICAL)
    hard = batch.get_column(HARD).is_not_null().arg_true().to_numpy()
    hashes = _patched(batch, _HASH, hard, CANONICAL)
    asked = hashes
    if not fold_local and suppressions:
        # A suppressed ann@ stops Ann@ too, whatever dedup thinks of them.
        canonical = settle(batch.drop(PROBLEM), address).get_column(CANONICAL)
        lower = canonical.str.to_lowercase()
        canonical, asked = lower, _hashes(lower)
    for one in suppressions:
        found = one.check_hashed(asked, cast(Sequence[str], canonical)) & ~is_bad
        status[found] = Status.SUPPRESSED
    if "__where" in batch.columns:
        status[~batch.get_column("__where").to_numpy()] = Status.FILTERED

    known.status[here] = status
    known.hashes[here] = _hashes(batch.select(folded(CANONICAL, DOMAIN)).to_series()) if fold_provider else hashes
    known.domains[here] = known.numbers.take(_patched(batch, _DOMAIN_HASH, hard, DOMAIN), batch.get_column(DOMAIN))
    known.unclean[here] = batch.get_column(_UNCLEAN).to_numpy()
    for reason in (Status.EMPTY, Status.INVALID, Status.SUPPRESSED):
        rows = np.flatnonzero(status == reason)
        picked = batch.select(address, PROBLEM)[rows]
        details = picked.get_column(PROBLEM).fill_null("")
        rejects.add(rows + start, picked.get_column(address), reason.label, details)


def _hashes(canonical: pl.Series) -> Hashes:
    frame = canonical.to_frame("__key")
    found: Hashes = frame.select(hashed(pl.col("__key")).fill_null(0)).to_series().to_numpy().astype(np.uint64)
    return found


def _patched(batch: pl.DataFrame, column: str, hard: npt.NDArray[np.integer], of: str) -> Hashes:
    """The hashes in `column`, which the scan made of what it knew, with those of the rows that `settle` looked at."""
    hashes: Hashes = batch.get_column(column).to_numpy()
    if len(hard):
        hashes = hashes.copy()
        hashes[hard] = _hashes(batch.get_column(of).gather(hard))
    return hashes
