"""Five machines that are killed, cut off, stopped and replaced, one PostgreSQL that is restarted, one sink that counts.

    python benchmarks/cluster.py kill --rows 2000000          the figure of benchmarks/README.md
    python benchmarks/cluster.py kill --rows 20000 --minutes 1
    python benchmarks/cluster.py load                          the store's load of 40 workers, no SMTP
    python benchmarks/cluster.py start --rows 20000000         a fresh machine's first attempt
    python benchmarks/cluster.py slow                          one machine ten times slower
    python benchmarks/cluster.py rate --minutes 10             five machines with TLS; --rsa: signed as well
    python benchmarks/cluster.py model --steps 2500000         the model of tests/control, explored

`kill` starts a machine per partition as a process group in a folder of its own, with leases of three seconds, and does
one of these every few seconds: kill a machine and delete its folder; stop one (SIGSTOP) for longer than its lease and
let it go on; cut one off from the database for longer than its lease and heal it (through a proxy of its own); restart
the database; have it fail over to its standby, which did not hear of the last second (asynchronous replication, cut).
Whoever ends is started anew. Every ten seconds a line says how far it is; SIGTERM or `--limit-minutes` end it early,
with the table of what is there. It passes with nobody twice at the sink, nobody lost, and no more doubt than 500 rows
per worker killed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import cluster_rate, cluster_speed  # noqa: E402
from engine.rehearse.record import tally  # noqa: E402
from engine.rehearse.running import RunningSink, run_sink_in_process  # noqa: E402
from engine.rehearse.sink import SinkSettings  # noqa: E402
from tests.control.postgres_server import PostgresServer  # noqa: E402

LEASE_S = 3.0
WORKERS = 2


class Proxy:
    """A machine's way to the database, which can be cut."""

    def __init__(self, port: int) -> None:
        self._to = port
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = self._server.getsockname()[1]
        self.is_cut = False
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                near, _ = self._server.accept()
            except OSError:
                return
            if self.is_cut:
                near.close()
                continue
            try:
                far = socket.create_connection(("127.0.0.1", self._to), timeout=2)
                far.settimeout(None)
            except OSError:
                near.close()
                continue
            self._pairs.append((near, far))
            for source, sink in ((near, far), (far, near)):
                threading.Thread(target=_pump, args=(source, sink), daemon=True).start()

    def cut(self) -> None:
        """Close every connection and let no new one through."""
        self.is_cut = True
        for pair in self._pairs:
            for end in pair:
                _close(end)
        self._pairs.clear()

    def heal(self) -> None:
        """Let connections through again."""
        self.is_cut = False

    def lead_to(self, port: int) -> None:
        """New connections go there."""
        self._to = port

    def close(self) -> None:
        """Stop listening."""
        self.cut()
        self._server.close()


def _pump(source: socket.socket, sink: socket.socket) -> None:
    try:
        while chunk := source.recv(65536):
            sink.sendall(chunk)
    except OSError:
        pass
    _close(source)
    _close(sink)


def _close(end: socket.socket) -> None:
    with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
    end.close()


