"""A course minute by minute: what each provider accepted and refused, and the ceilings that held. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from engine.pace.throttle import ThrottleEvent
from engine.rehearse.course import Sample
from engine.rehearse.scene import Scene


class Minutes:
    """Counts while a course is played; `samples` at its end."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self._counts: dict[tuple[int, str], list[int]] = {}
        self.events: list[tuple[str, ThrottleEvent]] = []  # (machine, change)

    def at(self, now: float, provider: str) -> list[int]:
        """[accepted, limited] of a provider in this minute, to be counted up."""
        return self._counts.setdefault((int(now // 60), provider), [0, 0])

    def samples(self, machines: Sequence[str], now: float) -> list[Sample]:
        """All minutes with the ceilings that held at their end, from the throttle's events."""
        names = self._scene.single()
        levels: dict[tuple[str, str], tuple[int, float | None]] = {}
        for lane, name in names.items():
            limits = self._scene.limits(lane)
            for machine in machines:
                levels[machine, name] = (limits.connections, limits.rate_per_s)
        events = deque(sorted(self.events, key=lambda told: told[1].at))
        samples: list[Sample] = []
        for minute in range(int(now // 60) + 1):
            while events and events[0][1].at < (minute + 1) * 60:
                source, event = events.popleft()
                if (told_name := names.get(int(event.key.provider))) is not None:
                    levels[source, told_name] = (event.after.connections, event.after.rate_per_s)
            for name in names.values():
                accepted, limited = self._counts.get((minute, name), (0, 0))
                held = [levels[machine, name] for machine in machines]
                rates = [rate for _, rate in held if rate is not None]
                connections = sum(connections for connections, _ in held)
                samples.append(Sample(minute, name, accepted, limited, connections, sum(rates) if rates else None))
        return samples
