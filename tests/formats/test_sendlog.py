"""The send log: what was sealed is read, and nothing else, whatever happened to the bytes."""

from __future__ import annotations

import io

import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from formats import sendlog
from formats.sendlog import SCHEMA, Encoder, Header, Kind, LogDamaged, Reader, Record, Verdict

HEADER = Header(
    log_id="i1-001",
    campaign_id="spring",
    plan_fingerprint="f" * 32,
    incarnation="i1",
    sender="host-a",
    host_id="h",
    boot_id="b",
    worker=0,
    started_at_us=1_700_000_000_000_000,
)


def intent(serial: int, row: int) -> Record:
    return (Kind.INTENT, serial, row, 1_700_000_000_000_000 + serial, 1, 0, 0, 0, 1, 1, 0, None)


def result(serial: int, row: int, text: str | None = "2.0.0 Ok") -> Record:
    return (Kind.RESULT, serial, row, 1_700_000_000_000_500 + serial, 1, Verdict.ACCEPTED, 0, 250, 1, 1, 0, text)


def log_of(groups: list[list[Record]], *, closed: bool = True) -> tuple[bytes, list[int]]:
    """A log's bytes and where each batch ends."""
    encoder, raw, ends = Encoder(HEADER), b"", []
    for group in groups:
        raw += encoder.batch(group)
        ends.append(len(raw))
    return (raw + encoder.end() if closed else raw), ends


def read(raw: bytes) -> tuple[list[Record], Reader]:
    reader = Reader(pa.py_buffer(raw))
    rows = [tuple(row.values()) for batch in reader for row in batch.cast(_plain()).to_pylist()]
    return rows, reader


def _plain() -> pa.Schema:
    """Times as numbers, to compare with what was written."""
    at = SCHEMA.get_field_index("at")
    return SCHEMA.set(at, pa.field("at", pa.int64(), nullable=False))


GROUPS = [
    [intent(1, 10), intent(2, 11)],
    [result(1, 10), intent(3, 12)],
    [result(2, 11, None), result(3, 12, "é \u2028")],
]


def test_a_closed_log_gives_back_every_record() -> None:
    raw, _ = log_of(GROUPS)
    rows, reader = read(raw)
    assert rows == [record for group in GROUPS for record in group]
    assert reader.log.is_closed
    assert reader.log.damage is None
    assert reader.log.header == HEADER


def test_a_killed_writer_leaves_a_log_without_an_end_and_without_damage() -> None:
    raw, _ = log_of(GROUPS, closed=False)
    rows, reader = read(raw)
    assert len(rows) == 6
    assert not reader.log.is_closed
    assert reader.log.damage is None
    assert reader.log.torn == 0


def test_a_cut_anywhere_leaves_the_whole_batches_before_it() -> None:
    raw, ends = log_of(GROUPS, closed=False)
    sizes = [len(group) for group in GROUPS]
    for cut in range(len(raw)):
        try:
            rows, reader = read(raw[:cut])
        except LogDamaged:
            assert cut < ends[0]  # not even the header: no record was sealed
            continue
        whole = sum(size for size, end in zip(sizes, ends, strict=True) if end <= cut)
        assert len(rows) == whole, cut
        assert reader.log.damage is None, cut
        assert not reader.log.is_closed


@pytest.mark.parametrize("zeros", [7, 8, 512, 4096])
def test_a_tail_of_zeros_is_damage_and_no_clean_end(zeros: int) -> None:
    raw, _ = log_of(GROUPS, closed=False)
    rows, reader = read(raw + bytes(zeros))
    assert len(rows) == 6
    assert reader.log.damage is not None
    assert not reader.log.is_closed


@settings(deadline=None, max_examples=300)
@given(st.data())
def test_any_damage_leaves_an_exact_prefix(data: st.DataObject) -> None:
    raw, _ = log_of(GROUPS)
    true = [record for group in GROUPS for record in group]
    damaged = bytearray(raw)
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    cut = data.draw(st.integers(0, len(raw)))
    try:
        rows, reader = read(bytes(damaged[:cut]))
    except LogDamaged:
        return
    assert rows == true[: len(rows)]
    assert len(rows) in (0, 2, 4, 6)
    if len(rows) < 6 or damaged[: reader.log.length] != raw[: reader.log.length]:
        assert not reader.log.is_closed or len(rows) == 6


def test_every_flipped_bit_before_the_end_is_noticed() -> None:
    raw, _ = log_of(GROUPS)
    for at in range(0, len(raw) - 8):
        damaged = bytearray(raw)
        damaged[at] ^= 0x10
        try:
            rows, reader = read(bytes(damaged))
        except LogDamaged:
            continue
        assert not (reader.log.is_closed and reader.log.damage is None), at
        assert len(rows) < 6 or not reader.log.is_closed


def test_a_flip_before_the_last_batch_is_never_taken_for_a_killed_writers_end() -> None:
    """A length that grew makes the rest of the log look like one unfinished batch: its rows would go out again."""
    raw, ends = log_of(GROUPS, closed=False)
    for at in range(ends[0], ends[1]):
        for bit in range(8):
            damaged = bytearray(raw)
            damaged[at] ^= 1 << bit
            rows, reader = read(bytes(damaged))
            assert len(rows) == 2, (at, bit)
            assert reader.log.damage is not None, (at, bit)


def test_bytes_behind_the_end_are_damage() -> None:
    raw, _ = log_of(GROUPS)
    _, reader = read(raw + b"another log's bytes")
    assert reader.log.is_closed
    assert reader.log.damage is not None


def test_pyarrow_and_polars_read_a_log_as_it_is() -> None:
    raw, _ = log_of(GROUPS)
    assert pa.ipc.open_stream(raw).read_all().num_rows == 6
    frame = pl.read_ipc_stream(io.BytesIO(raw))
    assert frame["serial"].to_list() == [1, 2, 1, 3, 2, 3]


def test_something_else_is_no_log() -> None:
    with pytest.raises(LogDamaged):
        Reader(pa.py_buffer(b"PAR1 and so on"))
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, pa.schema([("a", pa.int8())])):
        pass
    with pytest.raises(LogDamaged):
        Reader(pa.py_buffer(sink.getvalue()))


def test_the_length_and_seal_told_are_those_that_a_reader_finds() -> None:
    encoder = Encoder(HEADER)
    raw = encoder.batch(GROUPS[0]) + encoder.batch(GROUPS[1])
    _, reader = read(raw)
    assert (reader.log.length, reader.log.seal) == (encoder.length, encoder.seal)


@settings(deadline=None, max_examples=30)
@given(sizes=st.lists(st.integers(1, 40), min_size=1, max_size=8), closed=st.booleans())
def test_small_batches_are_plain_and_large_ones_compressed_in_one_stream(sizes: list[int], closed: bool) -> None:
    serials = iter(range(1, 1000))
    groups = [[intent(next(serials), 7) for _ in range(size)] for size in sizes]
    raw, _ = log_of(groups, closed=closed)
    rows, reader = read(raw)
    assert rows == [record for group in groups for record in group]
    assert (reader.log.is_closed, reader.log.damage, reader.log.torn) == (closed, None, 0)


def test_a_small_batch_takes_less_than_its_compressed_form(monkeypatch: pytest.MonkeyPatch) -> None:
    group = [intent(1, 10), result(1, 10)]
    plain, _ = log_of([group] * 50)
    monkeypatch.setattr(sendlog, "_WORTH_COMPRESSING", 0)
    compressed, _ = log_of([group] * 50)
    assert len(plain) < 0.8 * len(compressed)
    assert read(plain)[0] == read(compressed)[0], "what an earlier version wrote is read alike"
