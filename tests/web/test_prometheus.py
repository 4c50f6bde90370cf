"""A real Prometheus: it takes our page, our rules and the dashboard's expressions, while a real campaign runs."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from engine.campaign import Campaign
from engine.rehearse.running import run_sink_in_process
from tests.conftest import require
from tests.web.conftest import Client, Running, Sender, counters, make_campaign, provider, start

pytestmark = pytest.mark.prometheus
RULES = Path(str(files("engine").joinpath("placement", "grafana-alerts.yaml")))
DASHBOARD = json.loads(files("engine").joinpath("placement", "grafana.json").read_text("utf-8"))


@pytest.fixture(scope="module")
def promtool() -> str:
    found = shutil.which("promtool")
    require("prometheus", None if found else "no promtool here (Debian's package prometheus)")
    assert found is not None
    return found


def played(**more: Any) -> dict[str, Any]:
    """What a sender over a shared store tells: some of everything."""
    one = provider(accepted=100, rejected=2, deferred=9, lost=1, in_doubt=1, connections=2, allowed=3, waiting=4)
    one |= {"limit": "throttle: 3 connections", "reply_s": [5] * 13, "reply_s_sum": 70.0}
    times = {"log_commits": [3.0] * 11 + [0.9], "window_times": [2.0] * 12 + [4.5]}
    keys = [["first", "gmail", 100, 12, 3, 3, None, 2, 1]]
    return {
        **counters(1000, accepted=100, left=900, in_flight=2),
        "providers": {"gmail": one},
        "keys": keys,
        **times,
    } | more


def test_the_page_is_as_prometheus_wants_it(campaign: Campaign, client: Client, promtool: str) -> None:
    sender = Sender(campaign)
    sender.tell(played())
    page = client.get("/metrics").content
    sender.close()
    told = subprocess.run([promtool, "check", "metrics"], input=page, capture_output=True, check=False)
    assert (told.returncode, told.stdout, told.stderr) == (0, b"", b"")
    named = {line.split()[2] for line in page.decode().splitlines() if line.startswith("# TYPE")}
    # Attempts by verdict, connections, slots, throttle state, queue depths, reply times, log and window times, leases.
    assert named >= {
        *("rowpost_rows_total", "rowpost_attempts_total", "rowpost_answers_total", "rowpost_connections"),
        *("rowpost_slots_held", "rowpost_slots_allowed", "rowpost_throttle_suspended", "rowpost_provider_limited"),
        *("rowpost_queue_rows", "rowpost_provider_ready_rows", "rowpost_reply_seconds"),
        *("rowpost_log_commit_seconds", "rowpost_window_seconds"),
        *("rowpost_lease_age_seconds", "rowpost_lease_length_seconds", "rowpost_senders", "rowpost_batches"),
    }


def test_the_rules_load(promtool: str) -> None:
    told = subprocess.run([promtool, "check", "rules", str(RULES)], capture_output=True, text=True, check=False)
    assert told.returncode == 0, told.stderr
    assert "rules found" in told.stdout


def series(name: str, values: str, **labels: str) -> dict[str, str]:
    """One series of a unit test of rules; `values` in Prometheus' notation, a value a minute."""
    said = ",".join(f'{key}="{value}"' for key, value in {"campaign": "weekly", **labels}.items())
    return {"series": f"{name}{{{said}}}", "values": values}


def buckets(name: str, fast: str, slow: str) -> list[dict[str, str]]:
    """A histogram: what grows as `fast` is in the first bucket, what grows as `slow` beyond all."""
    return [
        series(f"{name}_bucket", fast, le="0.01"),
        series(f"{name}_bucket", slow, le="5.0"),
        series(f"{name}_bucket", slow, le="+Inf"),
    ]


