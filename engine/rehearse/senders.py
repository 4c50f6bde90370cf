"""Machines, workers and connections as numbers: what a course on a virtual clock is played with."""

from __future__ import annotations

import random
from collections import deque

from engine.pace.scheduler import Scheduler
from engine.pace.slots import Ledger
from engine.pace.throttle import Throttle


class Connection:
    """One of a worker's, to a lane's destination."""

    __slots__ = ("accepted", "closing", "has_timer", "idle_since", "lane", "worker")

    def __init__(self, worker: Worker, lane: int) -> None:
        self.worker, self.lane = worker, lane
        self.accepted = 0
        self.closing = self.has_timer = False
        self.idle_since: float | None = None


class Worker:
    """One process: a scheduler, a reader, connections."""

    def __init__(self, machine: Machine, number: int, rng: random.Random) -> None:
        self.machine, self.number = machine, number
        self.rng = rng
        self.scheduler = Scheduler(rng=rng)
        self.unread: deque[range] = deque()
        self.connections: dict[int, list[Connection]] = {}
        self.idle: dict[int, list[Connection]] = {}
        self.allowed: dict[int, list[tuple[float, int]]] = {}  # lane -> (expires at, messages), oldest first
        self.asked: dict[int, int] = {}  # lane -> demand as last reported
        self.unasked: dict[int, None] = {}  # lanes with rows that the ledger was not asked for yet
        self.wakes_at = float("inf")


class Machine:
    """One sender: its workers, the ledger and the throttle they share, and the batches that nobody has yet."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.workers: list[Worker] = []
        self.ledger: Ledger
        self.throttle: Throttle
        self.batches: deque[range] = deque()
        self.decides_at = float("inf")
        self.ticks_at = float("inf")
