"""Answers kept for prepare and plan: one asking each, resumable, a torn line harmless; and the command around them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import polars as pl
import pytest
from click.testing import CliRunner
from dns_world import DnsServer, Zone, serving

from engine.clock import SystemClock
from engine.commands.resolve import NotAListOrDomain, resolve
from engine.route.answers import ask_all, read_answers, still_to_ask
from engine.route.dns_client import DnsClient
from engine.route.provider import load_providers
from engine.route.resolver import Resolver

ZONE: Zone = {f"d{n}.test": {"MX": ["10 mx.d.test."]} for n in range(500)} | {
    "mx.d.test": {"A": ["8.8.8.8"]},
    "null.test": {"MX": ["0 ."]},
    "bad.test": "servfail",
    "gmail.com": {"MX": ["5 gmail-smtp-in.l.google.com."]},
    "gmail-smtp-in.l.google.com": {"A": ["8.8.4.4"]},
}


@contextmanager
def dns_in_a_thread(zone: Zone) -> Iterator[DnsServer]:
    """The name server beside a command that runs a loop of its own."""
    ready, stop = threading.Event(), threading.Event()
    found: list[DnsServer] = []

    async def run() -> None:
        async with serving(zone) as server:
            found.append(server)
            ready.set()
            while not stop.is_set():
                await asyncio.sleep(0.01)

    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    ready.wait(5)
    try:
        yield found[0]
    finally:
        stop.set()
        thread.join()


def test_each_domain_is_asked_once_and_a_cut_run_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "domains.jsonl"
    domains = [f"d{n}.test" for n in range(500)]

    async def run(todo: list[str]) -> DnsServer:
        async with serving(ZONE) as server:
            assert server.at is not None
            client = DnsClient([server.at])
            await ask_all(todo, Resolver(client, load_providers(), SystemClock()), path, SystemClock(), at_once=50)
            await client.close()
            return server

    asyncio.run(run(domains[:200]))
    path.write_bytes(path.read_bytes()[:-20])  # killed in the middle of a line
    now_us = SystemClock().wall_us()
    todo = still_to_ask(domains, read_answers(path), now_us=now_us, max_age_s=86_400)
    assert len(todo) == 301
    server = asyncio.run(run(todo))
    assert server.asked.total() == 301 + 2
    answers = read_answers(path)
    assert {answer.provider for answer in answers.values()} == {"d.test"}
    assert still_to_ask(domains, answers, now_us=now_us + 1, max_age_s=86_400) == []
    assert len(still_to_ask(domains, answers, now_us=now_us + 10**12, max_age_s=86_400)) == 500


def test_command_counts_rows_by_provider(tmp_path: Path) -> None:
    addresses = ["a@d1.test", "b@D1.test", "c@gmail.com", "d@null.test", "e@nowhere.test", "f@bad.test", "junk", None]
    pl.DataFrame({"email": addresses}).write_parquet(tmp_path / "list.parquet")
    out = tmp_path / "domains.jsonl"
    with dns_in_a_thread(ZONE) as server:
        assert server.at is not None
        arguments = [str(tmp_path / "list.parquet"), "--out", str(out), "--server", f"127.0.0.1:{server.at.port}"]
        done = CliRunner().invoke(resolve, [*arguments, "--json"], catch_exceptions=False)
        assert msgspec.json.decode(done.stdout) == {
            "providers": {"d.test": {"rows": 2, "domains": 1}, "google": {"rows": 1, "domains": 1}},
            "unreachable": {"null_mx": {"null.test": 1}, "none": {"nowhere.test": 1}, "deferred": {"bad.test": 1}},
        }
        assert "5 of 5 domains asked" in done.stderr
        again = CliRunner().invoke(resolve, arguments, catch_exceptions=False)
        assert "1 of 5 domains asked" in again.stderr  # the failure alone
        assert "google" in again.stdout


def test_command_answers_for_single_domains(tmp_path: Path) -> None:
    with dns_in_a_thread(ZONE) as server:
        assert server.at is not None
        arguments = ["Gmail.com", "x@null.test", "--server", f"127.0.0.1:{server.at.port}"]
        done = CliRunner().invoke(resolve, arguments, catch_exceptions=False)
    assert "gmail.com  google" in done.stdout
    assert "gmail-smtp-in.l.google.com" in done.stdout
    assert "null.test  takes no mail" in done.stdout


def test_command_names_what_it_cannot_read(tmp_path: Path) -> None:
    (tmp_path / "list.parquet").write_bytes(b"PAR1 junk")
    with pytest.raises(NotAListOrDomain):
        CliRunner().invoke(resolve, [str(tmp_path / "list.parquet"), "--server", "127.0.0.1"], catch_exceptions=False)


def test_a_name_server_that_denies_gmail_is_not_believed() -> None:
    async def run() -> str:
        async with serving({}) as server:
            assert server.at is not None
            client = DnsClient([server.at])
            found = await Resolver(client, load_providers(), SystemClock()).route("gmail.com")
            await client.close()
            return type(found).__name__

    assert asyncio.run(run()) == "DnsDeferred"
