"""What `engine check` shows of a relay: each step, and what would stop a send."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from engine.errors import Exit
from engine.smtp.destination import Credentials, Destination, Host
from engine.smtp.probe import HostMisconfigured, HostUnusable, ProbeReport, probe
from tests.smtp.conftest import QUICK, serving
from tests.smtp.test_handshake import auth_server, saying, tls_server
from tests.smtp.test_session import good_server


async def look(host: Host, **settings: object) -> ProbeReport:
    wanted = {"key": "relay", "hosts": (host,), "tls": "off", "greeting_name": "c.test", **settings}
    return await probe(Destination(**wanted), QUICK)  # type: ignore[arg-type]


def test_a_good_relay_is_shown_step_by_step(certificate: tuple[Path, Path]) -> None:
    async def story() -> ProbeReport:
        async with serving(tls_server(certificate, ["PIPELINING", "CHUNKING", "SIZE 1000", "AUTH PLAIN"])) as host:
            return await look(host, tls="required", credentials=Credentials("ann", "secret"))

    report = asyncio.run(story())
    assert report.problem is None
    text = "\n".join(f"{line.state} {line.text}" for line in report.lines)
    for expected in ("greets: 220 test", "TLSv1.", "not verified", "SIZE 1000", "4 messages in one round trip", "ann"):
        assert expected in text
    assert "warn the certificate would not be verified: certificate not trusted" in text
    assert "secret" not in text


def test_what_would_stop_a_send_is_an_error_with_a_next_step() -> None:
    async def story() -> None:
        async with serving(good_server([])) as host:
            report = await look(host, tls="verified")
            assert isinstance(report.problem, HostMisconfigured)
            assert report.problem.exit_code is Exit.SETTINGS
            assert "does not offer STARTTLS" in str(report.problem)
            assert report.problem.next_step
        report = await look(host)
        assert isinstance(report.problem, HostUnusable)
        assert report.problem.exit_code is Exit.TRY_AGAIN
        heard: list[str] = []
        async with serving(auth_server("AUTH PLAIN", [b"535 5.7.8 no\r\n"], heard)) as host:
            report = await look(host, credentials=Credentials("ann", "secret"))
        assert report.problem is not None
        assert "535 5.7.8 no" in str(report.problem)
        assert report.problem.exit_code is Exit.SETTINGS

    asyncio.run(story())


@pytest.mark.parametrize(("policy", "warned"), [("off", False), ("opportunistic", True)])
def test_plain_text_is_warned_of(policy: str, warned: bool) -> None:
    async def story() -> ProbeReport:
        async with serving(good_server(["PIPELINING"])) as host:
            return await look(host, tls=policy)

    text = "\n".join(f"{line.state} {line.text}" for line in asyncio.run(story()).lines)
    assert ("unencrypted" in text) is warned
    assert "one round trip a message" in text


def test_the_second_host_is_looked_at_too() -> None:
    async def story() -> ProbeReport:
        async with serving(saying(b"554 no\r\n")) as bad, serving(good_server([])) as good:
            both = Destination(key="x", hosts=(bad, good), tls="off", greeting_name="c.test")  # type: ignore[arg-type]
            return await probe(both, msgspec.structs.replace(QUICK))

    report = asyncio.run(story())
    assert isinstance(report.problem, HostUnusable)
    assert len(report.connections) == 1
