"""Sources: exports as they come, and what is said of those that cannot be read."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from engine.lists.opening import Reading, open_files, parse_types
from engine.lists.parquet_source import parquet_source
from engine.lists.prepare import work_folder
from engine.lists.source import ListUnreadable
from engine.lists.sql_source import DatabaseFailed, redacted, sql_source

CSV = "email,name\nann@x.org,Müller\nbob@x.org,Zoë\n"


def opened(path: Path, raw: bytes | None = None, **reading: Any) -> tuple[list[tuple[Any, ...]], tuple[str, ...]]:
    if raw is not None:
        path.write_bytes(raw)
    with work_folder(path.parent) as work:
        source = open_files([path], work, Reading(**reading))[0]
        frame = source.scan().collect()
    assert frame.height == source.rows
    return frame.rows(), source.notes


@pytest.mark.parametrize(
    ("encoding", "said"),
    [("utf-8", None), ("utf-8-sig", None), ("cp1252", "cp1252"), ("utf-16", "utf-16-le"), ("utf-16-be", "utf-16-be")],
)
def test_every_usual_encoding_is_told_and_named(tmp_path: Path, encoding: str, said: str | None) -> None:
    rows, notes = opened(tmp_path / "x.csv", CSV.encode(encoding))
    assert rows == [("ann@x.org", "Müller"), ("bob@x.org", "Zoë")]
    assert [said in note for note in notes] == ([True] if said else [])


def test_a_cp1252_file_whose_one_odd_byte_is_far_behind(tmp_path: Path) -> None:
    raw = b"email,name\n" + b"a@x.org,A\n" * 500_000 + "b@x.org,ü\n".encode("cp1252")
    rows, notes = opened(tmp_path / "x.csv", raw)
    assert rows[-1] == ("b@x.org", "ü")
    assert "cp1252" in notes[0]


def test_an_encoding_that_is_given_is_used(tmp_path: Path) -> None:
    rows, notes = opened(tmp_path / "x.csv", "email,name\na@x.org,Łódź\n".encode("cp1250"), encoding="cp1250")
    assert rows == [("a@x.org", "Łódź")]
    assert notes == ()


@pytest.mark.parametrize("mark", [",", ";", "\t", "|"])
def test_the_delimiter_is_looked_for_in_the_header(tmp_path: Path, mark: str) -> None:
    rows, _ = opened(tmp_path / "x.csv", f'email{mark}"a,b;c"\na@x.org{mark}1\n'.encode())
    assert rows == [("a@x.org", "1")]


def test_compressed_files(tmp_path: Path) -> None:
    assert opened(tmp_path / "x.csv.gz", gzip.compress(CSV.encode()))[0][0] == ("ann@x.org", "Müller")
    with pa.CompressedOutputStream(str(tmp_path / "x.csv.zst"), "zstd") as file:
        file.write(CSV.encode())
    assert opened(tmp_path / "x.csv.zst")[0][0] == ("ann@x.org", "Müller")


def test_values_stay_as_they_were_typed(tmp_path: Path) -> None:
    raw = b"email,id,zip\na@x.org,9007199254740993,007\nb@x.org,,NULL\n"
    assert opened(tmp_path / "x.csv", raw)[0] == [("a@x.org", "9007199254740993", "007"), ("b@x.org", None, "NULL")]
    typed, _ = opened(tmp_path / "x.csv", raw, types={"id": "int"})
    assert typed[0] == ("a@x.org", 9007199254740993, "007")
    with pytest.raises(ListUnreadable, match="invalid value 'NULL'"):
        opened(tmp_path / "x.csv", raw, types={"zip": "int"})
    with pytest.raises(ValueError, match="COLUMN=TYPE"):
        parse_types(["id=number"])


def test_ragged_records_are_left_out_with_their_lines(prepared: Callable[..., Any]) -> None:
    made = prepared(b'email,n\na@x.org,"two\nlines"\n\nb@x.org\nc@x.org,1\nd@x.org,1,2\nnix,1\n')
    told = made.rejects.select("row", "line", "value", "reason").sort("row").rows()
    assert told == [
        (2, None, None, "empty"),
        (3, 5, "b@x.org", "ragged"),
        (5, 7, "d@x.org,1,2", "ragged"),
        (6, None, "nix", "invalid"),
    ]
    assert made.addresses == ["a@x.org", "c@x.org"]
    assert made.report.rows == 6


def test_quoted_newlines_commas_and_quotes(tmp_path: Path) -> None:
    raw = b'email,n\r\na@x.org,"one\r\ntwo, ""three"""\r\n'
    assert opened(tmp_path / "x.csv", raw)[0] == [("a@x.org", 'one\r\ntwo, "three"')]


