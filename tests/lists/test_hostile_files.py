"""Files that break others: enormous row groups, thousands of columns, a row of megabytes, zeros, wrong types."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from engine.lists.columns import ColumnsDiffer
from engine.lists.inspect import inspect
from engine.lists.parquet_source import parquet_source
from engine.lists.source import ListUnreadable


def peak_mb(folder: Path, source: Path, **wishes: object) -> tuple[int, int]:
    """`prepare` in a process of its own: megabytes at most above what the imports take, and rows kept."""
    code = f"""
import resource
from pathlib import Path
from engine.lists.opening import Reading, open_files
from engine.lists.prepare import Wishes, prepare, work_folder
import numpy, polars, pyarrow.parquet
polars.DataFrame({{"a": ["b"]}}).lazy().collect()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
folder = Path({str(folder)!r})
with work_folder(folder) as work:
    sources = open_files([Path({str(source)!r})], work, Reading())
    report = prepare(sources, folder / "l.parquet", folder / "r.parquet", Wishes(**{wishes!r}), work=work)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024, report.kept)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=os.environ)
    assert done.returncode == 0, done.stderr
    above, kept = done.stdout.split()
    return int(above), int(kept)


def test_thousands_of_columns(prepared: Callable[..., Any], tmp_path: Path) -> None:
    names = {f"c{number}": [number, None, 3] for number in range(3000)}
    made = prepared(pl.DataFrame({"email": ["a@x.org", "nix", "b@y.org"], **names}))
    assert made.addresses == ["a@x.org", "b@y.org"]
    assert made.rows.width == 3002
    assert sorted(made.rows["c2999"].to_list()) == [3, 2999]
    assert len(inspect([made.path]).columns) == 3002


@pytest.mark.parametrize("suffix", ["csv", "parquet", "jsonl"])
def test_a_row_of_megabytes_is_a_row(prepared: Callable[..., Any], tmp_path: Path, suffix: str) -> None:
    letter = "x" * 6_000_000
    frame = pl.DataFrame({"email": ["a@x.org", "b@x.org", "c@x.org"], "letter": ["", letter, ""]})
    path = tmp_path / f"long.{suffix}"
    {"csv": frame.write_csv, "parquet": frame.write_parquet, "jsonl": frame.write_ndjson}[suffix](path)
    made = prepared(path)
    assert made.addresses == ["a@x.org", "b@x.org", "c@x.org"]
    assert max(len(text or "") for text in made.rows["letter"]) == len(letter)


def test_an_address_of_megabytes_is_no_address(prepared: Callable[..., Any]) -> None:
    made = prepared({"email": ["a" * 5_000_000 + "@x.org", "b@x.org", "@".join(["c"] * 1_000_000)]})
    assert made.addresses == ["b@x.org"]
    assert [reason for _, _, reason in made.why()] == ["invalid", "invalid"]


def test_zeros_in_text(prepared: Callable[..., Any], tmp_path: Path) -> None:
    made = prepared(b"email,name\na@x.org,An\x00n\nb\x00@x.org,Bob\n\x00c@x.org,Eve\nd@x.org,Dan\n")
    assert made.addresses == ["a@x.org", "d@x.org"]
    assert made.rows.filter(pl.col("email") == "a@x.org")["name"].to_list() == ["An\x00n"]
    assert [(row, reason) for row, _, reason in made.why()] == [(2, "invalid"), (3, "invalid")]
    # A disk that was full when the export ended leaves a tail of zeros.
    tail = tmp_path / "tail.csv"
    tail.write_bytes(b"email,name\na@x.org,Ann\nb@x.org,Bob\n" + bytes(5000))
    found = prepared(tail)
    assert found.addresses == ["a@x.org", "b@x.org"]
    assert found.report.rows == 3


