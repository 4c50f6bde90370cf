"""This machine's part of limits that all machines share: asked for by demand, kept in the store, obeyed by the ledger.

`pace.commons` decides; this module reads a key's table from the store, has it settled, and swaps it in if nobody else
did meanwhile. What we are to give up is given up before that is told, what we gain is used after it was stored. A
machine that does not reach the store loses its part when its lease would have ended, counted from before the request
that renewed it (PROTOCOL "Limits shared by machines").

About a second apart, sooner while something changes; off the event loop, on a connection of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar, TypeVarTuple, Unpack

import msgspec

from engine.clock import Clock
from engine.control.store import LimitStore
from engine.errors import EngineError
from engine.pace import commons
from engine.pace.budgets import ALL_SOURCES
from engine.pace.commons import CONNECTIONS, MESSAGES, OPENING, SPEED, Ask, Holding, Table
from engine.pace.slots import Limit, Share, Use
from engine.work.messages import Key

Args = TypeVarTuple("Args")
Result = TypeVar("Result")

EVERY_S = 1.0
SOON_S = 0.1  # while what we hold and what we want come together
_AHEAD_S = 3.0  # of a long window's count, so much is held beyond what is used
_IN_HAND_S = 0.7  # workers tell five times a second what they sent
_FLOW_S = 0.8
_TRIES = 4
_LONGEST_WAIT_S = 5.0


class Pace(Protocol):
    """Whoever knows what keys may use and do use."""

    def known_keys(self) -> list[Key]:
        """Keys that were asked for in this run."""

    def whole(self, key: Key) -> Limit:
        """What all machines together may use."""

    def own_connections(self, key: Key) -> int:
        """Connections that this machine's throttle would use, if all were its own."""

    def use(self, key: Key, now: float) -> Use:
        """What is used now."""

    def share_changed(self, key: Key) -> None:
        """Ask `confined` again."""


