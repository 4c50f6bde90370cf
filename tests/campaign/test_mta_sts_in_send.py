"""MTA-STS as `engine send` meets it: policies over HTTPS, good certificates and bad ones, on loopback."""

from __future__ import annotations

import contextlib
import ssl
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest

from engine.rehearse.internet import InternetSettings, RunningInternet, run_internet, willing, zone_of
from engine.rehearse.models import World
from engine.rehearse.record import read_record
from engine.rehearse.sink import SinkSettings
from tests.campaign.conftest import Operator
from tests.route.certificates import certificate_for

# Whose certificate is good, whose names another host, whose policy names other hosts, who only tests, who has none.
DOMAINS = {"good": "enforce", "bad": "enforce", "moved": "enforce", "trial": "testing", "plain": ""}
ADDRESSES = {name: f"127.1.1.{number}" for number, name in enumerate(DOMAINS, 1)}


class PolicyFiles(BaseHTTPRequestHandler):
    """Serves the policy of the domain that is asked for."""

    asked: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        domain = (self.headers["Host"] or "").removeprefix("mta-sts.")
        self.asked.append(domain)
        name = domain.removesuffix(".test")
        host = "elsewhere.test" if name in ("moved", "trial") else f"mx.{domain}"
        policy = f"version: STSv1\nmode: {DOMAINS[name]}\nmx: {host}\nmax_age: 86400\n".encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(policy)))
        self.end_headers()
        self.wfile.write(policy)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


class Secured:
    """An operator, an internet with TLS, and who serves the policies."""

    def __init__(self, operator: Operator, net: RunningInternet, records: Path, delivery: dict[str, object]) -> None:
        self.operator, self.net, self._records, self._delivery = operator, net, records, delivery

    def begin(self, each: int, **delivery: object) -> None:
        rows = [f"r{n}@{name}.test" for n in range(each) for name in DOMAINS]
        self.operator.begin(rows, **{**self._delivery, **delivery})

    def received(self) -> dict[str, int]:
        return {name: len(read_record(self._records / f"{name}.tsv")) for name in DOMAINS}


@pytest.fixture
def secured(tmp_path: Path) -> Iterator[Secured]:
    names = [f"mta-sts.{name}.test" for name in DOMAINS] + [f"mx.{name}.test" for name in DOMAINS if name != "bad"]
    pem, key = certificate_for(*names, folder=tmp_path)
    inside = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    inside.load_cert_chain(pem, key)
    PolicyFiles.asked.clear()
    web = ThreadingHTTPServer(("127.0.0.1", 0), PolicyFiles)
    web.socket = inside.wrap_socket(web.socket, server_side=True)
    threading.Thread(target=web.serve_forever, daemon=True).start()
    hosts = {f"mx.{name}.test": address for name, address in ADDRESSES.items()}
    zone = zone_of(hosts, {f"{name}.test": f"mx.{name}.test" for name in DOMAINS})
    for name in DOMAINS:
        zone.records[f"_mta-sts.{name}.test"] = {"TXT": ['"v=STSv1; id=1;"'] if DOMAINS[name] else ['"nothing"']}
        zone.records[f"mta-sts.{name}.test"] = {"A": ["127.0.0.1"]}
    settings = InternetSettings(
        world=World("with TLS", tuple(willing(name) for name in DOMAINS)),
        zone=zone,
        addresses=ADDRESSES,
        records=tmp_path / "records",
        sink=SinkSettings(tls="starttls", certificate=pem, key=key),
    )
    with contextlib.ExitStack() as stack:
        net = stack.enter_context(run_internet(settings))
        stack.callback(web.server_close)
        stack.callback(web.shutdown)
        delivery = {
            "mode": "direct",
            "nameservers": [net.nameserver],
            "smtp_port": net.port,
            "allow_private_hosts": True,
            "tls_ca_file": "../cert.pem",
            "mta_sts_port": web.server_address[1],
        }
        yield Secured(Operator(tmp_path, None), net, tmp_path / "records", delivery)


@pytest.mark.long
def test_enforce_means_verified_tls_or_deferred_with_the_reason(secured: Secured) -> None:
    secured.begin(5, max_age="3s")
    said = secured.operator.run("send", "--processes", "2", "--yes", code=None).stderr
    assert secured.operator.outcomes(code=None) == {"accepted": 15, "deferred": 10}
    assert secured.received() == {"good": 5, "bad": 0, "moved": 0, "trial": 5, "plain": 5}
    why = dict(zip(DOMAINS, (str(row["last_reply"]) for row in secured.operator.rows()), strict=False))
    assert "4.7.5 tls failed at STARTTLS: certificate not trusted" in why["bad"]
    assert "the MTA-STS policy of bad.test asks for verified TLS" in why["bad"]
    assert why["moved"] == "4.7.0 moved.test: its MTA-STS policy lists none of its MX hosts (mx.moved.test)"
    assert "mta_sts_testing" in said
    assert "its MTA-STS policy does not list mx.trial.test" in said
    assert sorted(set(PolicyFiles.asked)) == ["bad.test", "good.test", "moved.test", "trial.test"]

    # What was fetched outlives the run: the same policies are not asked for again.
    kept = (secured.operator.campaign / "run" / "mta-sts.jsonl").read_text("utf-8")
    assert all(f'["{name}.test"' in kept for name in ("good", "bad", "moved", "trial"))


@pytest.mark.slow
def test_switched_off_nobody_asks(secured: Secured) -> None:
    secured.begin(2, mta_sts=False)
    secured.operator.run("send", "--processes", "1", "--yes")
    assert secured.received() == dict.fromkeys(DOMAINS, 2)
    assert PolicyFiles.asked == []
