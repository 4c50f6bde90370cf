"""What the page costs: first view, one update, and the statements it makes, with a large campaign's counters.

    python benchmarks/web.py [--workers 40] [--providers 200] [--rows 100000000] [--seconds 5] [--viewers 10]

A store with the plan's batches (10,000 rows each) and five machines whose counters name every provider; one writer
renews leases as senders do while pages read. Prints milliseconds (median, worst) of CPU time, which a busy machine does
not change much, and of wall time, which it does; the writer's renewal times with and without viewers; and what the
page's connection says to the store.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import sqlite3
import statistics
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

from engine.control.sqlite import SqliteStore
from engine.control.store import Incarnation
from engine.web.app import ServeOptions, create_app
from engine.web.auth import Keyring
from engine.web.events import Feed
from engine.web.reading import SqliteReader
from engine.web.shelf import Shelf, Watched
from engine.work.progress import Progress
from formats.plan import Batch, Partition, Plan

MACHINES = 5


def build(folder: Path, rows: int) -> None:
    """A campaign folder with a loaded store."""
    folder.mkdir()
    settings = '[campaign]\nid = "large"\n[message]\nfrom_address = "a@example.com"\nsubject = "s"\ntext = "t"\n'
    (folder / "campaign.toml").write_text(settings)
    batches = [Batch(first, min(10_000, rows - first)) for first in range(0, rows, 10_000)]
    each = -(-len(batches) // MACHINES)
    plan = Plan(
        campaign_id="large",
        planned_at_us=0,
        rows=rows,
        files=[],
        batches=batches,
        partitions=[Partition(first, min(each, len(batches) - first)) for first in range(0, len(batches), each)],
        address_column="email",
        columns=["email"],
        list_fingerprint="",
        settings_fingerprint="",
        templates_fingerprint="",
        key_id="",
    )
    store = SqliteStore(folder / "control.sqlite")
    store.load_plan(plan, "x", 0)
    store.close()


def told(rows: int, providers: int, workers: int) -> dict[str, Any]:
    """One machine's counters."""
    progress = Progress(rows, 0.0)
    counters = progress.counters(1.0)
    one = {"accepted": 1000, "rejected": 10, "deferred": 50, "lost": 1, "in_doubt": 0, "connections": 4, "allowed": 5}
    one |= {
        "waiting": 300,
        "limit": "throttle: 5 connections, 3.2/s: 20% of 100 attempts refused (421 4.7.0 Try later)",
    }
    one |= {"suspended_until_us": None, "reply_s": [100] * 13, "reply_s_sum": 12.5}
    counters["providers"] = {f"provider-{n}.example": one for n in range(providers)}
    counters["keys"] = [["source-1", f"provider-{n}.example", 1000, 50, 4, 5, None] for n in range(providers)]
    counters["replies"] = [[f"provider-{n}.example", f"421 4.7.0 Try later {n}", 50] for n in range(30)]
    counters["events"] = [{"at_us": n, "event": "throttle_eased", "provider": "p", "reason": "r"} for n in range(50)]
    counters["processes"] = workers // MACHINES
    counters["in_flight"] = 1
    return counters


def milliseconds(times: list[float]) -> str:
    times = sorted(times)
    late = times[int(0.95 * len(times))]
    middle = statistics.median(times)
    return f"median {1000 * middle:.1f} ms, 95 % {1000 * late:.1f} ms, worst {1000 * times[-1]:.1f} ms ({len(times)})"


