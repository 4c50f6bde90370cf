"""The breaker: a provider that calls valid users unknown is not believed. Pure.

Gmail answered `550 5.1.1` to valid users for six hours and 41 minutes (2020-12-14), Apple did on 2021-04-26; who
suppressed at once lost those people. So the share of "unknown user" among a provider's answers is watched: when it
jumps well above its baseline, the provider is *tripped*: such rows are deferred instead of bounced, what had been
suppressed lately is held back, and the operator is told. It is released by hand, or when probes are accepted: rows that
it had called unknown, tried again. (Other rows would prove nothing: a list with a bad stretch has good rows too.)

Counts are per provider over a short window and a long baseline, both exponentially forgotten, so that a million rows
cost two numbers.
"""

from __future__ import annotations

import math

import msgspec


class BreakerRule(msgspec.Struct, frozen=True):
    """When to trip. The share of a bought list may be 10 % honestly: only a jump counts."""

    at_least: int = 50  # answers in the window, so that three of four are no jump
    share: float = 0.2  # ... of which this share are unknown users
    times: float = 5.0  # ... and this many times the baseline
    window_s: float = 300.0
    baseline_s: float = 6 * 3600.0
    # What a provider is credited with before it has a baseline: answers, and a share usual for kept lists.
    prior: float = 400.0
    prior_share: float = 0.02
    probe_every_s: float = 600.0
    probes: int = 3  # accepted in a row, and it is released


class Tripped(msgspec.Struct, frozen=True, tag=True):
    """The provider is not believed any more. `since` is when the window that tripped it began: hold suppressions back
    from there on."""

    provider: str
    share: float
    baseline: float
    since: float

    def __str__(self) -> str:
        return (
            f"{self.provider} calls {self.share:.0%} of recipients unknown, {self.baseline:.1%} before: "
            f"deferring them and holding suppressions back"
        )


class Released(msgspec.Struct, frozen=True, tag=True):
    """The provider is believed again: by its probes, or by hand."""

    provider: str
    by_hand: bool


class _Share:
    """A forgetful share: unknown among all, over about `span_s`."""

    def __init__(self, span_s: float, now: float) -> None:
        self.span_s, self.at = span_s, now
        self.answers = self.unknown = 0.0

    def add(self, answers: float, unknown: float, now: float) -> None:
        if now > self.at:
            kept = math.exp((self.at - now) / self.span_s)
            self.answers *= kept
            self.unknown *= kept
            self.at = now
        self.answers += answers
        self.unknown += unknown


class _Watch:
    """One provider."""

    def __init__(self, rule: BreakerRule, now: float) -> None:
        self.recent = _Share(rule.window_s, now)
        self.baseline = _Share(rule.baseline_s, now)
        self.baseline.add(rule.prior, rule.prior * rule.prior_share, now)
        self.tripped_at: float | None = None
        self.probe_at = math.inf
        self.good_probes = 0


class Breaker:
    """Watches the answers of every provider."""

    def __init__(self, rule: BreakerRule | None = None) -> None:
        self._rule = rule or BreakerRule()
        self._watches: dict[str, _Watch] = {}

    def answered(self, provider: str, *, accepted: int, unknown: int, now: float) -> Tripped | None:
        """Counts answers about recipients (other refusals are not its affair); says when they trip the provider."""
        watch = self._watch(provider, now)
        if watch.tripped_at is not None:
            return None
        watch.recent.add(accepted + unknown, unknown, now)
        recent, rule = watch.recent, self._rule
        if recent.answers >= rule.at_least:
            share = recent.unknown / recent.answers
            baseline = watch.baseline.unknown / watch.baseline.answers
            if share >= rule.share and share >= rule.times * baseline:
                watch.tripped_at = now
                watch.probe_at = now + rule.probe_every_s
                watch.good_probes = 0
                return Tripped(provider, share, baseline, now - rule.window_s)
        # What is judged a jump must not become the baseline, so the baseline learns only from what did not trip.
        watch.baseline.add(accepted + unknown, unknown, now)
        return None

    def is_tripped(self, provider: str) -> bool:
        """Whether this provider's "unknown user" means "later" for now, and suppresses nobody."""
        watch = self._watches.get(provider)
        return watch is not None and watch.tripped_at is not None

    def may_probe(self, provider: str, now: float) -> bool:
        """Whether one of the rows it called unknown may be tried now; the answer goes to `probed`."""
        watch = self._watches.get(provider)
        if watch is None or watch.tripped_at is None or now < watch.probe_at:
            return False
        watch.probe_at = now + self._rule.probe_every_s
        return True

    def probed(self, provider: str, *, accepted: bool, now: float) -> Released | None:
        """A probe's answer; enough good ones in a row release the provider."""
        watch = self._watch(provider, now)
        if watch.tripped_at is None:
            return None
        if not accepted:
            watch.good_probes = 0
            return None
        watch.good_probes += 1
        watch.probe_at = now  # a good answer: the next probe need not wait
        if watch.good_probes < self._rule.probes:
            return None
        self._close(watch, now)
        return Released(provider, by_hand=False)

    def release(self, provider: str, now: float) -> Released | None:
        """The operator's word."""
        if not self.is_tripped(provider):
            return None
        self._close(self._watch(provider, now), now)
        return Released(provider, by_hand=True)

    def tripped(self) -> list[str]:
        """The providers that are not believed, for the operator's table."""
        return sorted(provider for provider in self._watches if self.is_tripped(provider))

    def _close(self, watch: _Watch, now: float) -> None:
        watch.tripped_at = None
        watch.probe_at = math.inf
        watch.recent = _Share(self._rule.window_s, now)

    def _watch(self, provider: str, now: float) -> _Watch:
        watch = self._watches.get(provider)
        if watch is None:
            watch = self._watches[provider] = _Watch(self._rule, now)
        return watch
