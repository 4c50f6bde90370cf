"""The suppression index: building, size, look-ups by batch in one and in two processes.

    python benchmarks/suppression.py                          # 2 M addresses, seconds
    python benchmarks/suppression.py --addresses 100_000_000  # the figures of the README
    python benchmarks/suppression.py --truth 5_000_000        # import into a folder, index from the truth

Two queries in a hundred are in the list, and the hits are counted: a look-up that finds all or nothing is no look-up.
"""

from __future__ import annotations

import argparse
import mmap
import os
import resource
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import polars as pl

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from engine.lists.scope_index import hash_column  # noqa: E402
from engine.lists.sorting import ascending  # noqa: E402
from engine.lists.source import Source  # noqa: E402
from engine.lists.suppression_io import import_source  # noqa: E402
from engine.lists.suppressions import Suppressions  # noqa: E402
from engine.lists.truthfile import write_whole  # noqa: E402
from formats.suppression import Index, encode_index, hash_addresses  # noqa: E402

BATCH = 10_000


def _hashes(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 2**64, count, dtype=np.uint64)


def _look_up(path: Path, members: np.ndarray, batches: int, seed: int) -> tuple[float, int]:
    with open(path, "rb") as file:
        index = Index(memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)))
        rng = np.random.default_rng(seed)
        queries = [_hashes(BATCH, seed + 1000 + number) for number in range(batches)]
        for batch in queries:
            batch[rng.choice(BATCH, BATCH // 50, replace=False)] = rng.choice(members, BATCH // 50)
        for batch in queries[:3]:
            index.check(batch)
        began = time.process_time()  # of this core, whoever else is at work
        hits = sum(int(index.check(batch).sum()) for batch in queries)
        seconds = time.process_time() - began
    if hits != batches * (BATCH // 50):
        raise SystemExit(f"{hits} hits, {batches * (BATCH // 50)} planted")
    return seconds, hits


def _memory_kb(name: str) -> int:
    text = Path("/proc/self/smaps_rollup").read_text()
    return next(int(line.split()[1]) for line in text.splitlines() if line.startswith(name))


def index(count: int, folder: Path, batches: int) -> None:
    """Build, then ask in one process and in two at once."""
    raw = _hashes(count, 1)
    sample = raw[:: max(1, count // 100_000)].copy()
    began, cpu = time.perf_counter(), time.process_time()
    raw = ascending(raw, threads=True)
    write_whole(folder / "index.bin", encode_index(raw))
    size = (folder / "index.bin").stat().st_size
    seconds, used = time.perf_counter() - began, time.process_time() - cpu
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    print(
        f"{count} hashes: sorted, indexed, written and synced in {seconds:.1f} s (CPU {used:.1f} s), "
        f"{size / 1e6:.0f} MB, peak memory {peak:.2f} GB"
    )
    del raw
    seconds, hits = _look_up(folder / "index.bin", sample, batches, 7)
    print(f"one process: {batches * BATCH / seconds / 1e6:.1f} M look-ups/s ({hits} hits)")
    children = []
    for number in range(2):
        child = os.fork()
        if child == 0:
            seconds, _ = _look_up(folder / "index.bin", sample, batches, 20 + number)
            print(
                f"two at once, process {number}: {batches * BATCH / seconds / 1e6:.1f} M/s, "
                f"Rss {_memory_kb('Rss:') / 1024:.0f} MB, Pss {_memory_kb('Pss:') / 1024:.0f} MB",
                flush=True,
            )
            os._exit(0)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)


def hashing() -> None:
    """Addresses into hashes: a list, a column."""
    names = [f"user{number}@example{number % 100}.org" for number in range(100_000)]
    column = pl.Series(names).to_arrow()
    for name, act in (("list of str", lambda: hash_addresses(names)), ("column", lambda: hash_column(column))):
        act()
        began = time.perf_counter()
        act()
        print(f"hashing, {name}: {(time.perf_counter() - began) / len(names) * 1e9:.0f} ns an address")


def truth(count: int, folder: Path) -> None:
    """Import addresses into a folder, then open it as a worker does."""
    names = pl.DataFrame({"email": pl.Series(np.arange(count)).cast(pl.String) + "@gone.example.org"})
    source = Source(name="made", rows=count, scan=names.lazy)
    began = time.perf_counter()
    done = import_source(source, folder / "s", scope="all", reason="import", origin="benchmark", now_us=1)
    imported = time.perf_counter() - began
    began = time.perf_counter()
    known = Suppressions(folder / "s", list_id=None)
    opened = time.perf_counter() - began
    began = time.perf_counter()
    known.rebuild_indexes()
    rebuilt = time.perf_counter() - began
    assert known.check(["7@gone.example.org", "x@gone.example.org"]).tolist() == [True, False]
    print(
        f"{done.added} addresses imported in {imported:.1f} s, opened in {opened * 1000:.1f} ms, "
        f"index written again in {rebuilt:.1f} s"
    )


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--addresses", type=int, default=2_000_000)
    ask.add_argument("--batches", type=int, default=200)
    ask.add_argument(
        "--truth", type=int, default=0, help="import so many addresses into a folder in place of the index"
    )
    ask.add_argument("--folder", type=Path, help="on which disk [default: the temporary folder]")
    given = ask.parse_args()
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        if given.truth:
            truth(given.truth, Path(folder))
        else:
            hashing()
            index(given.addresses, Path(folder), given.batches)


if __name__ == "__main__":
    main()
