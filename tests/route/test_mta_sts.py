"""MTA-STS: policies found, kept, enforced; a hidden record does not weaken one that was seen."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

import pytest
from dns_world import Zone, serving
from test_resolver import SetClock

from engine.route.dns_client import DnsClient
from engine.route.mta_sts import HttpsFetcher, PolicyCache, StsPolicy, parse_policy, parse_record
from engine.route.provider import load_providers
from engine.route.resolver import DnsDeferred, Resolver, Route
from tests.route.certificates import certificate_for

FILE = b"version: STSv1\r\nmode: enforce\r\nmx: mail.example.org\r\nmx: *.example.net\r\nmax_age: 604800\r\n"


@pytest.mark.parametrize(
    ("texts", "policy_id"),
    [
        (["v=STSv1; id=20160831085700Z;"], "20160831085700Z"),
        (["v=spf1 -all", "v=STSv1;id=1"], "1"),
        (["v=STSv1; id=1", "v=STSv1; id=2"], None),
        (["v=STSv1; id=not-alnum"], None),
        (["v=STSv1;"], None),
        ([], None),
    ],
)
def test_record(texts: list[str], policy_id: str | None) -> None:
    assert parse_record(texts) == policy_id


def test_policy_file() -> None:
    policy = parse_policy(FILE, "1", 0)
    assert policy == StsPolicy("1", "enforce", ("mail.example.org", "*.example.net"), 604800, 0)
    assert policy.lists("MAIL.example.org.")
    assert policy.lists("a.example.net")
    assert not policy.lists("a.b.example.net")
    assert not policy.lists("example.net")


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\xff\xfe",
        b"<html>not found</html>",
        FILE.replace(b"STSv1", b"STSv2"),
        FILE.replace(b"enforce", b"strict"),
        FILE.replace(b"604800", b"soon"),
        FILE.replace(b"604800", b"9" * 5000),
        b"version: STSv1\nmode: enforce\nmax_age: 1\n",
    ],
)
def test_what_is_no_policy_file(raw: bytes) -> None:
    assert parse_policy(raw, "1", 0) is None


class Files:
    """Policy files by domain; counts."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files, self.fetched = files, 0

    async def fetch(self, domain: str) -> bytes | None:
        self.fetched += 1
        return self.files.get(domain)


ZONE: Zone = {
    "example.org": {"MX": ["10 mail.example.org.", "20 evil.example.com."]},
    "mail.example.org": {"A": ["8.8.8.8"]},
    "evil.example.com": {"A": ["8.8.8.9"]},
    "_mta-sts.example.org": {"TXT": ['"v=STSv1; id=1;"']},
}


def test_enforce_leaves_listed_hosts_and_defers_where_there_are_none(tmp_path: Path) -> None:
    async def run() -> None:
        zone = dict(ZONE)
        async with serving(zone) as server:
            assert server.at is not None
            client, clock, files = DnsClient([server.at], try_s=0.2, tries=1), SetClock(), Files({"example.org": FILE})
            cache = PolicyCache(client, files, clock, tmp_path / "sts.jsonl")
            found = await Resolver(client, load_providers(), clock, policies=cache).route("example.org")
            assert isinstance(found, Route)
            assert [host.name for host in found.hosts] == ["mail.example.org"]
            assert found.policy is not None
            assert found.policy.mode == "enforce"

            # Somebody hides the record and redirects the MX: the policy holds for its age, over a restart as well.
            del zone["_mta-sts.example.org"]
            zone["example.org"] = {"MX": ["10 evil.example.com."]}
            with (tmp_path / "sts.jsonl").open("ab") as file:
                file.write(b'["example.org",{"id":"cut sho')  # by a crash of another process
            again = PolicyCache(client, files, clock, tmp_path / "sts.jsonl")
            found = await Resolver(client, load_providers(), clock, policies=again).route("example.org")
            assert isinstance(found, DnsDeferred)

            clock.now += 604_801
            found = await Resolver(client, load_providers(), clock, policies=again).route("example.org")
            assert isinstance(found, Route)
            assert files.fetched == 1
            await client.close()

    asyncio.run(run())


