"""Planning: every row in exactly one batch, every batch in exactly one partition."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.planner import (
    AddressColumnEmpty,
    ColumnMissing,
    ColumnTypesDiffer,
    NoAddressColumn,
    NoListFiles,
    cut_batches,
    cut_partitions,
    expand,
    read_shape,
    sample_mixing,
)
from engine.rows import ListUnreadable
from formats.plan import Batch


@given(st.lists(st.integers(0, 30_000), max_size=60), st.integers(1, 20_000))
def test_every_row_is_in_exactly_one_batch(row_groups: list[int], batch_rows: int) -> None:
    batches = cut_batches(row_groups, batch_rows)
    place = 0
    borders = {0}
    for rows in row_groups:
        borders.add(max(borders) + rows)
    for batch in batches:
        assert batch.first_row == place
        assert batch.rows > 0
        place += batch.rows
        assert place in borders  # whole row groups
    assert place == sum(row_groups)


@given(st.lists(st.integers(1, 30_000), max_size=200), st.integers(1, 12))
def test_every_batch_is_in_exactly_one_partition(sizes: list[int], partitions: int) -> None:
    batches = [Batch(sum(sizes[:i]), size) for i, size in enumerate(sizes)]
    cut = cut_partitions(batches, partitions)
    assert len(cut) == partitions
    place = 0
    for partition in cut:
        assert partition.first_batch == place
        place += partition.batches
    assert place == len(batches)
    total = sum(sizes)
    for partition in cut:
        rows = sum(b.rows for b in batches[partition.first_batch : partition.first_batch + partition.batches])
        assert abs(rows - total / partitions) <= max(sizes, default=0)


def write(path: Path, **columns: object) -> str:
    pq.write_table(pa.table(columns), path, row_group_size=50)
    return str(path)


def test_files_folders_and_patterns_are_lists(tmp_path: Path) -> None:
    (tmp_path / "lists").mkdir()
    for name in ("b", "a"):
        write(tmp_path / "lists" / f"{name}.parquet", email=["x@y.example"])
    both = [str(tmp_path / "lists" / "a.parquet"), str(tmp_path / "lists" / "b.parquet")]
    assert expand([str(tmp_path / "lists")], tmp_path) == both
    assert expand([str(tmp_path / "lists" / "*.parquet")], tmp_path) == both
    assert expand(["lists/a.parquet"], tmp_path) == both[:1]
    assert expand([f"file://{tmp_path}/lists/a.parquet"], tmp_path) == [f"file://{tmp_path}/lists/a.parquet"]
    with pytest.raises(NoListFiles, match="nothing"):
        expand(["nothing.parquet"], tmp_path)


def test_a_folder_by_uri_names_its_files(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", email=["x@y.example"])
    (found,) = expand([f"file://{tmp_path}"], tmp_path)
    assert read_shape([found], "email", None).rows == 1


def test_a_list_without_the_address_column_is_refused_with_its_columns(tmp_path: Path) -> None:
    path = write(tmp_path / "l.parquet", mail=["x@y.example"], name=["x"])
    with pytest.raises(NoAddressColumn, match="mail, name"):
        read_shape([path], "email", None)


def test_a_byte_order_mark_in_the_column_name_does_not_hide_it(tmp_path: Path) -> None:
    path = write(tmp_path / "l.parquet", **{"\ufeffemail": ["x@y.example"]})
    assert read_shape([path], "email", None).address_column == "email"


def test_id_is_taken_where_there_is_one(tmp_path: Path) -> None:
    path = write(tmp_path / "l.parquet", email=["x@y.example"], id=[7])
    assert read_shape([path], "email", None).id_column == "id"
    with pytest.raises(ColumnMissing, match="number"):
        read_shape([path], "email", "number")


def test_files_of_two_schemas_are_refused_by_name(tmp_path: Path) -> None:
    one = write(tmp_path / "1.parquet", email=["x@y.example"], age=[1])
    two = write(tmp_path / "2.parquet", email=["x@y.example"], age=["one"])
    three = write(tmp_path / "3.parquet", email=["x@y.example"])
    with pytest.raises(ColumnTypesDiffer, match=r"2\.parquet"):
        read_shape([one, two], "email", None)
    with pytest.raises(ColumnMissing, match=r"3\.parquet"):
        read_shape([one, three], "email", None)


@pytest.mark.parametrize("cut", [0, 3, 100, -1])
def test_a_truncated_file_is_refused_by_name(tmp_path: Path, cut: int) -> None:
    path = Path(write(tmp_path / "l.parquet", email=["x@y.example"] * 100))
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(ListUnreadable, match=r"l\.parquet"):
        read_shape([str(path)], "email", None)


def test_an_empty_address_column_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "l.parquet", email=pa.array([None, "", "  "], pa.string()))
    with pytest.raises(AddressColumnEmpty):
        sample_mixing(read_shape([path], "email", None))


def test_a_sorted_list_is_badly_mixed_and_a_mixed_one_is_not(tmp_path: Path) -> None:
    domains = ["a.example"] * 500 + ["b.example"] * 500
    ordered = write(tmp_path / "s.parquet", email=[f"u@{d}" for d in domains])
    mixed = write(tmp_path / "m.parquet", email=[f"u@{'ab'[i % 2]}.example" for i in range(1000)])
    assert sample_mixing(read_shape([ordered], "email", None)).is_bad
    assert not sample_mixing(read_shape([mixed], "email", None)).is_bad
