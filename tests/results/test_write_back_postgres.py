"""Write-back into a real PostgreSQL."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import T0

from engine.results.statement import parse
from engine.results.target import TargetRefused, open_target
from engine.results.write_back import Person, write_back

WALK = Path(__file__).parents[2] / "sample_data" / "apps" / "users_walk" / "walk.py"
_BINARIES = sorted(Path("/usr/lib/postgresql").glob("*/bin"))
pytestmark = [
    pytest.mark.postgres,
    pytest.mark.skipif(not _BINARIES and not shutil.which("initdb"), reason="no PostgreSQL server binary"),
]


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """A server of our own on loopback; its URL."""
    binaries = _BINARIES[-1] if _BINARIES else Path(shutil.which("initdb") or "").parent
    # PostgreSQL refuses to run as root.
    user = ["runuser", "-u", "nobody", "--"] if os.getuid() == 0 else []
    folder = Path(tempfile.mkdtemp(prefix="rowpost-pg-"))
    folder.chmod(0o777)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    init = [*user, str(binaries / "initdb"), "-D", str(folder / "d"), "-A", "trust", "-U", "ann", "-N"]
    subprocess.run(init, check=True, capture_output=True, timeout=60)
    control = [*user, str(binaries / "pg_ctl"), "-D", str(folder / "d"), "-w"]
    options = f"-p {port} -c listen_addresses=127.0.0.1 -c fsync=off -c unix_socket_directories={folder}"
    start = [*control, "-l", str(folder / "log"), "-o", options, "start"]
    subprocess.run(start, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=60)
    try:
        yield f"postgresql://ann@127.0.0.1:{port}/postgres"
    finally:
        subprocess.run([*control, "-m", "immediate", "stop"], check=True, capture_output=True, timeout=60)
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.slow
def test_bounces_reach_a_users_table_once(server: str, tmp_path: Path) -> None:
    import psycopg

    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute("create table users (id int, email text, active bool, bounced_at timestamptz, times int)")
        connection.execute(
            "insert into users select n, 'u' || n || '@x.test', true, null, 0 from generate_series(1, 9) n"
        )
    whom = [Person(n, n, f"u{n}@x.test", "5.1.1 '; drop table users; --", T0) for n in (2, 3, 4)]
    target = open_target(server)
    change = "active = false, bounced_at = :at::timestamptz, times = times + 1"
    sql = f"UPDATE users SET {change} WHERE email = :address AND id = :id"
    statement = parse("bounced", sql, target.placeholder)
    ledger = tmp_path / "write-back.sqlite"
    assert write_back(target, ledger, statement, whom, "l", apply=False).changed == 3
    assert write_back(target, ledger, statement, whom[:1], "l", apply=True, batch=2).now == 1
    done = write_back(target, ledger, statement, whom, "l", apply=True, batch=1)
    assert (done.before, done.now, done.changed) == (1, 2, 2)
    wrong = parse("bounced", "UPDATE users SET nothing = 1 WHERE id = :id", target.placeholder)
    with pytest.raises(TargetRefused, match="nothing"):
        write_back(target, ledger, wrong, whom, "l", apply=True)
    target.close()
    with psycopg.connect(server) as connection:
        found = connection.execute(
            "select id, times, extract(epoch from bounced_at)::bigint from users where not active"
        )
        assert sorted(found.fetchall()) == [(n, 1, T0 // 1_000_000) for n in (2, 3, 4)]


@pytest.mark.long
def test_the_walk_from_users_table_to_users_table(server: str, tmp_path: Path) -> None:
    import psycopg

    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute("create database walk")
    ran = subprocess.run(
        [sys.executable, str(WALK), str(tmp_path / "walk"), server.replace("/postgres", "/walk")],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "5 have no newsletter any more" in ran.stdout
