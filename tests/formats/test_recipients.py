"""Row numbers to row groups and back, and columns as Python values."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from formats.recipients import Numbering, bare_name, values


def test_rows_are_numbered_through_files_and_row_groups() -> None:
    numbering = Numbering([[3, 2], [], [4]])
    assert numbering.rows == 9
    assert [(s.file, s.group, s.first_row, s.rows) for s in numbering.spans] == [
        (0, 0, 0, 3),
        (0, 1, 3, 2),
        (2, 0, 5, 4),
    ]
    assert numbering.span_of(4).group == 1
    with pytest.raises(IndexError):
        numbering.span_of(9)


@given(st.lists(st.lists(st.integers(0, 5), max_size=4), max_size=4), st.integers(0, 30), st.integers(0, 30))
def test_the_spans_between_hold_exactly_the_rows_asked_for(files: list[list[int]], first: int, rows: int) -> None:
    numbering = Numbering(files)
    rows = min(rows, max(0, numbering.rows - first))
    found = [
        row
        for span in numbering.spans_between(first, rows)
        for row in range(span.first_row, span.first_row + span.rows)
    ]
    assert set(range(first, first + rows)) <= set(found)
    for row in range(first, first + rows):
        span = numbering.span_of(row)
        assert span.first_row <= row < span.first_row + span.rows


@pytest.mark.parametrize(
    ("array", "expected"),
    [
        (pa.array([9007199254740993, None, 3]), [9007199254740993, None, 3]),
        (pa.array([1, 2], pa.uint8()), [1, 2]),
        (pa.array(["a", None]), ["a", None]),
        (pa.array(["x", "y", None, "x"]).dictionary_encode(), ["x", "y", None, "x"]),
        (pa.array(["x"], pa.large_string()), ["x"]),
        (pa.array([Decimal("1.10")]), [Decimal("1.10")]),
        (pa.array([dt.date(2026, 3, 29)]), [dt.date(2026, 3, 29)]),
        (pa.array([True, None]), [True, None]),
        (pa.array([1.5, 2.0]), [1.5, 2.0]),
        (pa.chunked_array([[1], [2, 3]]), [1, 2, 3]),
        (pa.array([], pa.string()), []),
    ],
)
def test_values_keep_what_the_column_says(array: pa.Array, expected: list[object]) -> None:
    found = values(array)
    assert found == expected
    assert [type(value) for value in found] == [type(value) for value in expected]


def test_a_byte_order_mark_is_no_part_of_a_name() -> None:
    assert bare_name("\ufeffemail ") == "email"
