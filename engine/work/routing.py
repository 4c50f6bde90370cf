"""Which lane a domain's rows queue in: one for all through a relay, one per source and set of MX hosts when direct.

Knows route's answers and pace's budgets and makes lanes of them; who decides is `route.resolver` and `pace.budgets`.
Looking up is bounded and shared: rows of a domain that is being looked up are held as numbers. A domain that cannot
be resolved now is asked again by the retry plan until the maximum age; one that takes no mail ends its rows.
"""

from __future__ import annotations

import asyncio
import hashlib
from array import array
from collections.abc import Callable
from pathlib import Path

import msgspec

from engine.clock import Clock
from engine.config import DeliveryTable
from engine.pace.budgets import BUDGETS_FILE, Budget, Budgets, Source
from engine.pace.retry import RetryPlan
from engine.route.resolver import DnsDeferred, NoSuchDomain, NullMx, Resolver, Route
from engine.smtp.destination import ConnectionLimits, Destination, Host, greeting_name
from engine.smtp.dialogue import Manner
from engine.smtp.pool import HostMemory
from engine.smtp.session import Listener
from engine.smtp.tls import TlsPolicy
from engine.work.bench import Workbench
from engine.work.lanes import Account, Lane, LaneTable
from engine.work.messages import Key
from engine.work.recovery import Waiting
from formats.sendlog import Reason, Verdict

_Place = tuple[str, str, tuple[tuple[int, str], ...], str]  # source, pool, hosts by rank, how TLS must be
_LOOKUPS = 200  # domains looked up at once by one worker


class LaneMaker:
    """Makes accounts and lanes in a table, wired to the worker."""

    def __init__(
        self,
        table: LaneTable,
        bench: Workbench,
        listener: Callable[[Lane], Listener],
        wire: Callable[[Account], None],
    ) -> None:
        self.table = table
        self.bench = bench
        self._listener = listener
        self._wire = wire
        self._memory: dict[str, HostMemory] = {}
        # A host without a good certificate is dead for those who ask for one, and for nobody else.
        self._memory_of_verified: dict[str, HostMemory] = {}

    def account(self, key: Key, *, is_rated: bool) -> Account:
        """The account of a key, made when first asked for."""
        found = self.table.accounts.get(key)
        if found is None:
            found = self.table.accounts[key] = Account(key, self.bench.clock, is_rated=is_rated)
            found.holds = self._holds
            self._wire(found)
        return found

    def _holds(self, account: Account) -> None:
        self.table.holding[account.key] = account

    def lane(self, account: Account, destination: Destination, limits: ConnectionLimits, source: str) -> Lane:
        """A new lane."""
        lane = Lane(
            len(self.table.lanes),
            account,
            destination,
            limits,
            self._listener,
            self.bench.clock,
            self._memory_of_verified if destination.tls is TlsPolicy.VERIFIED else self._memory,
            provider=self.bench.log.provider(account.key[1]),
            source=self.bench.log.source(source),
        )
        self.table.lanes.append(lane)
        return lane


class RelayRouting:
    """Everything goes through one relay."""

    def __init__(self, maker: LaneMaker, destination: Destination, delivery: DeliveryTable) -> None:
        account = maker.account(("", destination.key), is_rated=delivery.messages_per_second is not None)
        self._account = account
        self._lane = maker.lane(account, destination, ConnectionLimits.of(delivery), "default")

    def lane_of(self, domain: str, row: int) -> int | None:
        return self._lane.index

    def hold(self, domain: str, row: int) -> None:
        raise AssertionError("a relay's lane is always known")

    def hold_waiting(self, domain: str, waiting: Waiting) -> None:
        raise AssertionError("a relay's lane is always known")

    def tick(self, now: float) -> None:
        """Nothing to look up."""

    def apply(self, delivery: DeliveryTable, budgets: Budgets | None) -> None:
        """Live settings."""
        self._account.is_rated = delivery.messages_per_second is not None
        self._lane.set_limits(ConnectionLimits.of(delivery))

    @property
    def asking(self) -> int:
        return 0

    @property
    def waiting(self) -> int:
        return 0

    def next_due(self) -> float | None:
        return None


