"""The only module that reads a clock.

Two kinds of time. *Monotonic* seconds order events inside one process and never jump. *Wall* time is UTC microseconds
since 1970, the form of every time at rest.
"""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """What the engine asks of a clock, so that tests and simulations bring their own."""

    def monotonic(self) -> float:
        """Seconds since an arbitrary start; never goes back."""

    def wall_us(self) -> int:
        """UTC microseconds since 1970; may jump when the machine's clock is set."""


class SystemClock:
    """The machine's clocks."""

    def monotonic(self) -> float:
        return time.monotonic()

    def wall_us(self) -> int:
        return time.time_ns() // 1000
