"""`engine restore-store`: the store of one machine, made anew from its plan and its logs."""

from __future__ import annotations

import click

from engine.campaign import Campaign, fingerprint, sync_folder
from engine.clock import SystemClock
from engine.commands.common import campaign_option
from engine.control.sqlite import SqliteStore
from engine.control.store import Incarnation
from engine.errors import EngineError, Exit
from engine.host import boot_id, host_id
from engine.results.scan import open_log
from formats.sendlog import Header, LogDamaged

_AT_ONCE = 1000  # batches claimed by one statement


class CannotRestore(EngineError):
    """The store of {folder} is not made anew: {problem}."""

    exit_code = Exit.PLAN
    hint = "{next}"


@click.command("restore-store")
@campaign_option
def restore_store(campaign: Campaign) -> None:
    """Make control.sqlite anew, where it is gone, from the plan and the logs of the folder.

    What was sent is in the logs; the store knows only who has which batch. Lost with it are your words on rows in
    doubt (they are in doubt again), and a pause or a cancel.

    \b
    engine restore-store --campaign spring
    """
    plan, _ = campaign.plan_and_fingerprint()
    if plan.store != "sqlite":
        problem, then = "its plan uses a shared store", "Say --control postgresql://... to the other commands."
        raise CannotRestore(folder=campaign.folder, problem=problem, next=then)
    if campaign.store_file.exists():
        problem, then = "there is one", "Go on with `engine send`."
        raise CannotRestore(folder=campaign.folder, problem=problem, next=then)
    headers = _headers(campaign)
    if not headers:
        problem = "there is no log to tell what was sent"
        then = "Put the logs back. `engine plan --replace` starts from nothing, and sends to everybody again."
        raise CannotRestore(folder=campaign.folder, problem=problem, next=then)
    _must_know_all(campaign, headers)
    fresh = campaign.store_file.with_suffix(".restored")
    fresh.unlink(missing_ok=True)
    now_us = SystemClock().wall_us()
    store = SqliteStore(fresh)
    try:
        store.load_plan(plan, fingerprint(campaign.plan_file.read_bytes()), plan.planned_at_us, replace=True)
        last = max(headers, key=lambda header: header.started_at_us)
        _begin_all(store, len(plan.partitions), last, now_us)
    finally:
        store.close()
    # Only whole: a store that does not know yet which batches were begun would have them sent again.
    fresh.rename(campaign.store_file)
    sync_folder(campaign.folder)
    click.echo(f"{campaign.store_file}: made anew; what became of each row is read from {len(headers)} logs")
    click.echo("  next: `engine send` goes on. Your words on rows in doubt are lost: `engine doubt list`")


def _must_know_all(campaign: Campaign, headers: list[Header]) -> None:
    """The logs are believed where whoever wrote them is gone, and took no record along."""
    foreign = [header for header in headers if header.host_id != host_id()]
    if foreign:
        problem = f"a log of it was written on another machine ({foreign[0].sender}), which may still be sending"
        then = "Run it there, or bring that machine's control.sqlite along and `engine send --adopt`."
        raise CannotRestore(folder=campaign.folder, problem=problem, next=then)
    if campaign.settings().log.durability == "process" and any(header.boot_id != boot_id() for header in headers):
        problem = 'with durability = "process" the machine may have lost records when it was started again'
        then = "Put control.sqlite back from a copy: the next `engine send` holds such rows in doubt."
        raise CannotRestore(folder=campaign.folder, problem=problem, next=then)


def _headers(campaign: Campaign) -> list[Header]:
    found = []
    for path in campaign.log_files():
        if path.stat().st_size == 0:
            continue  # its worker was killed before its first write
        try:
            found.append(open_log(str(path)).log.header)
        except LogDamaged:
            click.echo(f"warning: {path} has no readable header; `engine send` holds what it may have sent", err=True)
    return found


def _begin_all(store: SqliteStore, partitions: int, last: Header, now_us: int) -> None:
    """Every batch counts as begun, by one whose logs are here: they say what was sent."""
    me = Incarnation(
        id=last.incarnation,
        sender=last.sender,
        host_id=last.host_id,
        boot_id=last.boot_id,
        pid=0,
        partition=None,
        started_at_us=last.started_at_us,
        renewed_at_us=now_us,
        lease_us=0,
    )
    store.register(me)
    for partition in range(partitions):
        while len(store.claim(me.id, partition, _AT_ONCE)) == _AT_ONCE:
            pass
    store.leave(me.id, now_us, {})
