"""Where a course is played: the lane of every row, and the provider behind each lane. Knows models, no senders."""

from __future__ import annotations

import random

from engine.pace.throttle import Limits
from engine.rehearse.course import Course, ProviderCourse
from engine.rehearse.models import Model, Played, rows_of, world_bound_s


class Scene:
    """The world of a course."""

    def __init__(self, course: Course, rng: random.Random) -> None:
        world = course.world
        self.bound_s, bounds = world_bound_s(world, course.rows, course.machines)
        counts = rows_of(world, course.rows)
        self.told = {
            model.name: ProviderCourse(name=model.name, rows=counts[model.name], bound_s=bounds[model.name])
            for model in world.provider
        }
        self._seed = course.seed
        self._models: list[Model] = list(world.provider)
        self._lane_model: dict[int, int] = {}
        self._played: dict[int, Played] = {}
        self.lanes = self._lay_out(counts, rng)  # of every row

    def _lay_out(self, counts: dict[str, int], rng: random.Random) -> list[int]:
        """The lane of every row: providers mixed at random; a tail's domains are lanes above the providers'."""
        lanes: list[int] = []
        above = len(self._models)
        for number, model in enumerate(self._models):
            rows = counts[model.name]
            if model.domains == 1:
                lanes.extend([number] * rows)
                self._lane_model[number] = number
            else:
                for row in range(rows):
                    lanes.append(above + row % model.domains)
                for domain in range(min(rows, model.domains)):
                    self._lane_model[above + domain] = number
                above += model.domains
        rng.shuffle(lanes)
        return lanes

    def model(self, lane: int) -> Model:
        """Whose lane it is."""
        return self._models[self._lane_model[lane]]

    def play(self, lane: int) -> Played:
        """The provider as it remembers us, made when first spoken to."""
        played = self._played.get(lane)
        if played is None:
            played = self._played[lane] = Played(self.model(lane), self._seed, self.bound_s)
        return played

    def limits(self, lane: int) -> Limits:
        """The sender's budget for a lane."""
        model = self.model(lane)
        connections = model.budget_connections if model.budget_connections is not None else model.connections
        return Limits(connections=connections, rate_per_s=model.budget_rate_per_s)

    def single(self) -> dict[int, str]:
        """Lanes of providers that are one destination, and their names."""
        return {number: model.name for number, model in enumerate(self._models) if model.domains == 1}

    def count_connections(self) -> None:
        """At the end: the most connections that each provider saw from one source."""
        for lane, played in self._played.items():
            told = self.told[self.model(lane).name]
            told.most_connections = max(told.most_connections, played.most_connections)
