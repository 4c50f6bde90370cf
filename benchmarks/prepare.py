"""`engine prepare` beside a plain polars and a plain DuckDB script that make the same list, in one run.

    python benchmarks/prepare.py                        # 1 M rows, half a minute
    python benchmarks/prepare.py --rows 10_000_000      # the figures of the README
    python benchmarks/prepare.py --rows 100_000_000 --files 40 --suppressions 5_000_000 --only engine
    python benchmarks/prepare.py --plan 64              # plan-time counts of a prepared list of 64 files

Each way runs in a process of its own: wall seconds, CPU seconds, peak memory. "The same list": addresses trimmed and
checked by the same grammar for plain addresses, one of each kept, suppressed ones left out, domains mixed (the scripts
by rank over count alone, one level), row groups of 10,000, zstd 1. The scripts keep no reasons and write no counts.
The rows kept must agree, else the run fails.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

PATTERN = (
    r"^[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+(?:\.[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+)*"
    r"@(?:[A-Za-z0-9]+(?:-+[A-Za-z0-9]+)*\.)+[A-Za-z][A-Za-z0-9]*(?:-+[A-Za-z0-9]+)*$"
)


def by_polars(lists: list[str], suppressed: str, output: str) -> int:
    """The plain polars script: lazy, streaming, one level of mixing."""
    import polars as pl

    gone = pl.scan_parquet(suppressed).select(key=pl.col("email").str.strip_chars().str.to_lowercase()).unique()
    key = pl.col("email").str.strip_chars().str.to_lowercase()
    rank = pl.int_range(pl.len()).over("domain")
    mixed = (rank + (pl.col("domain").hash() % 1000) / 1000) / pl.len().over("domain")
    (
        pl.scan_parquet(lists)
        .with_columns(key=key)
        .filter(pl.col("key").str.contains(PATTERN))
        .unique("key", keep="first", maintain_order=True)
        .join(gone, on="key", how="anti")
        .with_columns(email=pl.col("email").str.strip_chars(), domain=pl.col("key").str.replace(r"^.*@", ""))
        .sort(mixed)
        .drop("key")
        .sink_parquet(output, compression="zstd", compression_level=1, row_group_size=10_000)
    )
    return int(pl.scan_parquet(output).select(pl.len()).collect().item())


def by_duckdb(lists: list[str], suppressed: str, output: str) -> int:
    """The plain DuckDB script, with 4 GB of memory."""
    import duckdb

    con = duckdb.connect()
    quoted = PATTERN.replace("'", "''")
    con.execute(f"set memory_limit = '4GB'; set temp_directory = '{output}.tmp'; set preserve_insertion_order = true")
    con.execute(
        f"""copy (
            with listed as (
                select *, lower(trim(email)) as key from read_parquet({lists!r}, file_row_number = false)
            ), good as (
                select * from listed where regexp_matches(key, '{quoted}')
            ), once as (
                select distinct on (key) * from good
            ), sendable as (
                select * from once anti join (
                    select distinct lower(trim(email)) as key from read_parquet('{suppressed}')
                ) gone using (key)
            ), placed as (
                select * exclude (key), split_part(key, '@', 2) as domain from sendable
            )
            select * from placed
            order by (row_number() over (partition by domain) + (hash(domain) % 1000) / 1000.0)
                     / count(*) over (partition by domain)
        ) to '{output}' (format parquet, compression zstd, compression_level 1, row_group_size 10000)"""
    )
    return int(con.execute(f"select count(*) from read_parquet('{output}')").fetchall()[0][0])


def by_engine(lists: list[str], suppressed: str, output: str) -> dict[str, object]:
    """What this benchmark is about, through its functions."""
    from engine.lists.opening import Reading, open_files
    from engine.lists.prepare import Wishes, prepare, work_folder
    from engine.lists.suppression_files import SuppressionFile

    told = _Stages()
    path = Path(output)
    with work_folder(path.parent) as work:
        sources = open_files([Path(one) for one in lists], work, Reading())
        known = [SuppressionFile(one) for one in open_files([Path(suppressed)], _folder(work / "s"), Reading())]
        report = prepare(
            sources, path, path.with_name("rejects.parquet"), Wishes(), work=work, suppressions=known, progress=told
        )
    mixing = report.mixing
    return {
        "kept": report.kept,
        "rejected": report.rejected,
        "way": report.way,
        "worst 500": mixing.worst_500,
        "worst 10000": mixing.worst_10000,
        "longest run": mixing.longest_run,
        "stages": told.seconds(),
    }


class _Stages:
    def __init__(self) -> None:
        self._began = [("reading footers", time.perf_counter())]

    def stage(self, name: str, rows: int) -> None:
        self._began.append((name, time.perf_counter()))

    def advance(self, rows: int) -> None:
        pass

    def seconds(self) -> dict[str, float]:
        ends = [began for _, began in self._began[1:]] + [time.perf_counter()]
        return {name: round(end - began, 1) for (name, began), end in zip(self._began, ends, strict=True)}


def _folder(path: Path) -> Path:
    path.mkdir()
    return path


def _measured(way: str, folder: Path, output: Path) -> dict[str, object]:
    began = time.perf_counter()
    words = ["--child", way, "--folder", str(folder), "--output", str(output)]
    child = subprocess.Popen([sys.executable, __file__, *words], stdout=subprocess.PIPE)
    assert child.stdout is not None
    said = child.stdout.read()
    child.stdout.close()
    _, status, used = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    wall = time.perf_counter() - began
    if child.returncode:
        raise SystemExit(f"{way} failed")
    return {
        "way": way,
        "wall s": round(wall, 1),
        "cpu s": round(used.ru_utime + used.ru_stime, 1),
        "peak GB": round(used.ru_maxrss / 1e6, 2),
        "MB": round(output.stat().st_size / 1e6),
        "told": json.loads(said),
    }


def _child(way: str, folder: Path, output: Path) -> None:
    lists = [str(path) for path in sorted(folder.glob("part-*.parquet"))]
    made = {"polars": by_polars, "duckdb": by_duckdb, "engine": by_engine}[way](
        lists, str(folder / "suppressed.parquet"), str(output)
    )
    print(json.dumps(made if isinstance(made, dict) else {"kept": made}))


def _plan_counts(folder: Path, rows: int, files: int) -> None:
    import pyarrow.parquet as pq

    from formats import listmeta

    if not folder.exists():
        subprocess.run(
            [sys.executable, str(ROOT / "benchmarks" / "make_list.py"), str(folder), "--rows", str(rows), "--files",
             str(files), "--prepared"], check=True,
        )  # fmt: skip
    began = time.perf_counter()
    footers = [pq.read_metadata(path) for path in sorted(folder.glob("part-*.parquet"))]
    metas = [listmeta.of_metadata(footer.metadata) for footer in footers]
    groups = sum(footer.num_row_groups for footer in footers)
    counted = sum(meta.rows for meta in metas if meta is not None)
    seconds = time.perf_counter() - began
    assert counted == sum(footer.num_rows for footer in footers)
    print(f"footers and counts of {len(footers)} files, {groups} row groups, {counted} rows: {seconds:.2f} s")


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--rows", type=int, default=1_000_000)
    ask.add_argument("--files", type=int, default=4)
    ask.add_argument("--suppressions", type=int, default=None, help="default: a row in twenty")
    ask.add_argument("--only", action="append", choices=["engine", "polars", "duckdb"])
    ask.add_argument("--plan", type=int, metavar="FILES", help="only the plan-time counts, of so many files")
    ask.add_argument("--folder", type=Path, default=None, help="where lists are made and kept")
    ask.add_argument("--output", type=Path)
    ask.add_argument("--child")
    given = ask.parse_args()
    if given.child:
        _child(given.child, given.folder, given.output)
        return
    if given.plan:
        _plan_counts(given.folder or Path(f"/tmp/rowpost-prepared-{given.rows}"), given.rows, given.plan)
        return
    folder = given.folder or Path(f"/tmp/rowpost-list-{given.rows}")
    if not (folder / "suppressed.parquet").exists():
        gone = given.suppressions if given.suppressions is not None else given.rows // 20
        subprocess.run(
            [sys.executable, str(ROOT / "benchmarks" / "make_list.py"), str(folder), "--rows", str(given.rows),
             "--files", str(given.files), "--suppressions", str(gone)], check=True,
        )  # fmt: skip
    out = folder / "out"
    out.mkdir(exist_ok=True)
    results = [_measured(way, folder, out / f"{way}.parquet") for way in given.only or ["engine", "polars", "duckdb"]]
    print(f"{given.rows} rows, {os.cpu_count()} cores")
    for one in results:
        told = one.pop("told")
        print(json.dumps(one), json.dumps(told))
        one["kept"] = told["kept"]  # type: ignore[index]  # every child tells it
    shutil.rmtree(out)
    if len({one["kept"] for one in results}) != 1:
        raise SystemExit("the ways kept different rows")


if __name__ == "__main__":
    main()
