"""The commands as an operator types them."""

from __future__ import annotations

import json
from pathlib import Path

import polars as pl
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner, Result

from engine.cli import engine
from engine.errors import EngineError
from engine.lists.suppressions import Suppressions
from engine.lists.truthfile import TRUTH
from formats import listmeta


def run(*words: object, code: int = 0) -> Result:
    done = CliRunner().invoke(engine, [str(word) for word in words])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == code, done.output
    return done


@pytest.fixture
def export(tmp_path: Path) -> Path:
    path = tmp_path / "export.csv"
    path.write_text("E-Mail;name\nann@x.org;Ann\nBob@x.org;Bob\nnix;N\nann@X.org;Ann again\n")
    return path


def test_prepare_and_inspect(export: Path, tmp_path: Path) -> None:
    output = tmp_path / "list.parquet"
    said = run("prepare", export, "-o", output).output
    assert "4 rows read" in said
    assert "1 invalid" in said
    assert "1 duplicate" in said
    assert "mixing by domain" in said
    report = json.loads(run("prepare", export, "-o", output, "--json").stdout)
    assert (report["rows"], report["kept"], report["rejected"]) == (4, 2, {"invalid": 1, "duplicate": 1})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["export.csv", "list.parquet", "rejects.parquet"]

    shown = run("inspect", output).output
    assert "2 rows in 1 file(s)" in shown
    assert "x.org" in shown
    assert "Ann" in shown
    found = json.loads(run("inspect", output, "--json").stdout)
    assert found["is_prepared"]
    assert [(column["name"], column["nulls"]) for column in found["columns"]] == [
        ("E-Mail", 0), ("name", 0), ("domain", 0),
    ]  # fmt: skip


def test_inspect_of_a_list_that_nobody_prepared(tmp_path: Path) -> None:
    pl.DataFrame(
        {"email": ["a@x.org", "b@x.org", "c@y.org", None], "id": [1.0, None, 3.0, 4.0], "l": [[1], None, [], [2]]}
    ).write_parquet(tmp_path / "x.parquet")
    found = json.loads(run("inspect", tmp_path / "x.parquet", "--json").stdout)
    assert not found["is_prepared"]
    assert found["meta"]["domain_rows"] == {"x.org": 2, "(no address)": 1, "y.org": 1}
    assert found["meta"]["mixing"]["longest_run"] == 2
    assert [column["nulls"] for column in found["columns"]] == [1, 1, None]
    assert any("whole numbers kept as double" in warning for warning in found["warnings"])
    pl.DataFrame({"n": [1]}).write_parquet(tmp_path / "y.parquet")
    assert "n" in run("inspect", tmp_path / "y.parquet").output
    pl.DataFrame({"email": []}, schema={"email": pl.String}).write_parquet(tmp_path / "z.parquet")
    assert "0 rows" in run("inspect", tmp_path / "z.parquet").output


def test_two_prepared_files_are_one_list(export: Path, tmp_path: Path) -> None:
    for number in (1, 2):
        run("prepare", export, "-o", tmp_path / "two" / f"{number}.parquet", "--rejects", tmp_path / "r.parquet")
    found = json.loads(run("inspect", tmp_path / "two", "--json").stdout)
    assert found["rows"] == found["meta"]["rows"] == 4
    assert found["meta"]["domain_rows"] == {"x.org": 4}


def test_what_prepare_will_not_do(export: Path, tmp_path: Path) -> None:
    output = tmp_path / "list.parquet"
    for words in (
        ["prepare", "-o", output],
        ["prepare", export, "--from", "sqlite:///x", "--query", "q", "-o", output],
        ["prepare", "--from", "sqlite:///x", "-o", output],
        ["prepare", export, "-o", output, "--type", "name=number"],
    ):
        run(*words, code=2)
    assert not output.exists()


