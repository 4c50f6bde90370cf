"""A column of addresses made clean: trimmed, checked by the mailbox grammar, in canonical form.

The grammar is `formats.address`; what it says of one address is said here of a column. A plain ASCII address is told by
expressions that polars runs in all threads (`plain_parts`); the few others go through `parse_mailbox` one by one
(`settle`), in the thread that takes the batches.
"""

from __future__ import annotations

from typing import Any

import polars as pl
import polars_hash  # noqa: F401  registers the name space `nchash`

from formats.address import PADDING, PLAIN_MOST, PLAIN_PATTERN, AddressError, canonical, parse_mailboxes

# What Python's str.strip() takes for white space, and the invisible characters that exports leave.
_TRIMMED = "".join(chr(c) for c in range(0x3001) if chr(c).isspace()) + PADDING

CANONICAL, DOMAIN, HARD, PROBLEM = "__canonical", "__domain", "__hard", "__problem"


def plain_parts(rows: pl.LazyFrame, column: str) -> pl.LazyFrame:
    """`rows` with `__canonical` and `__domain` of plain addresses; the trimmed text of the others in `__hard`."""
    text = pl.col("__text")
    is_plain = (text.str.len_bytes() <= PLAIN_MOST) & text.str.contains(PLAIN_PATTERN)
    key = pl.col(CANONICAL)
    return (
        rows.with_columns(__text=pl.col(column).cast(pl.String).str.strip_chars(_TRIMMED))
        .with_columns(__is_plain=is_plain.fill_null(False))
        .with_columns(
            pl.when("__is_plain").then(text.str.to_lowercase()).alias(CANONICAL),
            pl.when(pl.col("__is_plain").not_()).then(text.fill_null("")).alias(HARD),
        )
        .with_columns(key.str.slice(key.str.find("@", literal=True) + 1).alias(DOMAIN))
        .drop("__text", "__is_plain")
    )


def settle(batch: pl.DataFrame, column: str, *, fold_local: bool = True) -> pl.DataFrame:
    """A batch of `plain_parts` with the others filled in: `__canonical`, `__domain`, or `__problem` with the reason."""
    if not fold_local:
        batch = batch.with_columns(
            pl.when(pl.col(CANONICAL).is_not_null())
            .then(pl.col(column).str.strip_chars(_TRIMMED).str.replace(r"@.*", "@") + pl.col(DOMAIN))
            .alias(CANONICAL)
        )
    hard = batch.get_column(HARD).is_not_null().arg_true()
    problems = pl.Series(PROBLEM, [None], dtype=pl.String).new_from_index(0, batch.height)
    if not len(hard):
        return batch.with_columns(problems)
    raw = batch.get_column(column).gather(hard).cast(pl.String).to_list()
    keys: list[str | None] = []
    domains: list[str | None] = []
    told: list[str | None] = []
    for parsed in parse_mailboxes(raw):
        is_bad = isinstance(parsed, AddressError)
        keys.append(None if is_bad else canonical(parsed, fold_local=fold_local))  # type: ignore[arg-type]  # is_bad
        domains.append(None if is_bad else parsed.domain)  # type: ignore[union-attr]  # is_bad
        told.append(str(parsed) if is_bad else None)
    return batch.with_columns(
        batch.get_column(CANONICAL).scatter(hard, pl.Series(keys, dtype=pl.String)),
        batch.get_column(DOMAIN).scatter(hard, pl.Series(domains, dtype=pl.String)),
        problems.scatter(hard, pl.Series(told, dtype=pl.String)),
    )


def clean_addresses(raw: pl.Series) -> pl.Series:
    """Valid addresses as the list has them: trimmed, the domain as lower-case A-labels, the local part as it was."""
    text = raw.cast(pl.String).str.strip_chars(_TRIMMED)
    lower = text.str.to_lowercase()
    changed = ((lower != text) | (lower.str.len_bytes() != lower.str.len_chars())).arg_true()
    if not len(changed):
        return text
    mailboxes = parse_mailboxes(text.gather(changed).to_list())
    return text.scatter(changed, pl.Series([str(mailbox) for mailbox in mailboxes], dtype=pl.String))


def hashed(expression: pl.Expr) -> pl.Expr:
    """XXH3-64 of the strings, as `formats.suppression.hash_addresses`; null stays null."""
    namespaced: Any = expression  # `nchash` is registered by polars_hash at import, unseen by the type checker
    hashes: pl.Expr = namespaced.nchash.xxh3_64()
    return hashes
