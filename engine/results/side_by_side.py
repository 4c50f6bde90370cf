"""All logs read, in this process and others beside it."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

from engine.results.merged import Damage
from engine.results.scan import Scanned, ScanTask, scan
from formats.sendlog import LogDamaged

# Below this much log the start of a process costs more than it reads.
_WORTH_PROCESSES = 48_000_000


def scan_all(
    tasks: list[ScanTask], processes: int, damage: list[Damage], progress: Callable[[int, int], None] | None
) -> list[Scanned]:
    """All logs, the largest first so that the last process is not left with a long one."""
    sizes = {task.log: Path(task.path).stat().st_size for task in tasks}
    total, done = sum(sizes.values()), 0
    scanned: list[Scanned] = []
    waiting = iter(sorted(tasks, key=lambda task: -sizes[task.log]))
    one_at_a_time = threading.Lock()

    def take_on(read: Callable[[ScanTask], Scanned]) -> None:
        nonlocal done
        for task in waiting:
            problem, found = None, None
            try:
                found = read(task)
            except LogDamaged as damaged:
                problem = str(damaged)
            with one_at_a_time:
                if found is not None:
                    scanned.append(found)
                else:
                    damage.append(Damage(task.path, problem or ""))
                done += sizes[task.log]
                if progress is not None:
                    progress(done, total)

    if processes < 2 or len(tasks) < 2 or total < _WORTH_PROCESSES:
        take_on(scan)
    else:
        # This process reads, too: to start another costs a third of a second.
        others = min(processes, len(tasks)) - 1
        spawn = multiprocessing.get_context("spawn")
        with (
            ProcessPoolExecutor(others, mp_context=spawn) as pool,
            ThreadPoolExecutor(others, thread_name_prefix="merge") as threads,
        ):
            helped = [threads.submit(take_on, lambda task: pool.submit(scan, task).result()) for _ in range(others)]
            try:
                take_on(scan)
                for one in helped:
                    one.result()
            finally:
                # Only a failure leaves any: nobody shall begin another.
                for _ in waiting:
                    pass
    return sorted(scanned, key=lambda one: one.log)
