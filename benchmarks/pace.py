"""Pace: scheduler decisions a second and bytes a row, and the campaigns of issue 7 on a virtual clock.

python benchmarks/pace.py            quick: 60,000 rows, one machine (about 30 s)
python benchmarks/pace.py --full     a million rows, five machines of eight processes, six virtual hours, fresh seeds
python benchmarks/pace.py --only scheduler
"""

from __future__ import annotations

import argparse
import random
import sys
import time
import tracemalloc
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import msgspec

from engine.pace.scheduler import Scheduler
from engine.rehearse.course import Course, Told
from engine.rehearse.models import Outage, World, load_world
from engine.rehearse.simulate import simulate


def decisions(rows: int) -> None:
    """A worker's rows through the scheduler: 45, 15 and 12 % at three lanes, the rest at 20,000."""
    lane_of = [n % 100 for n in range(rows)]
    lane_of = [0 if n < 45 else 1 if n < 60 else 2 if n < 72 else 3 + i % 20_000 for i, n in enumerate(lane_of)]
    scheduler = Scheduler(rng=random.Random(1))
    made = at = done = 0
    started = time.process_time()
    while done < rows:
        while at < rows and scheduler.has_room():
            scheduler.add(at, lane_of[at])
            at += 1
            made += 1
        for lane in scheduler.demand():
            for row in scheduler.take(lane, 16, 0.0):
                if row % 10 == 0 and scheduler.history(row)[0] == 0:
                    scheduler.defer(row, lane, 60.0, 1, 0.0, 86_400.0)
                else:
                    scheduler.settle(row, lane)
                    done += 1
                made += 2
        if at == rows and scheduler.waiting:
            scheduler.advance(100.0)
        for row in scheduler.wanted(2048):
            scheduler.returned(row)
            made += 1
    took = time.process_time() - started
    # A decision: keep or park, hand out, settle or defer, read again.
    print(f"scheduler: {rows / took:,.0f} rows a second per core, {made / took:,.0f} decisions a second per core")


def memory(rows: int) -> None:
    """Bytes a parked and a waiting row, by the allocator's count."""
    for place in ("parked", "waiting"):
        tracemalloc.start()
        scheduler = Scheduler(rng=random.Random(1))
        for lane in (0, 1, 2):
            scheduler.suspend_lane(lane, None, "full")
        before = tracemalloc.get_traced_memory()[0]
        for row in range(rows):
            if place == "parked":
                scheduler.add(row, row % 3)
            else:
                scheduler.defer(row, row % 3, 60.0 + row % 3600, 1, 0.0, 86_400.0)
        print(f"scheduler: {(tracemalloc.get_traced_memory()[0] - before) / rows:.1f} bytes per {place} row")
        tracemalloc.stop()


def show(name: str, told: Told, took: float) -> None:
    print(
        f"{name}: {told.course.rows:,} rows, {told.course.machines} x {told.course.workers} processes, seed "
        f"{told.course.seed}: bound {told.bound_s:,.0f} s, took {told.duration_s:,.0f} s, ratio {told.ratio:.3f}, "
        f"{told.limited_share:.2%} of attempts limited ({took:.0f} s to play)"
    )
    for p in told.providers:
        print(
            f"    {p.name:<12} {p.rows:>9,} rows  bound {p.bound_s:>8,.0f}  finished {p.finished_s:>8,.0f}  "
            f"limited {p.limited_share:.2%}"
        )


def played(name: str, course: Course) -> Told:
    started = time.perf_counter()
    told = simulate(course)
    show(name, told, time.perf_counter() - started)
    return told


def blocked(world: World, name: str, from_s: float, to_s: float) -> World:
    providers = tuple(
        msgspec.structs.replace(model, outages=(Outage("block", from_s, to_s),)) if model.name == name else model
        for model in world.provider
    )
    return World(f"{world.title}, {name} blocks everything for an hour", providers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--only", choices=["scheduler", "even", "hidden", "classic", "block"])
    parser.add_argument("--seed", type=int, default=None, help="default: fresh")
    args = parser.parse_args()
    seed = args.seed if args.seed is not None else random.SystemRandom().randrange(10**6)
    rows, machines, workers = (1_000_000, 5, 8) if args.full else (60_000, 1, 4)

    def course(world: World, throttle: Literal["adaptive", "classic"] = "adaptive") -> Course:
        return Course(world=world, rows=rows, machines=machines, workers=workers, seed=seed, throttle=throttle)

    def wants(what: str) -> bool:
        return args.only in (None, what)

    if wants("scheduler"):
        decisions(2_000_000 if args.full else 300_000)
        memory(1_000_000 if args.full else 200_000)
    even, hidden = load_world("even"), load_world("hidden")
    free = None
    if wants("even") or wants("block"):
        free = played("limits as budgeted", course(even))
    if wants("hidden"):
        played("hidden limits, default", course(hidden))
    if wants("classic"):
        played("hidden limits, classic", course(hidden, "classic"))
    if wants("block"):
        assert free is not None
        # The provider that is not the bound's: its hour must not become anybody else's.
        world = blocked(even, "microsoft", 600.0, 4200.0)
        told = played("one blocks for an hour", course(world))
        for was, is_ in zip(free.providers, told.providers, strict=True):
            print(
                f"    {was.name:<12} finished {was.finished_s:,.1f} s without, {is_.finished_s:,.1f} s with the block"
            )


if __name__ == "__main__":
    main()
