"""The protocol explored: machines, disks and answers fail at any step; each rule left out is found out."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

from engine.control.postgres import PostgresStore
from tests.control.cluster_model import ACTIONS, BREAKS, Violation, World, broken_store, explore

pytestmark = pytest.mark.postgres


@pytest.fixture
def shared(control_url: str) -> Iterator[PostgresStore]:
    store = PostgresStore(control_url, create=True)
    yield store
    store.close()


@pytest.mark.slow
def test_any_order_of_steps_sends_nobody_twice_and_loses_nobody(shared: PostgresStore) -> None:
    class Cluster(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            self.world = World(shared)
            self.world.start(0, 0)

        @rule(kind=st.sampled_from(ACTIONS), a=st.integers(0, 59), b=st.integers(0, 59))
        def act(self, kind: str, a: int, b: int) -> None:
            self.world.act(kind, a, b)

        def teardown(self) -> None:
            self.world.end()

    run_state_machine_as_test(
        Cluster,
        settings=settings(
            max_examples=15, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )


def test_long_lives(shared: PostgresStore) -> None:
    for seed in range(6):
        explore(shared, random.Random(seed), 150)


# What chance finds in minutes only, told step by step.
STORIES = {
    "read before the claim": [
        ("start", 0, 0),
        ("take", 0, 2),
        ("start", 1, 0),
        ("claim", 1, 1),
        *[("work", 0, 0)] * 2,
        ("claim", 1, 6),
        *[("derive", 1, 0)] * 3,
        *[("work", 1, 0)] * 9,
    ],
    "reports need a lease": [
        ("start", 0, 0),
        ("take", 0, 2),
        ("ask", 0, 0),
        ("advance", 0, 0),
        ("send", 0, 0),
        ("start", 1, 0),
        ("claim", 1, 6),
    ],
    "forget the window's limit": [("start", 0, 0), ("take", 0, 2), ("burst", 0, 0), ("lose_disk", 0, 0)],
    "a late report wins over the first": [
        ("start", 0, 0),
        ("take", 0, 2),
        ("ask", 0, 1),
        ("advance", 0, 0),
        ("send", 0, 0),
        ("advance", 0, 11),
        ("advance", 0, 0),
        ("send", 0, 0),
        ("advance", 0, 0),
        ("late_arrival", 0, 0),
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("broken", BREAKS)
def test_a_rule_left_out_is_found_out(shared: PostgresStore, broken: str) -> None:
    if broken in STORIES:
        _tell(shared, broken, frozenset())  # with the rule the same steps do no harm
    broken_store(shared, frozenset({broken}))
    with pytest.raises(Violation):
        _break(shared, broken)


def _break(store: PostgresStore, broken: str) -> None:
    if broken in STORIES:
        _tell(store, broken, frozenset({broken}))
    for seed in range(60):
        explore(store, random.Random(seed), 120, frozenset({broken}))


def _tell(store: PostgresStore, story: str, breaks: frozenset[str]) -> None:
    world = World(store, breaks)
    for step in STORIES[story]:
        world.act(*step)
    world.end()


@pytest.mark.long
def test_a_hundred_thousand_steps(shared: PostgresStore) -> None:
    steps, seed = 0, 1000
    while steps < 100_000:
        steps += explore(shared, random.Random(seed), 200)
        seed += 1
