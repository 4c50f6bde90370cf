"""`engine machines`, `batches`, `pause`, `resume`, `cancel`, `release`, `placement`: several machines, one operator."""

from __future__ import annotations

import getpass
from importlib.resources import files

import click
import msgspec

from engine.campaign import Campaign
from engine.commands.common import campaign_option, span
from engine.commands.status import _seems_alive, store_time_us
from engine.control.opening import control_url, open_shared, open_store
from engine.control.store import Incarnation, Life, SharedStore, Store
from engine.errors import EngineError, Exit

PLACEMENTS = ("systemd", "kubernetes", "slurm", "ssh", "local", "grafana", "alerts")


class NotShared(EngineError):
    """The campaign in {folder} is sent by one machine: its store is SQLite in the folder."""

    exit_code = Exit.USAGE
    hint = "`engine status` shows it. Several machines need a plan made with --control postgresql://..."


class NobodyThere(EngineError):
    """No sender {name!r} holds a lease. Those that do: {names}."""

    exit_code = Exit.USAGE
    hint = "`engine machines` lists them; a name or the first digits of an id will do."


control_option = click.option("--control", metavar="URL", help="Where machines meet, as given to `engine plan`.")


def open_for_operator(campaign: Campaign, control: str | None) -> Store:
    """The campaign's store; from anywhere, where a URL is given."""
    if not campaign.plan_file.exists() and (url := control_url(campaign, None, control)) is not None:
        return open_shared(url, None)
    return open_store(campaign, control)


def _open_shared(campaign: Campaign, control: str | None) -> SharedStore:
    store = open_for_operator(campaign, control)
    if not hasattr(store, "advance"):
        store.close()
        raise NotShared(folder=campaign.folder)
    return store  # type: ignore[return-value]  # it has what a shared store has


@click.command()
@campaign_option
@control_option
@click.option("--confirm-failover", is_flag=True, help="After a failover: this server is the right one, go on with it.")
@click.option("--json", "as_json", is_flag=True, help="A JSON object per line.")
def machines(campaign: Campaign, control: str | None, confirm_failover: bool, as_json: bool) -> None:
    """Who sends: each start of a sender, its lease, and what it has done.

    \b
    engine machines --control postgresql://rowpost@db.example.com/rowpost
    """
    store = _open_shared(campaign, control)
    try:
        if confirm_failover:
            click.echo(f"{store.url} is the right server: {store.confirm_server()}")
            return
        now_us = store.now_us()
        for sender in store.incarnations():
            if as_json:
                click.echo(msgspec.json.encode(sender).decode())
            else:
                click.echo(_line(sender, now_us))
        if not store.is_failover_safe():
            click.echo("warning: commits do not wait for the standbys: a failover may forget what was sent.", err=True)
    finally:
        store.close()


def _line(sender: Incarnation, now_us: int) -> str:
    ago = span(max(0, now_us - sender.renewed_at_us) / 1e6)
    left_s = (sender.renewed_at_us + sender.lease_us - now_us) / 1e6
    match sender.state:
        case Life.ENDED:
            state = f"ended {ago} ago"
        case Life.SUPERSEDED:
            state = f"lost its lease; last heard {ago} ago"
        case _ if left_s > 0:
            state = f"sending, lease for {span(left_s)} more"
        case _:
            state = f"silent for {ago}, its lease has run out"
    counters = sender.counters
    sent = f"{counters.get('accepted', 0):,} accepted, {counters.get('per_second', 0)}/s" if counters else "nothing yet"
    return f"{sender.sender}  {sender.id}  partition {sender.partition}  {state}  ({sent})"


@click.command()
@campaign_option
@control_option
@click.option("--json", "as_json", is_flag=True, help="A JSON object per line.")
def batches(campaign: Campaign, control: str | None, as_json: bool) -> None:
    """Batches that were begun, and whose they are.

    \b
    engine batches
    """
    store = _open_shared(campaign, control)
    try:
        for one in store.batch_owners():
            if as_json:
                click.echo(msgspec.json.encode(one).decode())
                continue
            whose = f"{one.sender} ({one.owner_state})" if one.owner else "nobody"
            last = one.first_row + one.rows - 1
            text = f"batch {one.number}  partition {one.partition}  rows {one.first_row:,} to {last:,}  {one.state}"
            click.echo(f"{text}  {whose}  claimed {one.started} times")
        if not as_json:
            for tally in store.batches():
                text = f"partition {tally.partition}: {tally.batches:,} batches ({tally.rows:,} rows) {tally.state}"
                click.echo(text, err=True)
    finally:
        store.close()


