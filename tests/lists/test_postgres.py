"""The classical extract: active users who subscribed to the daily letter, out of PostgreSQL in one line."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import polars as pl
import pytest

from engine.lists.prepare import work_folder
from engine.lists.sql_source import DatabaseFailed, sql_source

pytestmark = pytest.mark.postgres
psycopg = pytest.importorskip("psycopg")
pytest.importorskip("adbc_driver_postgresql")


def _binaries() -> Path | None:
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"))
    on_path = shutil.which("postgres")
    return found[-1].parent if found else Path(on_path).parent if on_path else None


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    binaries = _binaries()
    if binaries is None:
        pytest.skip("no PostgreSQL server here")
    # The server refuses to run as root, and its user must reach the folder: pytest's own is 0700.
    folder = Path(tempfile.mkdtemp(prefix="lists-postgres-"))
    as_user = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"] if os.geteuid() == 0 else []
    if as_user:
        shutil.chown(folder, 65534, 65534)
    port = _free_port()
    quiet = {"check": True, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "cwd": folder}
    initdb = [
        *as_user,
        str(binaries / "initdb"),
        "-D",
        str(folder / "d"),
        "-U",
        "shop",
        "-A",
        "trust",
        "-E",
        "UTF8",
        "-N",
    ]
    subprocess.run(initdb, **quiet)  # type: ignore[call-overload]  # a dict of keywords
    server = subprocess.Popen(
        [*as_user, str(binaries / "postgres"), "-D", str(folder / "d"), "-p", str(port), "-k", str(folder),
         "-c", "listen_addresses=127.0.0.1", "-c", "fsync=off"],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=folder,
    )  # fmt: skip
    address = f"postgresql://shop@127.0.0.1:{port}/postgres"
    try:
        for _ in range(100):
            try:
                psycopg.connect(address).close()
                break
            except psycopg.OperationalError:
                server.poll()
                threading.Event().wait(0.1)
        yield address
    finally:
        server.terminate()
        server.wait(30)
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def shop(url: str) -> str:
    with psycopg.connect(url) as connection:
        connection.execute("create type plan as enum ('free', 'pro')")
        connection.execute(
            "create table users (id bigint primary key, email text, active boolean, plan plan, balance numeric(10,2),"
            " joined timestamptz, tags text[], extra jsonb)"
        )
        connection.execute("create table subscriptions (user_id bigint references users, letter text)")
        connection.execute(
            "insert into users select 9007199254740993 + n, 'u' || n || '@x' || n % 7 || '.org', n % 2 = 0,"
            " (case when n % 3 = 0 then 'pro' else 'free' end)::plan, n * 1.1, '2025-01-01 00:00+02'::timestamptz,"
            " array['a', 'b'], '{\"k\": 1}' from generate_series(0, 9999) n"
        )
        connection.execute("insert into subscriptions select id, 'daily' from users where id % 5 = 0")
    return url


def test_active_subscribers_in_one_line(shop: str, tmp_path: Path) -> None:
    query = "select u.* from users u join subscriptions s on s.user_id = u.id where u.active and s.letter = 'daily'"
    with work_folder(tmp_path) as work:
        source = sql_source(shop, query, work)
        frame = source.scan().collect()
    assert source.rows == frame.height == 1000
    assert frame["id"].dtype == pl.Int64
    assert frame["id"].min() >= 9007199254740993  # type: ignore[operator]  # integers
    assert set(frame["plan"].unique()) == {"free", "pro"}
    assert frame["joined"].dtype == pl.Datetime("us", "UTC")
    assert frame["tags"][0].to_list() == ["a", "b"]


def test_a_wrong_query_is_told_in_the_servers_words(shop: str, tmp_path: Path) -> None:
    with work_folder(tmp_path) as work, pytest.raises(DatabaseFailed, match="nowhere"):
        sql_source(shop, "select * from nowhere", work)


def test_a_connection_that_drops_half_way_leaves_nothing(shop: str, tmp_path: Path) -> None:
    def cut() -> None:
        with psycopg.connect(shop, autocommit=True) as killer:
            for _ in range(200):
                found = killer.execute(
                    "select pg_terminate_backend(pid) from pg_stat_activity where query like '%slowly%'"
                    " and pid <> pg_backend_pid() and now() - query_start > interval '0.3 s'"
                ).fetchall()
                if found:
                    return
                threading.Event().wait(0.05)

    cutter = threading.Thread(target=cut)
    cutter.start()
    with work_folder(tmp_path) as work, pytest.raises(DatabaseFailed):
        sql_source(shop, "select email, 'slowly', pg_sleep(0.01) from users", work)
    cutter.join()
    assert list(tmp_path.iterdir()) == []
