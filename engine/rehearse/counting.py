"""Counts at the receiving end: how many messages the fullest window held, and how much of a rate was used. Pure."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Times = npt.NDArray[Any]  # UTC microseconds, in any order


def fullest_window(times_us: Times, window_s: float) -> int:
    """The most messages in any window of the length, wherever it is laid; its end belongs to the next one."""
    times = np.sort(times_us)
    first = np.searchsorted(times, times - int(window_s * 1e6), side="right")
    return int((np.arange(len(times)) - first + 1).max(initial=0))


def share_used(times_us: Times, per_second: float) -> float:
    """Messages after the first over what the rate allows from first to last; 1.0 where there are fewer than two."""
    if len(times_us) < 2:
        return 1.0
    seconds = float(times_us.max() - times_us.min()) / 1e6
    return (len(times_us) - 1) / (per_second * seconds) if seconds > 0 else 1.0
