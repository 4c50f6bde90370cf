"""Starting senders by the API: `engine send` in a session of its own; a web server that dies takes none with it.

A partition has one sender. Whether one runs is known from the store, where it registers in its first second, and before
that from the processes that this server started itself.
"""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path

from engine.campaign import Campaign, make_private_folder
from engine.web.command import CommandFailed, engine_command, environment, said
from engine.web.problems import Refused

_START_PATIENCE_S = 10.0

_children: dict[tuple[Path, int], subprocess.Popen[bytes]] = {}
_lock = threading.Lock()


def start(
    campaign: Campaign,
    partition: int,
    processes: int | None,
    living: Callable[[], Collection[tuple[int | None, int]]],
) -> int:
    """Begin `engine send` of one partition, apart from this process; its pid. Raises Refused, CommandFailed.

    `living` asks the store for the partitions that are being sent, and by which process.
    """
    make_private_folder(campaign.run)
    words = ["send", "--campaign", str(campaign.folder), "--partition", str(partition), "--yes", "--log-format", "json"]
    if processes is not None:
        words += ["--processes", str(processes)]
    file = campaign.run / f"send-{partition}.said"
    place = (campaign.folder.resolve(), partition)
    with _lock:  # two requests at the same time start one
        known = _children.get(place)
        if partition in {one for one, _ in living()} or (known is not None and known.poll() is None):
            raise Refused(409, f"partition {partition} is being sent already")
        with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "wb") as out:
            began = out.tell()
            process = _children[place] = subprocess.Popen(
                engine_command(words),
                env=environment(),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
    # Until it is known to the store, what it refuses is an answer to this request; later words are in the file and the
    # counters.
    deadline = time.monotonic() + _START_PATIENCE_S
    while process.poll() is None and (partition, process.pid) not in living() and time.monotonic() < deadline:
        time.sleep(0.1)
    if process.returncode:
        with file.open(encoding="utf-8", errors="replace") as told:
            told.seek(began)
            raise CommandFailed(command="engine send", said=said(told.read()).replace(str(campaign.folder), ""))
    return process.pid


def reap() -> None:
    """Collect senders that ended, so that none stays a zombie while we live."""
    with _lock:
        for place in [place for place, process in _children.items() if process.poll() is not None]:
            del _children[place]
