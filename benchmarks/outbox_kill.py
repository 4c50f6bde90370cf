"""kill -9 at random moments while an application writes sign-ups: who got none, one or two, counted at the sink.

    python benchmarks/outbox_kill.py [--rows 5000] [--kills 20] [--beside] [--seed 1] [--json FILE]

Without `--beside` the victim is `engine serve-outbox`; with it `engine send`, whose campaign of `--bulk` rows goes on
beside the outbox: the whole process group, the supervisor alone, or the process that serves the outbox, in turn by
chance. After the last kill a server finishes what is left. Twice and lost must be 0; in doubt is what was on its way
at a kill.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.outbox import engine, prepare
from engine.control.outbox import Mail, Outbox
from engine.outbox import connect
from engine.rehearse.record import read_record
from engine.rehearse.running import run_sink_in_process
from engine.rehearse.sink import SinkSettings


def start(folder: Path, box: Outbox, *, beside: bool) -> subprocess.Popen[bytes]:
    """A server, or a sender that serves the outbox; it has its lease when this returns."""
    before = len(box.servers())
    words = ["send", "--campaign", "news", "--yes"] if beside else ["serve-outbox", "--campaign", "outbox"]
    process = engine(folder, *words, new_group=True)
    while len(box.servers()) == before and process.poll() is None:
        time.sleep(0.02)
    return process


def kill(box: Outbox, process: subprocess.Popen[bytes], who: str) -> None:
    """SIGKILL; `process` and what it started are dead afterwards."""
    if who == "outbox":
        alive = [server for server in box.servers() if server.state == "alive" and server.kind == "send"]
        with contextlib.suppress(ProcessLookupError, IndexError):
            os.kill(alive[-1].pid, signal.SIGKILL)
        time.sleep(0.3)
    if who == "supervisor":
        process.kill()
        time.sleep(0.3)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def run(rows: int, kills: int, bulk: int, seed: int, *, beside: bool) -> dict[str, object]:
    """The whole measurement."""
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        record = folder / "sink.record"
        with run_sink_in_process(SinkSettings(record=record)) as sink:
            prepare(folder, sink, bulk if beside else 1, 400, 10)
            settings = folder / "outbox" / "campaign.toml"
            delivery = f'[delivery]\nrelay = "{sink.url}"\ntls = "off"\n[outbox]\nlease = "3s"\n'
            settings.write_text(settings.read_text() + delivery)
            box = connect(folder / "outbox")
            written = 0
            victims: Counter[str] = Counter()
            for turn in range(kills):
                process = start(folder, box, beside=beside)
                until = time.monotonic() + rng.uniform(0.05, 1.0)
                most = rows * (turn + 1) // kills
                while time.monotonic() < until or written < most:
                    some = min(rng.randint(1, 50), max(0, most - written))
                    box.enqueue([_mail(n, rng.choice((1, 2, 3))) for n in range(written, written + some)])
                    written += some
                    time.sleep(0.005)
                who = rng.choice(("group", "supervisor", "outbox")) if beside else "server"
                victims[who] += 1
                kill(box, process, who)
            last = start(folder, box, beside=False)
            deadline = time.monotonic() + 300
            while any(count.state in ("queued", "sending", "waiting") for count in box.tally()):
                assert time.monotonic() < deadline, box.tally()
                time.sleep(0.1)
            last.terminate()
            last.wait()
            states = {row.address: row.state for row in box.rows(None, 0, rows)}
            box.close()
        taken = Counter(read_record(record)["recipient"].to_pylist())
    had = {address for address in taken if address.startswith("signup")}
    accepted = {address for address, state in states.items() if state == "accepted"}
    doubt = {address for address, state in states.items() if state == "in_doubt"}
    return {
        "written": written,
        "kills": dict(victims),
        "had one": len(had),
        "twice": sum(times > 1 for times in taken.values()),
        "lost": written - len(had | doubt),
        "accepted and not had": len(accepted - had),
        "in doubt": len(doubt),
        "of them had": len(doubt & had),
    }


def _mail(n: int, priority: int) -> Mail:
    return Mail(address=f"signup{n}@example.com", priority=priority, subject="Welcome", text="Hello")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=5000)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--beside", action="store_true")
    parser.add_argument("--bulk", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    told = run(asked.rows, asked.kills, asked.bulk, asked.seed, beside=asked.beside)
    print(json.dumps(told, indent=1))
    if asked.json:
        asked.json.write_text(json.dumps(told, indent=1))
    sys.exit(1 if told["twice"] or told["lost"] or told["accepted and not had"] else 0)


if __name__ == "__main__":
    main()
