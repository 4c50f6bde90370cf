"""A private Dovecot that only checks passwords, for Postfix to ask (smtpd_sasl_type = dovecot). Dovecot 2.3's words."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

DOVECOT = shutil.which("dovecot", path=os.environ.get("PATH", "") + os.pathsep + "/usr/sbin")

_SETTINGS = """\
base_dir = {folder}/run
state_dir = {folder}/state
log_path = {folder}/log
protocols =
ssl = no
disable_plaintext_auth = no
auth_mechanisms = plain login cram-md5
first_valid_uid = 0
passdb {{
  driver = passwd-file
  args = scheme=PLAIN {folder}/users
}}
userdb {{
  driver = static
  args = uid=nobody gid=nogroup home=/nonexistent
}}
service auth {{
  unix_listener {folder}/auth {{
    mode = 0666
  }}
}}
"""


def missing_dovecot() -> str | None:
    """Why it cannot run here; None when it can."""
    if DOVECOT is None:
        return "Debian's dovecot-core is not installed"
    if os.geteuid() != 0:
        return "Dovecot is started by root here"
    version = subprocess.run([DOVECOT, "--version"], capture_output=True, text=True, check=False).stdout
    return None if version.startswith("2.3") else f"this configuration is for Dovecot 2.3, not {version.strip()}"


@contextlib.contextmanager
def checking_passwords(users: dict[str, str]) -> Iterator[Path]:
    """The socket that Postfix asks, while the block runs."""
    assert DOVECOT is not None
    with tempfile.TemporaryDirectory(prefix="rowpost-dovecot-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        folder.chmod(0o755)
        (folder / "users").write_text("".join(f"{user}:{{PLAIN}}{password}\n" for user, password in users.items()))
        (folder / "dovecot.conf").write_text(_SETTINGS.format(folder=folder))
        process = subprocess.Popen([DOVECOT, "-F", "-c", str(folder / "dovecot.conf")], stderr=subprocess.DEVNULL)
        try:
            end = time.monotonic() + 10
            while not (folder / "auth").exists():
                assert time.monotonic() < end, (folder / "log").read_text()
                time.sleep(0.02)
            yield folder / "auth"
        finally:
            process.terminate()
            process.wait(10)
