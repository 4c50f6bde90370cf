"""The intake: sources to desk, batch by batch, once or for as long as it is wanted.

Per batch: the desk acts and records (durable), then the source settles. A source that fails is told and tried again
when following; the others go on. One intake at a time reads for a campaign folder on one machine.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from engine.bounce.desk import Desk, Taken
from engine.bounce.sources import Source, SourceUnreadable
from engine.errors import EngineError, Exit

INBOX = "inbox"  # under feedback/: what a pipe and the web endpoint leave
UNMATCHED = "unmatched"
_RETRY_S = (5.0, 15.0, 60.0, 300.0)


class AnotherIntake(EngineError):
    """Another `engine bounces` reads for {folder}."""

    exit_code = Exit.TRY_AGAIN
    hint = "Wait for it, or stop it: two would do the same work twice."


class Tally(msgspec.Struct):
    """What an intake did, for the operator."""

    messages: int = 0
    known: int = 0
    unmatched: int = 0
    kinds: dict[str, int] = {}
    decisions: dict[str, int] = {}
    problems: list[str] = []

    def add(self, taken: Taken) -> None:
        if taken.was_known:
            self.known += 1
            return
        self.messages += 1
        self.unmatched += not taken.is_matched
        self.kinds[str(taken.kind)] = self.kinds.get(str(taken.kind), 0) + 1
        for decision, count in Counter(taken.decisions).items():
            if decision:
                self.decisions[str(decision)] = self.decisions.get(str(decision), 0) + count


@contextlib.contextmanager
def intake_lock(folders: Sequence[Path]) -> Iterator[None]:
    """Holds the feedback folders of these campaigns; raises AnotherIntake where somebody else does."""
    held: list[int] = []
    try:
        for folder in sorted(set(folders)):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = os.open(folder / "intake.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            held.append(descriptor)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise AnotherIntake(folder=folder.parent) from None
        yield
    finally:
        for descriptor in held:
            os.close(descriptor)


def read_once(sources: Sequence[Source], desk: Desk, tell: Callable[[str], None] = lambda text: None) -> Tally:
    """Everything that waits now. A source that cannot be read is told and stands in `problems`."""
    tally = Tally()
    for source in sources:
        try:
            _drain(source, desk, tally)
        except SourceUnreadable as problem:
            tally.problems.append(str(problem))
            tell(str(problem))
    return tally


def _drain(source: Source, desk: Desk, tally: Tally) -> None:
    for batch in source.batches():
        for found, taken in zip(batch, desk.take([found.incoming for found in batch]), strict=True):
            tally.add(taken)
            source.settle(found, taken)


def follow(
    sources: Sequence[Source],
    desk: Desk,
    *,
    is_stopped: Callable[[], bool],
    told: Callable[[Tally], None],
    tell: Callable[[str], None],
    poll_s: float = 30.0,
    sleep: Callable[[float], None],
) -> None:
    """Reads until `is_stopped`; waits at the first source (IDLE) when it is alone, else looks at all in turn."""
    failures = 0
    while not is_stopped():
        tally = read_once(sources, desk, tell)
        if tally.messages or tally.problems:
            told(tally)
        failures = failures + 1 if tally.problems else 0
        if is_stopped():
            return
        if failures:
            sleep(_RETRY_S[min(failures, len(_RETRY_S)) - 1])
            continue
        try:
            sources[0].wait(poll_s if len(sources) == 1 else min(poll_s, 5.0))
        except SourceUnreadable as problem:
            tell(str(problem))
            sleep(_RETRY_S[0])
