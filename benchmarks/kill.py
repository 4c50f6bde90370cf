"""Kills senders and counts: nobody gets a message twice, nobody is lost, and how many are left in doubt.

    python benchmarks/kill.py [--runs 10] [--kills 4] [--rows 2000] [--processes 2] [--seed 1] [--json FILE]

Each run is a fresh campaign against a sink in a process of its own, which nobody kills. `engine send` is started, and
at a random moment a worker, the supervisor, or the whole process group gets SIGKILL; then `send` is run again, until
it ends by itself. At the end `engine merge-logs` is held against the record of the sink:

    twice        recipients that the sink took more than once                                       must be 0
    lost         accepted says the report, but the sink never had it                                must be 0
    unaccounted  the sink has it, but the report says neither accepted nor in doubt                 must be 0
    in doubt     what the report holds as in doubt; "there" is how many of these the sink has
    bound        what may be in doubt: for each kill and worker it hit, connections x pipeline depth, an intent group
                 of 256, and the results of 50 ms

Exit code 0 when every run kept its promises, 1 otherwise; the folder of a run that did not is kept and named.
Linux only: it reads /proc.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

sys.path.insert(0, str(Path(__file__).parents[1]))

from engine.compose.keys import write_new_keys
from engine.rehearse.record import read_record
from engine.rehearse.running import RunningSink, run_sink_in_process
from engine.rehearse.sink import SinkSettings

ROOT = Path(__file__).parents[1]
INTENT_GROUP = 256
RESULT_INTERVAL_S = 0.05
VICTIMS = ("worker", "supervisor", "group")

SETTINGS = """\
[campaign]
id = "kill"
[list]
batch_rows = 500
[message]
from_address = "news@example.com"
subject = "Hello {{{{ name }}}}"
text = "letter.txt"
[delivery]
relay = "{url}"
tls = "off"
connections = {connections}
pipeline_depth = {depth}
chunking = {chunking}
[retry]
plan = [0.3, 0.6]
max_age = "10m"
[log]
durability = "{durability}"
"""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What one run is made of."""

    rows: int = 2000
    kills: int = 4
    processes: int = 2
    connections: int = 4
    depth: int = 4
    chunking: bool = True
    delay_s: float = 0.02  # round trip: there is always something in flight
    durability: str = "process"
    patience_s: float = 120.0


class Outcome(msgspec.Struct, kw_only=True):
    """What came of one run."""

    seed: int
    kills: dict[str, int]
    sends: int = 0
    seconds: float = 0.0
    rows: int = 0
    outcomes: dict[str, int] = {}
    twice: int = 0
    lost: int = 0
    unaccounted: int = 0
    in_doubt: int = 0
    in_doubt_there: int = 0
    bound: int = 0
    problems: list[str] = []

    @property
    def kept_its_promises(self) -> bool:
        """Nobody twice, nobody lost, everybody accounted for, doubt within its bound."""
        return not (self.twice or self.lost or self.unaccounted or self.problems) and self.in_doubt <= self.bound


def write_campaign(folder: Path, plan: Plan, url: str, rng: random.Random) -> Path:
    """A campaign of its own and its list, some rows steered to be deferred or refused; returns the list."""
    campaign = folder / "campaign"
    (campaign / "keys").mkdir(parents=True)
    campaign.chmod(0o700)
    write_new_keys(campaign / "keys" / "secret.keys")
    text = SETTINGS.format(
        url=url,
        connections=plan.connections,
        depth=plan.depth,
        chunking=str(plan.chunking).lower(),
        durability=plan.durability,
    )
    (campaign / "campaign.toml").write_text(text)
    (campaign / "letter.txt").write_text("Dear {{ name }},\n\nthis is letter {{ id }}.\n")
    kinds = ["r"] * 96 + ["451-once+", "451-twice+", "452-once-dot+", "550+"]
    addresses = [f"{rng.choice(kinds)}{number}@example.org" for number in range(plan.rows)]
    table = pa.table(
        {"id": range(plan.rows), "email": addresses, "name": [f"Reader {number}" for number in range(plan.rows)]}
    )
    path = folder / "list.parquet"
    pq.write_table(table, path, row_group_size=100)
    return path