def test_a_quote_that_is_never_closed_is_pointed_out(tmp_path: Path) -> None:
    _, notes = opened(tmp_path / "x.csv", b'email,n\na@x.org,"open\nb@x.org,1\n')
    assert "not closed" in notes[0]


@pytest.mark.slow
def test_millions_of_blank_rows_are_counted(prepared: Callable[..., Any]) -> None:
    made = prepared(b"email,n\na@x.org,1\n" + b"\n" * 200_000 + b",\n" * 1000 + b"b@x.org,2\n")
    assert made.addresses == ["a@x.org", "b@x.org"]
    assert made.report.rejected == {"empty": 201_000}


def test_nul_bytes_do_not_pass_into_an_address(prepared: Callable[..., Any]) -> None:
    made = prepared(b"email,n\na\0@x.org,1\nb@x.org,M\0ller\n")
    assert made.addresses == ["b@x.org"]
    assert made.why() == [(1, "a\0@x.org", "invalid")]


def test_a_value_of_many_megabytes(tmp_path: Path) -> None:
    rows, _ = opened(tmp_path / "x.csv", b"email,n\na@x.org," + b"x" * 12_000_000 + b"\nb@x.org,1\n")
    assert [len(row[1]) for row in rows] == [12_000_000, 1]


@pytest.mark.parametrize(
    ("raw", "problem"),
    [
        (b"", "empty"),
        (b"\n \n", "empty"),
        (b"email,email\na,b\n", "two columns are named 'email'"),
        (b"email,\na,b\n", "column 2 has no name"),
    ],
)
def test_headers_that_make_no_list(tmp_path: Path, raw: bytes, problem: str) -> None:
    with pytest.raises(ListUnreadable, match=problem):
        opened(tmp_path / "x.csv", raw)


def test_json_lines_with_missing_keys_and_broken_lines(prepared: Callable[..., Any], tmp_path: Path) -> None:
    lines = [
        '\ufeff{"email": "a@x.org", "id": 9007199254740993}',
        '{"email": "b@x.org", "tags": ["x", "y"]}',
        "",
        '{"email": "c@x.org", ',
        "[1]",
        '{"email": "d@x.org"}',
    ]
    (tmp_path / "x.jsonl").write_text("\n".join(lines))
    made = prepared(tmp_path / "x.jsonl")
    assert made.rows.sort("email").select("email", "id", "tags").rows() == [
        ("a@x.org", 9007199254740993, None), ("b@x.org", None, ["x", "y"]), ("d@x.org", None, None),
    ]  # fmt: skip
    assert made.rejects.select("row", "line", "reason").sort("row").rows() == [
        (3, 3, "empty"), (4, 4, "malformed"), (5, 5, "malformed"),
    ]  # fmt: skip
    (tmp_path / "no.jsonl").write_text("what\n")
    with pytest.raises(ListUnreadable, match="not one line"):
        prepared(tmp_path / "no.jsonl")


def test_arrow_files_and_streams(tmp_path: Path) -> None:
    table = pa.table({"email": ["a@x.org", "b@x.org"], "n": [1, None]})
    with pa.ipc.new_stream(tmp_path / "x.arrows", table.schema) as stream:
        stream.write_table(table)
    with pa.ipc.new_file(tmp_path / "x.arrow", table.schema) as file:
        file.write_table(table)
    for name in ("x.arrows", "x.arrow"):
        assert opened(tmp_path / name)[0] == [("a@x.org", 1), ("b@x.org", None)]
    raw = (tmp_path / "x.arrow").read_bytes()
    with pytest.raises(ListUnreadable, match="damaged"):
        opened(tmp_path / "y.arrow", raw[:-50])


