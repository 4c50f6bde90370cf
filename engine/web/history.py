"""Counts of the last half hour, by provider: a ring of samples that the web process keeps itself. Pure.

Every five seconds one sample of each provider's counts so far; rates are differences. 360 samples of 200 providers are
some 15 MB at most, and a restart of the web process begins anew.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from itertools import pairwise

from engine.web.snapshot import Rates
from engine.web.told import ProviderCounts

EVERY_S = 5.0
SAMPLES = 360
_SPAN_S = 60.0  # over which a rate "now" is taken

Counts = tuple[int, int, int]  # accepted, rejected, deferred
_NONE: Counts = (0, 0, 0)


class Sample:
    """All providers at one moment. The whole is summed once: whoever looks asks for it, and providers are many."""

    __slots__ = ("at", "by_provider", "whole")

    def __init__(self, at: float, counts: Mapping[str, ProviderCounts]) -> None:
        self.at = at
        self.by_provider: dict[str, Counts] = {n: (c.accepted, c.rejected, c.deferred) for n, c in counts.items()}
        accepted, rejected, deferred = map(sum, zip(*self.by_provider.values(), strict=True)) if counts else _NONE
        self.whole: Counts = (accepted, rejected, deferred)

    def of(self, name: str | None) -> Counts:
        """One provider's counts, or (None) those of all."""
        return self.whole if name is None else self.by_provider.get(name, _NONE)


class History:
    """One campaign's."""

    def __init__(self) -> None:
        self._samples: deque[Sample] = deque(maxlen=SAMPLES)
        self._base: Sample | None = None  # where the last minute began
        self._latest: Sample | None = None

    def add(self, now: float, counts: Mapping[str, ProviderCounts]) -> None:
        """Take the counts so far; kept as a sample every `EVERY_S` seconds."""
        self._latest = taken = Sample(now, counts)
        self._base = next((sample for sample in self._samples if now - sample.at <= _SPAN_S), None)
        if not self._samples or now - self._samples[-1].at >= EVERY_S - 0.05:
            self._samples.append(taken)

    def rates(self, name: str) -> Rates:
        """Of the last minute."""
        latest, base = self._latest, self._base
        if latest is None or base is None or name not in latest.by_provider or latest.at - base.at < 0.5:
            return Rates()
        per_second, later_share = _between(base, latest, name)
        return Rates(per_second, later_share)

    def series(self, name: str | None = None) -> dict[str, list[float]]:
        """Seconds before now, accepted a second, share of "later"; of one provider, or (None) of all."""
        told: dict[str, list[float]] = {"ago_s": [], "per_second": [], "later_share": []}
        now = self._latest.at if self._latest is not None else 0.0
        for before, after in pairwise(list(self._samples)):
            per_second, later_share = _between(before, after, name)
            told["ago_s"].append(round(now - after.at, 1))
            told["per_second"].append(round(per_second, 2))
            told["later_share"].append(round(later_share, 4))
        return told


def _between(before: Sample, after: Sample, name: str | None) -> tuple[float, float]:
    """Accepted a second, and the share of "later" among the answers."""
    accepted, rejected, deferred = (b - a for a, b in zip(before.of(name), after.of(name), strict=True))
    answers = accepted + rejected + deferred
    return max(0.0, accepted / (after.at - before.at)), deferred / answers if answers > 0 else 0.0
