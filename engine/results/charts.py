"""The report's pictures: Vega-Lite by Altair, drawn to SVG here, so that the page needs no script and no network.

Needs the extra `charts`. Each picture comes in two widths; the page shows the one that fits. Text and lines take the
page's own colours (`currentColor`), so that one drawing is right in light, in dark and on paper.
"""

from __future__ import annotations

import re
import zlib
from typing import Any

from engine.results.summary import Summary, Timeline
from engine.results.tables import HEADS
from formats.outcomes import Outcome

WIDE, NARROW = 640, 280

# Okabe and Ito's colours, told apart by most people's eyes, with the lightest taken out: they stand on white and black.
PALETTE = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9", "#8a7500", "#7a6fd0", "#888888"]
OUTCOME_COLOURS = {
    Outcome.ACCEPTED: "#009e73",
    Outcome.BOUNCED: "#d55e00",
    Outcome.DEFERRED: "#e69f00",
    Outcome.IN_DOUBT: "#cc79a7",
    Outcome.SUPPRESSED: "#56b4e9",
    Outcome.INVALID: "#8a7500",
    Outcome.UNSENT: "#888888",
}
_INK = "#010203"  # a colour that nothing else has; it becomes currentColor


class Picture:
    """One chart in both widths, and what it shows in words."""

    __slots__ = ("narrow", "title", "wide", "words")

    def __init__(self, title: str, words: str, wide: str, narrow: str) -> None:
        self.title, self.words, self.wide, self.narrow = title, words, wide, narrow


def available() -> bool:
    """Whether the extra `charts` is installed."""
    try:
        import altair  # noqa: F401
        import vl_convert  # noqa: F401
    except ImportError:
        return False
    return True


def pictures(summary: Summary) -> list[Picture]:
    """The charts that this summary has something for."""
    found = []
    if summary.rows:
        found.append(_picture("Outcomes", _outcome_words(summary), lambda width: _outcomes(summary, width)))
    timeline = summary.timeline
    if any(sum(series.attempts) for series in timeline.series):
        names = ", ".join(series.provider for series in timeline.series)
        unit = f"per minute, in steps of {timeline.step_minutes} min" if timeline.step_minutes > 1 else "per minute"
        found.append(
            _picture(
                "Accepted messages over time",
                f"Accepted messages {unit} for {names}.",
                lambda width: _lines(_rates(summary), "messages a minute", "~s", width),
            )
        )
        if any(sum(series.deferred) for series in timeline.series):
            found.append(
                _picture(
                    "Deferred share over time",
                    f"Share of attempts answered 4xx, {unit}, for {names}.",
                    lambda width: _lines(_shares(timeline), "deferred share", ".0%", width),
                )
            )
        told = ", ".join(series.provider for series in timeline.series if series.connections)
        if told:
            found.append(
                _picture(
                    "Connections over time",
                    f"Connections allowed, as the throttle's events tell, for {told}.",
                    lambda width: _lines(_connections(timeline), "connections", "d", width, steps=True),
                )
            )
    return found


def _outcome_words(summary: Summary) -> str:
    told = [f"{HEADS[outcome]} {summary.outcomes[outcome]:,}" for outcome in Outcome if summary.outcomes[outcome]]
    return f"Of {summary.rows:,} rows: {', '.join(told)}."


def _picture(title: str, words: str, draw: Any) -> Picture:
    return Picture(title, words, _svg(draw(WIDE)), _svg(draw(NARROW)))


def _svg(chart: Any) -> str:
    import vl_convert

    svg = str(vl_convert.vegalite_to_svg(chart.to_json()))
    svg = svg.replace(_INK, "currentColor")
    # Ids repeat between drawings on one page (clip paths); each drawing gets its own.
    mark = f"r{zlib.crc32(svg.encode()):08x}"
    svg = re.sub(r'\bid="(clip\d+|gradient_\d+)"', rf'id="{mark}\1"', svg)
    return re.sub(r"url\(#(clip\d+|gradient_\d+)\)", rf"url(#{mark}\1)", svg)


def _data(values: list[dict[str, Any]]) -> Any:
    import altair as alt

    return alt.Data(values=values)  # type: ignore[no-untyped-call]  # Altair leaves this one without types


def _dressed(chart: Any) -> Any:
    ink = {"labelColor": _INK, "titleColor": _INK, "domainColor": _INK, "tickColor": _INK, "gridColor": _INK}
    return (
        chart.configure(background="transparent", font="system-ui, sans-serif")
        .configure_axis(**ink, gridOpacity=0.12, domainOpacity=0.4, tickOpacity=0.4, labelFontSize=12, titleFontSize=12)
        .configure_legend(labelColor=_INK, titleColor=_INK, labelFontSize=12, labelLimit=160)
        .configure_text(color=_INK)
        .configure_view(strokeOpacity=0)
    )


