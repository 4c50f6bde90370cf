"""The sample application and the sample week run as the guides say."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.outbox.conftest import PostOffice

ROOT = Path(__file__).parents[2]
APPS = ROOT / "sample_data" / "apps"


@pytest.mark.slow
def test_the_sign_up_page_writes_user_and_mail_in_one_transaction(
    office: PostOffice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("flask")
    shop = tmp_path / "shop.sqlite"
    office.set("store", '"sqlite:../shop.sqlite"')
    office.run("outbox", "status", "--campaign", str(office.home))  # makes the tables
    monkeypatch.setenv("SHOP_DATABASE", str(shop))
    spec = importlib.util.spec_from_file_location("signup_app", APPS / "signup" / "app.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    client = module.app.test_client()
    for _ in range(2):
        assert client.post("/", data={"name": "Ann", "email": "ann@example.com"}).status_code == 302
    assert client.post("/", data={"name": "Bob", "email": "bob@example.com"}).status_code == 302
    office.box.close()
    from engine.outbox import connect

    office.box = connect(office.home)
    assert office.states() == {"queued": 2}
    office.serve()
    office.until(accepted=2)
    with sqlite3.connect(shop) as database:
        (token,) = database.execute("SELECT token FROM users WHERE name = 'Ann'").fetchone()
    database.close()
    letters = [path.read_text() for path in (tmp_path / "mails").glob("*.eml")]
    assert any(f"/confirm/{token}"[:20] in letter for letter in letters)
    assert client.get(f"/confirm/{token}").data == b"Welcome!"


@pytest.mark.slow
def test_the_week_runs_as_files(tmp_path: Path, office: PostOffice) -> None:
    week = tmp_path / "newsletter"
    shutil.copytree(APPS / "week", week)
    shutil.copytree(office.home, week / "outbox")
    shutil.copytree(office.home / "keys", week / "keys")
    (week / "suppression").mkdir()
    users = sqlite3.connect(week / "users.db")
    users.execute("CREATE TABLE users (id INTEGER PRIMARY KEY, email TEXT, name TEXT, daily INTEGER, weekly INTEGER)")
    users.executemany(
        "INSERT INTO users (email, name, daily, weekly) VALUES (?, ?, ?, 1)",
        [(f"{'550' if n == 3 else 'u'}+{n}@example.com", f"N{n}", int(n < 12)) for n in range(20)],
    )
    users.commit()
    environ = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "ENGINE": f"{sys.executable} -m engine",
        "USERS": f"sqlite:///{week}/users.db",
        "TODAY": "2026-12-03",
    }

    def send(code: int) -> str:
        done = subprocess.run(
            ["./send-issue", "daily", "SELECT id, email, name FROM users WHERE daily = 1"],
            cwd=week,
            env=environ,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    send(0)
    assert users.execute("SELECT count(*) FROM users WHERE daily = 1").fetchone() == (11,)
    assert users.execute("SELECT daily, weekly FROM users WHERE id = 4").fetchone() == (0, 0)
    assert "it was sent already" in send(3)
    users.close()
