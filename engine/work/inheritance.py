"""Logs of the dead that are here: what they say of windows that the store still holds open.

PROTOCOL "Taking over": an open window of another incarnation holds its rows in doubt, except where its very log is
here, its lock is obtained, the host id matches and it is whole up to a torn tail. A worker asks for a window after the
intents of its rows are durable, and the window records how far the log had come then: so a log that is shorter, or
sealed otherwise, is a copy or a victim of a lost disk, and is not believed.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from engine.campaign import Campaign, make_private_folder, write_whole
from engine.clock import Clock
from engine.config import Settings
from engine.control.entries import OPEN, log_of, window_id
from engine.control.store import Advance, Entry, Incarnation, Life, Settled, SharedStore, Told
from engine.work.messages import Reported
from engine.work.takeover import ForeignHost, wait_for_logs
from engine.work.windows import DUE_AGAIN, detail
from formats.plan import Plan
from formats.sendlog import Kind, LogDamaged, Reader, Verdict


class LogStory(msgspec.Struct):
    """A log read whole: its intents by row with the offset at which they were sealed, and results by serial."""

    host_id: str
    boot_id: str
    seals: dict[int, str]  # length -> seal
    intents: dict[int, list[tuple[int, int]]]  # row -> (offset, serial), in order
    results: dict[int, Reported]
    is_whole: bool

    @property
    def serials(self) -> frozenset[int]:
        """Every intent."""
        return frozenset(serial for told in self.intents.values() for _, serial in told)

    def is_the_log_of(self, entry: Entry) -> bool:
        """Whether the window can have been opened by what wrote this log, and nothing since was lost."""
        return self.is_whole and (not entry.log_length or self.seals.get(entry.log_length) == entry.log_seal)


def read_story(path: Path, rows: Iterable[int] | None) -> LogStory | None:
    """What a log says of `rows`, or of all (None); None where it cannot be read, or a living process holds it."""
    try:
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.fstat(file).st_size:
            return None
        return _read(
            pa.memory_map(str(path)).read_buffer(), None if rows is None else np.array(sorted(rows), np.uint64)
        )
    except (OSError, LogDamaged):
        return None
    finally:
        os.close(file)


def _read(buffer: pa.Buffer, rows: npt.NDArray[np.uint64] | None) -> LogStory:
    reader = Reader(buffer)
    header = reader.log.header
    story = LogStory(header.host_id, header.boot_id, {}, {}, {}, True)
    first_at: dict[int, int] = {}
    for batch in reader:
        length = reader.log.length
        story.seals[length] = reader.log.seal
        if rows is not None:
            wanted = np.isin(batch.column("row").to_numpy(), rows)
            if not wanted.any():
                continue
            batch = batch.filter(pa.array(wanted))
        names = ("kind", "serial", "row", "verdict", "reason", "code", "attempt", "wait_s")
        columns: list[list[Any]] = [batch.column(name).to_pylist() for name in names]
        at = batch.column("at").cast(pa.int64()).to_pylist()
        for kind, serial, row, verdict, reason, code, attempt, wait_s, at_us in zip(*columns, at, strict=True):
            if kind == Kind.INTENT:
                story.intents.setdefault(row, []).append((length, serial))
                first_at.setdefault(row, at_us)
            elif kind == Kind.RESULT and serial:
                due_us = at_us + wait_s * 1_000_000 if verdict == Verdict.DEFERRED else 0
                first_us = first_at.get(row, 0)
                told = Reported(serial, row, 0, verdict, reason, code, attempt, due_us, first_us)
                story.results[serial] = told
    story.is_whole = reader.log.damage is None
    return story


def told_by(story: LogStory, entry: Entry, first_row: int, offset_us: int) -> Told | None:
    """What the log says of the window's open rows; None where it says nothing that is believed."""
    if not story.is_the_log_of(entry):
        return None
    verdicts, details, is_due = bytearray(entry.verdicts), b"", False
    rows = np.frombuffer(entry.rows, "<u4").astype(np.int64) + first_row
    for place, verdict in enumerate(entry.verdicts):
        if verdict != OPEN:
            continue
        # The window's own intent: the last one of the row that was sealed when the window was asked for.
        before = [serial for offset, serial in story.intents.get(int(rows[place]), ()) if offset <= entry.log_length]
        if not before:
            told = Reported(0, 0, 0, Verdict.UNTOUCHED, 0, 0, 0, 0, 0)
        else:
            doubt = Reported(before[-1], 0, 0, Verdict.IN_DOUBT, 0, 0, 0, 0, 0)
            told = story.results.get(before[-1], doubt)
        verdicts[place] = told.verdict
        details += detail(place, told, offset_us)
        is_due |= told.verdict in DUE_AGAIN
    if bytes(verdicts) == entry.verdicts:
        return None
    return Told(entry.window, entry.verdicts, bytes(verdicts), details, is_due)


