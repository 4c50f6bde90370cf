"""The files of a suppression folder: reading frames, appending under a lock, files that appear whole or not at all.

Knows bytes and locks, not what a suppression means. Bytes: formats.suppression. Relied on: `flock` works (a local file
system, or NFS 4), an append under the lock is seen by `stat` in other processes, a rename in a folder is atomic.
"""

from __future__ import annotations

import fcntl
import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from engine.errors import EngineError, Exit
from formats import suppression
from formats.suppression import SuppressionError

TRUTH = "suppressions.log"
LOCK = "suppressions.lock"
KEY = "forget.key"
_READ_BYTES = 64 << 20


class SuppressionsDamaged(EngineError):
    """{path}: damaged at byte {offset}: a record there does not have its checksum, and others follow it."""

    exit_code = Exit.LIST
    hint = "Restore {path} from a backup; nothing was cut off. Entries before the damage are still obeyed."


class SuppressionsUnreadable(EngineError):
    """{path}: {problem}."""

    exit_code = Exit.LIST
    hint = "Name a suppression folder of this version; `engine suppress import` reads CSV and Parquet into one."


def frames(path: Path, start: int) -> Iterator[suppression.Frame]:
    """The whole frames behind `start`, read in pieces of 64 MB (or one frame, if that is larger)."""
    piece = _READ_BYTES
    with open(path, "rb") as file:
        while True:
            file.seek(start)
            raw = file.read(piece)
            here = start
            for frame in suppression.read_frames(raw, at=start):
                here = frame.end
                yield frame
            if len(raw) < piece or (here == start and piece > suppression.LARGEST_PAYLOAD):
                return
            piece = piece * 2 if here == start else _READ_BYTES
            start = here


def cut_torn_end(path: Path, end: int) -> None:
    """Under the lock: cut off what a crashed append left behind `end`; it is kept in a file beside."""
    with open(path, "r+b") as file:
        file.seek(end)
        rest = file.read()
        if not rest:
            return
        if not suppression.is_torn(rest):
            raise SuppressionsDamaged(path=path, offset=end)
        path.with_name(f"{path.name}.torn-{end}").write_bytes(rest)
        file.truncate(end)
        os.fsync(file.fileno())


def create(path: Path) -> None:
    """A truth file without entries."""
    write_whole(path, [suppression.encode_header(secrets.token_bytes(8))])


def append(path: Path, frame: bytes) -> None:
    """Under the lock: one frame at the end, on the disk when this returns."""
    with open(path, "ab", buffering=0) as file:
        written = 0
        while written < len(frame):
            written += file.write(memoryview(frame)[written:])
        os.fdatasync(file.fileno())


@contextmanager
def locked(folder: Path, *, name: str = LOCK) -> Iterator[None]:
    """Nobody else is in the folder's critical section `name`."""
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder / name, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def write_whole(path: Path, pieces: Sequence[bytes | memoryview]) -> None:
    """Write a file that appears whole or not at all: beside it, synced, renamed, the folder synced."""
    beside = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}")
    try:
        with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            for piece in pieces:
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def generation_of(path: Path) -> tuple[bytes, int, int]:
    """The truth's generation, inode and size."""
    with open(path, "rb") as file:
        raw = file.read(suppression.HEADER_BYTES)
        status = os.fstat(file.fileno())
    try:
        return suppression.decode_header(raw).generation, status.st_ino, status.st_size
    except SuppressionError as problem:
        raise SuppressionsUnreadable(path=path, problem=problem) from None
