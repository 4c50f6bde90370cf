"""The coarse timer of a process: once a second it looks at every pool. No timer per command or connection."""

from __future__ import annotations

import asyncio
from typing import ClassVar, Protocol
from weakref import WeakKeyDictionary

from engine.smtp.session import READ_BYTES

TICK_S = 1.0


class Watched(Protocol):
    """What is looked at."""

    def tick(self) -> None:
        """A second has passed, about."""


class Watch:
    """Ticks while it has anything to watch. Also holds the one read buffer of its event loop.

    Sharing the buffer is safe: a read is delivered before the next one begins.
    """

    _of: ClassVar[WeakKeyDictionary[asyncio.AbstractEventLoop, Watch]] = WeakKeyDictionary()

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.buffer = memoryview(bytearray(READ_BYTES))
        self._watched: set[Watched] = set()
        self._timer: asyncio.TimerHandle | None = None

    @classmethod
    def of_this_loop(cls) -> Watch:
        """The running loop's watch."""
        loop = asyncio.get_running_loop()
        watch = cls._of.get(loop)
        if watch is None:
            watch = cls._of[loop] = cls(loop)
        return watch

    def add(self, watched: Watched) -> None:
        self._watched.add(watched)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(TICK_S, self._tick)

    def remove(self, watched: Watched) -> None:
        self._watched.discard(watched)
        if not self._watched and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _tick(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(TICK_S, self._tick)
        for watched in tuple(self._watched):
            watched.tick()
