"""Where messages wait: Maildir, mbox, a folder of files, our own spool. Each gives what is there, and settles it once
it is recorded.

A source never deletes what it was not told to, and never reads more of a message than its head and its tail: a report's
fields stand before the returned message, a footer behind it, and 50 MB of somebody's photographs between.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Protocol

import msgspec

from engine.bounce.desk import Incoming, Taken
from engine.errors import EngineError, Exit
from formats.feedback.events import EventError, read_events

HEAD = 1024 * 1024
TAIL = 256 * 1024
BATCH = 200  # messages recorded with one sync


class SourceUnreadable(EngineError):
    """{source} cannot be read: {problem}."""

    exit_code = Exit.TRY_AGAIN
    hint = "Check the path and its permissions, then run `engine bounces` again: what was recorded is not read twice."


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """A message and its place in its source."""

    incoming: Incoming
    place: object


class Source(Protocol):
    """A place where messages wait."""

    name: str

    def batches(self) -> Iterator[list[Found]]:
        """What waits now, in batches; raises SourceUnreadable."""

    def settle(self, found: Found, taken: Taken) -> None:
        """`found` is recorded: put it where it belongs. What somebody else took meanwhile is no error."""

    def wait(self, seconds: float) -> None:
        """Return when something may have come, at the latest after `seconds`."""

    def close(self) -> None:
        """Let go of what is held."""


def head_and_tail(file: BinaryIO, size: int) -> bytes:
    """A message without its middle where it is large."""
    if size <= HEAD + TAIL:
        return file.read(HEAD + TAIL)
    head = file.read(HEAD)
    file.seek(size - TAIL)
    return head + b"\n" + file.read(TAIL)


def read_file(path: Path) -> bytes:
    """The head and tail of a file; raises OSError."""
    with path.open("rb") as file:
        return head_and_tail(file, os.fstat(file.fileno()).st_size)


def in_batches(found: Iterator[Found]) -> Iterator[list[Found]]:
    """Up to BATCH at a time."""
    batch: list[Found] = []
    for one in found:
        batch.append(one)
        if len(batch) >= BATCH:
            yield batch
            batch = []
    if batch:
        yield batch


class MaildirSource:
    """A Maildir. Recorded messages move to its subfolder Handled, those for people to Unmatched (Maildir++ names)."""

    def __init__(self, path: Path, *, delete: bool = False) -> None:
        self.name = str(path)
        self._path = path
        self._delete = delete

    def batches(self) -> Iterator[list[Found]]:
        return in_batches(self._waiting())

    def _waiting(self) -> Iterator[Found]:
        for folder in ("new", "cur"):
            try:
                names = sorted(os.listdir(self._path / folder))
            except OSError as problem:
                raise SourceUnreadable(source=self.name, problem=problem.strerror) from None
            for name in names:
                if name.startswith("."):
                    continue
                path = self._path / folder / name
                try:
                    raw = read_file(path)
                except OSError:
                    continue  # another reader was quicker, or it is no file
                yield Found(incoming=Incoming(raw=raw, source=self.name), place=path)

    def settle(self, found: Found, taken: Taken) -> None:
        path = found.place
        assert isinstance(path, Path)
        with contextlib.suppress(FileNotFoundError):
            if taken.is_matched and self._delete:
                path.unlink()
                return
            folder = self._path / (".Handled" if taken.is_matched else ".Unmatched")
            for part in ("cur", "new", "tmp"):
                (folder / part).mkdir(mode=0o700, parents=True, exist_ok=True)
            (folder / "maildirfolder").touch(exist_ok=True)
            os.rename(path, folder / "cur" / (path.name if ":2," in path.name else f"{path.name}:2,"))

    def wait(self, seconds: float) -> None:
        _wait_for_change([self._path / "new", self._path / "cur"], seconds)

    def close(self) -> None:
        """Nothing is held."""


class FolderSource:
    """A folder of .eml and .json files, or one such file. Its files stay; unmatched ones are copied to `unmatched`."""

    def __init__(self, path: Path, unmatched: Path) -> None:
        self.name = str(path)
        self._path = path
        self._unmatched = unmatched
        self._seen: set[tuple[str, int, int]] = set()

    def batches(self) -> Iterator[list[Found]]:
        return in_batches(self._waiting())

    def _files(self) -> list[Path]:
        if self._path.is_file():
            return [self._path]
        try:
            return sorted(path for path in self._path.iterdir() if path.is_file() and not path.name.startswith("."))
        except OSError as problem:
            raise SourceUnreadable(source=self.name, problem=problem.strerror) from None

    def _waiting(self) -> Iterator[Found]:
        for path in self._files():
            try:
                state = path.stat()
                mark = (path.name, state.st_mtime_ns, state.st_size)
                if mark in self._seen:
                    continue
                yield from _from_file(path, self.name)
                self._seen.add(mark)
            except OSError:
                continue

    def settle(self, found: Found, taken: Taken) -> None:
        if not taken.is_matched and not taken.was_known:
            keep_copy(self._unmatched, taken.key, found.incoming.raw)

    def wait(self, seconds: float) -> None:
        _wait_for_change([self._path], seconds)

    def close(self) -> None:
        """Nothing is held."""


class SpoolSource(FolderSource):
    """Our own inbox: what a pipe or the web endpoint left. Settled files move to the folder `handled` beside it."""

    def settle(self, found: Found, taken: Taken) -> None:
        super().settle(found, taken)
        path = found.place
        assert isinstance(path, Path)
        handled = self._path.parent / "handled"
        handled.mkdir(mode=0o700, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            os.rename(path, handled / path.name)


def _from_file(path: Path, source: str) -> Iterator[Found]:
    if path.suffix.lower() not in (".json", ".jsonl", ".ndjson"):
        yield Found(incoming=Incoming(raw=read_file(path), source=source), place=path)
        return
    raw = path.read_bytes()[: 64 * HEAD]
    try:
        events = read_events(raw)
    except EventError:
        yield Found(incoming=Incoming(raw=raw[:HEAD], source=source), place=path)  # unmatched: for people
        return
    for number, event in enumerate(events):
        part = raw if len(events) == 1 else raw[:4096] + b"\0%d\0" % number + msgspec.json.encode(event)
        yield Found(incoming=Incoming(raw=part, source=source, event=event), place=path)


class MboxSource:
    """An mbox file, read and never written: what was recorded is known by its key."""

    def __init__(self, path: Path, unmatched: Path) -> None:
        self.name = str(path)
        self._path = path
        self._unmatched = unmatched
        self._read_to = (0, 0)  # inode and offset up to which this process has read

    def batches(self) -> Iterator[list[Found]]:
        return in_batches(self._waiting())

    def _waiting(self) -> Iterator[Found]:
        try:
            with self._path.open("rb") as file:
                state = os.fstat(file.fileno())
                inode, start = self._read_to
                if inode != state.st_ino or start > state.st_size:
                    start = 0
                if state.st_size == start:
                    return
                with mmap.mmap(file.fileno(), state.st_size, access=mmap.ACCESS_READ) as mapped:
                    for begin, end in _mbox_messages(mapped, start):
                        raw = (
                            mapped[begin:end]
                            if end - begin <= HEAD + TAIL
                            else (mapped[begin : begin + HEAD] + b"\n" + mapped[end - TAIL : end])
                        )
                        yield Found(incoming=Incoming(raw=raw, source=self.name), place=begin)
                self._read_to = (state.st_ino, state.st_size)
        except OSError as problem:
            raise SourceUnreadable(source=self.name, problem=problem.strerror) from None

    def settle(self, found: Found, taken: Taken) -> None:
        if not taken.is_matched and not taken.was_known:
            keep_copy(self._unmatched, taken.key, found.incoming.raw)

    def wait(self, seconds: float) -> None:
        _wait_for_change([self._path], seconds)

    def close(self) -> None:
        """Nothing is held."""


def _mbox_messages(mapped: mmap.mmap, start: int) -> Iterator[tuple[int, int]]:
    """Begin and end of each message, the `From ` line included (it is part of what tells two apart)."""
    at = start
    if mapped[at : at + 5] != b"From ":
        at = mapped.find(b"\n\nFrom ", at)
        if at < 0:
            return
        at += 2
    while at < len(mapped):
        following = mapped.find(b"\n\nFrom ", at)
        end = following + 1 if following >= 0 else len(mapped)
        yield at, end
        if following < 0:
            return
        at = following + 2


def keep_copy(folder: Path, key: str, raw: bytes) -> Path:
    """A copy of a message for people to look at, by a rename in the same folder."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = folder / f"{key}.eml"
    if not path.exists():
        temporary = folder / f".{key}.{os.getpid()}"
        temporary.write_bytes(raw)
        os.chmod(temporary, 0o600)
        os.replace(temporary, path)
    return path


