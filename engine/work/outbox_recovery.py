"""What a dead outbox server left: its rows without an intent are queued again, the others end by its log, or in doubt.

PROTOCOL "The outbox", and "Taking over": first the lease is marked dead and that is committed, then the rows are
looked at. A log is read only when its lock is free, on the host that wrote it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa

from engine.control.outbox import Held, Outbox, Report, Server, State
from engine.work.outbox_log import reason_of, state_of
from engine.work.takeover import is_free
from formats.sendlog import Kind, LogDamaged, Reader, Verdict


class Recovered(msgspec.Struct):
    """What became of a dead server's rows."""

    owner: str
    queued: int = 0
    finished: int = 0
    in_doubt: int = 0


class _LastWord(msgspec.Struct):
    serial: int
    verdict: int = Verdict.NONE
    attempt: int = 0
    reason: int = 0
    code: int = 0
    text: str | None = None
    due_at_us: int = 0


def recover(
    outbox: Outbox, logs: Path, me: Server, now_us: int, *, durable: bool, say: Callable[[Recovered], None]
) -> None:
    """Take over from every server that is gone. `durable`: logs survive a power cut (`durability = "disk"`)."""
    servers = {server.id: server for server in outbox.servers()}
    for owner in outbox.owners():
        if owner == me.id:
            continue
        server = servers.get(owner)
        log = logs / f"{owner}.arrows"
        is_here = server is not None and server.host_id == me.host_id and log.exists()
        free = is_here and is_free(log)
        if server is not None and server.state == "alive" and not free and not server.is_expired(now_us):
            continue
        outbox.supersede(owner)
        found = Recovered(owner, queued=outbox.release(owner))
        held = outbox.held(owner)
        words = last_words(log, {row.id for row in held}) if free else {}
        trusted = durable or (server is not None and server.boot_id == me.boot_id)
        reports = [_report(row, words.get(row.id), now_us, trusted=trusted) for row in held]
        outbox.report(reports)
        for report in reports:
            if report.state is State.IN_DOUBT:
                found.in_doubt += 1
            elif report.state is State.QUEUED:
                found.queued += 1
            else:
                found.finished += 1
        say(found)


def _report(row: Held, word: _LastWord | None, now_us: int, *, trusted: bool) -> Report:
    """How a row with an intent came out, by the last word of its server's log."""
    doubt = Report(id=row.id, token=row.token, state=State.IN_DOUBT, attempts=row.attempts)
    if word is None or word.verdict == Verdict.NONE:
        return doubt
    if word.verdict in (Verdict.LOST, Verdict.UNTOUCHED):
        # A later intent may be gone with the power; then nothing that says "not sent" can be believed.
        state = State.WAITING if row.attempts else State.QUEUED
        return Report(id=row.id, token=row.token, state=state, attempts=row.attempts) if trusted else doubt
    state_found = state_of(word.verdict)
    if state_found is None or (state_found is State.WAITING and not trusted):
        return doubt
    return Report(
        id=row.id,
        token=row.token,
        state=state_found,
        reason=reason_of(word.reason),
        code=word.code or None,
        reply=word.text,
        attempts=word.attempt,
        wait_us=max(0, word.due_at_us - now_us),
    )


def last_words(log: Path, rows: set[int]) -> dict[int, _LastWord]:
    """Each row's last intent in the log, with its result where there is one."""
    if not rows or log.stat().st_size == 0:
        return {}
    try:
        reader = Reader(pa.memory_map(str(log)).read_buffer())
    except LogDamaged:
        return {}
    words: dict[int, _LastWord] = {}
    wanted = np.fromiter(rows, np.int64, len(rows))
    for batch in reader:
        numbers = batch.column("row").to_numpy().astype(np.int64)
        kinds = batch.column("kind").to_numpy()
        for at in np.flatnonzero(np.isin(numbers, wanted) & (kinds <= Kind.RESULT)).tolist():
            _take_in(words, batch, at, int(kinds[at]), int(numbers[at]))
    return words


def _take_in(words: dict[int, _LastWord], batch: pa.RecordBatch, at: int, kind: int, row: int) -> None:
    serial = batch.column("serial")[at].as_py()
    if kind == Kind.INTENT:
        words[row] = _LastWord(serial)
        return
    word = words.get(row)
    if word is None or serial != word.serial:
        return
    when = batch.column("at").cast(pa.int64())[at].as_py()
    word.verdict = batch.column("verdict")[at].as_py()
    word.attempt = batch.column("attempt")[at].as_py()
    word.reason = batch.column("reason")[at].as_py()
    word.code = batch.column("code")[at].as_py()
    word.text = batch.column("text")[at].as_py()
    word.due_at_us = when + batch.column("wait_s")[at].as_py() * 1_000_000


def ballast_of_the_dead(logs: Path, owners: Iterable[str]) -> None:
    """Delete the ballast files of these servers' logs."""
    for owner in owners:
        (logs / f"{owner}.ballast").unlink(missing_ok=True)
