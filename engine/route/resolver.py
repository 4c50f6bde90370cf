"""Where a domain's mail goes: its MX hosts in the order to try them, their addresses, and whose they are.

RFC 5321 §5.1 (preference, equals shuffled, the domain itself where it has no MX, and only then), RFC 7505 (null MX),
RFC 8461 (MTA-STS, where a policy source is given). Answers are kept for their time to live, equal questions in flight
are asked once. No domain raises: whatever its DNS does ends in one of five values.
"""

from __future__ import annotations

import asyncio
import ipaddress
import random
from collections.abc import Collection
from typing import Protocol, TypeAlias

import dns.rdatatype
import msgspec

from engine.clock import Clock
from engine.route.dns_client import DnsClient, Failed
from engine.route.mta_sts import StsPolicy
from engine.route.provider import ProviderBook, pool_of

_SHORTEST_S = 60.0
_LONGEST_S = 6 * 3600.0
_FAILED_S = 30.0  # a failure is remembered so long: ten thousand rows of a broken domain ask once
_REMEMBERED = 500_000


class Host(msgspec.Struct, frozen=True):
    """One MX host. `addresses` in the order to try them, the families in turn."""

    name: str
    preference: int
    addresses: tuple[str, ...]


class Route(msgspec.Struct, frozen=True):
    """Where to connect for `domain`. `pool` names whose connections it may share; `policy` is an MTA-STS policy in
    force, which asks for verified TLS (the hosts it does not list are left out already). `doubts` says what a policy
    in testing mode would have refused."""

    domain: str
    hosts: tuple[Host, ...]
    provider: str
    pool: str
    ttl_s: float
    policy: StsPolicy | None = None
    is_implicit: bool = False  # the domain has no MX: its own addresses (RFC 5321 §5.1)
    doubts: str = ""


class NullMx(msgspec.Struct, frozen=True):
    """The domain says that it takes no mail (RFC 7505): permanent."""

    domain: str


class NoSuchDomain(msgspec.Struct, frozen=True):
    """The domain does not exist, or has neither MX nor address: permanent."""

    domain: str
    why: str


class Unroutable(msgspec.Struct, frozen=True):
    """The domain names MX hosts, none of which can be used (addresses as names, our own or private hosts, nothing
    behind the names). RFC 5321 §5.1 forbids its own address then. A mistake of its operator, often mended in a day."""

    domain: str
    why: str


class DnsDeferred(msgspec.Struct, frozen=True):
    """No answer to be had now, or none that its own policy allows: try again later."""

    domain: str
    why: str
    status: str = "4.4.3"  # RFC 3463: directory server failure


Destination: TypeAlias = Route | NullMx | NoSuchDomain | Unroutable | DnsDeferred


_HostAnswer: TypeAlias = tuple[list[list[str]], float, str | None]  # by family; how long they hold; what failed


class PolicySource(Protocol):
    """Who knows the MTA-STS policies of domains."""

    async def policy(self, domain: str) -> StsPolicy | None:
        """The policy in force, or None; never raises."""


