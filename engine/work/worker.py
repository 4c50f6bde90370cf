"""One worker process: reads its rows, renders, speaks SMTP, appends its log. Reads like a table of contents.

    supervisor  --Assign, Grant, Allow, Drain-->  Intake -> Scheduler -> Dispatch -> Session
                <--Pulse, BatchDone, Released---  Settlement <- events <-----------'

The log is locked for the process's life. When the channel closes the supervisor is dead: what is in flight finishes,
nothing new is attempted, the log is sealed, the process ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import random
import signal
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from engine.campaign import Campaign
from engine.clock import SystemClock
from engine.config import DeliveryTable, RetryTable, ScheduleTable, Settings, decode_custom
from engine.errors import EngineError, Exit
from engine.lists.suppressions import Suppressions
from engine.pace.budgets import load_budgets
from engine.pace.retry import RetryPlan
from engine.pace.rules import load_rules, own_rules
from engine.pace.scheduler import Scheduler
from engine.rows import RowReader
from engine.smtp.destination import Destination, relay_destination
from engine.smtp.dialogue import Event, Stage
from engine.smtp.handshake import Ended
from engine.smtp.loop import loop_factory
from engine.smtp.session import Session
from engine.work.bench import LaneTally, OpenBatch, Workbench
from engine.work.channel import Channel
from engine.work.dispatch import Dispatch
from engine.work.frozen import planned_composer, selectors_of
from engine.work.intake import Intake, suppressed_rows
from engine.work.lanes import Account, Lane, LaneTable
from engine.work.logbook import Logbook, LogUnwritable
from engine.work.messages import (
    Admitted,
    Allow,
    Assign,
    BatchDone,
    Down,
    Drain,
    Goodbye,
    Grant,
    Key,
    Live,
    NotAdmitted,
    Pace,
    Pause,
    ProviderCount,
    Pulse,
    Released,
    Revoke,
    Started,
    Stopped,
    Told,
    Tripped,
    Unused,
)
from engine.work.observing import Observer
from engine.work.resolving import make_resolver
from engine.work.routing import DirectRouting, LaneMaker, RelayRouting, budgets_file, with_ca_file_in
from engine.work.settlement import Settlement
from engine.work.timing import hours_of, zones_of
from engine.work.watching import WorkerWatch
from engine.work.windows import Gate, ReportingLog
from engine.zones import Zones
from formats.reply import Reply
from formats.sendlog import Header

TICK_S = 0.05  # results reach the file within this; the pulse goes out every fourth tick
PULSE_TICKS = 4
WATCH_TICKS = 20
GC_OBJECTS = 20_000
READY_ROWS = 4096  # rows whose values are in memory; a lane's share is an eighth where there are several
_CONNECTING_S = 0.5  # a connection that was refused began about so long before
_REFUSE_A_MESSAGE = frozenset({Stage.RCPT, Stage.DATA, Stage.DOT})


class WorkerStart(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker is told at birth. Nothing secret: it reads keys and passwords itself."""

    folder: str
    plan_fingerprint: str
    incarnation: str
    sender: str
    host_id: str
    boot_id: str
    worker: int
    number: int  # how many workers this supervisor started before: names the log
    seed: int
    outbox: str | None = None  # serve the outbox of this folder, by the delivery settings of `folder`
    relay: str | None = None  # in place of the settings' relay: where the embedded sink listens


def run_worker(end: socket.socket, raw_start: bytes) -> None:
    """The process's whole life."""
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # A terminal sends these to the whole group; the supervisor decides and tells us.
        signal.signal(ignored, signal.SIG_IGN)
    start = msgspec.json.decode(raw_start, type=WorkerStart)
    delivery = Campaign(Path(start.folder)).settings().delivery
    relay = start.relay or delivery.relay
    is_tls = start.relay is None and (delivery.mode == "direct" or delivery.tls != "off" or relay.startswith("smtps:"))
    # What stands once a worker is up never goes, and what a message needs is freed by its counts: looking for cycles
    # every 700 objects costs a message a twentieth of its time.
    gc.freeze()
    gc.set_threshold(GC_OBJECTS, 20, 20)
    with asyncio.Runner(loop_factory=loop_factory(delivery.event_loop, tls=is_tls)) as runner:
        runner.run(_live(end, start))


