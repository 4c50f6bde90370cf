"""The supervisor's side of a store that machines share: lease, batches and windows, off the event loop.

Two threads with a connection each: one advances windows, which must never wait behind a long read; one renews the
lease, claims, reads what is known of batches and says that they are done. The supervisor asks and is told; it never
waits for the store. While the store is away nothing new is attempted, both go on trying with growing waits, and what
was being said is said again as it was.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import msgspec
import numpy as np

from engine.campaign import Campaign
from engine.clock import Clock
from engine.config import Settings
from engine.control.entries import DUE, FINAL, HELD, BatchView, view
from engine.control.store import (
    ClaimedBatch,
    Decision,
    Entry,
    Incarnation,
    Override,
    SharedStore,
    SharedSuppressions,
    StoreAway,
    StoreChanged,
)
from engine.errors import EngineError
from engine.work.inheritance import read_story, report_logs_here, tell_again
from engine.work.messages import Admit, Admitted, Assign, NotAdmitted, Report
from engine.work.recovery import Waiting
from engine.work.tail import is_worth_taking, peers_of
from engine.work.takeover import BatchState
from engine.work.wide import WIDE_SCOPES
from engine.work.windows import WindowBook
from formats.plan import Plan

# At most one statement a machine in this time: five machines of eight workers stay under 200 a second.
ADVANCE_EVERY_S = 0.05
_TAIL_BATCHES = 200  # with more left nobody looks at who is faster
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.2, 10.0
_LAST_TRIES_S = 3.0  # a connection that the failover cut is found out by the first try


class Teller(Protocol):
    """Who is told of events."""

    def event(self, name: str, **fields: object) -> None:
        """Something happened."""


class Shared:
    """One incarnation's dealings with the store."""

    def __init__(
        self,
        campaign: Campaign,
        settings: Settings,
        plan: Plan,
        store: SharedStore,
        windows_store: SharedStore,
        me: Incarnation,
        teller: Teller,
        clock: Clock,
        *,
        steal: bool,
        resend_doubt: bool,
    ) -> None:
        self._campaign, self._settings, self._plan, self._me = campaign, settings, plan, me
        self._store, self._windows_store, self._teller, self._clock = store, windows_store, teller, clock
        self._steal, self._resend_doubt = steal, resend_doubt
        self.book = WindowBook(lambda batch: plan.batches[batch].first_row)
        self.deliver: Callable[[str, Admitted | NotAdmitted], None] = lambda log_id, message: None
        self.lost_lease = False
        self.changed: StoreChanged | None = None
        self.campaign_state = "ready"
        self.overrides: list[Override] = []
        self.exhausted = False  # nothing to claim now, and nobody living has anything that we might get
        # Rows of ours wait for the hours of their zones: what others have not begun is theirs, or the first to wake
        # would sweep the whole list and send it alone in the morning.
        self.has_sleepers = False
        self.away: str | None = None
        self.heard: Callable[[list[Override]], None] = lambda words: None  # what other machines learnt of pace
        self._wide: dict[str, bytes] = {}
        self._heard_us: dict[tuple[str, str], int] = {}
        self._offset_us: int | None = None
        self.counters: Callable[[], dict[str, object]] = dict
        self.timed: Callable[[float], None] = lambda took_s: None  # told how long each step of the windows took
        self._wanted = self._in_hand = 0
        self._worker_per_s = 0.0
        self._ready: deque[tuple[ClaimedBatch, BatchState]] = deque()
        self._rebuild: list[ClaimedBatch] = []  # ours, to be derived anew once the store knows all that we know
        self._finished: list[int] = []
        self._mine: dict[int, ClaimedBatch] = {}
        self._claim_unsure = False
        self._found_nothing = False
        self._retired = False
        self._wake = asyncio.Event()
        self._threads = [ThreadPoolExecutor(1, f"store-{name}") for name in ("windows", "lease")]
        self._tasks: list[asyncio.Task[None]] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._renewed_at = self._looked_at = -1e9

    # -- what the supervisor asks ------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin, on the running loop."""
        loop = self._loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._advance()), loop.create_task(self._attend())]

    def suppression_table(self) -> SharedSuppressions:
        """Suppressions that all machines share, through a connection of its own."""
        return self._store.suppression_table()

    def take(self, in_hand: int = 0, worker_per_s: float = 0.0) -> tuple[ClaimedBatch, BatchState] | None:
        """A batch of ours to work on, for a worker with `in_hand` rows; None: none is here now, ask again."""
        if self._ready:
            return self._ready.popleft()
        self._wanted, self._in_hand, self._worker_per_s = 1, in_hand, worker_per_s
        return None

    @property
    def is_busy(self) -> bool:
        """Whether something is still on its way to us or to the store."""
        return bool(self._ready or self._rebuild or self._finished or self.book.has_reports)

    def admit(self, log_id: str, message: Admit) -> None:
        self.book.admit(log_id, message)
        self._wake.set()

    def report(self, log_id: str, message: Report) -> None:
        self.book.report(log_id, message.reports)
        self._wake.set()

    def batch_done(self, batch: int) -> None:
        """The worker has an outcome, or doubt, for each row."""
        self._finished.append(batch)

    def worker_gone(self, log_id: str, batches: list[int]) -> None:
        """A worker was reaped. Its log is read; its batches come back through `take`."""
        path = self._campaign.logs / f"{log_id}.arrows"
        story = read_story(path, self.book.rows_of(log_id)) if self.book.has_open(log_id) else None
        if story is not None:
            self.book.worker_is_gone(log_id, story.results, story.serials)
        else:
            # An empty log holds no intent; one that cannot be read may hold any.
            is_empty = not path.exists() or not path.stat().st_size
            self.book.worker_is_gone(log_id, {}, frozenset() if is_empty else None)
        self._rebuild += [self._mine[batch] for batch in batches if batch in self._mine]
        self._wake.set()

    def tell_wide(self, words: dict[str, bytes]) -> None:
        """What was learnt about a signing domain or the campaign, by scope: it concerns every machine."""
        self._wide = {**self._wide, **words}

    def store_us(self) -> int:
        """The store's time, as far as is known."""
        return self._clock.wall_us() + (self._offset_us or 0)

    def retire(self) -> None:
        """Claim nothing more."""
        self._retired = True

    async def finish(self, patience_s: float) -> bool:
        """Tell the store all that is known, for at most so long. False: the logs here know more than the store."""
        deadline = self._clock.monotonic() + patience_s
        while (self.book.has_reports or self._finished) and self._clock.monotonic() < deadline:
            self._wake.set()
            await asyncio.sleep(0.02)
            if self.lost_lease and not self.book.has_reports:
                break
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._look_last(deadline)
        for thread in self._threads:
            thread.shutdown(wait=False, cancel_futures=True)
        return not self.book.has_reports

    async def _look_last(self, deadline: float) -> None:
        """At the very end: has the server changed, and does the new one know all that we know?

        We may end for another reason (the lease, all is sent) in the moment of a failover. What is not told here is
        told when the next sender starts in this folder.
        """
        loop = asyncio.get_running_loop()
        deadline = max(deadline, self._clock.monotonic() + _LAST_TRIES_S)
        while True:
            try:
                if self.changed is None:
                    await loop.run_in_executor(self._threads[0], self._windows_store.server_mark)
                else:
                    told = await loop.run_in_executor(self._threads[0], self._tell_again)
                    self._teller.event("told_again", rows=told)
                return
            except StoreChanged as problem:
                self.changed = problem
            except StoreAway as problem:
                self._is_away(problem)
                if self._clock.monotonic() > deadline:
                    if self.changed is not None:
                        self._teller.event("not_told_again", problem=str(problem))
                    return
                await asyncio.sleep(_FIRST_WAIT_S)

    def _tell_again(self) -> int:
        logs = self._campaign.logs.glob(f"{self._me.id}-*.arrows")
        return tell_again(self._windows_store, self._me.id, logs, self._plan, self.book.offset_us)

    # -- windows -----------------------------------------------------------------------------------------------------

    async def _advance(self) -> None:
        loop, wait_s = asyncio.get_running_loop(), _FIRST_WAIT_S
        said_at: float | None = None  # when the step that has no answer yet was said first
        while True:
            if not self.book.has_news:
                self._wake.clear()
                await self._wake.wait()
            started = self._clock.monotonic()
            step = self.book.step()
            if step is None:
                await asyncio.sleep(ADVANCE_EVERY_S)
                continue
            said_at = started if said_at is None else said_at
            try:
                answer = await loop.run_in_executor(self._threads[0], self._windows_store.advance, self._me.id, step)
            except StoreAway as problem:
                self._is_away(problem)
                await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
                continue
            except StoreChanged as problem:
                self._is_changed(problem)
                await asyncio.sleep(1)
                continue
            wait_s = _FIRST_WAIT_S
            self.timed(self._clock.monotonic() - said_at)
            said_at = None
            self._is_back()
            if not answer.is_alive:
                self.lost_lease = True
            for log_id, message in self.book.answered(answer, self._clock.wall_us()):
                self.deliver(log_id, message)
            await asyncio.sleep(max(0.0, ADVANCE_EVERY_S - (self._clock.monotonic() - started)))

    def _is_away(self, problem: EngineError) -> None:
        if self.away is None:
            self._teller.event("store_away", problem=str(problem))
        self.away = str(problem)

    def _is_back(self) -> None:
        if self.away is not None:
            self.away = None
            self._teller.event("store_back")

    def _is_changed(self, problem: StoreChanged) -> None:
        self.changed = problem
        for log_id, message in self.book.refuse_all():
            self.deliver(log_id, message)

    # -- lease and batches -------------------------------------------------------------------------------------------

    async def _attend(self) -> None:
        loop, wait_s = asyncio.get_running_loop(), _FIRST_WAIT_S
        while True:
            now = self._clock.monotonic()
            try:
                waiting = {*self._finished, *(batch.number for batch in self._rebuild)}
                told = {number for number in waiting if self.book.knows_all_of(number)}
                await loop.run_in_executor(self._threads[1], self._attend_once, now, told)
                wait_s = _FIRST_WAIT_S
                if not self.book.has_news:
                    self._is_back()
                await asyncio.sleep(0.05)
            except StoreAway as problem:
                self._is_away(problem)
                await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s, self._me.lease_us / 4e6, _LONGEST_WAIT_S)
            except StoreChanged as problem:
                self._is_changed(problem)
                await asyncio.sleep(1)

    def _attend_once(self, now: float, told: set[int]) -> None:
        """In the lease's thread. It changes nothing that the loop changes at the same time but by whole values.

        `told` are the batches of which the store knows all that we know.
        """
        if now - self._renewed_at >= min(1.0, self._me.lease_us / 4e6):
            if not self._store.renew(self._me.id, 0, self.counters()):
                self.lost_lease = True
            self._renewed_at = now
            if self._offset_us is None:
                self._offset_us = self._store.now_us() - self._clock.wall_us()
            found = self._store.campaign()
            if found is not None:
                self.campaign_state = found.state
            self.overrides = self._store.overrides()
            self._exchange_words()
        if self.lost_lease:
            self._finished.clear()
            return
        self._say_done(told)
        for batch in [batch for batch in self._rebuild if batch.number in told]:
            self._derive([msgspec.structs.replace(batch, started=1)])
            self._rebuild.remove(batch)
        if self._wanted and not self._ready and not self._retired and self.campaign_state == "ready":
            self._claim(now)

    def _exchange_words(self) -> None:
        """What concerns more than a source's own pace is heard by every machine with its next renewal."""
        while self._wide:
            scope = next(iter(self._wide))
            value = self._wide[scope].decode()
            self._store.set_override(Override(scope, self._me.id, value, self._me.sender, 0, None))
            self._wide = {other: word for other, word in self._wide.items() if (other, word.decode()) != (scope, value)}
        news = []
        for word in self.overrides:
            if word.scope.partition(":")[0] not in WIDE_SCOPES or word.what == self._me.id:
                continue  # the operator's, or our own
            if word.at_us > self._heard_us.get((word.scope, word.what), 0):
                self._heard_us[word.scope, word.what] = word.at_us
                news.append(word)
        if news and self._loop is not None:
            self._loop.call_soon_threadsafe(self.heard, news)

    def _tell(self, event: str, **fields: object) -> None:
        """Tell the operator, from the lease's thread."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(lambda: self._teller.event(event, **fields))

    def _say_done(self, told: set[int]) -> None:
        for number in [n for n in self._finished if n in told]:
            if not self._store.done_unless_late(self._me.id, number, self._mine[number].late):
                late = self._store.late(self._me.id, number)
                if late is not None:  # somebody told something since: look again
                    self._mine[number] = msgspec.structs.replace(self._mine[number], late=late, started=1)
                    self._derive([self._mine[number]])
            else:
                self._store.compact(number)
            self._finished.remove(number)

    def _claim(self, now: float) -> None:
        pause_s = min(1.0, self._me.lease_us / 4e6)
        if self._found_nothing and now - self._looked_at < pause_s:
            return
        mine = self._me.partition or 0
        if self._claim_unsure:
            # The answer to a claim was lost: what is ours and unknown was claimed by it.
            claimed = [batch for batch in self._store.mine(self._me.id) if batch.number not in self._mine]
            self._claim_unsure = False
        else:
            if self._steal and not self._is_worth_it():
                self._looked_at, self._found_nothing, self.exhausted = now, True, False
                return
            claimed = self._claim_from(mine)
        if not claimed:
            self._looked_at = now
            for _, sender, partition in self._store.supersede_expired(self._me.id, None if self._steal else mine):
                text = f"{sender} (partition {partition}) has let its lease run out; its batches are free"
                self._tell("takeover", text=text)
            claimed = self._claim_from(mine)
            if not claimed and self._steal and not self.has_sleepers:
                for partition in self._store.fullest():
                    if claimed := self._claim_from(partition):
                        text = f"batch {claimed[0].number} of partition {partition} is ours now"
                        self._tell("takeover", text=text)
                        break
            if not claimed:
                self.exhausted = not self._steal or not self._store.unfinished_of_others(self._me.id)
        self._found_nothing = not claimed
        if claimed:
            self.exhausted = False
            self._wanted = 0
            for batch in claimed:
                self._mine[batch.number] = batch
            self._derive(claimed)

    def _is_worth_it(self) -> bool:
        """At the end a slow machine leaves batches to faster ones."""
        batch_rows = self._plan.batches[0].rows if self._plan.batches else 0
        pending = sum(tally.rows for tally in self._store.batches() if tally.state == "pending")
        if not 0 < pending < _TAIL_BATCHES * batch_rows:
            return True
        peers = peers_of(self._store.incarnations(), self._me.id, self._store.now_us())
        return is_worth_taking(batch_rows, self._in_hand, self._worker_per_s, pending, peers)

    def _claim_from(self, partition: int) -> list[ClaimedBatch]:
        self._claim_unsure = True
        claimed = self._store.claim(self._me.id, partition, 1)
        self._claim_unsure = False
        return claimed

    def _derive(self, batches: list[ClaimedBatch]) -> None:
        """What is known of batches of ours; read after the claim was committed.

        Also of those that nobody claimed before: a failover may have forgotten a claim, and was told again of its rows.
        """
        entries = self._store.entries([batch.number for batch in batches])
        fresh = [batch for batch in batches if not batch.started and all(e.batch != batch.number for e in entries)]
        for batch in fresh:
            nothing = Assign(batch=batch.number, first_row=batch.first_row, rows=batch.rows)
            self._ready.append((batch, BatchState(nothing, 0, 0)))
        begun = [batch for batch in batches if batch not in fresh]
        if not begun:
            return
        offset_us = self._store.now_us() - self._clock.wall_us()
        told = report_logs_here(
            self._store,
            self._me.id,
            self._campaign.logs,
            entries,
            {batch.number: batch.first_row for batch in begun},
            host_id=self._me.host_id,
            boot_id=self._me.boot_id if self._settings.log.durability == "process" else None,
            offset_us=offset_us,
        )
        if told:
            entries = self._store.entries([batch.number for batch in begun])
        for batch in begun:
            decisions = self._store.decisions_between(batch.first_row, batch.first_row + batch.rows)
            mine = [entry for entry in entries if entry.batch == batch.number]
            seen = view(batch.first_row, batch.rows, mine, decisions)
            if self._resend_doubt:
                seen = self._resend(batch, seen, mine, decisions)
            self._ready.append((batch, _state(batch, seen, offset_us)))

    def _resend(self, batch: ClaimedBatch, seen: BatchView, entries: list[Entry], told: list[Decision]) -> BatchView:
        """The standing order `--in-doubt resend`: once per row."""
        at_us = self._clock.wall_us()
        new = [
            Decision(str(held.window), held.place, held.row, "resend", "--in-doubt resend", at_us)
            for held in seen.held
            if held.row not in seen.resent
        ]
        if not new:
            return seen
        self._store.decide(new)
        return view(batch.first_row, batch.rows, entries, told + new)


def _state(batch: ClaimedBatch, seen: BatchView, offset_us: int) -> BatchState:
    skip = seen.states != DUE
    waiting = [Waiting(w.row, w.attempt, w.first_us - offset_us, w.due_us - offset_us) for w in seen.waiting]
    assign = Assign(
        batch=batch.number,
        first_row=batch.first_row,
        rows=batch.rows,
        skip=np.packbits(skip).tobytes() if skip.any() else b"",
        waiting=waiting,
        resent=sorted(seen.resent),
    )
    return BatchState(assign, int((seen.states == FINAL).sum()), int((seen.states == HELD).sum()))
