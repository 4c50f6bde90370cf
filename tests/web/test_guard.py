"""Who is let in, what is refused, and that nothing foreign becomes markup, a path or a secret shown."""

from __future__ import annotations

import re
import socket
import time
from pathlib import Path

import pytest

import engine.web.guard as guard_module
import engine.web.server as server_module
from engine.campaign import Campaign
from engine.web.auth import COOKIE, Keyring, TokenFileError
from engine.web.guard import Buckets
from tests.web.conftest import Client, Running, Sender, client_of, counters, provider


def test_without_a_token_nothing_is_told(client: Client) -> None:
    del client.headers["Authorization"]
    for path in ("/api/v1/campaigns", "/api/v1/openapi.json", "/metrics", "/c/weekly", "/c/weekly/report", "/"):
        assert client.get(path).status_code == 401
    assert client.post("/api/v1/campaigns/weekly/cancel", json={}).status_code == 401
    browser = client.get("/", headers={"Accept": "text/html"}, follow_redirects=False)
    assert browser.headers["location"] == "/login?next=/"
    assert client.get("/healthz").status_code == 200
    assert client.get("/readyz").text == "ready\n"


@pytest.mark.slow
@pytest.mark.parametrize("given", ["Bearer wrong", "Bearer ", "Basic b3BlcmF0b3I6eA==", "Bearer é", "nonsense"])
def test_a_wrong_token_is_none(client: Client, given: str) -> None:
    answer = client.get("/api/v1/campaigns", headers={"Authorization": given.encode()})
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"].startswith("Bearer")


def test_guessing_tokens_is_slowed(client: Client) -> None:
    codes = {client.get("/metrics", headers={"Authorization": f"Bearer {n}"}).status_code for n in range(40)}
    assert codes == {401, 429}
    assert client.get("/metrics").status_code == 200  # who has one is not held up


def sign_in(client: Client, name: str = "Ann <b>") -> None:
    token = client.token
    client.headers.pop("Authorization", None)
    answer = client.post("/login", data={"token": token, "name": name, "next": "/c/weekly"}, follow_redirects=False)
    assert (answer.status_code, answer.headers["location"]) == (303, "/c/weekly")
    cookie = answer.headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=strict" in cookie


def test_a_person_signs_in_and_is_who_is_recorded(campaign: Campaign, client: Client) -> None:
    sign_in(client, "Ann <b>")
    ours = {"X-Rowpost": "1", "Origin": "http://testserver"}
    assert client.post("/api/v1/campaigns/weekly/pause", json={}, headers=ours).json()["recorded"]["who"] == "Ann <b>"
    assert "Ann &lt;b&gt;" in client.get("/c/weekly").text
    assert client.post("/logout", headers=ours).status_code == 204
    assert client.get("/api/v1/campaigns").status_code == 401


@pytest.mark.parametrize(
    "headers",
    [
        {},  # a form of another site
        {"X-Rowpost": "1", "Origin": "https://evil.example"},
        {"X-Rowpost": "1", "Origin": "null"},
        {"X-Rowpost": "1", "Sec-Fetch-Site": "cross-site"},
        {"X-Rowpost": "1", "Sec-Fetch-Site": "same-site"},
    ],
)
def test_posts_from_elsewhere_are_refused_though_the_cookie_comes_along(
    campaign: Campaign, client: Client, headers: dict[str, str]
) -> None:
    sign_in(client)
    assert client.post("/api/v1/campaigns/weekly/cancel", json={}, headers=headers).status_code == 403
    assert not (campaign.run / "actions.jsonl").exists()


def test_a_cookie_cannot_be_made_or_changed(client: Client) -> None:
    sign_in(client)
    good = client.cookies[COOKIE]
    changed = good[:-1] + ("0" if good[-1] != "0" else "1")
    for bad in (changed, good.replace("operator", "root"), "a~b~c~d~e", "~" * 4, "x" * 5000):
        client.cookies.clear()
        assert client.get("/api/v1/campaigns", headers={"Cookie": f"{COOKIE}={bad}"}).status_code == 401