def renewals(store: SqliteStore, ids: list[str], counters: dict[str, Any], seconds: float) -> list[float]:
    """How long each renewal took, five a second as five machines make them."""
    times, deadline = [], time.monotonic() + seconds
    while time.monotonic() < deadline:
        began = time.perf_counter()
        store.renew(ids[len(times) % len(ids)], time.time_ns() // 1000, counters)
        times.append(time.perf_counter() - began)
        time.sleep(0.2)
    return times


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, default in (("workers", 40), ("providers", 200), ("rows", 100_000_000), ("viewers", 10)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--seconds", type=float, default=5.0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "large"
        build(folder, given.rows)
        store = SqliteStore(folder / "control.sqlite")
        counters = told(given.rows // MACHINES, given.providers, given.workers)
        ids = []
        for number in range(MACHINES):
            ids.append(f"{number:016x}")
            now = time.time_ns() // 1000
            store.register(
                Incarnation(
                    id=ids[-1],
                    sender=f"machine-{number}",
                    host_id="h",
                    boot_id="b",
                    pid=1,
                    partition=number,
                    started_at_us=now,
                    renewed_at_us=now,
                    lease_us=60_000_000,
                )
            )
            store.renew(ids[-1], now, counters)
        print(f"{given.rows:,} rows, {given.providers} providers, {MACHINES} machines")
        alone = renewals(store, ids, counters, given.seconds)
        shelf = Shelf(Path(name))
        watched = shelf.all()[0]
        gc.collect()
        gc.freeze()  # as `engine serve` does
        update(watched, store, ids, counters, given.viewers)
        views(shelf, Keyring(Path(name) / "token"))
        # The page is a process of its own, as `engine serve` is.
        spawn = multiprocessing.get_context("spawn")
        reads = spawn.Queue()
        viewing = spawn.Process(target=look, args=(Path(name), given.viewers, given.seconds, reads))
        viewing.start()
        reads.get()  # it looks
        watching = renewals(store, ids, counters, given.seconds)
        print(f"{given.viewers} viewers made {reads.get() / given.seconds:.1f} reads a second")
        viewing.join()
        print(f"a sender's renewal alone:      {milliseconds(alone)}")
        print(f"a sender's renewal, looked at: {milliseconds(watching)}")
        print(f"commits of the page: {writes(folder, watched)}; its statements in ten looks: {statements(folder)}")
        store.close()
        shelf.close()


def update(watched: Watched, store: SqliteStore, ids: list[str], counters: dict[str, Any], viewers: int) -> None:
    """Reading, summing, comparing, encoding and handing to each page, while every sender tells news in between."""
    feed = Feed()
    feed.viewers = viewers
    cpu, wall, sent = [], [], 0
    for turn in range(100):
        for place, one in enumerate(ids):
            providers = dict(counters["providers"])
            # A third of the providers have news in each second, as some are slow.
            for number, name in enumerate(providers):
                if (number + turn + place) % 3 == 0:
                    providers[name] = {**providers[name], "accepted": 1000 + turn, "connections": turn % 5}
            store.renew(one, time.time_ns() // 1000, {**counters, "providers": providers})
        began, began_cpu, number = time.perf_counter(), time.process_time(), feed.number
        feed.put(watched.look(fresh=True))
        pages = [feed.since(number) for _ in range(viewers)]
        cpu.append(time.process_time() - began_cpu)
        wall.append(time.perf_counter() - began)
        sent = len(pages[0])
    whole = len(feed.since(0))
    print(f"an update for {viewers} pages, CPU:  {milliseconds(cpu)}")
    print(f"an update for {viewers} pages, wall: {milliseconds(wall)}")
    print(f"a page is sent {sent:,} bytes; whole it would be {whole:,}")


def look(root: Path, viewers: int, seconds: float, reads: Any) -> None:
    """So many threads that look ten times a second, for so long."""
    watched = Shelf(root).all()[0]
    deadline = time.monotonic() + seconds

    def view() -> None:
        while time.monotonic() < deadline:
            watched.look()
            time.sleep(0.1)

    reads.put(0)
    threads = [threading.Thread(target=view) for _ in range(viewers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    reads.put(watched.reads)


def views(shelf: Shelf, keyring: Keyring) -> None:
    """The first view, whole, by the application."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from starlette.testclient import TestClient
    with TestClient(create_app(shelf, keyring, ServeOptions(hosts=frozenset({"*"})))) as client:
        client.headers["Authorization"] = f"Bearer {keyring.first}"
        for path in ("/c/large", "/api/v1/campaigns/large", "/metrics"):
            times, cpu = [], []
            for _ in range(30):
                began, began_cpu = time.perf_counter(), time.process_time()
                answer = client.get(path)
                times.append(time.perf_counter() - began)
                cpu.append(time.process_time() - began_cpu)  # the client's own share too
                assert answer.status_code == 200
            print(f"GET {path} ({len(answer.content):,} bytes), CPU:  {milliseconds(cpu)}")
            print(f"GET {path} ({len(answer.content):,} bytes), wall: {milliseconds(times)}")


def statements(folder: Path) -> dict[str, int]:
    """What the page's connection says, by the first word."""
    reader = SqliteReader(folder / "control.sqlite")
    reader.read(0.0)
    said: Counter[str] = Counter()
    assert reader._db is not None
    reader._db.set_trace_callback(lambda text: said.update([text.split()[0].upper()]))
    for number in range(10):
        reader.read(float(number))
    reader.close()
    return dict(said)


def writes(folder: Path, watched: Watched) -> int:
    """Commits that another connection sees while the page reads ten times."""
    other = sqlite3.connect(folder / "control.sqlite")
    (before,) = other.execute("PRAGMA data_version").fetchone()
    for _ in range(10):
        watched.look(fresh=True)
    (after,) = other.execute("PRAGMA data_version").fetchone()
    other.close()
    return int(after) - int(before)


if __name__ == "__main__":
    main()