def test_parquet_that_cannot_be_read_says_why(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    pl.DataFrame({"email": ["a@x.org"] * 100}).write_parquet(path)
    raw = path.read_bytes()
    for wrong, problem in [
        (b"", "empty"),
        (raw[: len(raw) // 2], "cut short"),
        (raw[:-4] + b"PARE", "encrypted"),
        (b"PARE" + raw[4:-4] + b"PARE", "encrypted"),
        (b"email\na@x.org\n", "not Parquet"),
        (raw[:-60] + b"\xff" * 52 + raw[-8:], "damaged"),
    ]:
        path.write_bytes(wrong)
        with pytest.raises(ListUnreadable, match=problem):
            parquet_source(path)
    with pytest.raises(ListUnreadable, match="no such file"):
        opened(tmp_path / "nowhere.parquet")


def test_parquet_damaged_in_the_middle_leaves_nothing(prepared: Callable[..., Any], tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    pl.DataFrame({"email": [f"u{n}@x.org" for n in range(10_000)]}).write_parquet(path)
    raw = bytearray(path.read_bytes())
    raw[1000:3000] = b"\xff" * 2000
    path.write_bytes(raw)
    with pytest.raises(ListUnreadable):
        prepared(path)
    assert list((tmp_path / "out").iterdir()) == []


def test_encrypted_columns_are_refused(tmp_path: Path) -> None:
    import pyarrow.parquet.encryption as pe

    class Kms(pe.KmsClient):  # type: ignore[misc]  # pyarrow has no types
        def wrap_key(self, key: bytes, name: str) -> bytes:
            return key.hex().encode()

        def unwrap_key(self, wrapped: bytes, name: str) -> bytes:
            return bytes.fromhex(wrapped.decode())

    factory = pe.CryptoFactory(lambda configuration: Kms())
    how = pe.EncryptionConfiguration(footer_key="f", column_keys={"c": ["email"]}, plaintext_footer=False)
    properties = factory.file_encryption_properties(pe.KmsConnectionConfig(), how)
    with pq.ParquetWriter(
        tmp_path / "x.parquet", pa.schema([("email", pa.string())]), encryption_properties=properties
    ) as writer:
        writer.write_table(pa.table({"email": ["a@x.org"]}))
    with pytest.raises(ListUnreadable, match="encrypted"):
        parquet_source(tmp_path / "x.parquet")


def test_files_written_by_others(tmp_path: Path) -> None:
    duckdb = pytest.importorskip("duckdb")
    path = tmp_path / "x.parquet"
    duckdb.sql(
        "select 'a@x.org' as email, 1.10::decimal(10,2) as price, now() as at, [1,2] as l, {'a':1} as s"
    ).write_parquet(str(path))
    rows, _ = opened(path)
    assert rows[0][0] == "a@x.org"
    table = pa.table({"email": ["a@x.org"], "at": pa.array([1], pa.timestamp("ns"))})
    pq.write_table(table, path, use_deprecated_int96_timestamps=True)
    assert opened(path)[0][0][0] == "a@x.org"


def test_a_folder_is_all_its_list_files(prepared: Callable[..., Any], tmp_path: Path) -> None:
    folder = tmp_path / "many"
    folder.mkdir()
    (folder / "1.csv").write_text("email\na@x.org\n")
    pl.DataFrame({"email": ["b@x.org"]}).write_parquet(folder / "2.parquet")
    (folder / "_SUCCESS").write_text("")
    assert prepared(folder).addresses == ["a@x.org", "b@x.org"]
    (tmp_path / "none").mkdir()
    with pytest.raises(ListUnreadable, match="without a list file"):
        prepared(tmp_path / "none")


def test_providers_from_what_resolve_keeps_or_from_a_map(tmp_path: Path) -> None:
    from engine.lists.providers_file import read_providers

    path = tmp_path / "domains.jsonl"
    path.write_text(
        '{"domain":"a.org","kind":"route","at_us":1,"provider":"old"}\n{"domain":"b.org","kind":"deferred","at_us":1}\n'
        '{"domain":"a.org","kind":"route","at_us":2,"provider":"new"}\n'
    )
    assert read_providers(path) == {"a.org": "new"}
    path.write_text('{"a.org": "new"}')
    assert read_providers(path) == {"a.org": "new"}
    path.write_text("a.org,new\n")
    with pytest.raises(ListUnreadable, match=r"domains\.jsonl"):
        read_providers(path)


def test_sqlite_by_query(tmp_path: Path) -> None:
    import sqlite3

    pytest.importorskip("adbc_driver_sqlite")
    path = tmp_path / "shop.db"
    with sqlite3.connect(path) as shop:
        shop.execute("create table users (id integer, email text, active integer, score real, note text)")
        shop.executemany(
            "insert into users values (?, ?, ?, ?, null)", [(n, f"u{n}@x.org", n % 2, n / 2) for n in range(3000)]
        )
    shop.close()
    with work_folder(tmp_path) as work:
        source = sql_source(f"sqlite:///{path}", "select * from users where active", work)
        frame = source.scan().collect()
    assert source.rows == frame.height == 1500
    assert frame.row(0) == (1, "u1@x.org", 1, 0.5, None)
    with work_folder(tmp_path) as work, pytest.raises(DatabaseFailed, match="nowhere"):
        sql_source(f"sqlite:///{path}", "select * from nowhere", work)
    with work_folder(tmp_path) as work, pytest.raises(DatabaseFailed, match="there is no file"):
        sql_source(f"sqlite:///{tmp_path}/other.db", "select 1", work)


def test_a_password_is_never_shown() -> None:
    assert redacted("postgresql://me:s3cret@db.example/shop") == "postgresql://me:***@db.example/shop"
    with pytest.raises(DatabaseFailed) as failed, work_folder(Path("/tmp")) as work:
        sql_source("postgresql://me:s3cret@127.0.0.1:1/shop", "select 1", work)
    assert "s3cret" not in str(failed.value)
    assert json.dumps(str(failed.value))
