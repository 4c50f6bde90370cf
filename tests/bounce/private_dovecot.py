"""A Dovecot of our own: a temporary folder, a high port on loopback, one user. Skips where Dovecot is absent."""

from __future__ import annotations

import getpass
import mailbox
import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest

DOVECOT = shutil.which("dovecot") or ("/usr/sbin/dovecot" if Path("/usr/sbin/dovecot").exists() else None)
PASSWORD = "a-test-password"

CONFIG = """\
base_dir = {folder}/run
state_dir = {folder}/state
log_path = {folder}/log
protocols = imap
listen = 127.0.0.1
ssl = no
disable_plaintext_auth = no
auth_mechanisms = plain login
first_valid_uid = 0
default_internal_user = {internal}
default_login_user = {login}
default_internal_group = {group}
mail_location = maildir:{folder}/Maildir
namespace inbox {{
  inbox = yes
}}
passdb {{
  driver = static
  args = password={password}
}}
userdb {{
  driver = static
  args = uid={uid} gid={gid} home={folder}/home
}}
service imap-login {{
  chroot =
  inet_listener imap {{
    port = {port}
  }}
  inet_listener imaps {{
    port = 0
  }}
}}
service anvil {{
  chroot =
}}
service stats {{
  chroot =
}}
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class PrivateDovecot:
    """Started on creation; `maildir` is the INBOX of its one user."""

    def __init__(self, folder: Path) -> None:
        if DOVECOT is None:
            pytest.skip("Dovecot is not installed: the IMAP intake is not tried against a real server")
        self.folder = folder
        self.port = free_port()
        self.maildir = folder / "Maildir"
        for name in ("run", "state", "home"):
            (folder / name).mkdir()
        is_root = os.geteuid() == 0
        # Dovecot refuses to serve mail as root: there the mail belongs to nobody.
        self._uid, self._gid = (65534, 65534) if is_root else (os.getuid(), os.getgid())
        folder.chmod(0o755)
        me = getpass.getuser()
        self._config = folder / "dovecot.conf"
        self._config.write_text(
            CONFIG.format(
                folder=folder,
                port=self.port,
                password=PASSWORD,
                uid=self._uid,
                gid=self._gid,
                internal="dovecot" if is_root else me,
                login="dovenull" if is_root else me,
                group="dovecot" if is_root else str(os.getgid()),
            )
        )
        self._process: subprocess.Popen[bytes] | None = None
        mailbox.Maildir(self.maildir)
        self.give()
        self.start()

    def deliver(self, *messages: bytes, folder: str = "") -> None:
        """Put messages into a mailbox, as a delivery agent does."""
        box = mailbox.Maildir(self.maildir / folder if folder else self.maildir)
        for raw in messages:
            box.add(raw)
        self.give()

    def give(self) -> None:
        """Everything in the mail folders belongs to whom Dovecot serves it as."""
        if os.geteuid() != 0:
            return
        for top in (self.maildir, self.folder / "home"):
            for path in [top, *top.rglob("*")]:
                if path.exists():
                    os.chown(path, self._uid, self._gid)

    def start(self) -> None:
        assert DOVECOT is not None
        self._process = subprocess.Popen([DOVECOT, "-F", "-c", str(self._config)], stderr=subprocess.DEVNULL)
        for _ in range(100):
            try:
                with socket.create_connection(("127.0.0.1", self.port), timeout=1) as probe:
                    if probe.recv(4) == b"* OK":
                        return
            except OSError:
                pass
            if self._process.poll() is not None:
                break
            time.sleep(0.05)
        log = self.folder / "log"
        self.stop()
        pytest.skip(f"Dovecot does not start here: {log.read_text()[-300:] if log.exists() else 'no log'}")

    def stop(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None

    @property
    def url(self) -> str:
        return f"imap://bounces@127.0.0.1:{self.port}"
