"""`engine status`: what is done, by whom, how fast, what waits and until when. Reads counters only, never the logs."""

from __future__ import annotations

import os

import click
import msgspec

from engine.campaign import Campaign
from engine.clock import SystemClock
from engine.commands.common import campaign_option, moment, span
from engine.control.opening import open_store
from engine.control.store import Incarnation, Life, Store
from engine.host import host_id
from engine.work.timing import schedule_of


@click.command()
@campaign_option
@click.option("--control", metavar="URL", help="Where machines meet, as given to `engine plan`.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def status(campaign: Campaign, control: str | None, as_json: bool) -> None:
    """Show what is done, by whom, how fast, what waits and until when.

    \b
    engine status
    """
    store = open_store(campaign, control)
    try:
        now_us = store_time_us(store)
        if as_json:
            told = {**_gather(store, now_us), "expired_at_us": _expired_at_us(campaign, now_us)}
            click.echo(msgspec.json.encode(told).decode())
        else:
            _tell(store, now_us, _expired_at_us(campaign, now_us))
    finally:
        store.close()


def _expired_at_us(campaign: Campaign, now_us: int) -> int | None:
    """When the campaign expired, where it has."""
    schedule = schedule_of(campaign.settings())
    return schedule.expires_at_us if schedule.is_over(now_us) else None


def store_time_us(store: Store) -> int:
    """The time that the store's times are compared with: a shared store has its own clock."""
    now_us = getattr(store, "now_us", None)
    return int(now_us()) if now_us is not None else SystemClock().wall_us()


def _gather(store: Store, now_us: int) -> dict[str, object]:
    found = store.campaign()
    return {
        "campaign": msgspec.to_builtins(found) if found else None,
        "batches": [msgspec.to_builtins(tally) for tally in store.batches()],
        "senders": [{**msgspec.to_builtins(i), "seems_alive": _seems_alive(i, now_us)} for i in store.incarnations()],
        "decisions": len(store.decisions()),
    }


def _tell(store: Store, now_us: int, expired_at_us: int | None) -> None:
    found = store.campaign()
    if found is None:
        click.echo("the store holds no plan")
        return
    click.echo(f"campaign {found.id}: {found.rows:,} rows, {found.partitions} partition(s), {found.state}")
    if expired_at_us is not None:
        click.echo(f"it expired {moment(expired_at_us)}: what was not sent stays unsent")
    for tally in store.batches():
        click.echo(f"  partition {tally.partition}: {tally.batches:,} batches ({tally.rows:,} rows) {tally.state}")
    senders = store.incarnations()
    if not senders:
        click.echo("no sender has started yet\n  next: engine send")
    for sender in senders[-10:]:
        click.echo(f"sender {sender.sender} (pid {sender.pid}), partition {sender.partition}: {_life(sender, now_us)}")
        counters = sender.counters
        if counters:
            shown = ("accepted", "bounced", "invalid", "suppressed", "expired", "in_doubt", "waiting", "left")
            words = ", ".join(f"{counters[name]:,} {name.replace('_', ' ')}" for name in shown if counters.get(name))
            click.echo(f"    {words or 'nothing yet'}; {counters.get('per_second', 0)}/s")
            due = counters.get("next_due_us")
            waiting, asleep = counters.get("waiting"), counters.get("asleep")
            if isinstance(asleep, int) and asleep:
                words = f"{asleep:,} rows wait for the sending hours of their zones"
                click.echo(f"    {words}, the first until {counters.get('opens_at')}")
            if waiting and waiting != asleep and isinstance(due, int):
                click.echo(f"    next retry {moment(due)}")
            if counters.get("reason"):
                click.echo(f"    {counters['reason']}")


def _seems_alive(sender: Incarnation, now_us: int, *, is_shared: bool = False) -> bool:
    if sender.state is not Life.ALIVE:
        return False
    if is_shared or sender.host_id != host_id():
        return now_us - sender.renewed_at_us < sender.lease_us
    try:
        os.kill(sender.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _life(sender: Incarnation, now_us: int) -> str:
    ago = span(max(0, now_us - sender.renewed_at_us) / 1e6)
    match sender.state:
        case Life.ENDED:
            return f"ended {ago} ago"
        case Life.SUPERSEDED:
            return "was taken over"
        case _:
            return f"sending, heard {ago} ago" if _seems_alive(sender, now_us) else f"gone without a word {ago} ago"
