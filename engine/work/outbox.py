"""The server of an outbox: claims rows, renders, speaks SMTP, reports. A worker whose rows come from a table.

    Outbox --claim--> OutboxQueue -> Dispatch: log, then `intend`, -> Session
           <--report-- OutboxLog <- Settlement <- events <---------'

Dispatch, settlement, lanes and routing are those of a campaign's worker (`worker.py`). What differs is here: rows are
numbered by the table, wait in the table, and a group goes only after the table has granted it (`_confirm`). It runs as
the whole of `engine serve-outbox`, or as one more process of `engine send`, whose ledger serves it first.

The table is spoken to from one thread, so that a slow disk or server never holds up the conversations.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec

from engine.campaign import Campaign, make_private_folder
from engine.clock import SystemClock
from engine.compose.render import RowProblem
from engine.config import Settings, load_settings
from engine.control.outbox import Claimed, Held, OutboxAway, Report, Server, State
from engine.errors import Exit
from engine.lists.suppressions import Suppressions
from engine.outbox import connect
from engine.pace.retry import RetryPlan
from engine.pace.rules import load_rules, own_rules
from engine.smtp.dialogue import Event
from engine.work.bench import Recipient, Workbench
from engine.work.channel import Channel
from engine.work.dispatch import Dispatch
from engine.work.frozen import selectors_of
from engine.work.lanes import Lane, LaneTable
from engine.work.logbook import LogUnwritable
from engine.work.messages import Assign, Down, Goodbye, Key, Started, Stopped, Told
from engine.work.observing import Observer
from engine.work.outbox_letters import LetterComposer, read_letter
from engine.work.outbox_log import OutboxLog
from engine.work.outbox_queue import PRIORITIES, OutboxQueue
from engine.work.outbox_recovery import Recovered, ballast_of_the_dead, recover
from engine.work.routing import DirectRouting, RelayRouting
from engine.work.settlement import Settlement
from engine.work.watching import WorkerWatch
from engine.work.worker import Worker, WorkerStart
from formats.address import AddressError, Mailbox, canonical, parse_mailboxes
from formats.sendlog import Header, Reason, Verdict
from formats.suppression import ALL, Entry

LOOK_S = 0.025  # between two looks at whether somebody wrote
LOOK_ANYWAY_S = 0.5  # rows come due by themselves
AWAY_S = 1.0  # between two tries to reach a store that is away
RENEW_S = 2.0
RECOVER_EVERY_S = 5.0


Answer = TypeVar("Answer")


class _Bench(Workbench):
    """A row with an outcome leaves the queue."""

    queue: OutboxQueue

    def has_outcome(self, row: int, *, in_doubt: bool = False) -> None:
        self.losses.pop(row, None)
        self.open.pop(row, None)
        self.queue.drop(row)


class OutboxWorker(Worker):
    """Serves one outbox."""

    def __init__(self, start: WorkerStart, channel: Channel[Down]) -> None:
        # Not Worker's: it opens a plan and a list, and there is none here.
        assert start.outbox is not None
        clock = SystemClock()
        self._clock, self._channel = clock, channel
        self._home = Campaign(Path(start.outbox))
        beside = Campaign(Path(start.folder))
        settings = settings_of(self._home, beside, start.relay)
        self._outbox_settings = settings.outbox
        make_private_folder(self._home.logs)
        rng = random.Random(start.seed)
        log_id = f"{start.incarnation}-{start.number:03d}"
        header = Header(
            log_id=log_id,
            campaign_id=settings.campaign.id,
            plan_fingerprint="outbox",
            incarnation=start.incarnation,
            sender=start.sender,
            host_id=start.host_id,
            boot_id=start.boot_id,
            worker=start.worker,
            started_at_us=clock.wall_us(),
        )
        self._is_beside = self._home.folder.resolve() != beside.folder.resolve()
        self._outbox = connect(self._home.folder, clock)
        now_us = self._outbox.now_us()
        self._me = Server(
            log_id,
            "send" if self._is_beside else "serve",
            start.sender,
            start.host_id,
            start.boot_id,
            os.getpid(),
            "alive",
            now_us,
            now_us,
            int(settings.outbox.lease.seconds * 1e6),
        )
        log = OutboxLog(self._home.logs / f"{log_id}.arrows", header, clock, durability=settings.log.durability)
        log.heard = self._heard
        self._log = log
        rows = settings.outbox.claim_rows
        self._claim_rows = rows if settings.delivery.mode == "relay" else 4 * rows
        queue = self._queue = OutboxQueue(self._put_back, per_lane=rows)
        bench = self._bench = _Bench(settings, log, queue, clock, rng)
        bench.queue = queue
        self._folder = beside.folder
        self._gate = None  # windows are the campaigns'; here `_confirm` asks the table
        self._table = LaneTable()
        self._observer = Observer(clock)
        retry = RetryPlan.from_settings(settings.retry)
        self._routing = self._make_routing(beside, settings, retry, rng)
        self._intake = _Routed(bench, queue)
        if isinstance(self._routing, DirectRouting):
            self._routing.routed = self._intake.routed
        # Sign-ups and notifications obey those who want nothing at all; newsletters also those who left the list.
        self._suppressions = Suppressions(self._home.suppression, list_id=None)
        self._off_list = Suppressions(self._home.suppression, list_id=settings.campaign.list_id)
        self._composer = LetterComposer(settings, self._home.folder, clock, selectors_of(beside, settings))
        self._dispatch = Dispatch(bench, self._composer, self._table.with_sessions)
        self._dispatch.failed = self._log_failed
        self._dispatch.confirm = self._confirm
        self._settlement = Settlement(bench, load_rules(*own_rules(self._home.folder)), retry, self._observer)
        self._watching = WorkerWatch()
        self._ticks = 0
        self._told_full = False
        self._is_draining = False
        self._reason = ""
        self._reports: list[Report] = []
        self._reporting: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(1, "outbox")
        self._looked_at = self._renewed_at = self._recovered_at = -1e9
        self._paused_by: str | None = None
        self._is_standing_by = False
        self._claim_unsure = False
        channel.send(Started(log_id=log_id))

    # -- life --------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Until drained, or the supervisor is gone."""
        try:
            await self._speak(lambda: self._outbox.join(self._me))
        except OutboxAway as problem:
            self._stop(problem)
        await super().run()

    async def _end(self) -> None:
        self._queue.return_all()
        pools = [lane.pool for lane in self._table.lanes if lane.pool is not None]
        await asyncio.gather(*(pool.close() for pool in pools))
        with contextlib.suppress(LogUnwritable):
            self._log.write()
        try:
            # What cannot be said now is said by whoever recovers our log.
            if self._reporting is not None:
                await self._reporting
            await self._report_all()
            await self._speak(lambda: self._outbox.leave(self._me.id))
        except OutboxAway as problem:
            self._tell("warning", "outbox_away", problem=str(problem))
        with contextlib.suppress(LogUnwritable):
            self._log.close()
        self._pulse()
        self._channel.send(Goodbye(open_rows=len(self._queue.seats)))
        await self._channel.flush()
        self._channel.close()
        self._thread.shutdown()
        self._outbox.close()

    async def _speak(self, words: Callable[[], Answer]) -> Answer:
        """Speak to the table, in its thread."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, words)

    def _tell(self, level: str, event: str, **fields: str | int | float) -> None:
        self._channel.send(Told(level=level, event=event, fields=fields))

    # -- rows come ---------------------------------------------------------------------------------------------------

    async def _read(self) -> None:
        while not self._is_draining:
            try:
                await self._keep_lease()
                moved = await self._claim_round()
            except OutboxAway as problem:
                self._reason = str(problem)
                self._tell("error", "outbox_away", problem=str(problem))
                await asyncio.sleep(AWAY_S)
                continue
            await asyncio.sleep(0 if moved else LOOK_S)

    async def _claim_round(self) -> bool:
        """Priority 1 until none is left, then 2, then some of 3. True where more may be had at once."""
        now = self._clock.monotonic()
        if self._paused_by or self._is_standing_by or self._dispatch.paused or self._log.is_full:
            return False
        is_time = now - self._looked_at >= LOOK_ANYWAY_S
        if self._claim_unsure:
            await self._take_stock()
        rooms = {priority: self._queue.room(priority, self._claim_rows) for priority in PRIORITIES}

        def look() -> list[Claimed] | None:
            if not (self._outbox.changed() or is_time):
                return None
            found: list[Claimed] = []
            for priority, room in rooms.items():
                found += self._outbox.claim(self._me.id, os.urandom(8).hex(), priority, room)
            return found

        self._claim_unsure = True
        claimed = await self._speak(look)
        self._claim_unsure = False
        if claimed is None:
            return False
        # Whoever found something looks again: there may be more of it.
        self._looked_at = -1e9 if claimed else now
        if claimed:
            self._sort_in(claimed)
            self._dispatch.wake()
            if self._queue.urgent():
                self._pulse()  # who hands out slots and allowances hears of it now, not in a fifth of a second
        return bool(claimed)

    async def _take_stock(self) -> None:
        """The answer to a claim was lost: rows that it gave us and we do not know of go back to the table."""
        held = await self._speak(lambda: self._outbox.held(self._me.id))
        known = self._queue.seats.keys() | {report.id for report in self._reports}
        unknown = [row for row in held if row.id not in known and not row.has_intent]
        reports = [Report(id=row.id, token=row.token, state=_open_state(row), attempts=row.attempts) for row in unknown]
        await self._speak(lambda: self._outbox.report(reports))
        self._claim_unsure = False

    def _sort_in(self, claimed: Sequence[Claimed]) -> None:
        bench, now = self._bench, self._clock.monotonic()
        parsed = parse_mailboxes([one.address for one in claimed])
        good = [mailbox for mailbox in parsed if isinstance(mailbox, Mailbox)]
        names = [canonical(mailbox) for mailbox in good]
        by_all = dict(zip(names, self._suppressions.check(names).tolist(), strict=True))
        by_list = dict(zip(names, self._off_list.check(names).tolist(), strict=True))
        for one, mailbox in zip(claimed, parsed, strict=True):
            age_s = (one.claimed_at_us - one.first_at_us) / 1e6 if one.first_at_us is not None else None
            self._queue.claimed(one, None if age_s is None else now - age_s)
            if one.is_expired:
                self._log.result(0, one.id, one.attempts, Verdict.UNSENT, reason=Reason.EXPIRED)
                bench.has_outcome(one.id)
            elif isinstance(mailbox, AddressError):
                bench.is_invalid(one.id, Reason.ADDRESS, str(mailbox))
            elif (by_list if one.priority == 3 else by_all)[canonical(mailbox)]:
                bench.is_suppressed(one.id)
            elif age_s is not None and age_s > self._settlement.retry.max_age_s:
                bench.is_expired(one.id, one.attempts)
            else:
                self._make_ready(one, mailbox)

    def _make_ready(self, one: Claimed, mailbox: Mailbox) -> None:
        try:
            letter = read_letter(one)
        except RowProblem as problem:
            self._bench.is_invalid(one.id, Reason.RENDER, problem.detail)
            return
        self._bench.open[one.id] = Recipient(mailbox, (one.address, letter))
        lane = self._routing.lane_of(mailbox.domain, one.id)
        if lane is None:
            self._routing.hold(mailbox.domain, one.id)
        else:
            self._queue.add(one.id, lane)

    def _put_back(self, claimed: Claimed, wait_s: float, begun: bool) -> None:
        """The row is the table's again."""
        self._bench.open.pop(claimed.id, None)
        state = State.WAITING if claimed.attempts or begun else State.QUEUED
        self._reports.append(
            Report(
                id=claimed.id,
                token=claimed.token,
                state=state,
                attempts=claimed.attempts,
                wait_us=int(wait_s * 1e6),
                begun=begun,
            )
        )

    # -- before the dot ----------------------------------------------------------------------------------------------

    async def _confirm(self, rows: list[int]) -> set[int]:
        """Say that these rows are about to be sent; those that the table grants may go."""
        seats = self._queue.seats
        pairs = [(row, seats[row].claimed.token) for row in rows]
        try:
            granted = await self._speak(lambda: self._outbox.intend(pairs))
        except OutboxAway as problem:
            # Perhaps it was committed, perhaps not; nothing left, and they are still ours: they are tried again.
            self._reason = str(problem)
            self._tell("error", "outbox_away", problem=str(problem))
            await asyncio.sleep(AWAY_S)
            return set()
        for row in rows:
            if row not in granted:
                seats[row].is_void = True
                self._tell("warning", "row_taken_away", row=row)
        return granted

    # -- what came out -----------------------------------------------------------------------------------------------

    def _heard(
        self, row: int, state: State, attempt: int, reason: str | None, code: int, text: str | None, wait_s: float
    ) -> None:
        seat = self._queue.seats.get(row)
        if seat is None or seat.is_void:
            return
        report = Report(
            id=row,
            token=seat.claimed.token,
            state=state,
            reason=reason,
            code=code or None,
            reply=text,
            attempts=attempt,
            wait_us=int(wait_s * 1e6),
        )
        self._reports.append(report)
        if state is State.WAITING and not seat.is_in_flight:
            # A domain that cannot be resolved now: the table keeps the time.
            self._bench.open.pop(row, None)
            self._queue.drop(row)

    def has_events(self, lane: Lane, events: list[Event]) -> None:
        bench = self._bench
        flights = [bench.flights[event.ticket].row for event in events]
        mailboxes = {row: bench.open[row].mailbox for row in flights if row in bench.open}
        super().has_events(lane, events)
        if bench.to_suppress:
            source = f"outbox {bench.settings.campaign.id}"
            entries = [
                Entry(canonical(mailboxes[row]), ALL, reply, source, self._clock.wall_us())
                for row, _, reply in bench.to_suppress
                if row in mailboxes
            ]
            bench.to_suppress = []
            self._suppressions.add(entries)
        if self._reporting is None:
            self._reporting = asyncio.get_running_loop().create_task(self._report_soon())

    async def _report_soon(self) -> None:
        await asyncio.sleep(LOOK_S)
        try:
            self._flush()
            await self._report_all()
        except OutboxAway as problem:
            self._reason = str(problem)
            await asyncio.sleep(AWAY_S)
        finally:
            self._reporting = None

    async def _report_all(self) -> None:
        """Tell the table what the log has; what could not be told is told again."""
        while self._reports:
            some = self._reports[:1000]
            await self._speak(partial(self._outbox.report, some))
            del self._reports[: len(some)]

    # -- time --------------------------------------------------------------------------------------------------------

    def _tick(self) -> None:
        super()._tick()
        if self._reports and self._reporting is None:
            self._reporting = asyncio.get_running_loop().create_task(self._report_soon())
        if self._ticks % 20 == 0:
            self._off_list.refresh()

    def _placed(self) -> int:
        return self._bench.open_rows  # rows are the table's

    def _wanted_rows(self) -> dict[int, int]:
        rows = super()._wanted_rows()
        warm = self._warm()
        for lane in self._table.lanes:
            if lane.key in warm and lane.account.granted:
                rows.setdefault(lane.index, 1)
        return rows

    def _warm(self) -> list[Key]:
        # Beside a campaign that uses every slot, one connection stays open for the next sign-up.
        if self._is_beside and isinstance(self._routing, RelayRouting) and not self._is_draining:
            return list(self._table.accounts)
        return []

    def _urgent(self) -> list[tuple[Key, int]]:
        urgent: dict[Key, int] = {}
        for index, rows in self._queue.urgent().items():
            key = self._table.lanes[index].key
            urgent[key] = urgent.get(key, 0) + rows
        return list(urgent.items())

    async def _keep_lease(self) -> None:
        now = self._clock.monotonic()
        if now - self._renewed_at >= RENEW_S:
            self._renewed_at = now
            if not await self._speak(lambda: self._outbox.renew(self._me.id)):
                problem = "another server has taken over the outbox"
                self._channel.send(Stopped(exit_code=Exit.TRY_AGAIN, problem=problem, hint=""))
                self._drain()
                return
            await self._obey()
        if now - self._recovered_at >= RECOVER_EVERY_S:
            self._recovered_at = now
            await self._speak(self._recover)

    def _recover(self) -> None:
        """In the table's thread."""
        durable = self._bench.settings.log.durability == "disk"
        found: list[Recovered] = []
        recover(self._outbox, self._home.logs, self._me, self._outbox.now_us(), durable=durable, say=found.append)
        ballast_of_the_dead(self._home.logs, [one.owner for one in found])
        for one in found:
            self._tell(
                "info", "recovered", server=one.owner, queued=one.queued, finished=one.finished, in_doubt=one.in_doubt
            )

    async def _obey(self) -> None:
        """The operator's pause, and a sender beside whom we stand by: it serves the outbox within its budgets."""
        knobs, servers = await self._speak(lambda: (self._outbox.knobs(), self._outbox.servers()))
        paused = knobs.get("paused") or None
        if paused != self._paused_by:
            self._paused_by = paused
            self._tell("info", "paused" if paused else "resumed", reason=paused or "")
        now_us = self._clock.wall_us()
        senders = [s for s in servers if s.kind == "send" and s.state == "alive" and not s.is_expired(now_us)]
        standing_by = bool(senders) and not self._is_beside
        if standing_by != self._is_standing_by:
            self._is_standing_by = standing_by
            self._tell("info", "standing_by" if standing_by else "serving", sender=senders[0].sender if senders else "")
            if standing_by:
                self._queue.return_all()

    @property
    def held_rows(self) -> int:
        """Claimed and not settled."""
        return len(self._queue.seats)


def _open_state(row: Held) -> State:
    return State.WAITING if row.attempts else State.QUEUED


class _Routed:
    """In place of an intake: rows come by claims; only those held for a domain come this way."""

    unread = 0
    asleep = 0
    next_opening = None

    def __init__(self, bench: Workbench, queue: OutboxQueue) -> None:
        self._bench, self._queue = bench, queue

    def assign(self, assigned: Assign) -> None:
        """An outbox has no batches."""

    def step(self) -> bool:
        return False

    def routed(self, lane: int, rows: Sequence[int]) -> None:
        for row in rows:
            if row in self._bench.open:
                self._queue.add(row, lane)


def settings_of(home: Campaign, beside: Campaign, relay: str | None) -> Settings:
    """What the outbox's folder says of its mails, with the delivery of the campaign it is served beside."""
    settings = load_settings(home.folder)
    if beside.folder.resolve() != home.folder.resolve():
        other = load_settings(beside.folder)
        settings = msgspec.structs.replace(settings, delivery=other.delivery, retry=other.retry, log=other.log)
    if relay is not None:
        delivery = msgspec.structs.replace(settings.delivery, relay=relay, tls="off", username=None)
        settings = msgspec.structs.replace(settings, delivery=delivery)
    return settings