def test_a_cookie_ends_with_its_token_and_with_time(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    keyring = Keyring(file)
    cookie = keyring.session("operator", "Ann", 1000)
    assert keyring.of_session(cookie, 1000 + 3600) == "Ann"
    assert keyring.of_session(cookie, 1000 + 13 * 3600) is None
    file.write_text("operator another-token-of-some-length\n")
    assert keyring.of_session(cookie, 1001) is None


def test_token_files_that_others_read_or_that_are_none_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text("operator 0123456789abcdef\n")
    file.chmod(0o644)
    with pytest.raises(TokenFileError, match="others may read"):
        Keyring(file)
    file.chmod(0o600)
    assert Keyring(file).of_token("0123456789abcdef") == "operator"
    for text in ("", "operator short\n", "no-token\n", "# only a comment\n"):
        file.write_text(text)
        with pytest.raises(TokenFileError):
            Keyring(file)
    assert Keyring(tmp_path / "new").first
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o600


def test_the_next_page_is_one_of_ours(client: Client) -> None:
    for target in ("//evil.example", "https://evil.example", "/\\evil.example", "javascript:alert(1)"):
        answer = client.post("/login", data={"token": client.token, "next": target}, follow_redirects=False)
        assert answer.headers["location"] == "/"


def test_a_foreign_name_in_the_host_header_is_refused(client: Client) -> None:
    for host in ("evil.example", "evil.example:8080", "", "testserver.evil.example"):
        assert client.get("/api/v1/campaigns", headers={"Host": host}).status_code == 421
    assert client.get("/api/v1/campaigns", headers={"Host": "testserver:8080"}).status_code == 200


def test_scripts_in_names_and_replies_are_text(campaign: Campaign, client: Client) -> None:
    evil = "</script><script>alert(1)</script><!--"
    settings = campaign.folder / "campaign.toml"
    settings.write_text(re.sub(r'(?m)^id = ".*?"', f'id = "{evil}"', settings.read_text(), count=1))
    told = counters(1000, providers={evil: provider(accepted=1)}, replies=[[evil, f"550 {evil}", 3]])
    Sender(campaign, evil).tell({**told, "events": [{"at_us": 1, "event": "throttle_eased", "reason": evil}]})
    client.shelf.all(fresh=True)
    for path in ("/c/weekly", "/"):
        page = client.get(path).text
        assert evil not in page
        assert len(re.findall(r"<script\b", page)) == (2 if path == "/c/weekly" else 0)
        assert len(re.findall(r"</script>", page)) == (2 if path == "/c/weekly" else 0)


def test_every_answer_has_the_security_headers(campaign: Campaign, client: Client) -> None:
    campaign.report.mkdir()
    (campaign.report / "index.html").write_text("<p>report</p>")
    for path in ("/c/weekly", "/c/weekly/report", "/login", "/api/v1/campaigns", "/metrics", "/healthz", "/nothing"):
        answer = client.get(path)
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["x-frame-options"] == "DENY"
        assert answer.headers["referrer-policy"] == "no-referrer"
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "frame-ancestors 'none'" in policy
        assert "unsafe-eval" not in policy
        assert "script-src 'unsafe-inline'" not in policy
        assert client.token not in answer.text
    policies = {client.get("/login").headers["content-security-policy"] for _ in range(3)}
    assert len(policies) == 3  # a nonce is used once


def test_pages_name_nothing_outside(campaign: Campaign, client: Client) -> None:
    for path in ("/c/weekly", "/", "/login"):
        page = client.get(path).text
        assert not re.findall(r"""(?:src|href|action)=["'](?!/|#)[^"']*""", page)
        assert set(re.findall(r"https?://[^\s\"'<]+", page)) <= {"http://www.w3.org/2000/svg"}


def test_huge_bodies_are_refused(client: Client) -> None:
    def endless() -> object:
        for _ in range(100):
            yield b"x" * 100_000

    headers = {"Content-Type": "application/json"}
    assert client.post("/api/v1/campaigns", content=b"x" * (5 << 20), headers=headers).status_code == 413
    assert client.post("/api/v1/campaigns", content=endless(), headers=headers).status_code == 413  # type: ignore[arg-type]
    assert client.post("/login", content=b"token=" + b"x" * 10_000).status_code == 413


def test_slow_clients_are_hung_up_on(campaign: Campaign, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard_module, "BODY_PATIENCE_S", 0.5)
    monkeypatch.setattr(server_module, "HEADER_PATIENCE_S", 0.5)
    with Running(campaign.folder.parent) as server:
        with socket.create_connection(("127.0.0.1", server.port)) as slow:
            slow.sendall(b"GET / HTT")
            slow.settimeout(5)
            began = time.monotonic()
            assert slow.recv(1000) == b""
            assert time.monotonic() - began < 3
        with socket.create_connection(("127.0.0.1", server.port)) as slow:
            head = f"POST /api/v1/campaigns HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {server.token}\r\n"
            slow.sendall(head.encode() + b"Content-Type: application/json\r\nContent-Length: 100\r\n\r\n{")
            slow.settimeout(5)
            assert b" 408 " in slow.recv(1000)


def test_public_endpoints_are_rate_limited_by_address() -> None:
    bucket = Buckets(per_s=1.0, burst=3.0, most=2)
    assert [bucket.take("a", 0.0) for _ in range(4)] == [True, True, True, False]
    assert bucket.take("b", 0.0)
    assert bucket.take("a", 1.0)
    for number in range(10):
        bucket.take(f"x{number}", 2.0)
    assert len(bucket._known) == 2


def test_secrets_of_the_campaign_are_nowhere(campaign: Campaign, client: Client) -> None:
    keys = (campaign.folder / "keys" / "secret.keys").read_text()
    secrets = set(re.findall(r"[A-Za-z0-9+/=_-]{20,}", keys))
    assert secrets
    for path in ("/c/weekly", "/api/v1/campaigns/weekly", "/metrics", "/api/v1/openapi.json"):
        text = client.get(path).text
        assert not [secret for secret in secrets if secret in text]


def test_loopback_and_a_token_are_the_default(tmp_path: Path, campaign: Campaign) -> None:
    with client_of(campaign.folder.parent, open_metrics=True) as client:
        del client.headers["Authorization"]
        assert client.get("/metrics").status_code == 200
        assert client.get("/api/v1/campaigns").status_code == 401
