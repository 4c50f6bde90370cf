"""Limits that machines share, in virtual time: what a receiver counts is never above them, and hardly below."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable

import pytest

from engine.pace import commons
from engine.pace.allowance import Rate
from engine.pace.commons import CONNECTIONS, Ask, Holding, Table, fair, settle
from engine.pace.slots import Allow, Grant, Ledger, Limit, Revoke, Use
from engine.work.messages import Key
from engine.work.sharing import Sharing

KEY: Key = ("*", "provider")
LEASE_S, QUIET_S = 3.0, 2.0
STEP_S = 0.02


class VirtualClock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def wall_us(self) -> int:
        return round(self.now * 1e6)


class Store:
    """One key's table with its version."""

    def __init__(self) -> None:
        self.version, self.table = 0, Table()


class Machine:
    """A supervisor with one worker that sends what it is allowed, `speed` messages a second at most."""

    def __init__(self, name: str, world: World, rows: int, speed: float) -> None:
        self.name, self.world, self.rows, self.speed = name, world, rows, speed
        self.sharing = Sharing(
            lambda: pytest.fail("no store here"), name, LEASE_S, world.clock, quiet_s=QUIET_S, all_keys=False
        )
        self.sharing.attach(self)
        self.ledger = Ledger(lambda key: self.sharing.confined(key, world.limit, world.limit))
        self.open = 0
        self.allowed: deque[tuple[int, float]] = deque()
        self.owed = 0.0
        self.next_round = world.clock.now + world.rng.random()
        self.is_cut = False
        self.sent = 0

    # -- sharing.Pace --------------------------------------------------------------------------------------------------

    def known_keys(self) -> list[Key]:
        return [KEY]

    def whole(self, key: Key) -> Limit:
        return self.world.limit

    def own_connections(self, key: Key) -> int:
        return self.world.limit.connections

    def use(self, key: Key, now: float) -> Use:
        return self.ledger.use(key, now)

    def share_changed(self, key: Key) -> None:
        limit = self.sharing.confined(key, self.world.limit, self.world.limit)
        self.ledger.set_limit(key, limit, self.world.clock.now)

    # -- life ----------------------------------------------------------------------------------------------------------

    def step(self) -> None:
        world, now = self.world, self.world.clock.now
        if now >= self.next_round:
            self.next_round = now + world.rng.uniform(0.8, 1.2)
            if not self.is_cut:
                self.round(now)
        self.sharing.tick(now)
        self.ledger.demand(0, {KEY: self.rows}, now)
        for decision in self.ledger.decide(now):
            match decision:
                case Grant():
                    self.open += decision.connections
                case Revoke():
                    self.open -= decision.connections
                    self.ledger.closed(0, KEY, decision.connections, now)
                case Allow():
                    self.allowed.append((decision.messages, now + decision.valid_s))
        if not self.rows and self.open:  # the worker gives back what it has no row for
            self.ledger.closed(0, KEY, self.open, now)
            self.open = 0
        self.send(now)

    def send(self, now: float) -> None:
        if not self.open:
            self.owed = 0.0
            return
        self.owed = min(self.owed + self.speed * STEP_S, self.speed)
        sent = 0
        while self.allowed and self.owed >= 1 and self.rows:
            messages, until = self.allowed[0]
            if until <= now:
                self.allowed.popleft()
                self.ledger.unused(0, KEY, messages, now)
                continue
            take = min(messages, int(self.owed), self.rows)
            self.owed -= take
            self.rows -= take
            sent += take
            if take == messages:
                self.allowed.popleft()
            else:
                self.allowed[0] = (messages - take, until)
        if sent:
            self.sent += sent
            self.world.arrived.extend([now] * sent)
            self.ledger.spent(0, KEY, sent, now, now)

    def round(self, now: float) -> None:
        store, rng = self.world.store, self.world.rng
        changed, grant, is_quiet = self.sharing.settle(KEY, store.table, self.world.clock.wall_us())
        if not is_quiet:
            self.next_round = now + 0.15
        if changed is None:
            return
        lost = rng.random() if self.world.is_rough else 1.0
        if lost < 0.1:
            return  # it never arrived
        store.version, store.table = store.version + 1, changed
        if lost < 0.2:
            return  # it did, and the answer was lost
        self.sharing.stored(KEY, grant, now)