async def _live(end: socket.socket, start: WorkerStart) -> None:
    channel: Channel[Down] = Channel(end, Down)
    await channel.open()
    try:
        worker = _worker(start, channel)
    except EngineError as problem:
        channel.send(Stopped(exit_code=problem.exit_code, problem=str(problem), hint=problem.next_step))
        channel.send(Goodbye(open_rows=0))
        await channel.flush()
        channel.close()
        return
    await worker.run()


def _worker(start: WorkerStart, channel: Channel[Down]) -> Worker:
    if start.outbox is None:
        return Worker(start, channel)
    from engine.work.outbox import OutboxWorker  # it is a Worker itself

    return OutboxWorker(start, channel)


class Reading(Protocol):
    """Whoever brings rows."""

    @property
    def unread(self) -> int:
        """Rows assigned and not looked at yet."""

    def assign(self, assigned: Assign) -> None:
        """Take a batch on."""

    def step(self) -> bool:
        """Bring some; True when something was done."""

    def routed(self, lane: int, rows: Sequence[int]) -> None:
        """The lane of rows that were held is known."""

    @property
    def asleep(self) -> int:
        """Rows that wait for the hours of their zone."""

    @property
    def next_opening(self) -> tuple[int, str] | None:
        """When the first of them wake (UTC microseconds), and how people of their zone write that."""