def _outcomes(summary: Summary, width: int) -> Any:
    import altair as alt

    values = [
        {"outcome": HEADS[outcome], "rows": summary.outcomes[outcome], "label": f"{summary.outcomes[outcome]:,}"}
        for outcome in Outcome
    ]
    most = max(summary.outcomes.values()) or 1
    base = alt.Chart(_data(values)).encode(
        y=alt.Y("outcome:N", sort=list(HEADS.values()), title=None),
        # The labels say the numbers; an axis would say them again. Room on the right is for the longest label.
        x=alt.X("rows:Q", axis=None, scale=alt.Scale(domain=[0, most * (1.2 if width == WIDE else 1.5)])),
    )
    colours = alt.Scale(domain=list(HEADS.values()), range=list(OUTCOME_COLOURS.values()))
    bars = base.mark_bar().encode(color=alt.Color("outcome:N", scale=colours, legend=None))
    labels = base.mark_text(align="left", dx=4, fontSize=12).encode(text="label:N")
    return _dressed((bars + labels).properties(width=width, height=190))


def _lines(values: list[dict[str, Any]], title: str, number: str, width: int, *, steps: bool = False) -> Any:
    import altair as alt

    short = _short(list(dict.fromkeys(str(value["provider"]) for value in values)), 18 if width == WIDE else 16)
    values = [{**value, "provider": short[str(value["provider"])]} for value in values]
    names = list(short.values())
    columns = 2 if width == NARROW else 0
    legend = alt.Legend(title=None, orient="bottom", columns=columns) if columns else alt.Legend(title=None)
    colour = alt.Color(
        "provider:N", sort=names, scale=alt.Scale(domain=names, range=PALETTE[: len(names)]), legend=legend
    )
    # Colour alone would not do for everybody: lines differ in dashes as well.
    dashes = [[1, 0], [6, 2], [2, 2], [8, 2, 2, 2], [4, 4], [1, 3], [10, 3], [3, 1], [12, 2]]
    dash = alt.StrokeDash(
        "provider:N", sort=names, scale=alt.Scale(domain=names, range=dashes[: len(names)]), legend=legend
    )
    times = [int(value["at"]) for value in values]
    clock = "%H:%M" if max(times) - min(times) < 36 * 3_600_000 else "%d %b %H:%M"
    ticks = (6 if width == WIDE else 3) if clock == "%H:%M" else (5 if width == WIDE else 2)
    chart = alt.Chart(_data(values)).mark_line(
        interpolate="step-after" if steps else "linear", point=len(values) <= 12 * len(names)
    )
    return _dressed(
        chart.encode(
            x=alt.X("at:T", title=None, scale=alt.Scale(type="utc"), axis=alt.Axis(tickCount=ticks, format=clock)),
            y=alt.Y("value:Q", title=title, axis=alt.Axis(format=number, tickCount=5)),
            color=colour,
            strokeDash=dash,
        ).properties(width=width, height=220)
    )


def _short(names: list[str], most: int) -> dict[str, str]:
    """Names that fit a legend: a long one loses its middle, for names tell themselves apart at both ends."""
    found: dict[str, str] = {}
    for name in names:
        half = most // 2
        said = name if len(name) <= most else f"{name[: half - 1]}…{name[-half:]}"
        # Two that would look alike keep all they have: lines of one name would be drawn as one.
        found[name] = name if said in found.values() else said
    return found


def _points(timeline: Timeline) -> list[int]:
    count = max((len(series.attempts) for series in timeline.series), default=0)
    # Vega takes milliseconds since 1970.
    return [timeline.start_us // 1000 + point * timeline.step_minutes * 60_000 for point in range(count)]


def _rates(summary: Summary) -> list[dict[str, Any]]:
    timeline = summary.timeline
    first = (summary.first_at_us or 0) // 60_000_000
    last = (summary.last_at_us or 0) // 60_000_000 + 1

    def minutes(at_ms: int) -> float:
        # The first step and the last are seldom full: their rates are of the minutes that were used.
        begin = at_ms / 60_000
        used = min(begin + timeline.step_minutes, last) - max(begin, first)
        return min(timeline.step_minutes, max(1, used))

    return [
        {"provider": series.provider, "at": at, "value": round(count / minutes(at), 3)}
        for series in timeline.series
        for at, count in zip(_points(timeline), series.accepted, strict=True)
    ]


def _shares(timeline: Timeline) -> list[dict[str, Any]]:
    return [
        {"provider": series.provider, "at": at, "value": deferred / attempts}
        for series in timeline.series
        for at, deferred, attempts in zip(_points(timeline), series.deferred, series.attempts, strict=True)
        if attempts
    ]


def _connections(timeline: Timeline) -> list[dict[str, Any]]:
    return [
        {"provider": series.provider, "at": at, "value": count}
        for series in timeline.series
        if series.connections
        for at, count in zip(_points(timeline), series.connections, strict=True)
        if count is not None
    ]
