"""The outbox protocol as a world of steps: the real tables, logs and recovery, and servers that fail anywhere.

A step is a word and two numbers. Writers enqueue under keys, servers claim, say their intent to log and table, let the
final dot go, hear of it or not, write their log, report; they are killed, they sleep past their lease and wake up;
answers of the table are lost before or after its commit; operators resend, accept and cancel.

What must hold: nobody gets a key's mail more often than once and once more per ordered resend; at the end each row has
an outcome or is in doubt, "accepted" was had, and in doubt are only rows of which nobody could know.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from engine.clock import SystemClock
from engine.control.outbox import Claimed, Mail, Outbox, OutboxAway, Report, Server, State
from engine.work.outbox_log import OutboxLog
from engine.work.outbox_recovery import recover
from formats.sendlog import Header, Verdict

KEYS = 6
FAR_US = 10**12
_names = itertools.count()

# Each is a rule of PROTOCOL, left out.
BREAKS = (
    "sends what was not granted",
    "takes a lost answer for a yes",
    "one token for ever",
    "rows with an intent are queued again",
    "the table before the log",
    "no idempotency key",
)


class Violation(AssertionError):
    """A promise was broken."""


class Flaky:
    """The table, whose answers may be lost: `fail` says which, for the next call of a server's."""

    def __init__(self, box: Outbox, world: World) -> None:
        self._box, self._world = box, world
        self.fail = ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._box, name)

    def claim(self, owner: str, token: str, priority: int, most: int) -> list[Claimed]:
        token = "t" if self._world.broken == "one token for ever" else token
        return self._call(lambda: self._box.claim(owner, token, priority, most))

    def intend(self, rows: Sequence[tuple[int, str]]) -> set[int]:
        return self._call(lambda: self._box.intend(rows))

    def report(self, reports: Sequence[Report]) -> None:
        self._call(lambda: self._box.report(reports))

    def release(self, owner: str) -> int:
        if self._world.broken == "rows with an intent are queued again":
            held = self._box.held(owner)
            self._box.report([Report(id=row.id, token=row.token, state=State.QUEUED) for row in held])
            return len(held)
        return self._box.release(owner)

    def _call(self, words: Callable[[], Any]) -> Any:
        fail, self.fail = self.fail, ""
        if fail == "before":
            raise OutboxAway(where="here", problem="the connection broke")
        answer = words()
        if fail == "after":
            raise OutboxAway(where="here", problem="the connection broke")
        return answer


