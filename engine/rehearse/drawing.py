"""The course of a campaign as a picture: what each provider took, how many connections stood, what it refused.

Reads the lines of `engine send --log-format json` (its `progress` events), returns SVG. Drawn with Altair, which is in
the extra `charts`.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Any

import msgspec

from engine.errors import EngineError, Exit

_PALETTE = ["#2a6f97", "#c1121f", "#e09f3e", "#588157", "#7b2d8b", "#6c757d", "#0ead69", "#bc6c25"]
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
    moments: list[Moment] = []
    began: float | None = None
    last: dict[str, tuple[float, int, int]] = {}
    told: list[dict[str, Any]] = []
    for line in lines:
        try:
            event = msgspec.json.decode(line)
        except msgspec.DecodeError:
            continue  # what `send` says at its end is for people
        if isinstance(event, dict) and event.get("event") == "progress":
            told.append(event)
    every = max(1, len(told) // _POINTS)
    for event in told[::every]:
        at = datetime.fromisoformat(event["at"]).timestamp()
        began = at if began is None else began
        at_s = (at - began) * speed
        for name, counts in event["providers"].items():
            accepted, refused = counts["accepted"], counts["deferred"] + counts["rejected"] + counts["lost"]
            if name in last and at_s > last[name][0]:
                before_s, had, had_refused = last[name]
                span_s = at_s - before_s
                moments.append(
                    Moment(
                        at_s,
                        name,
                        max(0.0, (accepted - had) / span_s),
                        max(0.0, (refused - had_refused) / span_s),
                        counts["connections"],
                    )
                )
            last[name] = (at_s, accepted, refused)
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
    long = max((moment.at_s for moment in moments), default=0.0) > 7200
    for value in values:
        value["at"] = value["at_s"] / (3600 if long else 60)
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
                x=alt.X("at:Q", title="hours" if long else "minutes", axis=alt.Axis(grid=False)),
                y=alt.Y(f"{field}:Q", title=words, axis=alt.Axis(tickCount=5, gridOpacity=0.3)),
                color=colour,
            ).properties(width=760, height=150)
        )
    chart = alt.vconcat(*panels, title=title).configure(background="white").configure_view(strokeOpacity=0)
    return str(vl_convert.vegalite_to_svg(chart.to_json()))