class World:
    def __init__(self, limit: Limit, seed: int = 1, *, is_rough: bool = False) -> None:
        self.limit, self.rng, self.is_rough = limit, random.Random(seed), is_rough
        self.clock, self.store = VirtualClock(), Store()
        self.machines: list[Machine] = []
        self.number = 0
        self.arrived: list[float] = []
        self.most_open = 0
        self.open_s = 0.0

    def add(self, rows: int = 10**9, speed: float = 1000.0) -> Machine:
        self.number += 1
        self.machines.append(Machine(f"m{self.number}", self, rows, speed))
        return self.machines[-1]

    def run(self, seconds: float, at_each: Callable[[], None] = lambda: None) -> None:
        for _ in range(round(seconds / STEP_S)):
            self.clock.now += STEP_S
            at_each()
            for machine in self.machines:
                machine.step()
            open_ = sum(machine.open for machine in self.machines)
            self.most_open = max(self.most_open, open_)
            self.open_s += open_ * STEP_S

    def fullest(self, window_s: float) -> int:
        first = most = 0
        for last, at in enumerate(self.arrived):
            while self.arrived[first] <= at - window_s + 1e-9:
                first += 1
            most = max(most, last - first + 1)
        return most


@pytest.mark.parametrize("rate", [Rate(100, 1.0), Rate(600, 60.0), Rate(1000, 3600.0, 100.0)], ids=str)
def test_machines_together_use_a_rate_and_never_exceed_it(rate: Rate) -> None:
    world = World(Limit(10, (rate,)))
    for _ in range(3):
        world.add()
    world.run(5)
    world.arrived.clear()
    before = world.clock.now
    world.run(150)
    assert world.fullest(rate.per_s) <= rate.count
    possible = rate.per_second * (world.clock.now - before) if rate.per_s < 100 else rate.count
    assert len(world.arrived) >= 0.95 * possible


def test_a_newcomer_takes_its_part_while_the_window_stays_full() -> None:
    world = World(Limit(10, (Rate(600, 20.0),)))
    world.add()
    world.run(60)
    before = world.clock.now
    second = world.add()
    world.run(40)
    assert world.fullest(20.0) <= 600
    assert len([at for at in world.arrived if at > before]) >= 0.94 * 30 * 40
    second.sent = 0
    world.run(20)
    assert second.sent >= 0.45 * 600


def test_one_message_in_two_seconds_goes_round() -> None:
    world = World(Limit(3, (Rate(1, 2.0),)))
    machines = [world.add(), world.add()]
    world.run(240)
    assert world.fullest(2.0) == 1
    assert len(world.arrived) >= 0.85 * 120
    assert min(machine.sent for machine in machines) >= 40


def test_connections_are_used_by_who_has_rows() -> None:
    world = World(Limit(7))
    first, second, third = (world.add() for _ in range(3))
    world.run(10)
    assert {first.open, second.open, third.open} <= {2, 3}
    third.rows = 0
    world.run(5)
    assert (first.open + second.open, third.open) == (7, 0)
    world.open_s = 0.0
    world.run(200)
    assert world.most_open == 7
    assert world.open_s >= 0.95 * 7 * 200


def test_a_limit_smaller_than_the_number_of_machines_goes_round() -> None:
    world = World(Limit(1))
    machines = [world.add() for _ in range(3)]
    had = {machine.name: 0.0 for machine in machines}

    def count() -> None:
        for machine in machines:
            had[machine.name] += machine.open * STEP_S

    world.run(360, count)
    assert world.most_open == 1
    assert sum(had.values()) >= 0.95 * 360
    assert min(had.values()) >= 80


