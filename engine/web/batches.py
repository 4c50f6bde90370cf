"""Batches for workers in other languages, over a store that machines share: claim, attempt, tell.

The store's promises, in HTTP (PROTOCOL.md):

- A claim without an incarnation registers one; it has one lease, renewed by every call that names it. All that the
  worker remembers of a batch is discarded then: the answer says what is due, waits or is final.
- `progress` does in one statement what a window asks for: it reports verdicts of rows in windows, which needs no
  lease ever, and opens a window with the next rows, which needs a living one that owns the batch.
- **No row is attempted before the 200 that names its window.** The window's number is the worker's own: a request
  that got no answer is repeated as it was, until it is answered, and nothing of it is attempted meanwhile.
- A lost lease answers 409 to the next rows, and the verdicts of that request are taken nevertheless. The worker stops;
  what starts again claims anew, without an incarnation.
- At most 500 rows of a worker are unreported. A row leaves its window with its first verdict; a retry needs a new
  window. Rows of a worker that falls silent are held in doubt by whoever takes its batches over, for its log is not
  here.

A batch whose rows all have their outcome is done, and the answer says so.
"""

from __future__ import annotations

import secrets
from typing import Any, cast
from uuid import UUID

import msgspec
import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from engine.campaign import Campaign
from engine.control.entries import DUE, FINAL, HELD, OPEN, BatchView, view, window_id
from engine.control.opening import open_store
from engine.control.store import (
    Advance,
    ClaimedBatch,
    Entry,
    Incarnation,
    Life,
    Opening,
    SharedStore,
    Store,
    Told,
)
from engine.web.batch_bodies import (
    BatchState,
    Claim,
    Claimed,
    LostLease,
    Progress,
    Progressed,
    WaitingRow,
)
from engine.web.problems import Refused
from engine.work.messages import Reported
from engine.work.windows import DUE_AGAIN, WINDOW_ROWS, detail
from formats.plan import Plan
from formats.sendlog import Verdict

_VERDICTS = {
    "accepted": Verdict.ACCEPTED,
    "rejected": Verdict.REJECTED,
    "deferred": Verdict.DEFERRED,
    "lost": Verdict.LOST,
    "untouched": Verdict.UNTOUCHED,
    "in_doubt": Verdict.IN_DOUBT,
}
_COUNTED = {"accepted": "accepted", "rejected": "bounced", "in_doubt": "in_doubt"}


def claim(campaign: Campaign, wanted: Claim) -> Claimed:
    """Claim batches of a partition; raises Refused."""
    store = _shared(campaign)
    try:
        plan = campaign.plan()
        if wanted.partition >= len(plan.partitions):
            raise Refused(422, f"the plan has {len(plan.partitions)} partitions, numbered from 0")
        record = store.campaign()
        if record is None or record.state != "ready":
            raise Refused(409, f"the campaign is {record.state if record else 'not loaded'}")
        me = wanted.incarnation or _register(store, wanted)
        if wanted.incarnation is not None and not _renew(store, me, {}):
            raise Refused(409, "the lease is lost", "Stop; claim again without an incarnation.")
        claimed = store.claim(me, wanted.partition, wanted.most)
        if not claimed:
            store.supersede_expired(me, wanted.partition)
            claimed = store.claim(me, wanted.partition, wanted.most)
        # Read by later statements, so that a window that committed late is seen.
        now_us = store.now_us()
        states = [_state(store, plan, batch, now_us) for batch in claimed]
        lease_us = next((one.lease_us for one in store.incarnations() if one.id == me), round(wanted.lease_s * 1e6))
        return Claimed(incarnation=me, lease_s=lease_us / 1e6, store_us=now_us, batches=states)
    finally:
        store.close()


def _register(store: SharedStore, wanted: Claim) -> str:
    me = secrets.token_hex(8)
    store.register(
        Incarnation(
            id=me,
            sender=wanted.sender,
            host_id="http",  # its logs are on no machine that we know
            boot_id="",
            pid=0,
            partition=wanted.partition,
            started_at_us=0,
            renewed_at_us=0,
            lease_us=round(wanted.lease_s * 1e6),
        )
    )
    return me


def _shared(campaign: Campaign) -> SharedStore:
    store: Store = open_store(campaign)
    if campaign.plan().store == "sqlite":
        store.close()
        raise Refused(
            409,
            "this campaign's store is SQLite, which has no windows: its batches are sent by `engine send` alone",
            "engine plan --control postgresql://... makes a campaign that several machines may send.",
        )
    return cast(SharedStore, store)


