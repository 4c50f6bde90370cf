"""From ready rows to the wire: a group is composed, its intents made durable, and only then handed to its sessions.

I1: the end of a message never leaves unless its intent is durable where a successor will look. So nothing is given to
`Session.send` but by `_deliver`, after `Logbook.commit` has returned. While one group is being synced the next is
gathered, so that neither the disk nor the connections wait for each other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Protocol

import msgspec

from engine.compose.render import Draft, Message, RowProblem
from engine.smtp.dialogue import Outgoing, Stage
from engine.smtp.session import Session
from engine.work.bench import Flight, Workbench
from engine.work.logbook import LogUnwritable
from formats.address import Mailbox
from formats.sendlog import Reason, Verdict

SIGN_ROWS = 32  # signatures made by one thread in one go: some 25 ms of RSA-2048
# Rows are gathered this often while connections are busy: a group of a few rows costs as much as one of fifty (a sync,
# a batch of the log, a look at every connection). Sooner where a connection has run dry, at once where all have.
PACE_S = 0.002
HURRY_S = 0.0005
GROUP_ROWS = 256  # intents made durable by one sync: the most that a kill between sync and send leaves in doubt


class Lane(Protocol):
    """One destination, as dispatch sees it."""

    index: int
    provider: int  # its number in the log
    source: int
    selector: str | None  # what its source signs with; None: the campaign's own

    def sessions(self) -> Iterable[Session]:
        """Sessions that may have capacity."""

    def allowance(self) -> int:
        """Messages that may be sent now."""

    def spend(self, messages: int) -> None:
        """Count them against the allowance."""

    def unspend(self, messages: int) -> None:
        """They were not sent."""

    def left(self, messages: int) -> None:
        """They are on the wire."""


class Admission(Protocol):
    """With a shared store, who may be sent: each row needs an open window beside its durable intent."""

    def ask(self, rows: Sequence[tuple[int, int, int, int]]) -> None:
        """(serial, row, batch, wall time of the first attempt); answered by `admitted` or `refused`."""


class Composing(Protocol):
    """Whoever makes a row's message."""

    def compose(
        self, row: int, mailbox: Mailbox, values: Sequence[object], now_us: int, selector: str | None = None
    ) -> Message:
        """Signed as the source does that `selector` belongs to. Raises RowProblem."""


class Signing(Protocol):
    """A composer whose messages are signed: drafted here, signed in threads while the intents are synced."""

    def draft(
        self, row: int, mailbox: Mailbox, values: Sequence[object], now_us: int, selector: str | None = None
    ) -> Draft:
        """Raises RowProblem."""

    def sign(self, drafts: Sequence[Draft]) -> list[Message]:
        """In any thread."""


class _Planned(msgspec.Struct, gc=False):
    session: Session
    lane: Lane
    outgoing: Outgoing
    draft: Draft | None = None


def _outgoing(serial: int, message: Message) -> Outgoing:
    # No line of a composed message begins with a dot, which the dialogue need not look for.
    return Outgoing(serial, message.return_path, message.recipient, message.content, message.smtputf8, dot_free=True)


