"""Slots and allowances: never above the limit, almost all of it used, handed to who needs it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from slot_world import KEY, World

from engine.pace.allowance import Rate
from engine.pace.slots import Allow, Grant, Ledger, Limit, Revoke


@pytest.mark.parametrize("limit", [1, 2, 5, 20, 500])
def test_eight_processes_never_hold_more_connections_than_the_limit_and_use_all_of_it(limit: int) -> None:
    world = World(Limit(connections=limit), workers=8, service_s=0.2)
    for worker in world.workers:
        worker.wants(40 * limit)
    world.run(until=5.0)
    assert world.peak == limit
    possible = limit * 5.0 / 0.2
    assert len(world.sent) > possible * 0.9


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "per_s", "hours"),
    [(1, 60, 2.0), (10, 60, 0.5), (1000, 60, 0.1), (1, 1, 0.05), (200, 1, 0.005), (5000, 3600, 2.0)],
)
def test_no_window_holds_more_messages_than_the_limit_and_98_percent_are_used(
    count: int, per_s: int, hours: float
) -> None:
    world = World(Limit(connections=20, rates=(Rate(count, per_s),)), workers=8)
    for worker in world.workers:
        worker.wants(100_000)
    world.run(until=3600 * hours)
    assert world.most_in_any(per_s) <= count
    # The last window's messages may be due a moment after the end.
    assert len(world.sent) >= 0.98 * count * (3600 * hours / per_s) - 1


@pytest.mark.slow
@pytest.mark.parametrize(("count", "per_s"), [(1, 60), (10, 60), (1000, 60)])
def test_workers_that_never_report_are_still_counted_and_still_reach_98_percent(count: int, per_s: int) -> None:
    world = World(Limit(connections=20, rates=(Rate(count, per_s),)), workers=8, reports=False)
    for worker in world.workers:
        worker.wants(100_000)
    world.run(until=900)
    assert world.most_in_any(per_s) <= count
    assert len(world.sent) >= 0.98 * count * (900 / per_s) - 1


class Chaos:
    """Any worker behaviour the protocol allows: late sends, late reports or none, slow closes, deaths."""

    def __init__(self, limit: Limit) -> None:
        self.ledger = Ledger(lambda _: limit)
        self.limit = limit
        self.now = 100.0
        self.held: dict[int, int] = {}
        self.allowances: list[list[float]] = []  # [worker, messages, expires_at]
        self.sent: list[float] = []
        self.opened: list[float] = []

    def decide(self) -> None:
        for decision in self.ledger.decide(self.now):
            match decision:
                case Grant(worker=worker, connections=n):
                    self.held[worker] = self.held.get(worker, 0) + n
                case Allow(worker=worker, messages=n, valid_s=valid_s):
                    assert self.held.get(worker, 0) > 0
                    self.allowances.append([worker, n, self.now + valid_s])
                case Revoke(worker=worker, connections=n):
                    assert 0 < n <= self.held[worker]
        assert sum(self.held.values()) <= self.limit.connections
        assert sum(self.held.values()) == self.ledger.held(KEY)

    def step(self, kind: int, worker: int, amount: int, pause: float) -> None:
        self.now += pause
        mine = [a for a in self.allowances if a[0] == worker and a[1] and a[2] >= self.now]
        match kind:
            case 0:
                self.ledger.demand(worker, {KEY: amount}, self.now)
            case 1 if self.held.get(worker):
                n = min(amount, self.held[worker])
                self.held[worker] -= n
                self.ledger.closed(worker, KEY, n, self.now)
            case 2 | 3 if mine:  # send, with or without saying so
                at = mine[-1]  # the latest to expire first: the worst order for the ledger
                n = min(amount, int(at[1]))
                at[1] -= n
                self.sent += [self.now] * n
                if kind == 2:
                    self.ledger.spent(worker, KEY, n, self.now, self.now)
            case 4 if mine:
                n = min(amount, int(mine[0][1]))
                mine[0][1] -= n
                self.ledger.unused(worker, KEY, n, self.now)
            case 5:
                self.ledger.gone(worker, self.now)
                self.held.pop(worker, None)
                self.allowances = [a for a in self.allowances if a[0] != worker]
            case 6:
                self.ledger.set_ceiling(KEY, amount if amount < 6 else None, self.now)
            case 7:  # wait until the ledger asks to be called
                self.now = max(self.now, self.ledger.next_at(self.now) or self.now)
        self.decide()


_steps = st.lists(
    st.tuples(
        st.integers(0, 7),
        st.integers(0, 3),
        st.integers(1, 8),
        st.sampled_from([0.0, 0.001, 0.05, 0.3, 1.0, 5.0, 20.0]),
    ),
    min_size=20,
    max_size=150,
)


@settings(deadline=None, max_examples=150)
@given(steps=_steps, connections=st.integers(1, 5), count=st.integers(1, 30), per_s=st.sampled_from([1.0, 10.0, 60.0]))
def test_whatever_the_workers_do_no_limit_is_exceeded(
    steps: list[tuple[int, int, int, float]], connections: int, count: int, per_s: float
) -> None:
    chaos = Chaos(Limit(connections=connections, rates=(Rate(count, per_s), Rate(4 * count, per_s * 6))))
    chaos.ledger.demand(0, {KEY: 50}, chaos.now)
    for step in steps:
        chaos.step(*step)
    for length, most in ((per_s, count), (6 * per_s, 4 * count)):
        for first in chaos.sent:
            assert sum(first <= at <= first + length for at in chaos.sent) <= most


@settings(deadline=None, max_examples=60)
@given(
    count=st.integers(1, 12),
    per_s=st.sampled_from([1.0, 60.0]),
    late=st.lists(st.booleans(), min_size=1, max_size=7),
)
def test_sending_at_the_last_moment_or_the_first_makes_no_window_too_full(
    count: int, per_s: float, late: list[bool]
) -> None:
    ledger = Ledger(lambda _: Limit(connections=1, rates=(Rate(count, per_s),)))
    ledger.demand(0, {KEY: 10_000}, 0.0)
    now, sent, turn = 0.0, [], 0
    while now < 8 * per_s:
        for decision in ledger.decide(now):
            if isinstance(decision, Allow):
                sent += [now + decision.valid_s * late[turn % len(late)]] * decision.messages
                turn += 1
        now = max(now + 0.001, ledger.next_at(now) or now + 0.01)
    assert len(sent) >= count * 5
    for first in sent:
        assert sum(first <= at <= first + per_s for at in sent) <= count


def test_limit_of_one_message_in_eight_minutes_sends_one() -> None:
    # Public report: a window of one message sent two in each cycle.
    world = World(Limit(connections=2, rates=(Rate(1, 480),)), workers=5)
    for worker in world.workers:
        worker.wants(10)
    world.run(until=4000)
    assert world.most_in_any(480) == 1
    assert len(world.sent) == 9


def test_rate_is_shared_by_workers_and_not_theirs_each() -> None:
    # Public report: five workers with a limit of ten a second sent fifty.
    world = World(Limit(connections=50, rates=(Rate(10, 1),)), workers=5)
    for worker in world.workers:
        worker.wants(1000)
    world.run(until=20)
    assert world.most_in_any(1.0) <= 10
    assert len(world.sent) > 10 * 20 * 0.96
    served = [worker.served for worker in world.workers]
    assert max(served) - min(served) <= 20


def test_messages_leave_evenly_and_not_in_bursts() -> None:
    world = World(Limit(connections=20, rates=(Rate(600, 60),)), workers=4)
    for worker in world.workers:
        worker.wants(10_000)
    world.run(until=120)
    assert world.most_in_any(1.0) <= 17


def test_slots_move_to_where_the_rows_are() -> None:
    world = World(Limit(connections=10), workers=2, service_s=0.5, per_connection=1_000_000)
    world.workers[0].wants(100)
    world.run(until=2.0)
    assert world.peak == 10
    world.workers[1].wants(1000)
    world.run(until=8.0)
    assert world.workers[1].busy + world.workers[1].opening == 5
    world.run(until=30.0)  # worker 0 has run dry by now
    assert world.workers[1].busy + world.workers[1].opening == 10
    assert world.peak == 10


def test_even_workers_do_not_trade_slots() -> None:
    world = World(Limit(connections=20), workers=8, per_connection=1_000_000)
    for worker in world.workers:
        worker.wants(100_000)
    world.run(until=120.0)
    assert world.grants == 20
    assert world.revokes == 0


def test_two_slots_among_eight_workers_take_turns() -> None:
    world = World(Limit(connections=2), workers=8, per_connection=1_000_000)
    for worker in world.workers:
        worker.wants(100_000)
    world.run(until=600.0)
    assert world.peak == 2
    assert all(worker.served > 0 for worker in world.workers)
    assert world.revokes < 600 / 30 * 2 + 2
    assert len(world.sent) > 0.98 * 2 * 600 / 0.05


def test_a_dead_workers_slots_are_free_and_its_allowance_is_spent() -> None:
    ledger = Ledger(lambda _: Limit(connections=2, rates=(Rate(60, 60),)))
    ledger.demand(0, {KEY: 100}, 0.0)
    first = ledger.decide(0.0)
    assert [type(d) for d in first] == [Grant, Allow]
    ledger.gone(0, 0.1)
    ledger.demand(1, {KEY: 100}, 0.1)
    assert ledger.decide(0.1) == [Grant(1, KEY, 2, first[0].valid_s)]  # the one token of the first second is gone
    at = ledger.next_at(0.1)
    assert at is not None
    assert 0.8 < at < 1.1


def test_lowered_limit_revokes_the_excess_and_keeps_what_was_sent() -> None:
    world = World(Limit(connections=20, rates=(Rate(600, 60),)), workers=4)
    for worker in world.workers:
        worker.wants(10_000)
    world.run(until=30)
    before = len(world.sent)
    world.ledger.set_limit(KEY, Limit(connections=3, rates=(Rate(300, 60), Rate(1000, 3600))), world.now)
    world.run(until=60)
    assert world.open <= 3
    assert len(world.sent) <= max(before, 300) + 2  # what had left an instant before the change
    world.run(until=3500)
    assert len(world.sent) <= 1000


def test_pause_revokes_everything_and_ends() -> None:
    world = World(Limit(connections=20), workers=4)
    for worker in world.workers:
        worker.wants(10_000)
    world.run(until=1)
    world.ledger.set_ceiling(KEY, 0, world.now)
    world.run(until=2)
    assert world.open == 0
    sent = len(world.sent)
    world.ledger.set_ceiling(KEY, 1, world.now)
    world.run(until=3)
    assert world.open == 1
    assert len(world.sent) > sent


def test_zero_connections_grant_nothing_and_ask_for_nothing() -> None:
    ledger = Ledger(lambda _: Limit(connections=0))
    ledger.demand(0, {KEY: 10}, 0.0)
    assert ledger.decide(0.0) == []
    assert ledger.next_at(0.0) is None


def test_connection_rate_holds_back_new_connections() -> None:
    world = World(Limit(connections=100, connection_rate=Rate(10, 60)), workers=4)
    for worker in world.workers:
        worker.wants(10_000)
    world.run(until=59)
    assert 9 <= world.grants <= 10


def test_a_restart_remembers_what_was_sent() -> None:
    ledger = Ledger(lambda _: Limit(connections=1, rates=(Rate(10, 86_400),)))
    ledger.remember(KEY, [(-3600.0, 9)], 0.0)
    ledger.demand(0, {KEY: 100}, 0.0)
    assert sum(d.messages for d in ledger.decide(0.0) if isinstance(d, Allow)) == 1
    ledger.spent(0, KEY, 1, 1.0, 1.0)
    assert ledger.decide(50_000.0) == []


def test_unknown_workers_and_keys_are_harmless() -> None:
    ledger = Ledger(lambda _: Limit(connections=1))
    ledger.closed(7, KEY, 3, 0.0)
    ledger.unused(7, KEY, 3, 0.0)
    ledger.gone(7, 0.0)
    assert ledger.decide(0.0) == []
    assert ledger.held(KEY) == 0
