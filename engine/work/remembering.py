"""The last events of a run, kept for the counters: what `engine serve` shows under "what happened".

Kept are the events that explain a rate (the throttle, breakers, pauses, deaths); what happens to single rows is left
to the narrator.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from engine.clock import Clock

if TYPE_CHECKING:
    from engine.work.progress import Progress
    from engine.work.supervisor import Narrator

KEPT = frozenset(
    {
        "throttle_eased",
        "throttle_grew",
        "throttle_suspended",
        "throttle_resumed",
        "breaker_open",
        "breaker_released",
        "paused",
        "resumed",
        "slowed",
        "draining",
        "stopping_now",
        "worker_died",
        "worker_silent",
        "log_damaged",
        "store_away",
        "setting_changed",
        "settings_refused",
        "takeover",
    }
)
_MOST_CHARACTERS = 300


class Remembering:
    """A narrator that keeps events and passes all on."""

    def __init__(self, narrator: Narrator, kept: deque[dict[str, object]], clock: Clock) -> None:
        self._narrator, self._kept, self._clock = narrator, kept, clock

    def event(self, name: str, **fields: object) -> None:
        """Pass it on; keep it where it explains something."""
        if name in KEPT:
            told = {key: _short(value) for key, value in fields.items() if value not in (None, "")}
            self._kept.append({"at_us": self._clock.wall_us(), "event": name, **told})
        self._narrator.event(name, **fields)

    def progress(self, progress: Progress, now: float) -> None:
        """Pass it on."""
        self._narrator.progress(progress, now)


def _short(value: object) -> object:
    return value if isinstance(value, int | float) else str(value)[:_MOST_CHARACTERS]
