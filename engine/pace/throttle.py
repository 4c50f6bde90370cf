"""What each (source, provider) may do now, and why. Pure: signals and the time go in, ceilings and events come out.

A key has a kind: most signals are about one source address at one provider; some are about a signing domain or the
campaign at that provider, and hold for every source and every machine: `wide` lists those ceilings for the store,
`obey` takes over what another machine learnt. `easing` decides; this module keeps the states, the pauses, the events
and what survives a restart.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from enum import StrEnum
from typing import Any

import msgspec

from engine.pace.easing import Adaptive, Easing
from engine.pace.signals import WINDOW_S, Limits, Observation, Signal, State

__all__ = ["Ceiling", "EventKind", "Key", "Kind", "Limits", "Observation", "Signal", "Throttle", "ThrottleEvent"]


class Kind(StrEnum):
    """Whose ceiling it is."""

    SOURCE = "source"
    SIGNING_DOMAIN = "signing_domain"
    CAMPAIGN = "campaign"


class Key(msgspec.Struct, frozen=True, order=True):
    """One source (or signing domain, or campaign) at one provider."""

    name: str
    provider: str
    kind: Kind = Kind.SOURCE

    def __str__(self) -> str:
        return f"{self.provider} from {self.name}"


class Ceiling(msgspec.Struct, frozen=True):
    """What is allowed now. `connections` is 0 while suspended; None says not limited by the throttle."""

    connections: int
    rate_per_s: float | None = None
    per_connection: int | None = None
    suspended_until: float | None = None
    reason: str = ""


class EventKind(StrEnum):
    """What changed."""

    EASED = "eased"
    GREW = "grew"
    SUSPENDED = "suspended"
    RESUMED = "resumed"


class ThrottleEvent(msgspec.Struct, frozen=True):
    """One change, for the log and the operator."""

    at: float
    key: Key
    kind: EventKind
    before: Ceiling
    after: Ceiling
    reason: str


def _no_limits(key: Key) -> Limits:
    return Limits()


class Throttle:
    """The ceilings of all keys."""

    def __init__(self, limits: Callable[[Key], Limits] = _no_limits, easing: Easing | None = None) -> None:
        """`limits` tells what the budget allows at most; a wide key's limits should be generous."""
        self._limits = limits
        self._easing = easing or Adaptive()
        self._states: dict[Key, State] = {}
        self._events: list[ThrottleEvent] = []
        self._due: list[tuple[float, Key]] = []  # ends of pauses and windows

    def observe(self, key: Key, seen: Observation) -> None:
        """Take one answer into account. What changes is told by the next `tick`."""
        state = self._state(key)
        if state.window_at is None:
            heapq.heappush(self._due, (seen.now + WINDOW_S, key))
        state.count(seen)
        before = self._ceiling(state)
        self._easing.observe(state, seen)
        self._tell(key, state, before, seen.now)

    def tick(self, now: float) -> list[ThrottleEvent]:
        """End pauses and windows; returns all changes since the last tick. Call it about once a second.

        A key that a whole window saw nothing of, and that nothing was learnt about, is forgotten.
        """
        while self._due and self._due[0][0] <= now:
            _, key = heapq.heappop(self._due)
            if (state := self._states.get(key)) is not None:
                self._end(key, state, now)
        events, self._events = self._events, []
        return events

    def next_at(self) -> float | None:
        """When `tick` has something to do, at the earliest; now, if events wait."""
        if self._events:
            return self._events[0].at
        return self._due[0][0] if self._due else None

    def _end(self, key: Key, state: State, now: float) -> None:
        before = self._ceiling(state)
        if state.suspended_until_at is not None and now >= state.suspended_until_at:
            state.suspended_until_at = None
            state.eased_at = state.stepped_at = now
            state.reason = f"pause over, going on with {_connections(state.connections)}"
            self._tell(key, state, before, now)
            before = self._ceiling(state)
        if state.window_at is not None and now >= state.window_at + WINDOW_S:
            self._easing.window(state, now)
            self._tell(key, state, before, now)
            if state.attempts:
                state.next_window(now)
                heapq.heappush(self._due, (now + WINDOW_S, key))
            else:
                state.window_at = None
                state.last_attempts = 0
                if self._knows_nothing(state):
                    del self._states[key]

    def _knows_nothing(self, state: State) -> bool:
        return (
            state.suspended_until_at is None
            and not state.is_recovering
            and state.eased_at is None
            and state.connections_eased_at is None
            and state.connections == state.limits.connections
            and state.per_connection == state.limits.per_connection
        )

    def ceiling(self, *keys: Key) -> Ceiling:
        """What is allowed for a message that all these keys concern: the least of each."""
        told = [self._ceiling(self._states[key]) for key in keys if key in self._states]
        if not told:
            return _as_budgeted(self._limits(keys[0]))
        if len(told) == 1 and len(keys) == 1:
            return told[0]
        if keys[0] not in self._states:
            told.insert(0, _as_budgeted(self._limits(keys[0])))
        tightest = min(told, key=lambda c: (c.connections, c.rate_per_s if c.rate_per_s is not None else float("inf")))
        return Ceiling(
            tightest.connections,
            min((c.rate_per_s for c in told if c.rate_per_s is not None), default=None),
            min((c.per_connection for c in told if c.per_connection is not None), default=None),
            max((c.suspended_until for c in told if c.suspended_until is not None), default=None),
            tightest.reason,
        )

    def suspend(self, key: Key, until: float, now: float, reason: str) -> None:
        """The operator's word, or a breaker's."""
        state = self._state(key)
        before = self._ceiling(state)
        state.suspend(now, max(0.0, until - now), reason)
        state.doubles = True
        self._tell(key, state, before, now)

    def resume(self, key: Key, now: float) -> None:
        """End a pause before its time, with the connections there were; the operator's word."""
        state = self._state(key)
        before = self._ceiling(state)
        if state.suspended_until_at is not None:
            state.suspended_until_at = None
            state.connections = min(state.limits.connections, max(1, state.goal_connections))
            state.is_recovering = False
            state.reason = "resumed by the operator"
            self._tell(key, state, before, now)

    def budgets_changed(self) -> None:
        """Ask for all limits again: a live change of the budget holds at once."""
        for key, state in self._states.items():
            raised = self._limits(key)
            if state.connections >= state.limits.connections:
                state.connections = raised.connections
            if state.rate_per_s is not None and state.rate_per_s == state.limits.rate_per_s:
                state.rate_per_s = raised.rate_per_s
            _confine(state, raised)

    def wide(self) -> dict[Key, Ceiling]:
        """Ceilings that concern more than one source, for the store and other machines."""
        return {key: self._ceiling(state) for key, state in self._states.items() if key.kind is not Kind.SOURCE}

    def obey(self, key: Key, told: Ceiling, now: float) -> None:
        """Take over what another machine learnt about a wide key: the stricter of both holds."""
        state = self._state(key)
        before = self._ceiling(state)
        if told.suspended_until is not None and told.suspended_until > (state.suspended_until_at or now):
            state.suspend(now, told.suspended_until - now, told.reason)
            state.connections = 1
        elif told.rate_per_s is not None and (state.rate_per_s is None or told.rate_per_s < state.rate_per_s):
            state.rate_per_s = told.rate_per_s
            state.reason = told.reason
        self._tell(key, state, before, now)

    def to_dict(self, now: float) -> dict[str, Any]:
        """What is known, for a restart. Times are kept relative to `now`."""
        return {
            "states": [
                [key.kind.value, key.name, key.provider, msgspec.to_builtins(_shifted(state, -now))]
                for key, state in self._states.items()
            ]
        }

    def from_dict(self, kept: dict[str, Any], now: float, away_s: float = 0.0) -> None:
        """Go on where `to_dict` stopped `away_s` seconds ago; today's budgets confine what was known."""
        for kind, name, provider, raw in kept.get("states", []):
            key = Key(name, provider, Kind(kind))
            state = _shifted(msgspec.convert(raw, State), now - away_s)
            _confine(state, self._limits(key))
            self._states[key] = state
            for at in (state.window_at, state.suspended_until_at):
                if at is not None:
                    heapq.heappush(self._due, (at + (WINDOW_S if at == state.window_at else 0.0), key))

    def _state(self, key: Key) -> State:
        state = self._states.get(key)
        if state is None:
            limits = self._limits(key)
            state = self._states[key] = State(
                limits=limits,
                connections=limits.connections,
                rate_per_s=limits.rate_per_s,
                per_connection=limits.per_connection,
            )
        return state

    def _ceiling(self, state: State) -> Ceiling:
        suspended = state.suspended_until_at is not None
        return Ceiling(
            0 if suspended else state.connections,
            state.rate_per_s,
            state.per_connection,
            state.suspended_until_at,
            state.reason,
        )

    def _tell(self, key: Key, state: State, before: Ceiling, now: float) -> None:
        after = self._ceiling(state)
        if (before.suspended_until is None) != (after.suspended_until is None):
            kind = EventKind.SUSPENDED if after.suspended_until is not None else EventKind.RESUMED
        elif before.suspended_until != after.suspended_until:
            kind = EventKind.SUSPENDED
        elif _is_less(after, before):
            kind = EventKind.EASED
        elif _is_less(before, after):
            kind = EventKind.GREW
        else:
            return
        if after.suspended_until is not None:
            heapq.heappush(self._due, (after.suspended_until, key))
        self._events.append(ThrottleEvent(now, key, kind, before, after, after.reason))


