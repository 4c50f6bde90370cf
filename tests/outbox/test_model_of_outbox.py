"""The outbox's protocol explored over the real tables: each rule that is left out is found out."""

from __future__ import annotations

import itertools
import os
import random
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

from engine.control.outbox import Outbox
from engine.outbox import connect
from tests.outbox.post_model import ACTIONS, BREAKS, Violation, World, explore

if TYPE_CHECKING:
    from tests.control.postgres_server import PostgresServer

_numbers = itertools.count()
New = Callable[[], tuple[Outbox, Path]]


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=[pytest.mark.postgres, pytest.mark.slow])])
def new(request: pytest.FixtureRequest) -> Iterator[New]:
    """Makes an outbox that nobody used yet, and a folder for its servers' logs."""
    # In memory, where there is such a folder: every commit is synced.
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    opened: list[Outbox] = []
    with tempfile.TemporaryDirectory(dir=memory) as home:

        def make() -> tuple[Outbox, Path]:
            while opened:
                opened.pop().close()
            folder = Path(home) / f"logs{next(_numbers)}"
            folder.mkdir()
            if request.param == "sqlite":
                where = str(folder / "outbox.sqlite")
            else:
                where = _schema(request.getfixturevalue("database"))
            opened.append(connect(where))
            return opened[0], folder

        yield make
        for box in opened:
            box.close()


def _schema(server: PostgresServer) -> str:
    import psycopg

    name = f"model{next(_numbers)}"
    with psycopg.connect(server.url, autocommit=True) as db:
        db.execute(f"CREATE SCHEMA {name}")  # type: ignore[arg-type]  # a name of ours
    return f"{server.url}?options=-csearch_path%3D{name}"


def run(new: New, examples: int) -> None:
    class Office(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            self.world = World(*new())

        @rule(kind=st.sampled_from(ACTIONS), a=st.integers(0, 59), b=st.integers(0, 59))
        def act(self, kind: str, a: int, b: int) -> None:
            self.world.act(kind, a, b)

        def teardown(self) -> None:
            self.world.end()

    run_state_machine_as_test(
        Office,
        settings=settings(
            max_examples=examples, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )


def test_any_order_of_steps_sends_nobody_twice_and_loses_nobody(new: New) -> None:
    run(new, 5)


@pytest.mark.long
def test_many_orders_and_long_lives(new: New) -> None:
    run(new, 100)
    for seed in range(60):
        explore(*new(), random.Random(seed), 250)


# What chance finds in minutes only, told step by step.
STORIES = {
    # Lost before the dot and written down, tried again, killed: the log on the disk must know of the second try.
    "the table before the log": [
        ("enqueue", 0, 0),
        ("claim", 0, 0),
        ("attempt", 0, 0),
        ("hear", 0, 0),
        ("write", 0, 0),
        ("attempt", 0, 0),
        ("dot", 0, 1),
        ("kill", 0, 0),
    ],
    # A server sleeps past its lease with a claim in hand, another sends the row; the sleeper wakes up.
    "one token for ever": [
        ("start", 0, 0),
        ("enqueue", 0, 0),
        ("claim", 0, 0),
        ("sleep", 0, 0),
        ("recover", 1, 1),
        ("claim", 1, 0),
        ("attempt", 1, 0),
        ("dot", 1, 1),
        ("wake", 0, 0),
        ("attempt", 0, 0),
        ("dot", 0, 1),
    ],
}


def tell(new: New, story: str, broken: str = "") -> None:
    world = World(*new(), broken)
    for step in STORIES[story]:
        world.act(*step)
    world.end()


def live_many_lives(new: New, broken: str) -> None:
    for seed in range(100):
        explore(*new(), random.Random(seed), 120, broken)


@pytest.mark.parametrize("broken", BREAKS)
def test_each_rule_left_out_is_found_out(new: New, broken: str) -> None:
    with pytest.raises(Violation):
        tell(new, broken, broken) if broken in STORIES else live_many_lives(new, broken)


@pytest.mark.parametrize("story", STORIES)
def test_the_same_stories_with_every_rule_break_no_promise(new: New, story: str) -> None:
    tell(new, story)