class Resolver:
    """Domains to destinations, with everything learned on the way."""

    def __init__(
        self,
        client: DnsClient,
        providers: ProviderBook,
        clock: Clock,
        *,
        families: tuple[str, ...] = ("ipv4", "ipv6"),
        own_names: Collection[str] = (),
        own_addresses: Collection[str] = (),
        allow_private: bool = False,
        max_hosts: int = 8,
        max_addresses: int = 8,
        policies: PolicySource | None = None,
        rng: random.Random | None = None,
    ) -> None:
        self._client, self._providers, self._clock = client, providers, clock
        self._families = families
        self._own_names = {name.rstrip(".").lower() for name in own_names}
        self._own_addresses = set(own_addresses)
        self._allow_private = allow_private
        self._max_hosts, self._max_addresses = max_hosts, max_addresses
        self.policies = policies  # None: nobody asks for MTA-STS
        self._rng = rng or random.Random()
        self._hosts: dict[str, tuple[float, _HostAnswer]] = {}
        self._asking: dict[str, asyncio.Task[_HostAnswer]] = {}
        self._routes: dict[str, tuple[float, Destination]] = {}
        self._routing: dict[str, asyncio.Task[Destination]] = {}

    async def route(self, domain: str) -> Destination:
        """Where mail for `domain` (A-labels) goes. Equal preferences are shuffled anew for each answer."""
        domain = domain.rstrip(".").lower()
        found = self._routes.get(domain)
        if found is not None and found[0] > self._clock.monotonic():
            return self._shuffled(found[1])
        task = self._routing.get(domain)
        if task is None:
            task = self._routing[domain] = asyncio.ensure_future(self._find(domain))
            task.add_done_callback(lambda _: self._routing.pop(domain, None))
        return self._shuffled(await asyncio.shield(task))

    async def _find(self, domain: str) -> Destination:
        destination, ttl_s = await self._resolve(domain)
        if isinstance(destination, Route) and self.policies is not None:
            destination = await self._under_policy(destination)
        if isinstance(destination, DnsDeferred):
            ttl_s = _FAILED_S
        if len(self._routes) >= _REMEMBERED:
            self._routes.clear()
        self._routes[domain] = (self._clock.monotonic() + min(max(ttl_s, _FAILED_S), _LONGEST_S), destination)
        return destination

    async def _resolve(self, domain: str) -> tuple[Destination, float]:
        # Nobody else asks for it: the route is what is kept, and who asks for that meanwhile waits for it.
        mx = await self._client.ask(domain, dns.rdatatype.MX)
        if isinstance(mx, Failed):
            return DnsDeferred(domain, mx.why), _FAILED_S
        if not mx.exists:
            if self._providers.of_domain(domain) is not None:
                # A name server that denies gmail.com is broken or lying; believing it would bounce the list.
                return DnsDeferred(domain, "the name server denies that a well-known domain exists"), _FAILED_S
            return NoSuchDomain(domain, "there is no such domain"), mx.ttl_s
        if not mx.records:
            return await self._implicit(domain, mx.ttl_s)
        named: dict[str, int] = {}
        for record in mx.records:
            name, preference = record.exchange.to_text(True).lower(), int(record.preference)  # type: ignore[attr-defined]
            named[name] = min(preference, named.get(name, preference))
        if "." in named or "@" in named:  # the root: "no mail here"
            if len(named) == 1:
                return NullMx(domain), mx.ttl_s
            named.pop(".", None)  # RFC 7505 §3 forbids it beside others: the others stand
            named.pop("@", None)
        return await self._through(domain, named, mx.ttl_s)

    async def _through(self, domain: str, named: dict[str, int], ttl_s: float) -> tuple[Destination, float]:
        ours = [preference for name, preference in named.items() if name in self._own_names]
        if ours:  # we are one of its hosts: only better ones may be tried, or mail goes round (RFC 5321 §5.1)
            named = {name: preference for name, preference in named.items() if preference < min(ours)}
            if not named:
                return Unroutable(domain, "its best MX is this host"), ttl_s
        by_preference = sorted(named.items(), key=lambda item: (item[1], self._rng.random()))
        usable = [(name, preference) for name, preference in by_preference if _is_host_name(name)]
        chosen = usable[: self._max_hosts]
        if len(chosen) == 1:
            found = [await self._addresses(chosen[0][0])]
        else:
            found = await asyncio.gather(*(self._addresses(name) for name, _ in chosen))
        hosts: list[Host] = []
        failed: list[str] = []
        for (name, preference), (addresses, address_ttl_s, why) in zip(chosen, found, strict=True):
            if addresses:
                hosts.append(Host(name, preference, addresses))
                ttl_s = min(ttl_s, address_ttl_s)
            elif why is not None:
                failed.append(f"{name}: {why}")
        if not hosts:
            if failed:
                return DnsDeferred(domain, failed[0]), _FAILED_S
            names = ", ".join(name for name, _ in by_preference[:3])
            return Unroutable(domain, f"no usable address behind its MX ({names})"), ttl_s
        # Who runs it is asked of the names as published, whether or not each has an address today.
        best = [name for name, preference in usable if preference == usable[0][1]]
        return Route(domain, tuple(hosts), self._providers.of(best), pool_of(best), ttl_s), ttl_s

    async def _implicit(self, domain: str, ttl_s: float) -> tuple[Destination, float]:
        addresses, address_ttl_s, why = await self._addresses(domain)
        if addresses:
            ttl_s = min(ttl_s, address_ttl_s)
            host = Host(domain, 0, addresses)
            route = Route(domain, (host,), self._providers.of([domain]), domain, ttl_s, is_implicit=True)
            return route, ttl_s
        if why is not None:
            return DnsDeferred(domain, why), _FAILED_S
        return NoSuchDomain(domain, "it has neither an MX nor a usable address"), ttl_s

    async def _addresses(self, name: str) -> tuple[tuple[str, ...], float, str | None]:
        """Usable addresses, the families in turn; how long they hold; why there may be more that we could not get."""
        lists, ttl_s, why = await self._host(name)
        for family in lists:
            if len(family) > 1:
                self._rng.shuffle(family)
        in_turn = [
            address for nth in range(self._max_addresses) for family in lists for address in family[nth : nth + 1]
        ]
        return tuple(in_turn[: self._max_addresses]), ttl_s, None if in_turn else why

    async def _host(self, name: str) -> _HostAnswer:
        """Usable addresses by family, asked once for all domains that name the host."""
        known = self._hosts.get(name)
        if known is not None and known[0] > self._clock.monotonic():
            return known[1]
        task = self._asking.get(name)
        if task is None:
            task = self._asking[name] = asyncio.ensure_future(self._ask_host(name))
            task.add_done_callback(lambda _: self._asking.pop(name, None))
        return await asyncio.shield(task)

    async def _ask_host(self, name: str) -> _HostAnswer:
        kinds = [dns.rdatatype.A if family == "ipv4" else dns.rdatatype.AAAA for family in self._families]
        answers = await asyncio.gather(*(self._client.ask(name, kind) for kind in kinds))
        why = next((answer.why for answer in answers if isinstance(answer, Failed)), None)
        lists: list[list[str]] = []
        ttl_s = keep_s = _LONGEST_S
        for answer in answers:
            if isinstance(answer, Failed):
                keep_s = _FAILED_S
                continue
            keep_s = min(keep_s, max(answer.ttl_s, _SHORTEST_S))
            if answer.records:
                found = [record.address for record in answer.records[:64]]  # type: ignore[attr-defined]
                lists.append([address for address in found if self.is_usable(address)])
                ttl_s = min(ttl_s, answer.ttl_s)
        if len(self._hosts) >= _REMEMBERED:
            self._hosts.clear()
        self._hosts[name] = (self._clock.monotonic() + keep_s, (lists, ttl_s, why))
        return lists, ttl_s, why

    def is_usable(self, text: str) -> bool:
        """Whether a stranger's name may lead us to this address."""
        address = ipaddress.ip_address(text)
        if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
            return False
        if text in self._own_addresses or address.is_unspecified or address.is_multicast:
            return False
        # A name that leads into our own network would let a stranger's list speak to our printers.
        return self._allow_private or address.is_global

    async def _under_policy(self, route: Route) -> Destination:
        assert self.policies is not None
        policy = await self.policies.policy(route.domain)
        if policy is None or policy.mode == "none":
            return route
        hosts = tuple(host for host in route.hosts if policy.lists(host.name))
        others = ", ".join(host.name for host in route.hosts if host not in hosts)
        if policy.mode == "testing":
            return msgspec.structs.replace(route, doubts=f"does not list {others}") if others else route
        if not hosts:
            return DnsDeferred(route.domain, f"its MTA-STS policy lists none of its MX hosts ({others})", "4.7.0")
        return msgspec.structs.replace(route, hosts=hosts, policy=policy)

    def _shuffled(self, destination: Destination) -> Destination:
        if not isinstance(destination, Route) or len(destination.hosts) < 2:
            return destination
        hosts = tuple(sorted(destination.hosts, key=lambda host: (host.preference, self._rng.random())))
        return msgspec.structs.replace(destination, hosts=hosts)


def _is_host_name(name: str) -> bool:
    """Whether an MX name can be a host: not an address, not the local host, no blank label."""
    labels = name.rstrip(".").split(".")
    if len(labels) < 2 or labels[-1].isdigit() or labels[-1] in ("localhost", "local", "invalid", "internal"):
        return False
    return all(label and len(label) <= 63 for label in labels) and name != "localhost.localdomain"