def test_the_walk_of_a_suppression(export: Path, tmp_path: Path) -> None:
    here = ["--folder", tmp_path / "s"]
    run("suppress", "add", "Ann@X.org", "--scope", "weekly", "--reason", "unsubscribe", *here)
    assert "not suppressed" in run("suppress", "check", "ann@x.org", *here).stdout
    told = run("suppress", "check", "ANN@x.org", "--list-id", "weekly", *here).stdout
    assert told.startswith("ann@x.org: suppressed\n")
    assert "scope weekly  unsubscribe  operator" in told

    output = tmp_path / "list.parquet"
    words = ["prepare", export, "-o", output, "--suppress", tmp_path / "s"]
    assert json.loads(run(*words, "--json").stdout)["kept"] == 2
    report = json.loads(run(*words, "--list-id", "weekly", "--json").stdout)
    assert report["rejected"] == {"invalid": 1, "suppressed": 2}

    run("suppress", "remove", "ann@x.org", "--scope", "weekly", "--source", "asked to come back", *here)
    assert "not suppressed" in run("suppress", "check", "ann@x.org", "--list-id", "weekly", *here).stdout
    run("suppress", "add", "not an address", *here, code=2)


def test_imports_add_and_never_take_back(tmp_path: Path) -> None:
    here = ["--folder", tmp_path / "s"]
    run("suppress", "add", "bob@x.org", "--reason", "complaint", *here)
    (tmp_path / "gone.csv").write_text("email\nANN@x.org\nbob@x.org\nnix\nann@x.org\n")
    assert (
        run("suppress", "import", tmp_path / "gone.csv", *here).stdout == "4 read: 1 added, 2 known, 1 no addresses\n"
    )
    (tmp_path / "subscribers.csv").write_text("email\nann@x.org\n")
    run("suppress", "import", tmp_path / "subscribers.csv", *here)
    told = json.loads(run("suppress", "check", "bob@x.org", "ann@x.org", "--json", *here).stdout)
    assert told["bob@x.org"]["suppressed"]
    assert [entry["reason"] for entry in told["bob@x.org"]["entries"]] == ["complaint"]
    assert [entry["source"] for entry in told["ann@x.org"]["entries"]] == ["gone.csv"]


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_an_export_can_be_imported_elsewhere(tmp_path: Path, suffix: str) -> None:
    here, there = ["--folder", tmp_path / "s"], ["--folder", tmp_path / "t"]
    run("suppress", "add", "ann@x.org", "--scope", "weekly", "--reason", "unsubscribe", *here)
    run("suppress", "add", "bob@x.org", "eve@x.org", "--reason", "bounce", *here)
    run("suppress", "remove", "eve@x.org", *here)
    path = tmp_path / f"all.{suffix}"
    assert "2 entries" in run("suppress", "export", "-o", path, *here).stderr
    assert "2 added" in run("suppress", "import", path, *there).stdout
    assert Suppressions(tmp_path / "t", list_id="weekly").check(["ann@x.org", "bob@x.org"]).all()
    assert not Suppressions(tmp_path / "t", list_id=None).check(["ann@x.org", "eve@x.org"]).any()
    first, second = (run("suppress", "export", *folder).stdout for folder in (here, there))
    assert sorted(first.splitlines()) == sorted(second.splitlines())
    assert "0 added" in run("suppress", "import", path, *there).stdout


