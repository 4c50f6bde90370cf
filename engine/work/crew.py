"""The worker processes of one supervisor: started by spawn, heard over channels, waited for when they die.

A closed channel is not a death: a worker is dead when its process was waited for, and only then is its log read.
A worker that shows no sign of life is killed (SIGKILL) and waited for.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import socket
from collections.abc import AsyncIterator, Callable
from multiprocessing.process import BaseProcess

import msgspec

from engine.work.channel import Channel
from engine.work.messages import Goodbye, Up
from engine.work.worker import WorkerStart, run_worker

# Spawn, never fork: pyarrow's and our own threads would be copied in an unknown state.
_SPAWN = multiprocessing.get_context("spawn")


class Hand(msgspec.Struct, kw_only=True, eq=False):
    """One worker as the supervisor sees it."""

    worker: int
    log_id: str
    process: BaseProcess
    channel: Channel[Up]
    heard_at: float  # monotonic seconds of its last message
    said_goodbye: bool = False
    open_rows: int = 0
    in_doubt: int = 0  # told, of batches that are not done
    has_demand: bool = False
    connections: dict[str, int] = {}
    batches: dict[int, tuple[int, int]] = {}  # batch -> (first row, rows), as assigned and not done
    unread: int = 0
    ready: int = 0
    parked: int = 0
    waiting: int = 0
    in_flight: int = 0
    next_due_us: int | None = None
    asleep: int = 0  # of `waiting`, rows for the hours of their zone
    opens_at: tuple[int, str] | None = None
    reason: str = ""
    demand: dict[tuple[str, str], int] = {}

    @property
    def in_hand(self) -> int:
        """Rows that it has and that wait for a connection."""
        return self.unread + self.ready + self.parked

    @property
    def is_alive(self) -> bool:
        return self.process.is_alive()


class Crew:
    """Starts workers and hears them. `hear` is called with each message, `lost` with each worker that is dead."""

    def __init__(
        self, hear: Callable[[Hand, Up], None], lost: Callable[[Hand], None], now: Callable[[], float]
    ) -> None:
        self._hear, self._lost, self._now = hear, lost, now
        self.hands: dict[int, Hand] = {}
        self._started = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, start: WorkerStart) -> Hand:
        """Spawn one worker."""
        self._started += 1
        start = msgspec.structs.replace(start, number=self._started)
        ours, theirs = socket.socketpair()
        process = _SPAWN.Process(
            target=run_worker,
            args=(theirs, msgspec.json.encode(start)),
            name=f"engine worker {start.worker}",
            daemon=True,
        )
        process.start()
        theirs.close()
        channel: Channel[Up] = Channel(ours, Up)
        await channel.open()
        log_id = f"{start.incarnation}-{start.number:03d}"
        hand = Hand(worker=start.worker, log_id=log_id, process=process, channel=channel, heard_at=self._now())
        self.hands[start.worker] = hand
        task = asyncio.create_task(self._follow(hand))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return hand

    async def _follow(self, hand: Hand) -> None:
        async for message in self._messages(hand):
            self._hear(hand, message)
        while hand.process.is_alive():
            await asyncio.sleep(0.01)
        hand.process.join()
        hand.channel.close()
        if self.hands.get(hand.worker) is hand:
            del self.hands[hand.worker]
        self._lost(hand)

    async def _messages(self, hand: Hand) -> AsyncIterator[Up]:
        async for message in hand.channel.messages():
            hand.heard_at = self._now()
            if isinstance(message, Goodbye):
                hand.said_goodbye, hand.open_rows = True, message.open_rows
            yield message

    def kill_silent(self, patience_s: float) -> list[Hand]:
        """SIGKILL for each worker not heard for so long; `lost` follows once it is dead."""
        silent = [hand for hand in self.hands.values() if self._now() - hand.heard_at > patience_s]
        for hand in silent:
            hand.process.kill()
        return silent

    def kill(self) -> None:
        """SIGKILL for all."""
        for hand in list(self.hands.values()):
            hand.process.kill()

    async def gone(self) -> None:
        """Wait until every worker is dead and its last messages were heard."""
        while self._tasks:
            await asyncio.wait(list(self._tasks))

    async def dismiss(self, patience_s: float) -> None:
        """Nobody leads any more: workers finish what is in flight and end, or are killed after patience_s seconds.

        They ignore SIGTERM, so an exit of this process that only waits for its children would wait for ever.
        """
        for hand in list(self.hands.values()):
            hand.channel.close()
        if self._tasks:
            await asyncio.wait(list(self._tasks), timeout=patience_s)
        self.kill()
        await self.gone()
