"""What the engine asks of its control store: where senders meet, claim batches and keep their leases.

The store knows batches and incarnations; the logs know rows. `Store` is kept by SQLite in the campaign folder (one
host, no stealing) and by PostgreSQL, which keeps `SharedStore` as well: windows, for a machine may be lost with its
logs. No statement is made per message.

An **incarnation** is one start of a supervisor under a random id; the sender's name is for people. It has one lease;
batches belong to it. An incarnation that is not `alive` never comes back: what starts again is a new one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import StrEnum
from typing import Any, Protocol, Self
from uuid import UUID

import msgspec

from engine.errors import EngineError, Exit
from formats.plan import Plan
from formats.suppression import Entry as Suppression


class StoreAway(EngineError):
    """The control store {where} cannot be used now: {problem}."""

    exit_code = Exit.TRY_AGAIN
    hint = "Nothing is attempted without it. Look at the disk or the server, then run the same command again."


class StoreRefuses(EngineError):
    """The control store {where} does not let us in: {problem}."""

    exit_code = Exit.SETTINGS
    hint = "Check user, database and password (PGPASSWORD, PGPASSFILE or ~/.pgpass) of the store."


class StoreChanged(EngineError):
    """The control store {where} is not the server it was ({known}, now {found}): it may have lost its last commits."""

    exit_code = Exit.TRY_AGAIN
    hint = (
        "Let every sender end (each tells the store again what its logs know), then say `engine machines"
        " --confirm-failover`. Until then nothing is claimed and nothing is attempted."
    )


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

    @classmethod
    def of_row(cls, row: tuple[Any, ...]) -> Self:
        """From a row of the statement `incarnations`, in the order of its columns."""
        id_, sender, host, boot, pid, partition, state, started, renewed, lease, counters = row
        return cls(
            id=id_,
            sender=sender,
            host_id=host,
            boot_id=boot,
            pid=pid,
            partition=partition,
            state=Life(state),
            started_at_us=started,
            renewed_at_us=renewed,
            lease_us=lease,
            counters=msgspec.json.decode(counters),
        )


class ClaimedBatch(msgspec.Struct, frozen=True):
    """A batch that belongs to us now. `started` counts earlier claims: 0 means that nobody began it, as far as
    this server knows: after a failover there may be windows of it all the same."""

    number: int
    first_row: int
    rows: int
    started: int
    late: int = 0  # a shared store's count of what others told about it


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


class LimitStore(Protocol):
    """Where machines share limits: an entry a key, swapped as a whole. What it says is `pace.commons`' business."""

    def read_shares(self, keys: list[str]) -> tuple[int, dict[str, tuple[int, bytes]]]:
        """The store's time, and the version and body of each entry that there is."""

    def swap_shares(self, made: dict[str, tuple[int, bytes]]) -> frozenset[str]:
        """Put these in where the version is still the one that was read (0: no entry); which ones went in."""

    def close(self) -> None:
        """Let go of the store."""


class Store(LimitStore, Protocol):
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


# -- several machines -------------------------------------------------------------------------------------------------


class Told(msgspec.Struct, frozen=True):
    """New verdicts of one window. `known` are its verdicts as we last knew them; `verdicts` has the new ones in.

    `is_due`: a row of it is to be attempted again, so its batch is not done.
    """

    window: UUID
    known: bytes
    verdicts: bytes
    details: bytes
    is_due: bool


class Opening(msgspec.Struct, frozen=True):
    """A window to open: rows of one batch of ours, as uint32 counted from the batch's first row.

    `log_length` and `log_seal` say how far the worker's log had come.
    """

    window: UUID
    batch: int
    rows: bytes
    log_length: int
    log_seal: str


class Settled(msgspec.Struct, frozen=True):
    """Outcomes that needed no attempt: a window that is born closed."""

    window: UUID
    batch: int
    rows: bytes
    verdicts: bytes
    details: bytes


class Advance(msgspec.Struct, frozen=True):
    """Everything that one statement does for an incarnation. Repeated as it is until it is answered."""

    told: list[Told] = []
    settled: list[Settled] = []
    openings: list[Opening] = []


class Advanced(msgspec.Struct, frozen=True):
    """The answer. What is not in `opened` must not be attempted."""

    is_alive: bool  # the lease
    now_us: int  # the store's time
    opened: frozenset[UUID]


