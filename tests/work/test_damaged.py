"""Which logs do not tell all that was done, and for which of them rows are held already."""

from __future__ import annotations

from pathlib import Path

from engine.clock import SystemClock
from engine.work.damaged import damaged_logs, mark_of
from engine.work.logbook import Logbook
from formats.sendlog import Header, Verdict


def write_log(folder: Path, log_id: str, *, event: str | None = None, closed: bool = True) -> Path:
    header = Header(log_id=log_id, campaign_id="c", plan_fingerprint="p", incarnation="i", sender="s", host_id="h",
                    boot_id="b", worker=0, started_at_us=1)  # fmt: skip
    path = folder / f"{log_id}.arrows"
    log = Logbook(path, header, SystemClock())
    for row in range(3):
        log.result(log.intent(row, 1, 0, 0), row, 1, Verdict.ACCEPTED, code=250)
        log.write()
    if event is not None:
        log.event(event)
        log.write()
    if closed:
        log.close()
    return path


def flip(path: Path, at: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 4
    path.write_bytes(raw)


def test_whole_torn_and_empty_logs_tell_all(tmp_path: Path) -> None:
    whole = write_log(tmp_path, "a-001")
    raw = whole.read_bytes()
    killed = tmp_path / "a-002.arrows"
    killed.write_bytes(raw[: len(raw) // 2])
    in_its_first_write = tmp_path / "a-003.arrows"
    in_its_first_write.write_bytes(raw[:300])
    before_it = tmp_path / "a-004.arrows"
    before_it.touch()
    assert damaged_logs([whole, killed, in_its_first_write, before_it]) == {}


def test_a_flipped_bit_in_the_header_or_behind_it_is_named(tmp_path: Path) -> None:
    header, behind = write_log(tmp_path, "a-001"), write_log(tmp_path, "a-002")
    flip(header, 40)
    flip(behind, behind.stat().st_size * 2 // 3)
    found = damaged_logs([header, behind])
    assert set(found) == {"a-001", "a-002"}


def test_rows_are_held_once_for_each_damaged_log(tmp_path: Path) -> None:
    first, second = write_log(tmp_path, "a-001"), write_log(tmp_path, "a-002")
    for path in (first, second):
        flip(path, path.stat().st_size * 2 // 3)
    (problem, _) = damaged_logs([first, second]).values()
    adopted = write_log(tmp_path, "b-adopt", event=mark_of("a-001", problem))
    assert set(damaged_logs([first, second, adopted])) == {"a-002"}
