"""The course of a campaign as a picture: what each provider took, how many connections stood, what it refused.

Reads the lines of `engine send --log-format json` (its `progress` events), or what played providers reported on the
way; returns SVG. Drawn with Altair, which is in the extra `charts`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

import msgspec

from engine.errors import EngineError, Exit
from engine.rehearse.player import Report

_PALETTE = ["#2a6f97", "#c1121f", "#e09f3e", "#588157", "#7b2d8b", "#6c757d", "#0ead69", "#bc6c25"]
_UNITS = ((86_400.0, "days"), (3600.0, "hours"), (60.0, "minutes"), (1.0, "seconds"))
_POINTS = 180  # a line has at most so many points


class NoCharts(EngineError):
    """Pictures need Altair: {problem}."""

    exit_code = Exit.USAGE
    hint = "Install the extra: pip install 'rowpost[charts]'."


class Moment(msgspec.Struct, frozen=True):
    """One provider at one time. Rates are a second, over the time since the moment before."""

    at_s: float
    provider: str
    accepted_per_s: float
    refused_per_s: float
    connections: int


def read_course(lines: Iterable[str], *, speed: float = 1.0) -> list[Moment]:
    """What the progress events tell, in seconds since the first one; `speed` stretches compressed time again."""
    told: list[dict[str, Any]] = []
    for line in lines:
        try:
            event = msgspec.json.decode(line)
        except msgspec.DecodeError:
            continue  # what `send` says at its end is for people
        if isinstance(event, dict) and event.get("event") == "progress":
            told.append(event)
    began: float | None = None
    counted = []
    for event in told:
        at = datetime.fromisoformat(event["at"]).timestamp()
        began = at if began is None else began
        counts = {
            name: _Count(one["accepted"], one["deferred"] + one["rejected"] + one["lost"], one["connections"])
            for name, one in event["providers"].items()
        }
        counted.append(((at - began) * speed, counts))
    return _moments(counted)


def course_of(seen: Sequence[Mapping[str, Report]]) -> list[Moment]:
    """What the providers' own reports tell, in seconds of the models since the first connection to any of them."""
    opened = [report.first_opened_s for reports in seen[-1:] for report in reports.values()]
    began = min((at for at in opened if at is not None), default=0.0)
    counted = []
    for reports in seen:
        at_s = max((report.now_s for report in reports.values()), default=0.0) - began
        counts = {
            name: _Count(
                report.accepted,
                sum(count for kind, count in report.answers.items() if kind != "accepted"),
                sum(source.open for source in report.sources.values()),
            )
            for name, report in reports.items()
        }
        if at_s >= 0:
            counted.append((at_s, counts))
    return _moments(counted)


class _Count(msgspec.Struct, frozen=True):
    """Since the beginning; the connections are those that stand."""

    accepted: int
    refused: int
    connections: int


def _moments(counted: Sequence[tuple[float, Mapping[str, _Count]]]) -> list[Moment]:
    """The rates between one look and the next, of so many looks as a line can show."""
    moments: list[Moment] = []
    last: dict[str, tuple[float, _Count]] = {}
    for at_s, counts in counted[:: max(1, len(counted) // _POINTS)]:
        for name, now in counts.items():
            if name in last and at_s > last[name][0]:
                before_s, before = last[name]
                accepted_per_s = max(0.0, (now.accepted - before.accepted) / (at_s - before_s))
                refused_per_s = max(0.0, (now.refused - before.refused) / (at_s - before_s))
                moments.append(Moment(at_s, name, accepted_per_s, refused_per_s, now.connections))
            last[name] = (at_s, now)
    return moments


def svg_of(moments: list[Moment], title: str, *, most_providers: int = len(_PALETTE)) -> str:
    """Three panels under each other; the providers with the most accepted messages. Raises NoCharts."""
    try:
        import altair as alt
        import vl_convert
    except ImportError as problem:
        raise NoCharts(problem=problem) from None
    sums: dict[str, float] = {}
    for moment in moments:
        sums[moment.provider] = sums.get(moment.provider, 0.0) + moment.accepted_per_s + moment.connections / 1e6
    names = sorted(sums, key=lambda name: -sums[name])[:most_providers]
    values = [msgspec.structs.asdict(moment) for moment in moments if moment.provider in names]
    last_s = max((moment.at_s for moment in moments), default=0.0)
    unit_s, unit = next((one for one in _UNITS if last_s > 2 * one[0]), _UNITS[-1])
    for value in values:
        value["at"] = value["at_s"] / unit_s
    colour = alt.Color(
        "provider:N", sort=names, scale=alt.Scale(domain=names, range=_PALETTE[: len(names)]), title=None
    )
    panels = []
    for field, words in (
        ("accepted_per_s", "accepted a second"),
        ("connections", "connections"),
        ("refused_per_s", "refused a second"),
    ):
        data = alt.Data(values=values)  # type: ignore[no-untyped-call]  # Altair leaves this one without types
        chart = alt.Chart(data).mark_line(interpolate="step-after", strokeWidth=1.6)
        panels.append(
            chart.encode(
                x=alt.X("at:Q", title=unit, axis=alt.Axis(grid=False)),
                y=alt.Y(f"{field}:Q", title=words, axis=alt.Axis(tickCount=5, gridOpacity=0.3)),
                color=colour,
            ).properties(width=760, height=150)
        )
    chart = alt.vconcat(*panels, title=title).configure(background="white").configure_view(strokeOpacity=0)
    return str(vl_convert.vegalite_to_svg(chart.to_json()))
