"""A course as a picture: per provider what was accepted and refused minute by minute, and the ceiling. SVG, by hand.

Takes samples, returns text; no plotting library is needed for four lines.
"""

from __future__ import annotations

from collections.abc import Sequence
from xml.sax.saxutils import escape

from engine.rehearse.course import Sample

_WIDTH, _HEIGHT, _LEFT, _TOP, _GAP = 900, 110, 110, 46, 26
_POINTS = 450  # minutes are averaged so that a line has at most so many points
_ACCEPTED, _LIMITED, _CEILING = "#2a6f97", "#c1121f", "#9aa5b1"


def picture(samples: Sequence[Sample], title: str) -> str:
    """The samples of a course as an SVG document, one panel a provider."""
    names = list(dict.fromkeys(sample.provider for sample in samples))
    last = max((sample.minute for sample in samples), default=0) + 1
    height = _TOP + len(names) * (_HEIGHT + _GAP) + 24
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_LEFT + _WIDTH + 20} {height}" '
        'font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{_LEFT}" y="18" font-size="14">{escape(title)}</text>',
        f'<text x="{_LEFT}" y="36" fill="{_ACCEPTED}">accepted a minute</text>',
        f'<text x="{_LEFT + 130}" y="36" fill="{_LIMITED}">refused by the limiter</text>',
        f'<text x="{_LEFT + 280}" y="36" fill="{_CEILING}">ceiling: rate, else connections (own scale)</text>',
    ]
    for number, name in enumerate(names):
        out += _panel([s for s in samples if s.provider == name], name, last, _TOP + number * (_HEIGHT + _GAP))
    for hour in range(0, last // 60 + 1, max(1, last // 60 // 8)):
        out.append(f'<text x="{_LEFT + hour * 60 / last * _WIDTH:.0f}" y="{height - 8}">{hour} h</text>')
    out.append("</svg>\n")
    return "\n".join(out)


def _panel(samples: list[Sample], name: str, last: int, top: int) -> list[str]:
    step = max(1, -(-len(samples) // _POINTS))
    means = [samples[at : at + step] for at in range(0, len(samples), step)]
    accepted = [sum(s.accepted for s in part) / len(part) for part in means]
    limited = [sum(s.limited for s in part) / len(part) for part in means]
    rates = [part[-1].rate_per_s for part in means]
    connections = [float(part[-1].connections) for part in means]
    highest = max([*accepted, 1.0]) * 1.15
    ceiling = [
        min(rate * 60, highest) if rate is not None and held else held / max([*connections, 1.0]) * highest * 0.95
        for rate, held in zip(rates, connections, strict=True)
    ]
    out = [
        f'<rect x="{_LEFT}" y="{top}" width="{_WIDTH}" height="{_HEIGHT}" fill="none" stroke="#ddd"/>',
        f'<text x="{_LEFT - 8}" y="{top + 16}" text-anchor="end">{escape(name)}</text>',
        f'<text x="{_LEFT - 8}" y="{top + 34}" text-anchor="end" fill="#666">{highest / 1.15:,.0f}/min</text>',
    ]
    for values, colour in ((ceiling, _CEILING), (accepted, _ACCEPTED), (limited, _LIMITED)):
        points = " ".join(
            f"{_LEFT + part[0].minute / last * _WIDTH:.1f},{top + _HEIGHT * (1 - min(value / highest, 1)):.1f}"
            for part, value in zip(means, values, strict=True)
        )
        out.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.3"/>')
    return out
