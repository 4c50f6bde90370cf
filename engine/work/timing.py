"""When a run has to wait, to end, or to stop by itself: sending hours, moments, and shares that say something is wrong.

Decides over values; the supervisor asks once a second and does what it says.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from engine.config import ScheduleTable, Settings
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


def why_stop(settings: Settings, progress: Progress, complaints: int) -> str | None:
    """Why the run should stop by itself, or None. Shares are of this run's rows with an answer."""
    stop = settings.stop
    answered = progress.accepted + progress.rejected
    if answered < stop.after_rows:
        return None
    if stop.error_share is not None and progress.rejected > stop.error_share * answered:
        return (
            f"{progress.rejected:,} of {answered:,} rows were refused for good, {progress.rejected / answered:.1%};"
            f" [stop] error_share is {stop.error_share:.1%}"
        )
    if stop.complaint_share is not None and complaints > stop.complaint_share * answered:
        return (
            f"{complaints:,} complaints for {answered:,} rows, {complaints / answered:.2%};"
            f" [stop] complaint_share is {stop.complaint_share:.2%}"
        )
    return None