def _connections(count: int) -> str:
    return "1 connection" if count == 1 else f"{count} connections"


def _as_budgeted(limits: Limits) -> Ceiling:
    return Ceiling(limits.connections, limits.rate_per_s, limits.per_connection, None, "as budgeted")


def _is_less(a: Ceiling, b: Ceiling) -> bool:
    def less(x: float | None, y: float | None) -> bool:
        return x is not None and (y is None or x < y)

    return a.connections < b.connections or less(a.rate_per_s, b.rate_per_s) or less(a.per_connection, b.per_connection)


def _confine(state: State, limits: Limits) -> None:
    """A budget is an upper bound, whatever was learnt."""
    state.limits = limits
    state.connections = min(state.connections, limits.connections) if limits.connections else 0
    if limits.rate_per_s is not None:
        state.rate_per_s = min(
            limits.rate_per_s, state.rate_per_s if state.rate_per_s is not None else limits.rate_per_s
        )
    if limits.per_connection is not None:
        state.per_connection = min(limits.per_connection, state.per_connection or limits.per_connection)


_TIMES = tuple(name for name in State.__struct_fields__ if name.endswith("_at"))


def _shifted(state: State, by: float) -> State:
    times = {name: value + by for name in _TIMES if (value := getattr(state, name)) is not None}
    return msgspec.structs.replace(state, **times)


def keys_of(source: str, provider: str, signing_domain: str, campaign: str) -> Iterable[Key]:
    """The keys that one message concerns, the source's first."""
    return (
        Key(source, provider),
        Key(signing_domain, provider, Kind.SIGNING_DOMAIN),
        Key(campaign, provider, Kind.CAMPAIGN),
    )
