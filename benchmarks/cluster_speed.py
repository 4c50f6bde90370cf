"""How soon a fresh machine sends, and how long a campaign takes when one machine is slow. Run by benchmarks/cluster.py.

`start`: a machine that knows the store's URL and its partition alone; the time from the command to the first message at
the sink, for a partition of so many rows.

`slow`: machines of one speed and one that is ten times slower, each slowed at a sink of its own that greets, answers
and takes by a delay. The bound is all rows over the sum of the speeds, which are measured over the middle of the run;
what is above it was lost at the end, where fast machines wait for what the slow one has in hand.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from engine.rehearse.record import read_record
from engine.rehearse.running import RunningSink, run_sink_in_process
from engine.rehearse.sink import SinkSettings
from tests.control.postgres_server import PostgresServer

ROOT = Path(__file__).parents[1]


class Site:
    """A planned campaign in a folder, and machines that send it."""

    def __init__(self, folder: Path, server: PostgresServer, name: str) -> None:
        self.folder, self.campaign = folder, folder / "campaign"
        self.id = f"{name}-{os.getpid()}"
        self.url = f"{server.url}?campaign={self.id}"
        self.environ = {**os.environ, "PYTHONPATH": str(ROOT)}

    def engine(self, *words: str) -> str:
        """Run a command to its end; what it said."""
        done = subprocess.run(
            [sys.executable, "-m", "engine", *words],
            cwd=self.folder, env=self.environ, capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode not in (0, 3, 4):
            raise SystemExit(f"engine {' '.join(words)}: {done.returncode}\n{done.stdout}{done.stderr}")
        return done.stdout + done.stderr

    def plan(self, rows: int, partitions: int, batch_rows: int, delivery: str, lease_s: float = 10.0) -> None:
        """A short letter to so many rows."""
        self.engine("init")
        for kind in ("txt", "html"):
            (self.campaign / "templates" / f"letter.{kind}").write_text("Hello {{ first_name }}!\n", "utf-8")
        write_list(self.campaign / "list.parquet", rows, batch_rows)
        (self.campaign / "campaign.toml").write_text(
            f'[campaign]\nid = "{self.id}"\n[list]\nbatch_rows = {batch_rows}\n'
            '[message]\nfrom_address = "news@example.com"\nsubject = "Hello"\n'
            'text = "templates/letter.txt"\nhtml = "templates/letter.html"\n'
            f'[delivery]\ntls = "off"\n{delivery}[control]\nlease = "{lease_s:g}s"\n',
            "utf-8",
        )
        self.engine("plan", "list.parquet", "--partitions", str(partitions), "--control", self.url)

    def send(self, machine: int, *words: str) -> subprocess.Popen[bytes]:
        """Start a machine."""
        with (self.folder / f"machine-{machine}.out").open("ab") as log:
            command = ["send", "--partition", str(machine), "--campaign", str(self.folder / f"machine-{machine}")]
            command += ["--control", self.url, "--name", f"machine-{machine}", "--log-format", "json", "--yes", *words]
            return subprocess.Popen(
                [sys.executable, "-m", "engine", *command],
                cwd=self.folder, env=self.environ, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip


def write_list(path: Path, rows: int, group_rows: int = 10_000) -> None:
    """A list of so many people, in row groups of so many."""
    schema = pa.schema([("id", pa.int64()), ("email", pa.string()), ("first_name", pa.string())])
    with pq.ParquetWriter(path, schema) as to:
        for start in range(0, rows, 500_000):
            ids = pa.array(np.arange(start, min(rows, start + 500_000)))
            text = ids.cast(pa.string())
            emails = pc.binary_join_element_wise("person", text, "@example.com", "")
            to.write_table(pa.table([ids, emails, pc.binary_join_element_wise("Name", text, " ")], schema),
                           row_group_size=group_rows)  # fmt: skip


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill a machine's group and wait for it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def run_start(rows: int, processes: int, tries: int) -> dict[str, object]:
    """Seconds from the command to the first message, the machine's folder empty each time."""
    server, folder = PostgresServer(fsync=True), Path(tempfile.mkdtemp(prefix="rowpost-start-"))
    took, cpu = [], []
    try:
        with run_sink_in_process(SinkSettings()) as sink:
            site = Site(folder, server, "start")
            site.plan(rows, 1, 10_000, f'relay = "smtp://{sink.host}:{sink.port}"\nmessages_per_second = 50\n')
            for _ in range(tries):
                had, began = sink.counts().messages, time.monotonic()
                process = site.send(0, "--processes", str(processes))
                while sink.counts().messages == had and process.poll() is None:
                    time.sleep(0.01)
                took.append(round(time.monotonic() - began, 2))
                cpu.append(round(_group_cpu_s(process.pid), 2))
                end(process)
                shutil.rmtree(folder / "machine-0")
                # Whoever comes next must not wait for the lease of the one before.
                server.execute(f"UPDATE \"{_schema(site.id)}\".incarnation SET state = 'ended'")
                server.execute(f'DELETE FROM "{_schema(site.id)}".share')
        return {"rows": rows, "processes": processes, "first_attempt_after_s": took, "cpu_s_of_all_processes": cpu}
    finally:
        server.remove()
        shutil.rmtree(folder, ignore_errors=True)