def spool(folder: Path, raw: bytes, suffix: str) -> Path:
    """Put a message or an event durably where `engine bounces` finds it; raises OSError."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    name = f"{time.time_ns():020}-{os.getpid()}{os.urandom(4).hex()}{suffix}"
    temporary = folder / f".{name}"
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        view = memoryview(raw)
        while view:
            view = view[os.write(descriptor, view) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    os.rename(temporary, folder / name)
    with contextlib.suppress(OSError):
        opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)
    return folder / name


def _wait_for_change(paths: list[Path], seconds: float) -> None:
    """Polls modification times each second: works on every file system, inotify does not (NFS)."""
    before = _times(paths)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(min(1.0, max(0.0, end - time.monotonic())))
        if _times(paths) != before:
            return


def _times(paths: list[Path]) -> list[tuple[int, int]]:
    result = []
    for path in paths:
        try:
            state = path.stat()
            result.append((state.st_mtime_ns, state.st_size))
        except OSError:
            result.append((0, 0))
    return result


def open_source(path: Path, unmatched: Path, *, delete: bool = False) -> Source:
    """The source at `path`: a Maildir, a folder, an mbox or a single message; raises SourceUnreadable."""
    if (path / "new").is_dir() and (path / "cur").is_dir():
        return MaildirSource(path, delete=delete)
    if path.is_dir():
        return FolderSource(path, unmatched)
    try:
        with path.open("rb") as file:
            is_mbox = file.read(5) == b"From "
    except OSError as problem:
        raise SourceUnreadable(source=path, problem=problem.strerror) from None
    return MboxSource(path, unmatched) if is_mbox else FolderSource(path, unmatched)
