"""One machine's supervisor: claims batches, keeps its lease, hands out slots, replaces dead workers, ends in order.

Reads like a table of contents; who decides is elsewhere: slots in `pace.slots`, row states in `recovery`, batches in
the store. SIGTERM and SIGINT drain; a second one stops at once (what was in flight is then in doubt). SIGHUP reads the
live settings again.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from typing import Protocol

import msgspec

from engine.campaign import Campaign
from engine.clock import Clock
from engine.config import Settings, encode_custom
from engine.control.store import ClaimedBatch, Incarnation, Override, Store, StoreAway
from engine.errors import EngineError, Exit, worst
from engine.pace import slots
from engine.pace.budgets import BUDGETS_FILE, load_budgets
from engine.work.crew import Crew, Hand
from engine.work.messages import (
    Admit,
    Admitted,
    Allow,
    Assign,
    BatchDone,
    Drain,
    Grant,
    Key,
    Live,
    NotAdmitted,
    Pause,
    Pulse,
    Released,
    Report,
    Revoke,
    Started,
    Stopped,
    Told,
    Unused,
    Up,
)
from engine.work.outbox_beside import SEAT, Beside
from engine.work.overview import Overview
from engine.work.pacing import Pacing
from engine.work.progress import Progress
from engine.work.remembering import Remembering
from engine.work.sent_before import DAY_US, sent_before
from engine.work.shared import Shared
from engine.work.sharing import Sharing
from engine.work.suppressing import Suppressing
from engine.work.takeover import BatchState, batch_states, log_buffers
from engine.work.timing import StopWatch, complaints_of, evidence, schedule_of
from engine.work.warming import warming_of
from engine.work.watching import MachineWatch
from engine.work.words import words_of
from engine.work.worker import WorkerStart

TICK_S = 0.05
SILENCE_S = 60.0  # a worker sends five pulses a second; reading a huge row group may hold it up for some seconds
COUNT_COMPLAINTS_S = 10.0
READ_AHEAD_ROWS = 2_000  # a worker with fewer unread rows gets its next batch: at most two unread at a time
# With a shared store and a relay: a worker's next batch is claimed when so much of the last one is left.
AHEAD_S, LEAST_AHEAD_ROWS = 5.0, 50
DISMISS_PATIENCE_S = 30.0  # after a failure of ours: for what is in flight
REPORT_PATIENCE_S = 20.0  # at the end, for a store that is away: the logs here know, and report when a sender starts
MOST_REPLACEMENTS = 20  # workers that die one after another die of something that a new one will not cure


class Narrator(Protocol):
    """Whoever tells the operator: a live table, plain lines, or JSON."""

    def event(self, name: str, **fields: object) -> None:
        """Something happened."""

    def progress(self, progress: Progress, now: float) -> None:
        """Called a few times a second."""


class RunOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What the command line says about a run."""

    partition: int
    processes: int
    sender: str
    limit: int | None = None
    max_wait_s: float | None = None
    resend_doubt: bool = False
    relay: str | None = None