ATTEMPTS = "rowpost_attempts_total"
# alert -> series under which it fires, series under which it does not, its labels beside the campaign's, its severity
STORIES: dict[str, tuple[list[dict[str, str]], list[dict[str, str]], dict[str, str]]] = {
    "RowpostSenderSilent": (
        [series("rowpost_senders_silent", "0 1x200")],
        [series("rowpost_senders_silent", "0 0x200")],
        {"severity": "page"},
    ),
    "RowpostNothingAccepted": (
        [
            series(ATTEMPTS, "7x200", provider="gmail", verdict="accepted"),
            series("rowpost_queue_rows", "5x200", queue="ready"),
            series("rowpost_campaign_paused", "0x200"),
        ],
        [  # a person paused it: that is no news
            series(ATTEMPTS, "7x200", provider="gmail", verdict="accepted"),
            series("rowpost_queue_rows", "5x200", queue="ready"),
            series("rowpost_campaign_paused", "1x200"),
        ],
        {"severity": "page"},
    ),
    "RowpostProviderDefers": (
        [
            series(ATTEMPTS, "0+60x200", provider="gmail", verdict="accepted"),
            series(ATTEMPTS, "0+30x200", provider="gmail", verdict="deferred"),
        ],
        [
            series(ATTEMPTS, "0+60x200", provider="gmail", verdict="accepted"),
            series(ATTEMPTS, "0+3x200", provider="gmail", verdict="deferred"),
        ],
        {"provider": "gmail", "severity": "warning"},
    ),
    "RowpostProviderRefuses": (
        [
            series(ATTEMPTS, "0+60x200", provider="gmail", verdict="accepted"),
            series(ATTEMPTS, "0+30x200", provider="gmail", verdict="rejected"),
        ],
        [
            series(ATTEMPTS, "0+60x200", provider="gmail", verdict="accepted"),
            series(ATTEMPTS, "0+3x200", provider="gmail", verdict="rejected"),
        ],
        {"provider": "gmail", "severity": "warning"},
    ),
    "RowpostProviderSuspended": (
        [series("rowpost_throttle_suspended", "1x200", provider="gmail", source="first")],
        [series("rowpost_throttle_suspended", "1x50 0x150", provider="gmail", source="first")],
        {"provider": "gmail", "severity": "warning"},
    ),
    "RowpostInDoubt": (
        [series("rowpost_rows_in_doubt", "1500x200")],
        [series("rowpost_rows_in_doubt", "900x200")],
        {"severity": "warning"},
    ),
    "RowpostStoreSlow": (
        buckets("rowpost_window_seconds", "0+1x200", "0+60x200"),
        buckets("rowpost_window_seconds", "0+60x200", "0+60x200"),
        {"severity": "warning"},
    ),
    "RowpostDiskSlow": (
        buckets("rowpost_log_commit_seconds", "0+1x200", "0+60x200"),
        buckets("rowpost_log_commit_seconds", "0+60x200", "0+60x200"),
        {"severity": "warning"},
    ),
}


