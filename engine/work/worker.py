"""One worker process: reads its rows, renders, speaks SMTP, appends its log. Reads like a table of contents.

    supervisor  --Assign, Grant, Allow, Drain-->  Intake -> Scheduler -> Dispatch -> Session
                <--Pulse, BatchDone, Released---  Settlement <- events <-----------'

The log is locked for the process's life. When the channel closes the supervisor is dead: what is in flight finishes,
nothing new is attempted, the log is sealed, the process ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import socket
from pathlib import Path

import msgspec

from engine.campaign import Campaign
from engine.clock import SystemClock
from engine.compose.render import build_composer
from engine.config import DeliveryTable, RetryTable, Settings, decode_custom
from engine.errors import EngineError, Exit
from engine.lists.suppressions import Suppressions
from engine.pace.retry import RetryPlan
from engine.pace.rules import load_rules
from engine.pace.scheduler import Scheduler
from engine.rows import RowReader, open_parquet
from engine.smtp.destination import ConnectionLimits, Destination, relay_destination
from engine.smtp.dialogue import Event, Stage
from engine.smtp.handshake import Ended
from engine.smtp.pool import Pool
from engine.smtp.session import Session
from engine.work.bench import LaneTally, OpenBatch, Workbench
from engine.work.channel import Channel
from engine.work.dispatch import Dispatch
from engine.work.intake import Intake
from engine.work.lanes import DeliveryLane, RelayLanes
from engine.work.logbook import Logbook, LogUnwritable
from engine.work.messages import (
    Allow,
    Assign,
    BatchDone,
    Down,
    Drain,
    Goodbye,
    Grant,
    Live,
    Pause,
    ProviderCount,
    Pulse,
    Released,
    Resend,
    Revoke,
    Started,
    Stopped,
    Told,
    Unused,
)
from engine.work.settlement import Settlement
from formats.reply import Reply
from formats.sendlog import Header

TICK_S = 0.05  # results reach the file within this; the pulse goes out every fourth tick
PULSE_TICKS = 4


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
    relay: str | None = None  # in place of the settings' relay: where the embedded sink listens


def run_worker(end: socket.socket, raw_start: bytes) -> None:
    """The process's whole life."""
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # A terminal sends these to the whole group; the supervisor decides and tells us.
        signal.signal(ignored, signal.SIG_IGN)
    start = msgspec.json.decode(raw_start, type=WorkerStart)
    asyncio.run(_live(end, start))


async def _live(end: socket.socket, start: WorkerStart) -> None:
    channel: Channel[Down] = Channel(end, Down)
    await channel.open()
    try:
        worker = Worker(start, channel)
    except EngineError as problem:
        channel.send(Stopped(exit_code=problem.exit_code, problem=str(problem), hint=problem.next_step))
        channel.send(Goodbye(open_rows=0))
        await channel.flush()
        channel.close()
        return
    await worker.run()


