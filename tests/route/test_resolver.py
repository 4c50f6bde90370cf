"""Domains to destinations, over a real name server on loopback that tells the truth, lies, hangs or loops."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from dns_world import DnsServer, Zone, serving

from engine.route.dns_client import DnsClient, NameServer
from engine.route.provider import load_providers
from engine.route.resolver import Destination, DnsDeferred, NoSuchDomain, NullMx, Resolver, Route, Unroutable


class SetClock:
    """A clock that stands until it is moved."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def wall_us(self) -> int:
        return int(self.now * 1e6)


@asynccontextmanager
async def resolving(
    zone: Zone, *, try_s: float = 0.15, **options: object
) -> AsyncIterator[tuple[Resolver, DnsServer, SetClock]]:
    async with serving(zone) as server:
        assert server.at is not None
        client = DnsClient([server.at], try_s=try_s, tries=2)
        clock = SetClock()
        options.setdefault("families", ("ipv4", "ipv6"))
        options.setdefault("rng", random.Random(1))
        try:
            yield Resolver(client, load_providers(), clock, **options), server, clock  # type: ignore[arg-type]
        finally:
            await client.close()


def route_of(zone: Zone, domain: str, **options: object) -> Destination:
    async def ask() -> Destination:
        async with resolving(zone, **options) as (resolver, _, _):
            return await resolver.route(domain)

    return asyncio.run(ask())


def A(*addresses: str) -> dict[str, list[str]]:
    return {"A": list(addresses)}


def test_hosts_come_by_preference_with_their_addresses_and_provider() -> None:
    found = route_of(
        {
            "example.org": {"MX": ["20 b.mx.example.net.", "10 a.mx.example.net."]},
            "a.mx.example.net": {"A": ["8.8.8.1", "8.8.8.2"], "AAAA": ["2001:4860::1"]},
            "b.mx.example.net": A("8.8.8.3"),
        },
        "Example.org.",
    )
    assert isinstance(found, Route)
    assert [host.name for host in found.hosts] == ["a.mx.example.net", "b.mx.example.net"]
    # IPv4 and IPv6 in turn.
    first = found.hosts[0].addresses
    assert (first[0] in ("8.8.8.1", "8.8.8.2"), first[1], len(first)) == (True, "2001:4860::1", 3)
    assert (found.provider, found.pool) == ("example.net", "a.mx.example.net")


def test_equal_preferences_are_shuffled_for_each_answer() -> None:
    zone: Zone = {"example.org": {"MX": [f"10 mx{n}.example.org." for n in range(4)]}}
    zone |= {f"mx{n}.example.org": A(f"8.8.8.{n + 1}") for n in range(4)}

    async def ask() -> set[str]:
        async with resolving(zone) as (resolver, server, _):
            firsts = set()
            for _ in range(50):
                found = await resolver.route("example.org")
                assert isinstance(found, Route)
                firsts.add(found.hosts[0].name)
            assert server.asked["example.org", "MX"] == 1
            return firsts

    assert len(asyncio.run(ask())) == 4


def test_no_mx_means_the_domains_own_address() -> None:
    found = route_of({"example.org": A("8.8.8.8")}, "example.org")
    assert isinstance(found, Route)
    assert (found.is_implicit, found.hosts[0].name, found.hosts[0].addresses) == (True, "example.org", ("8.8.8.8",))


def test_mx_that_cannot_be_used_does_not_fall_back_to_the_address() -> None:
    found = route_of({"example.org": {"MX": ["10 gone.example.org."], "A": ["8.8.8.8"]}}, "example.org")
    assert isinstance(found, Unroutable)


def test_null_mx() -> None:
    assert route_of({"example.org": {"MX": ["0 ."]}}, "example.org") == NullMx("example.org")


def test_null_mx_beside_others_is_ignored() -> None:
    found = route_of(
        {"example.org": {"MX": ["0 .", "10 m.example.org."]}, "m.example.org": A("8.8.4.4")}, "example.org"
    )
    assert isinstance(found, Route)