def _schema(campaign_id: str) -> str:
    from engine.control.postgres_link import schema_of

    return schema_of(campaign_id)


def _group_cpu_s(group: int) -> float:
    """CPU seconds of the living processes of a group."""
    ticks = os.sysconf("SC_CLK_TCK")
    total = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            if int(fields[2]) == group:
                total += int(fields[11]) + int(fields[12])
    return total / ticks


def run_slow(rows: int, machines: int, delay_s: float, factor: float, batch_rows: int) -> dict[str, object]:
    """Total time against what the sum of the speeds allows."""
    server, folder = PostgresServer(fsync=True), Path(tempfile.mkdtemp(prefix="rowpost-slow-"))
    running: list[subprocess.Popen[bytes]] = []
    try:
        with contextlib.ExitStack() as stack:
            sinks: list[RunningSink] = []
            for machine in range(machines):
                delay = delay_s * (factor if machine == 0 else 1.0)
                settings = SinkSettings(record=folder / f"sink-{machine}.record", delay_s=delay)
                sinks.append(stack.enter_context(run_sink_in_process(settings)))
            site = Site(folder, server, "slow")
            first = f'relay = "smtp://{sinks[0].host}:{sinks[0].port}"\n'
            site.plan(rows, machines, batch_rows, f"{first}connections = {2 * machines}\npipeline_depth = 1\n")
            for machine in range(1, machines):  # where mail leaves is live: each machine has its own way out
                site.engine("batches", "--control", site.url)
                _fetch(site, machine, first, f'relay = "smtp://{sinks[machine].host}:{sinks[machine].port}"\n')
            running = [site.send(machine, "--processes", "1") for machine in range(machines)]
            for process in running:
                process.wait()
            times = [np.sort(read_record(folder / f"sink-{n}.record")["time_us"].to_numpy()) / 1e6
                     for n in range(machines)]  # fmt: skip
        return {**_judge(times, rows), "machines": machines, "slow_by": factor, "batch_rows": batch_rows,
                "exit_codes": [process.returncode for process in running]}  # fmt: skip
    finally:
        for process in running:
            end(process)
        server.remove()
        if "ROWPOST_KEEP" not in os.environ:
            shutil.rmtree(folder, ignore_errors=True)


def _fetch(site: Site, machine: int, old: str, new: str) -> None:
    """Fill a machine's folder as `send` does, and give it its own relay."""
    from engine.campaign import Campaign
    from engine.control.bundle import unpack
    from engine.control.opening import keep_url, open_shared

    campaign, store = Campaign(site.folder / f"machine-{machine}"), open_shared(site.url, None)
    unpack(store, campaign)
    keep_url(campaign, store.url)
    store.close()
    file = campaign.folder / "campaign.toml"
    file.write_text(file.read_text("utf-8").replace(old, new), "utf-8")


def _judge(times: list[np.ndarray], rows: int) -> dict[str, object]:
    """All machines are there from `start` on; speeds are those of the middle half of the time up to the end."""
    start, last = max(t[0] for t in times if len(t)), max(t[-1] for t in times if len(t))
    low, high = start + (last - start) * 0.2, start + (last - start) * 0.7
    speeds = [float(((t > low) & (t < high)).sum() / (high - low)) for t in times]
    left = sum(int((t >= start).sum()) for t in times)
    bound = left / sum(speeds)
    total = float(last - start)
    return {
        "rows": rows,
        "received": sum(len(t) for t in times),
        "messages_per_s": [round(speed, 1) for speed in speeds],
        "seconds": round(total, 2),
        "bound_seconds": round(float(bound), 2),
        "over": round(total / float(bound), 3),
        "ended_before_the_last_s": [round(float(last - t[-1]), 2) for t in times if len(t)],
    }


def show(result: dict[str, object]) -> None:
    """As JSON."""
    print(msgspec.json.format(msgspec.json.encode(result), indent=1).decode())
