"""`engine rehearse`: the campaign against played providers on this machine, before the first mail."""

from __future__ import annotations

from pathlib import Path

import click
import msgspec

from engine.campaign import Campaign
from engine.commands.common import campaign_option, span
from engine.pace.budgets import BUDGETS_FILE, load_budgets
from engine.rehearse.models import load_world
from engine.rehearse.rehearsal import Compared, Rehearsal, Rehearsed
from engine.route.provider import load_providers

LATE_SHARE = 0.05  # of the longest planned time; a late start of more spoils the comparison


@click.command()
@campaign_option
@click.option("--sample", type=click.IntRange(1), help="So many rows, at even distances; all by default.")
@click.option("--speed", type=click.FloatRange(min=1), default=1.0, show_default=True, help="Time goes so much faster.")
@click.option("--world", help="Models by provider's name; without, each provider holds its budget.")
@click.option("--processes", type=click.IntRange(1, 64), default=2, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True, help="What the played providers' chance draws from.")
@click.option("--picture", type=click.Path(dir_okay=False, path_type=Path), help="Draw the course as SVG.")
@click.option("--json", "as_json", is_flag=True, help="The figures as one JSON object on stdout.")
def rehearse(
    campaign: Campaign,
    sample: int | None,
    speed: float,
    world: str | None,
    processes: int,
    seed: int,
    picture: Path | None,
    as_json: bool,
) -> None:
    """Send the planned campaign to played providers on loopback, and compare with the capacity plan.

    Nothing leaves this machine. The rehearsal has a folder, logs and suppressions of its own in the campaign's.

    \b
    engine rehearse --sample 2000 --speed 60
    engine rehearse --world my-providers.toml --picture course.svg
    """
    made = campaign.plan()
    rehearsal = Rehearsal(
        campaign,
        campaign.settings(),
        made,
        load_budgets(campaign.folder / BUDGETS_FILE),
        load_providers(),
        sample=sample,
        speed=speed,
        world=load_world(world) if world is not None else None,
        processes=processes,
        seed=seed,
    )
    done = rehearsal.run()
    if picture is not None:
        from engine.rehearse.drawing import svg_of

        title = f"rehearsal of {made.campaign_id}: {done.rows:,} rows" + (f", time x {speed:g}" if speed != 1 else "")
        picture.write_text(svg_of(done.course, title), "utf-8")
    if as_json:
        figures = msgspec.to_builtins(done)
        figures.pop("course")
        click.echo(msgspec.json.encode(figures).decode())
    else:
        _print(done)
    raise SystemExit(done.exit_code)


def _print(done: Rehearsed) -> None:
    heads = (
        f"{'provider':<20}{'rows':>10}{'accepted':>10}{'planned':>12}{'reached':>12}{'late':>8}{'ratio':>8}"
        f"{'connections':>13}"
    )
    click.echo(heads + "  refused")
    for one in done.providers:
        click.echo(_line(one))
    longest = max((one.planned_s or 0.0 for one in done.providers), default=0.0)
    late_s = max((one.late_s for one in done.providers), default=0.0)
    if late_s > LATE_SHARE * longest:
        click.echo(
            "note: this machine was too busy to shake hands in time. `late` is left out of the ratio;"
            " a lower --speed or more rows make it matter less.",
            err=True,
        )


def _line(one: Compared) -> str:
    planned = span(one.planned_s) if one.planned_s is not None else "never"
    reached = span(one.reached_s) if one.reached_s is not None else "-"
    ratio = f"{one.ratio:.2f}" if one.ratio is not None else "-"
    refused = ", ".join(f"{count:,} {kind.replace('_', ' ')}" for kind, count in sorted(one.refused.items()))
    return (
        f"{one.provider:<20}{one.rows:>10,}{one.accepted:>10,}{planned:>12}{reached:>12}{one.late_s:>6.1f} s{ratio:>8}"
        f"{one.most_connections:>13,}  {refused or 'none'}"
    )
