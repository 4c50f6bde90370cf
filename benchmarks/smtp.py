"""What one core sends: our transport and whole worker beside smtp-source, nodemailer, aiosmtplib and a Postfix relay.

    benchmarks/peers.sh                                     installs the peers, once
    python benchmarks/smtp.py                               quick: seconds, to see that it runs
    python benchmarks/smtp.py --full --json FILE --picture engine/guide/img/smtp.svg
    python benchmarks/smtp.py --only transport --sizes 2048

Sender pinned on the first core, sink on the last; the rows of a group alternate, each repeated; medians. The measure is
messages per CPU second (user and system) of the sender, which does not depend on the sink's speed or on other load;
the wall rate stands beside it. On loopback the sender's system time includes the receiver's half of TCP.

What happens once is left out: our senders and nodemailer take their CPU from when all connections are up; of the whole
worker a run of a twentieth is subtracted; smtp-source, which starts in a millisecond and connects as it goes, is
counted whole.

smtp-source (Postfix's own load generator, C, constant text) works in lock-step, four round trips and some twenty system
calls a message: say so wherever the ratio is quoted. 87 % of its time is the kernel's.

The delaying sink holds every reply back for the round trip. It models latency, and neither congestion window nor
bandwidth: on a real path BDAT windows are limited by those.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

HERE = Path(__file__).parent
SENDERS = HERE / "smtp_senders.py"
CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [0]
Result = dict[str, float]
Sending = Callable[[int, int, int], Result]  # port, messages, size


def pinned(core: int, *command: object) -> list[str]:
    words = [str(word) for word in command]
    return ["taskset", "-c", str(core), *words] if shutil.which("taskset") else words


# ---- the sink


class Sink:
    """The C sink, compiled here."""

    def __init__(self, folder: Path) -> None:
        compiler = shutil.which("cc") or shutil.which("gcc")
        if compiler is None:
            raise SystemExit("no C compiler: benchmarks/peers.sh installs one")
        self.program = folder / "sink"
        source = str(HERE / "sink.c")
        with_tls = [compiler, "-O2", "-DWITH_TLS", "-o", str(self.program), source, "-lssl", "-lcrypto"]
        self.has_tls = subprocess.run(with_tls, capture_output=True).returncode == 0
        if not self.has_tls:
            subprocess.run([compiler, "-O2", "-o", str(self.program), source], check=True)
        if self.has_tls:
            from engine.rehearse.certificate import make_certificate

            self.certificate, self.key = make_certificate("localhost", folder)

    @contextlib.contextmanager
    def running(self, *options: object, tls: bool = False) -> Iterator[tuple[int, Callable[[], int]]]:
        """Its port, and a function that ends it and says how many messages it took."""
        words = [self.program, *options, *(["-t", self.certificate, "-k", self.key] if tls else [])]
        process = subprocess.Popen(pinned(CORES[-1], *words), stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        port = int(process.stdout.readline().split()[1])
        counted: list[int] = []

        def stop() -> int:
            process.send_signal(signal.SIGTERM)
            counted.append(int(process.communicate(timeout=10)[0].split()[1]))
            return counted[0]

        try:
            yield port, stop
        finally:
            if not counted:
                process.kill()
                process.wait()


# ---- senders


def python_sender(name: str, **options: object) -> Sending:
    words = [
        f"--{key.replace('_', '-')}" + (f"={value}" if value is not True else "") for key, value in options.items()
    ]

    def run(port: int, messages: int, size: int) -> Result:
        command = [sys.executable, SENDERS, name, f"--port={port}", f"--messages={messages}", f"--size={size}", *words]
        return json.loads(subprocess.run(pinned(CORES[0], *command), check=True, capture_output=True, text=True).stdout)

    return run


def smtp_source(connections: int = 50) -> Sending | None:
    program = shutil.which("smtp-source", path=os.environ.get("PATH", "") + ":/usr/sbin")
    if program is None:
        return None

    def run(port: int, messages: int, size: int) -> Result:
        before, at = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        command = [program, "-d", "-s", connections, "-m", messages, "-l", size, f"127.0.0.1:{port}"]
        # With a delaying sink it complains at QUIT, all its messages delivered: the sink's count is what is checked.
        subprocess.run(pinned(CORES[0], *command), check=False, capture_output=True)
        after, wall = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter() - at
        return {
            "messages": messages,
            "wall_s": wall,
            "user_s": after.ru_utime - before.ru_utime,
            "system_s": after.ru_stime - before.ru_stime,
        }

    return run


def nodemailer(peers: Path, connections: int = 50) -> Sending | None:
    node = shutil.which("node")
    if node is None or not (peers / "node_modules" / "nodemailer").exists():
        return None

    def run(port: int, messages: int, size: int) -> Result:
        command = [node, HERE / "nodemailer_sender.cjs", peers, port, messages, size, connections]
        return json.loads(subprocess.run(pinned(CORES[0], *command), check=True, capture_output=True, text=True).stdout)

    return run


def postfix_relay() -> Sending | None:
    """Postfix delivering what it has queued, all its processes counted; receiving it is not."""
    try:
        from tests.peers.postfix import missing_postfix, running_postfix
    except ImportError:
        return None
    source = smtp_source(10)
    if missing_postfix() or source is None:
        return None

    def run(port: int, messages: int, size: int) -> Result:
        overrides = {"relayhost": f"[127.0.0.1]:{port}", "defer_transports": "smtp relay", "mydestination": "",
                     "virtual_mailbox_domains": "", "virtual_mailbox_base": "", "inet_protocols": "ipv4",
                     "default_transport": "smtp", "relay_transport": "smtp", "minimal_backoff_time": "300s",
                     "default_process_limit": "50", "default_destination_concurrency_limit": "50",
                     "initial_destination_concurrency": "50", "smtpd_recipient_restrictions": "permit"}  # fmt: skip
        with running_postfix(overrides) as postfix:
            folder = postfix.folder
            source(postfix.port, messages, size)
            config = next(path.parent for path in folder.rglob("main.cf"))
            subprocess.run(["postconf", "-c", config, "-e", "defer_transports="], check=True, capture_output=True)
            subprocess.run(["postfix", "-c", config, "reload"], check=True, capture_output=True)
            master = int((folder / "queue" / "pid" / "master.pid").read_text())
            for pid in _family(master):
                with contextlib.suppress(OSError):  # it may have ended since
                    os.sched_setaffinity(pid, {CORES[0]})
            before, at = _cpu_of_family(master), time.perf_counter()
            subprocess.run(["postqueue", "-c", config, "-f"], check=True, capture_output=True)
            while _queued(folder) and time.perf_counter() - at < 120:
                time.sleep(0.05)
            wall = time.perf_counter() - at
            used = _cpu_of_family(master) - before
        return {"messages": messages, "wall_s": wall, "user_s": used, "system_s": 0.0}

    return run


def _queued(folder: Path) -> bool:
    """Whether a message is left in a queue; the folders that Postfix spreads them over stay."""
    queues = (folder / "queue" / name for name in ("deferred", "active", "incoming"))
    return any(path.is_file() for queue in queues for path in queue.rglob("*"))


def _family(master: int) -> list[int]:
    children = Path(f"/proc/{master}/task/{master}/children")
    return [master, *(int(pid) for pid in children.read_text().split())]


def _cpu_of_family(master: int) -> float:
    """CPU seconds of Postfix's master, of its children, and of those that have ended."""
    ticks = 0
    for number, pid in enumerate(_family(master)):
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12]) + (int(fields[13]) + int(fields[14]) if number == 0 else 0)
    return ticks / os.sysconf("SC_CLK_TCK")


