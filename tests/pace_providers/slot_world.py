"""A small world for the ledger: workers that take messages over a pipe with a delay, and a sink that counts."""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable

from engine.pace.slots import Allow, Grant, Key, Ledger, Limit, Revoke

KEY: Key = ("192.0.2.1", "google")


class World:
    """Discrete events; every worker behaves. `pipe_s`: supervisor to worker; `service_s`: one message."""

    def __init__(
        self, limit: Limit, workers: int, *, pipe_s: float = 0.002, service_s: float = 0.05, open_s: float = 0.02,
        reports: bool = True, per_connection: int = 100,
    ) -> None:  # fmt: skip
        self.ledger = Ledger(lambda _: limit)
        self.limit = limit
        self.now = 0.0
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.order = itertools.count()
        self.pipe_s, self.service_s, self.open_s = pipe_s, service_s, open_s
        self.reports = reports
        self.sent: list[float] = []
        self.open = 0
        self.peak = 0
        self.workers = [Worker(self, n, per_connection) for n in range(workers)]
        self.decisions = 0
        self.grants = 0
        self.revokes = 0

    def at(self, delay: float, action: Callable[[], None]) -> None:
        heapq.heappush(self.events, (self.now + delay, next(self.order), action))

    def run(self, until: float) -> None:
        while True:
            self.decide()
            wake = self.ledger.next_at(self.now)
            following = min(self.events[0][0] if self.events else until, until if wake is None else wake)
            if following >= until:
                self.now = until
                return
            self.now = max(self.now, following)
            while self.events and self.events[0][0] <= self.now:
                heapq.heappop(self.events)[2]()

    def decide(self) -> None:
        for decision in self.ledger.decide(self.now):
            self.decisions += 1
            worker = self.workers[decision.worker]
            match decision:
                case Grant():
                    self.grants += decision.connections
                    self.at(self.pipe_s, lambda w=worker, d=decision: w.granted(d.connections))
                case Allow():
                    until = self.now + decision.valid_s
                    self.at(self.pipe_s, lambda w=worker, d=decision, u=until: w.allowed(d.messages, u))
                case Revoke():
                    self.revokes += decision.connections
                    self.at(self.pipe_s, lambda w=worker, d=decision: w.revoked(d.connections))

    def most_in_any(self, window_s: float) -> int:
        """The most messages in any closed window of that length."""
        most, inside = 0, deque[float]()
        for at in sorted(self.sent):
            inside.append(at)
            while inside[0] < at - window_s:
                inside.popleft()
            most = max(most, len(inside))
        return most


class Worker:
    """Opens what it is granted, sends what it is allowed, says so."""

    def __init__(self, world: World, number: int, per_connection: int) -> None:
        self.world, self.number, self.per_connection = world, number, per_connection
        self.rows = 0
        self.ready = 0  # open connections doing nothing
        self.opening = 0
        self.busy = 0
        self.closing = 0
        self.served = 0
        self.tickets: deque[float] = deque()  # expiry of each message's allowance

    def wants(self, rows: int) -> None:
        self.rows += rows
        self.tell()

    def tell(self) -> None:
        rows = self.rows
        self.to_ledger(lambda: self.world.ledger.demand(self.number, {KEY: rows}, self.world.now))

    def to_ledger(self, action: Callable[[], None]) -> None:
        self.world.at(self.world.pipe_s, action)

    def granted(self, connections: int) -> None:
        for _ in range(connections):
            self.world.open += 1
            self.world.peak = max(self.world.peak, self.world.open)
            self.opening += 1
            self.world.at(self.world.open_s, self.opened)

    def opened(self) -> None:
        self.opening -= 1
        self.ready += 1
        self.work()

    def allowed(self, messages: int, until: float) -> None:
        self.tickets.extend([until] * messages)
        self.world.at(max(until - self.world.now, 0) + 1e-9, self.expire)
        self.work()

    def expire(self) -> None:
        late = 0
        while self.tickets and self.tickets[0] <= self.world.now:
            self.tickets.popleft()
            late += 1
        if late:
            self.to_ledger(lambda: self.world.ledger.unused(self.number, KEY, late, self.world.now))

    def revoked(self, connections: int) -> None:
        self.closing += connections
        self.work()

    def work(self) -> None:
        while self.closing and self.ready:
            self.closing -= 1
            self.ready -= 1
            self.close()
        while self.ready and self.rows:
            if self.world.limit.rates:
                while self.tickets and self.tickets[0] < self.world.now:
                    self.expire()
                if not self.tickets:
                    break
                self.tickets.popleft()
                at = self.world.now
                if self.world.reports:
                    self.to_ledger(lambda at=at: self.world.ledger.spent(self.number, KEY, 1, at, self.world.now))
            self.ready -= 1
            self.busy += 1
            self.rows -= 1
            self.served += 1
            self.world.sent.append(self.world.now)
            self.world.at(self.world.service_s, self.done)
        self.tell()

    def done(self) -> None:
        self.busy -= 1
        if self.closing or self.served % self.per_connection == 0:
            self.closing = max(0, self.closing - 1)
            self.close()
        else:
            self.ready += 1
        self.work()

    def close(self) -> None:
        self.world.open -= 1
        self.to_ledger(lambda: self.world.ledger.closed(self.number, KEY, 1, self.world.now))
