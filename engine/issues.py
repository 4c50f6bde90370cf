"""Which issue of a newsletter is due: out of a folder of issues, or a table of them. Pure over what was read.

A folder holds one folder an issue, each with an `issue.toml`; a table (CSV with a header, or a JSON list) has the same
keys as columns, and `folder` names where the issue lies, relative to the table.

    date = 2026-12-03          # the day it is for
    newsletter = "daily"       # where several go out of one place
    ready = true               # said by an editor, the evening before; anything else is not ready

An issue is due on its date and, when that was missed, for `grace` days after; the oldest due one comes first. One
that is not marked ready is never picked, nor passed over for a later one of the same newsletter: who forgot to mark it
should hear of it.
"""

from __future__ import annotations

import csv
import json
import tomllib
from collections.abc import Iterable
from datetime import date, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec

from engine.errors import EngineError, Exit

ISSUE_FILE = "issue.toml"
SENT_FILE = "sent"  # put into an issue's folder by `engine issue done`


class IssuesUnreadable(EngineError):
    """{where}: {problem}."""

    exit_code = Exit.SETTINGS
    hint = "An issue has `date`, `ready` and, where there are several newsletters, `newsletter`: guide `schedules.md`."


class NoIssue(EngineError):
    """No issue of {newsletter} is due on {day}: {why}."""

    exit_code = Exit.ROWS_OPEN
    hint = "Nothing is sent. `engine issue list` shows all issues and what each waits for."


class Issue(msgspec.Struct, frozen=True, kw_only=True):
    """One issue as its editors wrote it."""

    folder: Path
    date: date
    newsletter: str = ""
    ready: bool = False
    sent: bool = False


def read_issues(where: Path) -> list[Issue]:
    """All issues of a folder or a table, oldest first; raises IssuesUnreadable."""
    if where.is_dir():
        found = [_from_folder(path.parent) for path in sorted(where.glob(f"*/{ISSUE_FILE}"))]
    else:
        found = [_issue(row, where.parent / str(row.get("folder", "")), f"{where} {n}") for n, row in _table(where)]
    return sorted(found, key=lambda issue: (issue.date, str(issue.folder)))


def next_issue(issues: Iterable[Issue], day: date, newsletter: str = "", *, grace: int = 0) -> Issue:
    """The issue that is to be sent on `day`; raises NoIssue saying why there is none."""
    mine = [issue for issue in issues if not newsletter or issue.newsletter == newsletter]
    if not newsletter and len(names := {issue.newsletter for issue in mine}) > 1:
        raise NoIssue(newsletter="one newsletter", day=day, why=f"there are {len(names)}: {', '.join(sorted(names))}")
    named = newsletter or "the newsletter"
    due = [issue for issue in mine if day - timedelta(days=grace) <= issue.date <= day]
    open_ = [issue for issue in due if not issue.sent]
    if not open_:
        later = next((issue.date for issue in mine if issue.date > day), None)
        why = "it was sent already" if due else f"the next one is for {later}" if later else "there is none to come"
        raise NoIssue(newsletter=named, day=day, why=why)
    first = open_[0]
    if not first.ready:
        raise NoIssue(newsletter=named, day=day, why=f"{first.folder} is not marked ready")
    twins = [issue for issue in open_ if issue.date == first.date]
    if len(twins) > 1:
        folders = " and ".join(str(issue.folder) for issue in twins)
        raise NoIssue(newsletter=named, day=day, why=f"{folders} are for the same day")
    return first


def _from_folder(folder: Path) -> Issue:
    file = folder / ISSUE_FILE
    try:
        row = tomllib.loads(file.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as problem:
        raise IssuesUnreadable(where=file, problem=problem) from None
    return _issue(row, folder, str(file))


def _table(where: Path) -> list[tuple[int, dict[str, Any]]]:
    try:
        if where.suffix == ".json":
            rows = json.loads(where.read_text("utf-8"))
            if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
                raise ValueError("a list of objects is expected")
        else:
            with where.open(encoding="utf-8-sig", newline="") as file:
                rows = list(csv.DictReader(file))
    except (OSError, ValueError, csv.Error) as problem:
        raise IssuesUnreadable(where=where, problem=problem) from None
    return list(enumerate(rows, 1))


def _issue(row: dict[str, Any], folder: Path, where: str) -> Issue:
    day = row.get("date")
    if isinstance(day, datetime):
        raise IssuesUnreadable(where=where, problem=f"date is a day such as 2026-12-03, not {day}")
    if isinstance(day, str):
        try:
            day = date.fromisoformat(day.strip())
        except ValueError:
            raise IssuesUnreadable(where=where, problem=f"date {day!r} is no day such as 2026-12-03") from None
    if not isinstance(day, date):
        raise IssuesUnreadable(where=where, problem="it has no date")
    ready = row.get("ready", False)
    return Issue(
        folder=folder,
        date=day,
        newsletter=str(row.get("newsletter") or ""),
        # In a table "yes" and "1" are words of people; anything unclear is not ready.
        ready=ready is True or str(ready).strip().lower() in ("true", "yes", "1"),
        sent=(folder / SENT_FILE).exists() or str(row.get("sent", "")).strip().lower() in ("true", "yes", "1"),
    )
