"""Counts of the last half hour, by provider: a ring of samples that the web process keeps itself. Pure.

Every five seconds one sample of each provider's counts so far; rates are differences. 360 samples of 200 providers are
some 20 MB at most, and a restart of the web process begins anew.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Mapping
from itertools import pairwise

from engine.web.snapshot import ProviderCounts, Rates

EVERY_S = 5.0
SAMPLES = 360
_SPAN_S = 60.0  # over which a rate "now" is taken


class History:
    """One campaign's."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, dict[str, array[int]]]] = deque(maxlen=SAMPLES)
        self._base: tuple[float, dict[str, array[int]]] | None = None  # where the last minute began
        self._latest: tuple[float, dict[str, array[int]]] | None = None

    def add(self, now: float, counts: Mapping[str, ProviderCounts]) -> None:
        """Take the counts so far; kept as a sample every `EVERY_S` seconds."""
        taken = {name: array("q", (c.accepted, c.rejected, c.deferred)) for name, c in counts.items()}
        self._latest = (now, taken)
        self._base = next((s for s in self._samples if now - s[0] <= _SPAN_S), None)
        if not self._samples or now - self._samples[-1][0] >= EVERY_S - 0.05:
            self._samples.append((now, taken))

    def rates(self, name: str) -> Rates:
        """Of the last minute."""
        if self._latest is None or self._base is None:
            return Rates()
        now, latest = self._latest
        began, first = self._base
        if name not in latest or now - began < 0.5:
            return Rates()
        before = first.get(name, array("q", (0, 0, 0)))
        accepted, rejected, deferred = (a - b for a, b in zip(latest[name], before, strict=True))
        answers = accepted + rejected + deferred
        return Rates(max(0.0, accepted / (now - began)), deferred / answers if answers > 0 else 0.0)

    def series(self, name: str | None = None) -> dict[str, list[float]]:
        """Seconds before now, accepted a second, share of "later"; of one provider, or (None) of all."""
        told: dict[str, list[float]] = {"ago_s": [], "per_second": [], "later_share": []}
        samples = list(self._samples)
        if self._latest is None:
            return told
        for (began, before), (ended, after) in pairwise(samples):
            accepted = rejected = deferred = 0
            for one in after if name is None else [name]:
                if one in after:
                    old = before.get(one, array("q", (0, 0, 0)))
                    accepted += after[one][0] - old[0]
                    rejected += after[one][1] - old[1]
                    deferred += after[one][2] - old[2]
            answers = accepted + rejected + deferred
            told["ago_s"].append(round(self._latest[0] - ended, 1))
            told["per_second"].append(round(max(0, accepted) / (ended - began), 2))
            told["later_share"].append(round(deferred / answers, 4) if answers > 0 else 0.0)
        return told
