"""Rows per provider, as far as a list's metadata and the DNS's kept answers tell; only `counted` reads a list.

A domain's provider is what `engine resolve` found; else what the shipped table of well-known domains says; else the
domain itself, for whoever serves one small domain paces it for itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import polars as pl

from engine.route.answers import Kept, read_answers
from engine.route.provider import ProviderBook, load_providers
from formats.address import AddressError, domain_to_ascii
from formats.listmeta import ListMeta

ANSWERS_FILE = "domains.jsonl"
PROVIDERS_FILE = "providers.toml"
NO_MAIL = frozenset({"null_mx", "none"})


class Counts(msgspec.Struct, frozen=True, kw_only=True):
    """Rows per provider, the tail of which only the sum is known, and the rows whose domain takes no mail."""

    providers: dict[str, int]
    other_rows: int = 0
    other_domains: int = 0
    no_mail_rows: int = 0
    told_by: str  # for people: whose word it is

    @property
    def rows(self) -> int:
        """Rows that will be sent."""
        return sum(self.providers.values()) + self.other_rows


class DomainCounts(msgspec.Struct, frozen=True, kw_only=True):
    """What a list says of itself: rows per domain or provider, and the tail."""

    rows: int
    domain_rows: dict[str, int] = {}
    provider_rows: dict[str, int] = {}
    other_domains: int = 0


def of_metas(metas: Sequence[ListMeta]) -> DomainCounts:
    """The files' metadata together. The tails' domains may be the same ones, so the largest tail counts."""
    domains: Counter[str] = Counter()
    providers: Counter[str] = Counter()
    for meta in metas:
        domains.update(meta.domain_rows)
        if all(other.provider_rows for other in metas):
            providers.update(meta.provider_rows)
    return DomainCounts(
        rows=sum(meta.rows for meta in metas),
        domain_rows=dict(domains),
        provider_rows=dict(providers),
        other_domains=max((meta.other_domains for meta in metas), default=0),
    )


def by_provider(told: DomainCounts, answers: Mapping[str, Kept], book: ProviderBook) -> Counts | None:
    """Rows per provider; None where nothing is known of the list's domains.

    Answers kept beside the plan are newer than what `prepare` noted, so they come first.
    """
    if not told.domain_rows and not told.provider_rows:
        return None
    if answers and told.domain_rows:
        source: Mapping[str, int] = told.domain_rows
        told_by = "the answers of `engine resolve`"
    elif told.provider_rows:
        source, told_by = told.provider_rows, "the list, as `engine prepare` noted it"
    else:
        source, told_by = told.domain_rows, "the table of well-known domains; `engine resolve` would ask the DNS"
    providers: Counter[str] = Counter()
    no_mail = 0
    for domain, rows in source.items():
        answer = answers.get(domain) if source is told.domain_rows else None
        if answer is not None and answer.kind in NO_MAIL:
            no_mail += rows
        elif answer is not None and answer.provider:
            providers[answer.provider] += rows
        else:
            providers[book.of_domain(domain) or domain] += rows
    other = max(0, told.rows - no_mail - sum(providers.values()))
    return Counts(
        providers={name: rows for name, rows in providers.most_common() if rows},
        other_rows=other,
        other_domains=max(told.other_domains, 1) if other else 0,
        no_mail_rows=no_mail,
        told_by=told_by,
    )


def kept_answers(folder: Path) -> dict[str, Kept]:
    """What `engine resolve` left in the campaign folder, by domain; nothing where it was not run."""
    return read_answers(folder / ANSWERS_FILE)


def provider_book(folder: Path) -> ProviderBook:
    """The shipped table with the campaign's own over it."""
    own = folder / PROVIDERS_FILE
    return load_providers(*([own] if own.exists() else []))


def counted(files: Sequence[str], column: str) -> DomainCounts:
    """The domains of a list that nobody prepared, by reading its address column: some seconds per ten million rows.

    Raises polars' errors; what is no domain is nobody's row.
    """
    addresses = pl.col(column).cast(pl.String)
    counts = (
        pl.scan_parquet(list(files))
        .select(addresses.str.strip_chars().str.split("@").list.last().str.to_lowercase().alias("domain"))
        .drop_nulls()
        .group_by("domain")
        .len()
        .collect(engine="streaming")
    )
    rows: Counter[str] = Counter()
    for domain, count in counts.iter_rows():
        try:
            rows[domain_to_ascii(domain)] += count
        except AddressError:
            continue
    return DomainCounts(rows=rows.total(), domain_rows=dict(rows))