def _set_state(campaign: Campaign, control: str | None, state: str) -> tuple[Store, list[Incarnation]]:
    store = open_for_operator(campaign, control)
    store.set_campaign_state(state)
    now_us = store_time_us(store)
    is_shared = hasattr(store, "advance")
    return store, [i for i in store.incarnations() if _seems_alive(i, now_us, is_shared=is_shared)]


@click.command()
@campaign_option
@control_option
def pause(campaign: Campaign, control: str | None) -> None:
    """Attempt nothing new until `engine resume`; what is in flight finishes.

    \b
    engine pause
    """
    store, senders = _set_state(campaign, control, "paused")
    store.close()
    click.echo(f"paused; {len(senders)} running sender(s) obey within a second or two")


@click.command()
@campaign_option
@control_option
def resume(campaign: Campaign, control: str | None) -> None:
    """Go on after `engine pause` or `engine cancel`.

    \b
    engine resume
    """
    store, senders = _set_state(campaign, control, "ready")
    store.close()
    click.echo(f"resumed; {len(senders)} sender(s) are running")
    if not senders:
        click.echo("  next: engine send --partition N", err=True)


@click.command()
@campaign_option
@control_option
@click.option("--yes", is_flag=True, help="Do not ask.")
def cancel(campaign: Campaign, control: str | None, yes: bool) -> None:
    """End the campaign: nothing new is attempted, and every lease ends. Rows that are in windows may still be sent.

    \b
    engine cancel
    """
    if not yes:
        click.confirm("Cancel the campaign? Rows that were not attempted stay unsent.", abort=True, err=True)
    store, senders = _set_state(campaign, control, "cancelled")
    try:
        if hasattr(store, "advance"):
            for sender in senders:
                store.supersede(sender.id, f"cancelled by {getpass.getuser()}")
    finally:
        store.close()
    click.echo("cancelled")
    for sender in senders:
        click.echo(f"{sender.sender} ({sender.id}) stops; until it has, it may still send what it has in hand")


@click.command()
@campaign_option
@control_option
@click.option(
    "--machine", "name", required=True, metavar="NAME", help="A sender's name, or the first digits of its id."
)
def release(campaign: Campaign, control: str | None, name: str) -> None:
    """End a machine's lease now, so that others may take its batches at once. It closes no window.

    Rows that the machine has in hand are held in doubt until it reports them, or you decide on them.

    \b
    engine release --machine host-b
    """
    store = _open_shared(campaign, control)
    try:
        holding = [i for i in store.incarnations() if i.state is Life.ALIVE]
        chosen = [i for i in holding if i.sender == name or i.id.startswith(name)]
        if not chosen:
            raise NobodyThere(name=name, names=", ".join(sorted({i.sender for i in holding})) or "none")
        for sender in chosen:
            store.supersede(sender.id, f"released by {getpass.getuser()}")
            click.echo(f"the lease of {sender.sender} ({sender.id}, partition {sender.partition}) is ended")
        click.echo("The machine may still be running: it stops when it hears of it, and reports what it had in hand.")
    finally:
        store.close()


@click.command()
@click.argument("kind", type=click.Choice(PLACEMENTS))
def placement(kind: str) -> None:
    """Print files that place a sender on each machine: systemd, kubernetes, slurm, ssh; or five of them here (local).

    \b
    engine placement systemd > /etc/systemd/system/rowpost@.service
    engine placement local > five.sh && sh five.sh
    """
    names = {
        "systemd": "rowpost@.service",
        "kubernetes": "kubernetes.yaml",
        "slurm": "slurm.sh",
        "ssh": "ssh.sh",
        "local": "local.sh",
        "grafana": "grafana.json",
        "alerts": "grafana-alerts.yaml",
    }
    click.echo(files("engine").joinpath("placement", names[kind]).read_text("utf-8"), nl=False)
