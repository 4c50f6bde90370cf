"""What commands share: the campaign option, errors of several rows, and time and size in words."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import click

from engine.campaign import Campaign

Command = TypeVar("Command", bound=Callable[..., Any])

_ROWS = re.compile(r"(\d+)(?:-(\d+))?\Z")
_MOST_ROWS = 1_000_000


def campaign_option(command: Command) -> Command:
    """`--campaign DIR`, by default ./campaign; the command gets a Campaign."""
    return click.option(
        "--campaign",
        "campaign",
        metavar="DIR",
        default="campaign",
        show_default=True,
        envvar="ROWPOST_CAMPAIGN",
        help="The campaign folder.",
        callback=lambda context, parameter, value: Campaign(Path(value)),
    )(command)


class RowNumbers(click.ParamType[list[int]]):
    """Row numbers as an operator writes them: `5`, `0-9`, `3,17,100-120`."""

    name = "rows"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[int]:
        if isinstance(value, list):
            return value
        rows: list[int] = []
        for part in str(value).split(","):
            found = _ROWS.match(part.strip())
            if not found:
                self.fail(f"{part!r} is no row number or range such as 5 or 100-120", param, ctx)
            first = int(found[1])
            last = int(found[2] or first)
            if last < first or last - first > _MOST_ROWS:
                self.fail(f"{part!r} is not a range of at most {_MOST_ROWS:,} rows", param, ctx)
            rows.extend(range(first, last + 1))
        return rows


def span(seconds: float) -> str:
    """A length of time in words: 8 s, 3 min 20 s, 2 h 5 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s" if whole % 60 else f"{whole // 60} min"
    if whole < 48 * 3600:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def moment(at_us: int) -> str:
    """A time at rest as people read it, in UTC."""
    return datetime.fromtimestamp(at_us / 1e6, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
