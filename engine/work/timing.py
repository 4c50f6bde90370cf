"""When a run has to wait, to end, or to stop by itself: sending hours, moments, and shares that say something is wrong.

Decides over values; the supervisor asks once a second and does what it says.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from engine.campaign import write_whole
from engine.config import ScheduleTable, Settings, StopTable
from engine.schedule import Hours, Schedule, moment_us, zone_named
from engine.work.progress import Progress
from engine.zones import Zones
from formats.feedbacklog import feedback_reader
from formats.sendlog import LogDamaged


def schedule_of(settings: Settings) -> Schedule:
    """The schedule of the campaign as a whole; raises ScheduleError for what is no moment, zone or hours.

    With a zone column it has no hours: each row has its own (`zones_of`).
    """
    table, campaign = settings.schedule, settings.campaign
    hours = hours_of(table)
    schedule = Schedule(
        not_before_us=moment_us(campaign.not_before, table.zone) if campaign.not_before else None,
        expires_at_us=moment_us(campaign.expires_at, table.zone) if campaign.expires_at else None,
        hours=hours if settings.list.zone_column is None else None,
        zone=table.zone,
    )
    zone_named(table.zone)  # an unknown zone is found now, not at night
    return schedule


def hours_of(table: ScheduleTable) -> Hours | None:
    """The sending hours; raises ScheduleError."""
    if table.hours is not None:
        return Hours.parse(table.hours, table.days)
    # Days without hours are whole days.
    return Hours.parse("00:00-24:00", table.days) if table.days else None


def zones_of(settings: Settings) -> Zones | None:
    """Hours by the recipient's zone, where a column gives it; raises ScheduleError."""
    if settings.list.zone_column is None:
        return None
    return Zones(hours_of(settings.schedule), settings.schedule.zone)


def complaints_of(feedback: Path) -> int:
    """Complaints that came back so far; a damaged feedback log counts as far as it is whole."""
    found = 0
    for path in sorted(feedback.glob("*.arrows")):
        if not path.stat().st_size:
            continue
        with contextlib.suppress(LogDamaged):
            for batch in feedback_reader(pa.memory_map(str(path)).read_buffer()):
                found += pc.sum(pc.equal(batch.column("kind"), "complaint")).as_py() or 0
    return found


class Evidence(msgspec.Struct, frozen=True):
    """What speaks for or against going on."""

    before: int = 0  # rows that had their outcome when the run began
    answered: int = 0  # in this run
    refused: int = 0  # of them for good
    complaints: int = 0  # of the whole campaign


def evidence(progress: Progress, complaints: int) -> Evidence:
    """What there is now."""
    return Evidence(progress.before, progress.accepted + progress.rejected, progress.rejected, complaints)


class StopWatch:
    """When a run should stop by itself. An operator who resumes has seen what there was: only what comes later counts.

    What was seen when a run stopped is kept in a file, so that the run after `engine resume` does not count it again.
    """

    def __init__(self, memory: Path) -> None:
        self._memory = memory
        self._in_run = Evidence()
        self._since = Evidence()
        with contextlib.suppress(OSError, msgspec.MsgspecError):  # without it what is old counts again: it stops early
            self._since = msgspec.json.decode(memory.read_bytes(), type=Evidence)

    def resumed(self, now: Evidence) -> None:
        """The operator said: go on."""
        self._in_run = self._since = now

    def why(self, stop: StopTable, now: Evidence) -> str | None:
        """Why the run should stop, or None."""
        answered = now.answered - self._in_run.answered
        refused = now.refused - self._in_run.refused
        if stop.error_share is not None and answered >= stop.after_rows and refused > stop.error_share * answered:
            return (
                f"{refused:,} of {answered:,} rows were refused for good, {refused / answered:.1%};"
                f" [stop] error_share is {stop.error_share:.1%}"
            )
        # Complaints come hours later, in another run perhaps: they count for all rows since the last word.
        answered = now.before + now.answered - self._since.before - self._since.answered
        complaints = now.complaints - self._since.complaints
        share = stop.complaint_share
        if share is not None and answered >= stop.after_rows and complaints > share * answered:
            return (
                f"{complaints:,} complaints for {answered:,} rows, {complaints / answered:.2%};"
                f" [stop] complaint_share is {share:.2%}"
            )
        return None

    def stopped(self, now: Evidence) -> None:
        """The run stops for it; whoever resumes has seen it."""
        with contextlib.suppress(OSError):
            write_whole(self._memory, msgspec.json.encode(now))
