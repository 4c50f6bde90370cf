"""What the engine asks of its control store: where senders meet, claim batches and keep their leases.

The store knows batches and incarnations; the logs know rows. Every promise is kept by SQLite in the campaign folder
(one host, no stealing). No statement is made per message.

An **incarnation** is one start of a supervisor under a random id; the sender's name is for people. It has one lease;
batches belong to it. An incarnation that is not `alive` never comes back: what starts again is a new one.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Protocol

import msgspec

from engine.errors import EngineError, Exit
from formats.plan import Plan


class StoreAway(EngineError):
    """The control store {where} cannot be used now: {problem}."""

    exit_code = Exit.TRY_AGAIN
    hint = "Nothing is attempted without it. Look at the disk or the server, then run the same command again."


class StoreHasPlan(EngineError):
    """The store {where} holds a plan of campaign {campaign_id} already."""

    exit_code = Exit.PLAN
    hint = "Go on with it by `engine send`, or plan into a fresh campaign folder."


class StoreSchema(EngineError):
    """The store {where} has schema {found}; this version knows {known}."""

    exit_code = Exit.PLAN
    hint = "Use the version of rowpost that made it, or a newer one."


class Life(StrEnum):
    """Of an incarnation."""

    ALIVE = "alive"
    ENDED = "ended"
    SUPERSEDED = "superseded"


class Incarnation(msgspec.Struct, frozen=True, kw_only=True):
    """One start of a supervisor."""

    id: str
    sender: str
    host_id: str
    boot_id: str
    pid: int
    partition: int | None
    started_at_us: int
    renewed_at_us: int
    lease_us: int
    state: Life = Life.ALIVE
    counters: dict[str, object] = {}


class ClaimedBatch(msgspec.Struct, frozen=True):
    """A batch that belongs to us now. `started` counts earlier claims: 0 means that no row of it was ever attempted."""

    number: int
    first_row: int
    rows: int
    started: int


class Decision(msgspec.Struct, frozen=True):
    """An operator's word on one intent without a result."""

    log_id: str
    serial: int
    row: int
    what: str  # "resend" or "accept"
    who: str
    at_us: int


class CampaignRecord(msgspec.Struct, frozen=True):
    """The campaign as the store has it."""

    id: str
    plan_fingerprint: str
    rows: int
    partitions: int
    state: str  # ready, paused, cancelled


class BatchTally(msgspec.Struct, frozen=True):
    """How many batches of a partition are in a state, and their rows."""

    partition: int
    state: str
    batches: int
    rows: int


class Override(msgspec.Struct, frozen=True):
    """A word that every machine obeys within a heartbeat. `scope` is "campaign", "domain:..." or "provider:..."."""

    scope: str
    what: str
    value: str
    who: str
    at_us: int
    until_us: int | None


class Store(Protocol):
    """The promises. Every method that writes has committed, durably, when it returns; any may raise StoreAway."""

    def load_plan(self, plan: Plan, plan_fingerprint: str, now_us: int, *, replace: bool = False) -> None:
        """Put the campaign and its batches in. Raises StoreHasPlan unless `replace`."""

    def campaign(self) -> CampaignRecord | None:
        """The campaign, or None before `load_plan`."""

    def set_campaign_state(self, state: str) -> None:
        """ready, paused or cancelled; senders see it with their next renewal."""

    def register(self, incarnation: Incarnation) -> None:
        """A new incarnation with its lease."""

    def renew(self, incarnation: str, now_us: int, counters: dict[str, object]) -> bool:
        """Renew the lease and tell the counters. False: superseded; the caller stops wholly."""

    def leave(self, incarnation: str, now_us: int, counters: dict[str, object]) -> None:
        """The incarnation ends in order; batches it did not finish can be claimed at once."""

    def supersede(self, incarnation: str, by: str) -> None:
        """Mark a dead incarnation's lease dead. Done and committed before its batches are taken."""

    def incarnations(self) -> list[Incarnation]:
        """All of them, oldest first."""

    def claim(self, incarnation: str, partition: int, most: int) -> list[ClaimedBatch]:
        """Up to `most` batches of the partition, lowest first, that belong to no living incarnation."""

    def begun(self, partition: int) -> list[ClaimedBatch]:
        """The partition's batches that were claimed once and are not done: their rows' states are in logs."""

    def owners(self, partition: int) -> dict[int, str]:
        """Of the partition's batches that are not done: which incarnation had them last."""

    def done(self, incarnation: str, batch: int) -> None:
        """Each row of the batch has its outcome, or is held in doubt."""

    def reopen(self, row: int) -> None:
        """The batch of `row` has something to do again."""

    def batches(self) -> list[BatchTally]:
        """Batches by partition and state."""

    def decide(self, decisions: list[Decision]) -> None:
        """Record the operator's words. A `resend` stands for ever: its message may be on the way."""

    def decisions(self) -> list[Decision]:
        """All of them, oldest first."""

    def set_override(self, override: Override) -> None:
        """Say it to every machine; a later word on the same thing replaces it. `at_us` is the store's."""

    def overrides(self) -> list[Override]:
        """The words that hold now."""

    def close(self) -> None:
        """Let go of the store."""
