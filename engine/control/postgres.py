"""The control store of several machines: PostgreSQL 14 or newer, a schema of its own for each campaign.

What survives: a commit that returned. One object is one connection (`postgres_link`); it may be used by one thread at a
time. Every statement is in sql/postgres.sql.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast
from uuid import UUID

import msgspec

from engine.control.entries import compacted, window_bounds
from engine.control.postgres_link import PostgresLink
from engine.control.store import (
    Advance,
    Advanced,
    BatchOwner,
    BatchTally,
    CampaignRecord,
    ClaimedBatch,
    Decision,
    Entry,
    Incarnation,
    Override,
    StoreHasPlan,
)
from engine.control.suppressions_postgres import SuppressionTable
from formats.plan import Plan

_PART_BYTES = 8 * 1024 * 1024
_PAGE = 2000  # windows read by one statement


class PostgresStore(PostgresLink):
    """`SharedStore` over one connection."""

    # -- Store -------------------------------------------------------------------------------------------------------

    def load_plan(self, plan: Plan, plan_fingerprint: str, now_us: int, *, replace: bool = False) -> None:
        self.load_bundle(plan, plan_fingerprint, now_us, {}, replace=replace)

    def load_bundle(
        self, plan: Plan, plan_fingerprint: str, now_us: int, files: dict[str, bytes], *, replace: bool
    ) -> None:
        with self._trouble(), self._connection().transaction():
            db = self._connection()
            db.execute(self._text("lock_key"), ("plan",))
            found = db.execute(self._text("campaign")).fetchone()
            if found and not replace:
                raise StoreHasPlan(where=self._url.shown, campaign_id=found[0])
            for table in ("decision", "win", "share", "override", "batch", "incarnation", "bundle"):
                db.execute(f"DELETE FROM {table}")
            db.execute("DELETE FROM campaign")
            size = (plan.rows, len(plan.partitions))
            values = (plan.campaign_id, plan_fingerprint, *size, now_us, self._server(db))
            db.execute(self._text("add_campaign"), values)
            partition_of = [n for n, partition in enumerate(plan.partitions) for _ in range(partition.batches)]
            db.execute(
                self._text("add_batches"),
                (
                    list(range(len(plan.batches))),
                    partition_of,
                    [batch.first_row for batch in plan.batches],
                    [batch.rows for batch in plan.batches],
                ),
            )
            for name, body in files.items():
                for part, start in enumerate(range(0, max(1, len(body)), _PART_BYTES)):
                    db.execute(self._text("add_bundle"), (name, part, body[start : start + _PART_BYTES]))

    def campaign(self) -> CampaignRecord | None:
        found = self._run("campaign")
        return CampaignRecord(*found[0]) if found else None

    def set_campaign_state(self, state: str) -> None:
        self._run("set_campaign_state", (state,))

    def register(self, incarnation: Incarnation) -> None:
        i = incarnation
        with self._trouble():
            self._refuse_changed()
        self._run("register", (i.id, i.sender, i.host_id, i.boot_id, i.pid, i.partition, i.lease_us))

    def renew(self, incarnation: str, now_us: int, counters: dict[str, object]) -> bool:
        # Who neither claims nor opens at the moment must learn of a failover too, and stop.
        with self._trouble():
            self._refuse_changed()
        return self._changed_rows("renew", (msgspec.json.encode(counters).decode(), incarnation)) == 1

    def leave(self, incarnation: str, now_us: int, counters: dict[str, object]) -> None:
        self._run("leave", (msgspec.json.encode(counters).decode(), incarnation))

    def supersede(self, incarnation: str, by: str) -> None:
        self._run("supersede", (by, incarnation))

    def incarnations(self) -> list[Incarnation]:
        return [Incarnation.of_row(row) for row in self._run("incarnations")]

    def claim(self, incarnation: str, partition: int, most: int) -> list[ClaimedBatch]:
        with self._trouble():
            self._refuse_changed()
        claimed = self._run("claim", {"me": incarnation, "partition": partition, "most": most})
        return sorted((ClaimedBatch(*row) for row in claimed), key=lambda batch: batch.number)

    def begun(self, partition: int) -> list[ClaimedBatch]:
        return [ClaimedBatch(*row) for row in self._run("begun", (partition,))]

    def owners(self, partition: int) -> dict[int, str]:
        return dict(cast(list[tuple[int, str]], self._run("owners", (partition,))))

    def done(self, incarnation: str, batch: int) -> None:
        self._run("done", (batch, incarnation))

    def reopen(self, row: int) -> None:
        self._run("reopen", (row, row))

    def batches(self) -> list[BatchTally]:
        return [BatchTally(*row) for row in self._run("batch_states")]

    def decide(self, decisions: list[Decision]) -> None:
        if decisions:
            columns = zip(*(msgspec.structs.astuple(d) for d in decisions), strict=True)
            self._run("decide", [list(column) for column in columns])

    def decisions(self) -> list[Decision]:
        return [Decision(*row) for row in self._run("decisions")]

    # -- SharedStore -------------------------------------------------------------------------------------------------

    def now_us(self) -> int:
        return int(self._run("now")[0][0])

    def supersede_expired(self, by: str, partition: int | None = None) -> list[tuple[str, str, int | None]]:
        with self._trouble():
            self._refuse_changed()
        return cast(list[tuple[str, str, int | None]], self._run("supersede_expired", (by, by, partition, partition)))

    def mine(self, incarnation: str) -> list[ClaimedBatch]:
        return [ClaimedBatch(*row) for row in self._run("mine", (incarnation,))]

    def fullest(self) -> list[int]:
        return [partition for (partition,) in self._run("fullest")]

    def unfinished_of_others(self, incarnation: str) -> int:
        return int(self._run("unfinished", (incarnation,))[0][0])

    def done_unless_late(self, incarnation: str, batch: int, late: int) -> bool:
        return self._changed_rows("done_unless_late", (batch, incarnation, late)) == 1

    def late(self, incarnation: str, batch: int) -> int | None:
        found = self._run("late", (batch, incarnation))
        return int(found[0][0]) if found else None

    def advance(self, incarnation: str, step: Advance) -> Advanced:
        told, settled, openings = step.told, step.settled, step.openings
        if openings:
            with self._trouble():
                self._refuse_changed()
        values = {
            "me": incarnation,
            "r_id": [t.window for t in told],
            "r_known": [t.known for t in told],
            "r_verdicts": [t.verdicts for t in told],
            "r_details": [t.details for t in told],
            "r_due": [t.is_due for t in told],
            "s_id": [s.window for s in settled],
            "s_batch": [s.batch for s in settled],
            "s_rows": [s.rows for s in settled],
            "s_verdicts": [s.verdicts for s in settled],
            "s_details": [s.details for s in settled],
            "o_id": [o.window for o in openings],
            "o_batch": [o.batch for o in openings],
            "o_rows": [o.rows for o in openings],
            "o_verdicts": [bytes(len(o.rows) // 4) for o in openings],
            "o_length": [o.log_length for o in openings],
            "o_seal": [o.log_seal for o in openings],
        }
        ((is_alive, now_us, opened),) = self._run("advance", values)
        return Advanced(is_alive, now_us, frozenset(opened))

    def entries(self, batches: list[int]) -> list[Entry]:
        return [Entry(*row) for row in self._run("entries", (batches,))]

    def compact(self, batch: int) -> int:
        with self._trouble(), self._connection().transaction():
            db = self._connection()
            # While we hold the batch nobody opens it again, and nobody claims it.
            if db.execute(self._text("lock_done"), (batch,)).fetchone() is None:
                return 0
            found = db.execute(self._text("entries_locked"), (batch,), binary=True)
            gone, made = compacted(Entry(*row) for row in found)
            if gone:
                db.execute(self._text("delete_windows"), (gone,))
                columns = zip(*(msgspec.structs.astuple(entry) for entry in made), strict=True)
                db.execute(self._text("add_windows"), [list(column) for column in columns])
            return len(gone) - len(made)

    def entries_of_log(self, log_id: str) -> list[Entry]:
        return [Entry(*row) for row in self._run("entries_of_log", window_bounds(log_id))]

    def all_entries(self) -> Iterator[Entry]:
        last = UUID(int=0)
        while found := self._run("entries_after", (last, _PAGE)):
            for row in found:
                yield Entry(*row)
            last = found[-1][0]

    def held_entries(self) -> list[Entry]:
        return [Entry(*row) for row in self._run("held_entries")]

    def decisions_between(self, first_row: int, end_row: int) -> list[Decision]:
        return [Decision(*row) for row in self._run("decisions_between", (first_row, end_row))]

    def batch_owners(self) -> list[BatchOwner]:
        return [BatchOwner(*row) for row in self._run("batch_owners")]

    def bundle(self) -> dict[str, bytes]:
        files: dict[str, bytes] = {}
        for name, body in self._run("bundle"):
            files[name] = files.get(name, b"") + bytes(body)
        return files

    def confirm_server(self) -> str:
        with self._trouble():
            found = self._server(self._connection())
            self._connection().execute(self._text("confirm_server"), (found,))
            self._seen = None
            self._drop()  # the next connection looks again
        return found

    def server_mark(self) -> str:
        with self._trouble():
            self._refuse_changed()
        return self._seen or ""

    def is_failover_safe(self) -> bool:
        ((names, standbys),) = self._run("standbys")
        return not standbys or bool(names)

    def set_override(self, override: Override) -> None:
        o = override
        self._run("override", (o.scope, o.what, o.value, o.who, o.until_us))

    def overrides(self) -> list[Override]:
        return [Override(*row) for row in self._run("overrides")]

    def suppression_table(self) -> SuppressionTable:
        return SuppressionTable(self._url.dsn, self._url.shown)

    def read_shares(self, keys: list[str]) -> tuple[int, dict[str, tuple[int, bytes]]]:
        with self._trouble():
            self._refuse_changed()
        (_, _, _, now_us), *found = self._run("read_shares", (keys,))
        return int(now_us), {key: (version, bytes(body)) for key, version, body, _ in found}

    def swap_shares(self, made: dict[str, tuple[int, bytes]]) -> frozenset[str]:
        with self._trouble():
            self._refuse_changed()
        keys = sorted(made)  # one order for all: nobody waits in a circle
        values = (keys, [made[key][0] + 1 for key in keys], [made[key][1] for key in keys])
        return frozenset(key for (key,) in self._run("swap_shares", values))
