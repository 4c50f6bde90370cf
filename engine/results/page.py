"""`index.html`: one page that holds everything it shows. No script, no network; whatever a server, a list or a campaign
name says is text (Jinja2 escapes it, and the page's own policy forbids scripts)."""

from __future__ import annotations

from datetime import UTC, datetime
from importlib.resources import files

import jinja2

from engine.results import charts
from engine.results.summary import Summary
from engine.results.tables import HEADS, next_steps
from formats.sendlog import Verdict

_VERDICTS = {
    Verdict.REJECTED: "bounced",
    Verdict.DEFERRED: "deferred",
    Verdict.LOST: "connection lost",
    Verdict.IN_DOUBT: "in doubt",
}


def render_page(summary: Summary, campaign: str = "") -> str:
    """The page of this summary; without the extra `charts` it has tables only and says so."""
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    template = environment.from_string(files("engine.results").joinpath("page.html").read_text("utf-8"))
    has_charts = charts.available()
    return template.render(
        s=summary,
        heads={str(outcome): head for outcome, head in HEADS.items()},
        # Every second part stands between backticks: a command.
        steps=[step.split("`") for step in next_steps(summary, campaign)],
        pictures=charts.pictures(summary) if has_charts else [],
        has_charts=has_charts,
        verdicts=_VERDICTS,
        n=lambda number: f"{number:,}",
        share=_share,
        moment=_moment,
        span=_span,
        wait=_wait,
    )


def _share(part: int, whole: int) -> str:
    share = 100 * part / whole
    # 99.999 % must not be shown as all of them, nor one row as none.
    if part and share < 0.1:
        return "<0.1 %"
    if part < whole and share > 99.9:
        return ">99.9 %"
    return f"{share:.1f} %"


def _moment(at_us: int) -> str:
    try:
        return datetime.fromtimestamp(at_us / 1e6, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (OverflowError, ValueError, OSError):
        return f"{at_us} µs"


def _span(seconds: float) -> str:
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.1f} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def _wait(seconds: float | None) -> str:
    return "" if seconds is None else _span(seconds)
