"""A campaign made, started and finished over HTTP alone, by a real server that is killed on the way."""

from __future__ import annotations

import json
import os
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from engine.rehearse.running import RunningSink, run_sink_in_process
from tests.web.conftest import start

pytestmark = pytest.mark.slow  # three processes start for each
ROWS = 300


class Served:
    """`engine serve` over a folder, as a process; what a program says to it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.process = start(root.parent, "serve", root.name, "--lists", "lists", "--listen", "127.0.0.1:0")
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().strip().rstrip("/")
        self.token = (root / "web.token").read_text().split()[1]

    def ask(self, path: str, body: object = None, **headers: str) -> tuple[int, Any]:
        """The status and the JSON of a GET, or of a POST of `body`."""
        asked = urllib.request.Request(f"{self.url}/api/v1{path}", None if body is None else json.dumps(body).encode())
        asked.add_header("Authorization", f"Bearer {self.token}")
        asked.add_header("Content-Type", "application/json")
        for name, value in headers.items():
            asked.add_header(name.replace("_", "-"), value)
        try:
            with urllib.request.urlopen(asked, timeout=60) as answer:
                return int(answer.status), json.load(answer)
        except urllib.error.HTTPError as refused:
            return refused.code, json.load(refused)

    def wait_for(self, field: str, least: int, patience_s: float = 60.0) -> dict[str, Any]:
        """The campaign, once this count is reached."""
        deadline = time.monotonic() + patience_s
        while True:
            _, told = self.ask("/campaigns/march")
            if told[field] >= least:
                return dict(told)
            assert time.monotonic() < deadline, told
            time.sleep(0.2)

    def end(self, how: signal.Signals = signal.SIGTERM) -> None:
        if self.process.poll() is None:
            self.process.send_signal(how)
        self.process.communicate(timeout=20)


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder for campaigns, and beside it one of lists."""
    (tmp_path / "site").mkdir()
    (tmp_path / "lists").mkdir()
    addresses = [f"550.{i}@sink.test" if i % 10 == 0 else f"user{i}@sink.test" for i in range(ROWS)]
    table = pa.table({"email": addresses, "first_name": ["Ann"] * ROWS})
    pq.write_table(table, tmp_path / "lists" / "march.parquet", row_group_size=100)
    return tmp_path / "site"


@pytest.fixture
def sink() -> Iterator[RunningSink]:
    with run_sink_in_process() as running:
        yield running


def is_running(pid: int) -> bool:
    """Whether the process lives; a zombie that nobody collected does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_campaign_from_post_to_finished(site: Path, sink: RunningSink) -> None:
    server = Served(site)
    pid = 0
    try:
        wanted = {
            "id": "march",
            "list": "march.parquet",
            "from_address": "news@example.com",
            "subject": "Hello",
            "text": "Dear {{ first_name }}",
            "relay": f"smtp://{sink.host}:{sink.port}",
            "tls": "opportunistic",  # the sink speaks none
            "messages_per_second": 25,  # so that there is a campaign to look at
        }
        code, made = server.ask("/campaigns", wanted)
        assert (code, made["rows"], made["state"]) == (201, ROWS, "planned"), made
        assert server.ask("/campaigns/march/start", {"partition": 7})[0] == 422
        code, started = server.ask("/campaigns/march/start", {"processes": 1}, Idempotency_Key="go")
        assert code == 202, started
        pid = started["pid"]
        assert started["recorded"]["what"] == "start"
        # Once: the same key is answered alike and starts nothing, another request is refused.
        assert server.ask("/campaigns/march/start", {"processes": 1}, Idempotency_Key="go") == (202, started)
        code, refused = server.ask("/campaigns/march/start", {"processes": 1})
        assert (code, refused["detail"]) == (409, "partition 0 is being sent already")
        told = server.wait_for("accepted", 20)
        assert (told["state"], len(told["machines"]), told["machines"][0]["pid"]) == ("sending", 1, pid)
        # The server is killed: the campaign does not notice.
        server.end(signal.SIGKILL)
        assert is_running(pid)
        before = sink.counts().messages
        deadline = time.monotonic() + 20
        while sink.counts().messages < before + 30:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        server = Served(site)
        # The new one knows who sends, and the key.
        assert server.ask("/campaigns/march/start", {"processes": 1}, Idempotency_Key="go") == (202, started)
        code, refused = server.ask("/campaigns/march/start", {"processes": 1})
        assert (code, refused["detail"]) == (409, "partition 0 is being sent already")
        told = server.wait_for("accepted", ROWS - ROWS // 10)
        while told["state"] != "finished":
            time.sleep(0.2)
            told = server.wait_for("accepted", 0)
        assert (told["accepted"], told["bounced"], told["left"]) == (ROWS - ROWS // 10, ROWS // 10, 0)
        assert (told["in_doubt"], told["uncounted"], told["deferrals"]) == (0, 0, 0)
        assert len(told["machines"]) == 1
        assert sink.counts().messages == ROWS - ROWS // 10
        code, refused = server.ask("/campaigns/march/start", {})
        assert (code, refused["detail"]) == (409, "the campaign is finished")
        actions = server.ask("/campaigns/march/actions")[1]["actions"]
        assert [one["what"] for one in actions if not one.get("failed")][-2:] == ["start", "create"]
    finally:
        if pid and is_running(pid):
            os.kill(pid, signal.SIGTERM)
        server.end()


def test_what_send_refuses_at_once_is_the_answer(site: Path) -> None:
    """A campaign that cannot be sent: the reason comes back, and stands in the record."""
    server = Served(site)
    try:
        wanted = {"id": "march", "list": "march.parquet", "from_address": "a@example.com", "subject": "s", "text": "t"}
        assert server.ask("/campaigns", wanted)[0] == 201
        settings = site / "march" / "campaign.toml"
        settings.write_text(settings.read_text().replace('id = "march"', 'id = "march"\nnonsense = 1'))
        code, refused = server.ask("/campaigns/march/start", {})
        assert (code, "nonsense" in refused["detail"]) == (422, True), refused
        assert str(site) not in refused["detail"]
        (failed, _, made) = server.ask("/campaigns/march/actions")[1]["actions"]
        assert (made["what"], failed["what"], "nonsense" in failed["failed"]) == ("create", "start", True)
    finally:
        server.end()


def test_the_process_table_is_left_clean(site: Path) -> None:
    """Senders that ended while the server lives are collected."""
    server = Served(site)
    try:
        wanted = {"id": "march", "list": "march.parquet", "from_address": "a@example.com", "subject": "s", "text": "t"}
        assert server.ask("/campaigns", wanted)[0] == 201
        code, started = server.ask("/campaigns/march/start", {"processes": 1})  # to the sink that needs no relay
        assert code == 202, started
        server.wait_for("accepted", ROWS - ROWS // 10)
        deadline = time.monotonic() + 20
        while Path(f"/proc/{started['pid']}").exists():
            assert time.monotonic() < deadline
            time.sleep(0.2)
    finally:
        server.end()
