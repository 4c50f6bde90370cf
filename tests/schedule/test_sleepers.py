"""Rows that wait for the hours of their zone: read from a real list, on a clock of our own, a bit each."""

from __future__ import annotations

import random
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.pace.scheduler import Scheduler
from engine.rows import RowReader
from engine.schedule import Hours
from engine.work.bench import OpenBatch, Workbench
from engine.work.intake import Intake
from engine.work.messages import Assign
from engine.work.sleepers import Sleepers
from engine.zones import Zones
from formats.plan import ListFile, Plan

DAY_US = 86_400_000_000
ZONES = ("Europe/Berlin", "America/New_York", "Asia/Tokyo", None, "nowhere")


def us(text: str) -> int:
    return round(datetime.fromisoformat(text).timestamp() * 1e6)


class Clock:
    """Stands until it is told."""

    def __init__(self, now_us: int) -> None:
        self.now_us = now_us

    def wall_us(self) -> int:
        return self.now_us

    def monotonic(self) -> float:
        return self.now_us / 1e6


class OneLane:
    """A relay's routing."""

    def lane_of(self, domain: str, row: int) -> int:
        return 0

    def hold(self, domain: str, row: int) -> None:
        raise AssertionError

    def hold_waiting(self, domain: str, waiting: object) -> None:
        raise AssertionError


class Nobody:
    """No address is suppressed."""

    def check(self, addresses: Sequence[str]) -> npt.NDArray[np.bool_]:
        return np.zeros(len(addresses), bool)