def test_missing_domain_is_permanent_and_failures_are_not() -> None:
    assert isinstance(route_of({}, "nowhere.test"), NoSuchDomain)
    assert isinstance(route_of({"example.org": {"TXT": ['"x"']}}, "example.org"), NoSuchDomain)
    for trouble in ("servfail", "refused", "hang", "garbage", "another question", "another id", "truncated forever"):
        found = route_of({"example.org": trouble}, "example.org")
        assert isinstance(found, DnsDeferred), trouble


def test_mx_whose_addresses_fail_for_now_is_deferred() -> None:
    zone: Zone = {"example.org": {"MX": ["10 m.example.org."]}, "m.example.org": "servfail"}
    assert isinstance(route_of(zone, "example.org"), DnsDeferred)


def test_one_failing_host_leaves_the_other() -> None:
    zone: Zone = {
        "example.org": {"MX": ["10 m.example.org.", "20 n.example.org."]},
        "m.example.org": "servfail",
        "n.example.org": A("8.8.4.4"),
    }
    found = route_of(zone, "example.org")
    assert isinstance(found, Route)
    assert [host.name for host in found.hosts] == ["n.example.org"]


def test_aliases_are_followed_and_loops_end() -> None:
    zone: Zone = {
        "alias.test": {"CNAME": ["real.test."]},
        "real.test": {"MX": ["10 m.real.test."]},
        "m.real.test": {"CNAME": ["host.real.test."]},
        "host.real.test": A("8.8.8.8"),
    }
    found = route_of(zone, "alias.test")
    assert isinstance(found, Route)
    assert found.hosts[0].addresses == ("8.8.8.8",)
    loop: Zone = {"a.test": {"CNAME": ["b.test."]}, "b.test": {"CNAME": ["a.test."]}}
    assert isinstance(route_of(loop, "a.test"), DnsDeferred)
    chain: Zone = {f"c{n}.test": {"CNAME": [f"c{n + 1}.test."]} for n in range(60)}
    assert isinstance(route_of(chain, "c0.test"), DnsDeferred)


def test_mx_names_that_are_addresses_local_hosts_or_private_are_not_used() -> None:
    zone: Zone = {
        "example.org": {
            "MX": ["1 192.0.2.1.", "2 localhost.", "3 private.test.", "4 loop.test.", "5 mapped.test.", "6 good.test."]
        },
        "private.test": A("10.0.0.1", "192.168.1.1", "169.254.1.1"),
        "loop.test": A("127.0.0.1", "0.0.0.0", "224.0.0.1"),
        "mapped.test": {"AAAA": ["::1", "::ffff:8.8.8.8", "fe80::1"]},
        "good.test": A("8.8.8.8"),
    }
    found = route_of(zone, "example.org")
    assert isinstance(found, Route)
    assert [host.name for host in found.hosts] == ["good.test"]
    zone["good.test"] = A("127.0.0.1")
    assert isinstance(route_of(zone, "example.org"), Unroutable)


def test_where_we_are_an_mx_only_better_ones_are_tried() -> None:
    zone: Zone = {
        "example.org": {"MX": ["10 a.test.", "20 us.test.", "30 c.test."]},
        "a.test": A("8.8.8.1"),
        "us.test": A("8.8.8.2"),
        "c.test": A("8.8.8.3"),
    }
    found = route_of(zone, "example.org", own_names=["us.test"])
    assert isinstance(found, Route)
    assert [host.name for host in found.hosts] == ["a.test"]
    only: Zone = {"example.org": {"MX": ["10 us.test."]}, "us.test": A("8.8.8.2")}
    assert isinstance(route_of(only, "example.org", own_names=["us.test"]), Unroutable)
    assert isinstance(route_of(only, "example.org", own_addresses=["8.8.8.2"]), Unroutable)