def engine(folder: Path, *words: str) -> subprocess.Popen[bytes]:
    """The command, in a process group of its own, its output appended to engine.log."""
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    with (folder / "engine.log").open("ab") as log:
        log.write(f"\n$ engine {' '.join(words)}\n".encode())
        log.flush()
        return subprocess.Popen(
            [sys.executable, "-m", "engine", *words],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": paths},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def workers_of(pid: int) -> list[int]:
    """The worker processes of a supervisor."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return [int(child) for child in children if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes()]
    except (FileNotFoundError, ProcessLookupError):
        return []


def kill(sender: subprocess.Popen[bytes], victim: str, rng: random.Random) -> int:
    """SIGKILL to the victim; returns how many workers can have lost something by it, 0 where there was no victim."""
    workers = workers_of(sender.pid)
    try:
        if victim == "worker":
            if not workers:
                return 0
            os.kill(rng.choice(workers), signal.SIGKILL)
            return 1
        if victim == "supervisor":
            os.kill(sender.pid, signal.SIGKILL)
        else:
            os.killpg(sender.pid, signal.SIGKILL)
    except ProcessLookupError:
        return 0
    return max(1, len(workers))


def wait_for_mail(sink: RunningSink, sender: subprocess.Popen[bytes], more_than: int, patience_s: float) -> bool:
    """Whether the sink took more messages while the sender ran."""
    end = time.monotonic() + patience_s
    while time.monotonic() < end and sender.poll() is None:
        if sink.counts().messages > more_than:
            return True
        time.sleep(0.01)
    return False


def send_with_kills(folder: Path, plan: Plan, sink: RunningSink, rng: random.Random, outcome: Outcome) -> None:
    """Send, kill, send again, until a `send` ends by itself with code 0."""
    left = plan.kills
    per_worker = plan.connections * plan.depth + INTENT_GROUP
    share_s = plan.rows * plan.delay_s / (plan.connections * plan.depth) / (plan.kills + 1)
    end = time.monotonic() + plan.patience_s
    while time.monotonic() < end:
        before = sink.counts().messages
        began = time.monotonic()
        outcome.sends += 1
        sender = engine(folder, "send", "--partition", "0", "--processes", str(plan.processes))
        while left and sender.poll() is None:
            # One kill in six comes while the processes still start.
            if rng.random() < 1 / 6:
                time.sleep(rng.uniform(0.0, 1.5))
            else:
                wait_for_mail(sink, sender, before, 20.0)
                time.sleep(rng.uniform(0.0, 1.6 * share_s))
            if sender.poll() is not None:
                break
            victim = rng.choice(VICTIMS)
            hit = kill(sender, victim, rng)
            if hit:
                left -= 1
                outcome.kills[victim] = outcome.kills.get(victim, 0) + 1
                elapsed = max(0.1, time.monotonic() - began)
                rate = (sink.counts().messages - before) / elapsed
                outcome.bound += hit * (per_worker + int(rate * RESULT_INTERVAL_S) + 1)
            before = sink.counts().messages
            if victim != "worker":
                break
        try:
            code = sender.wait(max(1.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(sender.pid, signal.SIGKILL)
            sender.wait()
            outcome.problems.append(f"send hung for {plan.patience_s:g} s")
            return
        if code == 0:
            return
        if code not in (3, 75, -signal.SIGKILL):
            outcome.problems.append(f"send ended with {code}")
            return
        if code == 75:
            time.sleep(0.2)  # workers of the killed supervisor still finish what is in flight
    outcome.problems.append("never done")


def compare(folder: Path, record: Path, outcome: Outcome) -> None:
    """Hold the report against the record of the sink."""
    merge = engine(folder, "merge-logs")
    code = merge.wait(60)
    if code not in (0, 4):
        outcome.problems.append(f"merge-logs ended with {code}")
        return
    report = folder / "campaign" / "report"
    summary = json.loads((report / "summary.json").read_text())
    outcome.rows = summary["rows"]
    outcome.outcomes = {name: count for name, count in summary["outcomes"].items() if count}
    if sum(outcome.outcomes.values()) != outcome.rows:
        outcome.problems.append(f"outcomes add up to {sum(outcome.outcomes.values())} of {outcome.rows} rows")
    rows = pq.read_table(report / "recipients.parquet", columns=["address", "outcome"]).to_pylist()
    if len(rows) != outcome.rows:
        outcome.problems.append(f"recipients.parquet has {len(rows)} of {outcome.rows} rows")
    by_outcome: dict[str, set[str]] = {}
    for row in rows:
        by_outcome.setdefault(row["outcome"], set()).add(row["address"])
    taken = Counter(read_record(record)["recipient"].to_pylist())
    accepted, doubtful = by_outcome.get("accepted", set()), by_outcome.get("in_doubt", set())
    outcome.twice = sum(count > 1 for count in taken.values())
    outcome.lost = len(accepted - set(taken))
    outcome.unaccounted = len(set(taken) - accepted - doubtful)
    outcome.in_doubt = len(doubtful)
    outcome.in_doubt_there = len(doubtful & set(taken))
    unfinished = outcome.outcomes.get("unsent", 0) + outcome.outcomes.get("deferred", 0)
    if unfinished and not outcome.problems:
        outcome.problems.append(f"send said done, but {unfinished} rows are not")


def run_once(folder: Path, plan: Plan, seed: int) -> Outcome:
    """One campaign, killed and resumed."""
    rng = random.Random(seed)
    outcome = Outcome(seed=seed, kills={})
    began = time.monotonic()
    record = folder / "sink.tsv"
    with run_sink_in_process(SinkSettings(record=record, delay_s=plan.delay_s)) as sink:
        path = write_campaign(folder, plan, sink.url, rng)
        code = engine(folder, "plan", path.name).wait(60)
        if code != 0:
            outcome.problems.append(f"plan ended with {code}")
        else:
            send_with_kills(folder, plan, sink, rng, outcome)
            compare(folder, record, outcome)
    outcome.seconds = round(time.monotonic() - began, 2)
    return outcome


def table(outcomes: list[Outcome]) -> str:
    """One line a run and a sum."""
    head = f"{'seed':>6} {'kills w/s/g':>12} {'sends':>5} {'sec':>6} {'rows':>7} {'twice':>5} {'lost':>5} {'unacc.':>6}"
    lines = [head + f" {'in doubt':>8} {'there':>6} {'bound':>6}"]
    for outcome in outcomes:
        kills = "/".join(str(outcome.kills.get(victim, 0)) for victim in VICTIMS)
        lines.append(
            f"{outcome.seed:>6} {kills:>12} {outcome.sends:>5} {outcome.seconds:>6.1f} {outcome.rows:>7}"
            f" {outcome.twice:>5} {outcome.lost:>5} {outcome.unaccounted:>6} {outcome.in_doubt:>8}"
            f" {outcome.in_doubt_there:>6} {outcome.bound:>6}"
            + (f"  {'; '.join(outcome.problems)}" if outcome.problems else "")
        )
    total = Counter[str]()
    for outcome in outcomes:
        total.update(outcome.kills)
    sums = [sum(getattr(outcome, name) for outcome in outcomes) for name in ("twice", "lost", "unaccounted")]
    doubt, there = (sum(getattr(o, name) for o in outcomes) for name in ("in_doubt", "in_doubt_there"))
    lines.append(
        f"{len(outcomes)} runs, {sum(total.values())} kills ("
        + ", ".join(f"{total[victim]} of a {victim}" for victim in VICTIMS)
        + f"): {sums[0]} twice, {sums[1]} lost, {sums[2]} unaccounted for; {doubt} in doubt, of which the sink had"
        f" {there}; {sum(outcome.kept_its_promises for outcome in outcomes)} runs kept every promise"
    )
    return "\n".join(lines)


def main() -> None:
    """Run, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10, help="200 for the figures of benchmarks/README.md")
    parser.add_argument("--kills", type=int, default=4)
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--connections", type=int, default=4)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--no-chunking", action="store_true")
    parser.add_argument("--durability", choices=["disk", "process"], default="process")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    plan = Plan(
        rows=options.rows,
        kills=options.kills,
        processes=options.processes,
        connections=options.connections,
        depth=options.depth,
        chunking=not options.no_chunking,
        durability=options.durability,
    )
    outcomes: list[Outcome] = []
    began = time.monotonic()
    # Ctrl-C ends the series early and still tells what the runs so far gave.
    with contextlib.suppress(KeyboardInterrupt):
        for seed in range(options.seed, options.seed + options.runs):
            folder = Path(tempfile.mkdtemp(prefix=f"rowpost-kill-{seed}-"))
            outcomes.append(run_once(folder, plan, seed))
            if outcomes[-1].kept_its_promises:
                shutil.rmtree(folder, ignore_errors=True)
            else:
                print(f"seed {seed}: {outcomes[-1]}\n  kept in {folder}", file=sys.stderr)
            each = (time.monotonic() - began) / len(outcomes)
            left = each * (options.runs - len(outcomes))
            print(f"{len(outcomes)} of {options.runs} runs, {left / 60:.0f} min left", file=sys.stderr)
    print(table(outcomes))
    if options.json is not None:
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode({"plan": plan, "runs": outcomes})))
    sys.exit(0 if all(outcome.kept_its_promises for outcome in outcomes) else 1)


if __name__ == "__main__":
    main()