class Dispatch:
    """Gathers groups and sends them. One per worker."""

    def __init__(self, bench: Workbench, composer: Composing, lanes: Callable[[], Iterable[Lane]]) -> None:
        self._bench = bench
        self._composer = composer
        self._lanes = lanes
        self._group: list[_Planned] = []
        self._promised: dict[Session, int] = {}
        self._sending: asyncio.Task[None] | None = None
        self.admission: Admission | None = None
        self._asked: dict[int, _Planned] = {}  # durable, not admitted yet
        self.syncing_since: float | None = None  # a group's intents are on their way to the disk
        self._next: asyncio.Handle | None = None  # the next look
        self._next_at = 0.0
        self._looked_at = 0.0
        self.is_stopped = False
        self.paused: str | None = None
        # Asked of a group's rows once their intents are durable here: those that may go. The others are taken back.
        self.confirm: Callable[[list[int]], Awaitable[set[int]]] | None = None
        # Asked of rows just taken from a lane: those whose sending hours are open. The others it has put away.
        self.awake: Callable[[list[int], int], list[int]] | None = None
        self.failed: Callable[[LogUnwritable], None] = lambda problem: None
        # Rows suppressed since they were read: the look just before sending. Those read later were looked up then.
        self.stopped: frozenset[int] = frozenset()
        self.signing: Signing | None = None  # set where messages are signed

    def wake(self) -> None:
        """Something changed that may let rows go: look soon, once."""
        if self._next is None:
            self._look_within(PACE_S if self._bench.flights else 0.0)

    def hurry(self) -> None:
        """A connection has nothing left to do."""
        if self._next is None or self._next_at > self._looked_at + HURRY_S:
            self._look_within(HURRY_S if self._bench.flights else 0.0)

    def _look_within(self, pace_s: float) -> None:
        """So long after the last look, or now."""
        loop = asyncio.get_running_loop()
        if self._next is not None:
            self._next.cancel()
        at = self._next_at = self._looked_at + pace_s
        self._next = loop.call_at(at, self._pump) if pace_s and at > loop.time() else loop.call_soon(self._pump)

    @property
    def is_idle(self) -> bool:
        """Nothing gathered, nothing being synced, nothing asked for."""
        return not self._group and self._sending is None and not self._asked

    def _pump(self) -> None:
        self._next = None
        self._looked_at = asyncio.get_running_loop().time()
        if self.is_stopped or self.paused is not None or self._bench.log.is_full:
            return
        now = self._bench.clock.monotonic()
        for lane in self._lanes():
            if len(self._group) >= GROUP_ROWS:
                break
            self._gather(lane, now)
        if self._group and self._sending is None:
            self._sending = asyncio.get_running_loop().create_task(self._commit_groups())

    def _gather(self, lane: Lane, now: float) -> None:
        promised = self._promised
        rooms = [
            (session, room)
            for session in lane.sessions()
            if (room := session.room(promised.get(session, 0) if promised else 0)) > 0
        ]
        if not rooms:
            return
        allowed = lane.allowance()
        share = GROUP_ROWS
        if allowed < sum(room for _, room in rooms):
            # Less may be sent than there is room for: spread it, the idlest first. What queues behind a slow reply is
            # late, and an allowance is for now.
            rooms.sort(key=lambda one: one[0].in_hand + promised.get(one[0], 0))
            share = max(1, allowed // len(rooms))
        for session, room in rooms:
            most = min(room, GROUP_ROWS - len(self._group), allowed, share)
            if most <= 0:
                continue
            rows = self._take(lane.index, most, now)
            composed = self._compose(rows, lane, session, now)
            lane.spend(composed)
            allowed -= composed
            if len(rows) < most:
                break

    def _take(self, lane: int, most: int, now: float) -> list[int]:
        """Rows that may go now: those whose hours have ended while they were ready fall asleep."""
        rows = self._bench.scheduler.take(lane, most, now)
        if self.awake is None:
            return rows
        going = self.awake(rows, lane)
        while rows and len(going) < most:
            rows = self._bench.scheduler.take(lane, most - len(going), now)
            going += self.awake(rows, lane)
        return going

    def _compose(self, rows: list[int], lane: Lane, session: Session, now: float) -> int:
        bench, group, compose, signing = self._bench, self._group, self._composer.compose, self.signing
        wall_us = bench.clock.wall_us()
        composed = 0
        for row in rows:
            recipient = bench.open[row]
            if row in self.stopped:
                del bench.open[row]
                bench.scheduler.settle(row, lane.index)
                bench.is_suppressed(row)
                continue
            try:
                if signing is not None:
                    draft = signing.draft(row, recipient.mailbox, recipient.values[1:], wall_us, lane.selector)
                else:
                    message = compose(row, recipient.mailbox, recipient.values[1:], wall_us, lane.selector)
            except RowProblem as problem:
                del bench.open[row]
                bench.scheduler.settle(row, lane.index)
                reason = Reason.ADDRESS if problem.reason == "address" else Reason.RENDER
                bench.is_invalid(row, reason, problem.detail)
                continue
            attempts, first_at = bench.scheduler.history(row)
            reason = Reason.RESENT if row in bench.resent else Reason.NONE
            serial = bench.log.intent(row, attempts + 1, lane.provider, lane.source, reason)
            bench.flights[serial] = Flight(row, lane.index, attempts + 1, now if first_at is None else first_at, now)
            if signing is not None:
                group.append(_Planned(session, lane, Outgoing(serial, "", "", b""), draft))
            else:
                outgoing = _outgoing(serial, message)
                group.append(_Planned(session, lane, outgoing))
            composed += 1
        if composed:
            self._promised[session] = self._promised.get(session, 0) + composed
        return composed

    async def _commit_groups(self) -> None:
        try:
            while self._group:
                group, self._group = self._group, []
                self.syncing_since = self._bench.clock.monotonic()
                try:
                    if self.signing is None:
                        await self._bench.log.commit()
                    else:
                        await asyncio.gather(self._bench.log.commit(), self._sign(group, self.signing.sign))
                except LogUnwritable as problem:
                    self.is_stopped = True
                    self._take_back(group + self._group)
                    self._group = []
                    self.failed(problem)
                    return
                finally:
                    self.syncing_since = None
                if self._bench.log.is_full:
                    # Durable, but the ballast is gone: send nothing that could need a record there is no room for.
                    self._take_back(group)
                    continue
                if self.confirm is not None:
                    group = await self._confirmed(group, self.confirm)
                if self.admission is None:
                    self._deliver(group)
                else:
                    self._ask(group, self.admission)
        finally:
            self._sending = None
            self.wake()

    async def _confirmed(
        self, group: list[_Planned], confirm: Callable[[list[int]], Awaitable[set[int]]]
    ) -> list[_Planned]:
        flights = self._bench.flights
        rows = [flights[planned.outgoing.ticket].row for planned in group]
        granted = await confirm(rows)
        self._take_back([planned for planned, row in zip(group, rows, strict=True) if row not in granted])
        return [planned for planned, row in zip(group, rows, strict=True) if row in granted]

    @staticmethod
    async def _sign(group: list[_Planned], sign: Callable[[Sequence[Draft]], list[Message]]) -> None:
        """Signatures of a group, in threads and in chunks, so that several cores share it and the loop goes on."""
        loop = asyncio.get_running_loop()
        chunks = [group[at : at + SIGN_ROWS] for at in range(0, len(group), SIGN_ROWS)]
        drafts = [[planned.draft for planned in chunk if planned.draft is not None] for chunk in chunks]
        signed = await asyncio.gather(*(loop.run_in_executor(None, sign, some) for some in drafts))
        for planned, message in zip(group, (message for some in signed for message in some), strict=True):
            planned.outgoing = _outgoing(planned.outgoing.ticket, message)
            planned.draft = None

    def _deliver(self, group: list[_Planned]) -> None:
        by_session: dict[Session, list[_Planned]] = {}
        for planned in group:
            by_session.setdefault(planned.session, []).append(planned)
        for session, mine in by_session.items():
            if left := self._promised.pop(session, 0) - len(mine):
                self._promised[session] = left
            if session.ended is None:
                session.send([planned.outgoing for planned in mine])
                mine[0].lane.left(len(mine))
            else:
                self._take_back(mine)

    def _ask(self, group: list[_Planned], admission: Admission) -> None:
        bench, rows = self._bench, []
        for planned in group:
            flight = bench.flights[planned.outgoing.ticket]
            batch = bench.batch_of(flight.row)
            assert batch is not None  # it has an open row
            rows.append((planned.outgoing.ticket, flight.row, batch.batch, bench.wall_of(flight.first_at)))
            self._asked[planned.outgoing.ticket] = planned
        admission.ask(rows)

    def admitted(self, serials: Iterable[int]) -> None:
        """These rows are in an open window. Some may have been given back meanwhile: they are not sent."""
        group = [planned for serial in serials if (planned := self._asked.pop(serial, None)) is not None]
        if self.is_stopped or self._bench.log.is_full:
            self._take_back(group)
        else:
            self._deliver(group)

    def refused(self, serials: Iterable[int]) -> None:
        """These rows are in no window of ours."""
        self._take_back([planned for serial in serials if (planned := self._asked.pop(serial, None)) is not None])

    def give_up_asking(self) -> None:
        """Nothing new is attempted: what was asked for and not answered yet is given back."""
        self.refused(list(self._asked))

    def _take_back(self, group: list[_Planned]) -> None:
        """Their session ended before anything of them left: no attempt."""
        bench = self._bench
        for planned in group:
            flight = bench.flights.pop(planned.outgoing.ticket)
            if bench.log.problem is None:
                bench.log.result(planned.outgoing.ticket, flight.row, 0, Verdict.UNTOUCHED, text=Stage.CONNECT.value)
            self._promised.pop(planned.session, None)
            planned.lane.unspend(1)
            bench.scheduler.give_back(flight.row, flight.lane)