def report_logs_here(
    store: SharedStore,
    incarnation: str,
    logs: Path,
    entries: Iterable[Entry],
    first_row_of: dict[int, int],
    *,
    host_id: str,
    boot_id: str | None,
    offset_us: int,
) -> int:
    """Tell the store what logs of the dead in `logs` say of these windows; how many windows were told of.

    `boot_id` is given where a log of another boot is not to be believed (`durability = "process"`).
    """
    open_ = [entry for entry in entries if OPEN in entry.verdicts and not log_of(entry.window).startswith(incarnation)]
    by_log: dict[str, list[Entry]] = {}
    for entry in open_:
        by_log.setdefault(log_of(entry.window), []).append(entry)
    told: list[Told] = []
    for log_id, mine in by_log.items():
        rows = {int(row) for e in mine for row in np.frombuffer(e.rows, "<u4").astype(np.int64) + first_row_of[e.batch]}
        story = read_story(logs / f"{log_id}.arrows", rows)
        if story is None or story.host_id != host_id or (boot_id is not None and story.boot_id != boot_id):
            continue
        told += [t for e in mine if (t := told_by(story, e, first_row_of[e.batch], offset_us)) is not None]
    for start in range(0, len(told), 500):
        store.advance(incarnation, Advance(told=told[start : start + 500]))
    return len(told)


def tell_again(store: SharedStore, incarnation: str, logs: Iterable[Path], plan: Plan, offset_us: int) -> int:
    """After a failover that may have lost commits: tell the store every last word that these logs have; how many.

    Their workers have ended. What the store did not lose it hears twice, which changes no row's state. Raises
    StoreAway; said again from the beginning it does no harm.
    """
    starts = np.array([batch.first_row for batch in plan.batches])
    told = 0
    for path in sorted(logs):
        story = read_story(path, None)
        if story is None:
            continue
        by_batch: dict[int, list[Reported]] = {}
        for row, intents in story.intents.items():
            serial = intents[-1][1]
            last = story.results.get(serial) or Reported(serial, row, 0, Verdict.IN_DOUBT, 0, 0, 0, 0, 0)
            if last.verdict not in (Verdict.LOST, Verdict.UNTOUCHED):
                by_batch.setdefault(int(np.searchsorted(starts, row, side="right")) - 1, []).append(last)
        number = 1 << 47  # above every number that the book gave
        for batch, mine in by_batch.items():
            for start in range(0, len(mine), 500):
                some, number = mine[start : start + 500], number + 1
                offsets = np.array([one.row - plan.batches[batch].first_row for one in some], "<u4").tobytes()
                details = b"".join(detail(place, one, offset_us) for place, one in enumerate(some))
                verdicts = bytes(one.verdict for one in some)
                settled = Settled(window_id(path.stem, number), batch, offsets, verdicts, details)
                store.advance(incarnation, Advance(settled=[settled]))
                told += len(some)
    return told


class ToldServer:
    """Which server the logs of a folder were told to, in a file beside them: another one may have forgotten it."""

    def __init__(self, campaign: Campaign) -> None:
        self._file = campaign.run / "told-server"

    def is_another(self, mark: str) -> bool:
        """Whether the logs here must be told again. A folder without the file has told nobody yet."""
        try:
            return self._file.read_text("utf-8") != mark
        except FileNotFoundError:
            return True

    def remember(self, mark: str) -> None:
        """Everything here is told to this one. A crash before it is whole means that all is told once more."""
        make_private_folder(self._file.parent)
        write_whole(self._file, mark.encode())


def go_on_here(
    campaign: Campaign,
    settings: Settings,
    plan: Plan,
    store: SharedStore,
    me: Incarnation,
    *,
    adopt: bool,
    say: Callable[[str], None],
    clock: Clock,
) -> frozenset[str]:
    """A sender starts in this folder: what its predecessors here left open is told from their logs.

    We hold the partition's lock, so whoever sent this partition from this folder is dead. A folder that was begun on
    another machine is refused unless `adopt`; its logs are not believed, so what they hold open stays in doubt.
    Returns the incarnations whose processes are gone for certain. Raises ForeignHost, OrphanWorks.
    """
    gone: set[str] = set()
    here = {path.name.partition("-")[0] for path in campaign.log_files()}
    for other in store.incarnations():
        if other.id not in here:
            continue
        if other.host_id != me.host_id and not adopt:
            raise ForeignHost(host=other.sender)
        if other.host_id != me.host_id or other.partition != me.partition:
            continue
        gone.add(other.id)
        if other.state is Life.ALIVE:
            store.supersede(other.id, me.id)
            say(f"{other.sender} (pid {other.pid}) is gone; taking over its batches")
    alive = {i.id for i in store.incarnations() if i.state is Life.ALIVE}
    mine = [path for path in campaign.log_files() if path.name.partition("-")[0] not in alive]
    wait_for_logs(mine, say)
    offset_us = store.now_us() - clock.wall_us()
    first_row_of = {number: batch.first_row for number, batch in enumerate(plan.batches)}
    told = 0
    for path in mine:
        told += report_logs_here(
            store,
            me.id,
            campaign.logs,
            store.entries_of_log(path.stem),
            first_row_of,
            host_id=me.host_id,
            boot_id=me.boot_id if settings.log.durability == "process" else None,
            offset_us=offset_us,
        )
    server, mark = ToldServer(campaign), store.server_mark()
    if server.is_another(mark):
        # Whoever sent here before us may have ended before the failover, or before it could tell of it.
        if mine and (again := tell_again(store, me.id, mine, plan, offset_us)):
            say(f"the store may have forgotten: told it again of {again} rows that the logs here know")
        server.remember(mark)
    for path in campaign.logs.glob("*.ballast"):
        if path.name.partition("-")[0] not in alive:
            path.unlink(missing_ok=True)
    if told:
        say(f"told the store of {told} windows what the logs here know")
    return frozenset(gone)
