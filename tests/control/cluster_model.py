"""A small world of machines, disks, one store and one mail server, in which everything fails at any step.

The store is the real one, and so are the book of windows, the derivation of row states and the reading of logs of the
dead; the machine around them is a few lines. `World.act` does one step. What must never happen raises `Violation` at
once; `World.end` heals what can be healed, lets one last machine finish, and looks at the whole.

`breaks` are rules of PROTOCOL left out: each must be found.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from engine.control import entries as entries_module
from engine.control.entries import DUE, HELD, OPEN, WAITING, view
from engine.control.postgres import PostgresStore
from engine.control.store import Advance, Advanced, ClaimedBatch, Decision, Entry, Incarnation, Life, Told
from engine.work.inheritance import LogStory, told_by
from engine.work.messages import Admit, Admitted, Reported
from engine.work.windows import WindowBook
from formats.plan import Batch, Partition, Plan
from formats.sendlog import Verdict

BATCH_ROWS, BATCHES, WINDOW_ROWS = 6, 3, 4
PLAN = Plan(
    campaign_id="model",
    planned_at_us=1,
    rows=BATCH_ROWS * BATCHES,
    files=[],
    batches=[Batch(BATCH_ROWS * n, BATCH_ROWS) for n in range(BATCHES)],
    partitions=[Partition(0, 2), Partition(2, 1)],
    address_column="email",
    columns=["email"],
    list_fingerprint="l",
    settings_fingerprint="s",
    templates_fingerprint="t",
    key_id="k",
    store="postgresql",
)
BREAKS = (
    "open without a living lease",
    "open without looking at the lease's row in the statement",
    "attempt before the answer",
    "attempt what was not opened",
    "attempt before the intent is durable",
    "take over what is open",
    "read before the claim",
    "believe any log",
    "reports need a lease",
    "done whatever came late",
    "resend cancels the row",
    "forget the window's limit",
    "retry in the same window",
    "a late report wins over the first",
    "in doubt is due",
)


class Violation(AssertionError):
    """A promise was broken."""


class Disk:
    """A machine's folder: logs by id, each a list of records; `durable` of them survive a crash."""

    def __init__(self) -> None:
        self.logs: dict[str, list[tuple[str, int, int, int]]] = {}
        self.durable: dict[str, int] = {}
        self.locked: set[str] = set()

    def copy(self) -> Disk:
        made = Disk()
        made.logs = {log_id: list(records[: self.durable[log_id]]) for log_id, records in self.logs.items()}
        made.durable = dict(self.durable)
        return made

    def story(self, log_id: str) -> LogStory | None:
        """What `engine.work.inheritance.read_story` would make of the log."""
        if log_id not in self.logs or log_id in self.locked:
            return None
        story = LogStory("host", "boot", {}, {}, {}, True)
        seal = ""
        for length, (kind, serial, row, verdict) in enumerate(self.logs[log_id], 1):
            seal = _seal(seal, kind, serial, row, verdict)
            story.seals[length] = seal
            if kind == "intent":
                story.intents.setdefault(row, []).append((length, serial))
            else:
                due = 1 if verdict == Verdict.DEFERRED else 0
                story.results[serial] = Reported(serial, row, 0, verdict, 0, 0, 1, due, 1)
        return story


def _seal(before: str, *record: object) -> str:
    return f"{hash((before, record)) & 0xFFFFFFFF:08x}"


class Sender:
    """One incarnation with one worker."""

    def __init__(self, id_: str, disk: Disk, window_rows: int = WINDOW_ROWS) -> None:
        self.id, self.disk = id_, disk
        self.log_id = f"{id_}-001"
        self.book = WindowBook(lambda batch: PLAN.batches[batch].first_row, window_rows)
        self.serial = 0
        self.early: list[Entry] | None = None
        self.batches: dict[int, ClaimedBatch] = {}
        self.claimed: list[tuple[ClaimedBatch, list[Entry] | None]] = []  # to be derived
        self.due: dict[int, list[int]] = {}  # batch -> rows to attempt
        self.asked: dict[int, tuple[int, int]] = {}  # serial -> (row, batch)
        self.admitted: dict[int, tuple[int, int]] = {}
        disk.logs[self.log_id] = []
        disk.durable[self.log_id] = 0
        disk.locked.add(self.log_id)

    def write(self, kind: str, serial: int, row: int, verdict: int = 0) -> None:
        self.disk.logs[self.log_id].append((kind, serial, row, verdict))

    def sync(self) -> None:
        self.disk.durable[self.log_id] = len(self.disk.logs[self.log_id])

    def position(self) -> tuple[int, str]:
        seal = ""
        records = self.disk.logs[self.log_id][: self.disk.durable[self.log_id]]
        for record in records:
            seal = _seal(seal, *record)
        return len(records), seal


