"""Providers as played: how one answers connections and messages, and the least time a list can take there. Pure.

The same files (`engine/rehearse/models/*.toml`) drive the simulation on a virtual clock and the sink that plays
providers on loopback. A world is a file with a list of providers and the share of the rows each has; a provider is a
`Model`; `Played` is its memory while it is played. Chance comes from a seed and from the row's number, never from the
order of events, so that two runs with different senders meet the same greylisting and the same unknown users.

What is played, per source address unless said otherwise: a token bucket of accepted messages, a limit of connections
and of messages per connection, changes of both on the way, greylisting, unknown users, a block after too much
pressure, a reputation that falls with every refusal, outages, slow replies.

The bound is computed from these files alone; it knows nothing of schedulers, slots or throttles.
"""

from __future__ import annotations

from enum import StrEnum
from importlib import resources
from pathlib import Path
from typing import Literal

import msgspec

from engine.errors import EngineError, Exit


class WorldError(EngineError):
    """The provider models in {file} cannot be used: {problem}."""

    exit_code = Exit.SETTINGS
    hint = "The guide `pace.md` shows a model file; the shipped ones are: {shipped}."


class Change(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """From then on other limits hold. `at` is a share of the campaign's bound or, with `at_s`, seconds."""

    at: float | None = None
    at_s: float | None = None
    rate: float | None = None  # factor on the model's rate_per_s
    connections: int | None = None
    messages_per_connection: int | None = None


class Outage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """For a while: `refuse` answers 421 to connections, `block` 421 to every message, `reject` 550 (a policy),
    `silent` accepts connections and says nothing, `slow` multiplies reply times by `factor`."""

    kind: Literal["refuse", "block", "reject", "silent", "slow"]
    from_s: float
    to_s: float
    factor: float = 10.0


class Model(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One provider. Rates are messages a second and source; 0 connections or rate: it takes nothing."""

    name: str
    share: float = 0.0  # of the list's rows
    domains: int = 1  # more than one: the share is spread over so many destinations, each played by itself
    connect_s: float = 0.3  # TCP, TLS and greeting
    message_s: float = 0.25  # a transaction with its round trips
    connections: int = 10
    messages_per_connection: int | None = None
    rate_per_s: float | None = None
    burst_s: float = 5.0  # the bucket holds so many seconds of the rate
    changes: tuple[Change, ...] = ()
    outages: tuple[Outage, ...] = ()
    greylist_share: float = 0.0
    greylist_s: float = 300.0
    unknown_share: float = 0.0
    # Pressure: more than this share of a minute's messages refused, at least `pressure_least` of them, and
    # everything is refused until nothing has come for `block_s`.
    pressure_share: float | None = None
    pressure_least: int = 50
    block_s: float = 300.0
    # Reputation: a factor on the rate, 1 at best; each refusal costs, time heals.
    reputation_cost: float = 0.0
    reputation_heals_per_s: float = 0.001
    reputation_least: float = 0.2
    # What it documents about recovery (Gmail 4.7.28); the sender is told with the refusal.
    pause_s: float | None = None
    then_connections: int | None = None
    # The sender's budget, where it differs from the true limits: that is what "hidden" means.
    budget_connections: int | None = None
    budget_rate_per_s: float | None = None
    rate_reply: str = "421 4.7.0 Try again later, closing connection."
    block_reply: str = "421 4.7.28 Unusual rate of email originating from your IP address."
    greylist_reply: str = "450 4.2.0 Greylisted, please try again in 300 seconds"
    connections_reply: str = "421 4.7.0 Too many connections from your host."
    per_connection_reply: str = "421 4.7.0 Too many messages for this connection."
    unknown_reply: str = "550 5.1.1 The email account that you tried to reach does not exist."
    reject_reply: str = "550 5.7.1 Message rejected due to local policy."


class World(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All providers of a list."""

    title: str
    provider: tuple[Model, ...]


class Kind(StrEnum):
    """What an answer is. The words of `pace.signals.Signal`, and `silent`: no answer at all."""

    ACCEPTED = "accepted"
    BOUNCED = "bounced"
    REFUSED = "refused"
    GREYLISTED = "greylisted"
    RATE = "rate"
    TOO_MANY_CONNECTIONS = "too_many_connections"
    TOO_MANY_PER_CONNECTION = "too_many_per_connection"
    BUSY = "busy"
    SILENT = "silent"


class Answer(msgspec.Struct, frozen=True):
    """The reply, how long it takes, and the documented recovery that goes with it."""

    kind: Kind
    reply: str = "250 2.0.0 OK"
    takes_s: float = 0.0
    closes: bool = False
    pause_s: float | None = None
    then_connections: int | None = None


class _Source:
    """What a provider remembers of one source address."""

    __slots__ = ("blocked_until", "connections", "filled_at", "minute", "refused", "reputation", "seen", "tokens")

    def __init__(self, now: float, tokens: float) -> None:
        self.connections = 0
        self.tokens = tokens
        self.filled_at = now
        self.minute = now
        self.seen = self.refused = 0
        self.blocked_until = -1.0
        self.reputation = 1.0


class Played:
    """One provider being played. `now` is seconds since the campaign began; it must not go back much."""

    def __init__(self, model: Model, seed: int = 0, bound_s: float | None = None) -> None:
        """`bound_s` turns the changes' shares into seconds."""
        self.model = model
        self._seed = seed
        self._changes = sorted(
            (change.at_s if change.at_s is not None else (change.at or 0.0) * (bound_s or 0.0), n)
            for n, change in enumerate(model.changes)
        )
        self._at_change = 0
        self.rate_per_s = model.rate_per_s
        self.connections = model.connections
        self.messages_per_connection = model.messages_per_connection
        self._sources: dict[str, _Source] = {}
        self._greylisted: dict[int, float] = {}
        self.most_connections = 0

    def connect(self, source: str, now: float) -> Answer:
        """A connection from a source: accepted, or refused at the greeting."""
        self._change(now)
        place = self._source(source, now)
        if (outage := self._outage(now)) is not None:
            if outage.kind == "refuse":
                return self._answer(Kind.BUSY, self.model.rate_reply, self.model.connect_s, closes=True)
            if outage.kind == "silent":
                return Answer(Kind.SILENT)
        if place.connections >= self.connections:
            return self._answer(
                Kind.TOO_MANY_CONNECTIONS, self.model.connections_reply, self.model.connect_s, closes=True
            )
        place.connections += 1
        self.most_connections = max(self.most_connections, place.connections)
        return Answer(Kind.ACCEPTED, "220 ready", self.model.connect_s)

    def disconnect(self, source: str) -> None:
        """A connection that had been accepted is closed."""
        self._sources[source].connections -= 1

    def message(self, source: str, row: int, on_connection: int, now: float) -> Answer:
        """One transaction of a row, the connection's `on_connection`-th (from 0)."""
        model = self.model
        self._change(now)
        place = self._source(source, now)
        takes = model.message_s
        if (outage := self._outage(now)) is not None:
            if outage.kind == "slow":
                takes *= outage.factor
            elif outage.kind == "reject":
                return self._answer(Kind.REFUSED, model.reject_reply, takes)
            elif outage.kind == "silent":
                return Answer(Kind.SILENT)
            else:
                return self._refuse(place, now, model.block_reply)
        if place.connections > self.connections:  # the limit was lowered under those that are open
            return self._answer(Kind.TOO_MANY_CONNECTIONS, model.connections_reply, takes / 4, closes=True)
        if self.messages_per_connection is not None and on_connection >= self.messages_per_connection:
            return self._answer(Kind.TOO_MANY_PER_CONNECTION, model.per_connection_reply, takes / 4, closes=True)
        if now < place.blocked_until:
            place.blocked_until = now + model.block_s
            return self._refuse(place, now, model.block_reply, documented=True)
        if model.unknown_share and self._chance(row, 1) < model.unknown_share:
            return self._answer(Kind.BOUNCED, model.unknown_reply, takes)
        if model.greylist_share and self._chance(row, 2) < model.greylist_share:
            since = self._greylisted.setdefault(row, now)
            if now - since < model.greylist_s:
                return self._answer(Kind.GREYLISTED, model.greylist_reply, takes)
        if self.rate_per_s is not None and not self._token(place, now):
            return self._refuse(place, now, model.rate_reply)
        self._press(place, now, 0)
        return Answer(Kind.ACCEPTED, "250 2.0.0 OK", takes)

    def _refuse(self, place: _Source, now: float, reply: str, *, documented: bool = False) -> Answer:
        model = self.model
        place.reputation = max(model.reputation_least, place.reputation - model.reputation_cost)
        if self._press(place, now, 1):
            place.blocked_until = now + model.block_s
            reply, documented = model.block_reply, True
        return self._answer(
            Kind.RATE,
            reply,
            model.message_s / 2,
            closes=True,
            pause_s=model.pause_s if documented else None,
            then_connections=model.then_connections if documented else None,
        )

    def _press(self, place: _Source, now: float, refused: int) -> bool:
        """Count a message of this minute; whether the pressure is too much."""
        if now - place.minute >= 60.0:
            place.minute, place.seen, place.refused = now, 0, 0
        place.seen += 1
        place.refused += refused
        share = self.model.pressure_share
        return (
            share is not None
            and place.refused >= self.model.pressure_least
            and place.refused >= share * place.seen
            and now >= place.blocked_until
        )

    def _token(self, place: _Source, now: float) -> bool:
        assert self.rate_per_s is not None
        elapsed = max(0.0, now - place.filled_at)
        if self.model.reputation_cost:
            place.reputation = min(1.0, place.reputation + elapsed * self.model.reputation_heals_per_s)
        rate = self.rate_per_s * place.reputation
        place.tokens = min(max(1.0, rate * self.model.burst_s), place.tokens + elapsed * rate)
        place.filled_at = max(now, place.filled_at)
        if place.tokens < 1.0:
            return False
        place.tokens -= 1.0
        return True

    def _change(self, now: float) -> None:
        while self._at_change < len(self._changes) and self._changes[self._at_change][0] <= now:
            change = self.model.changes[self._changes[self._at_change][1]]
            self._at_change += 1
            if change.rate is not None and self.model.rate_per_s is not None:
                self.rate_per_s = self.model.rate_per_s * change.rate
            if change.connections is not None:
                self.connections = change.connections
            if change.messages_per_connection is not None:
                self.messages_per_connection = change.messages_per_connection

    def _outage(self, now: float) -> Outage | None:
        for outage in self.model.outages:
            if outage.from_s <= now < outage.to_s:
                return outage
        return None

    def _source(self, source: str, now: float) -> _Source:
        place = self._sources.get(source)
        if place is None:
            full = max(1.0, (self.rate_per_s or 0.0) * self.model.burst_s)
            place = self._sources[source] = _Source(now, full)
        return place

    def _chance(self, row: int, what: int) -> float:
        # A multiplicative hash (Knuth's constant, then a mix): cheap, even, the same in whatever order rows come.
        x = (row * 2654435761 + what * 40503 + self._seed * 97) & 0xFFFFFFFF
        x = ((x ^ x >> 16) * 0x45D9F3B) & 0xFFFFFFFF
        x = ((x ^ x >> 16) * 0x45D9F3B) & 0xFFFFFFFF
        return (x ^ x >> 16) / 0x100000000

    def _answer(
        self,
        kind: Kind,
        reply: str,
        takes_s: float,
        *,
        closes: bool = False,
        pause_s: float | None = None,
        then_connections: int | None = None,
    ) -> Answer:
        return Answer(kind, reply, takes_s, closes, pause_s, then_connections)


# The bound.


def accept_rate(model: Model, rate_per_s: float | None, connections: int, per_connection: int | None) -> float:
    """Messages a second that one source gets accepted at best: the bucket's rate, or what its connections carry.

    A connection of k messages takes connect_s + k * message_s.
    """
    k = per_connection or 100_000
    carried = connections * k / (model.connect_s + k * model.message_s) if connections else 0.0
    return carried if rate_per_s is None else min(carried, rate_per_s)


def bound_s(model: Model, rows: int, sources: int, campaign_s: float = 0.0) -> float:
    """The least seconds in which `rows` can be accepted from so many sources; inf where they never can.

    Spread over many domains, the fullest one is what counts. Greylisted rows need their wait at the least. Changes
    given as shares are shares of `campaign_s`.
    """
    if rows <= 0:
        return 0.0
    per_domain = -(-rows // max(1, model.domains))
    left = float(per_domain)
    if model.rate_per_s is not None:
        left = max(0.0, left - max(1.0, model.rate_per_s * model.burst_s) * sources)  # the buckets are full at first
    rate, connections, per_connection = model.rate_per_s, model.connections, model.messages_per_connection
    steps = sorted(
        (
            (change.at_s if change.at_s is not None else (change.at or 0.0) * campaign_s, change)
            for change in model.changes
        ),
        key=lambda step: step[0],
    )
    edges = sorted({at for at, _ in steps} | {t for o in model.outages for t in (o.from_s, o.to_s)})
    at, done_at = 0.0, float("inf")
    for edge in [*edges, float("inf")]:
        while steps and steps[0][0] <= at:
            change = steps.pop(0)[1]
            if change.rate is not None and model.rate_per_s is not None:
                rate = model.rate_per_s * change.rate
            connections = change.connections if change.connections is not None else connections
            if change.messages_per_connection is not None:
                per_connection = change.messages_per_connection
        out = any(o.kind != "slow" and o.from_s <= at < o.to_s for o in model.outages)
        speed = 0.0 if out else sources * accept_rate(model, rate, connections, per_connection)
        if speed * (edge - at) >= left if edge != float("inf") else speed > 0:
            done_at = at + left / speed
            break
        if edge == float("inf"):
            break
        left -= speed * (edge - at)
        at = edge
    # A greylisted row cannot be accepted sooner, nor any row before a connection stands.
    least = model.connect_s + model.message_s
    if model.greylist_share and rows * model.greylist_share >= 1:
        least += model.greylist_s
    return max(done_at, least)


def rows_of(world: World, rows: int) -> dict[str, int]:
    """How many rows each provider has: the shares, rounded so that they add up."""
    total = sum(model.share for model in world.provider) or 1.0
    counts: dict[str, int] = {}
    given, wanted = 0, 0.0
    for model in world.provider:
        wanted += rows * model.share / total
        counts[model.name] = round(wanted) - given
        given += counts[model.name]
    return counts


def world_bound_s(world: World, rows: int, sources: int) -> tuple[float, dict[str, float]]:
    """The least duration of the campaign, and each provider's own.

    Where changes come at shares of the campaign, its length T is the one for which everybody is done at T.
    """
    counts = rows_of(world, rows)

    def each(campaign_s: float) -> dict[str, float]:
        return {model.name: bound_s(model, counts[model.name], sources, campaign_s) for model in world.provider}

    if not any(change.at is not None for model in world.provider for change in model.changes):
        bounds = each(0.0)
        return max(bounds.values()), bounds
    low, high = 0.0, 1.0
    while max(each(high).values()) > high:
        high *= 2
        if high > 1e9:
            return float("inf"), each(high)
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if max(each(middle).values()) > middle else (low, middle)
    return high, each(high)


# The files.


def shipped_worlds() -> list[str]:
    """The names of the model files that come with the engine."""
    folder = resources.files("engine.rehearse") / "models"
    return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))


def load_world(name: str | Path) -> World:
    """The world of a shipped name or of a file; raises WorldError."""
    path = Path(name)
    try:
        if path.suffix == ".toml":
            raw = path.read_bytes()
        else:
            raw = (resources.files("engine.rehearse") / "models" / f"{name}.toml").read_bytes()
        world = msgspec.toml.decode(raw, type=World)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, ValueError) as problem:
        raise WorldError(file=str(name), problem=problem, shipped=", ".join(shipped_worlds())) from None
    _check(world, str(name))
    return world


def _check(world: World, file: str) -> None:
    names = [model.name for model in world.provider]
    problem = ""
    if not names:
        problem = "it has no [[provider]]"
    elif len(set(names)) < len(names):
        problem = "two providers have one name"
    for model in world.provider:
        if model.share < 0 or model.domains < 1 or model.connections < 0 or (model.rate_per_s or 0.0) < 0:
            problem = f"{model.name}: a negative number, or no domain"
        elif any((change.at is None) == (change.at_s is None) for change in model.changes):
            problem = f"{model.name}: a change needs either `at` or `at_s`"
    if problem:
        raise WorldError(file=file, problem=problem, shipped=", ".join(shipped_worlds()))
