"""What outsiders may do to a server, over real sockets: too fast, too slow, and what it must never say."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import socket
import time
import urllib.error
import urllib.request
from pathlib import Path

import msgspec
import pytest

import engine.web.events as events_module
from engine.campaign import Campaign
from engine.web.app import public_routes
from tests.web.conftest import Client, Running, Sender, client_of, counters, provider, start
from tests.web.test_guard import sign_in


def test_unsubscribing_is_slowed_by_address_and_nothing_else_is(campaign: Campaign) -> None:
    routes, closing = public_routes([campaign.folder], None)
    with closing, client_of(campaign.folder.parent, extra=routes) as client:
        codes = [client.get("/u/nonsense").status_code for _ in range(60)]
        assert set(codes) == {404, 429}
        assert codes.count(404) >= 50  # a family behind one address is no attack
        refused = client.post("/u/nonsense", content=b"List-Unsubscribe=One-Click")
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "10")
        assert refused.headers["x-content-type-options"] == "nosniff"
        assert client.ask("/campaigns/weekly")["rows"] == 1000


def test_public_answers_have_security_headers_and_set_no_cookie(campaign: Campaign) -> None:
    routes, closing = public_routes([campaign.folder], "a-secret-path")
    with closing, client_of(campaign.folder.parent, extra=routes) as client:
        del client.headers["Authorization"]
        for answer in (client.get("/u/nonsense"), client.post("/webhook/wrong", content=b"{}"), client.get("/u/")):
            assert answer.status_code in (404, 405)
            for name in ("x-content-type-options", "referrer-policy", "content-security-policy"):
                assert answer.headers[name]
            assert "set-cookie" not in answer.headers
        huge = client.post("/u/nonsense", content=b"x" * 100_000)
        assert huge.status_code == 413


def test_a_reader_that_does_not_read_holds_up_nobody(campaign: Campaign, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twenty pages that never read their events, and one that does: it is told, and memory stays small."""
    monkeypatch.setattr(events_module, "ROUND_S", 0.05)
    sender = Sender(campaign)
    many = {f"provider-{n}.example": provider(accepted=n, limit="budget: 2 connections" * 20) for n in range(200)}
    with Running(campaign.folder.parent) as server, contextlib.ExitStack() as open_:
        head = (
            f"GET /api/v1/campaigns/weekly/stream HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {server.token}"
        )
        for _ in range(20):
            deaf = socket.socket()
            open_.enter_context(deaf)
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            deaf.connect(("127.0.0.1", server.port))
            deaf.sendall(f"{head}\r\n\r\n".encode())
        asked = urllib.request.Request(f"{server.url}/api/v1/campaigns/weekly/stream")
        asked.add_header("Authorization", f"Bearer {server.token}")
        with urllib.request.urlopen(asked, timeout=20) as stream:
            for number in range(1, 6):
                sender.tell(counters(1000, in_flight=1, accepted=number, providers=many))
                began = time.monotonic()
                while True:
                    line = stream.readline()
                    if line.startswith(b"data: ") and b'"accepted":%d,' % number in line.replace(b"}", b","):
                        break
                    assert time.monotonic() - began < 15
    sender.close()


@pytest.mark.long
def test_what_a_service_prints_holds_no_secret(campaign: Campaign, tmp_path: Path) -> None:
    """Standard output and error of a service are its log: no token, no cookie, no secret path or key is in them."""
    words = ["serve", campaign.folder.name, "--listen", "127.0.0.1:0", "--webhook-secret", "wh-secret-4711"]
    words += ["--hook", "http://127.0.0.1:9/hook-secret-path", "--hook-secret", "hs-secret-4711"]
    process = start(campaign.folder.parent, *words)
    assert process.stdout is not None
    url = process.stdout.readline().strip()
    token = (campaign.run / "web.token").read_text().split()[1]
    cookie = ""
    for path, headers, body in (
        ("api/v1/campaigns", {"Authorization": f"Bearer {token}"}, None),
        ("api/v1/campaigns", {"Authorization": "Bearer wrong-token-4711"}, None),
        ("webhook/wh-secret-4711", {}, b"not json"),
        ("webhook/wh-guess-4711", {}, b"{}"),
        ("login", {}, f"token={token}".encode()),
        ("api/v1/campaigns", {"Content-Type": "application/json", "Authorization": f"Bearer {token}"}, b"{"),
    ):
        asked = urllib.request.Request(url + path, body, headers)
        try:
            with urllib.request.urlopen(asked, timeout=20) as answer:
                cookie = answer.headers.get("set-cookie") or cookie
        except urllib.error.HTTPError as refused:
            refused.close()
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=20)
    said = out + err
    keys = set(re.findall(r"[A-Za-z0-9+/=_-]{20,}", (campaign.folder / "keys" / "secret.keys").read_text()))
    for secret in {token, "wrong-token-4711", "wh-secret-4711", "wh-guess", "hs-secret", "hook-secret", *keys}:
        assert secret not in said
    assert "web.token" in said  # where it is found


def test_a_store_that_is_away_is_told_without_its_password(campaign: Campaign, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROWPOST_CONTROL", "postgresql://rowpost:hunter2-secret@127.0.0.1:1/db?password=hunter3-secret")
    plan = json.loads(campaign.plan_file.read_text("utf-8"))
    campaign.plan_file.write_text(json.dumps({**plan, "store": "postgresql"}), "utf-8")
    campaign.store_file.unlink()
    with client_of(campaign.folder.parent) as client:
        (told,) = client.ask("/campaigns")["campaigns"]
        assert "127.0.0.1" in told["problem"]
        for path in ("/", "/c/weekly", "/api/v1/campaigns", "/api/v1/campaigns/weekly", "/metrics", "/readyz"):
            assert "secret" not in client.get(path).text
        refused = client.act("/campaigns/weekly/pause", {}, code=503)
        assert "secret" not in msgspec.json.encode(refused).decode()


def test_a_signed_in_person_signs_out_from_our_page_alone(client: Client) -> None:
    sign_in(client)
    assert client.post("/logout").status_code == 403
    assert client.get("/api/v1/campaigns").status_code == 200
    elsewhere = {"Sec-Fetch-Site": "cross-site", "Content-Type": "application/x-www-form-urlencoded"}
    assert client.post("/login", data={"token": client.token}, headers=elsewhere).status_code == 403
