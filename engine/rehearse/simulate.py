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
from typing import Literal

import msgspec

from engine.pace.allowance import Rate
from engine.pace.easing import Adaptive, Classic
from engine.pace.retry import RetryPlan
from engine.pace.scheduler import Scheduler
from engine.pace.slots import Allow, Decision, Grant, Ledger, Limit
from engine.pace.slots import Key as SlotKey
from engine.pace.throttle import EventKind, Key, Limits, Observation, Signal, Throttle, ThrottleEvent
from engine.rehearse.models import Answer, Kind, Model, Played, World, rows_of, world_bound_s

DOT_TIMEOUT_S = 600.0  # a connection that says nothing for so long is closed by the watchdog
IDLE_S = 5.0
TICK_S = 1.0  # of the throttle
OPEN_LANES = 128  # destinations a worker asks connections for at once


class Course(msgspec.Struct, frozen=True, kw_only=True):
    """What is simulated."""

    world: World
    rows: int
    machines: int = 5
    workers: int = 8  # on each machine
    seed: int = 1
    throttle: Literal["adaptive", "classic"] = "adaptive"
    depth: int = 4  # messages handed to a connection at once
    batch_rows: int = 10_000
    retry: RetryPlan = RetryPlan()
    give_up_s: float = 30 * 86_400.0  # the virtual clock stops here


class ProviderCourse(msgspec.Struct, kw_only=True):
    """What happened at one provider (the domains of a tail count as one). Times in seconds."""

    name: str
    rows: int
    bound_s: float
    finished_s: float = 0.0
    attempts: int = 0
    accepted: int = 0
    bounced: int = 0
    expired: int = 0
    refused: int = 0  # 5xx about us
    greylisted: int = 0
    limited: int = 0  # attempts answered 4xx by a limiter
    connections_refused: int = 0
    lost: int = 0
    most_connections: int = 0  # as the provider counted them, on one source

    @property
    def limited_share(self) -> float:
        """Of the attempts, how many a limiter answered 4xx."""
        return self.limited / self.attempts if self.attempts else 0.0


class Sample(msgspec.Struct, frozen=True):
    """One provider in one minute, on all machines."""

    minute: int
    provider: str
    accepted: int
    limited: int
    connections: int  # ceilings summed over the machines
    rate_per_s: float | None


class Told(msgspec.Struct, kw_only=True):
    """What came out of a course."""

    course: Course
    bound_s: float
    duration_s: float
    providers: list[ProviderCourse]
    samples: list[Sample]
    events: list[tuple[str, ThrottleEvent]]  # (machine, change)
    decisions: int  # rows taken, settled, deferred, given back

    @property
    def ratio(self) -> float:
        """The duration against the bound."""
        return self.duration_s / self.bound_s if self.bound_s else 1.0

    @property
    def limited_share(self) -> float:
        """Of all attempts, how many a limiter answered 4xx."""
        attempts = sum(provider.attempts for provider in self.providers)
        return sum(provider.limited for provider in self.providers) / attempts if attempts else 0.0


class _Connection:
    __slots__ = ("accepted", "closing", "has_timer", "idle_since", "lane", "worker")

    def __init__(self, worker: _Worker, lane: int) -> None:
        self.worker, self.lane = worker, lane
        self.accepted = 0
        self.closing = self.has_timer = False
        self.idle_since: float | None = None


class _Worker:
    """One process: a scheduler, a reader, connections."""

    def __init__(self, machine: _Machine, number: int, rng: random.Random) -> None:
        self.machine, self.number = machine, number
        self.rng = rng
        self.scheduler = Scheduler(rng=rng)
        self.unread: deque[range] = deque()
        self.connections: dict[int, list[_Connection]] = {}
        self.idle: dict[int, list[_Connection]] = {}
        self.allowed: dict[int, list[tuple[float, int]]] = {}  # lane -> (expires at, messages), oldest first
        self.asked: dict[int, int] = {}  # lane -> demand as last reported
        self.unasked: dict[int, None] = {}  # lanes with rows that the ledger was not asked for yet
        self.wakes_at = float("inf")


