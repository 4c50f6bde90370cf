"""What workers in other languages say and are told: the bodies of claim and progress. See `engine.web.batches`."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from engine.web.problems import Problem
from engine.work.windows import WINDOW_ROWS

LEASE_S = 60.0

CampaignKey = Annotated[str, msgspec.Meta(min_length=1, max_length=80)]
Id = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{16}$")]
Row = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
Window = Annotated[int, msgspec.Meta(ge=1, le=2**48 - 1, description="The worker's own number, each used once.")]


class Claim(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who asks for batches. Without `incarnation` a new one is registered under the `sender`'s name."""

    campaign: CampaignKey
    sender: Annotated[str, msgspec.Meta(min_length=1, max_length=100)]
    incarnation: Id | None = None
    partition: Annotated[int, msgspec.Meta(ge=0, le=9_999)] = 0
    most: Annotated[int, msgspec.Meta(ge=1, le=16)] = 1
    lease_s: Annotated[float, msgspec.Meta(ge=5, le=3_600)] = LEASE_S


class WaitingRow(msgspec.Struct, frozen=True, kw_only=True):
    """A row between attempts. `due_in_s` is negative where it is due already."""

    row: int
    attempts: int
    due_in_s: float


class BatchState(msgspec.Struct, frozen=True, kw_only=True):
    """A batch that is the worker's now. `due` are runs of rows, [first, last]; rows in no list have their outcome."""

    batch: int
    first_row: int
    rows: int
    due: list[tuple[int, int]]
    waiting: list[WaitingRow]
    held: list[int]  # in doubt: not to be attempted


class Claimed(msgspec.Struct, frozen=True, kw_only=True):
    """What was claimed; no batches: nothing is to be had now, ask again later."""

    incarnation: str
    lease_s: float
    store_us: int
    batches: list[BatchState]


class RowVerdict(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How an attempt came out. `due_in_s` says when a deferred row is due again."""

    window: Window
    row: Row
    verdict: Literal["accepted", "rejected", "deferred", "lost", "untouched", "in_doubt"]
    attempts: Annotated[int, msgspec.Meta(ge=1, le=65_535)] = 1
    code: Annotated[int, msgspec.Meta(ge=0, le=599)] = 0
    due_in_s: Annotated[float, msgspec.Meta(ge=0, le=31_536_000)] = 0.0


class Next(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Rows that are about to be attempted, in a new window."""

    window: Window
    rows: Annotated[list[Row], msgspec.Meta(min_length=1, max_length=WINDOW_ROWS)]


class Progress(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Verdicts of rows in this worker's windows, and the next rows. Empty, it renews the lease."""

    campaign: CampaignKey
    incarnation: Id
    worker: Annotated[int, msgspec.Meta(ge=1, le=65_535)] = 1
    verdicts: Annotated[list[RowVerdict], msgspec.Meta(max_length=5_000)] = []
    next: Next | None = None


class Progressed(msgspec.Struct, frozen=True, kw_only=True):
    """The verdicts are recorded and, where rows were asked for, their window is open: they may be attempted now."""

    opened: int | None  # the window
    unreported: int
    is_done: bool
    store_us: int


class LostLease(Problem, frozen=True, kw_only=True, omit_defaults=False):
    """409: the next rows must not be attempted. `taken` verdicts were recorded nevertheless."""

    taken: int = 0
    is_alive: bool = False
