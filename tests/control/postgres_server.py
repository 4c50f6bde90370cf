"""A private PostgreSQL server for tests: a folder of its own, loopback and a unix socket, gone at the end."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path

import psycopg

NOBODY = 65534


def binaries() -> Path | None:
    """The folder of the newest server binaries here."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"))
    on_path = shutil.which("postgres")
    return found[-1].parent if found else Path(on_path).parent if on_path else None


class PostgresServer:
    """One server. It refuses to run as root: root starts it as nobody."""

    def __init__(self, *, fsync: bool = False, follow: int | None = None) -> None:
        """`follow`: a standby of the server at this port, and nothing else holds its commits up for it."""
        found = binaries()
        assert found is not None
        self._bin = found
        self.folder = Path(tempfile.mkdtemp(prefix="rowpost-pg-"))
        self._as_user: list[str] = []
        if os.geteuid() == 0:
            shutil.chown(self.folder, NOBODY, NOBODY)
            self._as_user = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
        self._fsync = fsync
        with socket.socket() as one:
            one.bind(("127.0.0.1", 0))
            self.port = int(one.getsockname()[1])
        self._process: subprocess.Popen[bytes] | None = None
        make = [str(found / "initdb"), "-D", str(self.data), "-U", "rowpost", "-A", "trust", "-E", "UTF8", "-N"]
        if follow is not None:
            primary = f"host=127.0.0.1 port={follow} user=rowpost"
            make = [
                str(found / "pg_basebackup"),
                "-D",
                str(self.data),
                "-d",
                primary,
                "-R",
                "-X",
                "stream",
                "-c",
                "fast",
            ]
        subprocess.run(
            [*self._as_user, *make], check=True, stdout=subprocess.DEVNULL, cwd=self.folder, stderr=subprocess.PIPE
        )
        self.start()

    def promote(self) -> None:
        """A standby becomes the server, on a timeline of its own."""
        ((done,),) = self.execute("SELECT pg_promote(true, 30)")
        assert done, "the standby was not promoted"

    @property
    def data(self) -> Path:
        return self.folder / "data"

    @property
    def url(self) -> str:
        return f"postgresql://rowpost@127.0.0.1:{self.port}/postgres"

    def start(self) -> None:
        """Start it and wait until it answers."""
        settings = {
            "listen_addresses": "127.0.0.1",
            "fsync": "on" if self._fsync else "off",
            "shared_buffers": "64MB",
            "max_wal_size": "512MB",
            "max_connections": "120",
        }
        options = [word for key, value in settings.items() for word in ("-c", f"{key}={value}")]
        command = [str(self._bin / "postgres"), "-D", str(self.data), "-p", str(self.port), "-k", str(self.folder)]
        self._process = subprocess.Popen(
            [*self._as_user, *command, *options],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=self.folder,
            start_new_session=True,
        )
        deadline = time.monotonic() + 30
        while True:
            try:
                psycopg.connect(self.url, connect_timeout=2).close()
                return
            except psycopg.OperationalError:
                assert self._process.poll() is None, "the server ended at once"
                assert time.monotonic() < deadline, "the server does not answer"
                time.sleep(0.05)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def stop(self, how: signal.Signals = signal.SIGINT) -> None:
        """SIGINT: fast; SIGQUIT: as a crash."""
        if self._process is not None:
            self._process.send_signal(how)
            self._process.wait(30)
            self._process = None

    def remove(self) -> None:
        """Stop it and delete everything."""
        self.stop(signal.SIGQUIT)
        shutil.rmtree(self.folder, ignore_errors=True)

    def execute(self, sql: str) -> list[tuple[object, ...]]:
        """One statement, as the administrator."""
        with psycopg.connect(self.url, autocommit=True) as db:
            cursor = db.execute(sql.encode())
            return list(cursor.fetchall()) if cursor.description else []
