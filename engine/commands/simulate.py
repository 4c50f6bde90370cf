"""`engine simulate`: a day of sending on a virtual clock, in seconds."""

from __future__ import annotations

import csv
import time
from pathlib import Path
from typing import Literal

import click
import msgspec

from engine.commands.common import span
from engine.rehearse.course import Course, Told
from engine.rehearse.models import load_world
from engine.rehearse.picture import picture
from engine.rehearse.simulate import simulate as play


@click.command()
@click.option("--world", "name", default="hidden", show_default=True, help="A shipped model, or a file of your own.")
@click.option("--rows", type=click.IntRange(1), default=50_000, show_default=True)
@click.option("--machines", type=click.IntRange(1, 1000), default=1, show_default=True, help="One source each.")
@click.option("--workers", type=click.IntRange(1, 256), default=4, show_default=True, help="On each machine.")
@click.option("--seed", type=int, default=1, show_default=True)
@click.option("--throttle", type=click.Choice(["adaptive", "classic"]), default="adaptive", show_default=True)
@click.option("--minutes", type=click.Path(dir_okay=False, path_type=Path), help="Write minute by minute as CSV.")
@click.option("--picture", "svg", type=click.Path(dir_okay=False, path_type=Path), help="Draw it as SVG.")
@click.option("--events", is_flag=True, help="Print every change of the throttle, on stderr.")
@click.option("--json", "as_json", is_flag=True, help="The figures as one JSON object on stdout.")
def simulate(
    name: str,
    rows: int,
    machines: int,
    workers: int,
    seed: int,
    throttle: Literal["adaptive", "classic"],
    minutes: Path | None,
    svg: Path | None,
    events: bool,
    as_json: bool,
) -> None:
    """Play a campaign against modelled providers with the engine's own scheduler, slots, throttle and retries.

    \b
    engine simulate --world even
    engine simulate --world hidden --rows 200000 --workers 8 --events
    engine simulate --world my-providers.toml --throttle classic --minutes minutes.csv
    """
    world = load_world(name)
    started = time.perf_counter()
    course = Course(world=world, rows=rows, machines=machines, workers=workers, seed=seed, throttle=throttle)
    told = play(course)
    if events:
        for source, event in told.events:
            provider = world.provider[int(event.key.provider)].name if _is_named(told, event.key.provider) else "tail"
            click.echo(f"{event.at:9.1f}  {source}  {provider}: {event.kind.value}: {event.reason}", err=True)
    if minutes is not None:
        with minutes.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(("minute", "provider", "accepted", "limited", "connections", "rate_per_s"))
            writer.writerows(msgspec.structs.astuple(sample) for sample in told.samples)
    if svg is not None:
        svg.write_text(picture(told.samples, f"{world.title} ({throttle} throttle)"), "utf-8")
    if as_json:
        click.echo(msgspec.json.encode(figures(told)).decode())
    else:
        _print(told, time.perf_counter() - started)


def _is_named(told: Told, lane: str) -> bool:
    return int(lane) < len(told.course.world.provider)


def figures(told: Told) -> dict[str, object]:
    """What a script wants of a course."""
    return {
        "world": told.course.world.title,
        "rows": told.course.rows,
        "machines": told.course.machines,
        "workers": told.course.workers,
        "seed": told.course.seed,
        "throttle": told.course.throttle,
        "bound_s": told.bound_s,
        "duration_s": told.duration_s,
        "ratio": told.ratio,
        "limited_share": told.limited_share,
        "providers": [
            {**msgspec.structs.asdict(provider), "limited_share": provider.limited_share} for provider in told.providers
        ],
    }


def _print(told: Told, took_s: float) -> None:
    course = told.course
    click.echo(
        f"{course.world.title}: {course.rows:,} rows, {course.machines} x {course.workers} processes, "
        f"seed {course.seed}, {course.throttle} throttle (played in {took_s:.1f} s)",
        err=True,
    )
    click.echo(
        f"{'provider':<14}{'rows':>10}{'bound':>12}{'finished':>12}{'of bound':>10}{'attempts':>10}{'limited':>9}"
    )
    for p in told.providers:
        of_bound = f"{p.finished_s / p.bound_s:.3f}" if 0 < p.bound_s < float("inf") else "-"
        bound = span(p.bound_s) if p.bound_s < float("inf") else "never"
        click.echo(
            f"{p.name:<14}{p.rows:>10,}{bound:>12}{span(p.finished_s):>12}{of_bound:>10}"
            f"{p.attempts:>10,}{p.limited_share:>9.2%}"
        )
    bound = span(told.bound_s) if told.bound_s < float("inf") else "never"
    click.echo(
        f"{'all':<14}{course.rows:>10,}{bound:>12}{span(told.duration_s):>12}{told.ratio:>10.3f}"
        f"{sum(p.attempts for p in told.providers):>10,}{told.limited_share:>9.2%}"
    )