class Worker:
    """Wires the parts and keeps time."""

    _zones: Zones | None = None  # an outbox has none

    def __init__(self, start: WorkerStart, channel: Channel[Down]) -> None:
        clock = SystemClock()
        self._clock, self._channel = clock, channel
        campaign = Campaign(Path(start.folder))
        self._folder = campaign.folder
        settings = campaign.settings()
        if start.relay is not None:
            delivery = msgspec.structs.replace(settings.delivery, relay=start.relay, tls="off", username=None)
            settings = msgspec.structs.replace(settings, delivery=delivery)
        plan = campaign.plan()
        composer = planned_composer(campaign, settings, plan, selectors=selectors_of(campaign, settings))
        header = Header(
            log_id=f"{start.incarnation}-{start.number:03d}",
            campaign_id=plan.campaign_id,
            plan_fingerprint=start.plan_fingerprint,
            incarnation=start.incarnation,
            sender=start.sender,
            host_id=start.host_id,
            boot_id=start.boot_id,
            worker=start.worker,
            started_at_us=clock.wall_us(),
        )
        path = campaign.logs / f"{header.log_id}.arrows"
        self._gate = Gate(channel.send) if plan.store != "sqlite" else None
        kind = Logbook if self._gate is None else ReportingLog
        self._log = kind(path, header, clock, durability=settings.log.durability)
        rng = random.Random(start.seed)
        # Through a relay there is one lane, and nothing to run ahead of.
        share = READY_ROWS if settings.delivery.mode == "relay" else READY_ROWS // 8
        scheduler = Scheduler(
            ready_rows=READY_ROWS, ready_rows_per_lane=share, rng=rng, tick_s=_wheel_grain_s(settings)
        )
        bench = self._bench = Workbench(settings, self._log, scheduler, clock, rng)
        bench.batch_done = self._batch_done
        self._table = LaneTable()
        self._observer = Observer(clock)
        retry = RetryPlan.from_settings(settings.retry)
        self._routing = self._make_routing(campaign, settings, retry, rng)
        self._suppressions = Suppressions(campaign.suppression, list_id=settings.campaign.list_id)
        self._zones = zones_of(settings)
        zone = [settings.list.zone_column] if settings.list.zone_column is not None else []
        reader = RowReader(plan, [plan.address_column, *composer.columns, *zone])
        intake = Intake(bench, scheduler, reader, self._routing, self._suppressions, self._zones)
        self._intake: Reading = intake
        if isinstance(self._routing, DirectRouting):
            self._routing.routed = intake.routed
            self._routing.come_back = intake.come_back
        self._dispatch = Dispatch(bench, composer, self._table.with_sessions)
        self._dispatch.awake = intake.awake if self._zones is not None else None
        self._dispatch.failed = self._log_failed
        self._dispatch.signing = composer if composer.signs else None
        if self._gate is not None and isinstance(self._log, ReportingLog):
            self._dispatch.admission = self._gate
            self._gate.attach(self._log, bench)
        self._settlement = Settlement(bench, load_rules(*own_rules(campaign.folder)), retry, self._observer)
        self._watching = WorkerWatch()
        self._ticks = 0
        self._told_full = False
        self._is_draining = False
        self._reason = ""
        channel.send(Started(log_id=header.log_id))

    def _make_routing(
        self, campaign: Campaign, settings: Settings, retry: RetryPlan, rng: random.Random
    ) -> RelayRouting | DirectRouting:
        maker = LaneMaker(self._table, self._bench, lambda lane: _Ear(self, lane), self._wire)
        if settings.delivery.mode == "relay":
            destination = relay_destination(settings.delivery, os.environ, folder=campaign.folder)
            return RelayRouting(maker, destination, settings.delivery)
        budgets = load_budgets(budgets_file(campaign.folder))
        delivery = with_ca_file_in(campaign.folder, settings.delivery)
        resolver = make_resolver(delivery, self._clock, rng, campaign.run)
        routing = DirectRouting(maker, resolver, budgets, delivery, retry, self._clock)
        routing.tell = lambda event, fields: self._channel.send(Told(level="warning", event=event, fields=fields))
        return routing

    def _wire(self, account: Account) -> None:
        key, channel = account.key, self._channel
        account.give_slots_back = lambda n: channel.send(Released(key=key, connections=n))
        account.give_messages_back = lambda n: channel.send(Unused(key=key, messages=n))

    # -- life --------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Until drained, or the supervisor is gone."""
        listening = asyncio.create_task(self._listen())
        reading = asyncio.create_task(self._read())
        try:
            while not (self._is_draining and not self._bench.flights and self._dispatch.is_idle):
                await asyncio.sleep(TICK_S)
                if reading.done() and not self._is_draining:
                    reading.result()  # a bug there must not leave rows unread in silence
                self._tick()
        finally:
            reading.cancel()
            await self._end()
            listening.cancel()

    async def _listen(self) -> None:
        async for message in self._channel.messages():
            try:
                self._take(message)
            except EngineError as problem:
                self._stop(problem)
        self._drain()

    def _take(self, message: Down) -> None:
        match message:
            case Assign():
                self._intake.assign(message)
            case Grant() | Revoke() | Allow() | Pace():
                account = self._table.account(message.key)
                if account is not None:
                    self._pace(account, message)
            case Tripped():
                change = self._settlement.tripped.add if message.is_open else self._settlement.tripped.discard
                change(message.provider)
            case Pause():
                self._dispatch.paused = message.reason if message.paused else None
                self._dispatch.wake()
            case Live():
                self._apply(message)
            case Admitted():
                self._dispatch.admitted(message.serials)
            case NotAdmitted():
                self._dispatch.refused(message.serials)
            case Drain():
                self._drain()

    def _pace(self, account: Account, message: Grant | Revoke | Allow | Pace) -> None:
        match message:
            case Grant():
                account.grant(message.connections)
            case Revoke():
                account.revoke(message.connections)
            case Allow():
                account.allow(message.messages, message.valid_s)
            case Pace():
                self._apply_pace(account, message)
        self._dispatch.wake()

    def _apply_pace(self, account: Account, pace: Pace) -> None:
        """The throttle's word: rows of a suspended key wait as numbers, and burn no attempt."""
        account.is_rated, account.per_connection = pace.is_rated, pace.per_connection
        scheduler, now = self._bench.scheduler, self._clock.monotonic()
        for lane in account.lanes:
            if pace.for_s > 0:
                for row in scheduler.suspend_lane(lane.index, now + pace.for_s, pace.reason):
                    self._bench.open.pop(row, None)
            elif scheduler.suspension(lane.index) is not None and lane.unreachable_since is None:
                scheduler.resume_lane(lane.index)
            lane.ease()

    def _apply(self, live: Live) -> None:
        delivery = msgspec.json.decode(live.delivery, type=DeliveryTable, dec_hook=decode_custom)
        retry = msgspec.json.decode(live.retry, type=RetryTable, dec_hook=decode_custom)
        if self._zones is not None:
            schedule = msgspec.json.decode(live.schedule, type=ScheduleTable)
            self._zones.set_hours(hours_of(schedule), schedule.zone)
        self._bench.settings = msgspec.structs.replace(self._bench.settings, delivery=delivery, retry=retry)
        self._settlement.retry = RetryPlan.from_settings(retry)
        budgets = load_budgets(budgets_file(self._folder)) if isinstance(self._routing, DirectRouting) else None
        self._routing.apply(delivery, budgets)

    def _drain(self) -> None:
        self._is_draining = True
        self._dispatch.is_stopped = True
        self._dispatch.give_up_asking()
        self._bench.scheduler.stop()

    async def _end(self) -> None:
        pools = [lane.pool for lane in self._table.lanes if lane.pool is not None]
        await asyncio.gather(*(pool.close() for pool in pools))
        with contextlib.suppress(LogUnwritable):
            self._log.close()
        if self._gate is not None:
            self._gate.flush()
        self._pulse()
        self._channel.send(Goodbye(open_rows=self._bench.open_rows))
        await self._channel.flush()
        self._channel.close()

    # -- rows --------------------------------------------------------------------------------------------------------

    async def _read(self) -> None:
        """Read ahead while there is room; yield to the loop after each stretch."""
        while not self._is_draining:
            try:
                moved = self._intake.step()
            except EngineError as problem:
                self._stop(problem)
                return
            if moved:
                self._dispatch.wake()
            await asyncio.sleep(0 if moved else 0.005)

    def _batch_done(self, batch: OpenBatch) -> None:
        if not batch.cut_short:
            # The store will say "done" of it: its records must not be younger than that word.
            self._flush()
            self._channel.send(BatchDone(batch=batch.batch, in_doubt=batch.in_doubt))

    # -- sessions ----------------------------------------------------------------------------------------------------

    def has_events(self, lane: Lane, events: list[Event]) -> None:
        """A session has answers."""
        lane.failures, lane.unreachable_since = 0, None
        self._settlement.settle(lane, events)
        self._dispatch.wake()

    def is_ready(self, session: Session) -> None:
        """A session has capacity."""
        if session.in_hand:
            self._dispatch.wake()
        else:
            self._dispatch.hurry()

    def has_ended(
        self, lane: Lane, why: Ended, stage: Stage, reply: Reply | None, error: str, opened_at: float | None
    ) -> None:
        """A connection ended (it was opened then), or could not be made (None)."""
        said = f"{why} at {stage.upper()}" + (f": {reply}" if reply else f": {error}" if error else "")
        if why is Ended.AUTH_REFUSED:
            problem = f"{lane.key[1]} refuses the login: {reply or error}"
            hint = "Check username and password of [delivery]; `engine check` tries them."
            self._channel.send(Stopped(exit_code=Exit.SETTINGS, problem=problem, hint=hint))
            self._drain()
        elif why not in (Ended.FINISHED, Ended.IDLE, Ended.ABORTED):
            self._reason = f"{lane.key[1]}: {said}"
            fields: dict[str, str | int | float] = {"destination": lane.key[1], "why": said}
            self._channel.send(Told(level="info", event="connection_ended", fields=fields))
            self._observe_ending(lane, stage, reply, said, opened_at)
        self._dispatch.wake()

    def _observe_ending(
        self, lane: Lane, stage: Stage, reply: Reply | None, said: str, opened_at: float | None
    ) -> None:
        now = self._clock.monotonic()
        if reply is not None and reply.code >= 400:
            if stage not in _REFUSE_A_MESSAGE:  # there the message's own refusal has told it
                judgement = self._settlement.judge(stage, reply, lane)
                # Connections that end together are one cohort: what counts is when each began.
                began = opened_at if opened_at is not None else now - _CONNECTING_S
                self._observer.refused(lane.key, judgement, reply, began, lane.on_connection)
        elif isinstance(self._routing, DirectRouting) and stage is not Stage.STARTTLS:
            # A relay that cannot be reached is no matter of pace: the pool backs off, and the run gives up in time.
            # Neither is a host without the TLS that one domain asks for: its provider serves the others as before.
            self._observer.unreachable(lane.key, said)
        if isinstance(self._routing, DirectRouting) and not lane.open:
            # RFC 3463: cryptographic failure, no answer from host
            status, wants = ("4.7.5", lane.wants) if stage is Stage.STARTTLS else ("4.4.1", "")
            self._rest_lane(lane, status, said + wants, now)

    def _rest_lane(self, lane: Lane, status: str, said: str, now: float) -> None:
        """No host of a destination can be had: its rows wait together, by the retry plan, and burn no attempt."""
        pool = lane.pool
        dead_until = pool.dead_until(now) if pool is not None else None
        if dead_until is None or self._bench.scheduler.suspension(lane.index) is not None:
            return  # another host is tried next
        lane.failures += 1
        lane.unreachable_since = lane.unreachable_since or now
        plan = self._settlement.retry
        wait_s = plan.next_wait(lane.failures, lane.unreachable_since, now, self._bench.rng)
        until = now + wait_s if wait_s is not None else plan.expires_at(lane.unreachable_since)
        until = min(max(until, dead_until), plan.expires_at(lane.unreachable_since))
        for row in self._bench.scheduler.suspend_lane(lane.index, until, f"unreachable: {said}"):
            self._bench.open.pop(row, None)
        lane.unreachable_why = f"{status} {said}"

    # -- time --------------------------------------------------------------------------------------------------------

    def _tick(self) -> None:
        self._ticks += 1
        bench, now = self._bench, self._clock.monotonic()
        for row in bench.scheduler.advance(now):
            bench.open.pop(row, None)
            bench.is_expired(row, bench.scheduler.history(row)[0])
        self._flush()
        self._routing.tick(now)
        self._want_connections(now)
        if self._ticks % PULSE_TICKS == 0:
            if self._suppressions.refresh():
                self._dispatch.stopped = suppressed_rows(self._bench.open, self._suppressions)
            self._pulse()
        if self._ticks % WATCH_TICKS == 0:
            self._watch(now)
        self._dispatch.wake()

    def _watch(self, now: float) -> None:
        """What makes no progress is told; a connection that answers nothing is cut."""
        delivery = self._bench.settings.delivery
        stuck_after_s = max(delivery.stuck_after.seconds, delivery.dot_timeout.seconds)
        sessions = [session for lane in self._table.with_sessions() for session in lane.all_sessions()]
        open_rows, placed = self._bench.open_rows, self._placed()
        since = self._dispatch.syncing_since
        for stall in self._watching.look(sessions, open_rows, placed, since, now, stuck_after_s):
            fields: dict[str, str | int | float] = {
                "kind": stall.kind.value,
                "what": stall.name,
                "seconds": round(stall.silent_s),
                "doing": stall.doing,
            }
            self._channel.send(Told(level="warning", event="stalled", fields=fields))

    def _placed(self) -> int:
        """Open rows that are in a place which says what they wait for."""
        if self._is_draining or self._intake.unread:
            # What is given back is in no place; of a batch that is being read, nobody counts the rows to be skipped.
            return self._bench.open_rows
        return self._bench.scheduler.open_rows + self._routing.asking + self._routing.waiting

    def _want_connections(self, now: float) -> None:
        for lane in self._table.with_sessions():
            if lane.unreachable_since is not None and self._settlement.retry.expires_at(lane.unreachable_since) <= now:
                self._give_up(lane)
        self._table.want(self._wanted_rows(), now)

    def _wanted_rows(self) -> dict[int, int]:
        """Rows per lane that connections are wanted for: those that may go and those on their way."""
        rows = self._bench.scheduler.demand()
        for flight in self._bench.flights.values():
            rows[flight.lane] = rows.get(flight.lane, 0) + 1
        return rows

    def _urgent(self) -> list[tuple[Key, int]]:
        """Rows that go before everybody else's: a campaign has none."""
        return []

    def _warm(self) -> list[Key]:
        """Keys at which a connection is kept though no row waits."""
        return []

    def _give_up(self, lane: Lane) -> None:
        """A destination could not be reached for the maximum age: its rows are given up, one that comes tries anew."""
        bench = self._bench
        for row, attempts in bench.scheduler.abandon(lane.index):
            bench.open.pop(row, None)
            bench.is_expired(row, attempts, lane.unreachable_why)
        lane.failures, lane.unreachable_since = 0, None

    def _flush(self) -> None:
        try:
            self._log.write()
        except LogUnwritable as problem:
            self._log_failed(problem)
        if self._log.is_full and not self._told_full:
            self._told_full = True
            self._log_failed(LogUnwritable(file=self._log.path, problem="no space left on the device"))
        if self._gate is not None:
            self._gate.flush()

    def _log_failed(self, problem: LogUnwritable) -> None:
        self._stop(problem)

    def _stop(self, problem: EngineError) -> None:
        if not self._is_draining:
            self._channel.send(Stopped(exit_code=problem.exit_code, problem=str(problem), hint=problem.next_step))
        self._drain()

    def _pulse(self) -> None:
        bench, scheduler = self._bench, self._bench.scheduler
        due = min((at for at in (scheduler.next_due(), self._routing.next_due()) if at is not None), default=None)
        demand, spent = self._table.demand(scheduler.demand()), self._table.take_spent()
        opening, asleep = self._intake.next_opening, self._intake.asleep
        next_due_us = bench.wall_of(due) if due is not None else None
        if opening is not None:
            next_due_us = min(next_due_us, opening[0]) if next_due_us is not None else opening[0]
        self._channel.send(
            Pulse(
                invalid=bench.invalid,
                suppressed=bench.suppressed,
                expired=bench.expired,
                rejected_unsent=bench.refused_unsent,
                providers=self._provider_counts(),
                unread=self._intake.unread + self._routing.asking,
                open_rows=bench.open_rows,
                ready=scheduler.ready,
                parked=scheduler.parked,
                waiting=scheduler.waiting + scheduler.suspended_rows() + self._routing.waiting + asleep,
                in_flight=len(bench.flights),
                next_due_us=next_due_us,
                demand=list(demand.items()),
                spent=spent,
                seen=self._observer.take(),
                suppress=bench.to_suppress,
                reason=self._dispatch.paused or self._reason,
                urgent=self._urgent(),
                warm=self._warm(),
                commits=self._log.commit_times,
                asleep=asleep,
                opens_at=opening,
                zoneless=self._zones.take_zoneless() if self._zones is not None else (0, 0),
            )
        )
        bench.invalid = bench.suppressed = bench.expired = bench.refused_unsent = 0
        bench.to_suppress = []
        self._log.commit_times = [0.0] * len(self._log.commit_times)
        self._reason = ""

    def _provider_counts(self) -> list[ProviderCount]:
        """Verdicts since the last pulse and connections, summed over the lanes of a provider."""
        by_provider: dict[str, list[int]] = {}
        for index in self._bench.lanes.keys() | self._table.busy.keys():
            lane = self._table.lanes[index]
            tally = self._bench.lanes.get(index) or LaneTally()
            counts = by_provider.setdefault(lane.key[1], [0] * 6)
            now = (tally.accepted, tally.rejected, tally.deferred, tally.lost, tally.in_doubt, lane.open)
            by_provider[lane.key[1]] = [a + b for a, b in zip(counts, now, strict=True)]
        self._bench.lanes.clear()
        return [ProviderCount(name, *counts) for name, counts in by_provider.items() if any(counts)]


def _wheel_grain_s(settings: Settings) -> float:
    """Five seconds, finer where the first retries are a matter of seconds (demonstrations, tests)."""
    return min(5.0, max(0.25, min((wait.seconds for wait in settings.retry.plan), default=60.0) / 4))


class _Ear:
    """A lane's pool tells its worker through this."""

    def __init__(self, worker: Worker, lane: Lane) -> None:
        self._worker, self._lane = worker, lane

    def on_ready(self, session: Session) -> None:
        self._worker.is_ready(session)

    def on_events(self, session: Session, events: list[Event]) -> None:
        self._lane.on_connection = session.sent
        self._worker.has_events(self._lane, events)

    def on_session_ended(
        self, subject: Session | Destination, why: Ended, stage: Stage, reply: Reply | None, error: str
    ) -> None:
        self._lane.on_connection = subject.sent if isinstance(subject, Session) else None
        opened_at = subject.opened_at if isinstance(subject, Session) else None
        self._worker.has_ended(self._lane, why, stage, reply, error, opened_at)
