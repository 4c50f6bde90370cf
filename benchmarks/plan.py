"""`engine plan` of 100 million rows: 64 files, about 9,800 row groups. Time and peak memory of the whole process.

    python benchmarks/plan.py [--files 64] [--rows 1562500]

One file is written and linked 64 times: planning reads footers and 16 row groups, and cannot tell links from copies.
Also measures what a row costs from Parquet to what a template needs (`rows`: target 2 µs).
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import polars as pl

ROOT = Path(__file__).parents[1]
# VmHWM is of the program itself; ru_maxrss of a child begins with what its parent had before exec.
MEASURED = """
import atexit, pathlib, sys
atexit.register(lambda: sys.stderr.write(pathlib.Path("/proc/self/status").read_text()))
from engine.cli import main
main()
"""


def make_file(path: Path, rows: int) -> None:
    """A mixed list with ten columns, row groups of 10,000, as `engine prepare` would write it."""
    number = pl.int_range(rows, eager=True)
    frame = pl.DataFrame({"id": number}).with_columns(
        email=pl.format("person{}@domain{}.example", "id", pl.col("id") * 7919 % 997),
        first_name=pl.format("Name{}", pl.col("id") % 5000),
        city=pl.format("City{}", pl.col("id") % 300),
        amount=pl.col("id") * 3 % 10_000,
        joined=pl.date_range(pl.date(2020, 1, 1), pl.date(2020, 1, 1), eager=False).first(),
        score=pl.col("id") % 101,
        code=pl.format("C-{}", "id"),
        plan=pl.format("plan{}", pl.col("id") % 4),
        visits=pl.col("id") % 17,
    )
    frame.write_parquet(path, row_group_size=10_000, compression="zstd", compression_level=1)


def measure_rows(path: Path) -> float:
    """Microseconds a row from row group to tuples of Python values, ten columns, best of three passes."""
    import pyarrow.parquet as pq

    from engine.rows import RowReader, file_fingerprint
    from formats.plan import Batch, ListFile, Partition, Plan

    meta = pq.read_metadata(path)
    groups = [meta.row_group(g).num_rows for g in range(meta.num_row_groups)]
    plan = Plan(
        campaign_id="bench",
        planned_at_us=0,
        rows=meta.num_rows,
        files=[ListFile(str(path), meta.num_rows, groups, file_fingerprint(str(path)))],
        batches=[Batch(0, meta.num_rows)],
        partitions=[Partition(0, 1)],
        address_column="email",
        columns=[],
        list_fingerprint="",
        settings_fingerprint="",
        templates_fingerprint="",
        key_id="",
    )
    best = 1e9
    for _ in range(3):
        reader = RowReader(plan, pq.read_schema(path).names)
        spans = reader.spans(0, min(meta.num_rows, 200_000))
        started = time.process_time()
        rows = 0
        for span in spans:
            for first in range(0, span.rows, 256):
                rows += len(reader.read(span, first, 256))
        best = min(best, (time.process_time() - started) / rows)
    return best * 1e6


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--files", type=int, default=64)
    parser.add_argument("--rows", type=int, default=1_562_500, help="in each file")
    wanted = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "lists").mkdir()
        first = folder / "lists" / "part-000.parquet"
        make_file(first, wanted.rows)
        for number in range(1, wanted.files):
            os.link(first, folder / "lists" / f"part-{number:03d}.parquet")
        print(f"rows: {measure_rows(first):.2f} µs a row, ten columns")
        environ = {**os.environ, "PYTHONPATH": str(ROOT)}
        engine = [sys.executable, "-m", "engine"]
        subprocess.run([*engine, "init"], cwd=folder, env=environ, check=True, stdout=subprocess.DEVNULL)
        for template in (folder / "campaign" / "templates").iterdir():
            template.write_text("Hello {{ first_name }}")
        settings = folder / "campaign" / "campaign.toml"
        lines = [
            'subject = "Hello"' if line.startswith("subject") else line for line in settings.read_text().splitlines()
        ]
        settings.write_text("\n".join(lines) + "\n")
        for run in range(3):
            started = time.perf_counter()
            told = [sys.executable, "-c", MEASURED, "plan", "lists", "--replace"]
            ended = subprocess.run(told, cwd=folder, env=environ, check=True, capture_output=True, text=True)
            peak = int(ended.stderr.rsplit("VmHWM:", 1)[1].split()[0]) / 1024
            print(f"plan, run {run + 1}: {time.perf_counter() - started:.2f} s, peak {peak:.0f} MB")


if __name__ == "__main__":
    main()
