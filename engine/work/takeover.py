"""What a new incarnation finds: locks of the dead, their logs, and the states of the rows it takes over.

One sender per partition on a host: `PartitionLock` is held for life. A worker may outlive its supervisor while it
finishes what is in flight; its log stays locked until then, and is not read before.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa

from engine.campaign import Campaign, make_private_folder
from engine.clock import Clock
from engine.config import Settings
from engine.control.store import ClaimedBatch, Decision, Incarnation, Life, Store
from engine.errors import EngineError, Exit
from engine.work.damaged import damaged_logs, mark_of
from engine.work.logbook import Logbook
from engine.work.messages import Assign
from engine.work.recovery import DUE, HELD, WAITING, RowStates, read_states
from formats.plan import Plan
from formats.sendlog import Header, LogDamaged, is_torn_start

ORPHAN_PATIENCE_S = 20.0


class PartitionRuns(EngineError):
    """Partition {partition} is being sent by {owner}."""

    exit_code = Exit.TRY_AGAIN
    hint = "Wait for it (`engine status` shows it), or stop it with SIGTERM; then run the same command again."


class OrphanWorks(EngineError):
    """A worker of an earlier sender still finishes what it had in flight: its log {log} is locked."""

    exit_code = Exit.TRY_AGAIN
    hint = (
        "It ends by itself, at the latest when its last reply is overdue (10 minutes). Then run the same command again."
    )


class ForeignHost(EngineError):
    """This campaign folder was begun on another machine ({host}), which may still be running."""

    exit_code = Exit.TRY_AGAIN
    hint = (
        "Stop the sender there first. Then `engine send --adopt` goes on here: rows that the other machine had begun"
        " and not finished are held in doubt."
    )


class PartitionLock:
    """Held by the one sender of a partition; the lock goes with the process, whatever ends it."""

    def __init__(self, campaign: Campaign, partition: int, owner: str) -> None:
        """Take it; raises PartitionRuns with the owner's name."""
        make_private_folder(campaign.run)
        path = campaign.run / f"partition-{partition}.lock"
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            held_by = os.pread(self._file, 400, 0).decode("utf-8", "replace") or "another process"
            os.close(self._file)
            raise PartitionRuns(partition=partition, owner=held_by) from None
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, owner.encode(), 0)

    def release(self) -> None:
        """Give it back."""
        os.ftruncate(self._file, 0)
        os.close(self._file)


class BatchState(msgspec.Struct, frozen=True):
    """What the logs say of a batch that was begun before."""

    assign: Assign
    final: int
    in_doubt: int


def wait_for_logs(paths: Iterable[Path], say: Callable[[str], None], patience_s: float = ORPHAN_PATIENCE_S) -> None:
    """Until no process holds any of these logs; raises OrphanWorks when that takes too long."""
    deadline = time.monotonic() + patience_s
    for path in paths:
        told = False
        while not is_free(path):
            if not told:
                say(f"waiting for a worker of an earlier sender to finish what it has in flight ({path.name})")
                told = True
            if time.monotonic() > deadline:
                raise OrphanWorks(log=path)
            time.sleep(0.05)


def is_free(path: Path) -> bool:
    """Whether no living process holds the log's lock."""
    file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(file)
    return True


def log_buffers(paths: Iterable[Path], damaged: Callable[[str, str], None]) -> list[pa.Buffer]:
    """The logs as mapped memory; one without a readable header is told to `damaged` and left out.

    A worker that was killed before or in its first write leaves an empty file or the beginning of a header: nothing
    can have been attempted on its strength, and that is no damage.
    """
    buffers = []
    for path in paths:
        if path.stat().st_size == 0:
            continue
        buffer = pa.memory_map(str(path)).read_buffer()
        try:
            # Only the header: reading on is the business of whoever takes the buffer.
            read_states([buffer.slice(0, min(buffer.size, 65_536))], 0, 0)
        except LogDamaged as problem:
            if not is_torn_start(buffer):
                damaged(path.stem, str(problem))
            continue
        buffers.append(buffer)
    return buffers


def batch_states(
    batches: Iterable[ClaimedBatch],
    buffers: list[pa.Buffer],
    decisions: Iterable[Decision],
    *,
    resend_doubt: bool,
    damaged: Callable[[str, str], None] = lambda log_id, problem: None,
) -> dict[int, BatchState]:
    """What is left to do of each batch.

    `resend_doubt` is the standing order `--in-doubt resend`: it cancels the doubt of a row once. `damaged` is told of
    each log that is not whole up to a torn tail.
    """
    wanted = sorted(batches, key=lambda batch: batch.first_row)
    if not wanted:
        return {}
    first = wanted[0].first_row
    last = wanted[-1].first_row + wanted[-1].rows
    told = [(decision.log_id, decision.serial, decision.what) for decision in decisions]
    states = read_states(buffers, first, last - first, told, damaged)
    return {batch.number: _batch_state(batch, states, resend_doubt) for batch in wanted}