def _view(store: SharedStore, first_row: int, rows: int, entries: list[Entry]) -> BatchView:
    return view(first_row, rows, entries, store.decisions_between(first_row, first_row + rows))


def _state(store: SharedStore, plan: Plan, batch: ClaimedBatch, now_us: int) -> BatchState:
    entries = store.entries([batch.number])
    seen = _view(store, batch.first_row, batch.rows, entries)
    due = np.flatnonzero(seen.states == DUE) + batch.first_row
    runs = np.split(due, np.flatnonzero(np.diff(due) > 1) + 1) if len(due) else []
    return BatchState(
        batch=batch.number,
        first_row=batch.first_row,
        rows=batch.rows,
        due=[(int(run[0]), int(run[-1])) for run in runs],
        waiting=[
            WaitingRow(row=one.row, attempts=one.attempt, due_in_s=round((one.due_us - now_us) / 1e6, 1))
            for one in seen.waiting
        ],
        held=sorted({one.row for one in seen.held}),
    )


def progress(campaign: Campaign, number: int, told: Progress) -> Progressed | LostLease:
    """Report and open in one statement; raises Refused."""
    store = _shared(campaign)
    try:
        plan = campaign.plan()
        if number >= len(plan.batches):
            raise Refused(404, f"the plan has {len(plan.batches)} batches")
        return _Step(store, plan, number, told).run()
    finally:
        store.close()


