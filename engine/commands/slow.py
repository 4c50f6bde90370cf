"""`engine slow`: the operator's word on the pace of a running campaign, at one provider or at each."""

from __future__ import annotations

import getpass

import click

from engine.campaign import Campaign
from engine.commands.cluster import control_option, open_for_operator
from engine.commands.common import campaign_option, span
from engine.commands.send import SpanType
from engine.commands.status import store_time_us
from engine.control.store import Override


@click.command()
@campaign_option
@control_option
@click.option("--provider", metavar="NAME", help="As `engine send` shows it; without it the word holds at each.")
@click.option("--connections", type=click.IntRange(1), help="At most so many connections.")
@click.option("--per-second", type=click.FloatRange(0.01), help="At most so many messages a second.")
@click.option("--share", type=click.FloatRange(0.01, 1.0), help="Of what the budget allows, 0.5 for half of it.")
@click.option("--for", "for_s", type=SpanType(), help="So long, for instance 30m; without it until --lift.")
@click.option("--lift", is_flag=True, help="Take the word back.")
def slow(
    campaign: Campaign,
    control: str | None,
    provider: str | None,
    connections: int | None,
    per_second: float | None,
    share: float | None,
    for_s: float | None,
    lift: bool,
) -> None:
    """Slow a running campaign down; senders obey within a second or two, and the word outlives them.

    \b
    engine slow --share 0.5                              half the pace everywhere
    engine slow --provider gmail --connections 2 --for 1h
    engine slow --provider gmail --lift
    """
    said = {"connections": connections, "per_second": per_second, "share": share}
    if lift == any(value is not None for value in said.values()):
        raise click.UsageError("say --connections, --per-second or --share, or --lift")
    store = open_for_operator(campaign, control)
    try:
        ends = None if for_s is None else store_time_us(store) + round(for_s * 1e6)
        scope = "campaign" if provider is None else f"provider:{provider}"
        for what, value in said.items():
            # A new word replaces the whole of the old one; what is not said holds no more.
            text = "" if value is None else f"{value:g}"
            store.set_override(Override(scope, what, text, getpass.getuser(), 0, ends if value is not None else 1))
    finally:
        store.close()
    where = f"at {provider}" if provider is not None else "at each provider"
    if lift:
        click.echo(f"lifted {where}")
        return
    words = ", ".join(f"{name.replace('_', ' ')} {value:g}" for name, value in said.items() if value is not None)
    click.echo(f"slowed {where}: {words}" + (f", for {span(for_s)}" if for_s is not None else ""))
