"""A course of the simulation as values: what is simulated, what happened at each provider, and what came out. Pure."""

from __future__ import annotations

from typing import Literal

import msgspec

from engine.pace.retry import RetryPlan
from engine.pace.throttle import ThrottleEvent
from engine.rehearse.models import World


class Course(msgspec.Struct, frozen=True, kw_only=True):
    """What is simulated."""

    world: World
    rows: int
    machines: int = 5
    workers: int = 8  # on each machine
    seed: int = 1
    throttle: Literal["adaptive", "classic"] = "adaptive"
    depth: int = 4  # messages handed to a connection at once
    batch_rows: int = 10_000
    retry: RetryPlan = RetryPlan()
    give_up_s: float = 30 * 86_400.0  # the virtual clock stops here


class ProviderCourse(msgspec.Struct, kw_only=True):
    """What happened at one provider (the domains of a tail count as one). Times in seconds."""

    name: str
    rows: int
    bound_s: float
    finished_s: float = 0.0
    attempts: int = 0
    accepted: int = 0
    bounced: int = 0
    expired: int = 0
    refused: int = 0  # 5xx about us
    greylisted: int = 0
    limited: int = 0  # attempts answered 4xx by a limiter
    connections_refused: int = 0
    lost: int = 0
    most_connections: int = 0  # as the provider counted them, on one source

    @property
    def limited_share(self) -> float:
        """Of the attempts, how many a limiter answered 4xx."""
        return self.limited / self.attempts if self.attempts else 0.0


class Sample(msgspec.Struct, frozen=True):
    """One provider in one minute, on all machines."""

    minute: int
    provider: str
    accepted: int
    limited: int
    connections: int  # ceilings summed over the machines
    rate_per_s: float | None


class Told(msgspec.Struct, kw_only=True):
    """What came out of a course."""

    course: Course
    bound_s: float
    duration_s: float
    providers: list[ProviderCourse]
    samples: list[Sample]
    events: list[tuple[str, ThrottleEvent]]  # (machine, change)
    decisions: int  # rows taken, settled, deferred, given back

    @property
    def ratio(self) -> float:
        """The duration against the bound."""
        return self.duration_s / self.bound_s if self.bound_s else 1.0

    @property
    def limited_share(self) -> float:
        """Of all attempts, how many a limiter answered 4xx."""
        attempts = sum(provider.attempts for provider in self.providers)
        return sum(provider.limited for provider in self.providers) / attempts if attempts else 0.0
