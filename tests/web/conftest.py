"""Campaigns that web tests look at: a folder with a store, whose senders a test plays by hand or starts for real."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import uvicorn
from starlette.routing import BaseRoute

import engine.web.reading as reading_module
import engine.web.shelf as shelf_module
from engine.campaign import Campaign
from engine.cli import main
from engine.control.sqlite import SqliteStore
from engine.control.store import Incarnation
from engine.web.app import ServeOptions, create_app
from engine.web.auth import Keyring
from engine.web.server import Ending, Patient
from engine.web.shelf import Shelf

with warnings.catch_warnings():
    # Newer starlette asks for a package that older ones do not know; httpx serves both.
    warnings.simplefilter("ignore")
    from starlette.testclient import TestClient

ROOT = Path(__file__).parents[2]


def run(folder: Path, *words: str) -> str:
    """`engine WORDS` in the test's process; its standard output."""
    before, argv = Path.cwd(), sys.argv
    os.chdir(folder)
    out, err = io.StringIO(), io.StringIO()
    try:
        sys.argv = ["engine", *words]
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as ended:
            main()
    finally:
        os.chdir(before)
        sys.argv = argv
    assert not ended.value.code, f"{ended.value.code}\n{out.getvalue()}\n{err.getvalue()}"
    return out.getvalue()


def make_campaign(folder: Path, addresses: list[str], **delivery: object) -> Campaign:
    """A planned campaign to these addresses in `folder`."""
    folder.parent.mkdir(exist_ok=True, parents=True)
    run(folder.parent, "init", "--campaign", folder.name)
    for kind in ("txt", "html"):
        (folder / "templates" / f"letter.{kind}").write_text("Hello {{ email }}!\n", "utf-8")
    table = pa.table({"email": addresses, "first_name": ["Ann"] * len(addresses)})
    pq.write_table(table, folder / "list.parquet", row_group_size=100)
    settings = folder / "campaign.toml"
    text = re.sub(r"^plan = .*$", 'plan = ["1s"]', settings.read_text("utf-8"), flags=re.MULTILINE)
    for key, value in delivery.items():
        text = re.sub(rf"^{key} = .*\n", "", text, flags=re.MULTILINE)
        text = text.replace("[delivery]\n", f"[delivery]\n{key} = {value!r}\n".replace("'", '"'))
    settings.write_text(text, "utf-8")
    run(folder.parent, "plan", "list.parquet", "--campaign", folder.name)
    return Campaign(folder)


def counters(rows: int, **told: Any) -> dict[str, Any]:
    """What a sender tells, with these numbers in it."""
    base: dict[str, Any] = {
        "rows": rows, "before": 0, "accepted": 0, "bounced": 0, "invalid": 0, "suppressed": 0, "expired": 0,
        "in_doubt": 0, "waiting": 0, "left": rows, "per_second": 0.0, "next_due_us": None, "reason": "",
        "ready": 0, "parked": 0, "in_flight": 0, "processes": 2, "events": [], "replies": [], "providers": {},
    }  # fmt: skip
    return {**base, **told}


def provider(**told: Any) -> dict[str, Any]:
    """A provider's counts."""
    base = {"accepted": 0, "rejected": 0, "deferred": 0, "lost": 0, "in_doubt": 0, "connections": 0, "limit": ""}
    return {**base, "allowed": 0, "waiting": 0, "suspended_until_us": None, "reply_s": [0] * 13, **told}


class Sender:
    """A sender that a test plays: it registers, and tells counters."""

    def __init__(self, campaign: Campaign, name: str = "machine-a", started_us: int = 0) -> None:
        self.id = os.urandom(8).hex()
        self.store = SqliteStore(campaign.store_file)
        now = time.time_ns() // 1000
        self.store.register(
            Incarnation(
                id=self.id, sender=name, host_id="h", boot_id="b", pid=4711, partition=0,
                started_at_us=started_us or now, renewed_at_us=now, lease_us=60_000_000,
            )
        )  # fmt: skip

    def tell(self, told: dict[str, Any]) -> bool:
        return self.store.renew(self.id, time.time_ns() // 1000, told)

    def close(self) -> None:
        self.store.close()


@pytest.fixture(scope="session")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The campaign that every test gets a copy of."""
    folder = tmp_path_factory.mktemp("planned") / "weekly"
    return make_campaign(folder, [f"user{i}@example.com" for i in range(1000)]).folder


@pytest.fixture
def campaign(planned: Path, tmp_path: Path) -> Campaign:
    shutil.copytree(planned, tmp_path / "site" / "weekly")
    return Campaign(tmp_path / "site" / "weekly")


class Client(TestClient):
    """A test client with a token."""

    shelf: Shelf
    token: str

    def ask(self, path: str, *, code: int = 200) -> Any:
        answer = self.get(f"/api/v1{path}")
        assert answer.status_code == code, answer.text
        return answer.json()

    def act(self, path: str, body: object, *, code: int = 200, **headers: str) -> Any:
        answer = self.post(f"/api/v1{path}", json=body, headers={k.replace("_", "-"): v for k, v in headers.items()})
        assert answer.status_code == code, answer.text
        return answer.json()


@contextlib.contextmanager
def client_of(root: Path, *, extra: Sequence[BaseRoute] = (), **options: Any) -> Iterator[Client]:
    """A client of a server over this folder, with a token."""
    shelf = Shelf(root)
    keyring = Keyring(root / "web.token")
    app = create_app(shelf, keyring, ServeOptions(hosts=frozenset({"testserver"}), **options), extra=extra)
    with Client(app) as client:
        client.token = keyring.first
        client.headers["Authorization"] = f"Bearer {keyring.first}"
        client.shelf = shelf
        yield client


@pytest.fixture(autouse=True)
def _always_fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that tells something sees it at once; the one about reading seldom sets its own."""
    monkeypatch.setattr(shelf_module, "FRESH_S", 0.0)
    monkeypatch.setattr(shelf_module, "KEPT_S", 0.0)
    monkeypatch.setattr(reading_module, "TALLY_S", 0.0)


@pytest.fixture
def client(campaign: Campaign) -> Iterator[Client]:
    with client_of(campaign.folder.parent) as made:
        yield made


class Running:
    """A real server on loopback."""

    def __init__(self, root: Path) -> None:
        self.keyring = Keyring(root / "web.token")
        self.token = self.keyring.first
        self.shelf = Shelf(root)
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.port = self.socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        app = create_app(self.shelf, self.keyring)
        config = uvicorn.Config(app, http=Patient, log_level="warning", ws="none", timeout_graceful_shutdown=1)
        self.server = Ending(config, app.state.round.end_streams)
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [self.socket]})

    def __enter__(self) -> Running:
        self.thread.start()
        deadline = time.monotonic() + 10
        while not self.server.started:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return self

    def __exit__(self, *problem: object) -> None:
        self.server.should_exit = True
        self.thread.join(10)
        self.socket.close()


def start(folder: Path, *words: str) -> subprocess.Popen[str]:
    """`engine WORDS` as a process, in `folder`."""
    return subprocess.Popen(
        [sys.executable, "-m", "engine", *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
