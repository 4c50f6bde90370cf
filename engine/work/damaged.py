"""Logs here that do not tell all that was done: damaged ones, and ones that are gone.

What their workers attempted behind the damage nobody knows. So every row that is open in a batch which was begun is
held in doubt, once for each such log: a mark in the log that holds them says for which.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa

from formats.sendlog import Kind, LogDamaged, Reader, is_torn_start

_MARK = "held for damaged log "


def mark_of(log: str, problem: str) -> str:
    """The event that says for which log rows are held."""
    return f"{_MARK}{log}: {problem}"


def damaged_logs(paths: Iterable[Path]) -> dict[str, str]:
    """Name -> problem of each log that is not whole up to a torn tail, and that no log here holds rows for yet."""
    found: dict[str, str] = {}
    held: set[str] = set()
    for path in paths:
        problem = _problem_of(path)
        if problem is not None:
            found[path.stem] = problem
        elif path.stem.endswith("-adopt"):
            held |= _marked_in(path)
    return {log: problem for log, problem in found.items() if log not in held}


def _problem_of(path: Path) -> str | None:
    if path.stat().st_size == 0:
        return None  # its worker was killed before its first write
    buffer = pa.memory_map(str(path)).read_buffer()
    try:
        reader = Reader(buffer)
    except LogDamaged as problem:
        return None if is_torn_start(buffer) else str(problem)
    for _ in reader:
        pass
    return reader.log.damage


def _marked_in(path: Path) -> set[str]:
    marked = set()
    for batch in Reader(pa.memory_map(str(path)).read_buffer()):
        for kind, text in zip(batch.column("kind").to_pylist(), batch.column("text").to_pylist(), strict=True):
            if kind == Kind.EVENT and text is not None and text.startswith(_MARK):
                marked.add(text.removeprefix(_MARK).partition(":")[0])
    return marked