class Supervisor:
    """One run of one partition."""

    def __init__(
        self,
        campaign: Campaign,
        settings: Settings,
        store: Store,
        incarnation: Incarnation,
        options: RunOptions,
        narrator: Narrator,
        clock: Clock,
        rng: random.Random,
        shared: Shared | None = None,
        sharing: Sharing | None = None,
    ) -> None:
        self._shared = shared  # with a store that machines share: who speaks with it
        self._sharing = sharing  # where others send the campaign too: our part of its limits
        self._campaign, self._settings, self._store = campaign, settings, store
        self._incarnation, self._options, self._narrator, self._clock, self._rng = (
            incarnation,
            options,
            narrator,
            clock,
            rng,
        )
        plan, self._plan_fingerprint = campaign.plan_and_fingerprint()
        partition = plan.partitions[options.partition]
        mine = plan.batches[partition.first_batch : partition.first_batch + partition.batches]
        self.progress = Progress(sum(batch.rows for batch in mine), clock.monotonic())
        self._narrator = narrator = Remembering(narrator, self.progress.events, clock)
        self._crew = Crew(self._hear, self._lost, clock.monotonic)
        budgets = load_budgets(campaign.folder / BUDGETS_FILE) if settings.delivery.mode == "direct" else None
        memory = campaign.run / f"throttle-{options.partition}.json"
        warming = warming_of(plan, options.partition, campaign.run) if budgets is not None else None
        self._pacing = Pacing(settings, budgets, memory, clock, narrator.event, self._tell_workers, warming, sharing)
        self._ledger = self._pacing.ledger
        self._overview = Overview(self._crew, self.progress, self._pacing, shared, sharing, narrator.event)
        self._beside = self._make_beside()
        self._schedule = schedule_of(settings)
        self._pause_reason = ""
        self._complaints = 0
        self._stop_watch = StopWatch(campaign.run / "stopped.json")
        self._was_paused = False
        self._counted_at = -1e9
        table = shared.suppression_table() if shared is not None else None
        self._suppressing = Suppressing(campaign, settings, plan, clock, self._narrator, table)
        self.told: dict[str, object] = {}  # the counters as of the last second; nobody changes them afterwards
        self._limit_left = options.limit
        self._states: dict[int, BatchState] = {}
        self._orphaned: list[ClaimedBatch] = []  # batches of workers that died
        self._exhausted = False
        self._draining: str | None = None
        self._stopped: Stopped | None = None
        self._codes: set[Exit] = set()
        self._replaced = 0
        self._paused = False
        self._connected_at = clock.monotonic()
        self._renewed_at = self._watched_at = -1e9
        self._watching = MachineWatch()
        self._starting: set[asyncio.Task[Hand]] = set()
        self._ready_hands: set[str] = set()
        self._is_ended = False  # expired or cancelled: what is left stays unsent, and is open no more
        self._worker_per_s = 0.0  # accepted messages a second and worker, at its best lately

    # -- life --------------------------------------------------------------------------------------------------------

    async def run(self) -> Exit:
        """Until each row has its outcome, or something ends the run; returns the exit code."""
        self._take_stock()
        if self._shared is not None:
            self._shared.deliver = self._deliver
            self._shared.heard = self._hear_others
            self._shared.counters = self._count
            self._shared.timed = self.progress.time_window
            self._shared.start()
        if self._sharing is not None:
            self._sharing.start(self._pacing)
        for worker in range(self._options.processes):
            await self._crew.start(self._worker_start(worker))
        try:
            while self._crew.hands or self._starting:
                await asyncio.sleep(TICK_S)
                self._tick()
        except BaseException:
            await self._crew.dismiss(DISMISS_PATIENCE_S)
            raise
        await self._crew.gone()
        if self._shared is not None and not await self._shared.finish(REPORT_PATIENCE_S):
            self._narrator.event("not_reported", problem=self._shared.away or "the store does not answer")
            self._codes.add(Exit.TRY_AGAIN)
        if self._beside is not None:
            self._beside.drain()
            await self._beside.gone()
        if self._sharing is not None:
            await self._sharing.finish()
        self._pacing.save()
        self._suppress()
        self._suppressing.finish(REPORT_PATIENCE_S)
        return self._exit()

    def _make_beside(self) -> Beside | None:
        """The outbox that this campaign's budgets are shared with."""
        folder = self._settings.outbox.folder
        if folder is None:
            return None
        start = msgspec.structs.replace(
            self._worker_start(SEAT), outbox=str((self._campaign.folder / folder).resolve())
        )
        beside = Beside(start, self._pacing, self._clock, self._narrator.event)
        beside.live = self._live
        return beside

    def drain(self, reason: str) -> None:
        """No new attempts; what is in flight finishes. A second time: stop at once."""
        if self._draining is not None:
            self._narrator.event("stopping_now", reason=reason)
            self._crew.kill()
            if self._beside is not None:
                self._beside.kill()
            return
        self._draining = reason
        if self._shared is not None:
            self._shared.retire()
        self._narrator.event("draining", reason=reason)
        for hand in self._crew.hands.values():
            hand.channel.send(Drain())

    def reload(self, settings: Settings) -> None:
        """Live settings were read again: tell what changed, and the workers. Raises BudgetError."""
        direct = settings.delivery.mode == "direct"
        budgets = load_budgets(self._campaign.folder / BUDGETS_FILE) if direct else None
        for table in sorted(Settings.LIVE):
            old, new = getattr(self._settings, table), getattr(settings, table)
            for field in old.__struct_fields__:
                before, after = getattr(old, field), getattr(new, field)
                if before != after and "password" not in field:
                    self._narrator.event("setting_changed", key=f"{table}.{field}", old=str(before), new=str(after))
        self._schedule = schedule_of(settings)
        live = {table: getattr(settings, table) for table in Settings.LIVE}
        self._settings = msgspec.structs.replace(self._settings, **live)
        self._pacing.budgets_changed(self._settings, budgets)
        for hand in self._crew.hands.values():
            hand.channel.send(self._live())
        if self._beside is not None:
            self._beside.tell(self._live())

    def _live(self) -> Live:
        encode = msgspec.json.Encoder(enc_hook=encode_custom).encode
        live = self._settings
        return Live(delivery=encode(live.delivery), retry=encode(live.retry), schedule=encode(live.schedule))

    def _exit(self) -> Exit:
        codes = set(self._codes)
        if self._stopped is not None:
            codes.add(Exit(self._stopped.exit_code))
        is_open = not self._is_ended
        if is_open and any(t.state != "done" for t in self._store.batches() if t.partition == self._options.partition):
            codes.add(Exit.ROWS_OPEN)
        settings = [code for code in codes if 20 <= code < 30]
        return settings[0] if settings else worst(*codes)

    @property
    def ended(self) -> str | None:
        """Why nothing of this campaign is attempted any more, where that is so."""
        return self._draining if self._is_ended else None

    @property
    def stopped(self) -> Stopped | None:
        """Why a worker stopped the run, where one did."""
        return self._stopped

    # -- batches -----------------------------------------------------------------------------------------------------

    def _take_stock(self) -> None:
        """Claim the batches that were begun before, and read what became of their rows."""
        for tally in self._store.batches():
            if tally.partition == self._options.partition and tally.state == "done":
                self.progress.before += tally.rows
        self._remember_sent()
        if self._shared is not None:
            return
        begun = self._store.begun(self._options.partition)
        if begun:
            self._narrator.event("reading_logs", batches=len(begun), logs=len(self._campaign.log_files()))
            self._states = self._read_states(begun)

    def _remember_sent(self) -> None:
        """What went out in the last day, by the logs here, counts in the windows of today's rates."""
        logs = self._campaign.log_files()
        if (outbox := self._settings.outbox.folder) is not None:
            logs += Campaign((self._campaign.folder / outbox).resolve()).log_files()
        since_us = self._clock.wall_us() - DAY_US
        if self._pacing.is_rated:
            self._pacing.sent_before(sent_before(logs, since_us, self._incarnation.host_id))

    def _read_states(self, batches: list[ClaimedBatch]) -> dict[int, BatchState]:
        def damaged(log_id: str, problem: str) -> None:
            self._narrator.event("log_damaged", log=log_id, problem=problem)
            self._codes.add(Exit.LOG_DAMAGED)

        buffers = log_buffers(self._campaign.log_files(), damaged)
        resend_doubt = self._options.resend_doubt
        return batch_states(batches, buffers, self._store.decisions(), resend_doubt=resend_doubt, damaged=damaged)

    def _feed(self) -> None:
        """Give each worker something to read; claim ahead no more than it needs."""
        if self._draining is not None or self._paused:
            return
        for hand in sorted(self._crew.hands.values(), key=lambda hand: hand.unread):
            while hand.log_id in self._ready_hands and self._wants(hand):
                if not self._give_one(hand):
                    return

    def _wants(self, hand: Hand) -> bool:
        if self._limit_left == 0:
            return False
        # Reading ahead buys nothing where all goes one way, and what we hold at the end others cannot take.
        goes_one_way = self._shared is not None and self._settings.delivery.mode == "relay"
        if goes_one_way and hand.in_hand > max(LEAST_AHEAD_ROWS, AHEAD_S * self._worker_per_s):
            return False
        # A batch more while the last one is nearly read; batches whose rows only wait do not count.
        return hand.unread < READ_AHEAD_ROWS

    def _give_one(self, hand: Hand) -> bool:
        if self._shared is not None:
            taken = self._shared.take(hand.in_hand, self._worker_per_s)
            self._exhausted = self._shared.exhausted
            if taken is None:
                return False
            batch, self._states[taken[0].number] = taken
        elif self._orphaned:
            batch = self._orphaned.pop(0)
        else:
            claimed = self._store.claim(self._incarnation.id, self._options.partition, 1)
            if not claimed:
                self._exhausted = True
                return False
            batch = claimed[0]
            if batch.started and batch.number not in self._states:
                self._states.update(self._read_states([batch]))
        state = self._states.pop(batch.number, None)
        assign = state.assign if state else Assign(batch=batch.number, first_row=batch.first_row, rows=batch.rows)
        if state is not None:
            self.progress.before += state.final
            self.progress.held_before += state.in_doubt
        if self._limit_left is not None:
            assign = msgspec.structs.replace(assign, limit=self._limit_left)
            self._limit_left = max(0, self._limit_left - batch.rows)
        hand.batches[batch.number] = (batch.first_row, batch.rows)
        hand.unread += batch.rows
        hand.channel.send(assign)
        return True

    # -- workers -----------------------------------------------------------------------------------------------------

    def _worker_start(self, worker: int) -> WorkerStart:
        mine = self._incarnation
        return WorkerStart(
            folder=str(self._campaign.folder.resolve()),
            plan_fingerprint=self._plan_fingerprint,
            incarnation=mine.id,
            sender=mine.sender,
            host_id=mine.host_id,
            boot_id=mine.boot_id,
            worker=worker,
            number=0,
            seed=self._rng.getrandbits(63),
            relay=self._options.relay,
        )

    def _hear(self, hand: Hand, message: Up) -> None:
        now = self._clock.monotonic()
        match message:
            case Started():
                self._ready_hands.add(hand.log_id)
                hand.channel.send(self._live())
                if self._paused:
                    hand.channel.send(Pause(paused=True, reason=self._pause_reason))
                self._feed()
            case Pulse():
                self._pulse(hand, message, now)
            case BatchDone():
                self._batch_done(hand, message)
                if self._shared is not None:
                    self._shared.batch_done(message.batch)
                else:
                    self._store.done(self._incarnation.id, message.batch)
            case Admit() if self._shared is not None:
                self._shared.admit(hand.log_id, message)
            case Report() if self._shared is not None:
                self._shared.report(hand.log_id, message)
            case Released():
                self._ledger.closed(hand.worker, message.key, message.connections, now)
            case Unused():
                self._ledger.unused(hand.worker, message.key, message.messages, now)
            case Told():
                self._narrator.event(message.event, worker=hand.worker, **message.fields)
            case Stopped():
                if self._stopped is None:
                    self._stopped = message
                self.drain(message.problem) if self._draining is None else None
            case _:
                pass

    def _hear_others(self, words: list[Override]) -> None:
        """What other machines learnt about our signing domain or the campaign."""
        assert self._shared is not None
        self._pacing.wide.hear(words, self._clock.monotonic(), self._shared.store_us())

    def _deliver(self, log_id: str, message: Admitted | NotAdmitted) -> None:
        for hand in self._crew.hands.values():
            if hand.log_id == log_id:
                hand.channel.send(message)

    def _pulse(self, hand: Hand, pulse: Pulse, now: float) -> None:
        self.progress.add(pulse)
        self.progress.hear(pulse.seen)
        hand.ready, hand.parked, hand.demand = pulse.ready, pulse.parked, dict(pulse.demand)
        hand.unread, hand.waiting, hand.in_flight = pulse.unread, pulse.waiting, pulse.in_flight
        hand.open_rows, hand.has_demand = pulse.open_rows, any(rows for _, rows in pulse.demand)
        hand.connections = {count.provider: count.connections for count in pulse.providers}
        hand.in_doubt += sum(count.in_doubt for count in pulse.providers)
        hand.next_due_us, hand.reason = pulse.next_due_us, pulse.reason
        hand.asleep, hand.opens_at = pulse.asleep, pulse.opens_at
        if any(count.connections or count.accepted for count in pulse.providers) or not hand.has_demand:
            self._connected_at = now
        self._pacing.demand(hand.worker, dict(pulse.demand), now)
        for key, messages, at in pulse.spent:
            self._pacing.spent(hand.worker, key, messages, at, now)
        self._pacing.hear(pulse.seen, self._overview.established())
        self._suppressing.add(pulse.suppress)

    def _lost(self, hand: Hand) -> None:
        now = self._clock.monotonic()
        self._pacing.gone(hand.worker, now)
        self._watching.gone(hand.worker)
        self._ready_hands.discard(hand.log_id)
        if self._shared is not None:
            goes_on = not hand.said_goodbye and self._draining is None
            self._shared.worker_gone(hand.log_id, list(hand.batches) if goes_on else [])
        if hand.said_goodbye or self._draining is not None:
            return
        self._replaced += 1
        self._narrator.event(
            "worker_died", worker=hand.worker, exit_code=hand.process.exitcode, batches=len(hand.batches)
        )
        orphans = [ClaimedBatch(number, first, rows, 1) for number, (first, rows) in hand.batches.items()]
        if orphans:
            self._uncount(hand)
        if orphans and self._shared is None:
            self._states.update(self._read_states(orphans))
            self._orphaned.extend(orphans)
        if self._replaced > MOST_REPLACEMENTS:
            self._codes.add(Exit.BUG)
            self.drain(f"{self._replaced} workers died, the last one of exit code {hand.process.exitcode}")
            return
        task = asyncio.get_running_loop().create_task(self._crew.start(self._worker_start(hand.worker)))
        self._starting.add(task)
        task.add_done_callback(self._starting.discard)

    def _uncount(self, hand: Hand) -> None:
        """What the dead worker told of batches that it did not finish is counted anew when they are given on."""
        finished = sum(rows for _, rows in hand.batches.values()) - hand.open_rows
        self.progress.before -= finished - hand.in_doubt
        self.progress.held_before -= hand.in_doubt

    def _batch_done(self, hand: Hand, done: BatchDone) -> None:
        hand.batches.pop(done.batch, None)
        hand.in_doubt -= done.in_doubt

    # -- time --------------------------------------------------------------------------------------------------------

    def _tick(self) -> None:
        now = self._clock.monotonic()
        self._hand_out(now)
        self._feed()
        if self._beside is not None and self._draining is None:
            self._beside.tick(now)
        self._watch(now)
        if now - self._renewed_at >= 1.0:
            self._renewed_at = now
            per_s = self.progress.rate(now) / max(1, len(self._crew.hands))
            self._worker_per_s = max(per_s, 0.97 * self._worker_per_s)
            self._renew(now)
            self._suppress()
            self._suppressing.exchange()
        self._overview.sum_up(is_draining=self._draining is not None)
        self._narrator.progress(self.progress, now)
        if self._draining is None and (reason := self._is_over(now)):
            self.drain(reason)

    def _suppress(self) -> None:
        try:
            self._suppressing.flush(self._pacing.breaker.is_tripped)
        except EngineError as problem:
            # The list or the folder of suppressions is no good. What was not written is in the logs: `merge-logs`
            # writes it to report/suppress.parquet.
            if self._draining is None:
                self._stopped = Stopped(exit_code=problem.exit_code, problem=str(problem), hint=problem.next_step)
                self.drain(str(problem))

    def _hand_out(self, now: float) -> None:
        for decision in self._pacing.tick(now):
            hand = self._crew.hands.get(decision.worker)
            if hand is None:
                if self._beside is not None and decision.worker == SEAT:
                    self._beside.carry_out(decision)
                continue
            match decision:
                case slots.Grant():
                    hand.channel.send(Grant(key=decision.key, connections=decision.connections))
                case slots.Revoke():
                    hand.channel.send(Revoke(key=decision.key, connections=decision.connections))
                case slots.Allow():
                    hand.channel.send(Allow(key=decision.key, messages=decision.messages, valid_s=decision.valid_s))

    def _watch(self, now: float) -> None:
        for hand in self._crew.kill_silent(SILENCE_S):
            self._narrator.event("worker_silent", worker=hand.worker, seconds=round(now - hand.heard_at))
        if now - self._watched_at < 1.0:
            return
        self._watched_at = now
        if self._paused or self._draining is not None:
            self._watching = MachineWatch()  # nothing is attempted, so no progress is missed
            return
        demand: Counter[Key] = Counter()
        for hand in self._crew.hands.values():
            demand.update({key: rows for key, rows in hand.demand.items() if rows})
            self._watching.worker(hand.worker, hand.unread, hand.ready + hand.parked + hand.in_flight, now)
        answers = {
            key: told.accepted + told.refused for key in demand if (told := self.progress.keys.get(key)) is not None
        }
        delivery = self._settings.delivery
        stuck_after_s = max(delivery.stuck_after.seconds, delivery.dot_timeout.seconds)
        self._watching.keys(demand, answers, self._pacing, now, stuck_after_s)
        for stall in self._watching.stalled(now):
            seconds = round(stall.silent_s)
            self._narrator.event("stalled", kind=stall.kind.value, what=stall.name, seconds=seconds, doing=stall.doing)

    def _count(self) -> dict[str, object]:
        self.told = self.progress.counters(self._clock.monotonic())
        return self.told

    def _renew(self, now: float) -> None:
        if self._shared is not None:
            self._heed(self._shared, now)
            return
        try:
            alive = self._store.renew(self._incarnation.id, self._clock.wall_us(), self._count())
            campaign = self._store.campaign()
            self._pacing.obey(words_of(self._store.overrides()))
        except StoreAway as problem:
            self._narrator.event("store_away", problem=str(problem))
            self._codes.add(Exit.TRY_AGAIN)
            if self._draining is None:
                self.drain(str(problem))
            return
        if not alive and self._draining is None:
            self._codes.add(Exit.TRY_AGAIN)
            self.drain("another sender has taken over this partition")
        self._obey(campaign.state if campaign is not None else "ready")

    def _heed(self, shared: Shared, now: float) -> None:
        """What the shared store told."""
        if shared.away is not None:
            self._connected_at = now  # nothing is attempted, so no connection is missed
        if shared.lost_lease and self._draining is None:
            self._codes.add(Exit.TRY_AGAIN)
            self.drain("the lease was lost: another sender has taken over, or the operator released it")
        if shared.changed is not None and self._draining is None:
            self._codes.add(Exit.TRY_AGAIN)
            self.drain(f"{shared.changed} {shared.changed.next_step}")
        shared.tell_wide(self._pacing.wide.news(now, shared.store_us()))
        self._pacing.obey(words_of(shared.overrides))
        self._obey(shared.campaign_state)

    def _obey(self, state: str) -> None:
        """The operator's word on the campaign."""
        now_us = self._clock.wall_us()
        expired = self._schedule.is_over(now_us)
        if (expired or state == "cancelled") and self._draining is None:
            self._is_ended = True
            at = self._settings.campaign.expires_at
            self.drain(f"the campaign expired at {at}" if expired else "the campaign was cancelled")
        closed = self._schedule.why_closed(now_us)
        reason = "paused by the operator" if state == "paused" else closed or ""
        if reason:
            self._connected_at = self._clock.monotonic()  # nothing is attempted, so no connection is missed
        if reason != self._pause_reason:
            self._pause_reason, self._paused = reason, bool(reason)
            self._narrator.event("paused" if reason else "resumed", reason=reason)
            for hand in self._crew.hands.values():
                hand.channel.send(Pause(paused=self._paused, reason=reason))
        if self._was_paused and state == "ready":
            # Whoever resumes has seen what there was.
            self._stop_watch.resumed(evidence(self.progress, self._complaints))
        self._was_paused = state == "paused"
        patience_s = self._options.max_wait_s
        if closed and patience_s is not None and self._draining is None:
            wait_s = (self._schedule.opens_at(now_us) - now_us) / 1e6
            if wait_s > patience_s:
                self.drain(f"{closed}: {wait_s:.0f} s more")
        self._stop_by_itself()

    def _stop_by_itself(self) -> None:
        """Too many refusals or complaints: the campaign is paused until the operator says `resume`."""
        now, stop = self._clock.monotonic(), self._settings.stop
        if self._draining is not None or (stop.error_share is None and stop.complaint_share is None):
            return
        if stop.complaint_share is not None and now - self._counted_at >= COUNT_COMPLAINTS_S:
            self._counted_at = now
            self._complaints = complaints_of(self._campaign.feedback)
        seen = evidence(self.progress, self._complaints)
        if (why := self._stop_watch.why(stop, seen)) is not None:
            self._stop_watch.stopped(seen)
            self._narrator.event("stopped_by_itself", reason=why)
            self._codes.add(Exit.TRY_AGAIN)
            with contextlib.suppress(StoreAway):  # the run ends either way
                self._store.set_campaign_state("paused")
            self.drain(f"{why}. The campaign is paused: `engine resume`, then `engine send`, goes on")

    def _is_over(self, now: float) -> str | None:
        """Why there is nothing more to do in this run, or None."""
        hands = list(self._crew.hands.values())
        if self._starting or not hands or any(hand.log_id not in self._ready_hands for hand in hands):
            return None
        out_of_batches = (self._exhausted or self._limit_left == 0) and not self._orphaned
        if self._shared is not None and self._shared.is_busy:
            return None
        if out_of_batches and not any(hand.batches for hand in hands):
            return "each row has its outcome"
        if not any(hand.unread or hand.in_flight for hand in hands) and (used_up := self._pacing.used_up()):
            self._codes.add(Exit.TRY_AGAIN)
            return used_up
        if self._pacing.waits_for_warmup() or (self._sharing is not None and self._sharing.waits):
            # A cap of ten a day lets one go in an hour, other machines hold what is allowed: no dead network.
            self._connected_at = now
        patience_s = self._settings.delivery.give_up_after.seconds
        if now - self._connected_at > patience_s:
            self._codes.add(Exit.TRY_AGAIN)
            return f"no connection for {patience_s:g} s: {self._overview.last_reason or 'the relay is away'}"
        idle = out_of_batches and not any(hand.unread or hand.in_flight or hand.has_demand for hand in hands)
        if not idle:
            return None
        if self._limit_left == 0 and not any(hand.waiting for hand in hands):
            return "the limit of this run is reached"
        due = self.progress.next_due_us
        if due is not None and self._options.max_wait_s is not None:
            wait_s = (due - self._clock.wall_us()) / 1e6
            if wait_s > self._options.max_wait_s:
                return f"{self.progress.waiting} rows wait, the next for {wait_s:.0f} s more"
        return None

    def _tell_workers(self, message: msgspec.Struct, worker: int | None) -> None:
        if self._beside is not None and worker in (None, SEAT):
            self._beside.tell(message)
        for hand in self._crew.hands.values():
            if worker is None or hand.worker == worker:
                hand.channel.send(message)