class Worker:
    """Wires the parts and keeps time."""

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
        composer = build_composer(settings, campaign.folder, open_parquet(plan.files[0].path).schema_arrow)
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
        self._log = Logbook(path, header, clock, durability=settings.log.durability)
        rng = random.Random(start.seed)
        scheduler = Scheduler(rng=rng, tick_s=_wheel_grain_s(settings))
        bench = self._bench = Workbench(settings, self._log, scheduler, clock, rng)
        bench.batch_done = self._batch_done
        lane = self._relay_lane(settings)
        self._lanes = [lane]
        self._suppressions = Suppressions(campaign.suppression, list_id=settings.campaign.list_id)
        reader = RowReader(plan, [plan.address_column, *composer.columns])
        self._intake = Intake(bench, reader, RelayLanes(lane), self._suppressions)
        self._dispatch = Dispatch(bench, composer, lambda: self._lanes)
        self._dispatch.failed = self._log_failed
        self._settlement = Settlement(bench, load_rules(), RetryPlan.from_settings(settings.retry))
        self._ticks = 0
        self._told_full = False
        self._is_draining = False
        self._reason = ""
        channel.send(Started(log_id=header.log_id))

    def _relay_lane(self, settings: Settings) -> DeliveryLane:
        destination = relay_destination(settings.delivery, os.environ, folder=self._folder)
        key = ("", destination.key)
        is_rated = settings.delivery.messages_per_second is not None
        lane = DeliveryLane(
            0, key, self._log.provider(destination.key), self._log.source("default"), self._clock, is_rated=is_rated
        )
        lane.give_slots_back = lambda n: self._channel.send(Released(key=key, connections=n))
        lane.give_messages_back = lambda n: self._channel.send(Unused(key=key, messages=n))
        limits = ConnectionLimits.of(settings.delivery)
        lane.pool = Pool(destination, limits, lane, _Ear(self, lane), self._clock)
        return lane

    # -- life --------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Until drained, or the supervisor is gone."""
        listening = asyncio.create_task(self._listen())
        reading = asyncio.create_task(self._read())
        try:
            while not (self._is_draining and not self._bench.flights and self._dispatch.is_idle):
                await asyncio.sleep(TICK_S)
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
            case Grant():
                self._lane(message.key).grant(message.connections)
            case Revoke():
                self._lane(message.key).revoke(message.connections)
            case Allow():
                self._lane(message.key).allow(message.messages, message.valid_s)
                self._dispatch.wake()
            case Pause():
                self._dispatch.paused = message.reason if message.paused else None
                self._dispatch.wake()
            case Live():
                self._apply(message)
            case Resend():
                pass
            case Drain():
                self._drain()

    def _lane(self, key: tuple[str, str]) -> DeliveryLane:
        return next(lane for lane in self._lanes if lane.key == key)

    def _apply(self, live: Live) -> None:
        delivery = msgspec.json.decode(live.delivery, type=DeliveryTable, dec_hook=decode_custom)
        retry = msgspec.json.decode(live.retry, type=RetryTable, dec_hook=decode_custom)
        self._bench.settings = msgspec.structs.replace(self._bench.settings, delivery=delivery, retry=retry)
        self._settlement.retry = RetryPlan.from_settings(retry)
        for lane in self._lanes:
            lane.is_rated = delivery.messages_per_second is not None
            if lane.pool is not None:
                lane.pool.set_limits(ConnectionLimits.of(delivery))

    def _drain(self) -> None:
        self._is_draining = True
        self._dispatch.is_stopped = True
        self._bench.scheduler.stop()

    async def _end(self) -> None:
        for lane in self._lanes:
            if lane.pool is not None:
                await lane.pool.close()
        with contextlib.suppress(LogUnwritable):
            self._log.close()
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

    def has_events(self, lane: DeliveryLane, events: list[Event]) -> None:
        """A session has answers."""
        self._settlement.settle(lane, events)
        self._dispatch.wake()

    def is_ready(self) -> None:
        """A session has capacity."""
        self._dispatch.wake()

    def has_ended(self, lane: DeliveryLane, why: Ended, stage: Stage, reply: Reply | None, error: str) -> None:
        """A connection ended, or could not be made."""
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
        self._dispatch.wake()

    # -- time --------------------------------------------------------------------------------------------------------

    def _tick(self) -> None:
        self._ticks += 1
        bench, now = self._bench, self._clock.monotonic()
        for row in bench.scheduler.advance(now):
            bench.open.pop(row, None)
            bench.is_expired(row, bench.scheduler.history(row)[0])
        self._flush()
        demand = bench.scheduler.demand()
        for lane in self._lanes:
            in_flight = sum(1 for flight in bench.flights.values() if flight.lane == lane.index)
            rows = demand.get(lane.index, 0) + in_flight
            lane.want(rows, 1)
            if not rows:
                lane.give_back_unused()
        if self._ticks % PULSE_TICKS == 0:
            self._suppressions.refresh()
            self._pulse()
        self._dispatch.wake()

    def _flush(self) -> None:
        try:
            self._log.write()
        except LogUnwritable as problem:
            self._log_failed(problem)
        if self._log.is_full and not self._told_full:
            self._told_full = True
            self._log_failed(LogUnwritable(file=self._log.path, problem="no space left on the device"))

    def _log_failed(self, problem: LogUnwritable) -> None:
        self._stop(problem)

    def _stop(self, problem: EngineError) -> None:
        if not self._is_draining:
            self._channel.send(Stopped(exit_code=problem.exit_code, problem=str(problem), hint=problem.next_step))
        self._drain()

    def _pulse(self) -> None:
        bench = self._bench
        counts = []
        for lane in self._lanes:
            tally = bench.lanes.pop(lane.index, None)
            connections = lane.pool.open if lane.pool is not None else 0
            if tally is None and not connections:
                continue
            tally = tally or LaneTally()
            verdicts = (tally.accepted, tally.rejected, tally.deferred, tally.lost, tally.in_doubt)
            counts.append(ProviderCount(lane.key[1], *verdicts, connections=connections))
        demand = bench.scheduler.demand()
        due = bench.scheduler.next_due()
        self._channel.send(
            Pulse(
                invalid=bench.invalid,
                suppressed=bench.suppressed,
                expired=bench.expired,
                providers=counts,
                unread=self._intake.unread,
                open_rows=bench.open_rows,
                ready=bench.scheduler.ready,
                parked=bench.scheduler.parked,
                waiting=bench.scheduler.waiting,
                in_flight=len(bench.flights),
                next_due_us=bench.wall_of(due) if due is not None and bench.scheduler.waiting else None,
                demand=[(lane.key, demand[lane.index]) for lane in self._lanes if lane.index in demand],
                reason=self._dispatch.paused or self._reason,
            )
        )
        bench.invalid = bench.suppressed = bench.expired = 0
        self._reason = ""


def _wheel_grain_s(settings: Settings) -> float:
    """Five seconds, finer where the first retries are a matter of seconds (demonstrations, tests)."""
    return min(5.0, max(0.25, min((wait.seconds for wait in settings.retry.plan), default=60.0) / 4))


class _Ear:
    """A lane's pool tells its worker through this."""

    def __init__(self, worker: Worker, lane: DeliveryLane) -> None:
        self._worker, self._lane = worker, lane

    def on_ready(self, session: Session) -> None:
        self._worker.is_ready()

    def on_events(self, session: Session, events: list[Event]) -> None:
        self._worker.has_events(self._lane, events)

    def on_session_ended(
        self, subject: Session | Destination, why: Ended, stage: Stage, reply: Reply | None, error: str
    ) -> None:
        self._worker.has_ended(self._lane, why, stage, reply, error)