class Post:
    """One server."""

    def __init__(self, world: World) -> None:
        self.id = f"post{next(_names)}"
        self.world = world
        self.box = Flaky(world.box, world)
        header = Header(
            log_id=self.id,
            campaign_id="outbox",
            plan_fingerprint="outbox",
            incarnation=self.id,
            sender="here",
            host_id="host",
            boot_id="boot",
            worker=0,
            started_at_us=0,
        )
        self.log = OutboxLog(world.folder / f"{self.id}.arrows", header, world.clock, durability="process")
        self.log.heard = self._heard
        self.me = Server(self.id, "serve", "here", "host", "boot", 1, "alive", 0, world.box.now_us(), 60_000_000)
        world.box.join(self.me)
        self.seats: dict[int, Claimed] = {}  # claimed, and not on the way
        self.dots: list[tuple[int, Claimed]] = []  # granted: the dot may go
        self.gone: list[tuple[int, Claimed, bool]] = []  # it went; whether it was taken
        self.reports: list[Report] = []
        self.flying: dict[int, Claimed] = {}
        self.unsure: set[int] = set()  # the table knows an intent, and the log on the disk no result
        self.settled: set[int] = set()  # of them, those with a result that is not on the disk yet
        self.sleeps = False
        self.lost_claim = False
        self.is_over = False  # superseded, and knows it

    def claim(self, priority: int, most: int) -> None:
        if self.is_over:
            return
        self.take_stock()
        self.lost_claim = True
        for one in self.box.claim(self.id, f"token{next(_names)}", priority, most):
            self.seats[one.id] = one
        self.lost_claim = False

    def take_stock(self) -> None:
        """After a claim whose answer was lost: what is ours and unknown to us goes back."""
        if not self.lost_claim:
            return
        known = {*self.seats, *(one.id for _, one in self.dots), *(one.id for _, one, _ in self.gone)}
        known.update(report.id for report in self.reports)
        ours = [held for held in self.box.held(self.id) if held.id not in known and not held.has_intent]
        self.box.report([Report(id=held.id, token=held.token, state=State.QUEUED) for held in ours])
        self.lost_claim = False

    def attempt(self, most: int) -> None:
        """Log, then table, as `Dispatch` and `_confirm` do."""
        rows = list(self.seats)[:most]
        if not rows or self.is_over:
            return
        group = [(self.log.intent(row, self.seats[row].attempts + 1, 0, 0), self.seats[row]) for row in rows]
        if self.world.broken != "the table before the log":
            asyncio.run(self.log.commit())
            self._is_written()
        pairs = [(one.id, one.token) for _, one in group]
        fails = self.box.fail
        try:
            granted = self.box.intend(pairs)
        except OutboxAway:
            granted = set(rows) if self.world.broken == "takes a lost answer for a yes" else None
        if granted is None:
            if fails == "after":
                self.unsure.update(rows)
            for serial, one in group:
                self._untouched(serial, one)
            return
        if self.world.broken == "sends what was not granted":
            granted = set(rows)
        for serial, one in group:
            del self.seats[one.id]
            if one.id in granted:
                self.unsure.add(one.id)
                self.settled.discard(one.id)
                self.dots.append((serial, one))
            else:
                self._untouched(serial, one)

    def _untouched(self, serial: int, one: Claimed) -> None:
        self.log.result(serial, one.id, 0, Verdict.UNTOUCHED)
        if one.id in self.unsure:
            self.settled.add(one.id)

    def dot(self, taken: bool) -> None:
        """The final dot leaves."""
        if self.dots:
            serial, one = self.dots.pop(0)
            if taken:
                self.world.take(one)
            self.gone.append((serial, one, taken))

    def hear(self, how: int) -> None:
        """The reply comes, or the connection is lost."""
        if self.gone and how % 4:
            serial, one, taken = self.gone.pop(0)
            if how % 4 == 3:
                verdict = Verdict.IN_DOUBT
                self.world.unknowable.add(one.id)
            else:
                verdict = Verdict.ACCEPTED if taken else Verdict.DEFERRED
            self._result(serial, one, verdict)
        elif self.dots:
            serial, one = self.dots.pop(0)  # lost before the dot: the row stays here
            self.log.result(serial, one.id, one.attempts, Verdict.LOST)
            self.settled.add(one.id)
            self.seats[one.id] = one

    def _result(self, serial: int, one: Claimed, verdict: Verdict) -> None:
        self.flying[one.id] = one
        self.log.result(serial, one.id, one.attempts + 1, verdict)
        self.settled.add(one.id)

    def _heard(
        self, row: int, state: State, attempt: int, reason: str | None, code: int, text: str | None, wait_s: float
    ) -> None:
        token = self.flying.pop(row).token
        self.reports.append(Report(id=row, token=token, state=state, reason=reason, attempts=attempt))

    def write(self) -> None:
        self.log.write()
        self._is_written()

    def _is_written(self) -> None:
        self.unsure -= self.settled
        self.settled.clear()

    def report(self, again: bool) -> None:
        """What the log has; said twice where the answer was lost, or just so."""
        self.write()
        self.box.report(self.reports)
        if not again:
            self.reports.clear()

    def renew(self) -> None:
        self.is_over = self.is_over or not self.box.renew(self.id)

    def kill(self) -> None:
        """kill -9: what was not written is gone, and so is the lock."""
        os.close(self.log._file)
        self.world.unknowable |= self.unsure
        self.world.posts.remove(self)


