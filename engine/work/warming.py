"""The warm-up of a plan while it is sent: today's caps per (source, provider), and when a stage is left. Pure.

A stage lasts 24 hours from its first message. Then it is left where nine tenths of its cap were accepted, held where
not, and one goes back where a reputation block was met (`engine.warmup.next_day`). Providers too small to have a part
of the cap share one: each of them begins on the day that its name draws, so that a day's beginners hold as many rows
as the day's part allows.

Remembers nothing by itself: `to_bytes` and `Warming(..., kept)` carry it over restarts; a killed supervisor forgets the
last second. Times are UTC microseconds. A day is as long as the plan says, for a rehearsal's is compressed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import msgspec

from engine.errors import EngineError, Exit
from engine.pace.allowance import Rate
from engine.pace.budgets import ALL_SOURCES
from engine.warmup import BUSY_HOURS, IDLE_DAYS, Caps, Progress, Schedule, next_day
from engine.work.messages import Key
from formats.plan import Plan, Warmup

OTHER = "other"


class Stage(msgspec.Struct):
    """One source at one provider."""

    progress: Progress
    began_us: int = 0  # 0: nothing was sent in this stage yet
    ended_us: int = 0  # of the stage before
    sent: int = 0
    accepted: int = 0
    is_blocked: bool = False
    passed: int = 0  # caps of the days before, for the tail
    hours: list[tuple[int, int]] = []  # (moment of the last message, messages) of the last day, hour by hour


class Turned(msgspec.Struct, frozen=True):
    """A stage that is over, and the next."""

    source: str
    provider: str
    sent: int
    accepted: int
    before: int
    after: Progress


class Warming:
    """All stages of one run."""

    def __init__(self, warmup: Warmup, part: float, kept: bytes | None = None) -> None:
        """`part`: the share of the campaign's rows that this run has; it gets as much of every cap."""
        self._warmup, self._part = warmup, part
        self._schedule = Schedule(
            name=warmup.schedule, days=tuple(warmup.daily), hourly=tuple(warmup.hourly), source="plan.json"
        )
        self._day_us = round(warmup.day_s * 1e6)
        self._stages: dict[str, Stage] = {}
        if kept is not None:
            self._stages = msgspec.json.decode(kept, type=dict[str, Stage])

    def to_bytes(self) -> bytes:
        """What a restart goes on from."""
        return msgspec.json.encode(self._stages)

    def caps(self, key: Key) -> Caps | None:
        """Today's caps of a key; None: its source is warm. Caps(0, 0): this provider's turn comes on another day."""
        named = self._named(key)
        if named is None:
            return None
        source, provider = named
        caps = self._caps_of(source, provider)
        if caps.daily is None:
            return None
        if provider == OTHER and not self._is_admitted(source, key[1], caps.daily):
            return Caps(0, 0)
        return caps

    def rates(self, key: Key) -> tuple[Rate, ...]:
        """The caps as rates; () where the key is warm or its turn has not come."""
        caps = self.caps(key)
        if caps is None or not caps.daily or not caps.hourly:
            return ()
        day_s = self._warmup.day_s
        # Spread over a part of the day: new addresses are judged by their bursts.
        return Rate(caps.daily, day_s, day_s * BUSY_HOURS / 24), Rate(caps.hourly, day_s / 24)

    def is_used_up(self, key: Key) -> bool:
        """Whether nothing more may go today."""
        caps, named = self.caps(key), self._named(key)
        if caps is None or named is None:
            return False
        return not caps.daily or self._stage(*named).sent >= caps.daily

    def told(self, key: Key) -> str:
        """Where a key stands, for the operator; "" where it is warm."""
        caps, named = self.caps(key), self._named(key)
        if caps is None or named is None:
            return ""
        stage = self._stage(*named)
        if not caps.daily:
            return f"warm-up day {stage.progress.stage}: its turn comes on another day"
        return f"warm-up day {stage.progress.stage}: {stage.sent:,} of {caps.daily:,} sent today"

    def next_turn_us(self) -> int | None:
        """When the first of the running stages ends."""
        return min((stage.began_us + self._day_us for stage in self._stages.values() if stage.began_us), default=None)

    def sent(self, key: Key, messages: int, now_us: int) -> None:
        """So many went out."""
        named = self._named(key)
        if named is None or not messages:
            return
        stage = self._stage(*named)
        if not stage.began_us:
            stage.began_us = now_us
        stage.sent += messages
        if stage.hours and now_us - stage.hours[-1][0] < self._day_us // 24 and len(stage.hours) > 1:
            stage.hours[-1] = (max(now_us, stage.hours[-1][0]), stage.hours[-1][1] + messages)
        else:
            stage.hours.append((now_us, messages))
        stage.hours = [entry for entry in stage.hours if entry[0] > now_us - self._day_us]

    def accepted(self, key: Key, messages: int) -> None:
        """So many were taken."""
        if (named := self._named(key)) is not None:
            self._stage(*named).accepted += messages

    def blocked(self, key: Key) -> None:
        """A reputation block was met."""
        if (named := self._named(key)) is not None:
            self._stage(*named).is_blocked = True

    def sent_before(self, key: Key) -> list[tuple[int, int]]:
        """(moment, messages) of the last day, oldest first: what windows that begin anew must know."""
        named = self._named(key)
        return list(self._stage(*named).hours) if named is not None else []

    def tick(self, now_us: int) -> Iterator[Turned]:
        """Stages whose 24 hours are over go on."""
        for name, stage in self._stages.items():
            source, _, provider = name.partition("\t")
            if stage.began_us and now_us >= stage.began_us + self._day_us:
                cap = self._caps_of(source, provider).daily
                after = next_day(stage.progress, cap, stage.sent, stage.accepted, reputation_block=stage.is_blocked)
                yield Turned(source, provider, stage.sent, stage.accepted, stage.progress.stage, after)
                stage.passed += cap or 0
                stage.ended_us = stage.began_us + self._day_us
                stage.progress, stage.began_us, stage.sent, stage.accepted = after, 0, 0, 0
                stage.is_blocked = False
            elif stage.progress.stage > 1 and self._is_idle(stage, now_us):
                after = Progress(1, IDLE_DAYS, f"idle for {IDLE_DAYS} days: starts over")
                yield Turned(source, provider, 0, 0, stage.progress.stage, after)
                stage.progress = after

    def _named(self, key: Key) -> tuple[str, str] | None:
        source, provider = key
        days = self._warmup.days
        if source == ALL_SOURCES:
            # One budget over all sources is as young as the youngest of them.
            source = min(days, key=lambda name: days[name], default="")
        if source not in days:
            return None
        return source, provider if provider in self._warmup.shares else OTHER

    def _caps_of(self, source: str, provider: str) -> Caps:
        share = self._warmup.other_share if provider == OTHER else self._warmup.shares[provider]
        return self._schedule.caps(self._stage(source, provider).progress.stage, share * self._part)

    def _stage(self, source: str, provider: str) -> Stage:
        name = f"{source}\t{provider}"
        found = self._stages.get(name)
        if found is None:
            found = self._stages[name] = Stage(Progress(self._warmup.days[source]))
        return found

    def _is_admitted(self, source: str, provider: str, cap: int) -> bool:
        rows = max(1.0, self._warmup.other_rows * self._part / max(1, len(self._warmup.days)))
        begun = (self._stage(source, OTHER).passed + cap) / rows
        if begun >= 1:
            return True
        digest = hashlib.blake2b(f"{source}\t{provider}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") / 2**64 < begun

    def _is_idle(self, stage: Stage, now_us: int) -> bool:
        return bool(not stage.began_us and stage.ended_us and now_us - stage.ended_us >= IDLE_DAYS * self._day_us)


class WarmupUnreadable(EngineError):
    """{file} cannot be read: {problem}. How far the warm-up has come stands in it."""

    exit_code = Exit.PLAN
    hint = "Restore the file; without it the campaign would begin its warm-up again at the planned day."


def warming_of(plan: Plan, partition: int, folder: Path) -> Warming | None:
    """The warm-up of a partition as the last run left it in `folder`; None where the plan has none."""
    if plan.warmup is None:
        return None
    cut = plan.partitions[partition]
    rows = sum(batch.rows for batch in plan.batches[cut.first_batch : cut.first_batch + cut.batches])
    file = folder / f"warmup-{partition}.json"
    kept = file.read_bytes() if file.exists() else None
    try:
        return Warming(plan.warmup, rows / max(1, plan.rows), kept)
    except msgspec.MsgspecError as problem:
        raise WarmupUnreadable(file=file, problem=problem) from None
