"""From what a session reports to the row's next place: judged, written down, settled, deferred or given back.

The order in each case is record first, memory second; results are in the file within 50 ms (`Worker._flush`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from engine.pace.judgement import Class_, Judgement
from engine.pace.retry import RetryPlan
from engine.pace.rules import RuleBook
from engine.smtp.dialogue import Accepted, Event, InDoubt, Lost, Refused
from engine.work.bench import Flight, Workbench
from engine.work.messages import Key
from engine.work.observing import Observer
from formats.reply import Reply
from formats.sendlog import Reason, Verdict

# A connection lost before the dot counts no attempt; but a row at which connections are lost again and again is
# what loses them, and waits like a deferred one, so that it comes to an end.
MOST_LOSSES = 3
# Refusals by a limiter, whoever the recipient is.
_LIMITER = frozenset(
    {
        Class_.RATE,
        Class_.QUOTA,
        Class_.TOO_MANY_CONNECTIONS,
        Class_.TOO_MANY_PER_CONNECTION,
        Class_.REPUTATION,
        Class_.BLOCKLISTED,
    }
)


class LaneNames(Protocol):
    """What a result says of its lane."""

    index: int
    provider: int
    source: int
    provider_name: str | None
    on_connection: int | None  # messages accepted on the connection that is being heard
    retry_after_s: float | None  # the budget's word on the first retry

    @property
    def key(self) -> Key:
        """(source, provider)."""

    @property
    def open(self) -> int:
        """Connections now."""


class Settlement:
    """Reads events for one worker."""

    def __init__(self, bench: Workbench, rules: RuleBook, retry: RetryPlan, observer: Observer) -> None:
        self._bench = bench
        self._rules = rules
        self.retry = retry
        self._observer = observer
        # Providers whose "unknown user" is not believed now (pace.breaker).
        self.tripped: set[str] = set()

    def settle(self, lane: LaneNames, events: Sequence[Event]) -> None:
        """Each event about one ticket, each ticket once."""
        bench = self._bench
        flights = bench.flights
        tally = bench.lanes[lane.index]
        accepted, started = 0, 0.0
        for event in events:
            flight = flights.pop(event.ticket)
            if type(event) is Accepted:  # what most are; a pattern costs more than all the rest of this loop
                self._accepted(event, flight, lane)
                accepted += 1
                started += flight.started_at
                continue
            if accepted:
                self._observer.accepted(lane.key, accepted, accepted * bench.clock.monotonic() - started)
                tally.accepted += accepted
                accepted, started = 0, 0.0
            match event:
                case Refused():
                    self._refused(event, flight, lane)
                case Lost():
                    tally.lost += 1
                    self._lost(event.ticket, flight, lane, event.why, event.reply)
                case InDoubt():
                    tally.in_doubt += 1
                    self._in_doubt(event, flight, lane)
        if accepted:
            tally.accepted += accepted
            self._observer.accepted(lane.key, accepted, accepted * bench.clock.monotonic() - started)

    def judge(self, stage: str, reply: Reply, lane: LaneNames) -> Judgement:
        """What a reply at this lane means."""
        return self._rules.judge(stage, reply, lane.provider_name)

    def _accepted(self, event: Accepted, flight: Flight, lane: LaneNames) -> None:
        bench, row = self._bench, flight.row
        bench.log.result(
            event.ticket,
            row,
            flight.attempt,
            Verdict.ACCEPTED,
            code=event.reply.code,
            provider=lane.provider,
            source=lane.source,
            text=bench.masked(event.reply.text),
        )
        bench.scheduler.settle(row, flight.lane)
        bench.open.pop(row, None)
        bench.has_outcome(row)

    def _refused(self, event: Refused, flight: Flight, lane: LaneNames) -> None:
        bench = self._bench
        judgement = self.judge(event.stage, event.reply, lane)
        self._observer.refused(lane.key, judgement, event.reply, flight.started_at, lane.on_connection)
        verdict = judgement.verdict
        if verdict is Verdict.REJECTED and judgement.suppress and lane.provider_name in self.tripped:
            verdict = Verdict.DEFERRED
        match verdict:
            case Verdict.REJECTED:
                if judgement.suppress:
                    bench.to_suppress.append((flight.row, lane.provider_name or "", str(event.reply)[:200]))
                bench.lanes[lane.index].rejected += 1
                self._write(event.ticket, flight, lane, Verdict.REJECTED, event.reply, reason=judgement.reason)
                bench.scheduler.settle(flight.row, flight.lane)
                bench.open.pop(flight.row, None)
                bench.has_outcome(flight.row)
            case Verdict.DEFERRED:
                bench.lanes[lane.index].deferred += 1
                if judgement.class_ in _LIMITER:
                    flight.attempt -= 1  # refused whoever it was for: the row burns no attempt
                self._defer(event.ticket, flight, lane, event.reply, judgement.reason, judgement.wait_s)
            case Verdict.IN_DOUBT:
                bench.lanes[lane.index].in_doubt += 1
                self._in_doubt(InDoubt(event.ticket, "no reply that can be read", event.reply), flight, lane)
            case _:
                bench.lanes[lane.index].lost += 1
                self._lost(event.ticket, flight, lane, f"refused at {event.stage}", event.reply)

    def _defer(
        self, ticket: int, flight: Flight, lane: LaneNames, reply: Reply, reason: Reason, hint_s: float | None
    ) -> None:
        bench, now = self._bench, self._bench.clock.monotonic()
        if hint_s is None and flight.attempt <= 1:
            hint_s = lane.retry_after_s
        wait_s = self.retry.next_wait(flight.attempt, flight.first_at, now, bench.rng, hint_s)
        if wait_s is None:
            bench.expired += 1
            self._write(ticket, flight, lane, Verdict.EXPIRED, reply, reason=reason)
            bench.scheduler.settle(flight.row, flight.lane)
            bench.open.pop(flight.row, None)
            bench.has_outcome(flight.row)
            return
        self._write(ticket, flight, lane, Verdict.DEFERRED, reply, reason=reason, wait_s=max(1, round(wait_s)))
        bench.open.pop(flight.row, None)
        expires_at = self.retry.expires_at(flight.first_at)
        bench.scheduler.defer(flight.row, flight.lane, now + wait_s, flight.attempt, flight.first_at, expires_at)

    def _lost(self, ticket: int, flight: Flight, lane: LaneNames, why: str, reply: Reply | None) -> None:
        bench = self._bench
        losses = bench.losses.get(flight.row, 0) + 1
        if losses >= MOST_LOSSES:
            bench.losses.pop(flight.row, None)
            said = reply or Reply(0, f"connection lost {losses} times before the end of the message: {why}")
            self._defer(ticket, flight, lane, said, Reason.NONE, None)
            return
        bench.losses[flight.row] = losses
        self._write(ticket, flight, lane, Verdict.LOST, reply or Reply(0, why))
        bench.scheduler.give_back(flight.row, flight.lane)

    def _in_doubt(self, event: InDoubt, flight: Flight, lane: LaneNames) -> None:
        bench = self._bench
        said = event.reply or Reply(0, event.why)
        self._write(event.ticket, flight, lane, Verdict.IN_DOUBT, said)
        bench.scheduler.settle(flight.row, flight.lane)
        bench.open.pop(flight.row, None)
        bench.has_outcome(flight.row, in_doubt=True)

    def _write(
        self,
        ticket: int,
        flight: Flight,
        lane: LaneNames,
        verdict: Verdict,
        reply: Reply,
        *,
        reason: Reason = Reason.NONE,
        wait_s: int = 0,
    ) -> None:
        self._bench.log.result(
            ticket,
            flight.row,
            flight.attempt,
            verdict,
            reason=reason,
            code=max(0, reply.code),
            provider=lane.provider,
            source=lane.source,
            wait_s=wait_s,
            text=self._bench.masked(reply.text),
        )
