"""Which machine this is, and which boot of it. Recorded with every log, to tell a copied folder from its original.

Linux: /etc/machine-id and /proc/sys/kernel/random/boot_id. macOS: the hardware UUID's stand-in, the host name, and
`kern.boottime`. Both are hashed: an id that identifies a machine to strangers has no business in a log that is shared.
"""

from __future__ import annotations

import hashlib
import socket
import subprocess
import sys
from pathlib import Path


def _short(text: str) -> str:
    return hashlib.sha256(f"rowpost {text}".encode()).hexdigest()[:16]


def host_id() -> str:
    """16 hex digits that stay the same on this machine."""
    try:
        return _short(Path("/etc/machine-id").read_text().strip() or socket.gethostname())
    except OSError:
        return _short(socket.gethostname())


def boot_id() -> str:
    """16 hex digits that stay the same until this machine is started again."""
    try:
        return _short(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
    except OSError:
        if sys.platform == "darwin":
            told = subprocess.run(
                ["/usr/sbin/sysctl", "-n", "kern.boottime"], capture_output=True, text=True, check=False
            )
            return _short(told.stdout)
        return _short("unknown boot")
