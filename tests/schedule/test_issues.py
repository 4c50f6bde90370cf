"""The issue of the day is picked, and only one that an editor marked ready."""

from __future__ import annotations

from datetime import date
from pathlib import Path

import pytest
from click.testing import CliRunner

from engine.cli import engine
from engine.issues import IssuesUnreadable, NoIssue, next_issue, read_issues

THURSDAY = date(2026, 12, 3)


def put(folder: Path, name: str, text: str) -> Path:
    issue = folder / name
    issue.mkdir(parents=True)
    (issue / "issue.toml").write_text(text)
    return issue


def test_the_issue_of_the_day_is_picked_when_it_is_ready(tmp_path: Path) -> None:
    put(tmp_path, "mon", 'date = 2026-11-30\nnewsletter = "daily"\nready = true')
    mine = put(tmp_path, "thu", 'date = 2026-12-03\nnewsletter = "daily"\nready = true')
    put(tmp_path, "sat", 'date = 2026-12-05\nnewsletter = "weekly"\nready = true')
    issues = read_issues(tmp_path)
    assert next_issue(issues, THURSDAY, "daily").folder == mine
    with pytest.raises(NoIssue, match="there are 2: daily, weekly"):
        next_issue(issues, THURSDAY)
    with pytest.raises(NoIssue, match="the next one is for 2026-12-05"):
        next_issue(issues, THURSDAY, "weekly")


@pytest.mark.parametrize("ready", ["", "ready = false", 'ready = "perhaps"'])
def test_an_issue_that_is_not_ready_is_never_sent(tmp_path: Path, ready: str) -> None:
    put(tmp_path, "thu", f"date = 2026-12-03\n{ready}")
    with pytest.raises(NoIssue, match="not marked ready"):
        next_issue(read_issues(tmp_path), THURSDAY)


def test_a_missed_issue_is_sent_within_its_grace_and_before_later_ones(tmp_path: Path) -> None:
    missed = put(tmp_path, "wed", "date = 2026-12-02\nready = true")
    put(tmp_path, "thu", "date = 2026-12-03\nready = true")
    issues = read_issues(tmp_path)
    assert next_issue(issues, THURSDAY, grace=1).folder == missed
    assert CliRunner().invoke(engine, ["issue", "done", str(missed)]).exit_code == 0
    assert next_issue(read_issues(tmp_path), THURSDAY, grace=1).folder == tmp_path / "thu"


def test_two_issues_for_one_day_are_nobodys_guess(tmp_path: Path) -> None:
    put(tmp_path, "a", "date = 2026-12-03\nready = true")
    put(tmp_path, "b", "date = 2026-12-03\nready = true")
    with pytest.raises(NoIssue, match="same day"):
        next_issue(read_issues(tmp_path), THURSDAY)


def test_a_table_of_issues(tmp_path: Path) -> None:
    table = tmp_path / "issues.csv"
    table.write_text("date,newsletter,folder,ready\n2026-12-03,daily,thu,yes\n2026-12-04,daily,fri,no\n")
    assert next_issue(read_issues(table), THURSDAY, "daily").folder == tmp_path / "thu"
    (tmp_path / "issues.json").write_text('[{"date": "2026-12-03", "folder": "x", "ready": true}]')
    assert next_issue(read_issues(tmp_path / "issues.json"), THURSDAY).folder == tmp_path / "x"


@pytest.mark.parametrize("text", ["ready = true", 'date = "soon"', "date = 2026-12-03T08:00:00", "date = "])
def test_issues_that_cannot_be_read_say_where(tmp_path: Path, text: str) -> None:
    put(tmp_path, "x", text)
    with pytest.raises(IssuesUnreadable, match=r"issue\.toml"):
        read_issues(tmp_path)


def test_the_command_prints_the_folder_alone(tmp_path: Path) -> None:
    mine = put(tmp_path, "thu", "date = 2026-12-03\nready = true")
    told = CliRunner().invoke(engine, ["issue", "next", str(tmp_path), "--on", "2026-12-03"])
    assert (told.exit_code, told.output) == (0, f"{mine}\n")
