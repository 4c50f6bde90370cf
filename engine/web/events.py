"""Server-sent events: each campaign is read once a second, however many pages look at it.

A page that reads slowly gets the newest state when it is ready for it, not a queue of old ones. A background round
keeps the history of running campaigns, and tells a webhook what happened.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

from starlette.concurrency import run_in_threadpool

from engine.errors import EngineError
from engine.web.shelf import Shelf, Watched
from engine.web.snapshot import Snapshot

ROUND_S = 1.0
QUIET_ROUND_S = 10.0  # for campaigns that nobody sends and nobody looks at
MOST_VIEWERS = 200
_BEAT_S = 15.0


class Round:
    """Looks at campaigns in turn and wakes the pages that show them."""

    def __init__(self, shelf: Shelf, hear: Callable[[Watched, Snapshot], None] | None = None) -> None:
        """`hear` gets each snapshot of the round, on the event loop."""
        self._shelf, self._hear = shelf, hear
        self._news: dict[str, asyncio.Event] = {}
        self._viewers: dict[str, int] = {}
        self._due: dict[str, float] = {}
        self._task: asyncio.Task[None] | None = None
        self._is_over = False
        self.problem = ""

    def start(self) -> None:
        """Begin; on the running loop."""
        self._task = asyncio.create_task(self._run())

    def end_streams(self) -> None:
        """Let every stream end: the server waits for them before it stops."""
        self._is_over = True
        for event in self._news.values():
            event.set()

    async def stop(self) -> None:
        """End."""
        self.end_streams()
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    @property
    def viewers(self) -> int:
        return sum(self._viewers.values())

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            began = loop.time()
            try:
                for watched in await run_in_threadpool(self._shelf.all):
                    if self._due.get(watched.key, 0.0) <= began:
                        await self._one(watched, began)
                self.problem = ""
            except (EngineError, OSError) as problem:
                self.problem = str(problem)
            await asyncio.sleep(max(0.05, ROUND_S - (loop.time() - began)))

    async def _one(self, watched: Watched, now: float) -> None:
        snapshot, _ = await run_in_threadpool(watched.look)
        is_busy = snapshot.state in ("sending", "waiting", "paused") or self._viewers.get(watched.key)
        self._due[watched.key] = now + (0.0 if is_busy else QUIET_ROUND_S)
        if self._hear is not None:
            self._hear(watched, snapshot)
        self.wake(watched.key)

    def wake(self, key: str) -> None:
        """Tell the pages of this campaign that there is something new."""
        if (event := self._news.pop(key, None)) is not None:
            event.set()

    async def stream(self, watched: Watched) -> AsyncIterator[bytes]:
        """The events of one page."""
        key = watched.key
        self._viewers[key] = self._viewers.get(key, 0) + 1
        self._due.pop(key, None)
        last = b""
        try:
            yield b"retry: 2000\n\n"
            while True:
                _, raw = await run_in_threadpool(watched.look)
                if raw != last:
                    last = raw
                    yield b"event: snapshot\ndata: " + raw + b"\n\n"
                event = self._news.setdefault(key, asyncio.Event())
                try:
                    await asyncio.wait_for(event.wait(), _BEAT_S)
                except TimeoutError:
                    yield b": still here\n\n"
                if self._is_over:
                    return
        finally:
            self._viewers[key] -= 1