def test_forgetting_a_person(export: Path, tmp_path: Path) -> None:
    here = ["--folder", tmp_path / "s"]
    output = tmp_path / "list.parquet"
    run("prepare", export, "-o", output)
    run("suppress", "add", "ann@x.org", "--scope", "weekly", *here)
    run("suppress", "add", "ann@x.org", "bob@x.org", *here)
    watching = Suppressions(tmp_path / "s", list_id="weekly")

    done = run("forget", "ann@x.org", "--in", output, "--in", tmp_path / "rejects.parquet", "--json", *here)

    assert json.loads(done.stdout) == {
        "entries": 2, "rows": {str(output): 1, str(tmp_path / "rejects.parquet"): 1},
    }  # fmt: skip
    for path in [*(tmp_path / "s").iterdir(), output, tmp_path / "rejects.parquet"]:
        assert b"ann@" not in path.read_bytes().lower()
    rows = pl.read_parquet(output)
    assert rows.height == 2
    assert rows["name"].drop_nulls().to_list() == ["Bob"]
    assert listmeta.of_metadata(pq.read_metadata(output).metadata) is not None

    for _ in range(10):
        watching.refresh()
    for known in (watching, Suppressions(tmp_path / "s", list_id=None), Suppressions(tmp_path / "s", list_id="daily")):
        assert known.check(["ann@x.org", "bob@x.org", "eve@x.org"]).tolist() == [True, True, False]
    (tmp_path / "old.csv").write_text("email\nann@x.org\n")
    run("suppress", "import", tmp_path / "old.csv", "--scope", "weekly", *here)
    assert b"ann@" not in (tmp_path / "s" / TRUTH).read_bytes()
    run("suppress", "remove", "ann@x.org", *here)
    assert "not suppressed" in run("suppress", "check", "ann@x.org", *here).stdout
    run("forget", *here, code=2)


def test_old_entries_become_hashes_and_hold(tmp_path: Path) -> None:
    from formats.suppression import Entry

    folder = tmp_path / "s"
    known = Suppressions(folder, list_id="weekly")
    known.add([Entry("old@x.org", "weekly", "unsubscribe", "web", 1), Entry("back@x.org", "all", "bounce", "x", 1)])
    known.add([Entry("back@x.org", "all", lifted=True, at_us=2)])
    known.add([Entry("new@x.org", "all", "bounce", "x", 4_000_000_000_000_000)])
    run("forget", "--older-than", 30, "--folder", folder)
    assert b"old@x.org" not in (folder / TRUTH).read_bytes()
    assert Suppressions(folder, list_id="weekly").check(["old@x.org", "back@x.org", "new@x.org"]).tolist() == [
        True, False, True,
    ]  # fmt: skip
    assert not Suppressions(folder, list_id=None).check(["old@x.org"]).any()


def test_the_campaign_says_how_long_entries_name_anybody(tmp_path: Path) -> None:
    campaign = tmp_path / "campaign"
    campaign.mkdir()
    text = '[campaign]\nid = "c"\n[message]\nfrom_address = "a@x.org"\nsubject = "s"\n'
    (campaign / "campaign.toml").write_text(text)
    run("suppress", "add", "ann@x.org", "--campaign", campaign)
    run("forget", "--expired", "--campaign", campaign, code=2)
    (campaign / "campaign.toml").write_text(text + "[suppression]\nretention_days = 30\n")
    assert "0 entries" in run("forget", "--expired", "--campaign", campaign).stdout
    assert "ann@x.org" in run("suppress", "export", "--campaign", campaign).stdout


def test_a_large_import_writes_the_index_and_others_take_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from engine.lists import suppressions

    monkeypatch.setattr(suppressions, "TAIL_ENTRIES", 1000)
    monkeypatch.setattr(suppressions, "_IMPORT_BYTES", 4096)
    folder = tmp_path / "s"
    watching = Suppressions(folder, list_id=None)
    pl.DataFrame({"email": [f"u{n}@x.org" for n in range(5000)] + ["u1@x.org"]}).write_parquet(tmp_path / "x.parquet")
    run("suppress", "import", tmp_path / "x.parquet", "--folder", folder)
    assert watching.refresh()
    assert watching.check(["u4999@x.org", "v@x.org"]).tolist() == [True, False]
    assert len(watching) == 5000
    assert any(path.name.startswith("index-") for path in folder.iterdir())


def test_errors_name_the_thing_and_the_next_step(tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / TRUTH).write_bytes(b"email\n" * 20)
    with pytest.raises(EngineError, match="not a suppression list"):
        run("suppress", "check", "a@x.org", "--folder", tmp_path / "s")
