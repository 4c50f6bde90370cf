"""Accounts and lanes: what the supervisor handed out per key, and where rows queue per destination.

An *account* stands for a key (source, provider): its slots and allowances, shared by every lane of that key in this
worker. A *lane* is one destination: a set of hosts, with the connections to them. Through a relay there is one of each;
direct delivery has a lane per source and set of MX hosts, made when the first row needs it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, MutableMapping

from engine.clock import Clock
from engine.smtp.destination import ConnectionLimits, Destination
from engine.smtp.pool import HostMemory, Pool
from engine.smtp.session import Listener, Session
from engine.work.messages import Key

_UNLIMITED = 1 << 30
_TOGETHER_S = 0.005  # messages nearer than this are told as one, at the later moment


class Account:
    """Slots and allowances of one key in this worker."""

    def __init__(self, key: Key, clock: Clock, *, is_rated: bool) -> None:
        self.key = key
        self.granted = 0
        self.used = 0
        self.is_rated = is_rated  # messages go only against an allowance
        self.lanes: list[Lane] = []
        self.in_air = 0  # messages composed on allowances and not on the wire yet
        self.spent: list[tuple[int, float]] = []  # on the wire since the last pulse: how many, and when
        self.was_told = False  # the supervisor knows of rows that wait for this key
        self._clock = clock
        self._allowances: deque[tuple[int, float]] = deque()
        self.give_slots_back: Callable[[int], None] = lambda connections: None
        self.give_messages_back: Callable[[int], None] = lambda messages: None

    # -- slots (smtp.pool asks these) --------------------------------------------------------------------------------

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
        for lane in self.lanes:
            if lane.pool is not None:
                lane.pool.slots_changed()

    def revoke(self, connections: int) -> None:
        """The supervisor wants slots back: unused ones go at once, others when their connection closes."""
        free = min(connections, self.granted - self.used)
        if free > 0:
            self.granted -= free
            self.give_slots_back(free)
        left = connections - max(free, 0)
        # From the lanes with the most connections first; those that are still being made hold slots as well.
        for lane in sorted(self.lanes, key=lambda lane: -lane.slots):
            if left <= 0:
                return
            share = min(left, lane.slots)
            if share and lane.pool is not None:
                lane.pool.shrink(share)
                left -= share

    def give_back_unused(self) -> None:
        """Slots without a connection, where nobody here has a row for them."""
        if (spare := self.granted - self.used) > 0:
            self.granted -= spare
            self.give_slots_back(spare)

    # -- allowances --------------------------------------------------------------------------------------------------

    def allow(self, messages: int, valid_s: float) -> None:
        """Messages that may be sent within `valid_s`."""
        self._allowances.append((messages, self._clock.monotonic() + valid_s))

    def allowance(self) -> int:
        """Messages that may be sent now."""
        if not self.is_rated:
            return _UNLIMITED
        now = self._clock.monotonic()
        while self._allowances and self._allowances[0][1] <= now:
            self.give_messages_back(self._allowances.popleft()[0])
        return sum(messages for messages, _ in self._allowances)

    def spend(self, messages: int) -> None:
        """Count them against the allowance."""
        if not self.is_rated or not messages:
            return
        self.in_air += messages
        while messages and self._allowances:
            have, until = self._allowances[0]
            spent = min(have, messages)
            messages -= spent
            if spent == have:
                self._allowances.popleft()
            else:
                self._allowances[0] = (have - spent, until)

    def left(self, messages: int) -> None:
        """They are on the wire now: that moment is what the supervisor counts, not the one when they were composed."""
        messages = min(messages, self.in_air)
        if not messages:
            return
        self.in_air -= messages
        now = self._clock.monotonic()
        if self.spent and now - self.spent[-1][1] < _TOGETHER_S:
            messages += self.spent.pop()[0]
        self.spent.append((messages, now))

    def unspend(self, messages: int) -> None:
        """They never left: whoever else may send them."""
        messages = min(messages, self.in_air)
        if messages:
            self.in_air -= messages
            self.give_messages_back(messages)

    def take_spent(self) -> list[tuple[int, float]]:
        """What left since the last call."""
        spent, self.spent = self.spent, []
        return spent


class Lane:
    """One destination of one worker."""

    def __init__(
        self,
        index: int,
        account: Account,
        destination: Destination,
        limits: ConnectionLimits,
        listener: Callable[[Lane], Listener],
        clock: Clock,
        memory: dict[str, HostMemory],
        *,
        provider: int,
        source: int,
    ) -> None:
        self.index = index
        self.account = account
        self.destination = destination
        self.provider = provider  # numbers in the log
        self.source = source
        self.provider_name: str | None = account.key[1]
        self.pool: Pool | None = None
        self.limits = limits
        self.unreachable_since: float | None = None
        self.unreachable_why = ""
        self.on_connection: int | None = None  # messages accepted on the connection that is being heard
        self.failures = 0
        self._listener, self._clock, self._memory = listener, clock, memory
        account.lanes.append(self)

    @property
    def key(self) -> Key:
        return self.account.key

    @property
    def open(self) -> int:
        """Established connections."""
        return self.pool.open if self.pool is not None else 0

    @property
    def slots(self) -> int:
        """Slots in use: connections established and being made."""
        return self.pool.open + self.pool.connecting if self.pool is not None else 0

    def sessions(self) -> Iterable[Session]:
        return self.pool.sessions if self.pool is not None else ()

    def allowance(self) -> int:
        return self.account.allowance()

    def spend(self, messages: int) -> None:
        self.account.spend(messages)

    def unspend(self, messages: int) -> None:
        """They were not sent."""
        self.account.unspend(messages)

    def left(self, messages: int) -> None:
        """They are on the wire."""
        self.account.left(messages)

    def set_limits(self, limits: ConnectionLimits) -> None:
        """Hold connections so from now on."""
        self.limits = limits
        if self.pool is not None:
            self.pool.set_limits(limits)

    def want(self, rows: int) -> None:
        """Ask for as many connections as `rows` (ready, parked and in flight) can keep busy."""
        if self.pool is None:
            if not rows:
                return
            self.pool = Pool(
                self.destination, self.limits, self.account, self._listener(self), self._clock, memory=self._memory
            )
        self.pool.want(min(self.account.granted, math.ceil(rows)) if rows else 0)

    def rest(self) -> bool:
        """Without a connection and a row the pool goes; True where the lane holds none."""
        if self.pool is None:
            return True
        if self.pool.open or self.pool.connecting or self.pool.wanted:
            return False
        self.pool.retire()
        self.pool = None
        return True


class LaneTable:
    """All accounts and lanes of one worker."""

    def __init__(self) -> None:
        self.accounts: MutableMapping[Key, Account] = {}
        self.lanes: list[Lane] = []
        self.busy: dict[int, Lane] = {}  # lanes that have a pool

    def account(self, key: Key) -> Account | None:
        return self.accounts.get(key)

    def with_sessions(self) -> Iterable[Lane]:
        """Lanes that may have something to send through."""
        return tuple(self.busy.values())