class World:
    """Everything, and a count of what each row got."""

    def __init__(self, store: PostgresStore, breaks: frozenset[str] = frozenset()) -> None:
        self.store, self.breaks = store, breaks
        store.load_plan(PLAN, "print", 1, replace=True)
        self.senders: list[Sender] = []
        self.disks: list[Disk] = [Disk(), Disk()]
        self.got: Counter[int] = Counter()  # messages that the server took
        self.refused: set[int] = set()
        self.resent: Counter[int] = Counter()
        self.most_doubt = 0
        self.number = 0
        self.steps = 0
        self.stale: list[tuple[str, Advance]] = []  # statements whose first try is still on its way

    # -- steps -------------------------------------------------------------------------------------------------------

    def act(self, kind: str, a: int, b: int) -> None:
        """One step; a step that makes no sense now does nothing."""
        self.steps += 1
        rule: Callable[..., None] = getattr(self, kind)
        if kind in ("start", "copy_disk", "lose_disk", "late_arrival"):
            rule(a, b)
        elif not self.senders:
            self.start(a, b)
        else:
            rule(self.senders[a % len(self.senders)], b)

    def start(self, a: int, b: int) -> None:
        if len(self.senders) >= 4:
            return
        self.number += 1
        most = 1000 if "forget the window's limit" in self.breaks else WINDOW_ROWS
        sender = Sender(f"{self.number:016x}", self.disks[a % len(self.disks)], most)
        self.store.register(_incarnation(sender.id))
        self.senders.append(sender)
        for log_id in list(sender.disk.logs):
            self._tell_log(sender, self.store.entries_of_log(log_id))

    def claim(self, sender: Sender, b: int) -> None:
        """Its own partition, then another's; what nobody gives is taken from somebody who seems dead."""
        if len(sender.batches) >= 2:
            return
        early = None
        if "read before the claim" in self.breaks:
            early = sender.early
            sender.early = self.store.entries(list(range(BATCHES)))
        others = [i.id for i in self.store.incarnations() if i.state is Life.ALIVE and i.id != sender.id]
        if others and b % 3 == 0:
            self.store.supersede(others[b % len(others)], sender.id)
        for partition in (b % 2, 1 - b % 2):
            for batch in self.store.claim(sender.id, partition, 1):
                sender.batches[batch.number] = batch
                sender.claimed.append((batch, early))

    def derive(self, sender: Sender, b: int) -> None:
        """Read what is known of a batch that was claimed before."""
        if not sender.claimed:
            return
        batch, early = sender.claimed.pop(0)
        self._derive(sender, batch, early)

    def _derive(self, sender: Sender, batch: ClaimedBatch, early: list[Entry] | None = None) -> None:
        found = self.store.entries([batch.number]) if early is None else [e for e in early if e.batch == batch.number]
        if self._tell_log(sender, found) and early is None:
            found = self.store.entries([batch.number])
        seen = view(batch.first_row, batch.rows, self._shown(sender, found), self._decisions(batch.first_row, found))
        sender.due[batch.number] = [
            batch.first_row + place
            for place in np.flatnonzero((seen.states == DUE) | (seen.states == WAITING)).tolist()
        ]

    def _decisions(self, first_row: int, found: list[Entry]) -> list[Decision]:
        told = self.store.decisions_between(first_row, first_row + BATCH_ROWS)
        if "resend cancels the row" in self.breaks:
            rows = {d.row for d in told}
            return [
                Decision(str(e.window), place, first_row + int(offset), "resend", "", 0)
                for e in found
                for place, offset in enumerate(np.frombuffer(e.rows, "<u4"))
                if first_row + int(offset) in rows
            ]
        return told

    def _shown(self, sender: Sender, found: list[Entry]) -> list[Entry]:
        if "take over what is open" in self.breaks:
            return [e for e in found if OPEN not in e.verdicts]
        if "in doubt is due" in self.breaks:
            return [_with(e, bytes(Verdict.LOST if v == Verdict.IN_DOUBT else v for v in e.verdicts)) for e in found]
        return found

    def _tell_log(self, sender: Sender, found: list[Entry]) -> int:
        """Logs of the dead on this disk."""
        told: list[Told] = []
        for entry in found:
            log_id = entries_module.log_of(entry.window)
            if OPEN not in entry.verdicts or log_id == sender.log_id:
                continue
            story = sender.disk.story(log_id)
            if story is None:
                continue
            if "believe any log" in self.breaks:
                entry = _believed(entry, story)
            if (one := told_by(story, entry, PLAN.batches[entry.batch].first_row, 0)) is not None:
                told.append(one)
        if told:
            self.store.advance(sender.id, Advance(told=told))
        return len(told)

    def ask(self, sender: Sender, b: int) -> None:
        """Take up to two rows, make their intents durable, ask for a window."""
        rows = [(row, batch) for batch, rows in sender.due.items() for row in rows][: 1 + b % 2]
        if not rows:
            return
        asked = []
        for row, batch in rows:
            sender.due[batch].remove(row)
            sender.serial += 1
            sender.write("intent", sender.serial, row)
            sender.asked[sender.serial] = (row, batch)
            asked.append((sender.serial, row, batch))
        if "attempt before the intent is durable" not in self.breaks:
            sender.sync()
        length, seal = sender.position()
        sender.book.admit(sender.log_id, Admit(rows=asked, length=length, seal=seal))
        if "attempt before the answer" in self.breaks:
            for serial, _, _ in asked:
                sender.admitted[serial] = sender.asked.pop(serial)

    def advance(self, sender: Sender, b: int) -> None:
        """The next statement; its answer may be lost before or after the commit, or it arrives later."""
        step = sender.book.step()
        if step is None:
            return
        if b % 5 == 1:
            if b % 2 and len(self.stale) < 3:
                self.stale.append((sender.id, step))
            return
        answer = self._advance(sender, step)
        if b % 5 == 2:
            return
        for _, message in sender.book.answered(answer, answer.now_us):
            opened = isinstance(message, Admitted) or "attempt what was not opened" in self.breaks
            for serial in message.serials:
                if serial not in sender.asked:
                    continue
                row, batch = sender.asked.pop(serial)
                if opened:
                    sender.admitted[serial] = (row, batch)
                else:
                    sender.write("result", serial, row, Verdict.UNTOUCHED)
                    sender.due.setdefault(batch, []).append(row)

    def _advance(self, sender: Sender, step: Advance) -> Advanced:
        if "reports need a lease" in self.breaks:
            alive = {i.id for i in self.store.incarnations() if i.state is Life.ALIVE}
            if sender.id not in alive:
                return Advanced(False, 1, frozenset())
        return self.store.advance(sender.id, step)

    def late_arrival(self, a: int, b: int) -> None:
        """A statement whose sender gave up on it reaches the server after all."""
        if self.stale:
            self.store.advance(*self.stale.pop(a % len(self.stale)))

    def send(self, sender: Sender, b: int) -> None:
        """One admitted row goes out; the server does what it likes."""
        if not sender.admitted:
            return
        serial = sorted(sender.admitted)[b % len(sender.admitted)]
        row, batch = sender.admitted.pop(serial)
        self._check_open(sender, serial, row, batch)
        what = b % 6
        again = None
        if what <= 1:
            verdict = Verdict.ACCEPTED
            self._take(row)
        elif what == 2:
            verdict = Verdict.REJECTED
            self.refused.add(row)
        elif what == 3:
            verdict, again = Verdict.DEFERRED, row
        elif what == 4:
            verdict, again = Verdict.LOST, row
        else:  # taken, or not, and hung up
            verdict = Verdict.IN_DOUBT
            self.most_doubt += 1
            if b % 2:
                self._take(row)
        sender.write("result", serial, row, verdict)
        due_us = 1 if verdict is Verdict.DEFERRED else 0
        if again is not None and "retry in the same window" in self.breaks:
            sender.admitted[serial] = (row, batch)
            return
        sender.book.report(sender.log_id, [Reported(serial, row, batch, verdict, 0, 0, 1, due_us, 1)])
        if again is not None:
            sender.due.setdefault(batch, []).append(row)

    def _take(self, row: int) -> None:
        self.got[row] += 1
        if self.got[row] > 1 + self.resent[row]:
            raise Violation(f"I2: row {row} got {self.got[row]} messages, resent {self.resent[row]} times")

    def _check_open(self, sender: Sender, serial: int, row: int, batch: int) -> None:
        first = PLAN.batches[batch].first_row
        # In doubt holds a row as well as open does: a copy of our log was believed as far as it went.
        is_open = any(
            entries_module.log_of(e.window) == sender.log_id
            and e.verdicts[place] in (OPEN, Verdict.IN_DOUBT)
            and first + int(offset) == row
            for e in self.store.entries([batch])
            for place, offset in enumerate(np.frombuffer(e.rows, "<u4"))
        )
        if not is_open:
            raise Violation(f"I1: row {row} leaves without an open window")
        records = sender.disk.logs.get(sender.log_id, [])[: sender.disk.durable.get(sender.log_id, 0)]
        if ("intent", serial, row, 0) not in records:
            raise Violation(f"I1: row {row} leaves without a durable intent")

    def work(self, sender: Sender, b: int) -> None:
        """A row's whole way, where nothing hinders it."""
        self.ask(sender, b)
        self.advance(sender, 0)
        self.send(sender, b)
        self.advance(sender, b)

    def burst(self, sender: Sender, b: int) -> None:
        """All that it has is asked for at once; a part of what is admitted goes out."""
        for _ in range(6):
            self.ask(sender, 1)
        self.advance(sender, 0)
        for _ in range(b % 4):
            self.send(sender, b)

    def take(self, sender: Sender, b: int) -> None:
        """A claim and what follows it."""
        self.claim(sender, b)
        self.derive(sender, b)

    def give_back(self, sender: Sender, b: int) -> None:
        """Rows that were asked for or admitted are given back unattempted."""
        for rows in (sender.asked, sender.admitted):
            for serial, (row, batch) in list(rows.items())[: b % 2]:
                del rows[serial]
                sender.write("result", serial, row, Verdict.UNTOUCHED)
                sender.book.report(sender.log_id, [Reported(serial, row, batch, Verdict.UNTOUCHED, 0, 0, 0, 0, 0)])
                sender.due.setdefault(batch, []).append(row)

    def done(self, sender: Sender, b: int) -> None:
        """Say that a batch is done, where each row of it has an outcome or is held."""
        busy = {batch for rows in (sender.asked, sender.admitted) for _, batch in rows.values()}
        for number, batch in list(sender.batches.items()):
            if sender.due.get(number, [0]) or number in busy or not sender.book.knows_all_of(number):
                continue
            if "done whatever came late" in self.breaks:
                self.store.done(sender.id, number)
            elif not self.store.done_unless_late(sender.id, number, batch.late):
                late = self.store.late(sender.id, number)
                if late is not None:
                    changed = ClaimedBatch(batch.number, batch.first_row, batch.rows, 1, late)
                    sender.batches[number] = changed
                    self._derive(sender, changed)
                    continue
            del sender.batches[number]
            del sender.due[number]

    def crash(self, sender: Sender, b: int) -> None:
        """The process dies: what was not durable is gone, with a power cut, or stays, with a kill."""
        self.senders.remove(sender)
        sender.disk.locked.discard(sender.log_id)
        if sender.log_id in sender.disk.logs and b % 2:
            del sender.disk.logs[sender.log_id][sender.disk.durable[sender.log_id] :]
        else:
            sender.disk.durable[sender.log_id] = len(sender.disk.logs.get(sender.log_id, []))
        self.most_doubt += WINDOW_ROWS
        if b % 5 == 0:
            self.store.supersede(sender.id, "operator")  # released

    def leave(self, sender: Sender, b: int) -> None:
        """It ends in order; what it had in hand is given back, what it knows may be unreported."""
        if sender.asked or sender.admitted:
            return
        sender.sync()
        sender.disk.locked.discard(sender.log_id)
        self.senders.remove(sender)
        self.most_doubt += WINDOW_ROWS if sender.book.has_reports else 0
        self.store.leave(sender.id, 1, {})

    def lose_disk(self, a: int, b: int) -> None:
        """A machine is lost with its disk."""
        disk = self.disks[a % len(self.disks)]
        for sender in [s for s in self.senders if s.disk is disk]:
            self.senders.remove(sender)
            self.most_doubt += WINDOW_ROWS
        self.disks[a % len(self.disks)] = Disk()

    def copy_disk(self, a: int, b: int) -> None:
        """Somebody copies a campaign folder while it is in use."""
        self.disks[(a + 1) % len(self.disks)] = self.disks[a % len(self.disks)].copy()

    def resend(self, sender: Sender, b: int) -> None:
        """The operator orders one doubt to be sent again."""
        held = []
        for number, batch in enumerate(PLAN.batches):
            found = self.store.entries([number])
            decisions = self.store.decisions_between(batch.first_row, batch.first_row + batch.rows)
            held += view(batch.first_row, batch.rows, found, decisions).held
        if not held:
            return
        one = held[b % len(held)]
        self.resent[one.row] += 1
        self.store.decide([Decision(str(one.window), one.place, one.row, "resend", "ann", 1)])
        self.store.reopen(one.row)

    # -- the end -----------------------------------------------------------------------------------------------------

    def end(self) -> None:
        """Everybody tells what they know, one last machine does the rest, and every row is looked at."""
        while self.stale:
            self.late_arrival(0, 0)
        for sender in list(self.senders):
            for _ in range(6):
                self.give_back(sender, 1)
                self.advance(sender, 0)
            while sender.asked or sender.admitted:
                self.give_back(sender, 1)
            while sender.book.has_reports:
                self.advance(sender, 0)
            sender.disk.locked.discard(sender.log_id)
            self.senders.remove(sender)
        self.disks.append(Disk())
        self.start(len(self.disks) - 1, 0)
        (last,) = self.senders
        for _ in range(4 * BATCHES):
            for other in self.store.incarnations():
                if other.state is Life.ALIVE and other.id != last.id:
                    self.store.supersede(other.id, last.id)
            for partition in range(2):
                for batch in self.store.claim(last.id, partition, 9):
                    last.batches[batch.number] = batch
                    self._derive(last, batch)
            while any(last.due.values()) or last.asked or last.admitted or last.book.has_reports:
                self.ask(last, 1)
                self.advance(last, 0)
                while last.admitted:
                    self.send(last, 0)
            self.done(last, 0)
        self._judge()

    def _judge(self) -> None:
        held_rows = 0
        if any(tally.state != "done" for tally in self.store.batches()):
            raise Violation("a batch never comes to its end")
        for number, batch in enumerate(PLAN.batches):
            decisions = self.store.decisions_between(batch.first_row, batch.first_row + batch.rows)
            seen = view(batch.first_row, batch.rows, self.store.entries([number]), decisions)
            for place, state in enumerate(seen.states.tolist()):
                row = batch.first_row + place
                if state in (DUE, WAITING):
                    raise Violation(f"I4: row {row} is lost: its batch is done and nobody attempts it")
                held_rows += state == HELD
                if state != HELD and not self.got[row] and row not in self.refused:
                    raise Violation(f"row {row} counts as sent and nobody got it")
        if held_rows > self.most_doubt:
            raise Violation(f"{held_rows} rows are in doubt, {self.most_doubt} may be")