class Kill:
    """One run."""

    def __init__(self, folder: Path, server: PostgresServer, sink: RunningSink, rows: int, machines: int, rate: int):
        self.folder, self.server, self.sink, self.rows, self.machines = folder, server, sink, rows, machines
        self.campaign = folder / "campaign"
        self.id = f"kill-{os.getpid()}"
        self.environ = {**os.environ, "PYTHONPATH": str(ROOT)}
        self.proxies = [Proxy(server.port) for _ in range(machines)]
        self.running: dict[int, subprocess.Popen[bytes]] = {}
        self.workers_killed = 0
        self.counts: dict[str, int] = {}
        self.forgotten = 0  # windows that the new server did not know, over all failovers
        self._told = (time.monotonic(), 0)
        self._plan(rate)
        self._follow()

    def url(self, machine: int | None = None) -> str:
        port = self.server.port if machine is None else self.proxies[machine].port
        return f"postgresql://rowpost@127.0.0.1:{port}/postgres?campaign={self.id}"

    def engine(self, *words: str, ok: tuple[int, ...] = (0,)) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [sys.executable, "-m", "engine", *words],
            cwd=self.folder,
            env=self.environ,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode not in ok:
            raise SystemExit(f"engine {' '.join(words)}: {done.returncode}\n{done.stdout}{done.stderr}")
        return done

    def _plan(self, rate: int) -> None:
        self.engine("init")
        for kind in ("txt", "html"):
            (self.campaign / "templates" / f"letter.{kind}").write_text("Hello {{ first_name }}!\n", "utf-8")
        _write_list(self.campaign / "list.parquet", self.rows)
        file = self.campaign / "campaign.toml"
        lines = []
        for line in file.read_text("utf-8").splitlines():
            name = line.partition("=")[0].strip()
            if name in (
                "id",
                "relay",
                "plan",
                "connections",
                "messages_per_second",
                "batch_rows",
                "lease",
                "dot_timeout",
            ):
                continue
            lines.append(line)
            match line.strip():
                case "[campaign]":
                    lines.append(f'id = "{self.id}"')
                case "[delivery]":
                    lines.append(f'relay = "smtp://{self.sink.host}:{self.sink.port}"')
                    # For all machines together. What a lost one held is given again five seconds after its lease.
                    lines += [f"connections = {10 * self.machines}", 'dot_timeout = "5s"']
                    lines += [f"messages_per_second = {rate * self.machines}"] if rate else []
                case "[retry]":
                    lines.append('plan = ["1s", "2s"]')
        text = "\n".join(lines) + "\n"
        for table, setting in (("retry", 'plan = ["1s", "2s"]'), ("list", ""), ("control", "")):
            if f"[{table}]" not in text:
                text += f"\n[{table}]\n{setting}\n"
        batch_rows = max(100, min(10_000, self.rows // (self.machines * 10)))
        text = text.replace("[list]\n", f"[list]\nbatch_rows = {batch_rows}\n")
        text = text.replace("[control]\n", f'[control]\nlease = "{LEASE_S:g}s"\n')
        file.write_text(text, "utf-8")
        self.engine("plan", "list.parquet", "--partitions", str(self.machines), "--control", self.url())

    # -- machines ----------------------------------------------------------------------------------------------------

    def start(self, machine: int) -> None:
        log = (self.folder / f"machine-{machine}.out").open("ab")
        words = ["send", "--partition", str(machine), "--campaign", str(self.folder / f"machine-{machine}")]
        words += ["--control", self.url(machine), "--name", f"machine-{machine}", "--processes", str(WORKERS)]
        self.running[machine] = subprocess.Popen(
            [sys.executable, "-m", "engine", *words],
            cwd=self.folder,
            env=self.environ,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        log.close()

    def lose(self, machine: int) -> None:
        """Killed, with its folder."""
        process = self.running.pop(machine)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        shutil.rmtree(self.folder / f"machine-{machine}", ignore_errors=True)
        self.workers_killed += WORKERS

    def kill(self, machine: int) -> None:
        """Killed; its folder stays."""
        process = self.running.pop(machine)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        self.workers_killed += WORKERS

    def stall(self, machine: int) -> None:
        """Stopped past its lease, then continued."""
        process = self.running[machine]
        os.killpg(process.pid, signal.SIGSTOP)
        time.sleep(2 * LEASE_S)
        os.killpg(process.pid, signal.SIGCONT)

    def cut(self, machine: int) -> None:
        """Without the database for longer than its lease, then healed."""
        self.proxies[machine].cut()
        time.sleep(2 * LEASE_S)
        self.proxies[machine].heal()

    def restart_database(self, machine: int) -> None:
        """As a crash: it recovers from its log."""
        self.server.stop(signal.SIGQUIT)
        time.sleep(1)
        self.server.start()

    def fail_over(self, machine: int) -> None:
        """The standby, which is a second behind, takes over: what was committed in that second is forgotten.

        Every sender stops by itself and tells again what its logs know; then the operator confirms the new server.
        """
        self._catch_up()  # what lost machines knew is there: nobody could tell it again
        self.stream.cut()
        time.sleep(1)
        windows = f'SELECT id FROM "rowpost_{_plain(self.id)}".win'
        knew, old = set(self.server.execute(windows)), self.server
        old.stop(signal.SIGQUIT)
        self.server = self.standby
        self.server.promote()
        for proxy in self.proxies:
            proxy.lead_to(self.server.port)
        self.forgotten += len(knew - set(self.server.execute(windows)))
        old.remove()
        for process in self.running.values():
            process.wait(120)
        self.engine("machines", "--confirm-failover", "--control", self.url())
        self.stream.close()
        self._follow()

    def _follow(self) -> None:
        """A standby of the server, through a wire that can be cut."""
        self.stream = Proxy(self.server.port)
        self.standby = PostgresServer(fsync=True, follow=self.stream.port)

    def _catch_up(self) -> None:
        deadline = time.monotonic() + 30
        ((end,),) = self.server.execute("SELECT pg_current_wal_lsn()")
        while self.standby.execute(f"SELECT pg_last_wal_replay_lsn() >= '{end}'::pg_lsn") != [(True,)]:
            if time.monotonic() > deadline:
                raise SystemExit("the standby does not follow")
            time.sleep(0.05)

    def tell(self, started: float, done: int) -> None:
        """One line of how far it is."""
        sent, at = self.sink.counts().messages, time.monotonic()
        rate = (sent - self._told[1]) / max(0.001, at - self._told[0])
        self._told = (at, sent)
        troubles = ", ".join(f"{count} {name}" for name, count in sorted(self.counts.items()))
        text = (
            f"{at - started:6.0f} s  {sent:,} of {self.rows:,} at the sink ({rate:,.0f}/s), {done} troubles: {troubles}"
        )
        print(text, file=sys.stderr, flush=True)

    def stop(self) -> None:
        """Let every machine end in order, as far as it does within half a minute."""
        for process in self.running.values():
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
        deadline = time.monotonic() + 30
        for process in self.running.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.1, deadline - time.monotonic()))

    def run(self, seconds: float, rng: random.Random, troubles: int | None = None, limit_s: float = 7200) -> bool:
        """Trouble until everything is sent, or the time is over and the rest goes in peace. False: it was cut short.

        SIGTERM, SIGINT and `limit_s` end it early; what is there then is judged.
        """
        ended: list[int] = []
        handlers = {}
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                handlers[number] = signal.signal(number, lambda got, frame: ended.append(got))
        try:
            return self._run(seconds, rng, troubles, limit_s, ended)
        finally:
            for number, before in handlers.items():
                signal.signal(number, before)

    def _run(self, seconds: float, rng: random.Random, troubles: int | None, limit_s: float, ended: list[int]) -> bool:
        started, last = time.monotonic(), time.monotonic()
        for machine in range(self.machines):
            self.start(machine)
        kinds = [self.lose, self.kill, self.stall, self.cut, self.restart_database, self.fail_over]
        done, told, sent = 0, started, 0
        while True:
            time.sleep(0.2)
            now = time.monotonic()
            if now - told > 10:
                told = now
                self.tell(started, done)
            if ended or now - started > limit_s:
                self.tell(started, done)
                self.stop()
                return False
            for machine, process in list(self.running.items()):
                if process.poll() is not None:
                    del self.running[machine]
                    if process.returncode == 75:
                        self.start(machine)  # superseded, or the store was away: what starts again is new
            for machine in range(self.machines):
                if machine not in self.running and not self._is_all_done():
                    self.start(machine)
            if not self.running:
                self.tell(started, done)
                return True
            in_peace = now - started > seconds or (troubles is not None and done >= troubles)
            # On a machine that is slow to start senders: not the next one before something went out again.
            moves = now - last > 30 or self.sink.counts().messages > sent
            if not in_peace and moves and now - last > 2 + rng.random() * 3:
                machine = rng.choice(sorted(self.running))
                kind = kinds[done % len(kinds)] if troubles is not None else rng.choice(kinds)
                kind(machine)
                done += 1
                self.counts[kind.__name__] = self.counts.get(kind.__name__, 0) + 1
                last, sent = time.monotonic(), self.sink.counts().messages

    def _is_all_done(self) -> bool:
        found = self.server.execute(f"SELECT count(*) FROM \"rowpost_{_plain(self.id)}\".batch WHERE state <> 'done'")
        return found == [(0,)]

    def verdict(self, is_whole: bool) -> dict[str, object]:
        """What the sink has and what merging proves; what is unsent counts as lost only after a whole run."""
        folders = [str(self.folder / f"machine-{n}") for n in range(self.machines)]
        folders = [folder for folder in folders if Path(folder).exists()]
        self.engine("merge-logs", *folders, "--control", self.url(), ok=(0, 3, 4, 5, 6))
        summary = msgspec.json.decode((self.campaign / "report" / "summary.json").read_bytes())
        assert self.sink.record is not None
        received = tally(self.sink.record)
        outcomes = {name: count for name, count in summary["outcomes"].items() if count}
        in_doubt = outcomes.get("in_doubt", 0)
        unsent = sum(outcomes.get(name, 0) for name in ("unsent", "deferred"))
        return {
            "is_whole": is_whole,
            "rows": self.rows,
            "outcomes": outcomes,
            "adds_up": sum(outcomes.values()) == self.rows,
            "received": received.recipients,
            "twice": len(received.twice),
            "lost": max(0, outcomes.get("accepted", 0) - received.recipients)
            + sum(outcomes.get(name, 0) for name in ("bounced", "invalid", "suppressed"))
            + (unsent if is_whole else 0),
            "in_doubt": in_doubt,
            "in_doubt_may_be": 500 * self.workers_killed + 500 * WORKERS * self.counts.get("restart_database", 0),
            "troubles": self.counts,
            "windows_forgotten": self.forgotten,
        }

    def close(self) -> None:
        """Everything of ours ends."""
        for process in self.running.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for proxy in [*self.proxies, self.stream]:
            proxy.close()
        self.standby.remove()
        self.server.remove()


def _plain(campaign_id: str) -> str:
    from engine.control.postgres_link import schema_of

    return schema_of(campaign_id).removeprefix("rowpost_")


def _write_list(path: Path, rows: int) -> None:
    with pq.ParquetWriter(
        path, pa.schema([("id", pa.int64()), ("email", pa.string()), ("first_name", pa.string())])
    ) as to:
        size = max(100, min(10_000, rows // 50))
        for start in range(0, rows, size):
            numbers = range(start, min(rows, start + size))
            columns = [list(numbers), [f"person{n}@example.com" for n in numbers], [f"Name {n}" for n in numbers]]
            to.write_table(pa.table(dict(zip(("id", "email", "first_name"), columns, strict=True))))


def run_kill(
    rows: int, machines: int, seconds: float, rate: int, seed: int, troubles: int | None = None, limit_s: float = 7200
) -> dict[str, object]:
    """One kill run from plan to verdict."""
    folder = Path(tempfile.mkdtemp(prefix="rowpost-cluster-"))
    try:
        with run_sink_in_process(SinkSettings(record=folder / "sink.record")) as sink:
            kill = Kill(folder, PostgresServer(fsync=True), sink, rows, machines, rate)
            try:
                is_whole = kill.run(seconds, random.Random(seed), troubles, limit_s)
                return kill.verdict(is_whole)
            finally:
                kill.close()
    finally:
        if "ROWPOST_KEEP" not in os.environ:
            shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="what", required=True)
    kill = parts.add_parser("kill")
    kill.add_argument("--rows", type=int, default=20_000)
    kill.add_argument("--machines", type=int, default=5)
    kill.add_argument("--minutes", type=float, default=60)
    kill.add_argument("--rate", type=int, default=0, help="messages a second of each machine; 0: as fast as it goes")
    kill.add_argument("--seed", type=int, default=1)
    kill.add_argument("--limit-minutes", type=float, default=120, help="end it then, and judge what is there")
    load = parts.add_parser("load")
    load.add_argument("--workers", type=int, default=40)
    load.add_argument("--machines", type=int, default=5)
    load.add_argument("--rate", type=int, default=5000)
    load.add_argument("--seconds", type=float, default=10)
    model = parts.add_parser("model")
    model.add_argument("--steps", type=int, default=20_000)
    model.add_argument("--seed", type=int, default=1)
    start = parts.add_parser("start")
    start.add_argument("--rows", type=int, default=2_000_000)
    start.add_argument("--processes", type=int, default=2)
    start.add_argument("--tries", type=int, default=3)
    slow = parts.add_parser("slow")
    slow.add_argument("--rows", type=int, default=6000)
    slow.add_argument("--machines", type=int, default=3)
    slow.add_argument("--delay", type=float, default=0.01, help="seconds a reply of the fast machines' sinks")
    slow.add_argument("--factor", type=float, default=10.0)
    slow.add_argument("--batch-rows", type=int, default=200)
    fast = parts.add_parser("rate")
    fast.add_argument("--minutes", type=float, default=1)
    fast.add_argument("--rate", type=int, default=0, help="messages a second of all machines; 0: as fast as they go")
    fast.add_argument("--machines", type=int, default=5)
    fast.add_argument("--size", type=int, default=20_480)
    fast.add_argument("--rsa", action="store_true", help="signed with RSA-2048")
    given = parser.parse_args()
    if given.what == "rate":
        cluster_speed.show(cluster_rate.run_rate(given.minutes, given.rate, given.machines, given.size, rsa=given.rsa))
        return
    if given.what == "start":
        cluster_speed.show(cluster_speed.run_start(given.rows, given.processes, given.tries))
        return
    if given.what == "slow":
        run = cluster_speed.run_slow(given.rows, given.machines, given.delay, given.factor, given.batch_rows)
        cluster_speed.show(run)
        return
    if given.what == "kill":
        verdict = run_kill(
            given.rows, given.machines, given.minutes * 60, given.rate, given.seed, limit_s=60 * given.limit_minutes
        )
        print(msgspec.json.format(msgspec.json.encode(verdict), indent=1).decode())
        sys.exit(1 if verdict["twice"] or verdict["lost"] else 0)
    if given.what == "load":
        print(msgspec.json.encode(run_load(given.workers, given.machines, given.rate, given.seconds)).decode())
        return
    print(run_model(given.steps, given.seed))


def run_model(steps: int, seed: int) -> str:
    """The model of tests/control, explored at random."""
    from engine.control.postgres import PostgresStore
    from tests.control.cluster_model import explore

    server = PostgresServer()
    try:
        store = PostgresStore(f"{server.url}?campaign=model", create=True)
        started, done = time.monotonic(), 0
        while done < steps:
            done += explore(store, random.Random(seed), 200)
            seed += 1
        store.close()
        return f"{done:,} steps without a violation in {time.monotonic() - started:.0f} s"
    finally:
        server.remove()


def run_load(workers: int, machines: int, rate: int, seconds: float) -> dict[str, object]:
    """Books of windows alone: what admitting and reporting `rate` messages a second costs the store."""
    from concurrent.futures import ThreadPoolExecutor

    from engine.control.postgres import PostgresStore
    from engine.control.store import Incarnation
    from engine.work.messages import Admit, Admitted, Reported
    from engine.work.shared import ADVANCE_EVERY_S
    from engine.work.windows import WindowBook
    from formats.plan import Batch, Partition, Plan
    from formats.sendlog import Verdict

    batch_rows = 10_000
    count = max(workers, int(rate * seconds * 2) // batch_rows + workers)
    plan = Plan(
        campaign_id="load", planned_at_us=1, rows=count * batch_rows, files=[],
        batches=[Batch(n * batch_rows, batch_rows) for n in range(count)], partitions=[Partition(0, count)],
        address_column="email", columns=[], list_fingerprint="l", settings_fingerprint="s",
        templates_fingerprint="t", key_id="k", store="postgresql",
    )  # fmt: skip
    server = PostgresServer(fsync=True)
    try:
        url = f"{server.url}?campaign=load"
        PostgresStore(url, create=True).load_plan(plan, "p", 1)

        def machine(number: int) -> tuple[int, int, float]:
            rng, store = random.Random(number), PostgresStore(url)
            me = f"{number + 1:016x}"
            store.register(Incarnation(id=me, sender="m", host_id="h", boot_id="b", pid=1, partition=0,
                                       started_at_us=1, renewed_at_us=1, lease_us=60_000_000))  # fmt: skip
            book = WindowBook(lambda batch: plan.batches[batch].first_row)
            mine = workers // machines
            logs = [f"{me}-{n:03d}" for n in range(mine)]
            claimed = store.claim(me, 0, count // machines)
            places = [iter(range(c.first_row, c.first_row + c.rows)) for c in claimed]
            current = list(range(mine))
            serials = [0] * mine
            flying: list[tuple[float, int, int, int, int]] = []
            statements = rows = 0
            owed, waits = 0.0, 0.0
            started = last = time.monotonic()
            while (now := time.monotonic()) - started < seconds:
                owed += (now - last) * rate / machines
                last = now
                for worker in range(mine):
                    take = int(owed / mine) if worker else int(owed - (mine - 1) * int(owed / mine))
                    asked = []
                    for _ in range(min(take, 256)):
                        row = next(places[current[worker] % len(places)], None)
                        if row is None:
                            current[worker] += mine
                            continue
                        serials[worker] += 1
                        asked.append((serials[worker], row, claimed[current[worker] % len(places)].number))
                    if asked:
                        book.admit(logs[worker], Admit(rows=asked, length=1000, seal="0" * 16))
                        for serial, row, batch in asked:
                            flying.append((now + 0.05 + rng.expovariate(1 / 0.05), worker, serial, row, batch))
                owed = 0.0
                due = [f for f in flying if f[0] <= now]
                flying = [f for f in flying if f[0] > now]
                for _, worker, serial, row, batch in due:
                    verdict = Verdict.DEFERRED if rng.random() < 0.05 else Verdict.ACCEPTED
                    book.report(logs[worker], [Reported(serial, row, batch, verdict, 0, 250, 1, 1, 1)])
                step = book.step()
                if step is not None:
                    answer = store.advance(me, step)
                    statements += 1
                    for _, message in book.answered(answer, answer.now_us):
                        assert isinstance(message, Admitted)
                        rows += len(message.serials)
                waits += time.monotonic() - now
                time.sleep(max(0.0, ADVANCE_EVERY_S - (time.monotonic() - now)))
            store.close()
            return statements, rows, waits

        before = _cpu_s(server.pid)
        started = time.monotonic()
        with ThreadPoolExecutor(machines) as threads:
            done = list(threads.map(machine, range(machines)))
        took = time.monotonic() - started
        statements, rows = sum(d[0] for d in done), sum(d[1] for d in done)
        ((size, wins),) = server.execute(
            "SELECT pg_total_relation_size('rowpost_load.win'), (SELECT count(*) FROM rowpost_load.win)"
        )
        assert isinstance(size, int)
        return {
            "workers": workers,
            "messages_per_s": round(rows / took),
            "statements_per_s": round(statements / took, 1),
            "postgres_core_share": round((_cpu_s(server.pid) - before) / took, 3),
            "bytes_per_row": round(size / max(1, rows), 1),
            "windows": wins,
        }
    finally:
        server.remove()


def _cpu_s(pid: int) -> float:
    """CPU seconds of a server and its children, those that ended as well."""
    ticks, total = os.sysconf("SC_CLK_TCK"), 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(stat.parent.name) == pid or int(fields[1]) == pid:
            total += int(fields[11]) + int(fields[12])
        if int(stat.parent.name) == pid:
            total += int(fields[13]) + int(fields[14])
    return total / ticks


if __name__ == "__main__":
    main()