@pytest.mark.slow
def test_each_rule_fires_when_it_should_and_only_then(promtool: str, tmp_path: Path) -> None:
    loaded = {line.split()[-1] for line in RULES.read_text("utf-8").splitlines() if "- alert:" in line}
    assert loaded == set(STORIES)
    tests = []
    for alert, (firing, quiet, labels) in STORIES.items():
        for told, is_firing in ((firing, True), (quiet, False)):
            expected = [{"exp_labels": {"campaign": "weekly", **labels}}] if is_firing else []
            asked = {"eval_time": "150m", "alertname": alert, "exp_alerts": expected}
            tests.append({"interval": "1m", "input_series": told, "alert_rule_test": [asked]})
    # promtool compares annotations too: the stories are about when, so a copy of the rules goes without them.
    bare, skips = [], False
    for line in RULES.read_text("utf-8").splitlines():
        skips = line.strip() == "annotations:" or (skips and line.startswith(" " * 10))
        bare += [] if skips else [line]
    (tmp_path / "rules.yaml").write_text("\n".join(bare) + "\n", "utf-8")
    unit = {"rule_files": ["rules.yaml"], "evaluation_interval": "1m", "tests": tests}
    (tmp_path / "stories.yaml").write_text(json.dumps(unit), "utf-8")  # JSON is YAML
    told = subprocess.run(
        [promtool, "test", "rules", "stories.yaml"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert told.returncode == 0, told.stdout + told.stderr


class Prometheus:
    """A real one on loopback that scrapes `server` four times a second."""

    def __init__(self, folder: Path, server: Running) -> None:
        found = shutil.which("prometheus")
        require("prometheus", None if found else "no prometheus here (Debian's package prometheus)")
        assert found is not None
        folder.mkdir()
        (folder / "token").write_text(server.token)
        settings = {
            "global": {"scrape_interval": "250ms", "scrape_timeout": "250ms", "evaluation_interval": "250ms"},
            "rule_files": [str(RULES)],
            "scrape_configs": [
                {
                    "job_name": "rowpost",
                    "authorization": {"credentials_file": str(folder / "token")},
                    "static_configs": [{"targets": [f"127.0.0.1:{server.port}"]}],
                }
            ],
        }
        (folder / "prometheus.yml").write_text(json.dumps(settings))
        words = [found, f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}"]
        for port in (server.port + 1, server.port + 7, server.port - 3):  # it takes no port 0 that it tells
            self.url = f"http://127.0.0.1:{port}"
            with (folder / "said").open("ab") as said:
                where = f"--web.listen-address=127.0.0.1:{port}"
                self._process = subprocess.Popen([*words, where], stdout=said, stderr=said)
            if wait_until(lambda: self._process.poll() is not None or self._is_ready(), 30) and self._is_ready():
                return
            self.close()
        pytest.fail((folder / "said").read_text()[-2000:])

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/-/ready", timeout=2) as answer:
                return int(answer.status) == 200
        except OSError:
            return False

    def ask(self, path: str, **query: str) -> Any:
        try:
            with urllib.request.urlopen(
                f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(query)}", timeout=10
            ) as answer:
                told = json.load(answer)
        except urllib.error.HTTPError as refused:
            told = json.load(refused)
        assert told["status"] == "success", (query, told)
        return told["data"]

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.terminate()
        self._process.wait(20)


def wait_until(is_so: Callable[[], bool], patience_s: float) -> bool:
    deadline = time.monotonic() + patience_s
    while not (so := is_so()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return so


@pytest.fixture
def running(tmp_path: Path) -> Iterator[tuple[Running, Campaign, Callable[[], int]]]:
    """A server over a campaign that really runs, and one whose sender is played."""
    site = tmp_path / "site"
    with run_sink_in_process() as sink:
        relay = f"smtp://{sink.host}:{sink.port}"
        addresses = [f"550.{i}@sink.test" if i % 10 == 0 else f"user{i}@sink.test" for i in range(600)]
        campaign = make_campaign(site / "real", addresses, relay=relay, messages_per_second=20)
        sender = Sender(make_campaign(site / "played", ["a@example.com"]))
        sender.tell(played())
        process = start(site, "send", "--campaign", "real", "--processes", "1")
        try:
            with Running(site) as server:
                yield server, campaign, lambda: sink.counts().messages
        finally:
            process.terminate()
            process.communicate(timeout=30)
            sender.close()


@pytest.mark.long
def test_a_real_prometheus_scrapes_a_running_campaign(
    running: tuple[Running, Campaign, Callable[[], int]], tmp_path: Path
) -> None:
    server, _, taken = running
    prometheus = Prometheus(tmp_path / "prometheus", server)
    try:
        accepted = 'rowpost_rows_total{campaign="real",outcome="accepted"}'

        def sent() -> float:
            found = prometheus.ask("query", query=accepted)["result"]
            return float(found[0]["value"][1]) if found else 0.0

        assert wait_until(lambda: sent() > 20, 60)
        before = taken()
        assert wait_until(lambda: sent() >= before, 20)
        assert sent() <= taken()
        (target,) = prometheus.ask("targets")["activeTargets"]
        assert (target["health"], target["lastError"]) == ("up", "")
        # Each panel of the dashboard shows something, of the campaign that runs where it has that to tell.
        for panel in DASHBOARD["panels"]:
            for target in panel["targets"]:
                for campaign in ("real", "played"):
                    expression = target["expr"].replace("$campaign", campaign)
                    found = prometheus.ask("query", query=expression)["result"]
                    only_shared = "rowpost_window_seconds" in expression
                    assert found, (panel["title"], expression)
                    if campaign == "real" and not only_shared:
                        assert all(one["value"][1] != "NaN" for one in found), (panel["title"], found)
        (choice,) = [one for one in DASHBOARD["templating"]["list"] if one["type"] == "query"]
        assert choice["definition"] == "label_values(rowpost_rows_total, campaign)"
        assert set(prometheus.ask("label/campaign/values")) == {"real", "played"}
        # Each rule was evaluated, without an error.
        (group,) = prometheus.ask("rules")["groups"]
        assert len(group["rules"]) == len(STORIES)
        for rule in group["rules"]:
            assert (rule["health"], rule.get("lastError", "")) == ("ok", ""), rule
            assert rule["lastEvaluation"] > "2000"
    finally:
        prometheus.close()


def test_the_dashboard_has_the_fields_of_its_schema() -> None:
    """Against Grafana's documented JSON model; it was not loaded in a Grafana (KNOWN_ISSUES)."""
    assert 36 <= DASHBOARD["schemaVersion"] <= 41
    assert 1 <= len(DASHBOARD["uid"]) <= 40
    assert set(DASHBOARD["time"]) == {"from", "to"}
    assert isinstance(DASHBOARD["annotations"]["list"], list)
    source, campaign = DASHBOARD["templating"]["list"]
    assert (source["name"], source["type"], source["query"]) == ("datasource", "datasource", "prometheus")
    assert (campaign["name"], campaign["type"], campaign["multi"]) == ("campaign", "query", True)
    data = {"type": "prometheus", "uid": "${datasource}"}
    assert campaign["datasource"] == data
    assert campaign["query"]["query"] == campaign["definition"]
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        assert panel["type"] in ("stat", "timeseries")
        assert panel["title"]
        assert panel["datasource"] == data
        place = panel["gridPos"]
        assert set(place) == {"x", "y", "w", "h"}
        assert place["x"] + place["w"] <= 24
        squares = {(place["x"] + dx, place["y"] + dy) for dx in range(place["w"]) for dy in range(place["h"])}
        assert not squares & taken, f"{panel['title']} lies over another panel"
        taken |= squares
        letters = [target["refId"] for target in panel["targets"]]
        assert len(set(letters)) == len(letters) > 0
        assert all(target["expr"] and target["legendFormat"] for target in panel["targets"])
        assert set(panel["fieldConfig"]) == {"defaults", "overrides"}
        assert panel["fieldConfig"]["defaults"]["unit"]
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
