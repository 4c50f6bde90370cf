"""Server-sent events: each campaign is read once a second, however many pages look at it, and encoded once.

A page gets a whole snapshot first, then what changes. One that reads slowly, and missed a change, gets the newest
snapshot whole when it is ready for it, not a queue of old ones. A background round keeps the history of running
campaigns, and tells a webhook what happened; a store that hangs holds up its own campaign alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor

import msgspec

from engine.errors import EngineError
from engine.web.changes import changes
from engine.web.shelf import Shelf, Watched
from engine.web.snapshot import Snapshot

ROUND_S = 1.0
QUIET_ROUND_S = 10.0  # for campaigns that nobody sends and nobody looks at
MOST_VIEWERS = 200
_BEAT_S = 15.0
_THREADS = 8  # that many stores may hang at once


class Feed:
    """What pages of one campaign are sent; on the event loop."""

    def __init__(self) -> None:
        self.viewers = 0
        self.number = 0  # of the newest snapshot
        self._snapshot: Snapshot | None = None
        self._change = b""  # from the one before
        self._whole: tuple[int, bytes] = (0, b"")
        self._news = asyncio.Event()

    def put(self, snapshot: Snapshot) -> None:
        """A new look at the campaign."""
        before, self._snapshot = self._snapshot, snapshot
        if snapshot is before:
            return
        self.number += 1
        self._change = _event("changes", changes(before, snapshot)) if self.viewers and before is not None else b""
        self.wake()

    def wake(self) -> None:
        """Let every page look at what there is."""
        news, self._news = self._news, asyncio.Event()
        news.set()

    def since(self, number: int) -> bytes:
        """What brings a page that has this number up to date; nothing if it is."""
        if number == self.number or self._snapshot is None:
            return b""
        if number == self.number - 1 and self._change:
            return self._change
        if self._whole[0] != self.number:
            self._whole = (self.number, _event("snapshot", self._snapshot))
        return self._whole[1]

    async def wait(self) -> None:
        """Until there is something new."""
        await self._news.wait()


def _event(name: str, value: msgspec.Struct) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + msgspec.json.encode(value) + b"\n\n"


class Round:
    """Looks at campaigns in turn and wakes the pages that show them."""

    def __init__(self, shelf: Shelf, hear: Callable[[Watched, Snapshot], None] | None = None) -> None:
        """`hear` gets each snapshot of the round, on the event loop."""
        self._shelf, self._hear = shelf, hear
        self._feeds: dict[str, Feed] = {}
        self._due: dict[str, float] = {}
        self._looking: dict[str, asyncio.Task[None]] = {}
        self._threads = ThreadPoolExecutor(_THREADS, "look")
        self._task: asyncio.Task[None] | None = None
        self._is_over = False
        self.problem = ""

    def start(self) -> None:
        """Begin; on the running loop."""
        self._task = asyncio.create_task(self._run())

    def end_streams(self) -> None:
        """Let every stream end: the server waits for them before it stops."""
        self._is_over = True
        for feed in self._feeds.values():
            feed.wake()

    async def stop(self) -> None:
        """End."""
        self.end_streams()
        tasks = [*self._looking.values(), *([self._task] if self._task is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._threads.shutdown(wait=False, cancel_futures=True)

    @property
    def viewers(self) -> int:
        """Pages that look."""
        return sum(feed.viewers for feed in self._feeds.values())

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            began = loop.time()
            try:
                for watched in await loop.run_in_executor(self._threads, self._shelf.all):
                    if self._due.get(watched.key, 0.0) <= began and watched.key not in self._looking:
                        self._looking[watched.key] = loop.create_task(self._one(watched, began))
                if self._looking:
                    await asyncio.wait(self._looking.values(), timeout=ROUND_S)
                self.problem = ""
            except (EngineError, OSError) as problem:
                self.problem = str(problem)
            await asyncio.sleep(max(0.05, ROUND_S - (loop.time() - began)))

    async def _one(self, watched: Watched, now: float) -> None:
        try:
            snapshot = await asyncio.get_running_loop().run_in_executor(self._threads, watched.look)
            feed = self._feed(watched.key)
            is_busy = snapshot.state in ("sending", "waiting", "paused") or feed.viewers
            self._due[watched.key] = now + (0.0 if is_busy else QUIET_ROUND_S)
            if self._hear is not None:
                self._hear(watched, snapshot)
            feed.put(snapshot)
        finally:
            del self._looking[watched.key]

    def _feed(self, key: str) -> Feed:
        return self._feeds.setdefault(key, Feed())

    async def stream(self, watched: Watched) -> AsyncIterator[bytes]:
        """The events of one page."""
        feed = self._feed(watched.key)
        feed.viewers += 1
        self._due.pop(watched.key, None)  # somebody looks: it is read in each round from now on
        number = 0
        try:
            yield b"retry: 2000\n\n"
            feed.put(await asyncio.get_running_loop().run_in_executor(self._threads, watched.look))
            while not self._is_over:
                news = feed.since(number)
                if news:
                    number = feed.number
                    yield news
                    continue  # it may have taken its time
                try:
                    await asyncio.wait_for(feed.wait(), _BEAT_S)
                except TimeoutError:
                    yield b": still here\n\n"
        finally:
            feed.viewers -= 1
