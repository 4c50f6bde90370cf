"""A worker's and the supervisor's resident memory while one long campaign runs: flat from the first 100,000 rows on?

    python benchmarks/memory.py [--rows 300000] [--processes 1] [--json FILE]       --rows 5_100_000 for the goal

`engine send` of a generated list to the fast sink of `benchmarks/smtp.py` (a C compiler is needed). Once a second the
progress lines that `send` prints say how many rows are done, and /proc says what each process holds (VmRSS). Printed:
the memory at 100,000 rows, at each further tenth, and at the end, and the growth from 100,000 rows to the end.
Linux only.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))

from make_list import rows as list_rows
from smtp import Sink

SETTINGS = """\
[campaign]
id = "memory"
[message]
from_address = "news@sender.test"
subject = "Hello {{{{ first_name }}}}"
text = "letter.txt"
[delivery]
relay = "smtp://127.0.0.1:{port}"
tls = "off"
connections = 50
messages_per_connection = 1000
"""
FIRST_LOOK = 100_000
DONE = re.compile(r"\b([\d,]+) of [\d,]+")


def resident_mb(pid: int, line: str = "VmRSS") -> float:
    """What /proc says of a process in MB (10^6 bytes), 0.0 when it is gone; RssFile is mapped files, shared."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0.0
    found = re.search(rf"{line}:\s+(\d+) kB", status)
    return int(found[1]) * 1024 / 1e6 if found else 0.0


def workers_of(supervisor: int) -> list[int]:
    """The children of the supervisor that are workers (multiprocessing's resource tracker is not)."""
    try:
        children = Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()
        return [
            pid for pid in map(int, children) if b"resource_tracker" not in Path(f"/proc/{pid}/cmdline").read_bytes()
        ]
    except OSError:
        return []


def write_list(path: Path, count: int) -> None:
    """A prepared list of `count` rows in row groups of 10,000."""
    import pyarrow.parquet as pq

    writer = None
    for first in range(0, count, 100_000):
        table = list_rows(first, min(100_000, count - first), seed=7, clean=True).to_arrow()
        writer = writer or pq.ParquetWriter(path, table.schema, compression="zstd")
        writer.write_table(table, row_group_size=10_000)
    assert writer is not None
    writer.close()


def watch(send: subprocess.Popen[str], samples: list[tuple[int, float, float, float]]) -> None:
    """Add (rows done, the largest worker in MB, mapped files of it, the supervisor) for each progress line."""
    assert send.stderr is not None
    for line in send.stderr:
        found = DONE.search(line)
        if found is None:
            continue
        workers = workers_of(send.pid)
        largest = max(((resident_mb(pid), resident_mb(pid, "RssFile")) for pid in workers), default=(0.0, 0.0))
        if largest[0]:
            samples.append((int(found[1].replace(",", "")), *largest, resident_mb(send.pid)))


def main() -> None:
    """Run the campaign, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=300_000)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    samples: list[tuple[int, float, float, float]] = []
    with tempfile.TemporaryDirectory(prefix="rowpost-memory-") as name:
        folder = Path(name)
        write_list(folder / "list.parquet", options.rows)
        (folder / "sink").mkdir()
        sink, campaign = Sink(folder / "sink"), folder / "campaign"
        engine = [sys.executable, "-m", "engine"]
        root = Path(__file__).parents[1]
        subprocess.run([*engine, "init", "--campaign", campaign], cwd=root, check=True, capture_output=True)
        (campaign / "letter.txt").write_text("Dear {{ first_name }}, this is a letter.\n" + "A line of it.\n" * 20)
        with sink.running() as (port, stop):
            (campaign / "campaign.toml").write_text(SETTINGS.format(port=port))
            words = [*engine, "plan", folder / "list.parquet", "--campaign", campaign]
            subprocess.run(words, cwd=root, check=True, capture_output=True)
            words = [*engine, "send", "--campaign", campaign, "--processes", str(options.processes)]
            began = time.monotonic()
            send = subprocess.Popen(words, cwd=root, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
            watcher = threading.Thread(target=watch, args=(send, samples))
            watcher.start()
            code = send.wait()
            watcher.join()
            took, received = time.monotonic() - began, stop()
    if code or received != options.rows:
        raise SystemExit(f"send ended with {code}; the sink took {received} of {options.rows} messages")
    first = next((sample for sample in samples if sample[0] >= FIRST_LOOK), None)
    if first is None:
        raise SystemExit(f"no progress line between {FIRST_LOOK:,} rows and the end: give more --rows")
    print(f"{options.rows:,} rows in {took:.0f} s; resident memory in MB")
    print(f"{'rows done':>12} {'worker':>8} {'of it files':>12} {'supervisor':>11}")
    shown, step = 0, options.rows // 10
    for sample in samples:
        if sample in (first, samples[-1]) or (sample[0] > first[0] and sample[0] // step > shown):
            shown = sample[0] // step
            print(f"{sample[0]:12,} {sample[1]:8.1f} {sample[2]:12.1f} {sample[3]:11.1f}")
    grown = {"worker": samples[-1][1] - first[1], "supervisor": samples[-1][3] - first[3]}
    print(f"grown since {first[0]:,} rows: worker {grown['worker']:+.1f} MB, supervisor {grown['supervisor']:+.1f} MB")
    if options.json:
        options.json.write_text(json.dumps({"rows": options.rows, "seconds": took, "samples": samples, "grown": grown}))


if __name__ == "__main__":
    main()
