"""Sending hours in each recipient's own zone. Pure: texts of a zone column and times come in, numbers go out.

A zone is a small number while a process runs: 0 is the campaign's own, which rows follow whose column says nothing or
what is no IANA name. Names are read without regard to case and to spaces around them. When clocks change, hours are
read as `schedule.Hours` reads them: nobody is written to outside them.
"""

from __future__ import annotations

from datetime import datetime
from zoneinfo import ZoneInfo

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from engine.schedule import Hours, iana_name, zone_named

OWN = 0  # the campaign's zone
_ALWAYS = (-(1 << 62), 1 << 62)


class Zones:
    """Which zones are open, and when that changes."""

    def __init__(self, hours: Hours | None, zone: str) -> None:
        """`hours` None: always open. `zone` is the campaign's; raises ScheduleError where it is none."""
        self.hours = hours
        self.names = [zone]
        self._missing = self._unknown = 0
        self._zones: list[ZoneInfo] = [zone_named(zone)]
        self._spans: list[tuple[int, int]] = [_ALWAYS if hours is None else (0, 0)]
        self._numbers: dict[str, int] = {zone: OWN}
        self._known: dict[str | None, tuple[int, bool]] = {}
        self._open = np.zeros(1, dtype=bool)
        self._open_at = self._open_until = 0

    def set_hours(self, hours: Hours | None, zone: str) -> None:
        """Other hours, or another zone of the campaign's, from now on."""
        self.hours = hours
        self.names[OWN], self._zones[OWN] = zone, zone_named(zone)
        self._spans = [_ALWAYS if hours is None else (0, 0)] * len(self._zones)
        self._open_until = 0

    def number(self, text: str | None) -> int:
        """The zone that a row with this text follows."""
        return self._look_up(text)[0]

    def numbers(self, column: pa.Array, which: npt.NDArray[np.bool_]) -> npt.NDArray[np.uint16]:
        """The zones that rows of a column follow; those of `which` are counted where the column is no help."""
        if not _is_text(column.type):
            column = pa.nulls(len(column), pa.string())
        coded = column if pa.types.is_dictionary(column.type) else column.dictionary_encode()
        found = [self._look_up(text) for text in coded.dictionary.to_pylist()]
        by_code = np.array([number for number, _ in found] + [OWN], dtype=np.uint16)
        codes = pc.fill_null(coded.indices.cast(pa.int64()), len(found)).to_numpy()
        empty = np.array([not (text or "").strip() for text in coded.dictionary.to_pylist()] + [True])
        bad = np.array([not good for _, good in found] + [True])
        counted = codes[which]
        self._missing += int(empty[counted].sum())
        self._unknown += int((bad & ~empty)[counted].sum())
        zones: npt.NDArray[np.uint16] = by_code[codes]
        return zones

    def take_zoneless(self) -> tuple[int, int]:
        """Rows that `numbers` counted since the last call: without a zone, and with what is none."""
        counted = self._missing, self._unknown
        self._missing = self._unknown = 0
        return counted

    def is_open(self, number: int, now_us: int) -> bool:
        """Whether rows of this zone may go now."""
        begins, ends = self._span(number, now_us)
        return begins <= now_us < ends

    def opens_at(self, number: int, now_us: int) -> int:
        """`now_us` where the zone's hours are open, else when they open next."""
        return max(now_us, self._span(number, now_us)[0])

    def open_flags(self, now_us: int) -> npt.NDArray[np.bool_]:
        """For each zone seen so far, whether it is open now."""
        if not self._open_at <= now_us < self._open_until or len(self._open) < len(self._zones):
            spans = [self._span(number, now_us) for number in range(len(self._zones))]
            self._open = np.array([begins <= now_us < ends for begins, ends in spans])
            self._open_at = now_us  # a clock that is set back asks anew
            self._open_until = min(ends if begins <= now_us else begins for begins, ends in spans)
        return self._open

    def local(self, number: int, at_us: int) -> str:
        """A moment as people of the zone write it."""
        return f"{datetime.fromtimestamp(at_us / 1e6, self._zones[number]):%a %Y-%m-%d %H:%M %Z} ({self.names[number]})"

    def _span(self, number: int, now_us: int) -> tuple[int, int]:
        """The hours that are open, or open next."""
        begins, ends = self._spans[number]
        # A clock that was set back finds hours that are over closed: late, and never outside them.
        if ends <= now_us:
            assert self.hours is not None  # without hours nothing ends
            begins, ends = self._spans[number] = next(self.hours.spans(self._zones[number], now_us))
        return begins, ends

    def _look_up(self, text: str | None) -> tuple[int, bool]:
        known = self._known.get(text)
        if known is None:
            name = iana_name(text)
            known = (OWN, False) if name is None else (self._number_of(name), True)
            if len(self._known) < 100_000:  # a column of something else does not fill the memory
                self._known[text] = known
        return known

    def _number_of(self, name: str) -> int:
        number = self._numbers.get(name)
        if number is None:
            number = self._numbers[name] = len(self._zones)
            self.names.append(name)
            self._zones.append(ZoneInfo(name))
            self._spans.append(_ALWAYS if self.hours is None else (0, 0))
        return number


def _is_text(kind: pa.DataType) -> bool:
    inner = kind.value_type if pa.types.is_dictionary(kind) else kind
    return bool(pa.types.is_string(inner) or pa.types.is_large_string(inner) or pa.types.is_string_view(inner))