def _incarnation(id_: str) -> Incarnation:
    return Incarnation(
        id=id_,
        sender="same-name",
        host_id="host",
        boot_id="boot",
        pid=1,
        partition=0,
        started_at_us=1,
        renewed_at_us=1,
        lease_us=3_000_000,
    )


def _with(entry: Entry, verdicts: bytes) -> Entry:
    return Entry(
        entry.window, entry.batch, entry.at_us, entry.log_length, entry.log_seal, entry.rows, verdicts, entry.details
    )


def _believed(entry: Entry, story: LogStory) -> Entry:
    """The window as if the log had always been like this."""
    length = max(story.seals, default=0)
    seal = story.seals.get(length, "")
    return Entry(entry.window, entry.batch, entry.at_us, length, seal, entry.rows, entry.verdicts, entry.details)


def broken_store(store: PostgresStore, breaks: frozenset[str]) -> None:
    """Take a rule out of the store's own statements."""
    advance: str = store._sql["advance"]
    if "open without a living lease" in breaks:
        advance = advance.replace("WHERE EXISTS (SELECT FROM lease) AND", "WHERE").replace(
            "b.owner = %(me)s AND b.state = 'claimed'", "true"
        )
    if "a late report wins over the first" in breaks:
        advance = advance.replace("keep_first(w.verdicts, r.verdicts)", "r.verdicts")
    if "open without looking at the lease's row in the statement" in breaks:
        advance = advance.replace("AND state = 'alive' FOR SHARE", "FOR SHARE").replace(
            "b.owner = %(me)s AND b.state = 'claimed'", "true"
        )
    store._sql["advance"] = advance


ACTIONS: Sequence[str] = (
    *["work"] * 10,
    *["take"] * 4,
    *["claim", "derive"],
    *["ask", "advance", "send"] * 4,
    *["start"] * 3,
    *["done"] * 3,
    *["burst"] * 2,
    "give_back",
    "crash",
    "leave",
    "lose_disk",
    "copy_disk",
    "resend",
    *["late_arrival"] * 2,
)


def explore(store: PostgresStore, rng: Any, steps: int, breaks: frozenset[str] = frozenset()) -> int:
    """Random steps from a fresh world to its end; returns how many."""
    world = World(store, breaks)
    world.start(0, 0)
    for _ in range(steps):
        world.act(rng.choice(ACTIONS), rng.randrange(60), rng.randrange(60))
    world.end()
    return world.steps
