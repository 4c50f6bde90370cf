"""Files as earlier versions wrote them, read as they were meant. A format that changes adds a file, and keeps these.

`plan-1-first.json` is a plan from before capacity and warm-up stood in it, `plan-1-days.json` from before a day of
warm-up had a length.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa
import pytest

from formats import feedbacklog, outcomes, plan, sendlog, suppression
from formats.sendlog import Kind, Reason, Verdict

GOLDEN = Path(__file__).parent / "golden"


def test_a_plan() -> None:
    found = plan.decode((GOLDEN / "plan-1.json").read_bytes())
    assert (found.format, found.campaign_id, found.rows) == (1, "spring", 5)
    assert found.batches == [plan.Batch(0, 3), plan.Batch(3, 2)]
    assert found.partitions == [plan.Partition(0, 1), plan.Partition(1, 1)]
    assert found.files[0].row_groups == [3, 2]
    assert found.planned_per_hour == {"google": 36_000.0}
    assert found.warmup is not None
    assert found.warmup.daily == [100, 200]
    assert plan.encode(found) == (GOLDEN / "plan-1.json").read_bytes()


def test_a_plan_from_before_a_day_of_warm_up_had_a_length() -> None:
    found = plan.decode((GOLDEN / "plan-1-days.json").read_bytes())
    assert found == plan.decode((GOLDEN / "plan-1.json").read_bytes())
    assert found.warmup is not None
    assert found.warmup.day_s == 86_400.0


def test_a_plan_from_before_capacity_stood_in_it() -> None:
    found = plan.decode((GOLDEN / "plan-1-first.json").read_bytes())
    assert found.provider_rows == {"google": 4}
    assert found.planned_per_hour == {}
    assert found.warmup is None


def records(name: str) -> tuple[sendlog.Log, list[dict[str, object]]]:
    reader = sendlog.Reader(pa.py_buffer((GOLDEN / name).read_bytes()))
    found = [record for batch in reader for record in batch.to_pylist()]
    return reader.log, found


def test_a_send_log() -> None:
    log, found = records("sendlog-1.arrows")
    assert log.header.format == 1
    assert log.header.log_id == "log-1"
    assert (log.is_closed, log.damage, log.torn) == (True, None, 0)
    assert [record["kind"] for record in found] == [Kind.NAME, *[Kind.INTENT] * 3, *[Kind.RESULT] * 3]
    refused = found[5]
    assert (refused["row"], refused["verdict"], refused["reason"], refused["code"]) == (
        1,
        Verdict.REJECTED,
        Reason.RECIPIENT,
        550,
    )
    assert refused["text"] == "5.1.1 no such user"
    assert int(refused["at"].timestamp() * 1e6) == 1_700_000_001_000_002  # type: ignore[attr-defined]  # a datetime


def test_a_send_log_whose_end_was_torn_off_keeps_its_whole_batches() -> None:
    log, found = records("sendlog-1-torn.arrows")
    assert not log.is_closed
    assert len(found) == 7


def test_a_send_log_of_small_batches() -> None:
    log, found = records("sendlog-1-small.arrows")
    assert (log.is_closed, log.damage, log.torn) == (True, None, 0)
    assert [record["serial"] for record in found] == [*range(1, 21), 21, 21, 22]
    assert found[-2]["text"] == "2.0.0 Ok"


def test_a_suppression_list() -> None:
    raw = (GOLDEN / "suppression-1.truth").read_bytes()
    assert suppression.decode_header(raw).generation == b"12345678"
    frames = list(suppression.read_frames(raw[suppression.HEADER_BYTES :], at=suppression.HEADER_BYTES))
    assert frames[-1].end == len(raw)
    entries = [entry for frame in frames for entry in frame.entries()]
    assert [(entry.address, entry.scope, entry.reason, entry.lifted) for entry in entries] == [
        ("ann@example.org", suppression.ALL, "bounce", False),
        ("bob@example.org", "news", "unsubscribe", False),
        ("ann@example.org", suppression.ALL, "manual", True),
    ]
    assert entries[1].at_us == 1_700_000_000_000_001


def test_the_index_of_a_suppression_list() -> None:
    hashes = np.sort(suppression.hash_addresses(["ann@example.org", "bob@example.org"]))
    made = b"".join(bytes(piece) for piece in suppression.encode_index(hashes))
    assert made == (GOLDEN / "suppression-1.index").read_bytes()


def test_all_times_at_rest_are_utc_microseconds() -> None:
    header = outcomes.Header(campaign_id="c", rows=0, list_fingerprint="", merged_at_us=0)
    schemas = (sendlog.SCHEMA, outcomes.schema(header), feedbacklog.SCHEMA, suppression.SCHEMA)
    kept = [(field.name, field.type) for schema in schemas for field in schema if "at" in field.name.split("_")]
    # As a type where a reader of columns sees it, by name where it is a number.
    moment = pa.timestamp("us", tz="UTC")
    assert kept == [
        ("at", moment),
        ("first_at", moment),
        ("last_at", moment),
        ("bounced_at", moment),
        ("at", moment),
        ("at_us", pa.int64()),
    ]
    structs = (plan.Plan, sendlog.Header, outcomes.Header, suppression.Entry)
    names = [name for struct in structs for name in struct.__struct_fields__ if "at" in name.split("_")]
    assert names == ["planned_at_us", "started_at_us", "merged_at_us", "at_us"]


def test_a_later_format_is_refused_by_number() -> None:
    # Format 1 is the first of each: there is none before it to read. `test_plan_file.py` and the tests of the outcomes
    # say the same of theirs.
    later = msgspec.structs.replace(records("sendlog-1.arrows")[0].header, format=2)
    with pytest.raises(sendlog.LogDamaged, match="format 2"):
        sendlog.Reader(pa.py_buffer(sendlog.Encoder(later).end()))
    raw = bytearray((GOLDEN / "suppression-1.truth").read_bytes())
    raw[16] = 2
    with pytest.raises(suppression.SuppressionError, match="format 2"):
        suppression.decode_header(bytes(raw))