class World:
    """One table and all who use it."""

    def __init__(self, box: Outbox, folder: Path, broken: str = "") -> None:
        self.box, self.folder, self.broken = box, folder, broken
        self.clock = SystemClock()
        self.posts: list[Post] = [Post(self)]
        self.had: Counter[str] = Counter()  # mails that recipients got, by address
        self.resent: Counter[str] = Counter()
        self.written: set[str] = set()
        self.unknowable: set[int] = set()

    def take(self, one: Claimed) -> None:
        """The recipient has it."""
        self.had[one.address] += 1
        if self.had[one.address] > 1 + self.resent[one.address]:
            raise Violation(f"{one.address} has it {self.had[one.address]} times")

    def act(self, kind: str, a: int, b: int) -> None:
        """One step; nothing where it makes no sense now."""
        post = self.posts[a % len(self.posts)] if self.posts else None
        if post is not None and kind in WORK:
            if post.sleeps:
                return
            post.box.fail = ("", "", "", "before", "after")[b % 5]
            with contextlib.suppress(OutboxAway):
                WORK[kind](post, b)
            post.box.fail = ""
            return
        match kind:
            case "enqueue":
                self._enqueue(a % KEYS, 1 + b % 3)
            case "start" if len(self.posts) < 3:
                self.posts.append(Post(self))
            case "kill" if post is not None:
                post.kill()
            case "sleep" | "wake" if post is not None:
                post.sleeps = kind == "sleep"
            case "recover" if post is not None and not post.sleeps:
                self._recover(post, FAR_US if b % 2 else 0)
            case "resend" | "accept" | "cancel":
                self._say(kind, a)

    def _enqueue(self, key: int, priority: int) -> None:
        """Two writers have the same key at times."""
        address = f"k{key}@example.com"
        name = None if self.broken == "no idempotency key" else f"k{key}"
        self.box.enqueue([Mail(address=address, priority=priority, template="t", idempotency_key=name)])
        self.written.add(address)

    def _recover(self, by: Post, later_us: int) -> None:
        before = {post.id: {row.id for row in self.box.held(post.id) if row.has_intent} for post in self.posts}
        found: list[str] = []
        recover(
            Flaky(self.box, self),  # type: ignore[arg-type]  # it passes on what it does not change
            self.folder,
            by.me,
            self.box.now_us() + later_us,
            durable=True,
            say=lambda one: found.append(one.owner),
        )
        for owner in found:
            # Its log is locked: nobody knows what it did with what it had said it would do.
            self.unknowable |= before.get(owner, set())

    def _say(self, kind: str, a: int) -> None:
        rows = self.box.rows("in_doubt" if kind != "cancel" else "queued", 0, 100)
        if not rows:
            return
        row = rows[a % len(rows)]
        if kind == "resend" and self.box.resend([row.id]):
            self.resent[row.address] += 1
            self.unknowable.discard(row.id)
        elif kind == "accept":
            self.box.accept([row.id])
        elif kind == "cancel":
            self.box.cancel([row.id])

    def end(self) -> None:
        """Everybody comes to an end; one last server does what is left; then the books are held together."""
        for post in self.posts:
            post.sleeps = False
            while post.dots:
                post.dot(True)
            while post.gone:
                post.hear(1)
            post.report(False)
            post.report(False)
        for post in list(self.posts):
            post.kill()
        last = Post(self)
        self.posts.append(last)
        self._recover(last, FAR_US)
        for _ in range(3):
            for priority in (1, 2, 3):
                last.claim(priority, 100)
            while last.seats:
                last.attempt(100)
            while last.dots:
                last.dot(True)
            while last.gone:
                last.hear(1)
            last.report(False)
        last.kill()
        self._hold_together()

    def _hold_together(self) -> None:
        rows = self.box.rows(None, 0, 1000)
        if len(rows) != len(self.written):
            raise Violation(f"{len(rows)} rows for {len(self.written)} keys")
        for row in rows:
            if row.state not in ("accepted", "in_doubt", "unsent"):
                raise Violation(f"lost: {row}")
            had = self.had[row.address]
            if row.state == "accepted" and row.reason is None and not had:
                raise Violation(f"accepted, and nobody has it: {row}")
            if row.state == "unsent" and had > self.resent[row.address]:
                raise Violation(f"unsent, and it was had: {row}")
            if row.state == "in_doubt" and row.id not in self.unknowable:
                raise Violation(f"in doubt for nothing: {row}")


WORK: dict[str, Callable[[Post, int], None]] = {
    "claim": lambda post, b: post.claim(1 + b % 3, 1 + b % 4),
    "attempt": lambda post, b: post.attempt(1 + b % 3),
    "dot": lambda post, b: post.dot(b % 5 != 0),
    "hear": lambda post, b: post.hear(b),
    "write": lambda post, b: post.write(),
    "report": lambda post, b: post.report(b % 3 == 0),
    "renew": lambda post, b: post.renew(),
}
ACTIONS = [
    *["enqueue"] * 3,
    *["claim"] * 4,
    *["attempt"] * 4,
    *["dot"] * 3,
    *["hear"] * 3,
    "write",
    "report",
    "report",
    "renew",
    "start",
    "kill",
    "sleep",
    "wake",
    "recover",
    "recover",
    "resend",
    "accept",
    "cancel",
]


def explore(box: Outbox, folder: Path, rng: random.Random, steps: int, broken: str = "") -> None:
    """A random life; raises Violation."""
    world = World(box, folder, broken)
    for _ in range(steps):
        world.act(rng.choice(ACTIONS), rng.randrange(60), rng.randrange(60))
    world.end()
