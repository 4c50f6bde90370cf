"""Fixtures of the bounce room."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from sent_campaign import Sent, StoppedClock

from engine.bounce.classify import shipped_rules
from engine.bounce.desk import Desk
from engine.bounce.ours import Ours


@pytest.fixture
def sent(tmp_path: Path) -> Sent:
    return Sent(tmp_path / "weekly-31", "weekly-31")


@pytest.fixture
def clock() -> StoppedClock:
    return StoppedClock()


@pytest.fixture
def desk(sent: Sent, clock: StoppedClock) -> Iterator[Desk]:
    opened = Desk(Ours([sent.folder]), shipped_rules(), clock)
    yield opened
    opened.close()
