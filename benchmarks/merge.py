"""How long `merge-logs` takes for a large campaign, beside polars and DuckDB finding the final states alone.

    python -m benchmarks.merge                                  a quick size: 1 M rows, a few seconds
    python -m benchmarks.merge --rows 100000000 --folder DIR    the size of the goal: 10 GB of disk

`cpu_s` is processor time, children included: what to compare on a busy machine. `peak_*_gb` are of the largest process:
memory of its own, and pages of files that it had mapped, which the system takes back when others want them.

Makes a list (64 files) and 40 logs of a campaign on five machines: 6 % of the rows deferred once and tried again, 1 %
bounced, a few in doubt, a few never reached, three rows in each log accepted by two machines, and 2 % of the rows moved
to another machine's log. What is printed is checked against what was planted. Each way runs in a process of its own, so
that its peak memory is its own. Files that exist are used again.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import subprocess
import sys
import threading
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from formats import plan as plans
from formats.plan import Batch, ListFile, Partition, Plan
from formats.sendlog import SCHEMA, Encoder, Header, Kind, Reader, Reason, Verdict

MACHINES, WORKERS = 5, 8
LOGS = MACHINES * WORKERS
FILES = 64
T0 = 1_780_000_000_000_000
DOMAINS = ["gmail.test", "yahoo.test", "outlook.test", "web.test", "mail.test"]
PROVIDERS = ["google", "yahoo", "microsoft", "webde", "others"]
BATCH = 1024


# -- what is merged ---------------------------------------------------------------------------------------------------


def make_list_file(folder: str, number: int, first: int, rows: int) -> tuple[int, ListFile]:
    path = Path(folder) / f"list-{number:03}.parquet"
    if not path.exists():
        rng = np.random.default_rng(number)
        beside = path.with_suffix(".new")
        schema = pa.schema([("id", pa.int64()), ("email", pa.string()), ("first_name", pa.string())])
        with pq.ParquetWriter(beside, schema, compression="zstd", compression_level=1) as writer:
            for start in range(0, rows, 1_000_000):
                count = min(1_000_000, rows - start)
                ids = np.arange(first + start, first + start + count)
                domain = np.where(rng.random(count) < 0.85, rng.integers(0, 5, count), rng.integers(5, 50_000, count))
                names = [DOMAINS[d] if d < 5 else f"d{d}.example.test" for d in domain.tolist()]
                emails = [f"user.{n:010}@{name}" for n, name in zip(ids.tolist(), names, strict=True)]
                table = pa.table([pa.array(ids), pa.array(emails), pa.array(["Ann"] * count)], schema=schema)
                writer.write_table(table, row_group_size=10_000)
        beside.rename(path)
    meta = pq.read_metadata(path)
    groups = [meta.row_group(g).num_rows for g in range(meta.num_row_groups)]
    return number, ListFile(str(path), rows, groups, "-")


def make_log(folder: str, number: int, rows: int, replies: str) -> dict[str, int]:
    """One worker's log: its share of its machine's partition, some rows of another's. Says what was planted."""
    path = Path(folder) / f"log-{number:02}.arrows"
    planted = path.with_suffix(".json")
    if path.exists() and planted.exists():
        return dict(json.loads(planted.read_text()))
    rng = np.random.default_rng(1000 + number)
    machine, worker = divmod(number, WORKERS)
    part = rows // MACHINES
    low, high = machine * part, (machine + 1) * part if machine < MACHINES - 1 else rows
    # The workers of a machine take batches of 10,000 rows in turn; 2 % of the batches were taken by another machine.
    batches = np.arange(low // 10_000, -(-high // 10_000))
    mine = batches[(batches % WORKERS == worker) & ~is_moved(batches)]
    everywhere = np.arange(-(-rows // 10_000))
    moved = everywhere[is_moved(everywhere) & (everywhere % LOGS == number)]
    starts = np.concatenate((mine, moved))
    row = (starts[:, None] * 10_000 + np.arange(10_000)[None, :]).ravel()
    inside = np.where(np.repeat(is_moved(starts), 10_000), True, (row >= low) & (row < high)) & (row < rows)
    row = row[inside]
    # Batches on a border between partitions belong to the first of the two.
    missing = rng.random(len(row)) < 1e-4
    row = row[~missing]
    n = len(row)
    start = T0 + np.arange(n, dtype=np.int64) * 20_000 + rng.integers(0, 5_000, n)
    again = rng.random(n) < 0.06
    bounced = rng.random(n) < 0.01
    doubt = rng.random(n) < 1e-5
    twice = rng.choice(n, min(3, n), replace=False)
    rows_all = np.concatenate((row, row[again]))
    starts_all = np.concatenate((start, start[again] + 300_000_000))
    attempt = np.concatenate((np.ones(n, np.uint16), np.full(int(again.sum()), 2, np.uint16)))
    first_verdict = np.where(again, Verdict.DEFERRED, np.where(bounced, Verdict.REJECTED, Verdict.ACCEPTED))
    last_verdict = np.where(bounced, Verdict.REJECTED, Verdict.ACCEPTED)[again]
    verdict = np.concatenate((first_verdict, last_verdict)).astype(np.uint8)
    unanswered = np.concatenate((doubt & ~again, doubt[again]))
    ended = starts_all + rng.integers(30_000, 400_000, len(rows_all))
    order = np.argsort(starts_all, kind="stable")
    serial = np.empty(len(order), np.uint64)
    serial[order] = np.arange(1, len(order) + 1)
    answered = np.flatnonzero(~unanswered)
    kind = np.concatenate((np.full(len(rows_all), Kind.INTENT), np.full(len(answered), Kind.RESULT))).astype(np.uint8)
    source_row = np.concatenate((np.arange(len(rows_all)), answered))
    at = np.concatenate((starts_all, ended[answered]))
    # An intent never stands behind its own result.
    sequence = np.lexsort((kind, at))
    kind, source_row, at = kind[sequence], source_row[sequence], at[sequence]
    is_result = kind == Kind.RESULT
    said = np.where(is_result, verdict[source_row], 0).astype(np.uint8)
    code = np.select([said == 1, said == 2, said == 3], [250, 550, 451], 0).astype(np.uint16)
    provider = (rows_all[source_row] % 5 + 1).astype(np.uint16)
    header = Header(
        log_id=f"log-{number:02}",
        campaign_id="bench",
        plan_fingerprint="-",
        incarnation=f"i{machine}",
        sender=f"machine-{machine}",
        host_id=str(machine),
        boot_id="b",
        worker=worker,
        started_at_us=T0,
    )
    encoder = Encoder(header)
    beside = path.with_suffix(".new")
    with open(beside, "wb") as file:
        name = [(Kind.NAME, 0, p + 1, T0, 0, 0, 1, 0, 0, 0, 0, text) for p, text in enumerate(PROVIDERS)]
        name.append((Kind.NAME, 0, 1, T0, 0, 0, 2, 0, 0, 0, 0, f"10.0.0.{machine}"))
        file.write(encoder.batch([tuple(record) for record in name]))  # type: ignore[misc]
        for begin in range(0, len(kind), BATCH):
            cut = slice(begin, begin + BATCH)
            index = source_row[cut]
            columns = [
                kind[cut],
                serial[index],
                rows_all[index].astype(np.uint64),
                at[cut],
                attempt[index],
                said[cut],
                np.where(said[cut] == 2, Reason.RECIPIENT, 0).astype(np.uint8),
                code[cut],
                provider[cut],
                np.ones(len(index), np.uint16),
                np.where(said[cut] == 3, 300, 0).astype(np.uint32),
            ]
            arrays = [pa.array(c).cast(f.type) for c, f in zip(columns, list(SCHEMA)[:-1], strict=True)]
            arrays.append(pa.array(_texts(said[cut], rows_all[index], replies), pa.string()))
            file.write(encoder.columns(pa.RecordBatch.from_arrays(arrays, schema=SCHEMA)))
        # Three rows were accepted by another machine, too.
        extra = []
        for k, place in enumerate(twice.tolist()):
            s, r = len(rows_all) + 1 + k, int(row[place])
            extra.append((Kind.INTENT, s, r, T0, 3, 0, 0, 0, 1, 1, 0, None))
            extra.append((Kind.RESULT, s, r, T0, 3, 1, 0, 250, 1, 1, 0, None))
        if extra:
            file.write(encoder.batch([tuple(map(_plain, record)) for record in extra]))  # type: ignore[misc]
        file.write(encoder.end())
    beside.rename(path)
    is_twice = np.zeros(n, bool)
    is_twice[twice] = True
    clean = ~is_twice
    told = {
        "records": len(kind) + len(extra),
        "accepted": int((~bounced & ~doubt & clean).sum() + is_twice.sum()),
        "bounced": int((bounced & ~doubt & clean).sum()),
        "in_doubt": int((doubt & clean).sum()),
        "unsent": int(missing.sum()),
        "duplicates": int((~bounced & ~doubt & is_twice).sum()),
    }
    planted.write_text(json.dumps(told))
    return told


def _plain(value: object) -> object:
    return int(value) if isinstance(value, int) else value


def is_moved(batches: np.ndarray) -> np.ndarray:
    return (batches * 2_654_435_761 % 1000) < 20


def _texts(said: np.ndarray, rows: np.ndarray, replies: str) -> list[str | None]:
    texts: list[str | None] = [None] * len(said)
    for place in np.flatnonzero(said if replies == "all" else said > 1).tolist():
        row = int(rows[place])
        texts[place] = (
            f"2.0.0 Ok: queued as {row * 2_654_435_761 % 2**40:010X}"
            if said[place] == 1
            else f"5.1.1 The account does not exist {row % 97}"
            if said[place] == 2
            else "4.7.0 Try again later, too many messages"
        )
    return texts


def make_plan(files: list[ListFile], rows: int) -> Plan:
    batches = [Batch(first, min(10_000, rows - first)) for first in range(0, rows, 10_000)]
    each = -(-len(batches) // MACHINES)
    return Plan(
        campaign_id="bench",
        planned_at_us=T0,
        rows=rows,
        files=files,
        batches=batches,
        partitions=[Partition(p * each, max(0, min(each, len(batches) - p * each))) for p in range(MACHINES)],
        address_column="email",
        id_column="id",
        columns=["email", "id"],
        list_fingerprint="-",
        settings_fingerprint="-",
        templates_fingerprint="-",
        key_id="-",
    )


def make(folder: Path, rows: int, replies: str, processes: int) -> dict[str, int]:
    folder.mkdir(parents=True, exist_ok=True)
    planted = folder / "planted.json"
    if planted.exists():
        return dict(json.loads(planted.read_text()))
    edges = [rows * n // FILES for n in range(FILES + 1)]
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        listed = [
            pool.submit(make_list_file, str(folder), n, edges[n], edges[n + 1] - edges[n])
            for n in range(FILES)
            if edges[n + 1] > edges[n]
        ]
        logs = [pool.submit(make_log, str(folder), n, rows, replies) for n in range(LOGS)]
        began = time.perf_counter()
        for number, _ in enumerate(as_completed([*logs, *listed]), 1):
            tell(f"made {number} of {len(listed) + len(logs)} files, {time.perf_counter() - began:,.0f} s")
        files = [file for _, file in sorted(f.result() for f in listed)]
        told = [f.result() for f in logs]
    total = {key: sum(one[key] for one in told) for key in told[0]}
    (folder / "plan.json").write_bytes(plans.encode(make_plan(files, rows)))
    planted.write_text(json.dumps(total))
    return total


def tell(line: str) -> None:
    """What is being done, on stderr: stdout is the figures."""
    print(f"{time.strftime('%H:%M:%S')} {line}", file=sys.stderr, flush=True)


# -- what it costs ----------------------------------------------------------------------------------------------------


def cpu_s() -> float:
    """Processor time of this process and its children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


class Peaks(threading.Thread):
    """The largest memory of any one process of ours, in GB, looked at every twentieth of a second."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.own_gb = self.mapped_gb = 0.0
        self._over = threading.Event()

    def run(self) -> None:
        while not self._over.wait(0.05):
            for process in [os.getpid(), *(child.pid for child in multiprocessing.active_children())]:
                try:
                    lines = Path(f"/proc/{process}/status").read_text().splitlines()
                except OSError:
                    continue  # ended meanwhile, or no Linux
                told = dict(line.split(":", 1) for line in lines)
                self.own_gb = max(self.own_gb, _gb(told.get("RssAnon", "")))
                self.mapped_gb = max(self.mapped_gb, _gb(told.get("RssFile", "")))

    def end(self) -> dict[str, object]:
        self._over.set()
        self.join()
        return {"peak_own_gb": round(self.own_gb, 2), "peak_mapped_gb": round(self.mapped_gb, 2)}


def _gb(told: str) -> float:
    return int(told.split()[0]) / 1e6 if told.split() else 0.0


# -- the ways ---------------------------------------------------------------------------------------------------------


def ours(folder: Path, processes: int, *, write: bool) -> dict[str, object]:
    """Accounting, or all of it with recipients.parquet and its two companions."""
    from engine.results.merge import merge
    from engine.results.recipients import write_recipients

    plan = plans.decode((folder / "plan.json").read_bytes())
    began, used = time.perf_counter(), cpu_s()
    logs = sorted(folder.glob("*.arrows"), reverse=True)
    with merge(plan, logs, processes=processes, scratch=folder) as merged:
        accounted = time.perf_counter() - began
        told: dict[str, object] = {
            **{str(k): v for k, v in merged.outcomes.items()},
            "duplicates": len(merged.duplicates),
            "accounting_s": round(accounted, 1),
            "cpu_s": round(cpu_s() - used, 1),
        }
        if write:
            out = folder / "report"
            out.mkdir(exist_ok=True)
            written = write_recipients(merged, out, merged_at_us=T0, threads=processes)
            told["with_recipients_s"] = round(time.perf_counter() - began, 1)
            told["cpu_s"] = round(cpu_s() - used, 1)
            told["domains"] = len(written.domains)
            told["problems"] = written.problems
            told["recipients_mb"] = (out / "recipients.parquet").stat().st_size // 1_000_000
    return told


def _results(folder: Path) -> pa.RecordBatchReader:
    """Row and rank of every word, verified; what the engines are given. They pair no intents and name no doubt."""
    names = ["row", "kind", "verdict"]
    schema = pa.schema([SCHEMA.field(name) for name in names])

    def batches():  # type: ignore[no-untyped-def]
        for path in sorted(folder.glob("*.arrows")):
            with pa.memory_map(str(path)) as file:
                for batch in Reader(file.read_buffer()):
                    yield batch.select(names)

    return pa.RecordBatchReader.from_batches(schema, batches())


def with_polars(folder: Path) -> dict[str, object]:
    """Final states by polars' streaming engine: group by row, strongest verdict."""
    import polars as pl
    from polars.io.plugins import register_io_source

    def source(with_columns, predicate, n_rows, batch_size):  # type: ignore[no-untyped-def]
        gathered: list[pa.RecordBatch] = []
        for batch in _results(folder):
            gathered.append(batch)
            if len(gathered) == 256:
                yield _frame(gathered, with_columns, predicate)
                gathered = []
        if gathered:
            yield _frame(gathered, with_columns, predicate)

    def _frame(gathered, with_columns, predicate):  # type: ignore[no-untyped-def]
        frame = pl.DataFrame(pa.Table.from_batches(gathered))
        frame = frame.select(with_columns) if with_columns else frame
        return frame.filter(predicate) if predicate is not None else frame

    began, used = time.perf_counter(), cpu_s()
    lazy = register_io_source(source, schema={"row": pl.UInt64, "kind": pl.UInt8, "verdict": pl.UInt8})
    states = (
        lazy.filter(pl.col("kind") == 2)
        .group_by("row")
        .agg(pl.col("verdict").min().alias("best"))
        .group_by("best")
        .len()
        .collect(engine="streaming")
    )
    counts = dict(states.iter_rows())
    return {
        "accepted": counts.get(1, 0),
        "bounced": counts.get(2, 0),
        "states_s": round(time.perf_counter() - began, 1),
        "cpu_s": round(cpu_s() - used, 1),
    }


def with_duckdb(folder: Path) -> dict[str, object]:
    """The same by DuckDB within 4 GB."""
    import duckdb

    began, used = time.perf_counter(), cpu_s()
    connection = duckdb.connect()
    connection.execute("set memory_limit = '4GB'")
    connection.execute(f"set temp_directory = '{folder / 'duckdb.tmp'}'")
    records = _results(folder)
    found = connection.execute(
        "select best, count(*) from (select row, min(verdict) as best from records where kind = 2 group by row)"
        " group by best"
    ).fetchall()
    del records
    counts = dict(found)
    return {
        "accepted": counts.get(1, 0),
        "bounced": counts.get(2, 0),
        "states_s": round(time.perf_counter() - began, 1),
        "cpu_s": round(cpu_s() - used, 1),
    }


def one(way: str, folder: Path, processes: int) -> None:
    """Run one way and print a JSON line; what `main` starts."""
    peaks = Peaks()
    peaks.start()
    match way:
        case "accounting":
            told = ours(folder, processes, write=False)
        case "recipients":
            told = ours(folder, processes, write=True)
        case "polars":
            told = with_polars(folder)
        case "duckdb":
            told = with_duckdb(folder)
        case _:
            raise SystemExit(f"no way {way}")
    told.update(peaks.end())
    print(json.dumps(told))


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rows", type=int, default=1_000_000)
    options.add_argument("--folder", type=Path, default=Path("bench-merge"))
    options.add_argument("--processes", type=int, default=2)
    options.add_argument("--replies", choices=["refusals", "all"], default="refusals", help="whose texts are logged")
    options.add_argument("--ways", default="accounting,recipients,polars,duckdb")
    options.add_argument("--one", help=argparse.SUPPRESS)
    chosen = options.parse_args()
    folder = chosen.folder / f"{chosen.rows}-{chosen.replies}"
    if chosen.one:
        one(chosen.one, folder, chosen.processes)
        return
    planted = make(folder, chosen.rows, chosen.replies, chosen.processes)
    size = sum(path.stat().st_size for path in folder.glob("*.arrows"))
    print(f"{chosen.rows:,} rows, {planted['records']:,} records in {LOGS} logs, {size / 1e6:,.0f} MB")
    print("planted    ", json.dumps(planted))
    for way in chosen.ways.split(","):
        tell(f"running {way}")
        command = [sys.executable, "-m", "benchmarks.merge", "--one", way, "--rows", str(chosen.rows)]
        command += ["--folder", str(chosen.folder), "--processes", str(chosen.processes), "--replies", chosen.replies]
        ran = subprocess.run(
            command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": "."}, check=False
        )
        if ran.returncode:
            print(f"{way:11} failed:\n{ran.stderr}")
            continue
        told = json.loads(ran.stdout)
        if way in ("accounting", "recipients"):
            wrong = [
                key for key in ("accepted", "bounced", "in_doubt", "unsent", "duplicates") if told[key] != planted[key]
            ]
            told["checked"] = "as planted" if not wrong else f"WRONG: {', '.join(wrong)}"
        print(f"{way:11}", json.dumps(told))


if __name__ == "__main__":
    main()
