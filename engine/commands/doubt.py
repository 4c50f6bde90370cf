"""`engine doubt`: rows of which nobody knows whether the server took them, and the operator's word on them.

A connection that is lost between the final dot and its reply (RFC 1047), or a process killed there, leaves doubt. It is
held until a bounce or you resolve it: `accept` says they were taken, `resend` says send them again.
"""

from __future__ import annotations

import getpass
from collections.abc import Callable
from typing import cast
from uuid import UUID

import click
import msgspec

from engine.campaign import Campaign
from engine.commands.common import RowNumbers, campaign_option, moment
from engine.commands.status import _seems_alive, store_time_us
from engine.control.entries import held_rows, log_of
from engine.control.opening import open_store
from engine.control.store import Decision, Life, SharedStore, Store
from engine.errors import EngineError, Exit
from engine.rows import RowReader
from engine.work.recovery import Doubt, read_states
from engine.work.takeover import log_buffers
from formats.plan import Plan


class SayWhich(EngineError):
    """Nothing chosen."""

    exit_code = Exit.USAGE
    hint = "Say which rows: --rows 3,17-20, --domain example.com, or --all."


class SenderRuns(EngineError):
    """{sender} is sending and may still learn what became of these rows."""

    exit_code = Exit.TRY_AGAIN
    hint = "Wait until it has ended, or say --now."


@click.group()
def doubt() -> None:
    """Rows that may or may not have been sent: list them, accept them, send them again."""


def _choice(command: Callable[..., None]) -> Callable[..., None]:
    for option in (
        campaign_option,
        click.option("--rows", type=RowNumbers(), help="Row numbers: 3,17-20."),
        click.option("--domain", help="Rows of this recipient domain."),
    ):
        command = option(command)
    return command


@doubt.command("list")
@_choice
@click.option("--json", "as_json", is_flag=True, help="A JSON object per line.")
def list_(campaign: Campaign, rows: list[int] | None, domain: str | None, as_json: bool) -> None:
    """List rows in doubt.

    \b
    engine doubt list --domain example.com
    """
    plan = campaign.plan()
    chosen = _chosen(campaign, plan, rows, domain)
    addresses = dict(RowReader(plan, [plan.address_column]).pick(sorted({d.row for d in chosen})))
    for one in chosen:
        address = addresses[one.row][0]
        if as_json:
            click.echo(msgspec.json.encode({**msgspec.to_builtins(one), "address": address}).decode())
        else:
            click.echo(f"row {one.row}  {address}  since {moment(one.at_us)}  (log {one.log_id}, intent {one.serial})")
    if not as_json:
        click.echo(f"{len(chosen)} in doubt", err=True)


@doubt.command()
@_choice
@click.option("--all", "everything", is_flag=True, help="Every row in doubt.")
def accept(campaign: Campaign, rows: list[int] | None, domain: str | None, everything: bool) -> None:
    """Take rows for sent: they are `accepted` in the report.

    \b
    engine doubt accept --all
    """
    _decide(campaign, rows, domain, everything, "accept", wait=False)


@doubt.command()
@_choice
@click.option("--all", "everything", is_flag=True, help="Every row in doubt.")
@click.option("--now", is_flag=True, help="Also while a sender runs that may still learn the answer.")
def resend(campaign: Campaign, rows: list[int] | None, domain: str | None, everything: bool, now: bool) -> None:
    """Send rows again with the next `engine send`; who got the first copy gets a second.

    \b
    engine doubt resend --rows 3,17-20
    """
    _decide(campaign, rows, domain, everything, "resend", wait=not now)


def _doubts(campaign: Campaign, plan: Plan) -> list[Doubt]:
    """Rows in doubt: by the logs here, or, with a store that machines share, by its windows."""
    store = open_store(campaign)
    try:
        if plan.store != "sqlite":
            found = held_rows(cast(SharedStore, store), [batch.first_row for batch in plan.batches], plan.rows)
            return [Doubt(str(one.window), one.place, one.row, one.at_us) for one in found]
        told = [(d.log_id, d.serial, d.what) for d in store.decisions()]
    finally:
        store.close()
    buffers = log_buffers(campaign.log_files(), lambda path, why: click.echo(f"warning: {path}: {why}", err=True))
    states = read_states(buffers, 0, plan.rows, told)
    held = states.held()
    return [d for d in states.doubts if d.row in held]


def _chosen(campaign: Campaign, plan: Plan, rows: list[int] | None, domain: str | None) -> list[Doubt]:
    chosen = [d for d in _doubts(campaign, plan) if rows is None or d.row in set(rows)]
    if domain is not None:
        numbers = sorted({d.row for d in chosen})
        found = RowReader(plan, [plan.address_column]).pick(numbers)
        matching = {row for row, (address,) in found if str(address).rpartition("@")[2].lower() == domain.lower()}
        chosen = [d for d in chosen if d.row in matching]
    return sorted(chosen, key=lambda d: (d.row, d.at_us))


def _ask_senders(store: Store, plan: Plan, chosen: list[Doubt], now_us: int) -> None:
    """Raises SenderRuns where one that may still learn the answer seems alive.

    With a shared store those are the senders whose windows hold the rows; otherwise whoever sends.
    """
    is_shared = plan.store != "sqlite"
    asked = {log_of(UUID(d.log_id)).partition("-")[0] for d in chosen} if is_shared else None
    for sender in store.incarnations():
        if asked is not None and sender.id in asked:
            # Superseded ones as well: a stopped process may go on and report.
            if now_us - sender.renewed_at_us < sender.lease_us and sender.state is not Life.ENDED:
                raise SenderRuns(sender=sender.sender)
        elif asked is None and _seems_alive(sender, now_us):
            raise SenderRuns(sender=sender.sender)


def _decide(
    campaign: Campaign, rows: list[int] | None, domain: str | None, everything: bool, what: str, *, wait: bool
) -> None:
    if rows is None and domain is None and not everything:
        raise SayWhich()
    plan = campaign.plan()
    chosen = _chosen(campaign, plan, rows, domain)
    store = open_store(campaign)
    try:
        now_us = store_time_us(store)
        if wait:
            _ask_senders(store, plan, chosen, now_us)
        who = getpass.getuser()
        store.decide([Decision(d.log_id, d.serial, d.row, what, who, now_us) for d in chosen])
        if what == "resend":
            for row in sorted({d.row for d in chosen}):
                store.reopen(row)
    finally:
        store.close()
    verb = "accepted" if what == "accept" else "to be sent again"
    click.echo(f"{len({d.row for d in chosen})} rows {verb}")
    if what == "resend" and chosen:
        click.echo("  next: engine send", err=True)