class Desk:
    """One worker's intake over a list with a zone column, and who takes rows from it."""

    def __init__(
        self, folder: Path, zones: Sequence[str | None], hours: str, now: str, *, group: int = 50, ready: int = 40
    ) -> None:
        rows = len(zones)
        table = pa.table({"email": [f"r{n}@example.com" for n in range(rows)], "tz": pa.array(zones, pa.string())})
        file = folder / "list.parquet"
        pq.write_table(table, file, row_group_size=group)
        groups = [pq.ParquetFile(file).metadata.row_group(g).num_rows for g in range(-(-rows // group))]
        plan = cast(Plan, SimpleNamespace(files=[ListFile(str(file), rows, groups, "")]))
        self.clock = Clock(us(now))
        self.zones = Zones(Hours.parse(hours), "UTC")
        self.scheduler = Scheduler(ready_rows=ready, ready_rows_per_lane=ready)
        campaign = SimpleNamespace(
            log=SimpleNamespace(log_addresses=False),
            retry=SimpleNamespace(max_age=SimpleNamespace(seconds=86_400.0)),
        )
        self.bench = Workbench(cast(Any, campaign), cast(Any, None), self.scheduler, self.clock, random.Random(1))
        self.done: list[int] = []
        self.bench.batch_done = lambda batch: self.done.append(batch.batch)
        self.reads: list[int] = []
        reader = RowReader(plan, ["email", "tz"])
        reader.check = lambda first, rows: None  # type: ignore[method-assign]  # the plan is a sketch
        decode = reader.read
        reader.read = lambda *args: self.reads.append(args[0].group) or decode(*args)  # type: ignore[method-assign,func-returns-value]
        self.intake = Intake(self.bench, self.scheduler, reader, OneLane(), Nobody(), self.zones)
        self.batches = rows // group
        for number in range(self.batches):
            self.intake.assign(Assign(batch=number, first_row=number * group, rows=group))

    def take(self) -> list[int]:
        """Read and take until nothing moves; the rows that went, in their order."""
        went: list[int] = []
        self.scheduler.advance(self.clock.monotonic())
        for _ in range(100_000):
            moved = self.intake.step()
            rows = self.scheduler.take(0, 16, self.clock.monotonic())
            going = self.intake.awake(rows, 0)
            for row in going:
                self.scheduler.settle(row, 0)
                self.bench.open.pop(row)
                self.bench.has_outcome(row)
            went += going
            if not moved and not rows:
                self.scheduler.check()
                return went
        raise AssertionError("it reads for ever")


def test_each_row_goes_when_its_own_hours_open_and_until_when_is_known(tmp_path: Path) -> None:
    zones = [ZONES[n % 2] for n in range(200)]
    desk = Desk(tmp_path, zones, "08:00-20:00", "2026-12-01T09:00+01:00")
    assert desk.take() == list(range(0, 200, 2))
    assert desk.intake.asleep == 100
    assert desk.intake.next_opening == (us("2026-12-01T08:00-05:00"), "Tue 2026-12-01 08:00 EST (America/New_York)")
    assert desk.intake.unread == 0
    assert desk.done == []
    desk.clock.now_us = us("2026-12-01T08:00-05:00") - 1
    assert desk.take() == []
    desk.clock.now_us += 1
    assert desk.intake.unread == 100
    assert desk.take() == list(range(1, 200, 2))
    assert sorted(desk.done) == list(range(desk.batches))
    assert desk.intake.next_opening is None


def test_row_groups_of_closed_zones_are_not_decoded(tmp_path: Path) -> None:
    zones = ["Asia/Tokyo"] * 500 + ["Europe/Berlin"] * 50 + ["Asia/Tokyo"] * 450
    desk = Desk(tmp_path, zones, "08:00-20:00", "2026-12-01T15:00+01:00")
    assert desk.take() == list(range(500, 550))
    assert set(desk.reads) == {10}
    assert desk.intake.asleep == 950


def test_rows_that_were_ready_or_parked_when_their_hours_ended_sleep_on(tmp_path: Path) -> None:
    desk = Desk(tmp_path, ["Europe/Berlin"] * 200, "08:00-20:00", "2026-12-01T19:59+01:00", ready=10)
    for _ in range(300):
        desk.intake.step()  # some are ready; nobody takes them
    assert desk.scheduler.open_rows > 0
    desk.clock.now_us = us("2026-12-01T20:00+01:00")
    assert desk.take() == []
    assert desk.intake.asleep == 200
    assert desk.bench.open == {}
    assert desk.scheduler.open_rows == 0
    desk.clock.now_us = us("2026-12-02T08:00+01:00")
    assert desk.take() == list(range(200))


def test_a_retry_that_comes_due_at_night_waits_for_the_morning_and_keeps_its_count(tmp_path: Path) -> None:
    desk = Desk(tmp_path, ["Europe/Berlin"] * 50, "08:00-20:00", "2026-12-01T19:50+01:00")
    while not (rows := desk.scheduler.take(0, 1, desk.clock.monotonic())):
        desk.intake.step()
    (row,) = rows
    now = desk.clock.monotonic()
    desk.bench.open.pop(row)
    desk.scheduler.defer(row, 0, now + 1800, 3, now - 60, now - 60 + 86_400)
    assert len(desk.take()) == 49
    desk.clock.now_us += 2 * 3600 * 1_000_000
    assert desk.take() == []
    assert desk.scheduler.waiting == 1
    assert desk.scheduler.next_due() is not None
    desk.clock.now_us = us("2026-12-02T08:00+01:00") + 5_000_000  # the wheel's grain
    desk.scheduler.advance(desk.clock.monotonic())
    while not (rows := desk.scheduler.take(0, 1, desk.clock.monotonic())):
        desk.intake.step()
    assert desk.intake.awake(rows, 0) == [row]
    assert desk.scheduler.history(row)[0] == 3


@given(
    st.lists(st.sampled_from(ZONES), min_size=50, max_size=400),
    st.booleans(),
    st.sampled_from(["08:00-20:00", "22:00-02:00", "00:00-00:01"]),
    st.integers(0, 365 * 24 * 60),
    st.lists(st.integers(1, 9 * 3600), min_size=1, max_size=12),
    st.integers(1, 60),
)
@settings(max_examples=40, deadline=None)
def test_no_row_goes_outside_its_hours_and_each_goes_once(
    tmp_path_factory: Any,
    chosen: list[str | None],
    by_zone: bool,
    hours: str,
    minute: int,
    steps: list[int],
    ready: int,
) -> None:
    zones = (sorted(chosen, key=str) if by_zone else chosen)[: len(chosen) // 50 * 50]
    desk = Desk(tmp_path_factory.mktemp("list"), zones, hours, "2026-01-01T00:00+00:00", ready=ready)
    desk.clock.now_us += minute * 60_000_000
    went: set[int] = set()
    for step in steps:
        now_us = desk.clock.now_us
        for row in desk.take():
            assert row not in went
            went.add(row)
            assert desk.zones.is_open(desk.zones.number(zones[row]), now_us)
        left = [row for row in range(len(zones)) if row not in went]
        assert not any(desk.zones.is_open(desk.zones.number(zones[row]), now_us) for row in left)
        assert desk.intake.asleep == len(left)
        desk.clock.now_us += step * 1_000_000
    for _ in range(12):  # two days, opening by opening
        if (opening := desk.intake.next_opening) is None:
            break
        desk.clock.now_us = max(desk.clock.now_us, opening[0])
        went.update(desk.take())
    assert went == set(range(len(zones)))
    assert sorted(desk.done) == list(range(desk.batches))


def test_a_hundred_million_sleepers_fit_in_a_few_megabytes() -> None:
    sleepers = Sleepers()
    rows = np.arange(10_000, dtype=np.int64)
    zones = (rows % 40).astype(np.uint16)
    for number in range(200):
        batch = OpenBatch(number, number * 10_000, 10_000, 10_000)
        sleepers.add(batch, rows + number * 10_000, zones)
    assert len(sleepers) == 2_000_000
    beds = sleepers._beds.values()
    assert sum(bed.bits.nbytes for bed in beds) == 200 * 1250
    # 10,000 batches of 10,000 rows: 12.5 MB, and the zones of a batch.
    is_open = np.zeros(40, bool)
    is_open[7] = True
    assert sleepers.awake(is_open) == 200 * 250
    woken = sleepers.wake(is_open)
    assert woken is not None
    assert woken[1].all()
    assert len(sleepers) == 1_990_000
