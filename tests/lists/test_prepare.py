"""prepare: what goes in, what comes out, and a reason for every row that does not."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.lists.cleaning import CANONICAL, DOMAIN, PROBLEM, clean_addresses, plain_parts, settle
from engine.lists.columns import ColumnsDiffer, NoAddressColumn
from engine.lists.parquet_source import parquet_source
from engine.lists.prepare import ColumnMissing, NothingLeft, Wishes, prepare, work_folder
from engine.lists.scan import FilterWrong
from engine.lists.suppressions import Suppressions
from formats import listmeta
from formats.address import AddressError, canonical, parse_mailbox, parse_mailboxes
from formats.suppression import Entry

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import make_list


def test_every_row_is_kept_or_has_a_reason(prepared: Callable[..., Any]) -> None:
    made = prepared(
        {
            "email": ["ann@x.org ", "Test", "Test@test", "a b@x.org", "a..b@x.org", "b@x.org,c@x.org", None, "",
                      "ANN@X.org", "me+1234@gmail.com", "\ufeffeve@X.ORG", "joe@straße.de"],
            "id": list(range(12)),
        }
    )  # fmt: skip
    assert made.addresses == ["ann@x.org", "eve@x.org", "joe@xn--strae-oqa.de", "me+1234@gmail.com"]
    assert made.why() == [
        (2, "Test", "invalid"),
        (3, "Test@test", "invalid"),
        (4, "a b@x.org", "invalid"),
        (5, "a..b@x.org", "invalid"),
        (6, "b@x.org,c@x.org", "invalid"),
        (7, None, "empty"),
        (8, "", "empty"),
        (9, "ANN@X.org", "duplicate"),
    ]
    assert "as row 1 of" in made.rejects.filter(pl.col("row") == 9)["detail"][0]
    assert dict(zip(made.rows["email"], made.rows["domain"], strict=True))["joe@xn--strae-oqa.de"] == "xn--strae-oqa.de"


def test_addresses_in_another_owners_domain_are_not_the_same(prepared: Callable[..., Any]) -> None:
    made = prepared({"email": ["joe@straße.de", "joe@strasse.de", "joe@xn--strae-oqa.de"]})
    assert made.addresses == ["joe@strasse.de", "joe@xn--strae-oqa.de"]


@settings(deadline=None, max_examples=60)
@given(st.lists(st.one_of(
    st.none(),
    st.text(max_size=20),
    st.from_regex(r"[ \u200b]?[A-Za-z0-9.+äß\"-]{1,10}@[A-Za-z0-9.äß_-]{1,12}\.?(com|DE|1)[ \n]?", fullmatch=True),
    st.from_regex(r"[a-z]{60,70}@[a-z]{1,70}\.com", fullmatch=True),
), min_size=1, max_size=20))  # fmt: skip
def test_a_column_is_judged_as_one_address_is(texts: list[str | None]) -> None:
    frame = pl.DataFrame({"email": texts}, schema={"email": pl.String})
    judged = settle(plain_parts(frame.lazy(), "email").collect(), "email")
    assert len(parse_mailboxes(texts)) == len(texts)
    for text, quick, row in zip(texts, parse_mailboxes(texts), judged.iter_rows(named=True), strict=True):
        if isinstance(quick, AddressError):
            with pytest.raises(AddressError, match=re.escape(str(quick))):
                parse_mailbox(text)
            assert (row[CANONICAL], row[DOMAIN], row[PROBLEM]) == (None, None, str(quick))
        else:
            assert quick == parse_mailbox(text)
            assert (row[CANONICAL], row[DOMAIN], row[PROBLEM]) == (canonical(quick), quick.domain, None)
            assert clean_addresses(pl.Series([text])).to_list() == [str(quick)]


def test_both_ways_write_the_same_bytes(tmp_path: Path) -> None:
    source = tmp_path / "in.parquet"
    make_list.rows(0, 60_000, seed=3, clean=False).write_parquet(source)
    written = {}
    for way in ("memory", "buckets"):
        with work_folder(tmp_path) as work:
            prepare(
                [parquet_source(source)], tmp_path / "l.parquet", tmp_path / "r.parquet", Wishes(way=way), work=work
            )
        written[way] = (tmp_path / "l.parquet").read_bytes()
    assert written["memory"] == written["buckets"]


def test_buckets_keep_every_row_once_and_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from engine.lists import writing

    monkeypatch.setattr(writing, "BATCH_ROWS", 7_000)
    monkeypatch.setattr(writing.write_by_buckets, "__kwdefaults__", {"bucket_rows": 20_000})
    source = tmp_path / "in.parquet"
    make_list.rows(0, 90_000, seed=3, clean=False).write_parquet(source, row_group_size=9_000)
    lists = []
    for way in ("memory", "buckets"):
        with work_folder(tmp_path) as work:
            prepare(
                [parquet_source(source)], tmp_path / "l.parquet", tmp_path / "r.parquet", Wishes(way=way), work=work
            )
        lists.append(pl.read_parquet(tmp_path / "l.parquet").with_columns(pl.col("domain").cast(pl.String)))
        groups = pq.read_metadata(tmp_path / "l.parquet")
        assert {groups.row_group(one).num_rows for one in range(groups.num_row_groups - 1)} == {10_000}
    assert lists[0].equals(lists[1])
    assert lists[0]["id"].n_unique() == lists[0].height


@pytest.mark.slow
def test_a_big_list_is_mixed_within_the_promised_bounds(prepared: Callable[..., Any]) -> None:
    made = prepared(make_list.rows(0, 200_000, seed=1, clean=False).sort("email"))
    mixing = made.report.mixing
    assert mixing.worst_500 < 2
    assert mixing.worst_10000 < 0.1
    assert mixing.longest_run <= 5
    # Measured again, the slow way, from the file.
    domain = made.rows["domain"].cast(pl.String)
    is_big = (domain == "gmail.com").to_numpy()
    for window, worst in ((500, mixing.worst_500), (10_000, mixing.worst_10000)):
        shares = np.convolve(is_big, np.ones(window), "valid") / window
        assert np.abs(shares - is_big.mean()).max() * 100 <= worst + 1e-3
    assert domain.rle().struct.field("len").max() == mixing.longest_run


def test_the_metadata_tells_what_the_rows_tell(prepared: Callable[..., Any]) -> None:
    made = prepared(make_list.rows(0, 30_000, seed=2, clean=False))
    meta = listmeta.of_metadata(pq.read_metadata(made.path).metadata)
    assert meta is not None
    counted = dict(made.rows["domain"].cast(pl.String).value_counts().iter_rows())
    assert all(counted[name] == rows for name, rows in meta.domain_rows.items())
    assert meta.rows == made.rows.height == sum(meta.domain_rows.values()) + meta.other_rows
    assert meta.domains == len(counted)
    assert (meta.roles.address, meta.roles.domain, meta.roles.id) == ("email", "domain", "id")
    assert sum(meta.rejected.values()) + meta.rows == 30_000


def test_the_domain_column_is_a_dictionary_of_its_own_row_group(prepared: Callable[..., Any]) -> None:
    made = prepared(make_list.rows(0, 25_000, seed=2, clean=False))
    column = pq.ParquetFile(made.path).read_row_group(1, columns=["domain"]).column("domain")
    assert pa.types.is_dictionary(column.type)
    assert len(column.chunk(0).dictionary) == len(column.unique())


def test_providers_are_mixed_as_one(prepared: Callable[..., Any]) -> None:
    names = ["a.org", "b.org", "c.org", "d.org"]
    rows = {"email": [f"u{n}@{names[n * 4 // 40_000]}" for n in range(40_000)]}
    made = prepared(rows, providers={"a.org": "one", "b.org": "one"})
    assert made.report.mixing.by == "provider"
    assert made.report.mixing.worst_500 < 2
    of_one = made.rows["domain"].cast(pl.String).is_in(["a.org", "b.org"])
    assert abs(of_one[:1000].sum() - 500) <= 2
    meta = listmeta.of_metadata(pq.read_metadata(made.path).metadata)
    assert meta is not None
    assert meta.provider_rows == {"one": 20_000, "c.org": 10_000, "d.org": 10_000}


@pytest.mark.parametrize(
    ("keep", "kept"), [("first", 1), ("last", 4), ("at desc", 2), ("at", 3)], ids=["first", "last", "newest", "oldest"]
)
def test_of_duplicates_the_wanted_one_stays(prepared: Callable[..., Any], keep: str, kept: int) -> None:
    rows = {"email": ["ann@x.org", "Ann@x.org", "ann@X.org", "ann@x.org", "b@x.org"], "id": [1, 2, 3, 4, 5],
            "at": [5, 9, 1, None, 0]}  # fmt: skip
    made = prepared(rows, keep=keep)
    assert sorted(made.rows["id"]) == sorted([kept, 5])


def test_engaged_people_come_first_within_their_domain(prepared: Callable[..., Any]) -> None:
    rows = {
        "email": [f"u{n}@{'ab'[n % 2]}.org" for n in range(1000)],
        "score": [(n * 7919) % 1000 for n in range(1000)],
    }
    made = prepared(rows, engaged_first="score")
    for domain in ("a.org", "b.org"):
        scores = made.rows.filter(pl.col("domain").cast(pl.String) == domain)["score"].to_list()
        assert scores == sorted(scores, reverse=True)


def test_a_condition_leaves_rows_out_before_duplicates_are_told(prepared: Callable[..., Any]) -> None:
    rows = {"email": ["ann@x.org", "ann@x.org", "bob@x.org"], "active": [False, True, None], "id": [1, 2, 3]}
    made = prepared(rows, where="active AND id < 3")
    assert made.rows["id"].to_list() == [2]
    assert made.report.rejected == {"filtered": 2}


def test_a_wrong_condition_is_told(prepared: Callable[..., Any]) -> None:
    for where in ("nowhere = 1", "id +", "id"):
        with pytest.raises(FilterWrong):
            prepared({"email": ["a@x.org"], "id": [1]}, where=where)


def test_suppressed_rows_are_left_out_by_scope(prepared: Callable[..., Any], tmp_path: Path) -> None:
    folder = tmp_path / "s"
    Suppressions(folder, list_id=None).add(
        [Entry("ann@x.org", "weekly", "unsubscribe"), Entry("bob@x.org"), Entry("eve@x.org", "daily", "unsubscribe")]
    )
    rows = {"email": ["Ann@x.org", "bob@x.org", "eve@x.org"]}
    made = prepared(rows, suppressions=[Suppressions(folder, list_id="weekly")])
    assert made.addresses == ["eve@x.org"]
    assert made.why() == [(1, "Ann@x.org", "suppressed"), (2, "bob@x.org", "suppressed")]


def test_with_case_kept_a_suppression_still_catches_both(prepared: Callable[..., Any], tmp_path: Path) -> None:
    Suppressions(tmp_path / "s", list_id=None).add([Entry("ann@x.org")])
    rows = {"email": ["Ann@x.org", "Bob@x.org", "bob@X.org", "Bob@x.org", '"Q q"@x.org']}
    made = prepared(rows, fold_local=False, suppressions=[Suppressions(tmp_path / "s", list_id=None)])
    assert made.addresses == ['"Q q"@x.org', "Bob@x.org", "bob@x.org"]


def test_one_gmail_mailbox_has_many_spellings(prepared: Callable[..., Any]) -> None:
    rows = {"email": ["ann.b@gmail.com", "a.nnb+news@googlemail.com", "ann.b@x.org", "annb@x.org", "c+1@outlook.com",
                      "c@outlook.com"]}  # fmt: skip
    assert len(prepared(rows).rows) == 6
    assert prepared(rows, fold_provider=True).addresses == [
        "ann.b@gmail.com", "ann.b@x.org", "annb@x.org", "c+1@outlook.com",
    ]  # fmt: skip


def test_domains_without_mail_are_left_out(prepared: Callable[..., Any]) -> None:
    asked: list[str] = []

    def check(domains: Any) -> dict[str, str]:
        asked.extend(domains)
        return {"gone.org": "no such domain"}

    made = prepared({"email": ["a@gone.org", "b@x.org", "nix"]}, check_domains=check)
    assert sorted(asked) == ["gone.org", "x.org"]
    assert made.addresses == ["b@x.org"]
    assert made.why() == [(1, "a@gone.org", "no_mail_domain"), (3, "nix", "invalid")]


def test_when_nothing_is_left_there_is_no_list_but_the_reasons(prepared: Callable[..., Any], tmp_path: Path) -> None:
    with pytest.raises(NothingLeft, match="2 invalid"):
        prepared({"email": ["nix", "nada"]})
    assert not (tmp_path / "out" / "list.parquet").exists()
    assert pl.read_parquet(tmp_path / "out" / "rejects.parquet").height == 2
    with pytest.raises(NothingLeft, match="the sources are empty"):
        prepared(pl.DataFrame({"email": []}, schema={"email": pl.String}))


def test_values_of_every_type_arrive_as_they_were(prepared: Callable[..., Any]) -> None:
    from datetime import UTC, date, datetime
    from decimal import Decimal

    rows = pl.DataFrame(
        {
            "email": ["a@x.org", "b@x.org", "c@x.org"],
            "big": pl.Series([9007199254740993, None, 3], dtype=pl.Int64),
            "price": pl.Series([Decimal("1.10"), None, Decimal("-0.05")], dtype=pl.Decimal(10, 2)),
            "at": pl.Series([datetime(2025, 1, 2, 3, 4, 5, tzinfo=UTC)] * 3).dt.convert_time_zone("Europe/Berlin"),
            "day": [date(2025, 1, 2)] * 3,
            "kind": pl.Series(["x", "y", "x"], dtype=pl.Categorical),
            "tags": [["a", "b"], [], None],
            "who": [{"name": "A", "age": 1}, {"name": "B", "age": None}, {"name": None, "age": 3}],
            "raw": [b"\x00\xff", None, b""],
        }
    )
    for way in ("memory", "buckets"):
        made = prepared(rows, way=way).rows.sort("email").drop("domain")
        assert made.with_columns(pl.col("kind").cast(pl.Categorical)).equals(rows, null_equal=True)
        assert made.schema["price"] == pl.Decimal(10, 2)
        assert made.schema["at"] == pl.Datetime("us", "Europe/Berlin")


@pytest.mark.parametrize(
    "kind", [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int8(), pa.string())]
)
def test_addresses_of_any_text_type(prepared: Callable[..., Any], tmp_path: Path, kind: pa.DataType) -> None:
    texts = pa.array(["a@x.org", None, "b@x.org"])
    column = texts.dictionary_encode().cast(kind) if pa.types.is_dictionary(kind) else texts.cast(kind)
    pq.write_table(pa.table({"email": column}), tmp_path / "t.parquet")
    assert prepared(tmp_path / "t.parquet").addresses == ["a@x.org", "b@x.org"]


def test_a_column_name_with_a_byte_order_mark_is_found(prepared: Callable[..., Any]) -> None:
    assert prepared({"\ufeffemail": ["a@x.org"]}).rows.columns == ["email", "domain"]


def test_a_list_without_an_address_column_names_its_columns(prepared: Callable[..., Any]) -> None:
    with pytest.raises(NoAddressColumn, match="it has who, what"):
        prepared({"who": ["a@x.org"], "what": [1]})
    assert prepared({"who": ["a@x.org"]}, address="WHO").rows.columns == ["who", "domain"]
    with pytest.raises(ColumnMissing, match="--engaged-first"):
        prepared({"email": ["a@x.org"]}, engaged_first="score")


def test_a_column_of_another_type_in_one_file_is_named(prepared: Callable[..., Any]) -> None:
    first = {"email": ["a@x.org"], "n": [1]}
    with pytest.raises(ColumnsDiffer, match=r"in-1.parquet: column 'n' is String, in .*in-0.parquet it is Int64"):
        prepared(first, {"email": ["b@x.org"], "n": ["1"]})
    with pytest.raises(ColumnsDiffer, match="column 'n' is absent"):
        prepared(first, {"email": ["b@x.org"]})
    small = pl.DataFrame({"email": ["b@x.org"], "n": [2]}, schema_overrides={"n": pl.Int16})
    made = prepared(first, small)
    assert made.rows.schema["n"] == pl.Int64


def test_rejects_of_several_files_name_the_file_and_its_own_row(prepared: Callable[..., Any]) -> None:
    made = prepared({"email": ["a@x.org", "nix"]}, {"email": ["b@x.org", "c@x.org", "a@x.org"]})
    named = [
        (Path(file).name, row, reason) for file, row, reason in made.rejects.select("file", "row", "reason").rows()
    ]
    assert sorted(named) == [("in-0.parquet", 2, "invalid"), ("in-1.parquet", 3, "duplicate")]


def test_a_thousand_columns(prepared: Callable[..., Any]) -> None:
    made = prepared({"email": ["a@x.org", "b@x.org"]} | {f"c{n}": [n, None] for n in range(2000)})
    assert made.rows.width == 2002


def test_a_failing_disk_leaves_no_half_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pl.DataFrame({"email": [f"u{n}@x.org" for n in range(50_000)]}).write_parquet(tmp_path / "in.parquet")
    real = pq.ParquetWriter.write_table
    written = 0

    def full_disk(self: pq.ParquetWriter, *given: Any, **more: Any) -> None:
        nonlocal written
        written += 1
        if written > 2:
            raise OSError(28, "No space left on device")
        real(self, *given, **more)

    monkeypatch.setattr(pq.ParquetWriter, "write_table", full_disk)
    out = tmp_path / "out"
    with pytest.raises(OSError, match="No space"), work_folder(tmp_path) as work:
        prepare([parquet_source(tmp_path / "in.parquet")], out / "l.parquet", out / "r.parquet", Wishes(), work=work)
    assert list(out.iterdir()) == []
    assert [path.name for path in tmp_path.iterdir()] == ["in.parquet", "out"] or len(list(tmp_path.iterdir())) == 2