class Sharing:
    """One supervisor's part of every shared limit."""

    def __init__(
        self,
        open_store: Callable[[], LimitStore],
        me: str,
        lease_s: float,
        clock: Clock,
        *,
        quiet_s: float,
        all_keys: bool,
        dead: frozenset[str] = frozenset(),
    ) -> None:
        """`all_keys`: a relay, whose limits are the campaign's; else those of budgets with that scope.

        `quiet_s`: how long a connection may wait for its last answer. `dead` are incarnations whose processes are gone
        for certain: their connections are closed.
        """
        self._open_store, self._me, self._clock, self._dead = open_store, me, clock, dead
        self._lease_s, self._quiet_us, self._all_keys = lease_s, round(quiet_s * 1e6), all_keys
        self._margin_s = min(1.0, lease_s / 6)
        self._grants: dict[Key, dict[str, int]] = {}
        self._expires: dict[Key, float] = {}
        self._waiting: set[Key] = set()
        self._flows: dict[Key, tuple[float, int, float]] = {}  # when, sent by then, a second before
        self._news = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, "store-limits")
        self._store: LimitStore | None = None
        self._pace: Pace | None = None
        self._task: asyncio.Task[None] | None = None

    # -- what pacing asks --------------------------------------------------------------------------------------------

    def concerns(self, key: Key) -> bool:
        """Whether machines share the limits of this key."""
        return self._all_keys or key[0] == ALL_SOURCES

    def confined(self, key: Key, whole: Limit, own: Limit) -> Limit:
        """`own`, within our part of `whole`. Nothing until we were granted something."""
        grant = self._grants.get(key, {})
        counts = tuple(grant.get(_messages(rate.per_s), 0) for rate in whole.rates)
        speed = _speed(whole)
        is_few = any(rate.count < commons.FEW for rate in whole.rates)
        part = 1.0 if is_few or not speed else min(1.0, grant.get(SPEED, 0) / speed)
        opening = grant.get(_opening(whole.connection_rate.per_s), 0) if whole.connection_rate is not None else 0
        connections = min(own.connections, grant.get(CONNECTIONS, 0))
        return msgspec.structs.replace(own, connections=connections, share=Share(counts, part, opening))

    def granted(self, key: Key) -> int:
        """Connections that are ours now."""
        return self._grants.get(key, {}).get(CONNECTIONS, 0)

    def wake(self) -> None:
        """Something new is wanted: ask now."""
        self._news.set()

    def tick(self, now: float) -> None:
        """What was not renewed in time is given up."""
        for key, expires_at in list(self._expires.items()):
            if now >= expires_at - self._margin_s:
                del self._expires[key]
                self._set(key, {})

    @property
    def waits(self) -> bool:
        """Whether rows wait for a limit of which others hold everything."""
        return bool(self._waiting)

    # -- life --------------------------------------------------------------------------------------------------------

    def start(self, pace: Pace) -> None:
        """Begin, on the running loop."""
        self.attach(pace)
        self._task = asyncio.get_running_loop().create_task(self._run())

    def attach(self, pace: Pace) -> None:
        """Ask `pace` from now on."""
        self._pace = pace

    async def finish(self, patience_s: float = 5.0) -> None:
        """Every connection is closed: give everything back, or let it expire with the lease."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._expires or self._grants:
            with contextlib.suppress(EngineError, TimeoutError):  # it expires with the lease
                await asyncio.wait_for(self._leave(), patience_s)
        await self._in_thread(self._close)
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _run(self) -> None:
        wait_s = 0.0
        away_s = 0.2
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), wait_s)
            self._news.clear()
            try:
                is_settled = await self._round()
                away_s = 0.2
                wait_s = min(EVERY_S, self._lease_s / 4) if is_settled else SOON_S
                if not is_settled:
                    await asyncio.sleep(SOON_S / 2)
            except EngineError:  # told by who renews the lease
                await asyncio.sleep(away_s)
                away_s = min(2 * away_s, _LONGEST_WAIT_S, self._lease_s / 3)

    async def _round(self) -> bool:
        """Settle every key. True where nothing is on its way to change."""
        assert self._pace is not None
        left = [key for key in self._pace.known_keys() if self.concerns(key)]
        is_settled = True
        for tries in range(_TRIES):
            if not left:
                return is_settled
            if tries:
                await asyncio.sleep(random.uniform(0, 0.02))  # somebody else was faster
            asked_at = self._clock.monotonic()
            now_us, found = await self._in_thread(self._read, sorted(map(_name, left)))
            made: dict[str, tuple[int, bytes]] = {}
            grants: dict[Key, dict[str, int]] = {}
            for key in left:
                version, table = found.get(_name(key), (0, {}))
                changed, grant, is_quiet = self.settle(key, table, now_us)
                is_settled = is_settled and is_quiet
                if changed is not None:
                    made[_name(key)] = (version, msgspec.json.encode(changed))
                    grants[key] = grant
            swapped = await self._in_thread(self._swap, made) if made else frozenset()
            for key, grant in grants.items():
                if _name(key) in swapped:
                    self.stored(key, grant, asked_at)
            left = [key for key in grants if _name(key) not in swapped]
        return False

    def settle(self, key: Key, table: Table, now_us: int) -> tuple[Table | None, dict[str, int], bool]:
        """The key's new table (None: as it is), our grant, and whether nothing is on its way to change."""
        pace = self._pace
        assert pace is not None
        ask = self._ask(key)
        lease_us = round(self._lease_s * 1e6)
        buried = commons.bury(table, set(self._dead), now_us) if self._dead & table.keys() else table
        changed, grant = commons.settle(buried, self._me, ask, now_us, lease_us, self._quiet_us)
        had = self._grants.get(key, {})
        # Given up before it is told: others may have it as soon as that is stored.
        self._set(key, {name: min(count, grant.get(name, 0)) for name, count in had.items()})
        mine, before = changed[self._me], table.get(self._me)
        wants = [name for name, count in mine.wanted.items() if grant[name] < min(count, ask.limits[name])]
        is_stuck = bool(wants) and any(not grant[name] for name in (CONNECTIONS, *wants))
        (self._waiting.add if is_stuck else self._waiting.discard)(key)
        is_quiet = all(
            mine.held[name] <= count and abs(count - had.get(name, 0)) <= ask.limits[name] // 8
            for name, count in grant.items()
        )
        is_fresh = before is not None and before.until_us - now_us > lease_us / 2 and key in self._expires
        if before is not None and is_fresh and had == grant and _same(before, mine) and changed.keys() == table.keys():
            return None, grant, True
        return changed, grant, is_quiet

    def stored(self, key: Key, grant: dict[str, int], asked_at: float) -> None:
        """The table went in: the grant is ours until the lease ends, counted from before we asked."""
        self._expires[key] = asked_at + self._lease_s
        self._set(key, grant)

    def _ask(self, key: Key) -> Ask:
        pace = self._pace
        assert pace is not None
        whole = pace.whole(key)
        use = pace.use(key, self._clock.monotonic())
        had = self._grants.get(key, {})
        limits = {CONNECTIONS: whole.connections}
        wanted = {CONNECTIONS: min(pace.own_connections(key), use.rows + use.held) if use.rows else 0}
        used = {CONNECTIONS: use.held}
        speed, per_s = _speed(whole), self._flow(key, use.sent)
        # Who holds more than it sends in half a second is short of something else than of messages that it may send.
        is_new = not had.get(SPEED)
        is_hungry = use.rows > 0 and (is_new or (use.ran_dry and use.in_hand <= max(2, per_s * _IN_HAND_S)))
        # Twice what it sends: a slow machine short of a few messages must not take half of the rate from others.
        most_per_s = speed / 1000 if is_new else min(speed / 1000, 2 * per_s + 2)
        for rate, count in zip(whole.rates, use.messages, strict=False):
            name = _messages(rate.per_s)
            limits[name] = min(rate.count, limits.get(name, rate.count))
            sent = count - use.in_hand
            ahead = 1 + sent // 8 if use.rows else 0
            if is_hungry:
                span_s = min(rate.per_s, _AHEAD_S)
                ahead = math.ceil(most_per_s * span_s) + 1 - min(sent, math.ceil(per_s * span_s))
            wanted[name], used[name] = _rounded(sent + ahead, rate.count), count
        if speed:
            limits[SPEED], used[SPEED] = speed, 0
            wanted[SPEED] = _rounded(1000 * most_per_s if is_hungry else 1250 * per_s, speed) if use.rows else 0
        if (rate_ := whole.connection_rate) is not None:
            name = _opening(rate_.per_s)
            limits[name], used[name] = rate_.count, use.opened
            wanted[name] = rate_.count if use.rows > use.held else use.opened
        return Ask(limits, wanted, used)

    def _flow(self, key: Key, sent: int) -> float:
        """Messages a second, lately."""
        now = self._clock.monotonic()
        at, before, per_s = self._flows.get(key, (now, sent, 0.0))
        if now - at >= _FLOW_S:
            at, before, per_s = now, sent, max(0, sent - before) / (now - at)
        self._flows[key] = (at, before, per_s)
        return per_s

    def _set(self, key: Key, grant: dict[str, int]) -> None:
        if self._grants.get(key) == grant:
            return
        self._grants[key] = grant
        assert self._pace is not None
        self._pace.share_changed(key)

    async def _leave(self) -> None:
        for _ in range(_TRIES):
            keys = list(self._grants)
            used = {key: self._ask(key).used for key in keys}
            now_us, found = await self._in_thread(self._read, sorted(map(_name, keys)))
            made = {
                _name(key): (found[_name(key)][0], msgspec.json.encode(left))
                for key in keys
                if _name(key) in found
                and (left := commons.leave(found[_name(key)][1], self._me, used[key], now_us)) is not None
            }
            swapped = await self._in_thread(self._swap, made)
            for key in keys:
                if _name(key) in swapped or _name(key) not in found:
                    self._grants.pop(key, None)
            if not self._grants:
                return

    # -- in the thread -------------------------------------------------------------------------------------------------

    async def _in_thread(self, call: Callable[[Unpack[Args]], Result], *args: *Args) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._thread, call, *args)

    def _open(self) -> LimitStore:
        if self._store is None:
            self._store = self._open_store()
        return self._store

    def _read(self, names: list[str]) -> tuple[int, dict[str, tuple[int, Table]]]:
        now_us, found = self._open().read_shares(names)
        decode = msgspec.json.Decoder(dict[str, Holding]).decode
        return now_us, {name: (version, decode(body)) for name, (version, body) in found.items()}

    def _swap(self, made: dict[str, tuple[int, bytes]]) -> frozenset[str]:
        return self._open().swap_shares(made)

    def _close(self) -> None:
        if self._store is not None:
            self._store.close()


def _name(key: Key) -> str:
    return f"{key[0]} {key[1]}"


def _messages(per_s: float) -> str:
    return f"{MESSAGES}{per_s:g}"


def _opening(per_s: float) -> str:
    return f"{OPENING}{per_s:g}"


def _speed(whole: Limit) -> int:
    """Messages in a thousand seconds; 0 where there is no rate."""
    if not whole.rates:
        return 0
    return max(1, round(1000 * min(rate.count / (rate.spread_s or rate.per_s) for rate in whole.rates)))


def _rounded(count: float, limit: int) -> int:
    """Up, to a thirty-second of the limit: what moves a little need not be told."""
    grain = max(1, limit // 32)
    return min(limit, math.ceil(count / grain) * grain)


def _same(before: Holding, mine: Holding) -> bool:
    return before.held == mine.held and before.wanted == mine.wanted and before.quiet_us == mine.quiet_us
