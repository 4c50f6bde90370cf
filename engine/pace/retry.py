"""When a deferred row is tried again. Pure: the time and the dice come in as arguments.

RFC 5321 §4.5.4.1 says at least 30 minutes and four to five days; a campaign is not worth that, and the early retries
(1 and 5 minutes) are what greylisting asks for. A provider's suspension overrules them: see `scheduler`.
"""

from __future__ import annotations

import random

import msgspec

from engine.config import RetryTable

NEVER_SOONER_S = 10.0  # "try again in 1 second" is not worth a connection


class RetryPlan(msgspec.Struct, frozen=True):
    """Waits after the first, second, ... attempt (the last one repeats), and the age at which a row is given up."""

    waits_s: tuple[float, ...] = (60.0, 300.0, 1800.0, 3600.0)
    max_age_s: float = 24 * 3600.0
    jitter: float = 0.1

    @classmethod
    def from_settings(cls, table: RetryTable) -> RetryPlan:
        """The plan of the campaign's [retry] table."""
        waits = tuple(wait.seconds for wait in table.plan) or (3600.0,)
        return cls(waits, table.max_age.seconds, table.jitter)

    def expires_at(self, first_at: float) -> float:
        """When a row first attempted at `first_at` is given up, wherever it waits."""
        return first_at + self.max_age_s

    def next_wait(
        self, attempt: int, first_at: float, now: float, rng: random.Random, hint_s: float | None = None
    ) -> float | None:
        """Seconds until the next attempt after `attempt` attempts, or None: it would come after the maximum age.

        A hint of the server ("try again in 300 seconds") wins over the plan, sooner or later; jitter then only adds,
        for a second early is refused again.
        """
        if hint_s is not None:
            wait = max(hint_s, NEVER_SOONER_S) * (1 + self.jitter * rng.random())
        else:
            wait = self.waits_s[min(max(attempt, 1), len(self.waits_s)) - 1]
            wait *= 1 + self.jitter * (2 * rng.random() - 1)
        return None if now + wait > self.expires_at(first_at) else wait