# ---- the whole worker

CAMPAIGN = """\
[campaign]
id = "bench"
[message]
from_address = "news@sender.test"
subject = "{{{{ offer }}}} in {{{{ city }}}}"
text = "letter.txt"
html = "letter.html"
unsubscribe_url = "https://sender.test/u/{{token}}"
[delivery]
relay = "smtp://127.0.0.1:{port}"
tls = "off"
connections = 50
messages_per_connection = 1000000
pipeline_depth = {depth}
chunking = {chunking}
[log]
durability = "{durability}"
"""


def whole_worker(*, chunking: bool, durability: str = "disk", depth: int = 4) -> Sending:
    """`engine send` of a generated campaign with one worker. CPU of the run less that of a run of one twentieth of it.

    So what happens once (starting processes, compiling templates, sealing) is left out, as it is for the others.
    """

    def run(port: int, messages: int, size: int) -> Result:
        small = max(50, messages // 20)
        first = _send_campaign(port, small, size, chunking=chunking, durability=durability, depth=depth)
        second = _send_campaign(port, small + messages, size, chunking=chunking, durability=durability, depth=depth)
        return {key: second[key] - first[key] for key in second} | {"messages": messages, "extra": 2 * small}

    return run


def _send_campaign(port: int, rows: int, size: int, *, chunking: bool, durability: str, depth: int) -> Result:
    import polars as pl
    from smtp_senders import HTML_HEAD, HTML_LINE, TEXT, fields

    with tempfile.TemporaryDirectory(prefix="rowpost-bench-") as name:
        folder = Path(name)
        campaign = folder / "campaign"

        def engine(*words: object) -> None:
            command = pinned(CORES[0], sys.executable, "-m", "engine", *words, "--campaign", campaign)
            done = subprocess.run(command, cwd=HERE.parent, capture_output=True, text=True)
            if done.returncode:
                raise SystemExit(f"engine {words[0]}: exit {done.returncode}\n{done.stdout}\n{done.stderr}")

        pl.DataFrame(
            [{"id": row, "email": f"r{row}@rcpt{row % 50}.test"} | fields(row) for row in range(rows)]
        ).write_parquet(folder / "list.parquet", row_group_size=10_000)
        engine("init")
        (campaign / "campaign.toml").write_text(
            CAMPAIGN.format(port=port, chunking=str(chunking).lower(), durability=durability, depth=depth)
        )
        (campaign / "letter.txt").write_text(TEXT)
        html = HTML_HEAD + HTML_LINE * max(1, (size - 1500) // len(HTML_LINE)) + "</body></html>\n"
        (campaign / "letter.html").write_text(html)
        engine("plan", folder / "list.parquet")
        before, at = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        engine("send", "--processes", 1)
        after, wall = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter() - at
        return {
            "messages": rows,
            "wall_s": wall,
            "user_s": after.ru_utime - before.ru_utime,
            "system_s": after.ru_stime - before.ru_stime,
        }


# ---- groups of rows


class Row:
    """One sender in one setting."""

    def __init__(
        self,
        name: str,
        run: Sending | None,
        *,
        share: float = 1.0,  # of the messages: slow senders need fewer
        sink: tuple[object, ...] = (),
        tls: bool = False,
    ) -> None:
        self.name, self.run, self.share, self.sink, self.tls = name, run, share, sink, tls
        self.results: list[Result] = []

    @property
    def median(self) -> Result:
        per_cpu = [r["messages"] / max(1e-9, r["user_s"] + r["system_s"]) for r in self.results]
        per_wall = [r["messages"] / r["wall_s"] for r in self.results]
        return {
            "per_cpu_s": statistics.median(per_cpu),
            "per_wall_s": statistics.median(per_wall),
            "user_us": statistics.median(r["user_s"] / r["messages"] for r in self.results) * 1e6,
            "system_us": statistics.median(r["system_s"] / r["messages"] for r in self.results) * 1e6,
            "lowest": min(per_cpu),
            "highest": max(per_cpu),
        }


def measure(sink: Sink, rows: list[Row], messages: int, size: int, repeats: int) -> None:
    """Alternating; each run's count is checked against the sink's."""
    for _ in range(repeats):
        for row in rows:
            if row.run is None:
                continue
            count = max(20, int(messages * row.share))
            with sink.running(*row.sink, tls=row.tls) as (port, stop):
                result = row.run(port, count, size)
                extra = int(result.pop("extra", 0)) + int(result.pop("warm", 0))
                if (counted := stop()) != count + extra:
                    raise SystemExit(f"{row.name}: the sink counted {counted} messages of {count + extra}")
            row.results.append(result)
            print(".", end="", flush=True, file=sys.stderr)


def show(title: str, rows: list[Row], reference: str, record: dict[str, object]) -> None:
    base = next((row for row in rows if row.name == reference and row.results), None)
    print(f"\n{title}\n{'':44}{'msg/CPU s':>12}{'user µs':>9}{'sys µs':>8}{'msg/s wall':>12}{'ratio':>8}")
    table = record.setdefault(title, {})
    assert isinstance(table, dict)
    for row in rows:
        if not row.results:
            print(f"{row.name:44}{'absent':>12}")
            continue
        found = row.median
        ratio = found["per_cpu_s"] / base.median["per_cpu_s"] if base else float("nan")
        table[row.name] = found | {"ratio": ratio, "repeats": len(row.results)}
        print(
            f"{row.name:44}{found['per_cpu_s']:>12,.0f}{found['user_us']:>9.1f}{found['system_us']:>8.1f}"
            f"{found['per_wall_s']:>12,.0f}{ratio:>8.2f}"
        )


def per_core(sink: Sink, options: argparse.Namespace, record: dict[str, object]) -> None:
    for size in options.sizes:
        rows = [
            Row(SOURCE, smtp_source()),
            Row("transport, PIPELINING", python_sender("ours"), sink=("-b",)),
            Row("transport, PIPELINING, uvloop", python_sender("ours", loop="uvloop"), sink=("-b",)),
            Row("transport, CHUNKING", python_sender("ours", chunking=True)),
            Row("transport, CHUNKING, uvloop", python_sender("ours", chunking=True, loop="uvloop")),
            Row("transport, lock-step", python_sender("ours", lock_step=True), share=0.3, sink=("-n", "-b")),
        ]
        measure(sink, rows, options.messages, size, options.repeats)
        show(f"Transport, {size:,} bytes", rows, SOURCE, record)


def whole(sink: Sink, options: argparse.Namespace, record: dict[str, object]) -> None:
    for size in options.sizes:
        rows = [
            Row(SOURCE, smtp_source()),
            Row("whole worker, PIPELINING, depth 4", whole_worker(chunking=False), sink=("-b",)),
            Row("whole worker, PIPELINING, depth 16", whole_worker(chunking=False, depth=16), sink=("-b",)),
            Row("whole worker, CHUNKING, depth 4", whole_worker(chunking=True)),
            Row("whole worker, CHUNKING, depth 16", whole_worker(chunking=True, depth=16)),
            Row(
                "whole worker, CHUNKING, depth 16, log not synced",
                whole_worker(chunking=True, depth=16, durability="process"),
            ),
            Row("Postfix relay, delivery only", postfix_relay(), share=0.05),
            Row("nodemailer, pool, composed", nodemailer(options.peers), share=0.05),
            Row("Jinja2 + EmailMessage + aiosmtplib", python_sender("aiosmtplib"), share=0.02),
        ]
        measure(sink, rows, options.messages, size, options.repeats)
        show(f"Whole worker, {size:,} bytes", rows, SOURCE, record)


def with_tls(sink: Sink, options: argparse.Namespace, record: dict[str, object]) -> None:
    if not sink.has_tls:
        print("\nTLS: skipped, no OpenSSL headers to compile the sink with", file=sys.stderr)
        return
    for size in options.sizes:
        rows = [
            Row(SOURCE, smtp_source()),
            Row("TLS, PIPELINING", python_sender("ours", tls=True), sink=("-b",), tls=True),
            Row("TLS, PIPELINING, uvloop", python_sender("ours", tls=True, loop="uvloop"), sink=("-b",), tls=True),
            Row("TLS, CHUNKING", python_sender("ours", tls=True, chunking=True), tls=True),
            Row("TLS, CHUNKING, uvloop", python_sender("ours", tls=True, chunking=True, loop="uvloop"), tls=True),
        ]
        measure(sink, rows, options.messages, size, options.repeats)
        show(f"TLS against smtp-source's plain rate, {size:,} bytes", rows, SOURCE, record)


def round_trips(sink: Sink, options: argparse.Namespace, record: dict[str, object]) -> None:
    """One connection, 50 ms: messages per round trip."""
    delay_ms = 50
    count = 60 if options.full else 20  # the first envelope costs a round trip of its own
    cases = [
        ("smtp-source, lock-step", smtp_source(1), count // 2, ("-b",)),
        ("nodemailer", nodemailer(options.peers, 1), count // 2, ("-b",)),
        ("PIPELINING", python_sender("ours", connections=1), count, ("-b",)),
        ("CHUNKING, depth 4", python_sender("ours", connections=1, chunking=True), count * 4, ()),
        ("CHUNKING, depth 16", python_sender("ours", connections=1, chunking=True, depth=16), count * 16, ()),
    ]
    title = f"Messages per round trip, {delay_ms} ms, one connection, 2,048 bytes"
    print(f"\n{title}")
    table: dict[str, float] = {}
    record[title] = table
    for name, run, messages, flags in cases:
        if run is None:
            print(f"{name:44}{'absent':>12}")
            continue
        rates = []
        for _ in range(options.repeats):
            with sink.running("-d", delay_ms, *flags) as (port, _stop):
                rates.append(messages / (run(port, messages, 2048)["wall_s"] * 1000 / delay_ms))
        table[name] = statistics.median(rates)
        print(f"{name:44}{table[name]:>12.2f}")


def memory(sink: Sink, options: argparse.Namespace, record: dict[str, object]) -> None:
    connections = 2000
    with sink.running() as (port, _stop):
        found = python_sender("memory", connections=connections)(port, 0, 0)
    title = "Memory"
    record[title] = found
    print(f"\n{title}: {connections} open connections, {found['resident_bytes_each']:,.0f} bytes each in this process")


SOURCE = "smtp-source (C, lock-step, fixed text)"
GROUPS: dict[str, Callable[[Sink, argparse.Namespace, dict[str, object]], None]] = {
    "transport": per_core,
    "tls": with_tls,
    "round-trips": round_trips,
    "memory": memory,
    "whole": whole,
}


def draw(record: dict[str, object], path: Path) -> None:
    """Messages per CPU second of every whole sender that was measured, by size."""
    import altair as alt
    import polars as pl

    rows = [
        {"sender": name, "size": title.rpartition(", ")[2], "per_cpu_s": found["per_cpu_s"], "ours": "worker" in name}
        for title, table in record.items()
        if title.startswith("Whole worker") and isinstance(table, dict)
        for name, found in table.items()
    ] or [
        {
            "sender": name,
            "size": title.rpartition(", ")[2],
            "per_cpu_s": found["per_cpu_s"],
            "ours": "transport" in name,
        }
        for title, table in record.items()
        if title.startswith("Transport") and isinstance(table, dict)
        for name, found in table.items()
    ]
    if not rows:
        print("nothing measured that the picture shows (groups whole and transport)", file=sys.stderr)
        return
    base = alt.Chart(pl.DataFrame(rows)).encode(
        y=alt.Y("sender:N", sort="-x", title=None, axis=alt.Axis(labelLimit=320)),
        x=alt.X("per_cpu_s:Q", title="messages per CPU second of the sender", axis=alt.Axis(format="~s")),
    )
    bars = base.mark_bar().encode(
        color=alt.Color("ours:N", scale=alt.Scale(domain=[True, False], range=["#2a6f97", "#b9b9b9"]), legend=None)
    )
    labels = base.mark_text(align="left", dx=4).encode(text=alt.Text("per_cpu_s:Q", format=",.0f"))
    chart = (bars + labels).properties(width=460, height=alt.Step(24)).facet(row=alt.Row("size:N", title=None))
    path.parent.mkdir(parents=True, exist_ok=True)
    chart.configure_view(stroke=None).save(str(path))
    print(f"\n{path}", file=sys.stderr)


def main() -> None:
    default_peers = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "rowpost-peers"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--full", action="store_true", help="30,000 messages a run, five repeats; some 15 minutes alone on a machine"
    )
    parser.add_argument("--messages", type=int)
    parser.add_argument("--repeats", type=int)
    parser.add_argument("--sizes", type=int, nargs="+", default=[2048, 20480])
    parser.add_argument("--only", choices=GROUPS, action="append", help="may be given several times")
    parser.add_argument("--peers", type=Path, default=default_peers, help="the folder of peers.sh")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--picture", type=Path, help=".svg or .png; needs the extra `charts`")
    parser.add_argument("--from-json", type=Path, help="draw the picture of an earlier run")
    options = parser.parse_args()
    options.messages = options.messages or (30_000 if options.full else 2_000)
    options.repeats = options.repeats or (5 if options.full else 1)
    record: dict[str, object] = {}
    failed: list[str] = []
    if options.from_json:
        record = json.loads(options.from_json.read_text())
    else:
        record["machine"] = {"cores": len(CORES), "python": sys.version.split()[0], "kernel": os.uname().release}
        with tempfile.TemporaryDirectory(prefix="rowpost-sink-") as folder:
            sink = Sink(Path(folder))
            for name in options.only or GROUPS:
                try:
                    GROUPS[name](sink, options, record)
                except (Exception, SystemExit) as problem:  # the other groups' minutes are not lost with it
                    failed.append(name)
                    print(f"\n{name}: {type(problem).__name__}: {problem}", file=sys.stderr)
                if options.json:
                    options.json.write_text(json.dumps(record, indent=1))
    if options.picture:
        draw(record, options.picture)
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
