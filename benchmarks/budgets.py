"""Budgets by count at the sink: many processes, one provider, limits of connections and rates; nothing is asked of us.

    python benchmarks/budgets.py [--processes 8] [--connections 1,2,5,20,500] [--rates 10/60,1000/60] [--full]

For each limit a fresh direct campaign goes to a played provider on loopback that takes whatever comes. Counted there:

    connections   the most that stood open at one time                                      must not exceed the limit
    window        the most messages in any window of the limit's length, wherever laid      must not exceed the limit
    used          messages over what the rate allows between the first and the last one     at least 98 %

A rate is COUNT/SECONDS. Budgets files know minutes and longer; a window of another length is reached by the setting
that has it, so 60 and 3600 are what can be asked for. `--full` adds 1/60 over four minutes. Exit code 1 when a limit
was exceeded or less than 98 % of a rate was used.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

sys.path.insert(0, str(Path(__file__).parents[1]))

from engine.rehearse.counting import fullest_window, share_used
from engine.rehearse.internet import InternetSettings, run_internet, willing, zone_of
from engine.rehearse.models import World
from engine.rehearse.record import read_record

ROOT = Path(__file__).parents[1]
ADDRESS = "127.1.0.1"

SETTINGS = """\
[campaign]
id = "budgets"
[list]
batch_rows = 50
[message]
from_address = "news@example.com"
subject = "Hello"
text = "templates/short"
[delivery]
mode = "direct"
nameservers = ["{nameserver}"]
smtp_port = {port}
allow_private_hosts = true
"""


def engine(folder: Path, *words: str, timeout_s: float = 600) -> None:
    """Run the command; its output goes into engine.log."""
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    with (folder / "engine.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "engine", *words],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": paths},
            stdout=log,
            stderr=log,
        )
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            process.terminate()
            process.wait(30)


def run(name: str, budget: str, rows: int, processes: int, message_s: float, seconds: float) -> tuple[int, pa.Table]:
    """One campaign; the most connections and the record."""
    with tempfile.TemporaryDirectory(prefix="budgets-") as made:
        folder = Path(made)
        model = msgspec.structs.replace(willing("only"), message_s=message_s)
        zone = zone_of({"mx.only.test": ADDRESS}, {"only.test": "mx.only.test"})
        settings = InternetSettings(
            world=World(name, (model,)), zone=zone, addresses={"only": ADDRESS}, records=folder / "records"
        )
        with run_internet(settings) as net:
            engine(folder, "init")
            table = pa.table({"email": [f"r{n}@only.test" for n in range(rows)], "first_name": ["You"] * rows})
            pq.write_table(table, folder / "campaign" / "list.parquet", row_group_size=50)
            written = SETTINGS.format(nameserver=net.nameserver, port=net.port)
            (folder / "campaign" / "campaign.toml").write_text(written)
            (folder / "campaign" / "templates" / "short").write_text("Hello {{ first_name }}\n")
            (folder / "campaign" / "budgets.toml").write_text(
                f'[default]\n{budget}\n[source.one]\nbind = "127.0.0.2"\n'
            )
            engine(folder, "plan", "list.parquet")
            engine(folder, "send", "--processes", str(processes), "--yes", timeout_s=seconds)
            most = net.reports()["only"].sources
        if os.environ.get("SHOW"):
            print((folder / "engine.log").read_text())
        found = read_record(folder / "records" / "only.tsv")
        return max((source.most_connections for source in most.values()), default=0), found


def main() -> None:
    """Run them all and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--connections", default="1,2,5,20,500")
    parser.add_argument("--rates", default="10/60,1000/60")
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--seconds", type=float, default=130.0, help="how long a rate is measured")
    parser.add_argument("--full", action="store_true", help="one message a minute too, over four minutes")
    options = parser.parse_args()
    failed = False
    for limit in [int(text) for text in options.connections.split(",") if text]:
        began = time.perf_counter()
        budget = f"connections = {limit}\nmessages_per_connection = 100\nconnections_per_minute = 100000"
        most, found = run("connections", budget, options.rows, options.processes, 0.02, 600)
        good = most <= limit and len(found) == options.rows
        failed |= not good
        print(
            f"{limit} connections: {options.processes} processes, at most {most} open, {len(found)} messages "
            f"in {time.perf_counter() - began:.1f} s{'' if good else '  EXCEEDED OR LOST'}",
            flush=True,
        )
    rates = [text for text in options.rates.split(",") if text] + (["1/60"] if options.full else [])
    for text in rates:
        count, window_s = (int(part) for part in text.split("/"))
        key = {60: "minute", 3600: "hour"}[window_s]
        seconds = max(options.seconds, 4 * window_s / count)
        rows = int(count / window_s * seconds * 2) + 10
        most, found = run(
            "rate", f"messages_per_{key} = {count}\nconnections = 20", rows, options.processes, 0.0, seconds
        )
        times = found["time_us"].to_numpy()
        fullest, used = fullest_window(times, window_s), share_used(times, count / window_s)
        good = fullest <= count and used >= 0.98
        lasted = (times.max() - times.min()) / 1e6 if len(times) else 0.0
        failed |= not good
        print(
            f"{count} messages in {window_s} s: {options.processes} processes, at most {fullest} in a window, "
            f"{used:.1%} of the rate used over {lasted:.0f} s, {most} connections"
            f"{'' if good else '  NOT GOOD'}",
            flush=True,
        )
    sys.exit(failed)


if __name__ == "__main__":
    main()