def test_a_slow_machine_leaves_the_rate_to_the_others() -> None:
    world = World(Limit(10, (Rate(100, 1.0),)))
    slow, fast = world.add(speed=5.0), world.add()
    world.run(10)
    slow.sent = fast.sent = 0
    world.run(60)
    assert slow.sent >= 0.9 * 5 * 60
    assert fast.sent >= 0.85 * 95 * 60
    assert world.fullest(1.0) <= 100


@pytest.mark.parametrize("seed", range(4))
def test_whatever_is_lost_nothing_is_exceeded(seed: int) -> None:
    """Answers are lost, machines are cut off, crash and come, rows run out: the receiver counts."""
    rate = Rate(50, 1.0)
    world = World(Limit(6, (rate,)), seed, is_rough=True)
    for _ in range(3):
        world.add()

    def trouble() -> None:
        if world.rng.random() > STEP_S / 4:
            return
        machine = world.rng.choice(world.machines)
        match world.rng.randrange(4):
            case 0:
                machine.is_cut = not machine.is_cut
            case 1:  # it dies; a new one comes that knows nothing. Its connections are closed with it.
                world.machines.remove(machine)
                world.add()
            case 2:
                machine.rows = 0
            case _:
                machine.rows = 10**6

    world.run(120, trouble)
    assert world.most_open <= 6
    assert world.fullest(1.0) <= 50
    assert world.arrived


def test_a_machine_that_is_cut_off_stops_before_its_grant_ends() -> None:
    world = World(Limit(4, (Rate(50, 1.0),)))
    cut, other = world.add(), world.add()
    world.run(5)
    assert cut.open
    cut.is_cut = True
    world.run(LEASE_S + 1)
    assert (cut.open, len(cut.allowed)) == (0, 0)
    sent = cut.sent
    world.run(30)
    assert cut.sent == sent
    assert other.open == 4


def holding(until_us: int, **held: int) -> Holding:
    return Holding(until_us, 600_000_000, 0, dict(held), dict(held))


def test_connections_of_a_silent_machine_are_given_again_after_the_longest_answer() -> None:
    table = {"gone": holding(1_000_000, connections=8)}
    ask = Ask({CONNECTIONS: 10}, {CONNECTIONS: 10}, {CONNECTIONS: 0})
    assert settle(table, "me", ask, 2_000_000, 10**6, 0)[1] == {CONNECTIONS: 2}
    assert settle(table, "me", ask, 601_100_000, 10**6, 0)[1] == {CONNECTIONS: 10}
    buried = commons.bury(table, {"gone"}, 2_000_000)
    assert settle(buried, "me", ask, 2_000_001, 10**6, 0)[1] == {CONNECTIONS: 10}


def test_who_leaves_in_order_gives_its_connections_back_and_keeps_its_counts() -> None:
    table = commons.leave({"me": holding(10**7, connections=8)}, "me", {CONNECTIONS: 0, "messages/60": 30}, 10**6)
    ask = Ask({CONNECTIONS: 10, "messages/60": 100}, {CONNECTIONS: 10, "messages/60": 100}, {})
    assert settle(table, "you", ask, 2 * 10**6, 10**6, 0)[1] == {CONNECTIONS: 10, "messages/60": 70}
    assert settle(table, "you", ask, 63 * 10**6, 10**6, 0)[1]["messages/60"] == 100


def test_fair_is_by_demand() -> None:
    assert fair(10, {"a": 2, "b": 20, "c": 20}, 0) == {"a": 2, "b": 4, "c": 4}
    assert fair(10, {"a": 2, "b": 3}, 0) == {"a": 2, "b": 3}
    assert sorted(fair(2, {"a": 9, "b": 9, "c": 9}, 0).values()) == [0, 1, 1]
    got = {next(id_ for id_, n in fair(1, {"a": 9, "b": 9, "c": 9}, turn).items() if n) for turn in range(3)}
    assert got == {"a", "b", "c"}
