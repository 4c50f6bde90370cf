"""What `engine prepare` writes into the list's Parquet metadata, so that `plan` and `inspect` need no scan.

Bytes: the file's key-value metadata has the key `rowpost`, its value UTF-8 JSON of `ListMeta`. Counts are over the
whole file. `domain_rows` holds the 10,000 largest domains, `other_domains` and `other_rows` the rest, so that the sum
is `rows`. A reader takes a file without the key, or of another format, for a list that nobody prepared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

FORMAT = 1
KEY = b"rowpost"
DOMAINS_KEPT = 10_000


class ListMetaError(ValueError):
    """The bytes are not list metadata this version reads."""


class Mixing(msgspec.Struct, frozen=True, kw_only=True):
    """How evenly the list is mixed. Deviations are in percentage points of the share of one domain (or provider).

    `worst_500` is the largest deviation of any big domain's share in any 500 successive rows from its share of the
    whole list; `worst_10000` likewise. `longest_run` counts successive rows of one domain. "Big" is one row in a
    hundred.
    """

    worst_500: float
    worst_500_domain: str = ""
    worst_10000: float
    worst_10000_domain: str = ""
    longest_run: int
    by: str = "domain"  # or "provider"


class Roles(msgspec.Struct, frozen=True, kw_only=True):
    """Which column is what."""

    address: str
    domain: str | None = None
    id: str | None = None


class ListMeta(msgspec.Struct, frozen=True, kw_only=True):
    """Everything `prepare` knows of the list it wrote."""

    format: int = FORMAT
    rows: int
    domains: int
    domain_rows: dict[str, int]
    other_domains: int = 0
    other_rows: int = 0
    provider_rows: dict[str, int] = {}  # where `engine resolve` had answered
    mixing: Mixing | None = None
    roles: Roles = Roles(address="email")
    row_group_rows: int = 10_000
    prepared_at_us: int = 0
    rejected: dict[str, int] = {}  # reason -> rows left out
    sources: list[str] = []
    engaged_first: str | None = None  # the column by which each domain's rows are in order, the largest value first


def of_counts(domain_rows: Mapping[str, int]) -> ListMeta:
    """Metadata that tells the domains' counts and nothing else."""
    return of_numbers(list(domain_rows), np.fromiter(domain_rows.values(), dtype=np.int64, count=len(domain_rows)))


def of_numbers(names: Sequence[str], rows: npt.NDArray[np.integer]) -> ListMeta:
    """As `of_counts`, of columns: `rows[i]` rows are of domain `names[i]`, none if 0."""
    present = np.flatnonzero(rows)
    candidates = present
    if len(present) > DOMAINS_KEPT:
        least = np.partition(rows[present], len(present) - DOMAINS_KEPT)[len(present) - DOMAINS_KEPT]
        candidates = present[rows[present] >= least]
    ordered = sorted((-int(rows[one]), names[one]) for one in candidates.tolist())
    kept = {name: -count for count, name in ordered[:DOMAINS_KEPT]}
    total = int(rows.sum())
    return ListMeta(
        rows=total,
        domains=len(present),
        domain_rows=kept,
        other_domains=len(present) - len(kept),
        other_rows=total - sum(kept.values()),
    )


def encode(meta: ListMeta) -> bytes:
    """The value that stands under `KEY`."""
    return msgspec.json.encode(meta)


def decode(raw: bytes) -> ListMeta:
    """The metadata in `raw`; raises ListMetaError."""
    try:
        meta = msgspec.json.decode(raw, type=ListMeta)
    except msgspec.MsgspecError as problem:
        raise ListMetaError(str(problem)) from None
    if meta.format != FORMAT:
        raise ListMetaError(f"list metadata format {meta.format}, this version reads {FORMAT}")
    return meta


def of_metadata(metadata: Mapping[bytes, bytes] | None) -> ListMeta | None:
    """The list metadata in a Parquet file's key-value metadata, None where there is none that this version reads."""
    raw = (metadata or {}).get(KEY)
    if raw is None:
        return None
    try:
        return decode(raw)
    except ListMetaError:
        return None
