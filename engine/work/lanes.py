"""Accounts and lanes: what the supervisor handed out per key, and where rows queue per destination.

An *account* stands for a key (source, provider): its slots and allowances, shared by every lane of that key in this
worker. A *lane* is one destination: a set of hosts, with the connections to them. Through a relay there is one of each;
direct delivery has a lane per source and set of MX hosts, made when the first row needs it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, MutableMapping

import msgspec

from engine.clock import Clock
from engine.smtp.destination import ConnectionLimits, Destination, Host
from engine.smtp.pool import HostMemory, Pool
from engine.smtp.session import Listener, Session
from engine.work.messages import Key

_UNLIMITED = 1 << 30
_SHARE_EVERY_S = 0.25
_TURN_S = 10.0  # a lane keeps the last slot so long while a neighbour has rows and none
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
        self.per_connection: int | None = None  # the throttle's word, for the connections of every lane
        self._clock = clock
        self._shared_at = -math.inf
        self.holds: Callable[[Account], None] = lambda account: None
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
        """The supervisor gave more slots: to lanes with the fewest first, of equals to who had one longest ago."""
        self.granted += connections
        self.holds(self)
        lanes = self.lanes
        if len(lanes) > 1:
            lanes = sorted(lanes, key=lambda lane: (lane.slots, lane.held_at))
        for lane in lanes:
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

    def share_out(self, rows: Mapping[int, int], now: float) -> None:
        """Slots that nobody here has a row for go back. A lane with rows and no slot gets one from its neighbours: at
        once where their connections are idle, else after a turn."""
        if self.granted > self.used:
            if not any(rows.get(lane.index) for lane in self.lanes):
                self.give_back_unused()
            return
        if len(self.lanes) < 2 or now - self._shared_at < _SHARE_EVERY_S:
            return
        self._shared_at = now
        starved = 0
        for lane in self.lanes:
            if lane.slots:
                lane.starved_since, lane.held_at = None, now
            elif not rows.get(lane.index):
                lane.starved_since = None
            else:
                starved += 1
                lane.starved_since = now if lane.starved_since is None else lane.starved_since
        if not starved:
            return
        for lane in self.lanes:
            if starved and lane.pool is not None and lane.slots and not rows.get(lane.index):
                given = min(starved, lane.slots)
                lane.pool.shrink(given)
                starved -= given
        waited_s = max(now - lane.starved_since for lane in self.lanes if lane.starved_since is not None)
        if starved and waited_s >= _TURN_S:
            richest = max(self.lanes, key=lambda lane: lane.slots)
            if richest.pool is not None and richest.slots:
                richest.pool.shrink(1)
                for lane in self.lanes:
                    lane.starved_since = None  # whoever comes next waits for a turn of its own

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
        self.retry_after_s: float | None = None  # the budget's word on the first retry
        self.selector: str | None = None  # what the source signs with; None: the campaign's own
        self.wants = ""  # why nothing but good TLS will do, for the operator
        self.on_connection: int | None = None  # messages accepted on the connection that is being heard
        self.failures = 0
        self.starved_since: float | None = None  # rows, and no slot
        self.held_at = -math.inf  # when it was last seen with a slot, where lanes share an account
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

    def all_sessions(self) -> Iterable[Session]:
        """Every established connection, also those that take nothing now."""
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
        self.ease()

    def move_to(self, hosts: tuple[Host, ...]) -> None:
        """Connect to these from now on: the same hosts, at the addresses they have today."""
        self.destination = msgspec.structs.replace(self.destination, hosts=hosts)
        if self.pool is not None:
            self.pool.destination = self.destination

    def ease(self) -> None:
        """Hold them so, and as the throttle of the account says."""
        if self.pool is not None:
            self.pool.set_limits(self._eased())

    def _eased(self) -> ConnectionLimits:
        most = self.account.per_connection
        if most is None or most >= self.limits.messages_per_connection:
            return self.limits
        return msgspec.structs.replace(self.limits, messages_per_connection=most)

    def want(self, rows: int) -> None:
        """Ask for as many connections as `rows` (ready, parked and in flight) can keep busy."""
        if self.pool is None:
            if not rows:
                return
            self.pool = Pool(
                self.destination, self._eased(), self.account, self._listener(self), self._clock, memory=self._memory
            )
        # One at least, so that the next slot finds who wants it; without a slot nothing is opened.
        self.pool.want(min(max(1, self.account.granted), math.ceil(rows)) if rows else 0)

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
        # A list may have 300,000 providers: what is done many times a second looks at those that hold slots alone.
        self.holding: dict[Key, Account] = {}
        self._told: set[Key] = set()  # of these the supervisor knows that rows wait

    def account(self, key: Key) -> Account | None:
        return self.accounts.get(key)

    def with_sessions(self) -> Iterable[Lane]:
        """Lanes that may have something to send through."""
        return tuple(self.busy.values())

    def want(self, rows: Mapping[int, int], now: float) -> None:
        """Ask for the connections that these rows, by lane, can keep busy; what is not needed goes back."""
        for index in rows.keys() - self.busy.keys():
            self.busy[index] = self.lanes[index]
        for index, lane in list(self.busy.items()):
            lane.want(rows.get(index, 0))
            if not rows.get(index, 0) and lane.rest():
                del self.busy[index]
        for key, account in list(self.holding.items()):
            account.share_out(rows, now)
            if not account.granted and not account.spent:
                del self.holding[key]

    def demand(self, rows: Mapping[int, int]) -> dict[Key, int]:
        """The same by account, with a last zero for those that have none any more."""
        demand: dict[Key, int] = dict.fromkeys(self._told, 0)
        for index, count in rows.items():
            key = self.lanes[index].key
            demand[key] = demand.get(key, 0) + count
        self._told = {key for key, count in demand.items() if count}
        return demand

    def take_spent(self) -> list[tuple[Key, int, float]]:
        """What left since the last call."""
        return [(key, count, at) for key, account in self.holding.items() for count, at in account.take_spent()]