def test_a_domain_without_or_with_a_broken_policy_is_unaffected(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(ZONE) as server:
            assert server.at is not None
            client, clock = DnsClient([server.at], try_s=0.2, tries=1), SetClock()
            for files in ({}, {"example.org": b"junk"}, {"example.org": FILE.replace(b"enforce", b"testing")}):
                cache = PolicyCache(client, Files(files), clock, tmp_path / "missing" / "sts.jsonl")
                found = await Resolver(client, load_providers(), clock, policies=cache).route("example.org")
                assert isinstance(found, Route)
                assert found.policy is None
                assert len(found.hosts) == 2
            await client.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("response", "named", "fetched"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: %d\r\n\r\n" % len(FILE) + FILE, True, FILE),
        (b"HTTP/1.0 200 OK\r\n\r\n" + FILE, True, FILE),
        (b"HTTP/1.1 301 Moved\r\nLocation: https://elsewhere.test/\r\n\r\n", True, None),
        (b"HTTP/1.1 404 Not Found\r\n\r\n" + FILE, True, None),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9999999\r\n\r\n" + FILE, True, None),
        (b"HTTP/1.1 200 OK\r\nContent-Length: many\r\n\r\n" + FILE, True, None),
        (b"", True, None),
        (b"HTTP/1.0 200 OK\r\n\r\n" + FILE, False, None),  # a certificate for another name
    ],
)
def test_policy_files_come_over_verified_https_without_redirects(
    tmp_path: Path, response: bytes, named: bool, fetched: bytes | None
) -> None:
    pem, secret = certificate_for("mta-sts.example.org" if named else "mta-sts.example.com", folder=tmp_path)
    inside = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    inside.load_cert_chain(pem, secret)
    trusting = ssl.create_default_context(cafile=str(pem))

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked = await reader.readuntil(b"\r\n\r\n")
        assert asked.startswith(b"GET /.well-known/mta-sts.txt HTTP/1.0\r\nHost: mta-sts.example.org\r\n")
        writer.write(response)
        await writer.drain()
        writer.close()

    async def run() -> bytes | None:
        async with serving({"mta-sts.example.org": {"A": ["127.0.0.1"]}}) as server:
            assert server.at is not None
            web = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=inside)
            client = DnsClient([server.at])
            fetcher = HttpsFetcher(client, port=web.sockets[0].getsockname()[1], context=trusting)
            try:
                return await fetcher.fetch("example.org")
            finally:
                await client.close()
                web.close()
                await asyncio.sleep(0.05)

    assert asyncio.run(run()) == fetched


def test_a_policy_in_testing_mode_says_what_it_would_have_refused() -> None:
    async def run() -> None:
        async with serving(ZONE) as server:
            assert server.at is not None
            client, clock = DnsClient([server.at], try_s=0.2, tries=1), SetClock()
            cache = PolicyCache(client, Files({"example.org": FILE.replace(b"enforce", b"testing")}), clock)
            found = await Resolver(client, load_providers(), clock, policies=cache).route("example.org")
            assert isinstance(found, Route)
            assert found.doubts == "does not list evil.example.com"
            await client.close()

    asyncio.run(run())


class SlowFiles(Files):
    """Takes its time."""

    async def fetch(self, domain: str) -> bytes | None:
        await asyncio.sleep(0.05)
        return await super().fetch(domain)


def test_whoever_asks_while_a_policy_is_fetched_waits_for_it() -> None:
    async def run() -> None:
        async with serving(ZONE) as server:
            assert server.at is not None
            client, clock, files = DnsClient([server.at]), SetClock(), SlowFiles({"example.org": FILE})
            cache = PolicyCache(client, files, clock)
            found = await asyncio.gather(*(cache.policy("example.org") for _ in range(5)))
            assert [policy is not None and policy.mode for policy in found] == ["enforce"] * 5
            assert files.fetched == 1
            await client.close()

    asyncio.run(run())


def test_policies_are_not_asked_for_in_our_own_network() -> None:
    async def run() -> None:
        connections = []
        web = await asyncio.start_server(lambda reader, writer: connections.append(writer), "127.0.0.1", 0)
        async with serving({"mta-sts.example.org": {"A": ["127.0.0.1"]}}) as server:
            assert server.at is not None
            client = DnsClient([server.at])
            resolver = Resolver(client, load_providers(), SetClock())
            port = web.sockets[0].getsockname()[1]
            assert await HttpsFetcher(client, port=port, is_usable=resolver.is_usable).fetch("example.org") is None
            await client.close()
        assert connections == []
        web.close()

    asyncio.run(run())
