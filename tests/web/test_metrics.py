"""What Prometheus reads, that dashboard and alerts ask for nothing else, and what a webhook is told."""

from __future__ import annotations

import asyncio
import hmac
import json
import re
import urllib.request
from hashlib import sha256
from importlib.resources import files
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from engine.campaign import Campaign
from engine.web.hook import Hook, Watcher
from engine.web.metrics_server import NoMetricsThere, serve_metrics
from engine.web.snapshot import Snapshot
from tests.web.conftest import Client, Sender, counters, provider


def values(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found[sample.name, frozenset(sample.labels.items())] = sample.value
    return found


def labels(**given: str) -> frozenset[tuple[str, str]]:
    return frozenset({"campaign": "weekly", **given}.items())


def test_counters_go_on_over_a_restart_of_the_sender(campaign: Campaign, client: Client) -> None:
    reply_s = [1, 2] + [0] * 11
    told = provider(accepted=100, deferred=7, connections=4, reply_s=reply_s, reply_s_sum=0.05)
    keys = [["first", "gmail", 100, 10, 4, 5, 1_900_000_000_000_000, 2, 1]]
    dead = Sender(campaign, started_us=1)
    dead.tell(counters(1000, accepted=100, left=900, providers={"gmail": told}, keys=keys))
    dead.store.supersede(dead.id, "x")
    Sender(campaign, started_us=2).tell(
        counters(1000, before=100, accepted=50, left=850, ready=3, providers={"gmail": told}, keys=keys)
    )
    found = values(client.get("/metrics").text)
    assert found["rowpost_rows_total", labels(outcome="accepted")] == 150
    assert found["rowpost_attempts_total", labels(provider="gmail", verdict="deferred")] == 14
    assert found["rowpost_connections", labels(provider="gmail")] == 4  # of the living one alone
    assert found["rowpost_reply_seconds_bucket", labels(provider="gmail", le="0.025")] == 6
    assert found["rowpost_reply_seconds_sum", labels(provider="gmail")] == pytest.approx(0.1)
    assert found["rowpost_throttle_suspended", labels(provider="gmail", source="first")] == 1
    of_first = {"provider": "gmail", "source": "first"}
    answers = {"accepted": 200, "rejected": 4, "deferred": 14, "lost": 2}
    for answer, count in answers.items():
        assert found["rowpost_answers_total", labels(**of_first, answer=answer)] == count
    assert found["rowpost_queue_rows", labels(queue="ready")] == 3
    assert found["rowpost_rows_left", labels()] == 850
    assert found["rowpost_senders", labels()] == 1


def test_names_with_quotes_and_newlines_are_labels(campaign: Campaign, client: Client) -> None:
    Sender(campaign).tell(counters(1000, providers={'a"b\\c\nd': provider(accepted=1)}))
    found = values(client.get("/metrics").text)
    assert found["rowpost_attempts_total", labels(provider='a"b\\c\nd', verdict="accepted")] == 1


def test_openmetrics_is_served_to_who_asks_for_it(client: Client) -> None:
    answer = client.get("/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"})
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    assert answer.text.endswith("# EOF\n")


def test_dashboard_and_alerts_ask_for_metrics_that_there_are(campaign: Campaign, client: Client) -> None:
    Sender(campaign).tell(counters(1000, providers={"gmail": provider()}, keys=[["s", "gmail", 0, 0, 0, 0, None]]))
    there = {name for name, _ in values(client.get("/metrics").text)}
    folder = files("engine").joinpath("placement")
    dashboard = json.loads(folder.joinpath("grafana.json").read_text("utf-8"))
    asked = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    asked.append(folder.joinpath("grafana-alerts.yaml").read_text("utf-8"))
    named = {name for text in asked for name in re.findall(r"\browpost_\w+", text)}
    assert named <= there


def test_a_run_serves_its_own_metrics() -> None:
    told = counters(10, accepted=3, providers={"gmail": provider(accepted=3)})
    with serve_metrics("127.0.0.1:0", "weekly", "here", 60.0, lambda: told) as port:
        text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5).read().decode()
    assert values(text)["rowpost_attempts_total", labels(provider="gmail", verdict="accepted")] == 3
    for listen in ("9108", "127.0.0.1:http", ":1"):
        with pytest.raises(NoMetricsThere), serve_metrics(listen, "weekly", "here", 60.0, dict):
            pass


def snapshot(client: Client) -> Snapshot:
    watched = client.shelf.get("weekly")
    assert watched is not None
    return watched.look(fresh=True)


def test_a_webhook_is_told_what_happened_and_only_once(campaign: Campaign, client: Client) -> None:
    watcher = Watcher()
    opened = {"at_us": 1_700_000_000_000_000, "event": "breaker_open", "provider": "gmail", "why": "30 % unknown"}
    sender = Sender(campaign)
    sender.tell(counters(1000, in_flight=1, events=[opened]))
    assert watcher.news("weekly", snapshot(client)) == []  # before we looked first
    again = {**opened, "at_us": opened["at_us"] + 5}
    sender.tell(counters(1000, in_flight=1, events=[opened, again]))
    (news,) = watcher.news("weekly", snapshot(client))
    assert (news.event, news.detail) == ("breaker_open", "gmail: 30 % unknown")
    assert watcher.news("weekly", snapshot(client)) == []
    sender.store.leave(sender.id, 1, counters(1000, left=1000))
    assert [one.event for one in watcher.news("weekly", snapshot(client))] == ["stopped"]


def test_the_webhook_is_signed_and_tried_again(monkeypatch: pytest.MonkeyPatch, client: Client) -> None:
    monkeypatch.setattr("engine.web.hook._TRIES_S", (0.0, 0.0))
    got: list[tuple[bytes, dict[str, str]]] = []

    def post(url: str, body: bytes, headers: dict[str, str]) -> None:
        got.append((body, headers))
        if len(got) == 1:
            raise OSError("away")

    async def tell() -> None:
        hook = Hook("https://example.com/hook", "secret", post)
        now: Any = snapshot(client)
        hook.hear("weekly", now)
        client.act("/campaigns/weekly/pause", {})
        hook.hear("weekly", snapshot(client))
        for _ in range(200):
            await asyncio.sleep(0.01)
            if len(got) == 2:
                break
        await hook.stop()

    asyncio.run(tell())
    (body, headers), again = got
    assert again == (body, headers)
    assert json.loads(body)["event"] == "paused"
    assert headers["X-Rowpost-Signature"] == "sha256=" + hmac.new(b"secret", body, sha256).hexdigest()