class _Machine:
    def __init__(self, name: str) -> None:
        self.name = name
        self.workers: list[_Worker] = []
        self.ledger: Ledger
        self.throttle: Throttle
        self.batches: deque[range] = deque()
        self.decides_at = float("inf")
        self.ticks_at = float("inf")


class Simulation:
    """One course, run to its end by `run`."""

    def __init__(self, course: Course) -> None:
        self.course = course
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
        self._sequence = 0
        self._rng = random.Random(course.seed)
        world = course.world
        self.bound_s, bounds = world_bound_s(world, course.rows, course.machines)
        counts = rows_of(world, course.rows)
        self.told = {
            model.name: ProviderCourse(name=model.name, rows=counts[model.name], bound_s=bounds[model.name])
            for model in world.provider
        }
        self._models: list[Model] = list(world.provider)
        self._lanes = self._lay_out(counts)
        self._played: dict[int, Played] = {}
        self._open = course.rows
        self._decisions = 0
        self._samples: dict[tuple[int, str], list[int]] = {}
        self._throttle_events: list[tuple[str, ThrottleEvent]] = []
        self._levels: list[tuple[float, str, str, int, float | None]] = []
        self.machines = [self._machine(number) for number in range(course.machines)]

    def _lay_out(self, counts: dict[str, int]) -> list[int]:
        """The lane of every row: providers mixed at random; a tail's domains are lanes above the providers'."""
        self._lane_model: dict[int, int] = {}
        lanes: list[int] = []
        above = len(self._models)
        for number, model in enumerate(self._models):
            rows = counts[model.name]
            if model.domains == 1:
                lanes.extend([number] * rows)
                self._lane_model[number] = number
            else:
                for row in range(rows):
                    lanes.append(above + row % model.domains)
                for domain in range(min(rows, model.domains)):
                    self._lane_model[above + domain] = number
                above += model.domains
        self._rng.shuffle(lanes)
        return lanes

    def _machine(self, number: int) -> _Machine:
        course = self.course
        machine = _Machine(f"192.0.2.{number + 1}")
        machine.ledger = Ledger(lambda key: self._limit(machine, key))
        easing = Adaptive() if course.throttle == "adaptive" else Classic()
        machine.throttle = Throttle(self._budget, easing)
        first, last = course.rows * number // course.machines, course.rows * (number + 1) // course.machines
        batch = max(1, min(course.batch_rows, (last - first) // (4 * course.workers) or 1))
        machine.batches = deque(range(start, min(start + batch, last)) for start in range(first, last, batch))
        for worker in range(course.workers):
            machine.workers.append(_Worker(machine, worker, random.Random(self._rng.random())))
        return machine

    def _budget(self, key: Key) -> Limits:
        model = self._model(int(key.provider))
        connections = model.budget_connections if model.budget_connections is not None else model.connections
        rate = model.budget_rate_per_s if model.budget_rate_per_s is not None else None
        return Limits(connections=connections, rate_per_s=rate)

    def _limit(self, machine: _Machine, key: SlotKey) -> Limit:
        """The budget under the throttle's ceiling, as the supervisor would set it."""
        throttle_key = Key(machine.name, key[1])
        budget = self._budget(throttle_key)
        ceiling = machine.throttle.ceiling(throttle_key)
        rates = () if budget.rate_per_s is None else (rate_of(budget.rate_per_s),)
        if ceiling.rate_per_s is not None and ceiling.rate_per_s != budget.rate_per_s:
            rates = (*rates, rate_of(ceiling.rate_per_s))
        return Limit(min(budget.connections, ceiling.connections), rates)

    def _model(self, lane: int) -> Model:
        return self._models[self._lane_model[lane]]

    def _play(self, lane: int) -> Played:
        played = self._played.get(lane)
        if played is None:
            played = self._played[lane] = Played(self._model(lane), self.course.seed, self.bound_s)
        return played

    # The clock.

    def _at(self, when: float, what: Callable[..., None], *args: object) -> None:
        self._sequence += 1
        heapq.heappush(self._events, (when, self._sequence, what, args))

    def run(self) -> Told:
        """Play until every row is settled, or the course gives up."""
        for machine in self.machines:
            for worker in machine.workers:
                self._at(0.0, self._wake, worker)
        while self._events and self._open:
            self.now, _, what, args = heapq.heappop(self._events)
            if self.now > self.course.give_up_s:
                break
            what(*args)
        for lane, played in self._played.items():
            told = self.told[self._model(lane).name]
            told.most_connections = max(told.most_connections, played.most_connections)
        return Told(
            course=self.course,
            bound_s=self.bound_s,
            duration_s=max((provider.finished_s for provider in self.told.values()), default=0.0),
            providers=list(self.told.values()),
            samples=self._sampled(),
            events=self._throttle_events,
            decisions=self._decisions,
        )

    # A worker.

    def _wake(self, worker: _Worker) -> None:
        """What the clock brings: due rows, expired ones, ended suspensions; then read and report."""
        worker.wakes_at = float("inf")
        before = set(worker.scheduler.demand()) if worker.scheduler.waiting else set()
        for row in worker.scheduler.advance(self.now):
            self._settle(row, self._lanes[row], "expired")
        for lane in worker.scheduler.demand():
            if lane not in before or lane not in worker.asked:
                worker.unasked[lane] = None
        self._fill(worker)
        self._report(worker)

    def _fill(self, worker: _Worker) -> None:
        """Read on while there is room; read again what the scheduler wants."""
        scheduler, lanes = worker.scheduler, self._lanes
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
            self._at(worker.wakes_at, self._wake, worker)

    def _report(self, worker: _Worker, lane: int | None = None) -> None:
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

    def _want(self, worker: _Worker, lane: int, wanted: dict[SlotKey, int], source: str) -> None:
        counts = worker.scheduler.counts(lane)
        rows = 0 if worker.scheduler.suspension(lane) else counts.ready + counts.parked + counts.reading
        if rows != worker.asked[lane]:
            wanted[source, str(lane)] = worker.asked[lane] = rows
        if not rows and not worker.connections.get(lane):
            del worker.asked[lane]

    # A machine.

    def _decide(self, machine: _Machine) -> None:
        for decision in machine.ledger.decide(self.now):
            self._carry_out(machine, decision)
        again = machine.ledger.next_at(self.now)
        if again is not None and again < machine.decides_at:
            machine.decides_at = max(again, self.now + 1e-4)
            self._at(machine.decides_at, self._decide_later, machine, machine.decides_at)

    def _decide_later(self, machine: _Machine, due: float) -> None:
        if machine.decides_at == due:
            machine.decides_at = float("inf")
            self._decide(machine)

    def _carry_out(self, machine: _Machine, decision: Decision) -> None:
        worker, lane = machine.workers[decision.worker], int(decision.key[1])
        if isinstance(decision, Grant):
            for _ in range(decision.connections):
                self._connect(worker, lane)
        elif isinstance(decision, Allow):
            entries = worker.allowed.setdefault(lane, [])
            entries.append((self.now + decision.valid_s, decision.messages))
            waiting = worker.idle.get(lane, [])
            for _ in range(min(decision.messages, len(waiting))):
                self._at(self.now, self._send, waiting.pop(0))
        else:
            left = decision.connections
            for connection in worker.connections.get(lane, []):
                if left and not connection.closing:
                    connection.closing = True
                    left -= 1
                    if connection.idle_since is not None:
                        self._at(self.now, self._send, connection)

    def _tick(self, machine: _Machine, due: float) -> None:
        if machine.ticks_at != due:
            return
        machine.ticks_at = float("inf")
        for event in machine.throttle.tick(self.now):
            lane = int(event.key.provider)
            key = (machine.name, event.key.provider)
            self._throttle_events.append((machine.name, event))
            machine.ledger.set_limit(key, self._limit(machine, key), self.now)
            if event.kind in (EventKind.SUSPENDED, EventKind.RESUMED):
                for worker in machine.workers:
                    if event.kind is EventKind.SUSPENDED:
                        worker.scheduler.suspend_lane(lane, event.after.suspended_until, event.reason)
                    else:
                        worker.scheduler.resume_lane(lane)
                        worker.unasked.setdefault(lane)
                    self._report(worker, lane)
                    self._fill(worker)
        self._decide(machine)
        self._tick_later(machine)

    def _tick_later(self, machine: _Machine) -> None:
        due = machine.throttle.next_at()
        if due is not None:
            due = max(due, self.now + TICK_S)
            if due < machine.ticks_at:
                machine.ticks_at = due
                self._at(due, self._tick, machine, due)

    # A connection.

    def _connect(self, worker: _Worker, lane: int) -> None:
        source = worker.machine.name
        answer = self._play(lane).connect(source, self.now)
        if answer.kind is Kind.ACCEPTED:
            connection = _Connection(worker, lane)
            worker.connections.setdefault(lane, []).append(connection)
            self._at(self.now + answer.takes_s, self._send, connection)
        else:
            takes = DOT_TIMEOUT_S / 60 if answer.kind is Kind.SILENT else answer.takes_s
            opened = sum(len(each.connections.get(lane, ())) for each in worker.machine.workers)
            self._at(self.now + takes, self._refused, worker, lane, answer, self.now, opened)

    def _refused(self, worker: _Worker, lane: int, answer: Answer, begun: float, opened: int) -> None:
        told = self.told[self._model(lane).name]
        told.connections_refused += 1
        self._observe(worker, lane, answer, begun, connections=opened)
        worker.machine.ledger.closed(worker.number, (worker.machine.name, str(lane)), 1, self.now)
        self._tick_now(worker.machine)
        self._report(worker, lane)

    def _send(self, connection: _Connection) -> None:
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
        limit = self.course.depth
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
        rows = worker.scheduler.take(lane, limit, self.now)
        if not rows:
            self._fill(worker)
            rows = worker.scheduler.take(lane, limit, self.now)
        if not rows:
            counts = worker.scheduler.counts(lane)
            self._wait(connection) if counts.ready + counts.parked + counts.reading else self._close(connection)
            return
        if rated:
            self._spend(worker, lane, len(rows))
        self._decisions += len(rows)
        self._speak(connection, rows, rated)

    def _speak(self, connection: _Connection, rows: list[int], rated: bool) -> None:
        worker, lane = connection.worker, connection.lane
        played, source = self._play(lane), worker.machine.name
        at = self.now
        answers: list[Answer] = []
        for row in rows:
            answer = played.message(source, row, connection.accepted + len(answers), at)
            at += DOT_TIMEOUT_S if answer.kind is Kind.SILENT else answer.takes_s
            answers.append(answer)
            if answer.closes or answer.kind is Kind.SILENT:
                break
        self._at(at, self._answered, connection, rows, answers, self.now, rated)

    def _answered(
        self, connection: _Connection, rows: list[int], answers: list[Answer], begun: float, rated: bool
    ) -> None:
        worker, lane = connection.worker, connection.lane
        scheduler = worker.scheduler
        told = self.told[self._model(lane).name]
        told.attempts += len(answers)
        self._decisions += len(rows)
        sample = self._samples.setdefault((int(self.now // 60), told.name), [0, 0])
        for row, answer in zip(rows, answers, strict=False):
            self._observe(worker, lane, answer, begun, on_connection=connection.accepted)
            match answer.kind:
                case Kind.ACCEPTED | Kind.BOUNCED | Kind.REFUSED:
                    connection.accepted += 1
                    sample[0] += 1
                    scheduler.settle(row, lane)
                    self._settle(row, lane, answer.kind)
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
            worker.machine.ledger.spent(worker.number, key, len(answers), begun, self.now)
            if len(rows) > len(answers):
                worker.machine.ledger.unused(worker.number, key, len(rows) - len(answers), self.now)
        if answers[-1].closes or answers[-1].kind is Kind.SILENT:
            connection.closing = True
        if answers[-1].closes:
            self._tick_now(worker.machine)
        self._fill(worker)
        self._report(worker, lane)
        self._send(connection)

    def _observe(
        self,
        worker: _Worker,
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
                self.now,
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
            self._tick_later(machine)

    def _tick_now(self, machine: _Machine) -> None:
        machine.ticks_at = self.now
        self._tick(machine, self.now)

    def _defer(self, worker: _Worker, row: int, lane: int, answer: Answer) -> None:
        attempt, first_at = worker.scheduler.history(row)
        first_at = self.now if first_at is None else first_at
        plan = self.course.retry
        hint = 300.0 if "300 seconds" in answer.reply else None
        wait = plan.next_wait(attempt + 1, first_at, self.now, worker.rng, hint)
        if wait is None:
            worker.scheduler.settle(row, lane)
            self._settle(row, lane, "expired")
            return
        expires_at = plan.expires_at(first_at)
        worker.scheduler.defer(row, lane, self.now + wait, attempt + 1, first_at, expires_at)

    def _wait(self, connection: _Connection) -> None:
        connection.idle_since = self.now
        connection.worker.idle.setdefault(connection.lane, []).append(connection)
        if not connection.has_timer:
            connection.has_timer = True
            self._at(self.now + IDLE_S, self._idle, connection)

    def _idle(self, connection: _Connection) -> None:
        connection.has_timer = False
        if connection.idle_since is None:
            return
        left = connection.idle_since + IDLE_S - self.now
        if left <= 1e-6:
            self._close(connection)
        else:
            connection.has_timer = True
            self._at(self.now + left, self._idle, connection)

    def _close(self, connection: _Connection) -> None:
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
        self._play(lane).disconnect(source)
        worker.machine.ledger.closed(worker.number, (source, str(lane)), 1, self.now)
        if not held and (entries := worker.allowed.pop(lane, None)):
            unused = sum(messages for until, messages in entries if until > self.now)
            if unused:
                worker.machine.ledger.unused(worker.number, (source, str(lane)), unused, self.now)
        self._report(worker, lane)

    def _allowance(self, worker: _Worker, lane: int) -> int:
        entries = worker.allowed.get(lane)
        while entries and entries[0][0] <= self.now:
            entries.pop(0)
        return sum(messages for _, messages in entries) if entries else 0

    def _spend(self, worker: _Worker, lane: int, messages: int) -> None:
        entries = worker.allowed[lane]
        while messages:
            until, have = entries.pop(0)
            if have > messages:
                entries.insert(0, (until, have - messages))
            messages -= min(have, messages)

    def _settle(self, row: int, lane: int, how: str) -> None:
        told = self.told[self._model(lane).name]
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

    def _sampled(self) -> list[Sample]:
        """Minutes with the ceilings that held at their end, from the throttle's events."""
        names = {number: model.name for number, model in enumerate(self._models) if model.domains == 1}
        levels: dict[tuple[str, str], tuple[int, float | None]] = {}
        for number, name in names.items():
            budget = self._budget(Key("", str(number)))
            for machine in self.machines:
                levels[machine.name, name] = (budget.connections, budget.rate_per_s)
        events = deque(sorted(self._throttle_events, key=lambda told: told[1].at))
        samples: list[Sample] = []
        for minute in range(int(self.now // 60) + 1):
            while events and events[0][1].at < (minute + 1) * 60:
                source, event = events.popleft()
                if (told_name := names.get(int(event.key.provider))) is not None:
                    levels[source, told_name] = (event.after.connections, event.after.rate_per_s)
            for name in names.values():
                accepted, limited = self._samples.get((minute, name), (0, 0))
                held = [levels[machine.name, name] for machine in self.machines]
                rates = [rate for _, rate in held if rate is not None]
                samples.append(
                    Sample(minute, name, accepted, limited, sum(c for c, _ in held), sum(rates) if rates else None)
                )
        return samples


def rate_of(rate_per_s: float) -> Rate:
    """A rate as the ledger takes it: whole messages in a window of a minute, longer where they are few."""
    per_s = 60.0
    while rate_per_s * per_s < 20 and per_s < 3600:
        per_s *= 2
    return Rate(max(1, int(rate_per_s * per_s)), per_s)


def simulate(course: Course) -> Told:
    """Play a course to its end."""
    return Simulation(course).run()
