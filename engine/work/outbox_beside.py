"""The outbox beside a campaign: one more process of `engine send`, whom the ledger serves first.

It has a seat of its own at the campaign's ledger, so that both keep one budget together. Rows of priority 1 and 2 are
*urgent* there: they get slots and allowances before the campaign's rows, but for a tenth. At a relay that takes two
connections or more, one is kept open for it all the time.

Its troubles are not the campaign's: a process that dies is started again, a little later each time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from engine.clock import Clock
from engine.pace import slots
from engine.work.crew import Crew, Hand
from engine.work.messages import (
    Allow,
    Drain,
    Grant,
    Pulse,
    Released,
    Revoke,
    Started,
    Stopped,
    Told,
    Unused,
    Up,
)
from engine.work.pacing import Pacing
from engine.work.worker import WorkerStart

SEAT = 1_000_000  # its number at the ledger; a machine has fewer workers
_SILENCE_S = 60.0
_FIRST_AGAIN_S = 1.0
_LAST_AGAIN_S = 60.0


class Beside:
    """One per supervisor, where [outbox] folder is set."""

    def __init__(self, start: WorkerStart, pacing: Pacing, clock: Clock, say: Callable[..., None]) -> None:
        self._start = start
        self._pacing, self._clock, self._say = pacing, clock, say
        self._crew = Crew(self._hear, self._lost, clock.monotonic)
        self._again_at: float | None = clock.monotonic()
        self._wait_s = _FIRST_AGAIN_S
        self._starting: asyncio.Task[Hand] | None = None
        self._is_draining = False
        self.live: Callable[[], msgspec.Struct | None] = lambda: None
        self.accepted = self.bounced = self.in_doubt = 0

    def tick(self, now: float) -> None:
        """Start it where it is not running; kill it where it says nothing any more."""
        for hand in self._crew.kill_silent(_SILENCE_S):
            self._say("outbox_silent", seconds=round(now - hand.heard_at))
        if self._again_at is not None and now >= self._again_at and not self._is_draining:
            self._again_at = None
            self._starting = asyncio.get_running_loop().create_task(self._crew.start(self._start))

    def tell(self, message: msgspec.Struct) -> None:
        """Say something to the process, where it runs."""
        for hand in self._crew.hands.values():
            hand.channel.send(message)

    def carry_out(self, decision: slots.Decision) -> None:
        """The ledger's decision about our seat."""
        match decision:
            case slots.Grant():
                self.tell(Grant(key=decision.key, connections=decision.connections))
            case slots.Revoke():
                self.tell(Revoke(key=decision.key, connections=decision.connections))
            case slots.Allow():
                self.tell(Allow(key=decision.key, messages=decision.messages, valid_s=decision.valid_s))

    def drain(self) -> None:
        """No new attempts; a server of its own may take over."""
        self._is_draining = True
        self.tell(Drain())

    def kill(self) -> None:
        """SIGKILL."""
        self._crew.kill()

    async def gone(self) -> None:
        """Wait for its end after `drain`."""
        if self._starting is not None:
            await self._starting
            self.tell(Drain())
        await self._crew.gone()

    def _hear(self, hand: Hand, message: Up) -> None:
        now = self._clock.monotonic()
        match message:
            case Started():
                self._say("outbox_served", by=message.log_id)
                if (live := self.live()) is not None:
                    hand.channel.send(live)
                if self._is_draining:
                    hand.channel.send(Drain())
            case Pulse():
                self._pulse(message, now)
            case Released():
                self._pacing.ledger.closed(SEAT, message.key, message.connections, now)
            case Unused():
                self._pacing.ledger.unused(SEAT, message.key, message.messages, now)
            case Told():
                self._say(f"outbox_{message.event}".replace("outbox_outbox", "outbox"), **message.fields)
            case Stopped():
                self._say("outbox_stopped", problem=message.problem, next=message.hint)
            case _:
                pass

    def _pulse(self, pulse: Pulse, now: float) -> None:
        self._wait_s = _FIRST_AGAIN_S
        for count in pulse.providers:
            self.accepted += count.accepted
            self.bounced += count.rejected
            self.in_doubt += count.in_doubt
        demand = dict(pulse.demand)
        # Where there is one connection for all, it is not kept from the campaign.
        warm = {key for key in pulse.warm if self._pacing.ledger.allowed(key, now) >= 2}
        for key in warm:
            demand.setdefault(key, 0)
        self._pacing.demand(SEAT, demand, now, dict(pulse.urgent), warm)
        for key, messages, at in pulse.spent:
            self._pacing.spent(SEAT, key, messages, at, now)
        self._pacing.hear(pulse.seen)

    def _lost(self, hand: Hand) -> None:
        now = self._clock.monotonic()
        self._pacing.gone(SEAT, now)
        if self._is_draining:
            return
        self._say("outbox_died", exit_code=hand.process.exitcode, again_in_s=self._wait_s)
        self._again_at = now + self._wait_s
        self._wait_s = min(2 * self._wait_s, _LAST_AGAIN_S)
