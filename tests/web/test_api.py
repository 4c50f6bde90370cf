"""What programs and people ask of `engine serve`, and what each act leaves in the store and in the record."""

from __future__ import annotations

import sqlite3
import stat
import time
from pathlib import Path

import msgspec
import pytest

import engine.web.shelf as shelf_module
from engine.campaign import Campaign
from engine.control.sqlite import SqliteStore
from engine.control.store import Life
from engine.lists.suppressions import Suppressions
from engine.work.words import words_of
from tests.web.conftest import Client, Sender, client_of, counters, make_campaign, provider


def test_numbers_are_what_senders_told(campaign: Campaign, client: Client) -> None:
    first = Sender(campaign, "machine-a", started_us=1)
    first.tell(counters(1000, accepted=300, bounced=10, left=690, per_second=99.0))
    first.store.leave(first.id, time.time_ns() // 1000, counters(1000, accepted=300, bounced=10, left=690))
    second = Sender(campaign, "machine-b", started_us=2)
    gmail = provider(accepted=200, deferred=50, connections=3, allowed=5, waiting=90, limit="budget: 5 connections")
    so_far = counters(1000, before=310, accepted=200, in_doubt=1, waiting=40, left=489, per_second=20.5)
    second.tell({**so_far, "providers": {"gmail": gmail}})
    told = client.ask("/campaigns/weekly")
    assert (told["accepted"], told["bounced"], told["in_doubt"], told["left"]) == (500, 10, 1, 489)
    assert told["uncounted"] == 0
    assert told["state"] == "waiting"  # rows wait, and nothing is ready or in flight
    assert told["per_second"] == 20.5
    assert [machine["state"] for machine in told["machines"]] == ["sending", "ended"]
    assert told["providers"][0]["name"] == "gmail"
    assert told["providers"][0]["limit_kind"] == "budget"
    assert told["providers"][0]["connections"] == 3


def test_rows_of_a_killed_sender_are_not_lost_from_the_sum(campaign: Campaign, client: Client) -> None:
    dead = Sender(campaign, "machine-a", started_us=1)
    dead.tell(counters(1000, accepted=100, left=900))
    dead.store.supersede(dead.id, "x")
    # The logs said 130 rows had their outcome: 30 more than the dead sender's last word.
    Sender(campaign, "machine-a", started_us=2).tell(counters(1000, before=130, accepted=70, left=800))
    told = client.ask("/campaigns/weekly")
    assert told["accepted"] == 170
    assert told["uncounted"] == 30
    assert told["left"] == 800


def test_pause_resume_cancel_are_in_the_store_and_in_the_record(campaign: Campaign, client: Client) -> None:
    store = SqliteStore(campaign.store_file)
    for act, state in (("pause", "paused"), ("resume", "ready"), ("cancel", "cancelled")):
        done = client.act(f"/campaigns/weekly/{act}", {})
        assert done["recorded"]["what"] == act
        assert store.campaign().state == state  # type: ignore[union-attr]
    refused = client.act("/campaigns/weekly/resume", {}, code=409)
    assert "cancelled" in refused["detail"]
    actions = client.ask("/campaigns/weekly/actions")["actions"]
    assert [(one["who"], one["what"]) for one in actions] == [("operator", w) for w in ("cancel", "resume", "pause")]
    assert all(abs(one["at_us"] / 1e6 - time.time()) < 60 for one in actions)
    mode = stat.S_IMODE((campaign.run / "actions.jsonl").stat().st_mode)
    assert mode == 0o600
    store.close()


def test_a_slowed_provider_is_a_word_that_the_sender_reads(campaign: Campaign, client: Client) -> None:
    Sender(campaign).tell(counters(1000, providers={"gmail": provider(accepted=1)}))
    client.ask("/campaigns/weekly")
    client.act("/campaigns/weekly/providers/gmail/slow", {"connections": 2, "per_second": 0.5})
    store = SqliteStore(campaign.store_file)
    word = words_of(store.overrides())["gmail"]
    assert (word.connections, word.per_second, word.who) == (2, 0.5, "operator")
    assert client.ask("/campaigns/weekly")["providers"][0]["slowed"]["connections"] == "2"
    client.act("/campaigns/weekly/providers/gmail/slow", {})
    assert store.overrides() == []
    client.act("/campaigns/weekly/providers/nobody/slow", {"connections": 2}, code=404)
    client.act("/campaigns/weekly/providers/gmail/slow", {"connections": 0}, code=422)
    store.close()


def test_a_released_machine_has_no_lease_any_more(campaign: Campaign, client: Client) -> None:
    sender = Sender(campaign)
    assert sender.tell(counters(1000))
    client.act(f"/campaigns/weekly/machines/{sender.id}/release", {})
    assert not sender.tell(counters(1000))
    assert sender.store.incarnations()[0].state is Life.SUPERSEDED
    client.act(f"/campaigns/weekly/machines/{sender.id}/release", {}, code=409)
    client.act("/campaigns/weekly/machines/0000000000000000/release", {}, code=404)


def test_the_same_key_does_it_once(campaign: Campaign, client: Client) -> None:
    first = client.act("/campaigns/weekly/pause", {}, Idempotency_Key="k1")
    client.act("/campaigns/weekly/resume", {})
    again = client.act("/campaigns/weekly/pause", {}, Idempotency_Key="k1")
    assert again == first
    assert client.ask("/campaigns/weekly")["state"] == "planned"  # the repeat paused nothing
    client.act("/campaigns/weekly/cancel", {}, Idempotency_Key="k1", code=422)


def test_keys_survive_a_restart_of_the_server(campaign: Campaign) -> None:
    with client_of(campaign.folder.parent) as client:
        first = client.act("/campaigns/weekly/pause", {}, Idempotency_Key="k1")
    with client_of(campaign.folder.parent) as client:
        assert client.act("/campaigns/weekly/pause", {}, Idempotency_Key="k1") == first


def test_a_campaign_is_made_of_a_template_and_a_list(campaign: Campaign, client: Client) -> None:
    wanted = {
        "id": "march",
        "list": "weekly/list.parquet",
        "from_address": "news@example.com",
        "from_name": 'Quotes " and \\ and ü',
        "subject": "Hello",
        "text": "Dear {{ first_name }}",
    }
    made = client.act("/campaigns", wanted, code=201)
    assert made["rows"] == 1000
    assert made["state"] == "planned"
    settings = Campaign(campaign.folder.parent / "march").settings()
    assert settings.message.from_name == 'Quotes " and \\ and ü'
    client.act("/campaigns", wanted, code=409)
    # A template that names a column the list lacks: refused by `plan`, and no folder stays behind.
    refused = client.act("/campaigns", {**wanted, "id": "april", "text": "{{ nobody }}"}, code=422)
    assert "nobody" in refused["detail"]
    assert not (campaign.folder.parent / "april").exists()


def test_lists_and_names_outside_are_refused(campaign: Campaign, client: Client, tmp_path: Path) -> None:
    (tmp_path / "secret.parquet").write_bytes(b"x")
    (campaign.folder.parent / "link.parquet").symlink_to(tmp_path / "secret.parquet")
    wanted = {"id": "march", "from_address": "a@example.com", "subject": "s", "text": "t"}
    for name in ("../secret.parquet", "/etc/passwd", "link.parquet", "a\0b", "https://example.com/list.parquet"):
        client.act("/campaigns", {**wanted, "list": name}, code=422)
    for name in ("../march", "a/b", "", ".hidden", "a" * 65):
        client.act("/campaigns", {**wanted, "list": "weekly/list.parquet", "id": name}, code=422)
    client.act("/campaigns", {**wanted, "list": "weekly/list.parquet", "subject": "a\r\nBcc: b@c"}, code=422)
    for path in ("/c/..%2f..%2fetc/report", "/c/%2e%2e/report", "/api/v1/campaigns/..%2f..%2fetc"):
        assert client.get(path).status_code == 404


def test_suppressions_are_asked_and_added(campaign: Campaign, client: Client) -> None:
    assert not client.ask("/campaigns/weekly/suppressions?address=user5@example.com")["is_suppressed"]
    assert client.act("/campaigns/weekly/suppressions", {"addresses": ["User5@Example.com"]})["added"] == 1
    assert client.ask("/campaigns/weekly/suppressions?address=user5@example.com")["is_suppressed"]
    known = Suppressions(campaign.suppression, list_id="another-list")
    assert not known.check(["user5@example.com"])[0]
    client.act("/campaigns/weekly/suppressions", {"addresses": ["user6@example.com"], "everywhere": True})
    known.refresh()
    assert known.check(["user6@example.com"])[0]
    client.act("/campaigns/weekly/suppressions", {"addresses": ["nonsense"]}, code=422)


def test_one_campaign_in_its_own_folder(campaign: Campaign) -> None:
    with client_of(campaign.folder) as client:
        assert client.ask("/campaigns")["campaigns"][0]["key"] == "weekly"
        assert client.get("/", follow_redirects=False).headers["location"] == "/c/weekly"
        client.act("/campaigns", {"id": "x", "list": "l", "from_address": "a@b.c", "subject": "s"}, code=409)


def test_a_store_that_cannot_be_read_is_told_and_harms_no_other(campaign: Campaign, client: Client) -> None:
    broken = make_campaign(campaign.folder.parent / "broken", ["a@example.com"])
    broken.store_file.write_bytes(b"this is no database" * 100)
    for beside in broken.folder.glob("control.sqlite-*"):
        beside.unlink()
    client.shelf.all(fresh=True)
    told = {one["key"]: one for one in client.ask("/campaigns")["campaigns"]}
    assert "not a database" in told["broken"]["problem"]
    assert told["weekly"]["problem"] == ""
    assert client.get("/c/broken").status_code == 200
    assert client.get("/readyz").status_code == 503


def test_the_page_asks_the_store_once_a_second_and_waits_for_nobody(
    campaign: Campaign, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shelf_module, "FRESH_S", 0.9)
    sender = Sender(campaign)
    sender.tell(counters(1000))
    watched = client.shelf.get("weekly")
    assert watched is not None
    client.ask("/campaigns/weekly")
    before = watched.reads
    began = time.monotonic()
    for _ in range(50):
        client.ask("/campaigns/weekly")
    assert watched.reads - before <= 2 + (time.monotonic() - began) / 0.9
    # A sender that holds the write lock is not waited for, and a reader does not hold up a writer.
    writer = sqlite3.connect(campaign.store_file, isolation_level=None)
    writer.execute("BEGIN IMMEDIATE")
    began = time.monotonic()
    watched.look(fresh=True)
    assert time.monotonic() - began < 0.5
    writer.execute("COMMIT")
    writer.close()


def test_reading_writes_nothing_into_the_store(campaign: Campaign, client: Client) -> None:
    reader = sqlite3.connect(campaign.store_file)
    (before,) = reader.execute("PRAGMA data_version").fetchone()
    for _ in range(3):
        watched = client.shelf.get("weekly")
        assert watched is not None
        watched.look(fresh=True)
        client.get("/metrics")
        client.get("/c/weekly")
    (after,) = reader.execute("PRAGMA data_version").fetchone()
    assert after == before  # no other connection committed anything
    reader.close()


def test_problems_are_problems(client: Client) -> None:
    for answer in (
        client.get("/api/v1/campaigns/none"),
        client.get("/api/v1/nothing"),
        client.delete("/api/v1/campaigns"),
        client.post("/api/v1/campaigns", content=b"{", headers={"Content-Type": "application/json"}),
        client.post("/api/v1/campaigns", content=b"<a/>", headers={"Content-Type": "text/xml"}),
        client.post("/api/v1/campaigns", content=b"[" * 100_000, headers={"Content-Type": "application/json"}),
    ):
        assert answer.headers["content-type"] == "application/problem+json"
        problem = msgspec.json.decode(answer.content)
        assert problem["status"] == answer.status_code
        assert 400 <= answer.status_code < 500


def test_the_list_of_methods_is_told(client: Client) -> None:
    assert set(client.put("/api/v1/campaigns").headers["allow"].split(", ")) >= {"GET", "POST"}
