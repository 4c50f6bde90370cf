"""What five machines send with TLS, 20 kB a message, one PostgreSQL behind them; CPU by part. Run by cluster.py.

Each machine is a process group with one worker, all on this machine, and so are the database and the receiver (the C
sink of this folder): what is measured is what two cores do in all. CPU of senders is counted from when the first
message arrived; starting up and taking TLS sessions up is in it.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from pathlib import Path

from benchmarks.cluster_speed import Site, write_list
from benchmarks.smtp import Sink
from tests.control.postgres_server import PostgresServer

_TICKS = os.sysconf("SC_CLK_TCK")
_LINE = "<p>It is a long paragraph of plain words in a <i>newsletter</i> that many people read.</p>\n"


class Cpu:
    """CPU seconds by part, read every second from what lives; what ended keeps its last figure."""

    def __init__(self, database: int, sink: int) -> None:
        self._database, self._sink = database, sink
        self._groups: set[int] = set()
        self._seen: dict[int, tuple[str, float]] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def follow(self, group: int) -> None:
        """A machine's process group."""
        self._groups.add(group)

    def _watch(self) -> None:
        while not self._stop.wait(1):
            self._look()

    def _look(self) -> None:
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = stat.read_text().rpartition(")")[2].split()
            except OSError:
                continue
            pid, parent, group = int(stat.parent.name), int(fields[1]), int(fields[2])
            part = (
                "supervisors" if pid in self._groups
                else "workers" if group in self._groups
                else "PostgreSQL" if self._database in (pid, parent)
                else "sink" if pid == self._sink
                else None
            )  # fmt: skip
            if part is not None:
                self._seen[pid] = (part, (int(fields[11]) + int(fields[12])) / _TICKS)

    def by_part(self) -> dict[str, float]:
        """Seconds so far."""
        self._look()
        total: dict[str, float] = {}
        for part, seconds in list(self._seen.values()):
            total[part] = total.get(part, 0.0) + seconds
        return total

    def close(self) -> None:
        self._stop.set()
        self._thread.join()


def run_rate(minutes: float, rate: int, machines: int, size: int, *, rsa: bool) -> dict[str, object]:
    """So long at `rate` messages a second over all machines (0: as fast as they go), and what was reached."""
    with tempfile.TemporaryDirectory(prefix="rowpost-rate-") as name:
        folder = Path(name)
        server = PostgresServer(fsync=True)
        try:
            sink = Sink(folder)
            if not sink.has_tls:
                raise SystemExit("no OpenSSL headers: `apt-get install libssl-dev`")
            with sink.running(tls=True) as (port, stop):
                return _run(folder, server, port, stop, minutes, rate, machines, size, rsa=rsa)
        finally:
            server.remove()


def _run(  # type: ignore[no-untyped-def]
    folder: Path, server: PostgresServer, port: int, stop, minutes: float, rate: int, machines: int, size: int,
    *, rsa: bool
) -> dict[str, object]:  # fmt: skip
    site = Site(folder, server, "rate")
    seconds = minutes * 60
    rows = int(seconds * (rate or 5000) * 1.2)
    site.engine("init")
    (site.campaign / "templates" / "letter.txt").write_text("Hello {{ first_name }}!\n", "utf-8")
    html = (
        "<html><body><p>Hello {{ first_name }}!</p>\n"
        + _LINE * max(1, (size - 1500) // len(_LINE))
        + "</body></html>\n"
    )
    (site.campaign / "templates" / "letter.html").write_text(html, "utf-8")
    write_list(site.campaign / "list.parquet", rows, 10_000)
    settings = (
        f'[campaign]\nid = "{site.id}"\n[list]\nbatch_rows = 10000\n'
        '[message]\nfrom_address = "news@example.com"\nsubject = "Hello"\n'
        'text = "templates/letter.txt"\nhtml = "templates/letter.html"\n'
        f'[delivery]\nrelay = "smtps://localhost:{port}"\nconnections = {20 * machines}\n'
        "messages_per_connection = 1000000\n" + (f"messages_per_second = {rate}\n" if rate else "")
    )
    if rsa:
        site.engine("dkim-key", "--domain", "example.com", "--selector", "s1")
        settings += '[[dkim]]\ndomain = "example.com"\nselector = "s1"\nkey_file = "keys/dkim-s1.pem"\n'
    (site.campaign / "campaign.toml").write_text(settings, "utf-8")
    site.engine("plan", "list.parquet", "--partitions", str(machines), "--control", site.url)
    if rsa:  # keys are no part of what the store holds
        for number in range(machines):
            shutil.copytree(site.campaign / "keys", folder / f"machine-{number}" / "keys")
    cpu = Cpu(server.pid, _pid_listening(port))
    senders = [site.send(number, "--processes", "1") for number in range(machines)]
    try:
        for sender in senders:
            cpu.follow(sender.pid)
        table = f'"rowpost_{_plain(site.id)}".win'
        count = f"SELECT coalesce(sum(length(verdicts)), 0) FROM {table}"
        while not _number(server, count):
            if any(sender.poll() is not None for sender in senders):
                raise SystemExit((folder / "machine-0.out").read_text())
            time.sleep(0.1)
        time.sleep(5)  # past the start
        began, first, used = time.monotonic(), _number(server, count), cpu.by_part()
        while time.monotonic() - began < seconds and any(sender.poll() is None for sender in senders):
            time.sleep(0.2)
        took, last = time.monotonic() - began, _number(server, count)
        spent = {part: round(value - used.get(part, 0.0), 1) for part, value in cpu.by_part().items()}
    finally:
        for sender in senders:
            if sender.poll() is None:
                os.killpg(sender.pid, signal.SIGTERM)
        for sender in senders:
            try:
                sender.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(sender.pid, signal.SIGKILL)
                sender.wait()
        cpu.close()
    sent = last - first
    return {
        "machines": machines,
        "rsa_2048": rsa,
        "bytes": len(html),
        "seconds": round(took),
        "messages": sent,
        "messages_per_s": round(sent / took),
        "cpu_s": spent,
        "cpu_ms_a_message": {part: round(1000 * value / max(1, sent), 3) for part, value in spent.items()},
        "sink_counted_in_all": stop(),
    }


def _number(server: PostgresServer, sql: str) -> int:
    return int(str(server.execute(sql)[0][0]))


def _plain(campaign_id: str) -> str:
    from engine.control.postgres_link import schema_of

    return schema_of(campaign_id).removeprefix("rowpost_")


def _pid_listening(port: int) -> int:
    """Who listens there: the sink, or taskset that became it."""
    wanted = f"{port:04X}"
    inodes = {
        line.split()[9]
        for line in Path("/proc/net/tcp").read_text().splitlines()[1:]
        if line.split()[1].endswith(f":{wanted}") and line.split()[3] == "0A"
    }
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            if os.readlink(link).removeprefix("socket:[").removesuffix("]") in inodes:
                return int(link.parts[2])
        except OSError:
            continue
    raise SystemExit("nobody listens there")
