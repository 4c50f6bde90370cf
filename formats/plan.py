"""The plan file, `plan.json`: what `engine plan` decided and every later command relies on.

Bytes: UTF-8 JSON of `Plan`, one object, `format` first. Rows are numbered 0..rows-1 over the files in their order; a
batch is a run of whole row groups; a partition a run of batches. Nothing secret stands in it: keys appear by id.
Times are UTC microseconds since 1970.
"""

from __future__ import annotations

import msgspec

FORMAT = 1


class PlanError(ValueError):
    """The bytes are not a plan this version reads."""


class ListFile(msgspec.Struct, frozen=True):
    """One Parquet file of the list. `row_groups` are row counts; `fingerprint` covers its size and footer."""

    path: str
    rows: int
    row_groups: list[int]
    fingerprint: str


class Batch(msgspec.Struct, frozen=True, array_like=True):
    """A run of whole row groups: rows first_row .. first_row + rows - 1."""

    first_row: int
    rows: int


class Partition(msgspec.Struct, frozen=True, array_like=True):
    """A run of batches: first_batch .. first_batch + batches - 1."""

    first_batch: int
    batches: int


class Warmup(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The caps that `send` keeps while sources are young: messages a day and source, and each provider's part of them.

    `daily[n - 1]` is the n-th day's cap, `hourly` may be empty (derived). Providers that are not in `shares` are one
    together, with `other_share` of the cap and `other_rows` rows. `day_s` is how long a day lasts: a rehearsal's is
    shorter, and so are its hours.
    """

    schedule: str
    daily: list[int]
    hourly: list[int] = []
    days: dict[str, int]  # source -> the day of its warm-up on which the campaign begins; others are warm
    shares: dict[str, float]
    other_share: float = 0.0
    other_rows: int = 0
    day_s: float = 86_400.0


class Plan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything decided before the first connection."""

    format: int = FORMAT
    campaign_id: str
    planned_at_us: int
    rows: int
    files: list[ListFile]
    batches: list[Batch]
    partitions: list[Partition]
    address_column: str
    id_column: str | None = None
    columns: list[str]  # what the templates and the engine read of the list, in the order of the schema
    list_id: str | None = None
    list_fingerprint: str
    settings_fingerprint: str
    templates_fingerprint: str
    key_id: str
    store: str = "sqlite"  # "sqlite" or "postgresql": merging a plan of the latter needs the store
    provider_rows: dict[str, int] = {}  # provider -> rows, where the list's metadata tells it
    domain_rows: dict[str, int] = {}
    planned_per_hour: dict[str, float] = {}  # provider -> what capacity planning promised; reports compare
    warmup: Warmup | None = None


def encode(plan: Plan) -> bytes:
    """The bytes of plan.json."""
    return msgspec.json.format(msgspec.json.encode(plan), indent=1)


def decode(raw: bytes) -> Plan:
    """The plan in `raw`; raises PlanError naming the field that does not fit."""
    try:
        plan = msgspec.json.decode(raw, type=Plan)
    except msgspec.MsgspecError as problem:
        raise PlanError(str(problem)) from None
    if plan.format != FORMAT:
        raise PlanError(f"plan format {plan.format}, this version reads {FORMAT}")
    return plan
