"""Finds by clock what makes no progress: connections, destinations, workers, rows. Pure.

Whatever is watched says each time it gets on, and what it waits for now. An event that should come and does not (a
reply, a grant, a report) is thus found by the clock; nothing relies on being called back. A public report tells of
messages stuck for three days against a limit of six hours, for age was looked at only when they were requeued.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec


class Watched(StrEnum):
    """What can get stuck, and by default how long it may be silent."""

    CONNECTION = "connection"
    DESTINATION = "destination"
    WORKER = "worker"
    ROW = "row"


# A connection may wait ten minutes for the reply to a final dot (RFC 5321 §4.5.3.2.6); twice the longest wait is stuck.
# A worker reports each second. A destination with rows and slots that settles none for twenty minutes has a cause.
PATIENCE_S = {
    Watched.CONNECTION: 1200.0,
    Watched.DESTINATION: 1200.0,
    Watched.WORKER: 60.0,
    Watched.ROW: 86_400.0 + 3600.0,
}


class Stall(msgspec.Struct, frozen=True):
    """Something that has made no progress for longer than it may."""

    kind: Watched
    name: str
    silent_s: float
    doing: str

    def __str__(self) -> str:
        return f"{self.kind} {self.name} has made no progress for {self.silent_s:,.0f} s: {self.doing}"


class _Watch:
    __slots__ = ("doing", "since", "told_at", "until")

    def __init__(self, since: float) -> None:
        self.since = since
        self.until: float | None = None
        self.doing = ""
        self.told_at: float | None = None


class Watchdog:
    """All that is watched. `now` is one monotonic clock; one that jumps ahead only makes stalls show sooner."""

    def __init__(self, patience_s: dict[Watched, float] | None = None) -> None:
        self._patience_s = {**PATIENCE_S, **(patience_s or {})}
        self._watches: dict[tuple[Watched, str], _Watch] = {}

    def set_patience(self, kind: Watched, patience_s: float) -> None:
        """A live setting: from now on this kind may be silent for so long."""
        self._patience_s[kind] = patience_s

    def progress(self, kind: Watched, name: str, now: float, doing: str = "") -> None:
        """It got on, and now does, or waits for, what `doing` says."""
        watch = self._watches.get((kind, name))
        if watch is None:
            watch = self._watches[kind, name] = _Watch(now)
        watch.since, watch.until, watch.told_at, watch.doing = now, None, None, doing

    def waits(self, kind: Watched, name: str, now: float, until: float, reason: str) -> None:
        """It stands still for a reason that ends by itself (a suspension, a retry): silent until then is no stall."""
        self.progress(kind, name, now, reason)
        self._watches[kind, name].until = until

    def done(self, kind: Watched, name: str) -> None:
        """It is no more."""
        self._watches.pop((kind, name), None)

    def stalled(self, now: float) -> list[Stall]:
        """What has been silent for too long and was not told yet; told again after as long once more."""
        out: list[Stall] = []
        for (kind, name), watch in self._watches.items():
            since = watch.since if watch.until is None else max(watch.since, watch.until)
            patience = self._patience_s[kind]
            if now - max(since, watch.told_at if watch.told_at is not None else since) > patience:
                watch.told_at = now
                out.append(Stall(kind, name, now - since, watch.doing or "nothing was said"))
        return out

    def reason(self, kind: Watched, name: str) -> str | None:
        """What it does or waits for: every waiting state has a reason; None: nobody watches it."""
        watch = self._watches.get((kind, name))
        return watch.doing if watch is not None else None