@pytest.mark.slow
def test_ten_thousand_records_are_bounded() -> None:
    zone: Zone = {"example.org": {"MX": [f"{n} m{n}.test." for n in range(2500)]}}
    zone |= {f"m{n}.test": A(*(f"8.8.{a // 250}.{a % 250 + 1}" for a in range(400))) for n in range(20)}

    async def ask() -> None:
        async with resolving(zone, try_s=5.0) as (resolver, server, _):
            found = await resolver.route("example.org")
            assert isinstance(found, Route)
            assert [host.preference for host in found.hosts] == list(range(8))
            assert all(len(host.addresses) <= 8 for host in found.hosts)
            assert sum(server.asked.values()) < 60  # UDP, then TCP where it was cut

    asyncio.run(ask())


def asked_when(steps: Callable[[Resolver, DnsServer, SetClock], AsyncIterator[None]], zone: Zone) -> DnsServer:
    async def run() -> DnsServer:
        # Patient: a datagram sent again by a slow machine would be counted as a question asked twice.
        async with resolving(zone, try_s=5.0) as (resolver, server, clock):
            async for _ in steps(resolver, server, clock):
                pass
            return server

    return asyncio.run(run())


def test_equal_questions_in_flight_are_asked_once_and_answers_are_kept() -> None:
    zone: Zone = {f"d{n}.test": {"MX": ["10 m.test."]} for n in range(20)} | {"m.test": A("8.8.8.8")}

    async def steps(resolver: Resolver, server: DnsServer, clock: SetClock) -> AsyncIterator[None]:
        server.delay_s = 0.02
        await asyncio.gather(*(resolver.route(f"d{n % 20}.test") for n in range(400)))
        assert server.asked["m.test", "A"] == 1
        assert all(server.asked[f"d{n}.test", "MX"] == 1 for n in range(20))
        clock.now += 299
        await resolver.route("d0.test")
        assert server.asked["d0.test", "MX"] == 1
        clock.now += 2
        await resolver.route("d0.test")
        assert server.asked["d0.test", "MX"] == 2
        yield

    asked_when(steps, zone)


def test_negative_answers_and_failures_are_remembered_for_a_while() -> None:
    async def steps(resolver: Resolver, server: DnsServer, clock: SetClock) -> AsyncIterator[None]:
        for _ in range(5):
            await resolver.route("nowhere.test")
            await resolver.route("bad.test")
        assert server.asked["nowhere.test", "MX"] == 1
        assert server.asked["bad.test", "MX"] == 1
        clock.now += 31
        await resolver.route("bad.test")
        await resolver.route("nowhere.test")
        assert server.asked["bad.test", "MX"] == 2
        assert server.asked["nowhere.test", "MX"] == 1  # the SOA says 120 seconds
        clock.now += 90
        await resolver.route("nowhere.test")
        assert server.asked["nowhere.test", "MX"] == 2
        yield

    asked_when(steps, {"bad.test": "servfail"})


def test_a_hung_server_costs_bounded_time_and_others_are_asked() -> None:
    async def ask() -> None:
        async with serving({"example.org": "hang"}) as hung, serving({"example.org": A("8.8.8.8")}) as good:
            assert hung.at is not None
            assert good.at is not None
            client = DnsClient([hung.at, good.at], try_s=0.1, tries=2)
            resolver = Resolver(client, load_providers(), SetClock())
            begin = asyncio.get_running_loop().time()
            assert isinstance(await resolver.route("example.org"), Route)
            assert asyncio.get_running_loop().time() - begin < 1.0
            await client.close()

    asyncio.run(ask())


def test_nobody_there_is_deferred() -> None:
    async def ask() -> Destination:
        client = DnsClient([NameServer("127.0.0.1", 9)], try_s=0.2, tries=2)
        try:
            return await Resolver(client, load_providers(), SetClock()).route("example.org")
        finally:
            await client.close()

    assert isinstance(asyncio.run(ask()), DnsDeferred)
    assert isinstance(asyncio.run(Resolver(DnsClient([]), load_providers(), SetClock()).route("a.test")), DnsDeferred)


def test_names_the_dns_cannot_hold_are_deferred_not_raised() -> None:
    for name in ("a..b", "x" * 64 + ".test", "ä\ud800.test"):
        assert not isinstance(route_of({}, name), Route)
