"""The supervisor's hand on pace: ledger, throttle, budgets and breaker, for all workers of the machine.

Decides nothing: budgets say what is allowed, the throttle what is wise, the ledger who gets it, the breaker when
"unknown user" is the provider's fault. Carries words between them and keeps the throttle's memory in a file.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from engine.campaign import write_whole
from engine.clock import Clock
from engine.config import Settings
from engine.pace import throttle
from engine.pace.allowance import Rate
from engine.pace.breaker import Breaker
from engine.pace.budgets import Budgets, rate_of, relay_limit
from engine.pace.slots import Decision, Ledger, Limit
from engine.pace.throttle import Ceiling, Kind, Observation, Signal, Throttle, ThrottleEvent
from engine.work.messages import Key, Pace, Seen, Tripped

SAVE_EVERY_S = 5.0


def _eased(per_second: float) -> Rate:
    """The throttle's rate for the ledger, in windows of ten seconds: it is a pace to keep, not a limit of a second."""
    return Rate(int(per_second * 10), 10.0) if per_second >= 0.5 else rate_of(max(per_second, 0.01))


class Pacing:
    """One per supervisor. `say` gets an event's name and fields; `tell` a message for one worker, or for all (None)."""

    def __init__(
        self,
        settings: Settings,
        budgets: Budgets | None,
        memory: Path,
        clock: Clock,
        say: Callable[..., None],
        tell: Callable[[msgspec.Struct, int | None], None],
    ) -> None:
        """`budgets` None: a relay, whose limits stand in [delivery]."""
        self._settings, self._budgets, self._memory, self._clock = settings, budgets, memory, clock
        self._say, self._tell = say, tell
        self.ledger = Ledger(self._limit)
        self.throttle = Throttle(self._most)
        self.breaker = Breaker()
        self._keys: set[Key] = set()
        self._told: set[tuple[int, Key]] = set()
        self._saved_at = clock.monotonic()
        self._domain = settings.dkim[0].domain if settings.dkim else settings.message.from_address.rpartition("@")[2]
        self._remember()

    # -- what workers saw ----------------------------------------------------------------------------------------------

    def hear(self, seen: list[Seen], established: Mapping[str, int]) -> None:
        """Take observations into account; `established` has the connections of all workers, by provider.

        A worker knows its own connections alone. With several sources the sum is too high, and the throttle then
        takes a step of one in place of going to what was accepted.
        """
        for one in seen:
            self._keys.add(one.key)
            observation = Observation(
                Signal(one.signal),
                one.at,
                count=one.count,
                started_at=one.started_at,
                reply_s=one.reply_s,
                connections=established.get(one.key[1]),
                on_connection=one.on_connection,
                pause_s=one.pause_s,
                then_connections=one.then_connections,
                text=one.text,
            )
            self.throttle.observe(self._throttle_key(one), observation)
            self._watch_unknown(one)

    def demand(self, worker: int, wanted: Mapping[Key, int], now: float) -> None:
        """Rows a worker has waiting."""
        self._keys.update(wanted)
        for key in wanted:
            if (worker, key) not in self._told:
                self._told.add((worker, key))
                self._tell(self._pace(key, now), worker)
        self.ledger.demand(worker, wanted, now)

    def gone(self, worker: int, now: float) -> None:
        """The worker is dead."""
        self._told = {(told, key) for told, key in self._told if told != worker}
        self.ledger.gone(worker, now)

    def _throttle_key(self, seen: Seen) -> throttle.Key:
        source, provider = seen.key
        match seen.scope:
            case "signing_domain":
                return throttle.Key(self._domain, provider, Kind.SIGNING_DOMAIN)
            case "campaign":
                return throttle.Key(self._settings.campaign.id, provider, Kind.CAMPAIGN)
            case _:
                return throttle.Key(source, provider)

    def _watch_unknown(self, seen: Seen) -> None:
        accepted = seen.count if seen.signal == Signal.ACCEPTED else 0
        unknown = seen.count if seen.unknown else 0
        if not (accepted or unknown):
            return
        provider, now = seen.key[1], seen.at
        if self.breaker.is_tripped(provider):
            if self.breaker.may_probe(provider, now):
                released = self.breaker.probed(provider, accepted=bool(accepted), now=now)
                if released is not None:
                    self._say("breaker_released", provider=provider)
                    self._tell(Tripped(provider=provider, is_open=False), None)
            return
        tripped = self.breaker.answered(provider, accepted=accepted, unknown=unknown, now=now)
        if tripped is not None:
            self._say("breaker_open", provider=provider, why=str(tripped))
            self._tell(Tripped(provider=provider, is_open=True), None)

    def known_keys(self) -> list[Key]:
        """Keys that were asked for in this run."""
        return list(self._keys)

    # -- what is allowed -----------------------------------------------------------------------------------------------

    def tick(self, now: float) -> list[Decision]:
        """Changes of the throttle take effect; returns what the ledger hands out."""
        for event in self.throttle.tick(now):
            self._changed(event, now)
        if now - self._saved_at >= SAVE_EVERY_S:
            self.save()
        return self.ledger.decide(now)

    def budgets_changed(self, settings: Settings, budgets: Budgets | None) -> None:
        """Live settings were read again."""
        self._settings, self._budgets = settings, budgets
        self.throttle.budgets_changed()
        now = self._clock.monotonic()
        for key in self._keys:
            self.ledger.set_limit(key, self._limit(key), now)
            self._tell(self._pace(key, now), None)

    def limited_by(self, key: Key) -> str:
        """What limits a key now, for the operator."""
        ceiling = self._ceiling(key)
        if ceiling.suspended_until is not None:
            left = max(0.0, ceiling.suspended_until - self._clock.monotonic())
            return f"suspended for {left:.0f} s: {ceiling.reason}"
        budget = self._budget(key)
        if ceiling.connections < budget.connections or ceiling.rate_per_s is not None:
            rate = f", {ceiling.rate_per_s:.2g}/s" if ceiling.rate_per_s is not None else ""
            return f"throttle: {ceiling.connections} connections{rate}: {ceiling.reason}"
        return f"budget: {budget.connections} connections"

    def save(self) -> None:
        """Keep what the throttle learned; a restart goes on from it."""
        self._saved_at = self._clock.monotonic()
        kept = {"at_us": self._clock.wall_us(), "throttle": self.throttle.to_dict(self._saved_at)}
        with contextlib.suppress(OSError):  # a full disk stops attempts elsewhere; this memory is a comfort
            write_whole(self._memory, msgspec.json.encode(kept))

    def _remember(self) -> None:
        try:
            kept = msgspec.json.decode(self._memory.read_bytes())
            away_s = (self._clock.wall_us() - kept["at_us"]) / 1e6
            self.throttle.from_dict(kept["throttle"], self._clock.monotonic(), max(0.0, away_s))
        except FileNotFoundError:
            return
        except (OSError, KeyError, TypeError, ValueError, msgspec.MsgspecError) as problem:
            self._say("throttle_memory_unreadable", file=str(self._memory), problem=str(problem))

    def _changed(self, event: ThrottleEvent, now: float) -> None:
        after, provider = event.after, event.key.provider
        self._say(
            f"throttle_{event.kind}",
            provider=provider,
            source=event.key.name,
            connections=after.connections,
            per_second=round(after.rate_per_s, 2) if after.rate_per_s is not None else None,
            reason=event.reason,
        )
        for key in [key for key in self._keys if key[1] == provider]:
            self.ledger.set_limit(key, self._limit(key), now)
            self._tell(self._pace(key, now), None)

    def _pace(self, key: Key, now: float) -> Pace:
        ceiling = self._ceiling(key)
        until_s = ceiling.suspended_until - now if ceiling.suspended_until is not None else 0.0
        return Pace(
            key=key,
            for_s=max(0.0, until_s),
            reason=ceiling.reason,
            per_connection=ceiling.per_connection,
            is_rated=bool(self._limit(key).rates),
        )

    def _ceiling(self, key: Key) -> Ceiling:
        source, provider = key
        return self.throttle.ceiling(*throttle.keys_of(source, provider, self._domain, self._settings.campaign.id))

    def _budget(self, key: Key) -> Limit:
        delivery = self._settings.delivery
        if self._budgets is None:
            return relay_limit(delivery.connections, delivery.messages_per_second)
        return self._budgets.limit_of(key)

    def _limit(self, key: Key) -> Limit:
        """The budget under the throttle's ceiling."""
        budget, ceiling = self._budget(key), self._ceiling(key)
        rates = budget.rates
        most = min((rate.per_second for rate in rates), default=float("inf"))
        if ceiling.rate_per_s is not None and ceiling.rate_per_s < most:
            rates = (*rates, _eased(ceiling.rate_per_s))
        connections = min(budget.connections, ceiling.connections)
        return Limit(connections, rates, budget.connection_rate)

    def _most(self, key: throttle.Key) -> throttle.Limits:
        if key.kind is not Kind.SOURCE:
            return throttle.Limits(connections=10_000)
        budget = self._budget((key.name, key.provider))
        rate = min((rate.per_second for rate in budget.rates), default=None)
        return throttle.Limits(connections=budget.connections, rate_per_s=rate)