def _batch_state(batch: ClaimedBatch, states: RowStates, resend_doubt: bool) -> BatchState:
    place = batch.first_row - states.first_row
    mine = states.states()[place : place + batch.rows].copy()
    end = batch.first_row + batch.rows
    resent = [row for row in states.resent() if batch.first_row <= row < end]
    if resend_doubt:
        again = [row for row in states.held() if batch.first_row <= row < end and row not in set(resent)]
        mine[[row - batch.first_row for row in again]] = DUE
        resent += again
    waiting = [w for w in states.waiting() if batch.first_row <= w.row < end]
    skip = mine != DUE
    assign = Assign(
        batch=batch.number,
        first_row=batch.first_row,
        rows=batch.rows,
        skip=np.packbits(skip).tobytes() if skip.any() else b"",
        waiting=waiting,
        resent=sorted(resent),
    )
    in_doubt = int((mine == HELD).sum())
    return BatchState(assign, int(skip.sum()) - in_doubt - int((mine == WAITING).sum()), in_doubt)


def take_over(
    campaign: Campaign,
    settings: Settings,
    plan: Plan,
    store: Store,
    me: Incarnation,
    *,
    adopt: bool,
    say: Callable[[str], None],
    clock: Clock,
) -> frozenset[str]:
    """Mark the dead of this partition dead and wait for their logs. We hold the partition's lock: nobody else does.

    Rows that another machine, or with `durability = "process"` another boot of this one, had begun and not finished
    are held in doubt by a log of our own (intents without results), so that every later reader sees the same. So are
    the open rows of batches whose sender's logs are gone, and of every begun batch where a log here is damaged.
    Returns the incarnations whose processes are gone for certain. Raises ForeignHost, OrphanWorks.
    """
    others = [i for i in store.incarnations() if i.partition == me.partition and i.id != me.id]
    foreign = [i for i in others if i.host_id != me.host_id and i.state is not Life.ENDED]
    if foreign and not adopt:
        raise ForeignHost(host=foreign[0].sender)
    doubtful = {i.id for i in others if i.host_id != me.host_id}
    if settings.log.durability == "process":
        doubtful |= {i.id for i in others if i.boot_id != me.boot_id and i.state is not Life.ENDED}
    owners = store.owners(me.partition or 0)
    for other in others:
        if other.state is Life.ALIVE:
            store.supersede(other.id, me.id)
            say(f"{other.sender} (pid {other.pid}) is gone; taking over its batches")
    alive = {i.id for i in store.incarnations() if i.state is Life.ALIVE and i.id != me.id}
    mine = [path for path in campaign.log_files() if path.name.split("-")[0] not in alive]
    wait_for_logs(mine, say)
    for path in campaign.logs.glob("*.ballast"):
        if path.name.split("-")[0] not in alive:
            path.unlink(missing_ok=True)
    here = {path.name.partition("-")[0] for path in mine}
    gone = {owner for owner in owners.values() if owner not in here and owner not in alive}
    of_others = {i.id for i in store.incarnations() if i.partition not in (None, me.partition)}
    damaged = damaged_logs(path for path in mine if path.name.partition("-")[0] not in of_others)
    begun = [
        batch
        for batch in store.begun(me.partition or 0)
        if damaged or (owner := owners.get(batch.number)) in doubtful or owner in gone
    ]
    if begun:
        held = _hold_in_doubt(campaign, settings, plan, store, me, begun, clock, damaged)
        why = (
            f"begun by senders whose logs are damaged ({', '.join(damaged)})" if damaged
            else "whose logs are not here" if any(owners.get(batch.number) in gone for batch in begun)
            else "begun elsewhere"
        )  # fmt: skip
        say(f"{held} rows of {len(begun)} batches {why} are held in doubt")
    return frozenset(i.id for i in others if i.host_id == me.host_id)


def _hold_in_doubt(
    campaign: Campaign,
    settings: Settings,
    plan: Plan,
    store: Store,
    me: Incarnation,
    begun: list[ClaimedBatch],
    clock: Clock,
    damaged: Mapping[str, str],
) -> int:
    """Write an intent without a result for each row of these batches that is neither final nor held."""
    states = batch_states(
        begun, log_buffers(campaign.log_files(), lambda log_id, why: None), store.decisions(), resend_doubt=False
    )
    header = Header(
        log_id=f"{me.id}-adopt",
        campaign_id=plan.campaign_id,
        plan_fingerprint=campaign.plan_and_fingerprint()[1],
        incarnation=me.id,
        sender=me.sender,
        host_id=me.host_id,
        boot_id=me.boot_id,
        worker=0,
        started_at_us=clock.wall_us(),
    )
    log = Logbook(campaign.logs / f"{header.log_id}.arrows", header, clock, durability=settings.log.durability)
    source, held = log.source("adopted"), 0
    for name, problem in damaged.items():
        log.event(mark_of(name, problem))
    for batch in begun:
        assign = states[batch.number].assign
        open_ = np.ones(batch.rows, dtype=bool)
        if assign.skip:
            open_ = np.unpackbits(np.frombuffer(assign.skip, np.uint8), count=batch.rows) == 0
        rows = [batch.first_row + place for place in np.flatnonzero(open_).tolist()] + [w.row for w in assign.waiting]
        for row in sorted(rows):
            log.intent(row, 0, 0, source)
        held += len(rows)
        log.write()
    log.close()
    return held
