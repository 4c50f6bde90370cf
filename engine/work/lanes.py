"""Lanes: where rows queue, one per destination; slots and allowances of a lane are what the supervisor handed out.

Through a relay there is one lane for every domain. A lane speaks for its key (source, provider): it opens connections
only with slots, sends only against allowances, and gives both back.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable

from engine.clock import Clock
from engine.smtp.pool import Pool
from engine.smtp.session import Session
from engine.work.messages import Key


class DeliveryLane:
    """One destination of one worker."""

    def __init__(self, index: int, key: Key, provider: int, source: int, clock: Clock, *, is_rated: bool) -> None:
        self.index = index
        self.key = key
        self.provider = provider  # numbers in the log
        self.source = source
        self.provider_name: str | None = key[1]
        self.pool: Pool | None = None
        self.granted = 0
        self.used = 0
        self.is_rated = is_rated  # messages go only against an allowance
        self._clock = clock
        self._allowances: deque[tuple[int, float]] = deque()
        self.give_slots_back: Callable[[int], None] = lambda connections: None
        self.give_messages_back: Callable[[int], None] = lambda messages: None

    # -- slots (smtp.pool asks these) ------------------------------------------------------------------------------

    def acquire(self) -> bool:
        """Take a slot for a new connection."""
        if self.used >= self.granted:
            return False
        self.used += 1
        return True

    def release(self) -> None:
        """A connection closed: its slot goes back to the supervisor, who knows who needs it most."""
        self.used -= 1
        self.granted -= 1
        self.give_slots_back(1)

    def grant(self, connections: int) -> None:
        """The supervisor gave more slots."""
        self.granted += connections
        if self.pool is not None:
            self.pool.slots_changed()

    def revoke(self, connections: int) -> None:
        """The supervisor wants slots back: unused ones go at once, others when their connection closes."""
        free = min(connections, self.granted - self.used)
        if free > 0:
            self.granted -= free
            self.give_slots_back(free)
        if connections > free and self.pool is not None:
            self.pool.shrink(connections - free)

    def give_back_unused(self) -> None:
        """Slots without a connection, where nobody here has a row for them."""
        if spare := self.granted - self.used:
            self.granted -= spare
            self.give_slots_back(spare)

    # -- allowances --------------------------------------------------------------------------------------------------

    def allow(self, messages: int, valid_s: float) -> None:
        """Messages that may be sent within `valid_s`."""
        self._allowances.append((messages, self._clock.monotonic() + valid_s))

    def allowance(self) -> int:
        if not self.is_rated:
            return 1 << 30
        now = self._clock.monotonic()
        while self._allowances and self._allowances[0][1] <= now:
            self._allowances.popleft()
        return sum(messages for messages, _ in self._allowances)

    def spend(self, messages: int) -> None:
        if not self.is_rated:
            return
        while messages and self._allowances:
            have, until = self._allowances[0]
            spent = min(have, messages)
            messages -= spent
            if spent == have:
                self._allowances.popleft()
            else:
                self._allowances[0] = (have - spent, until)

    def unspend(self, messages: int) -> None:
        if self.is_rated:
            self.give_messages_back(messages)

    # -- sessions ------------------------------------------------------------------------------------------------------

    def sessions(self) -> Iterable[Session]:
        return self.pool.ready if self.pool is not None else ()

    def want(self, rows: int, depth: int) -> None:
        """Ask for as many connections as `rows` (ready, parked and in flight) can keep busy."""
        if self.pool is not None:
            self.pool.want(min(self.granted, math.ceil(rows / max(1, depth))) if rows else 0)


class RelayLanes:
    """Everything goes through one relay: one lane."""

    def __init__(self, lane: DeliveryLane) -> None:
        self.lane = lane

    def lane_of(self, domain: str) -> int | None:
        return self.lane.index

    def hold(self, domain: str, row: int) -> None:
        raise AssertionError("a relay's lane is always known")
