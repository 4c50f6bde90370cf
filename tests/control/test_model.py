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


@pytest.mark.parametrize("broken", BREAKS)
def test_a_rule_left_out_is_found_out(shared: PostgresStore, broken: str) -> None:
    broken_store(shared, frozenset({broken}))
    with pytest.raises(Violation):
        for seed in range(400):
            explore(shared, random.Random(seed), 120, frozenset({broken}))


@pytest.mark.slow
def test_a_hundred_thousand_steps(shared: PostgresStore) -> None:
    steps, seed = 0, 1000
    while steps < 100_000:
        steps += explore(shared, random.Random(seed), 200)
        seed += 1
