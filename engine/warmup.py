"""Warm-up: how much a young source may send to a provider on its n-th day, and which rows go first. Pure.

Schedules are data (`engine/warmups.toml`, each with its source): messages per source address and day. No published
table is per provider, so a provider's part of the day is its part of the rows; that errs on the careful side wherever
one provider is most of a list. A stage is left only when nine tenths of it were accepted, and a reputation block goes
one stage back (SparkPost's published rule, as are the thirty days after which an idle address starts over).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from engine.errors import EngineError, Exit

DAY_S = 86_400.0
SHIPPED = Path(__file__).with_name("warmups.toml")
ENOUGH_ACCEPTED = 0.9
IDLE_DAYS = 30
BUSY_HOURS = 12  # a day's cap is used within twelve hours at the earliest: bursts are what new addresses are judged by


class UnknownSchedule(EngineError):
    """There is no warm-up schedule {name!r}."""

    exit_code = Exit.SETTINGS
    hint = "The shipped ones are: {shipped}."


class WarmupInTheFuture(EngineError):
    """source {source}: warm-up day {day} is not one: the first day is 1, no day at all says that it is warm."""

    exit_code = Exit.SETTINGS
    hint = "Correct warmup_day of [source.{source}] in the campaign's budgets.toml."


class Schedule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Messages a day and source, day 1 first; afterwards the source is warm."""

    name: str
    days: tuple[int, ...]
    hourly: tuple[int, ...] = ()  # where the publisher tells hours; else derived
    source: str

    def daily_cap(self, day: int) -> int | None:
        """The cap of a day (from 1 on); None: the source is warm."""
        if day < 1:
            raise WarmupInTheFuture(source=self.name, day=day)
        return self.days[day - 1] if day <= len(self.days) else None

    def hourly_cap(self, day: int) -> int | None:
        """The cap of an hour of that day; None: the source is warm."""
        daily = self.daily_cap(day)
        if daily is None:
            return None
        if day <= len(self.hourly):
            return self.hourly[day - 1]
        return max(1, math.ceil(daily / BUSY_HOURS))

    def caps(self, day: int, share: float) -> Caps:
        """A provider's part of the day, by its share of the rows; at least one message."""
        daily, hourly = self.daily_cap(day), self.hourly_cap(day)
        if daily is None or hourly is None:
            return Caps(None, None)
        return Caps(max(1, int(daily * share)), max(1, math.ceil(hourly * share)))


class Caps(msgspec.Struct, frozen=True):
    """Messages that one source may send to one provider; None: no cap."""

    daily: int | None
    hourly: int | None

    @property
    def per_s(self) -> float:
        """The pace within a day: its cap is spread over twelve hours, and no hour has more than its own."""
        daily = math.inf if self.daily is None else self.daily / (BUSY_HOURS * 3600)
        return min(daily, math.inf if self.hourly is None else self.hourly / 3600)


class Progress(msgspec.Struct, frozen=True):
    """Where a source stands at a provider: the stage is the day of the schedule, which may be held or stepped back."""

    stage: int = 1
    idle_days: int = 0
    reason: str = "first day"


def next_day(
    progress: Progress, cap: int | None, sent: int, accepted: int, *, reputation_block: bool = False
) -> Progress:
    """The stage of the day after one on which so many were sent and accepted."""
    if reputation_block:
        return Progress(max(1, progress.stage - 1), 0, "blocked for reputation: one stage back")
    if not sent:
        idle = progress.idle_days + 1
        if idle >= IDLE_DAYS:
            return Progress(1, idle, f"idle for {idle} days: starts over")
        return Progress(progress.stage, idle, "nothing sent: the stage is held")
    if cap is None:
        return Progress(progress.stage, 0, "warm")
    if accepted < ENOUGH_ACCEPTED * cap:
        return Progress(
            progress.stage, 0, f"{accepted:,} of {cap:,} accepted, less than nine tenths: the stage is held"
        )
    return Progress(progress.stage + 1, 0, f"{accepted:,} of {cap:,} accepted")


def load_schedules(path: Path = SHIPPED) -> dict[str, Schedule]:
    """All schedules of a file by name."""
    raw = msgspec.toml.decode(path.read_bytes(), type=dict[str, list[Schedule]])
    return {schedule.name: schedule for schedule in raw["schedule"]}


def schedule_named(name: str) -> Schedule:
    """A shipped schedule; raises UnknownSchedule."""
    schedules = load_schedules()
    if name not in schedules:
        raise UnknownSchedule(name=name, shipped=", ".join(schedules))
    return schedules[name]


def spread(
    providers: npt.NDArray[np.integer],
    caps_per_day: Mapping[int, Sequence[int]],
    engagement: npt.NDArray[np.floating] | None = None,
) -> npt.NDArray[np.int16]:
    """The day (0: today) on which each row is sent, the most engaged of each provider first, then in row order.

    `providers` is a code per row; `caps_per_day` has a provider's cap on each of the coming days, the last of them
    repeating; a provider without one goes today. NaN is the least engaged. -1: the caps never let it through.
    """
    days = np.zeros(len(providers), dtype=np.int16)
    for provider, caps in caps_per_day.items():
        rows = np.flatnonzero(providers == provider)
        if not len(rows):
            continue
        if engagement is not None:
            wish = np.nan_to_num(engagement[rows].astype(np.float64), nan=-np.inf)
            rows = rows[np.argsort(-wish, kind="stable")]
        edges = np.cumsum(np.asarray(caps, dtype=np.int64))
        place = np.arange(len(rows))
        day = np.searchsorted(edges, place, side="right")
        late = day == len(edges)
        if late.any():
            last = int(caps[-1]) if len(caps) else 0
            beyond = place[late] - (int(edges[-1]) if len(edges) else 0)
            day[late] = len(edges) + beyond // last if last else -1
        days[rows] = np.minimum(day, np.iinfo(np.int16).max)
    return days


def lay_out(
    rows: Mapping[str, int],
    days: Sequence[int | None],
    schedule: Schedule,
    *,
    weights: Sequence[int] = (),
    most: int = 3650,
) -> list[int]:
    """Rows a day by the caps alone, for sources on these days (None: warm), if each stage is left after its day.

    Rows are drawn to sources by weight, evenly where there are none: what a warm source has goes on the first day, and
    what was drawn to a young one waits for it.
    """
    weights = tuple(weights) if any(weights) else (1,) * len(days)
    total = max(1, sum(rows.values()))
    shares = {name: count / total for name, count in rows.items()}
    left: dict[tuple[str, int], int] = {}
    for name, count in rows.items():
        given = weight = 0
        for place, each in enumerate(weights):
            weight += each
            left[name, place] = count * weight // sum(weights) - given
            given += left[name, place]
    found: list[int] = []
    for day in range(most):
        if not any(left.values()):
            break
        today = 0
        for (name, place), count in left.items():
            began = days[place]
            cap = schedule.caps(began + day, shares[name]).daily if began is not None else None
            sent = count if cap is None else min(count, cap)
            left[name, place] = count - sent
            today += sent
        found.append(today)
    return found
