"""Connections on a virtual clock: opened with a slot, given rows, answered by the models, closed.

What they tell goes where it goes in the engine: answers to the throttle and the scheduler, slots and allowances to the
ledger.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from engine.pace.throttle import Key, Observation, Signal
from engine.rehearse.course import Course
from engine.rehearse.minutes import Minutes
from engine.rehearse.models import Answer, Kind
from engine.rehearse.scene import Scene
from engine.rehearse.senders import Connection, Machine, Worker

DOT_TIMEOUT_S = 600.0  # a connection that says nothing for so long is closed by the watchdog
IDLE_S = 5.0


class Around(Protocol):
    """What a connection asks of the simulation around it."""

    course: Course
    scene: Scene
    minutes: Minutes
    now: float
    decisions: int

    def at(self, when: float, what: Callable[..., None], *args: object) -> None:
        """Do something then."""

    def fill(self, worker: Worker) -> None:
        """Read on while there is room."""

    def report(self, worker: Worker, lane: int | None = None) -> None:
        """Tell the ledger what is wanted."""

    def settle(self, row: int, lane: int, how: str) -> None:
        """A row has its outcome."""

    def tick_now(self, machine: Machine) -> None:
        """Ask the throttle now."""

    def tick_later(self, machine: Machine) -> None:
        """Ask it when it wants to be asked."""


class Wires:
    """All connections of a simulation."""

    def __init__(self, sim: Around) -> None:
        self._sim = sim

    def open(self, worker: Worker, lane: int) -> None:
        """A slot was granted: connect."""
        source = worker.machine.name
        answer = self._sim.scene.play(lane).connect(source, self._sim.now)
        if answer.kind is Kind.ACCEPTED:
            connection = Connection(worker, lane)
            worker.connections.setdefault(lane, []).append(connection)
            self._sim.at(self._sim.now + answer.takes_s, self.send, connection)
        else:
            takes = DOT_TIMEOUT_S / 60 if answer.kind is Kind.SILENT else answer.takes_s
            opened = sum(len(each.connections.get(lane, ())) for each in worker.machine.workers)
            self._sim.at(self._sim.now + takes, self._refused, worker, lane, answer, self._sim.now, opened)

    def _refused(self, worker: Worker, lane: int, answer: Answer, begun: float, opened: int) -> None:
        told = self._sim.scene.told[self._sim.scene.model(lane).name]
        told.connections_refused += 1
        self._observe(worker, lane, answer, begun, connections=opened)
        worker.machine.ledger.closed(worker.number, (worker.machine.name, str(lane)), 1, self._sim.now)
        self._sim.tick_now(worker.machine)
        self._sim.report(worker, lane)

    def send(self, connection: Connection) -> None:
        """A connection has nothing in flight: give it rows, let it wait, or close it."""
        worker, lane = connection.worker, connection.lane
        connection.idle_since = None
        waiting = worker.idle.get(lane)
        if waiting and connection in waiting:
            waiting.remove(connection)
        if connection.closing or connection not in worker.connections.get(lane, ()):
            self._close(connection)
            return
        ceiling = worker.machine.throttle.ceiling(Key(worker.machine.name, str(lane)))
        limit = self._sim.course.depth
        if ceiling.per_connection is not None:
            limit = min(limit, ceiling.per_connection - connection.accepted)
            if limit <= 0:
                self._close(connection)
                return
        rated = ceiling.rate_per_s is not None
        if rated:
            limit = min(limit, self._allowance(worker, lane))
        if not limit:
            self._wait(connection)
            return
        rows = worker.scheduler.take(lane, limit, self._sim.now)
        if not rows:
            self._sim.fill(worker)
            rows = worker.scheduler.take(lane, limit, self._sim.now)
        if not rows:
            counts = worker.scheduler.counts(lane)
            self._wait(connection) if counts.ready + counts.parked + counts.reading else self._close(connection)
            return
        if rated:
            self._spend(worker, lane, len(rows))
        self._sim.decisions += len(rows)
        self._speak(connection, rows, rated)

    def _speak(self, connection: Connection, rows: list[int], rated: bool) -> None:
        worker, lane = connection.worker, connection.lane
        played, source = self._sim.scene.play(lane), worker.machine.name
        at = self._sim.now
        answers: list[Answer] = []
        for row in rows:
            answer = played.message(source, row, connection.accepted + len(answers), at)
            at += DOT_TIMEOUT_S if answer.kind is Kind.SILENT else answer.takes_s
            answers.append(answer)
            if answer.closes or answer.kind is Kind.SILENT:
                break
        self._sim.at(at, self._answered, connection, rows, answers, self._sim.now, rated)

    def _answered(
        self, connection: Connection, rows: list[int], answers: list[Answer], begun: float, rated: bool
    ) -> None:
        worker, lane = connection.worker, connection.lane
        scheduler = worker.scheduler
        told = self._sim.scene.told[self._sim.scene.model(lane).name]
        told.attempts += len(answers)
        self._sim.decisions += len(rows)
        sample = self._sim.minutes.at(self._sim.now, told.name)
        for row, answer in zip(rows, answers, strict=False):
            self._observe(worker, lane, answer, begun, on_connection=connection.accepted)
            match answer.kind:
                case Kind.ACCEPTED | Kind.BOUNCED | Kind.REFUSED:
                    connection.accepted += 1
                    sample[0] += 1
                    scheduler.settle(row, lane)
                    self._sim.settle(row, lane, answer.kind)
                case Kind.GREYLISTED:
                    connection.accepted += 1
                    told.greylisted += 1
                    self._defer(worker, row, lane, answer)
                case Kind.SILENT:
                    told.lost += 1
                    self._defer(worker, row, lane, answer)
                case _:
                    # About us, not about the row: it burns no attempt, and waits at the front of its lane.
                    if answer.kind is Kind.RATE:
                        told.limited += 1
                        sample[1] += 1
                    scheduler.give_back(row, lane)
        for row in reversed(rows[len(answers) :]):
            scheduler.give_back(row, lane)
        if rated:
            key = (worker.machine.name, str(lane))
            worker.machine.ledger.spent(worker.number, key, len(answers), begun, self._sim.now)
            if len(rows) > len(answers):
                worker.machine.ledger.unused(worker.number, key, len(rows) - len(answers), self._sim.now)
        if answers[-1].closes or answers[-1].kind is Kind.SILENT:
            connection.closing = True
        if answers[-1].closes:
            self._sim.tick_now(worker.machine)
        self._sim.fill(worker)
        self._sim.report(worker, lane)
        self.send(connection)

    def _observe(
        self,
        worker: Worker,
        lane: int,
        answer: Answer,
        begun: float,
        connections: int | None = None,
        on_connection: int | None = None,
    ) -> None:
        machine = worker.machine
        signal = Signal.UNREACHABLE if answer.kind is Kind.SILENT else Signal(answer.kind.value)
        if connections is None:
            connections = sum(len(each.connections.get(lane, ())) for each in machine.workers)
            connections -= signal is Signal.TOO_MANY_CONNECTIONS  # the one that was sent away
        machine.throttle.observe(
            Key(machine.name, str(lane)),
            Observation(
                signal,
                self._sim.now,
                started_at=begun,
                reply_s=answer.takes_s,
                connections=connections,
                on_connection=on_connection,
                pause_s=answer.pause_s,
                then_connections=answer.then_connections,
                text=answer.reply if signal is not Signal.ACCEPTED else "",
            ),
        )
        if machine.ticks_at == float("inf"):
            self._sim.tick_later(machine)

    def _defer(self, worker: Worker, row: int, lane: int, answer: Answer) -> None:
        attempt, first_at = worker.scheduler.history(row)
        first_at = self._sim.now if first_at is None else first_at
        plan = self._sim.course.retry
        hint = 300.0 if "300 seconds" in answer.reply else None
        wait = plan.next_wait(attempt + 1, first_at, self._sim.now, worker.rng, hint)
        if wait is None:
            worker.scheduler.settle(row, lane)
            self._sim.settle(row, lane, "expired")
            return
        expires_at = plan.expires_at(first_at)
        worker.scheduler.defer(row, lane, self._sim.now + wait, attempt + 1, first_at, expires_at)

    def _wait(self, connection: Connection) -> None:
        connection.idle_since = self._sim.now
        connection.worker.idle.setdefault(connection.lane, []).append(connection)
        if not connection.has_timer:
            connection.has_timer = True
            self._sim.at(self._sim.now + IDLE_S, self._idle, connection)

    def _idle(self, connection: Connection) -> None:
        connection.has_timer = False
        if connection.idle_since is None:
            return
        left = connection.idle_since + IDLE_S - self._sim.now
        if left <= 1e-6:
            self._close(connection)
        else:
            connection.has_timer = True
            self._sim.at(self._sim.now + left, self._idle, connection)

    def _close(self, connection: Connection) -> None:
        worker, lane = connection.worker, connection.lane
        connection.idle_since = None
        held = worker.connections.get(lane, [])
        if connection not in held:
            return
        held.remove(connection)
        if not held:
            del worker.connections[lane]
        waiting = worker.idle.get(lane)
        if waiting and connection in waiting:
            waiting.remove(connection)
        source = worker.machine.name
        self._sim.scene.play(lane).disconnect(source)
        worker.machine.ledger.closed(worker.number, (source, str(lane)), 1, self._sim.now)
        if not held and (entries := worker.allowed.pop(lane, None)):
            unused = sum(messages for until, messages in entries if until > self._sim.now)
            if unused:
                worker.machine.ledger.unused(worker.number, (source, str(lane)), unused, self._sim.now)
        self._sim.report(worker, lane)

    def _allowance(self, worker: Worker, lane: int) -> int:
        entries = worker.allowed.get(lane)
        while entries and entries[0][0] <= self._sim.now:
            entries.pop(0)
        return sum(messages for _, messages in entries) if entries else 0

    def _spend(self, worker: Worker, lane: int, messages: int) -> None:
        entries = worker.allowed[lane]
        while messages:
            until, have = entries.pop(0)
            if have > messages:
                entries.insert(0, (until, have - messages))
            messages -= min(have, messages)
