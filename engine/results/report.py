"""The report folder: every row in Parquet, the sums in JSON, and a page for people. Written beside and renamed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec

from engine.config import Settings
from engine.errors import EngineError, Exit
from engine.results.merged import Merged
from engine.results.page import render_page
from engine.results.recipients import write_recipients
from engine.results.summary import FORMAT, Summary, summarise
from formats.plan import Plan


class NoReport(EngineError):
    """There is no report in {folder}."""

    exit_code = Exit.USAGE
    hint = "run `engine merge-logs`, which writes it."


class ReportUnreadable(EngineError):
    """{file} cannot be read: {problem}."""

    exit_code = Exit.USAGE
    hint = "run `engine merge-logs` again; it writes the report anew."


class ReportUnwritable(EngineError):
    """The report cannot be written to {folder}: {problem}."""

    exit_code = Exit.TRY_AGAIN
    hint = "Make room or repair the disk, then run the same command again; an older report is still in place."


def write_report(
    merged: Merged,
    plan: Plan,
    settings: Settings | None,
    folder: Path,
    *,
    merged_at_us: int,
    threads: int = 2,
    planned_per_hour: dict[str, float] | None = None,
    campaign: str = "",
    progress: Callable[[int, int], None] | None = None,
) -> Summary:
    """Write the whole report and put it in the place of an older one; raises ReportUnwritable.

    `planned_per_hour` is what capacity planning promised, by provider. `campaign` is what commands shown on the page
    need to find this campaign: " --campaign DIR", or nothing for the default folder. `settings` may be None: a report
    of logs alone.
    """
    if plan is not merged.plan and plan != merged.plan:
        raise ValueError("merged for another plan")
    beside = folder.with_name(f".{folder.name}.{os.getpid()}.new")
    try:
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir(mode=0o700, parents=True)
        written = write_recipients(
            merged,
            beside,
            merged_at_us=merged_at_us,
            threads=threads,
            unsent_known=not merged.store_missing,
            progress=progress,
        )
        summary = summarise(merged, written, merged_at_us=merged_at_us, planned_per_hour=planned_per_hour)
        (beside / "summary.json").write_bytes(msgspec.json.format(msgspec.json.encode(summary), indent=1))
        (beside / "index.html").write_text(render_page(summary, campaign), "utf-8")
        for path in beside.iterdir():
            path.chmod(0o600)
            _sync(path)
        _sync(beside)
        _put_in_place(beside, folder)
    except OSError as problem:
        raise ReportUnwritable(folder=folder, problem=problem.strerror or problem) from None
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return summary


def read_summary(folder: Path) -> Summary:
    """The summary of the report in `folder`; raises NoReport, ReportUnreadable."""
    file = folder / "summary.json"
    try:
        summary = msgspec.json.decode(file.read_bytes(), type=Summary)
    except FileNotFoundError:
        raise NoReport(folder=folder) from None
    except (OSError, msgspec.MsgspecError) as problem:
        raise ReportUnreadable(file=file, problem=problem) from None
    if summary.format != FORMAT:
        raise ReportUnreadable(file=file, problem=f"summary format {summary.format}, this version reads {FORMAT}")
    return summary


def redraw(folder: Path, campaign: str = "") -> Path:
    """Draw `index.html` anew from `summary.json`, for instance after installing the charts; raises NoReport."""
    page = folder / "index.html"
    beside = folder / f".index.{os.getpid()}.new"
    beside.write_text(render_page(read_summary(folder), campaign), "utf-8")
    beside.chmod(0o600)
    beside.replace(page)
    return page


def _put_in_place(new: Path, folder: Path) -> None:
    old = folder.with_name(f".{folder.name}.{os.getpid()}.old")
    if folder.exists():
        # A folder cannot be replaced in one step; between these two there is no report, never half of one.
        folder.rename(old)
    new.rename(folder)
    shutil.rmtree(old, ignore_errors=True)
    _sync(folder.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