class _Lookup:
    """A domain whose rows wait for its route."""

    __slots__ = ("attempts", "due_at", "rows", "since", "told", "waiting", "why")

    def __init__(self) -> None:
        self.rows = array("Q")  # never attempted, in no log
        self.since = array("d")  # when each was held first
        self.told = 0  # so many of `rows` have a deferral in the log
        self.waiting: list[Waiting] = []  # rows with a history
        self.due_at: float | None = None  # None while it is being asked
        self.attempts = 0
        self.why = ""  # it had no route when it was asked last

    def __len__(self) -> int:
        return len(self.rows) + len(self.waiting)


class DirectRouting:
    """Each domain to its MX hosts, from one of our sources."""

    def __init__(
        self,
        maker: LaneMaker,
        resolver: Resolver,
        budgets: Budgets,
        delivery: DeliveryTable,
        retry: RetryPlan,
        clock: Clock,
    ) -> None:
        self._maker, self._resolver, self._budgets = maker, resolver, budgets
        self._delivery, self._retry, self._clock = delivery, retry, clock
        self._sources = budgets.sources or (Source("default"),)
        # A source of weight 0 is kept out of use; if all are, that cannot be meant.
        self._shares = [source for source in self._sources for _ in range(source.weight)] or list(self._sources)
        self._routes: dict[str, tuple[float, Route]] = {}
        self._lanes: dict[_Place, int] = {}
        self._lookups: dict[str, _Lookup] = {}
        self._asking: dict[str, asyncio.Task[None]] = {}
        self._queue: list[str] = []
        self.routed: Callable[[int, list[int]], None] = lambda lane, rows: None
        self.come_back: Callable[[list[Waiting]], None] = lambda waiting: None
        self.tell: Callable[[str, dict[str, str | int | float]], None] = lambda event, fields: None
        self._told_doubts: set[str] = set()

    @property
    def asking(self) -> int:
        """Rows whose domain is being asked."""
        return sum(len(lookup) for lookup in self._lookups.values() if lookup.due_at is None)

    @property
    def waiting(self) -> int:
        """Rows whose domain could not be resolved and is asked again later."""
        return sum(len(lookup) for lookup in self._lookups.values() if lookup.due_at is not None)

    def next_due(self) -> float | None:
        """When a domain is asked again."""
        return min((lookup.due_at for lookup in self._lookups.values() if lookup.due_at is not None), default=None)

    def lane_of(self, domain: str, row: int) -> int | None:
        known = self._routes.get(domain)
        if known is None or known[0] <= self._clock.monotonic():
            return None
        return self._lane(known[1], self._source_of(row))

    def hold(self, domain: str, row: int) -> None:
        """Keep the row until the domain's route is known."""
        lookup = self._lookup(domain)
        lookup.rows.append(row)
        lookup.since.append(self._clock.monotonic())

    def hold_waiting(self, domain: str, waiting: Waiting) -> None:
        """The same for a row with a history, which it keeps."""
        lookup = self._lookup(domain)
        lookup.waiting.append(waiting)
        lookup.attempts = max(lookup.attempts, waiting.attempt)

    def _lookup(self, domain: str) -> _Lookup:
        lookup = self._lookups.get(domain)
        if lookup is None:
            lookup = self._lookups[domain] = _Lookup()
            self._queue.append(domain)
            self._ask_some()
        return lookup

    def tick(self, now: float) -> None:
        """Ask again where it is time; give up rows that are too old."""
        for domain, lookup in list(self._lookups.items()):
            if lookup.due_at is None or now < lookup.due_at:
                continue
            self._expire(domain, lookup, now)
            if not lookup:
                del self._lookups[domain]
                continue
            lookup.due_at = None
            self._queue.append(domain)
        self._ask_some()

    def _expire(self, domain: str, lookup: _Lookup, now: float) -> None:
        bench, why = self._maker.bench, lookup.why or f"4.4.3 {domain} could not be resolved in time"
        rows, since, told = array("Q"), array("d"), 0
        for place, (row, first_at) in enumerate(zip(lookup.rows, lookup.since, strict=True)):
            if now >= self._retry.expires_at(first_at):
                bench.is_expired(row, lookup.attempts, why)
                continue
            rows.append(row)
            since.append(first_at)
            told += place < lookup.told
        lookup.rows, lookup.since, lookup.told = rows, since, told
        kept = []
        for waiting in lookup.waiting:
            if now >= self._retry.expires_at(bench.monotonic_of(waiting.first_at_us)):
                bench.is_expired(waiting.row, waiting.attempt, why)
            else:
                kept.append(waiting)
        lookup.waiting = kept

    def apply(self, delivery: DeliveryTable, budgets: Budgets | None) -> None:
        """Live settings: how connections are held. Slots and rates are the supervisor's, sources stay as they were."""
        self._delivery = msgspec.structs.replace(delivery, tls_ca_file=self._delivery.tls_ca_file)
        if budgets is not None:
            self._budgets = budgets
        for (source, *_), index in self._lanes.items():
            lane = self._maker.table.lanes[index]
            budget = self._budgets.of(lane.key[1], source)
            lane.set_limits(limits_of(delivery, budget))
            lane.retry_after_s = budget.retry_after_s

    def _source_of(self, row: int) -> Source:
        """The same source on each attempt (greylisting), spread by weight."""
        if len(self._shares) == 1:
            return self._shares[0]
        digest = hashlib.blake2b(row.to_bytes(8, "little"), digest_size=8).digest()
        return self._shares[int.from_bytes(digest, "little") % len(self._shares)]

    def _ask_some(self) -> None:
        while self._queue and len(self._asking) < _LOOKUPS:
            domain = self._queue.pop(0)
            self._asking[domain] = asyncio.get_running_loop().create_task(self._ask(domain))

    async def _ask(self, domain: str) -> None:
        try:
            found = await self._resolver.route(domain)
        finally:
            self._asking.pop(domain, None)
        self._ask_some()
        lookup = self._lookups.get(domain)
        if lookup is None:
            return
        now = self._clock.monotonic()
        match found:
            case Route():
                del self._lookups[domain]
                self._routes[domain] = (now + max(60.0, found.ttl_s), found)
                self._renew(found)
                if found.doubts and domain not in self._told_doubts:
                    self._told_doubts.add(domain)
                    self.tell("mta_sts_testing", {"domain": domain, "why": f"its MTA-STS policy {found.doubts}"})
                by_lane: dict[int, list[int]] = {}
                for row in lookup.rows[lookup.told :]:
                    by_lane.setdefault(self._lane(found, self._source_of(row)), []).append(row)
                for lane, rows in by_lane.items():
                    self.routed(lane, rows)
                self.come_back(lookup.waiting + self._told(lookup))
            case NullMx():
                self._refuse(domain, lookup, "5.1.10 the domain takes no mail (null MX, RFC 7505)")
            case NoSuchDomain():
                self._refuse(domain, lookup, f"5.1.2 no such domain: {found.why}")
            case _:
                status = found.status if isinstance(found, DnsDeferred) else "4.4.4"
                self._defer(lookup, f"{status} {domain}: {found.why}", now)

    def _told(self, lookup: _Lookup) -> list[Waiting]:
        """The rows whose deferral is in the log: they go on counting from it, so that the log stays in order."""
        wall_of = self._maker.bench.wall_of
        due_us = wall_of(self._clock.monotonic())
        first = zip(lookup.rows[: lookup.told], lookup.since[: lookup.told], strict=True)
        return [Waiting(row, lookup.attempts, wall_of(first_at), due_us) for row, first_at in first]

    def _refuse(self, domain: str, lookup: _Lookup, text: str) -> None:
        del self._lookups[domain]
        bench = self._maker.bench
        for row in (*lookup.rows, *(waiting.row for waiting in lookup.waiting)):
            bench.log.result(0, row, lookup.attempts, Verdict.REJECTED, reason=Reason.RECIPIENT, text=text)
            bench.refused_unsent += 1
            bench.has_outcome(row)

    def _defer(self, lookup: _Lookup, text: str, now: float) -> None:
        """Ask again by the retry plan, or when the oldest row has reached its maximum age."""
        lookup.attempts += 1
        lookup.why = text
        bench = self._maker.bench
        oldest = min(
            (*lookup.since, *(bench.monotonic_of(waiting.first_at_us) for waiting in lookup.waiting)), default=now
        )
        wait_s = self._retry.next_wait(lookup.attempts, oldest, now, bench.rng)
        lookup.due_at = now + wait_s if wait_s is not None else max(now, self._retry.expires_at(oldest))
        wait = max(1, round(lookup.due_at - now))
        for row in lookup.rows[lookup.told :]:
            bench.log.result(0, row, lookup.attempts, Verdict.DEFERRED, wait_s=wait, text=bench.masked(text))
        lookup.told = len(lookup.rows)

    def _lane(self, route: Route, source: Source) -> int:
        at = self._place(route, source)
        found = self._lanes.get(at)
        if found is None:
            found = self._lanes[at] = self._new_lane(route, source).index
        return found

    def _place(self, route: Route, source: Source) -> _Place:
        # Hosts of one preference come shuffled, and the pool takes them in turn: one set is one lane.
        ranks = {preference: rank for rank, preference in enumerate(sorted({host.preference for host in route.hosts}))}
        hosts = tuple(sorted((ranks[host.preference], host.name) for host in route.hosts))
        return source.name, route.pool, hosts, "verified" if route.policy is not None else ""

    def _renew(self, route: Route) -> None:
        """A route was asked for again: its lanes connect to the addresses of today."""
        for source in self._sources:
            index = self._lanes.get(self._place(route, source))
            if index is not None:
                self._maker.table.lanes[index].move_to(self._hosts(route))

    def _hosts(self, route: Route) -> tuple[Host, ...]:
        return tuple(
            Host(name=host.name, port=self._delivery.smtp_port, addresses=host.addresses, preference=host.preference)
            for host in route.hosts
        )

    def _new_lane(self, route: Route, source: Source) -> Lane:
        budget = self._budgets.of(route.provider, source.name)
        key = self._budgets.key(source.name, route.provider)
        account = self._maker.account(key, is_rated=bool(budget.limit().rates))
        destination = Destination(
            key=route.provider,
            hosts=self._hosts(route),
            tls=TlsPolicy.VERIFIED if route.policy is not None else TlsPolicy(budget.tls),
            tls_ca_file=self._delivery.tls_ca_file,
            source_address=source.bind,
            greeting_name=greeting_name(source.greeting_name or self._delivery.greeting_name),
        )
        lane = self._maker.lane(account, destination, limits_of(self._delivery, budget), source.name)
        lane.selector, lane.retry_after_s = source.dkim_selector, budget.retry_after_s
        if route.policy is not None:
            lane.wants = f"; the MTA-STS policy of {route.domain} asks for verified TLS"
        return lane


def limits_of(delivery: DeliveryTable, budget: Budget) -> ConnectionLimits:
    """How connections to a provider are held: the settings' time limits, the budget's messages and manner."""
    limits = ConnectionLimits.of(delivery)
    manner = Manner(
        depth=delivery.pipeline_depth,
        pipelining=delivery.pipelining and budget.pipelining,
        chunking=delivery.chunking and budget.chunking,
    )
    return msgspec.structs.replace(limits, manner=manner, messages_per_connection=budget.messages_per_connection)


def with_ca_file_in(folder: Path, delivery: DeliveryTable) -> DeliveryTable:
    """The settings with a relative `tls_ca_file` taken from the campaign's folder, as through a relay."""
    if delivery.tls_ca_file is None:
        return delivery
    return msgspec.structs.replace(delivery, tls_ca_file=str(folder / delivery.tls_ca_file))


def budgets_file(folder: Path) -> Path:
    """The campaign's own budgets."""
    return folder / BUDGETS_FILE
