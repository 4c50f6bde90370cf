"""When mail may go: moments in a zone, sending hours by the week. Pure: the time comes in as UTC microseconds.

Zones are IANA names (`Europe/Berlin`), never offsets: an offset does not know when clocks change. A single local time
that does not exist (clocks went forward) or exists twice (they went back) is refused, with what to write instead.
Recurring hours cannot be refused twice a year; they are read so that nobody is written to outside them: an hour that
begins in the gap begins when the clocks have jumped; one that begins or ends in the repeated hour begins at its second
reading and ends at its first.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from datetime import UTC, date, datetime, time, timedelta
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError, available_timezones

import msgspec

from engine.errors import EngineError, Exit

DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
_HOURS = re.compile(r"(\d{1,2}):(\d{2})\s*-\s*(\d{1,2}):(\d{2})\Z")
_NO_ZONES = frozenset({"factory", "localtime", "posixrules"})  # in the database, and nobody's zone


class ScheduleError(EngineError):
    """{what}: {problem}."""

    exit_code = Exit.SETTINGS
    hint = "The guide `schedules.md` shows how moments, hours and zones are written."


def zone_named(name: str) -> ZoneInfo:
    """The zone; raises ScheduleError."""
    try:
        if not name or name.startswith(("/", ".")):
            raise ValueError(name)
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        raise ScheduleError(what=f"zone {name!r}", problem="not an IANA zone such as Europe/Berlin") from None


@functools.cache
def _names() -> dict[str, str]:
    return {name.lower(): name for name in available_timezones() if name.lower() not in _NO_ZONES}


def iana_name(text: str | None) -> str | None:
    """The zone's name as the database writes it, or None for what is none, such as an offset.

    Case and spaces around it do not matter.
    """
    return _names().get(text.strip().lower()) if text else None


def moment_us(text: str, zone: str | None = None) -> int:
    """A moment as UTC microseconds: ISO 8601 with its offset, or a local time of `zone`.

    Raises ScheduleError for one without either, and for a local time that does not exist or exists twice.
    """
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        raise ScheduleError(what=repr(text), problem="no moment such as 2026-03-29T08:00:00+02:00") from None
    if at.tzinfo is None:
        if zone is None:
            raise ScheduleError(what=repr(text), problem="it has neither an offset from UTC nor a zone")
        at = local_moment(at, zone_named(zone))
    return round(at.timestamp() * 1e6)


def local_moment(at: datetime, zone: ZoneInfo) -> datetime:
    """A local time of the zone as the one moment it is; raises ScheduleError where it is none, or two."""
    readings = _readings(at, zone)
    if len(readings) == 1:
        return readings[0]
    if not readings:
        after = at.replace(tzinfo=zone, fold=0).astimezone(UTC).astimezone(zone)
        problem = f"does not exist in {zone.key}: clocks go forward; {after:%H:%M} is what follows"
    else:
        problem = f"exists twice in {zone.key}: write {' or '.join(one.isoformat() for one in readings)}"
    raise ScheduleError(what=f"{at:%Y-%m-%d %H:%M}", problem=problem)


def _readings(at: datetime, zone: ZoneInfo) -> list[datetime]:
    """The moments that clocks of the zone show `at`: one, none or two, earliest first."""
    found: list[datetime] = []
    for fold in (0, 1):
        one = at.replace(tzinfo=zone, fold=fold)
        back = one.astimezone(UTC).astimezone(zone)
        if back.replace(tzinfo=None) == at and all(one.utcoffset() != other.utcoffset() for other in found):
            found.append(one)
    return sorted(found, key=lambda one: one.astimezone(UTC))


class Hours(msgspec.Struct, frozen=True):
    """Sending hours: from `start` to `end` (minutes of the day) on some days of the week.

    An `end` at or before `start` is on the next day. The day is the one on which the hours begin.
    """

    start: int
    end: int
    days: frozenset[int] = frozenset(range(7))

    @classmethod
    def parse(cls, text: str, days: tuple[str, ...] = ()) -> Hours:
        """From "08:00-20:00" and names of days (none: all); raises ScheduleError."""
        found = _HOURS.match(text.strip())
        if not found:
            raise ScheduleError(what=f"hours {text!r}", problem='expected "08:00-20:00"')
        hour, minute, end_hour, end_minute = map(int, found.groups())
        start, end = hour * 60 + minute, end_hour * 60 + end_minute
        if minute > 59 or end_minute > 59 or start >= 1440 or end > 1440 or start == end:
            raise ScheduleError(what=f"hours {text!r}", problem="not two different times of a day")
        try:
            numbers = frozenset(DAYS.index(day.lower()[:3]) for day in days) or frozenset(range(7))
        except ValueError:
            raise ScheduleError(what=f"days {', '.join(days)}", problem=f"expected {', '.join(DAYS)}") from None
        return cls(start, end, numbers)

    def spans(self, zone: ZoneInfo, now_us: int) -> Iterator[tuple[int, int]]:
        """From the one that may still be open at `now_us` on: when hours begin and end, UTC microseconds."""
        first = datetime.fromtimestamp(now_us / 1e6, zone).date() - timedelta(days=1)
        for ahead in range(16):
            day = first + timedelta(days=ahead)
            if day.weekday() not in self.days:
                continue
            end_day = day if self.end > self.start else day + timedelta(days=1)
            begins, ends = _edge(day, self.start, zone, is_end=False), _edge(end_day, self.end, zone, is_end=True)
            if ends > now_us and ends > begins:
                yield begins, ends

    def opens_at(self, zone: ZoneInfo, now_us: int) -> int:
        """`now_us` where they are open, else when they open next."""
        begins, _ = next(self.spans(zone, now_us))
        return max(begins, now_us)

    def closes_at(self, zone: ZoneInfo, now_us: int) -> int:
        """When the hours that are open, or open next, end."""
        return next(self.spans(zone, now_us))[1]


def _edge(day: date, minutes: int, zone: ZoneInfo, *, is_end: bool) -> int:
    at = datetime.combine(day, time()) + timedelta(minutes=minutes)
    readings = _readings(at, zone)
    # In the gap: the moment of the jump itself, which is the first that clocks show afterwards.
    moment = _jump(at, zone) if not readings else readings[0] if is_end else readings[-1]
    return round(moment.timestamp() * 1e6)


def _jump(at: datetime, zone: ZoneInfo) -> datetime:
    """The moment at which clocks of the zone jumped over `at`."""
    low = at.replace(tzinfo=zone, fold=1).astimezone(UTC)
    high = at.replace(tzinfo=zone, fold=0).astimezone(UTC)
    low, high = min(low, high), max(low, high)
    before = low.astimezone(zone).utcoffset()
    while high - low > timedelta(seconds=1):
        middle = low + (high - low) / 2
        if middle.astimezone(zone).utcoffset() == before:
            low = middle
        else:
            high = middle
    return high.replace(microsecond=0)


class Schedule(msgspec.Struct, frozen=True, kw_only=True):
    """When a campaign may send."""

    not_before_us: int | None = None
    expires_at_us: int | None = None
    hours: Hours | None = None
    zone: str = "UTC"

    def is_over(self, now_us: int) -> bool:
        """Nothing may be sent any more."""
        return self.expires_at_us is not None and now_us >= self.expires_at_us

    def opens_at(self, now_us: int) -> int:
        """`now_us` where sending is allowed, else when it will be."""
        at = max(now_us, self.not_before_us or 0)
        return self.hours.opens_at(zone_named(self.zone), at) if self.hours is not None else at

    def why_closed(self, now_us: int) -> str | None:
        """What an operator reads while nothing goes, with its end; None where it may go."""
        opens = self.opens_at(now_us)
        if opens <= now_us:
            return None
        until = datetime.fromtimestamp(opens / 1e6, zone_named(self.zone))
        what = "not before" if now_us < (self.not_before_us or 0) else "outside the sending hours until"
        return f"{what} {until:%a %Y-%m-%d %H:%M %Z}"
