"""The plan file: written and read alike, and refused where it does not fit."""

from __future__ import annotations

import pytest

from formats.plan import Batch, ListFile, Partition, Plan, PlanError, decode, encode

PLAN = Plan(
    campaign_id="spring",
    planned_at_us=1_700_000_000_000_000,
    rows=30,
    files=[ListFile("list.parquet", 30, [10, 20], "abc")],
    batches=[Batch(0, 10), Batch(10, 20)],
    partitions=[Partition(0, 2)],
    address_column="email",
    columns=["email"],
    list_fingerprint="l",
    settings_fingerprint="s",
    templates_fingerprint="t",
    key_id="k1",
)


def test_a_plan_comes_back_as_it_was() -> None:
    assert decode(encode(PLAN)) == PLAN


def test_another_format_is_refused_by_number() -> None:
    raw = encode(PLAN).replace(b'"format": 1', b'"format": 99')
    with pytest.raises(PlanError, match="99"):
        decode(raw)


@pytest.mark.parametrize(
    "raw", [b"", b"{}", b"[1]", encode(PLAN)[:-20], encode(PLAN).replace(b'"rows": 30', b'"rows": "30"')]
)
def test_what_is_no_plan_is_refused(raw: bytes) -> None:
    with pytest.raises(PlanError):
        decode(raw)
