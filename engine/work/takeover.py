"""What a new incarnation finds: locks of the dead, their logs, and the states of the rows it takes over.

One sender per partition on a host: `PartitionLock` is held for life. A worker may outlive its supervisor while it
finishes what is in flight; its log stays locked until then, and is not read before.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa

from engine.campaign import Campaign, make_private_folder
from engine.control.store import ClaimedBatch, Decision
from engine.errors import EngineError, Exit
from engine.work.messages import Assign
from engine.work.recovery import DUE, HELD, WAITING, RowStates, read_states
from formats.sendlog import LogDamaged

ORPHAN_PATIENCE_S = 20.0


class PartitionRuns(EngineError):
    """Partition {partition} is being sent by {owner}."""

    exit_code = Exit.TRY_AGAIN
    hint = "Wait for it (`engine status` shows it), or stop it with SIGTERM; then run the same command again."


class OrphanWorks(EngineError):
    """A worker of an earlier sender still finishes what it had in flight: its log {log} is locked."""

    exit_code = Exit.TRY_AGAIN
    hint = "It ends by itself, at the latest when its last reply is overdue (10 minutes). Then run the same command again."


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
        while not _is_free(path):
            if not told:
                say(f"waiting for a worker of an earlier sender to finish what it has in flight ({path.name})")
                told = True
            if time.monotonic() > deadline:
                raise OrphanWorks(log=path)
            time.sleep(0.05)


def _is_free(path: Path) -> bool:
    file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(file)
    return True


def log_buffers(paths: Iterable[Path], damaged: Callable[[Path, str], None]) -> list[pa.Buffer]:
    """The logs as mapped memory; one without a readable header is told to `damaged` and left out.

    A worker that was killed before its first write leaves an empty file: no record, no damage.
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
            # A header torn by the kill itself: nothing can have been attempted on its strength.
            damaged(path, str(problem))
            continue
        buffers.append(buffer)
    return buffers


def batch_states(
    batches: Iterable[ClaimedBatch],
    buffers: list[pa.Buffer],
    decisions: Iterable[Decision],
    *,
    resend_doubt: bool,
) -> dict[int, BatchState]:
    """What is left to do of each batch.

    `resend_doubt` is the standing order `--in-doubt resend`: it cancels the doubt of a row once.
    """
    wanted = sorted(batches, key=lambda batch: batch.first_row)
    if not wanted:
        return {}
    first = wanted[0].first_row
    last = wanted[-1].first_row + wanted[-1].rows
    told = [(decision.log_id, decision.serial, decision.what) for decision in decisions]
    states = read_states(buffers, first, last - first, told)
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
