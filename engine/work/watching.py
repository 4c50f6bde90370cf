"""Nothing waits in silence: what makes no progress is found by clock and told, and a stuck connection is cut.

`WorkerWatch` looks at one worker's connections, rows and log; `MachineWatch` at the keys and workers of a supervisor.
Both ask about once a second, and `pace.watchdog` says what has been silent for too long. The patience of each command
(RFC 5321 §4.5.3.2) is the session's business. Here a message is measured, however many commands it takes: a server
that answers each command just in time would otherwise keep a row for hours and a connection for ever.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from engine.pace.watchdog import Stall, Watchdog, Watched
from engine.smtp.session import Session
from engine.work.messages import Key

UNACCOUNTED_S = 60.0  # rows on their way from one place to the next are between places for some ticks
SYNC_S = 30.0  # a disk that takes so long to sync is in trouble
_ROWS, _LOG = "rows", "log"


class WorkerWatch:
    """One per worker."""

    def __init__(self) -> None:
        self._dog = Watchdog({Watched.ROW: UNACCOUNTED_S, Watched.WORKER: SYNC_S})
        self._known: dict[Session, tuple[str, int]] = {}  # its name, and the verdicts it had given
        self._numbered = 0
        self._syncing_since: float | None = None

    def look(
        self,
        sessions: Iterable[Session],
        open_rows: int,
        placed: int,
        syncing_since: float | None,
        now: float,
        stuck_after_s: float,
    ) -> list[Stall]:
        """What is to be told. Connections with messages in hand that gave no verdict for `stuck_after_s` are cut.

        `open_rows` have no outcome; `placed` of them are where somebody says what they wait for.
        """
        dog = self._dog
        dog.set_patience(Watched.CONNECTION, stuck_after_s)
        by_name = self._follow(sessions, now)
        if open_rows == placed:
            dog.done(Watched.ROW, _ROWS)
        elif dog.reason(Watched.ROW, _ROWS) is None:
            dog.progress(Watched.ROW, _ROWS, now, f"{open_rows} are open, and {placed} of them in a known place")
        if syncing_since is None:
            dog.done(Watched.WORKER, _LOG)
        else:
            if syncing_since != self._syncing_since:
                dog.done(Watched.WORKER, _LOG)
            if dog.reason(Watched.WORKER, _LOG) is None:
                dog.progress(Watched.WORKER, _LOG, now, "the disk has not synced the log: nothing new may leave")
        self._syncing_since = syncing_since
        stalls = dog.stalled(now)
        for stall in stalls:
            if (session := by_name.get(stall.name)) is not None:
                session.abort()
        return stalls

    def _follow(self, sessions: Iterable[Session], now: float) -> dict[str, Session]:
        dog, known, by_name = self._dog, {}, {}
        for session in sessions:
            verdicts = session.dialogue.accepted + session.dialogue.refused
            name, before = self._known.get(session, ("", -1))
            if not name:
                self._numbered += 1
                name = f"{session.host} ({self._numbered})"
            if session.is_idle:
                dog.done(Watched.CONNECTION, name)
            elif verdicts != before or dog.reason(Watched.CONNECTION, name) is None:
                dog.progress(Watched.CONNECTION, name, now, f"no answer to {session.in_hand} messages; cut")
            known[session], by_name[name] = (name, verdicts), session
        for session in self._known.keys() - known.keys():
            dog.done(Watched.CONNECTION, self._known[session][0])
        self._known = known
        return by_name


class KeyView(Protocol):
    """What is known of a key: `work.pacing` says it."""

    def waits_until(self, key: Key, now: float) -> float | None:
        """When it may go on, where it stands still for a reason that ends by itself."""

    def pause_between_s(self, key: Key) -> float:
        """How far apart messages are at the rates in force; 0: not limited."""

    def limited_by(self, key: Key) -> str:
        """What limits it now, for the operator."""


class MachineWatch:
    """One per supervisor."""

    def __init__(self) -> None:
        self._dog = Watchdog()
        self._answers: dict[Key, int] = {}
        self._reading: dict[int, int] = {}

    def keys(
        self, demand: Mapping[Key, int], answers: Mapping[Key, int], view: KeyView, now: float, stuck_after_s: float
    ) -> None:
        """Keys with rows that may go; `answers` counts what each was answered since the start."""
        dog = self._dog
        dog.set_patience(Watched.DESTINATION, stuck_after_s)
        for key in self._answers.keys() - demand.keys():
            dog.done(Watched.DESTINATION, _named(key))
            del self._answers[key]
        for key, rows in demand.items():
            name, answered = _named(key), answers.get(key, 0)
            until = view.waits_until(key, now)
            if until is not None:
                dog.waits(Watched.DESTINATION, name, now, until, view.limited_by(key))
            elif self._answers.get(key) != answered or dog.reason(Watched.DESTINATION, name) is None:
                doing = f"{rows:,} rows may go, and none is answered; {view.limited_by(key)}"
                # At ten messages a day nothing comes for hours, and that is as it should be.
                dog.waits(Watched.DESTINATION, name, now, now + 2 * view.pause_between_s(key), doing)
            self._answers[key] = answered

    def worker(self, worker: int, unread: int, others: int, now: float) -> None:
        """A worker has so many rows to read, and so many others that it may be busy with or full of."""
        name, dog = str(worker), self._dog
        if not unread or others:
            self.gone(worker)
        elif self._reading.get(worker) != unread or dog.reason(Watched.WORKER, name) is None:
            dog.progress(Watched.WORKER, name, now, f"{unread:,} rows were assigned, and it reads none of them")
        self._reading[worker] = unread

    def gone(self, worker: int) -> None:
        """It is dead, or has enough to do."""
        self._dog.done(Watched.WORKER, str(worker))

    def stalled(self, now: float) -> list[Stall]:
        """What has made no progress for too long, each once, and again after as long once more."""
        return self._dog.stalled(now)


def _named(key: Key) -> str:
    source, provider = key
    return f"{provider} from {source}" if source else provider
