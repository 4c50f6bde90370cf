"""Small lists, and `prepare` as a function of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from engine.lists.opening import Reading, open_files
from engine.lists.prepare import Report, Wishes, prepare, work_folder


class Prepared:
    """What came of it."""

    def __init__(self, report: Report) -> None:
        self.report = report
        self.path = Path(report.output)
        self.rows = pl.read_parquet(report.output).with_columns(pl.col("domain").cast(pl.String))
        self.rejects = pl.read_parquet(report.rejects).with_columns(pl.col("reason", "file").cast(pl.String))

    @property
    def addresses(self) -> list[str]:
        return sorted(self.rows["email"].to_list())

    def why(self) -> list[tuple[int, str, str]]:
        """(row, value, reason) of every reject, by row."""
        return self.rejects.select("row", "value", "reason").sort("row").rows()


@pytest.fixture
def prepared(tmp_path: Path) -> Callable[..., Prepared]:
    """`prepared(source, ..., where=..., reading=...)`; a dict or frame is written as Parquet, bytes as CSV."""

    def run(*given: Any, reading: Reading | None = None, **more: Any) -> Prepared:
        paths = []
        for number, one in enumerate(given):
            if isinstance(one, Path):
                paths.append(one)
                continue
            path = tmp_path / f"in-{number}.{'csv' if isinstance(one, bytes) else 'parquet'}"
            if isinstance(one, bytes):
                path.write_bytes(one)
            else:
                (one if isinstance(one, pl.DataFrame) else pl.DataFrame(one)).write_parquet(path)
            paths.append(path)
        apart = {name: more.pop(name) for name in ("suppressions", "check_domains", "providers") if name in more}
        output = tmp_path / "out" / "list.parquet"
        with work_folder(tmp_path) as work:
            sources = open_files(paths, work, reading or Reading())
            report = prepare(sources, output, output.with_name("rejects.parquet"), Wishes(**more), work=work, **apart)
        assert report.kept + sum(report.rejected.values()) == report.rows
        assert sorted(path.name for path in output.parent.iterdir()) == ["list.parquet", "rejects.parquet"]
        return Prepared(report)

    return run