def test_another_type_in_one_of_the_files(prepared: Callable[..., Any], tmp_path: Path) -> None:
    first, second = tmp_path / "1.parquet", tmp_path / "2.parquet"
    pl.DataFrame({"email": ["a@x.org"], "id": [1]}).write_parquet(first)
    pl.DataFrame({"email": ["b@x.org"], "id": ["007"]}).write_parquet(second)
    with pytest.raises(ColumnsDiffer, match=r"2\.parquet.*'id'"):
        prepared(first, second)
    pl.DataFrame({"email": ["b@x.org"], "id": pl.Series([2], dtype=pl.Int16)}).write_parquet(second)
    assert prepared(first, second).rows["id"].sort().to_list() == [1, 2]
    pl.DataFrame({"email": pl.Series([["b@x.org"]]), "id": [2]}).write_parquet(second)
    with pytest.raises(ColumnsDiffer, match=r"2\.parquet.*'email'"):
        prepared(first, second)


def test_addresses_that_are_numbers_or_lists(prepared: Callable[..., Any], tmp_path: Path) -> None:
    from engine.lists.prepare import NothingLeft

    path = tmp_path / "x.parquet"
    pl.DataFrame({"email": [1, 2]}).write_parquet(path)
    with pytest.raises(NothingLeft, match="2 invalid"):
        prepared(path)


def test_a_row_group_of_many_rows_is_said_and_cut(prepared: Callable[..., Any], tmp_path: Path) -> None:
    """The stand-in: all rows in one group; the slow one below has the size."""
    path = tmp_path / "one.parquet"
    pl.DataFrame({"email": [f"u{n}@x{n % 5}.org" for n in range(60_000)]}).write_parquet(path, row_group_size=60_000)
    made = prepared(path)
    footer = pq.read_metadata(made.path)
    assert {footer.row_group(group).num_rows for group in range(footer.num_row_groups)} == {10_000}


def _write_one_group(path: Path, rows: int, bytes_a_row: int) -> None:
    schema = pa.schema([("email", pa.string()), ("letter", pa.large_binary())])
    letters = pa.array([os.urandom(bytes_a_row)] * 1000, pa.large_binary())
    with pq.ParquetWriter(path, schema, compression="zstd", use_dictionary=False) as writer:
        pieces = [
            pa.table({"email": [f"u{first + n}@x{n % 7}.org" for n in range(1000)], "letter": letters}, schema)
            for first in range(0, rows, 1000)
        ]
        writer.write_table(pa.concat_tables(pieces), row_group_size=rows)


@pytest.mark.long
def test_a_row_group_of_two_gigabytes(tmp_path: Path) -> None:
    path = tmp_path / "huge.parquet"
    _write_one_group(path, 40_000, 54_000)
    assert any("row group of 2.0 GB" in note for note in parquet_source(path).notes)
    assert any("2.0 GB" in warning for warning in inspect([path]).warnings)
    above, kept = peak_mb(tmp_path, path, memory_bytes=1 << 30)
    assert kept == 40_000
    assert above < 8_000  # the group as it is read, and the piece that is put in order


@pytest.mark.long
def test_a_row_of_fifty_megabytes_in_csv(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    with open(path, "wb") as file:
        file.write(b"email,letter\n" + b"".join(b"u%d@x.org,\n" % n for n in range(1000)))
        file.write(b"long@x.org," + b"x" * 50_000_000 + b"\n")
        file.write(b"".join(b"v%d@x.org,\n" % n for n in range(1000)))
    above, kept = peak_mb(tmp_path, path)
    assert kept == 2001
    assert above < 1_500


def test_a_footer_that_claims_more_than_there_is(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    pl.DataFrame({"email": ["a@x.org"] * 100}).write_parquet(path)
    raw = path.read_bytes()
    path.write_bytes(raw[:-8] + (2**31 - 1).to_bytes(4, "little") + b"PAR1")
    with pytest.raises(ListUnreadable, match="damaged Parquet footer"):
        parquet_source(path)


def test_gzip_that_ends_early(prepared: Callable[..., Any], tmp_path: Path) -> None:
    import gzip

    path = tmp_path / "x.csv.gz"
    path.write_bytes(gzip.compress(b"email\n" + b"".join(b"u%d@x.org\n" % n for n in range(50_000)))[:-2000])
    with pytest.raises(ListUnreadable, match=r"x\.csv\.gz"):
        prepared(path)
    assert not (tmp_path / "out").exists() or list((tmp_path / "out").iterdir()) == []
