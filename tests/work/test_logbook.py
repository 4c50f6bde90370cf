"""The logbook on a real disk: what was committed is there, and a full disk costs no record of what is in flight."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
from pathlib import Path

import pyarrow as pa
import pytest

from engine.clock import SystemClock
from engine.work.logbook import Logbook, LogUnwritable
from formats.sendlog import Header, Kind, Log, Reader, Verdict


@pytest.fixture
def header() -> Header:
    return Header(
        log_id="i-001",
        campaign_id="spring",
        plan_fingerprint="f",
        incarnation="i",
        sender="a",
        host_id="h",
        boot_id="b",
        worker=0,
        started_at_us=1,
    )


def open_log(tmp_path: Path, header: Header, durability: str = "disk") -> Logbook:
    return Logbook(tmp_path / "i-001.arrows", header, SystemClock(), durability=durability)


def records(path: Path) -> tuple[list[tuple[int, int, int]], Log]:
    reader = Reader(pa.py_buffer(path.read_bytes()))
    found = [
        (row["kind"], row["serial"], row["row"]) for batch in reader for row in batch.to_pylist() if row["kind"] <= 2
    ]
    return found, reader.log


def test_a_committed_intent_is_on_the_disk(tmp_path: Path, header: Header) -> None:
    log = open_log(tmp_path, header)
    serial = log.intent(42, 1, log.provider("relay"), log.source("default"))
    asyncio.run(log.commit())
    assert records(log.path)[0] == [(Kind.INTENT, serial, 42)]
    log.close()


def test_a_closed_log_says_so_and_leaves_no_ballast(tmp_path: Path, header: Header) -> None:
    log = open_log(tmp_path, header)
    log.result(0, 7, 0, Verdict.INVALID, text="address has no @")
    log.close()
    found, told = records(log.path)
    assert found == [(Kind.RESULT, 0, 7)]
    assert told.is_closed
    assert os.listdir(tmp_path) == ["i-001.arrows"]


def test_the_log_is_locked_for_life_and_never_opened_twice(tmp_path: Path, header: Header) -> None:
    log = open_log(tmp_path, header)
    other = os.open(log.path, os.O_RDWR)
    with pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with pytest.raises(LogUnwritable):
        open_log(tmp_path, header)
    log.close()
    fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(other)


def test_a_full_disk_costs_the_ballast_and_no_record(
    tmp_path: Path, header: Header, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = open_log(tmp_path, header)
    log.intent(1, 1, 0, 0)
    log.write()
    really = os.write
    room = [100]  # half a batch fits

    def write(descriptor: int, raw: bytes) -> int:
        if log._ballast.exists():
            if room[0] <= 0:
                raise OSError(errno.ENOSPC, "No space left on device")
            written = really(descriptor, raw[: room[0]])
            room[0] -= written
            return written
        return really(descriptor, raw)

    monkeypatch.setattr(os, "write", write)
    log.result(1, 1, 1, Verdict.ACCEPTED, code=250)
    log.write()
    assert log.is_full
    monkeypatch.undo()
    log.close()
    found, told = records(log.path)
    assert found == [(Kind.INTENT, 1, 1), (Kind.RESULT, 1, 1)]
    assert told.is_closed


def test_a_disk_that_stays_full_keeps_the_log_whole(
    tmp_path: Path, header: Header, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = open_log(tmp_path, header)
    log.intent(1, 1, 0, 0)
    log.write()
    really = os.write

    def write(descriptor: int, raw: bytes) -> int:
        really(descriptor, raw[:10])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", write)
    log.result(1, 1, 1, Verdict.ACCEPTED, code=250)
    with pytest.raises(LogUnwritable, match="No space"):
        log.write()
    with pytest.raises(LogUnwritable):
        log.write() if log.pending else log._append(b"more")
    monkeypatch.undo()
    log.close()
    found, told = records(log.path)
    assert found == [(Kind.INTENT, 1, 1)]
    assert told.damage is None


def test_a_failed_sync_ends_the_log(tmp_path: Path, header: Header, monkeypatch: pytest.MonkeyPatch) -> None:
    log = open_log(tmp_path, header)

    def broken(descriptor: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(log, "_sync", broken)
    log.intent(1, 1, 0, 0)
    with pytest.raises(LogUnwritable, match="Input/output"):
        asyncio.run(log.commit())
    log.intent(2, 1, 0, 0)
    with pytest.raises(LogUnwritable):
        asyncio.run(log.commit())
    log.close()


def test_names_are_declared_once(tmp_path: Path, header: Header) -> None:
    log = open_log(tmp_path, header, durability="process")
    assert [log.provider("a"), log.provider("b"), log.provider("a"), log.source("a")] == [1, 2, 1, 1]
    asyncio.run(log.commit())
    log.close()
    names = [
        (row["reason"], row["row"], row["text"])
        for batch in Reader(pa.py_buffer(log.path.read_bytes()))
        for row in batch.to_pylist()
    ]
    assert names == [(1, 1, "a"), (1, 2, "b"), (2, 1, "a")]
