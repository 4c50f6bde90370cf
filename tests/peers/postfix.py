"""A private Postfix on a loopback port: own configuration, queue and log, delivering every recipient to one maildir.

    with running_postfix() as postfix:
        ... send to postfix.host, postfix.port ...
        contents = postfix.wait_for(3)

Needs root (Postfix changes users) and Debian's `postfix`; `missing_postfix()` says what is missing. The machine's own
Postfix, where there is one, is left alone. Recipients `451@`, `550@` (and `451+x@`, `550+x@`) are refused at RCPT.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from engine.rehearse.certificate import make_certificate

POSTFIX = shutil.which("postfix", path=os.environ.get("PATH", "") + os.pathsep + "/usr/sbin")

_MASTER = """\
127.0.0.1:{port} inet n - n - - smtpd
pickup unix n - n 60 1 pickup
cleanup unix n - n - 0 cleanup
qmgr unix n - n 300 1 qmgr
tlsmgr unix - - n 1000? 1 tlsmgr
rewrite unix - - n - - trivial-rewrite
bounce unix - - n - 0 bounce
defer unix - - n - 0 bounce
trace unix - - n - 0 bounce
verify unix - - n - 1 verify
flush unix n - n 1000? 0 flush
proxymap unix - - n - - proxymap
smtp unix - - n - - smtp
relay unix - - n - - smtp
error unix - - n - - error
retry unix - - n - - error
discard unix - - n - - discard
local unix - n n - - local
virtual unix - n n - - virtual
lmtp unix - - n - - lmtp
anvil unix - - n - 1 anvil
scache unix - - n - 1 scache
postlog unix-dgram n - n - 1 postlogd
"""


def missing_postfix() -> str | None:
    """Why a private Postfix cannot run here; None when it can."""
    if POSTFIX is None:
        return "Debian's postfix is not installed"
    if os.geteuid() != 0:
        return "Postfix can only be started by root"
    return None


class Postfix:
    """A running instance."""

    def __init__(self, folder: Path, port: int, certificate: Path) -> None:
        self.folder = folder
        self.host, self.port = "127.0.0.1", port
        self.certificate = certificate
        self.maildir = folder / "mail" / "all"

    @property
    def log(self) -> str:
        """The mail log so far."""
        path = self.folder / "mail.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def contents(self) -> list[bytes]:
        """Every message delivered so far, as Postfix wrote it (LF line ends, with Delivered-To and Received)."""
        new = self.maildir / "new"
        return [path.read_bytes() for path in sorted(new.iterdir())] if new.exists() else []

    def wait_for(self, count: int, timeout_s: float = 15.0) -> list[bytes]:
        """The messages, once there are `count` of them; AssertionError with the log when they do not come."""
        end = time.monotonic() + timeout_s
        new = self.maildir / "new"
        while (len(os.listdir(new)) if new.exists() else 0) < count:
            assert time.monotonic() < end, f"{len(self.contents())} of {count} messages arrived\n{self.log[-4000:]}"
            time.sleep(0.02)
        return self.contents()


def free_port() -> int:
    """A port on loopback that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        assert isinstance(port, int)
        return port


@contextlib.contextmanager
def running_postfix(settings: Mapping[str, str] | None = None) -> Iterator[Postfix]:
    """A private instance while the block runs; `settings` are added to its main.cf."""
    assert POSTFIX is not None
    # Not pytest's tmp_path: its parents are closed to the users that Postfix turns into.
    folder = Path(tempfile.mkdtemp(prefix="rowpost-postfix-"))
    folder.chmod(0o755)
    postfix = _configure(folder, free_port(), settings or {})
    command = [POSTFIX, "-c", str(folder / "etc")]
    started = subprocess.run([*command, "start"], capture_output=True, text=True, timeout=30, check=False)
    try:
        if started.returncode != 0:
            raise RuntimeError(f"postfix did not start: {started.stdout}{started.stderr}{postfix.log}")
        _wait_until_it_greets(postfix)
        yield postfix
    finally:
        subprocess.run([*command, "abort"], capture_output=True, timeout=30, check=False)
        shutil.rmtree(folder, ignore_errors=True)


def _configure(folder: Path, port: int, settings: Mapping[str, str]) -> Postfix:
    etc, queue, state, mail = (folder / name for name in ("etc", "queue", "state", "mail"))
    for path in (etc, queue, state, mail):
        path.mkdir()
    owner = pwd.getpwnam("postfix")
    nobody = pwd.getpwnam("nobody")
    os.chown(state, owner.pw_uid, -1)
    os.chown(mail, nobody.pw_uid, nobody.pw_gid)
    certificate, key = make_certificate("localhost", etc)
    (etc / "refused").write_text("/^451[+@]/ 451 4.7.1 Try again later\n/^550[+@]/ 550 5.1.1 No such user here\n")
    main = {
        "compatibility_level": "3.6",
        "queue_directory": str(queue),
        "data_directory": str(state),
        "mail_owner": "postfix",
        "setgid_group": "postdrop",
        "maillog_file": str(folder / "mail.log"),
        "maillog_file_prefixes": str(folder),
        "myhostname": "postfix.example",
        "inet_interfaces": "127.0.0.1",
        "inet_protocols": "ipv4",
        "mynetworks": "127.0.0.0/8",
        "mydestination": "",
        "alias_maps": "",
        "alias_database": "",
        "local_recipient_maps": "",
        "virtual_mailbox_domains": "static:all",
        "virtual_mailbox_maps": "static:all/",
        "virtual_mailbox_base": str(mail),
        "virtual_uid_maps": f"static:{nobody.pw_uid}",
        "virtual_gid_maps": f"static:{nobody.pw_gid}",
        "virtual_minimum_uid": "1",
        "virtual_destination_recipient_limit": "1",
        "smtpd_recipient_restrictions": f"check_recipient_access regexp:{etc / 'refused'}, permit_mynetworks, reject",
        "smtpd_tls_cert_file": str(certificate),
        "smtpd_tls_key_file": str(key),
        "smtpd_tls_security_level": "may",
        "smtpd_peername_lookup": "no",
        "in_flow_delay": "0",
        "notify_classes": "",
        **settings,
    }
    (etc / "main.cf").write_text("".join(f"{name} = {value}\n" for name, value in main.items()))
    (etc / "master.cf").write_text(_MASTER.format(port=port))
    return Postfix(folder, port, certificate)


def _wait_until_it_greets(postfix: Postfix) -> None:
    end = time.monotonic() + 15
    while True:
        try:
            with socket.create_connection((postfix.host, postfix.port), timeout=5) as wire:
                if wire.recv(200).startswith(b"220"):
                    return
        except OSError:
            pass
        if time.monotonic() > end:
            raise RuntimeError(f"postfix does not answer: {postfix.log[-4000:]}")
        time.sleep(0.05)
