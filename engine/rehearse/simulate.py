"""A whole campaign on a virtual clock: machines, workers and connections as numbers, the providers played by `models`.

What is simulated is what surrounds the engine's decisions (time, connections, replies); what decides is the engine's
own code: `Scheduler` in every worker, `Ledger` and `Throttle` in every machine, `RetryPlan` for the waits. Six hours
of sending take seconds to minutes, and the same seed gives the same campaign.

The journey of a row here: a worker reads it, its scheduler keeps or parks it; the machine's ledger grants a slot for
its lane; a connection opens, takes rows, the model answers each; the answer goes to the throttle and to the scheduler.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable

from engine.pace.allowance import Rate
from engine.pace.easing import Adaptive, Classic
from engine.pace.slots import Allow, Decision, Grant, Ledger, Limit
from engine.pace.slots import Key as SlotKey
from engine.pace.throttle import EventKind, Key, Limits, Throttle
from engine.rehearse.course import Course, Told
from engine.rehearse.minutes import Minutes
from engine.rehearse.models import Kind
from engine.rehearse.scene import Scene
from engine.rehearse.senders import Machine, Worker
from engine.rehearse.wires import Wires

TICK_S = 1.0  # of the throttle
OPEN_LANES = 128  # destinations a worker asks connections for at once


class Simulation:
    """One course, run to its end by `run`."""

    def __init__(self, course: Course) -> None:
        self.course = course
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
        self._sequence = 0
        self._rng = random.Random(course.seed)
        self.scene = Scene(course, self._rng)
        self.minutes = Minutes(self.scene)
        self._wires = Wires(self)
        self._open = course.rows
        self.decisions = 0
        self.machines = [self._machine(number) for number in range(course.machines)]

    def _machine(self, number: int) -> Machine:
        course = self.course
        machine = Machine(f"192.0.2.{number + 1}")
        machine.ledger = Ledger(lambda key: self._limit(machine, key))
        easing = Adaptive() if course.throttle == "adaptive" else Classic()
        machine.throttle = Throttle(self._budget, easing)
        first, last = course.rows * number // course.machines, course.rows * (number + 1) // course.machines
        batch = max(1, min(course.batch_rows, (last - first) // (4 * course.workers) or 1))
        machine.batches = deque(range(start, min(start + batch, last)) for start in range(first, last, batch))
        for worker in range(course.workers):
            machine.workers.append(Worker(machine, worker, random.Random(self._rng.random())))
        return machine

    def _budget(self, key: Key) -> Limits:
        return self.scene.limits(int(key.provider))

    def _limit(self, machine: Machine, key: SlotKey) -> Limit:
        """The budget under the throttle's ceiling, as the supervisor would set it."""
        throttle_key = Key(machine.name, key[1])
        budget = self._budget(throttle_key)
        ceiling = machine.throttle.ceiling(throttle_key)
        rates = () if budget.rate_per_s is None else (rate_of(budget.rate_per_s),)
        if ceiling.rate_per_s is not None and ceiling.rate_per_s != budget.rate_per_s:
            rates = (*rates, rate_of(ceiling.rate_per_s))
        return Limit(min(budget.connections, ceiling.connections), rates)

    # The clock.

    def at(self, when: float, what: Callable[..., None], *args: object) -> None:
        """Do something then; what is for the same moment happens in the order in which it was asked."""
        self._sequence += 1
        heapq.heappush(self._events, (when, self._sequence, what, args))

    def run(self) -> Told:
        """Play until every row is settled, or the course gives up."""
        for machine in self.machines:
            for worker in machine.workers:
                self.at(0.0, self._wake, worker)
        while self._events and self._open:
            self.now, _, what, args = heapq.heappop(self._events)
            if self.now > self.course.give_up_s:
                break
            what(*args)
        self.scene.count_connections()
        return Told(
            course=self.course,
            bound_s=self.scene.bound_s,
            duration_s=max((provider.finished_s for provider in self.scene.told.values()), default=0.0),
            providers=list(self.scene.told.values()),
            samples=self.minutes.samples([machine.name for machine in self.machines], self.now),
            events=self.minutes.events,
            decisions=self.decisions,
        )

    # A worker.

    def _wake(self, worker: Worker) -> None:
        """What the clock brings: due rows, expired ones, ended suspensions; then read and report."""
        worker.wakes_at = float("inf")
        before = set(worker.scheduler.demand()) if worker.scheduler.waiting else set()
        for row in worker.scheduler.advance(self.now):
            self.settle(row, self.scene.lanes[row], "expired")
        for lane in worker.scheduler.demand():
            if lane not in before or lane not in worker.asked:
                worker.unasked[lane] = None
        self.fill(worker)
        self.report(worker)

    def fill(self, worker: Worker) -> None:
        """Read on while there is room; read again what the scheduler wants."""
        scheduler, lanes = worker.scheduler, self.scene.lanes
        for row in scheduler.wanted(512):
            if scheduler.returned(row):
                worker.unasked.setdefault(lanes[row])
        while scheduler.has_room():
            if not worker.unread:
                if not worker.machine.batches:
                    break
                worker.unread.append(worker.machine.batches.popleft())
            rows = worker.unread.popleft()
            if len(rows) > 256:
                worker.unread.appendleft(rows[256:])
                rows = rows[:256]
            for row in rows:
                scheduler.add(row, lanes[row])
                worker.unasked.setdefault(lanes[row])
        scheduler.evicted()
        wake = scheduler.next_due()
        if wake is not None and wake < worker.wakes_at:
            worker.wakes_at = max(wake, self.now)
            self.at(worker.wakes_at, self._wake, worker)

    def report(self, worker: Worker, lane: int | None = None) -> None:
        """Tell the ledger what is wanted: of a lane whose rows changed, and of lanes not asked for yet."""
        wanted: dict[SlotKey, int] = {}
        source = worker.machine.name
        if lane is not None and lane in worker.asked:
            self._want(worker, lane, wanted, source)
        if worker.unasked and len(worker.asked) < OPEN_LANES:
            for lane in list(worker.unasked):
                if len(worker.asked) >= OPEN_LANES:
                    break
                del worker.unasked[lane]
                if lane not in worker.asked:
                    worker.asked[lane] = 0
                self._want(worker, lane, wanted, source)
        if wanted:
            worker.machine.ledger.demand(worker.number, wanted, self.now)
        self._decide(worker.machine)

    def _want(self, worker: Worker, lane: int, wanted: dict[SlotKey, int], source: str) -> None:
        counts = worker.scheduler.counts(lane)
        rows = 0 if worker.scheduler.suspension(lane) else counts.ready + counts.parked + counts.reading
        if rows != worker.asked[lane]:
            wanted[source, str(lane)] = worker.asked[lane] = rows
        if not rows and not worker.connections.get(lane):
            del worker.asked[lane]

    # A machine.

    def _decide(self, machine: Machine) -> None:
        for decision in machine.ledger.decide(self.now):
            self._carry_out(machine, decision)
        again = machine.ledger.next_at(self.now)
        if again is not None and again < machine.decides_at:
            machine.decides_at = max(again, self.now + 1e-4)
            self.at(machine.decides_at, self._decide_later, machine, machine.decides_at)

    def _decide_later(self, machine: Machine, due: float) -> None:
        if machine.decides_at == due:
            machine.decides_at = float("inf")
            self._decide(machine)

    def _carry_out(self, machine: Machine, decision: Decision) -> None:
        worker, lane = machine.workers[decision.worker], int(decision.key[1])
        if isinstance(decision, Grant):
            for _ in range(decision.connections):
                self._wires.open(worker, lane)
        elif isinstance(decision, Allow):
            entries = worker.allowed.setdefault(lane, [])
            entries.append((self.now + decision.valid_s, decision.messages))
            waiting = worker.idle.get(lane, [])
            for _ in range(min(decision.messages, len(waiting))):
                self.at(self.now, self._wires.send, waiting.pop(0))
        else:
            left = decision.connections
            for connection in worker.connections.get(lane, []):
                if left and not connection.closing:
                    connection.closing = True
                    left -= 1
                    if connection.idle_since is not None:
                        self.at(self.now, self._wires.send, connection)

    def _tick(self, machine: Machine, due: float) -> None:
        if machine.ticks_at != due:
            return
        machine.ticks_at = float("inf")
        for event in machine.throttle.tick(self.now):
            lane = int(event.key.provider)
            key = (machine.name, event.key.provider)
            self.minutes.events.append((machine.name, event))
            machine.ledger.set_limit(key, self._limit(machine, key), self.now)
            if event.kind in (EventKind.SUSPENDED, EventKind.RESUMED):
                for worker in machine.workers:
                    if event.kind is EventKind.SUSPENDED:
                        worker.scheduler.suspend_lane(lane, event.after.suspended_until, event.reason)
                    else:
                        worker.scheduler.resume_lane(lane)
                        worker.unasked.setdefault(lane)
                    self.report(worker, lane)
                    self.fill(worker)
        self._decide(machine)
        self.tick_later(machine)

    def tick_later(self, machine: Machine) -> None:
        """Ask the throttle when it wants to be asked, once a second at most."""
        due = machine.throttle.next_at()
        if due is not None:
            due = max(due, self.now + TICK_S)
            if due < machine.ticks_at:
                machine.ticks_at = due
                self.at(due, self._tick, machine, due)

    def tick_now(self, machine: Machine) -> None:
        """Ask the throttle now, for a refusal may change what the next one may do."""
        machine.ticks_at = self.now
        self._tick(machine, self.now)

    def settle(self, row: int, lane: int, how: str) -> None:
        """A row has its outcome."""
        told = self.scene.told[self.scene.model(lane).name]
        match how:
            case Kind.ACCEPTED:
                told.accepted += 1
            case Kind.BOUNCED:
                told.bounced += 1
            case Kind.REFUSED:
                told.refused += 1
            case _:
                told.expired += 1
        told.finished_s = self.now
        self._open -= 1


def rate_of(rate_per_s: float) -> Rate:
    """A rate as the ledger takes it: whole messages in a window of a minute, longer where they are few."""
    per_s = 60.0
    while rate_per_s * per_s < 20 and per_s < 3600:
        per_s *= 2
    return Rate(max(1, int(rate_per_s * per_s)), per_s)


def simulate(course: Course) -> Told:
    """Play a course to its end."""
    return Simulation(course).run()