class _Step:
    """One call of `progress`."""

    def __init__(self, store: SharedStore, plan: Plan, number: int, told: Progress) -> None:
        self._store, self._number, self._told = store, number, told
        self._first, self._rows = plan.batches[number].first_row, plan.batches[number].rows
        self._log_id = f"{told.incarnation}-{told.worker:03d}"
        self._entries = store.entries([number])
        self._by_id = {entry.window: entry for entry in self._entries}
        self._taken: dict[str, int] = {}

    def run(self) -> Progressed | LostLease:
        me = self._told.incarnation
        record = self._store.campaign()
        tells = self._tells()
        opening = self._opening()
        unreported = self._unreported(tells)
        is_paused = record is None or record.state != "ready"
        if opening is not None and unreported + len(self._told.next.rows if self._told.next else ()) > WINDOW_ROWS:
            raise Refused(422, f"at most {WINDOW_ROWS} rows of a worker may be unreported; {unreported} are")
        openings = [opening] if opening is not None and not is_paused else []
        answer = self._store.advance(me, Advance(told=tells, openings=openings))
        alive = answer.is_alive and _renew(self._store, me, self._taken)
        opened = opening is not None and opening.window in answer.opened
        if opening is not None and not opened:
            return self._refusal(record.state if record else "gone", alive=alive, is_paused=is_paused)
        is_done = self._finish()
        return Progressed(
            opened=self._told.next.window if self._told.next is not None and opened else None,
            unreported=unreported + (len(opening.rows) // 4 if opening is not None else 0),
            is_done=is_done,
            store_us=answer.now_us,
        )

    def _refusal(self, state: str, *, alive: bool, is_paused: bool) -> LostLease:
        if is_paused:
            detail_ = f"the campaign is {state}: attempt nothing new"
        elif not alive:
            detail_ = "the lease is lost: stop, and claim again without an incarnation"
        else:
            detail_ = "the batch is not yours any more, or the window was used before for other rows"
        return LostLease(title="Conflict", status=409, detail=detail_, taken=sum(self._taken.values()), is_alive=alive)

    def _id(self, window: int) -> UUID:
        return window_id(self._log_id, window)

    def _place(self, entry: Entry, row: int, window: int) -> int:
        found = np.flatnonzero(np.frombuffer(entry.rows, "<u4").astype(np.int64) == row - self._first)
        if not len(found):
            raise Refused(422, f"row {row} is not in window {window}")
        return int(found[0])

    def _tells(self) -> list[Told]:
        """The verdicts by window. A row that has its verdict keeps it: repeats change nothing."""
        changed: dict[UUID, tuple[bytearray, list[bytes], bool]] = {}
        offset_us = self._store.now_us()  # spans become times of the store
        for one in self._told.verdicts:
            verdict = _VERDICTS[one.verdict]
            entry = self._by_id.get(self._id(one.window))
            if entry is None:
                raise Refused(422, f"window {one.window} of worker {self._told.worker} was never opened in this batch")
            place = self._place(entry, one.row, one.window)
            verdicts, details, is_due = changed.get(entry.window, (bytearray(entry.verdicts), [], False))
            if verdicts[place] == OPEN:
                verdicts[place] = verdict
                due_us = round(one.due_in_s * 1e6) or 1 if verdict is Verdict.DEFERRED else 0
                reported = Reported(0, one.row, self._number, verdict, 0, one.code, one.attempts, due_us, 0)
                details.append(detail(place, reported, offset_us))
                self._taken[one.verdict] = self._taken.get(one.verdict, 0) + 1
            changed[entry.window] = (verdicts, details, is_due or verdict in DUE_AGAIN)
        return [
            Told(window, self._by_id[window].verdicts, bytes(verdicts), b"".join(details), is_due)
            for window, (verdicts, details, is_due) in changed.items()
        ]

    def _opening(self) -> Opening | None:
        if self._told.next is None:
            return None
        rows = self._told.next.rows
        if len(set(rows)) != len(rows):
            raise Refused(422, "a row is named twice")
        if min(rows) < self._first or max(rows) >= self._first + self._rows:
            raise Refused(422, f"batch {self._number} has rows {self._first} to {self._first + self._rows - 1}")
        id_ = self._id(self._told.next.window)
        offsets = (np.array(rows, np.int64) - self._first).astype("<u4").tobytes()
        # A repeat of an opening whose answer was lost is judged by the store: the window is as it was made, or not.
        others = [self._as_told(entry) for entry in self._entries if entry.window != id_]
        states = _view(self._store, self._first, self._rows, others).states[np.array(rows) - self._first]
        for row, state in zip(rows, states.tolist(), strict=True):
            if state in (FINAL, HELD):
                why = "has its outcome" if state == FINAL else "is held: it may have been sent"
                raise Refused(422, f"row {row} {why}")
        return Opening(id_, self._number, offsets, 0, "")

    def _as_told(self, entry: Entry) -> Entry:
        """The entry with this request's verdicts in it: a row may be reported and opened again in one call."""
        verdicts = bytearray(entry.verdicts)
        for one in self._told.verdicts:
            if self._id(one.window) == entry.window:
                place = self._place(entry, one.row, one.window)
                verdicts[place] = verdicts[place] or _VERDICTS[one.verdict]
        return msgspec.structs.replace(entry, verdicts=bytes(verdicts))

    def _unreported(self, tells: list[Told]) -> int:
        told = {one.window: one.verdicts for one in tells}
        repeated = self._id(self._told.next.window) if self._told.next is not None else None
        mine = {self._id(1).int >> 48}
        return sum(
            told.get(entry.window, entry.verdicts).count(OPEN)
            for entry in self._entries
            if entry.window.int >> 48 in mine and entry.window != repeated
        )

    def _finish(self) -> bool:
        """Say that the batch is done where each row has its outcome."""
        late = self._store.late(self._told.incarnation, self._number)
        if late is None:
            return False
        seen = _view(self._store, self._first, self._rows, self._store.entries([self._number]))
        if not bool((seen.states == FINAL).all()):
            return False
        return self._store.done_unless_late(self._told.incarnation, self._number, late)


def _renew(store: SharedStore, me: str, taken: dict[str, int]) -> bool:
    """Renew the lease, with the counters that the page shows."""
    found = next((one for one in store.incarnations() if one.id == me), None)
    if found is None or found.state is not Life.ALIVE:
        return False
    counters: dict[str, Any] = dict(found.counters)
    for verdict, count in taken.items():
        if verdict in _COUNTED:
            counters[_COUNTED[verdict]] = counters.get(_COUNTED[verdict], 0) + count
    return store.renew(me, 0, counters)


def respond(answer: Progressed | LostLease) -> Response:
    """200, or the 409 of a lost lease."""
    if isinstance(answer, LostLease):
        return Response(msgspec.json.encode(answer), 409, media_type="application/problem+json")
    return Response(msgspec.json.encode(answer), 200, media_type="application/json")


def batch_of(request: Request) -> int:
    """The number in the path; raises Refused."""
    text = request.path_params["batch"]
    if not text.isdecimal() or len(text) > 9:
        raise Refused(404, "there is no such batch")
    return int(text)
