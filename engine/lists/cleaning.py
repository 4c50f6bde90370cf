"""A column of addresses made clean: trimmed, checked by the mailbox grammar, in canonical form.

The grammar is `formats.address`; what it says of one address is said here of a column. A plain ASCII address is told by
expressions that polars runs in all threads (`plain_parts`); the few others go through `parse_mailbox` one by one
(`settle`), in the thread that takes the batches.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl
import polars_hash  # noqa: F401  registers the name space `nchash`

from formats.address import PADDING, PLAIN_MOST, PLAIN_PATTERN, AddressError, canonical, parse_mailboxes

Rows = npt.NDArray[np.int64]

# What Python's str.strip() takes for white space, and the invisible characters that exports leave.
_TRIMMED = "".join(chr(c) for c in range(0x3001) if chr(c).isspace()) + PADDING

CANONICAL, DOMAIN, HARD, PROBLEM = "__canonical", "__domain", "__hard", "__problem"
_TEXT, _IS_PLAIN = "__text", "__is_plain"


def _is_plain(text: pl.Expr) -> pl.Expr:
    return (text.str.len_bytes() <= PLAIN_MOST) & text.str.contains(PLAIN_PATTERN)


def _domain_of(text: pl.Expr) -> pl.Expr:
    return text.str.slice(text.str.find("@", literal=True) + 1)


def _as_written(text: pl.Expr) -> pl.Expr:
    """A plain address with its domain in lower case, and its local part as it is."""
    return text.str.replace(r"@.*", "@") + _domain_of(text).str.to_lowercase()


def plain_parts(rows: pl.LazyFrame, column: str, *, fold_local: bool = True) -> pl.LazyFrame:
    """`rows` with `__canonical` and `__domain` of plain addresses; the text of the others, as it is, in `__hard`."""
    text = pl.col(_TEXT)
    return (
        rows.with_columns(pl.col(column).cast(pl.String).alias(_TEXT))
        .with_columns(_is_plain(text).fill_null(False).alias(_IS_PLAIN))
        .with_columns(
            pl.when(_IS_PLAIN).then(text.str.to_lowercase() if fold_local else _as_written(text)).alias(CANONICAL),
            pl.when(pl.col(_IS_PLAIN).not_()).then(text.fill_null("")).alias(HARD),
        )
        .with_columns(_domain_of(pl.col(CANONICAL)).alias(DOMAIN))
        .drop(_TEXT, _IS_PLAIN)
    )


def settle(batch: pl.DataFrame, column: str, *, fold_local: bool = True) -> pl.DataFrame:
    """A batch of `plain_parts` with the others filled in: `__canonical`, `__domain`, or `__problem` with the reason.

    `__hard` is trimmed; it stays null where the address was plain as it stood.
    """
    hard = batch.get_column(HARD).is_not_null().arg_true()
    problems = pl.Series(PROBLEM, [None], dtype=pl.String).new_from_index(0, batch.height)
    if not len(hard):
        return batch.with_columns(problems)
    # Most of them are plain once they are trimmed, and need no Python either.
    text = batch.get_column(HARD).gather(hard).str.strip_chars(_TRIMMED)
    found = plain_parts(text.to_frame(column).lazy(), column, fold_local=fold_local).collect()
    harder = found.get_column(HARD).is_not_null().arg_true()
    keys: list[str | None] = []
    domains: list[str | None] = []
    told: list[str | None] = []
    for parsed in parse_mailboxes(batch.get_column(column).gather(hard.gather(harder)).cast(pl.String).to_list()):
        is_bad = isinstance(parsed, AddressError)
        keys.append(None if is_bad else canonical(parsed, fold_local=fold_local))  # type: ignore[arg-type]  # is_bad
        domains.append(None if is_bad else parsed.domain)  # type: ignore[union-attr]  # is_bad
        told.append(str(parsed) if is_bad else None)
    return batch.with_columns(
        batch.get_column(CANONICAL).scatter(
            hard, found.get_column(CANONICAL).scatter(harder, pl.Series(keys, dtype=pl.String))
        ),
        batch.get_column(DOMAIN).scatter(
            hard, found.get_column(DOMAIN).scatter(harder, pl.Series(domains, dtype=pl.String))
        ),
        batch.get_column(HARD).scatter(hard, text),
        problems.scatter(hard.gather(harder), pl.Series(told, dtype=pl.String)),
    )


def clean_addresses(raw: pl.Series, unclean: Rows) -> pl.Series:
    """Valid addresses as the list has them: trimmed, the domain as lower-case A-labels, the local part as it was.

    `unclean` are the places of those that may not be so yet.
    """
    text = raw.cast(pl.String)
    if not len(unclean):
        return text
    trimmed = text.gather(unclean).str.strip_chars(_TRIMMED).to_frame(_TEXT)
    clean = trimmed.select(pl.when(_is_plain(pl.col(_TEXT))).then(_as_written(pl.col(_TEXT)))).to_series()
    hard = clean.is_null().arg_true()
    if len(hard):
        mailboxes = parse_mailboxes(trimmed.to_series().gather(hard).to_list())
        clean = clean.scatter(hard, pl.Series([str(mailbox) for mailbox in mailboxes], dtype=pl.String))
    return text.scatter(unclean, clean)


def hashed(expression: pl.Expr) -> pl.Expr:
    """XXH3-64 of the strings, as `formats.suppression.hash_addresses`; null stays null."""
    namespaced: Any = expression  # `nchash` is registered by polars_hash at import, unseen by the type checker
    hashes: pl.Expr = namespaced.nchash.xxh3_64()
    return hashes