class Entry(msgspec.Struct, frozen=True):
    """A window as the store has it. `verdicts` has 0 for a row that is still in it."""

    window: UUID
    batch: int
    at_us: int
    log_length: int
    log_seal: str
    rows: bytes
    verdicts: bytes
    details: bytes


class BatchOwner(msgspec.Struct, frozen=True):
    """A batch that was begun, and whose it is."""

    number: int
    partition: int
    first_row: int
    rows: int
    state: str
    owner: str | None
    sender: str | None
    owner_state: str | None
    started: int


class SharedSuppressions(Protocol):
    """Suppressions that machines share, in the order in which they were said."""

    def secret(self, wish: bytes) -> tuple[str, bytes]:
        """The table's name, and the key of its forgotten entries: `wish`, unless it has one."""

    def add(self, entries: Sequence[Suppression]) -> int:
        """Say entries; how many were new. Saying them again changes nothing."""

    def after(self, id_: int, most: int) -> list[tuple[int, Suppression]]:
        """The next entries behind `id_`, each with its own id."""

    def forget(self, addresses: Sequence[str], instead: Sequence[Suppression]) -> int:
        """Erase every entry of `addresses`, and say `instead`; how many named them."""

    def forget_older(self, before_us: int, upto_id: int) -> int:
        """Erase entries up to an id that were made before a time and never taken back; how many."""

    def close(self) -> None:
        """Nothing is held open."""


class SharedStore(Store, Protocol):
    """What several machines need beyond `Store`. Its own clock tells every time in it."""

    @property
    def url(self) -> str:
        """Where it is, without a password."""

    def load_bundle(
        self, plan: Plan, plan_fingerprint: str, now_us: int, files: dict[str, bytes], *, replace: bool
    ) -> None:
        """`load_plan`, with the files of the campaign folder that another machine needs, in one transaction."""

    def now_us(self) -> int:
        """The store's time."""

    def supersede_expired(self, by: str, partition: int | None = None) -> list[tuple[str, str, int | None]]:
        """End leases that have run out, of who has batches (of the partition): (incarnation, sender, partition).

        Committed when it returns: what was theirs can be claimed by a later statement.
        """

    def mine(self, incarnation: str) -> list[ClaimedBatch]:
        """Batches that belong to the incarnation: after a claim whose answer was lost."""

    def fullest(self) -> list[int]:
        """Partitions that have something to give, the largest remaining first."""

    def unfinished_of_others(self, incarnation: str) -> int:
        """Batches that living others have: there may be something to take over later."""

    def done_unless_late(self, incarnation: str, batch: int, late: int) -> bool:
        """`done`, unless somebody told something of the batch since `late` was read, or it is not ours."""

    def late(self, incarnation: str, batch: int) -> int | None:
        """How often others told something of our batch; None where it is not ours."""

    def advance(self, incarnation: str, step: Advance) -> Advanced:
        """Report verdicts, which needs no lease, and open windows, which needs a living one that owns their batches.

        One statement. Repeats are harmless: a verdict counts if the row is still in that window.
        """

    def entries(self, batches: list[int]) -> list[Entry]:
        """Every window of these batches. After a claim, never in its statement: a window that commits late is seen."""

    def compact(self, batch: int) -> int:
        """Keep what the windows of a batch that is done say in fewer of them; how many went."""

    def entries_of_log(self, log_id: str) -> list[Entry]:
        """Every window of one worker's log."""

    def all_entries(self) -> Iterator[Entry]:
        """Every window, for merging."""

    def held_entries(self) -> list[Entry]:
        """Windows that have a row open or in doubt."""

    def decisions_between(self, first_row: int, end_row: int) -> list[Decision]:
        """The operator's words on these rows. `log_id` is the window, `serial` the row's place in it."""

    def batch_owners(self) -> list[BatchOwner]:
        """Batches that were begun, and whose they are."""

    def bundle(self) -> dict[str, bytes]:
        """Those files."""

    def confirm_server(self) -> str:
        """The operator's word that this server is the right one, after a failover. Returns what it is."""

    def server_mark(self) -> str:
        """Which server this is, and when an operator confirmed it last; "" where none is known yet.

        Another one than before means that it may have forgotten what it was told. Raises StoreChanged.
        """

    def is_failover_safe(self) -> bool:
        """False where there are standbys that commits do not wait for."""

    def suppression_table(self) -> SharedSuppressions:
        """Who must not be written to, for all campaigns of the database; a connection of its own."""
