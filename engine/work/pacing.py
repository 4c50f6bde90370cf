"""The supervisor's hand on pace: ledger, throttle, budgets and breaker, for all workers of the machine.

Decides nothing: budgets say what is allowed, the throttle what is wise, the ledger who gets it, the breaker when
"unknown user" is the provider's fault. Carries words between them and keeps the throttle's memory in a file.
"""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path

import msgspec

from engine.campaign import write_whole
from engine.clock import Clock
from engine.config import Settings
from engine.pace import throttle
from engine.pace.alarms import Alarms
from engine.pace.allowance import Rate
from engine.pace.breaker import Breaker
from engine.pace.budgets import Budgets, rate_of, relay_limit
from engine.pace.signals import FINE
from engine.pace.slots import Decision, Grant, Ledger, Limit, Use
from engine.pace.throttle import Ceiling, Kind, Observation, Signal, Throttle, ThrottleEvent
from engine.work.messages import Key, Pace, Seen, Tripped
from engine.work.sent_before import History
from engine.work.sharing import Sharing
from engine.work.warming import Turned, Warming
from engine.work.wide import WideWords
from engine.work.words import EACH, Word

SAVE_EVERY_S = 5.0
SAVE_WARMUP_EVERY_S = 1.0
_OPENED_KEPT_US = 62_000_000  # connection rates are per minute


class KeyState(msgspec.Struct, frozen=True):
    """A key as the operator sees it."""

    limit: str
    connections: int  # allowed now
    suspended_until_us: int | None  # wall time


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
        warming: Warming | None = None,
        sharing: Sharing | None = None,
    ) -> None:
        """`budgets` None: a relay, whose limits stand in [delivery]. `warming`: the plan's, where it has one.

        `sharing`: where other machines send the campaign too, who says what is ours of a limit.
        """
        self._warming, self._sharing = warming, sharing
        self._warming_memory = memory.with_name(memory.name.replace("throttle", "warmup"))
        self._warming_changed = False
        self._wanted: dict[int, set[Key]] = {}
        self._settings, self._budgets, self._memory, self._clock = settings, budgets, memory, clock
        self._say, self._tell = say, tell
        self.ledger = Ledger(self._limit)
        self.throttle = Throttle(self._most)
        self.wide = WideWords(self.throttle)
        self.breaker = Breaker()
        self.alarms = Alarms()
        self._keys: set[Key] = set()
        self._told: set[tuple[int, Key]] = set()
        self._saved_at = clock.monotonic()
        self._domain = settings.dkim[0].domain if settings.dkim else settings.message.from_address.rpartition("@")[2]
        self._words: dict[str, Word] = {}  # of the operator, by provider
        self._recalled: set[Key] = set()
        self._sent: dict[Key, list[tuple[int, int]]] = {}  # before this run: (UTC microseconds, messages)
        self._opened: dict[Key, deque[tuple[int, int]]] = {}  # connections granted where their rate is limited
        self._opened_changed = False
        self._remember()

    @property
    def is_rated(self) -> bool:
        """Whether any rate may hold: of a relay that is known before its first message."""
        return self._budgets is not None or self._settings.delivery.messages_per_second is not None

    def sent_before(self, history: History) -> None:
        """What the logs say went out before this run: it counts in the windows of every rate."""
        for (source, provider), sent in history.items():
            key = ("", provider) if self._budgets is None else self._budgets.key(source, provider)
            self._sent[key] = sorted(self._sent.get(key, []) + sent)

    # -- what workers saw ----------------------------------------------------------------------------------------------

    def hear(self, seen: list[Seen], established: Mapping[str, int] | None = None) -> None:
        """Take observations into account; `established` has the connections of all workers, by provider, where known.

        A worker knows its own connections alone. With several sources the sum is too high, and the throttle then
        takes a step of one in place of going to what was accepted.
        """
        for one in seen:
            self._keys.add(one.key)
            signal = Signal(one.signal)
            is_counted = one.after > 1
            if is_counted and signal is Signal.REPUTATION:
                signal = Signal.OTHER_4XX  # one that passes is no block; see `_heed`
            observation = Observation(
                signal,
                one.at,
                count=one.count,
                started_at=one.started_at,
                reply_s=one.reply_s,
                connections=None if established is None else established.get(one.key[1]),
                on_connection=one.on_connection,
                pause_s=None if is_counted else one.pause_s,
                then_connections=None if is_counted else one.then_connections,
                text=one.text,
            )
            who = self._throttle_key(one)
            self.throttle.observe(who, observation)
            if observation.signal in FINE and who.kind is Kind.SOURCE:
                # It went well for the domain and the campaign too: what was eased there grows back by it.
                for wide in [wide for wide in self.throttle.wide() if wide.provider == who.provider]:
                    self.throttle.observe(wide, observation)
            self.alarms.answered(one.key[1], one.count)
            if is_counted or one.alarm:
                self._heed(one, who)
            self._watch_unknown(one)
            if self._warming is not None:
                if one.signal == Signal.ACCEPTED:
                    self._warming.accepted(one.key, one.count)
                elif one.signal == Signal.REPUTATION:
                    self._warming.blocked(one.key)

    def demand(
        self,
        worker: int,
        wanted: Mapping[Key, int],
        now: float,
        urgent: Mapping[Key, int] | None = None,
        warm: Collection[Key] = (),
    ) -> None:
        """Rows a worker has waiting."""
        self._wanted[worker] = {key for key, rows in wanted.items() if rows}
        for key in wanted:
            self._keys.add(key)
            if key not in self._recalled:
                self._recalled.add(key)
                self._recall(key, now)
                if self._sharing is not None:
                    self._sharing.wake()
            if (worker, key) not in self._told:
                self._told.add((worker, key))
                self._tell(self._pace(key, now), worker)
        self.ledger.demand(worker, wanted, now, urgent, warm)

    def spent(self, worker: int, key: Key, messages: int, at: float, now: float) -> None:
        """A worker sent so many against its allowance."""
        self.ledger.spent(worker, key, messages, at, now)
        if self._warming is None or not messages:
            return
        was_used_up = self._warming.is_used_up(key)
        self._warming.sent(key, messages, self._clock.wall_us())
        self._warming_changed = True
        if self._warming.is_used_up(key) and not was_used_up:
            # Small destinations share a cap: what one used up, all have.
            self._limits_anew(now)

    def gone(self, worker: int, now: float) -> None:
        """The worker is dead."""
        self._wanted.pop(worker, None)
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

    def _heed(self, seen: Seen, who: throttle.Key) -> None:
        """A rule asks for more than the throttle does by itself, perhaps only when such replies come in numbers."""
        due = self.alarms.refused(who, seen.key[1], seen.rule, seen.after, seen.within_s, seen.at)
        if due is None:
            return
        if seen.alarm and self.alarms.may_tell(who, seen.rule, seen.at):
            self._say("reply_alarm", provider=seen.key[1], rule=seen.rule, why=str(due), reply=seen.text)
        if seen.after == 1 or not seen.pause_s:
            return
        reason = f"{due}: {seen.text}"
        if seen.then_connections is not None:
            documented = Observation(
                Signal.REPUTATION,
                seen.at,
                pause_s=seen.pause_s,
                then_connections=seen.then_connections,
                text=reason,
            )
            self.throttle.observe(who, documented)
        else:
            self.throttle.suspend(who, seen.at + seen.pause_s, seen.at, reason)

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
        if self._sharing is not None:
            self._sharing.tick(now)
        if self._warming is not None:
            for turned in self._warming.tick(self._clock.wall_us()):
                self._turned(turned, now)
        decisions = self.ledger.decide(now)
        self._note_opened(decisions)
        changed = self._warming_changed or self._opened_changed
        if now - self._saved_at >= (SAVE_WARMUP_EVERY_S if changed else SAVE_EVERY_S):
            self.save()
        return decisions

    def _note_opened(self, decisions: list[Decision]) -> None:
        """Connections that were granted, for the next run's windows; nobody else remembers them."""
        for one in decisions:
            if isinstance(one, Grant) and one.valid_s < math.inf:  # only where openings are limited
                now_us, opened = self._clock.wall_us(), self._opened.setdefault(one.key, deque())
                opened.append((now_us, one.connections))
                while opened[0][0] < now_us - _OPENED_KEPT_US:
                    opened.popleft()
                self._opened_changed = True

    def budgets_changed(self, settings: Settings, budgets: Budgets | None) -> None:
        """Live settings were read again."""
        self._settings, self._budgets = settings, budgets
        self.throttle.budgets_changed()
        self._limits_anew(self._clock.monotonic())

    def waits_for_warmup(self) -> bool:
        """Whether every row that wants to go waits for a cap of the warm-up and nothing else."""
        wanted = set().union(*self._wanted.values()) if self._wanted else set()
        warming = self._warming
        return warming is not None and bool(wanted) and all(warming.caps(key) is not None for key in wanted)

    def used_up(self) -> str | None:
        """Why nothing more may go today, where the warm-up says so of every row that wants to go."""
        warming = self._warming
        if warming is None or not self.waits_for_warmup():
            return None
        if not all(warming.is_used_up(key) for key in set().union(*self._wanted.values())):
            return None
        turn = warming.next_turn_us()
        when = f" in {max(0.0, (turn - self._clock.wall_us()) / 3.6e9):.1f} h" if turn is not None else " tomorrow"
        return f"the warm-up's caps of today are used up; run `engine send` again{when}"

    def obey(self, words: Mapping[str, Word]) -> None:
        """The operator's words by provider, those that hold now; at once, and with an event for each change."""
        changed = {name for name in self._words.keys() | words.keys() if self._words.get(name) != words.get(name)}
        if not changed:
            return
        self._words = dict(words)
        now = self._clock.monotonic()
        for name in sorted(changed):
            word = words.get(name, Word())
            self._say(
                "slowed",
                provider="each" if name == EACH else name,
                connections=word.connections,
                per_second=word.per_second,
                share=word.share,
                who=word.who or None,
            )
        for key in [key for key in self._keys if EACH in changed or key[1] in changed]:
            self.ledger.set_limit(key, self._limit(key), now)
            self._tell(self._pace(key, now), None)

    def state_of(self, key: Key) -> KeyState:
        """What a key may do now and why, for the operator and the counters."""
        ceiling = self._ceiling(key)
        until_us = None
        if ceiling.suspended_until is not None:
            left_s = max(0.0, ceiling.suspended_until - self._clock.monotonic())
            until_us = self._clock.wall_us() + round(left_s * 1e6)
        connections = self._limit(key).connections
        return KeyState(self.limited_by(key), connections, until_us)

    def waits_until(self, key: Key, now: float) -> float | None:
        """When a key may go on, where it stands still for a reason that ends by itself (a suspension, a cap)."""
        until = self._ceiling(key).suspended_until
        if until is not None and until > now:
            return until
        warming = self._warming
        if warming is None or not warming.is_used_up(key) or (turn := warming.next_turn_us()) is None:
            return None
        return now + max(0.0, (turn - self._clock.wall_us()) / 1e6)

    def pause_between_s(self, key: Key) -> float:
        """How far apart messages are at the rates in force; 0: not limited."""
        return max((1 / rate.per_second for rate in self._limit(key).rates), default=0.0)

    def limited_by(self, key: Key) -> str:
        """What limits a key now, for the operator."""
        ceiling = self._ceiling(key)
        if ceiling.suspended_until is not None:
            left = max(0.0, ceiling.suspended_until - self._clock.monotonic())
            return f"suspended for {left:.0f} s: {ceiling.reason}"
        word = self._word(key[1])
        if word is not None:
            return f"slowed by {word.who}: {word}"
        budget = self._budget(key)
        most_per_s = min((rate.per_second for rate in budget.rates), default=math.inf)
        is_slower = ceiling.rate_per_s is not None and ceiling.rate_per_s < most_per_s
        if ceiling.connections < budget.connections or is_slower:
            rate = f", {ceiling.rate_per_s:.3g}/s" if ceiling.rate_per_s is not None else ""
            return f"throttle: {ceiling.connections} connections{rate}: {ceiling.reason}"
        if self._warming is not None and (told := self._warming.told(key)):
            return told
        rate = f", {most_per_s:.3g}/s" if budget.rates else ""
        if self._sharing is not None and self._sharing.concerns(key):
            ours = self._sharing.granted(key)
            return f"budget: {ours} of {budget.connections} connections{rate}, shared with other machines"
        return f"budget: {budget.connections} connections{rate}"

    def save(self) -> None:
        """Keep what the throttle learned; a restart goes on from it."""
        self._saved_at = self._clock.monotonic()
        self._opened_changed = False
        now_us = self._clock.wall_us()
        opened = [
            (*key, [entry for entry in entries if entry[0] >= now_us - _OPENED_KEPT_US])
            for key, entries in self._opened.items()
        ]
        kept = {
            "at_us": now_us,
            "throttle": self.throttle.to_dict(self._saved_at),
            "opened": [entry for entry in opened if entry[2]],
        }
        with contextlib.suppress(OSError):  # a full disk stops attempts elsewhere; this memory is a comfort
            write_whole(self._memory, msgspec.json.encode(kept))
            if self._warming is not None:
                write_whole(self._warming_memory, self._warming.to_bytes())
                self._warming_changed = False

    def _remember(self) -> None:
        try:
            kept = msgspec.json.decode(self._memory.read_bytes())
            away_s = (self._clock.wall_us() - kept["at_us"]) / 1e6
            self.throttle.from_dict(kept["throttle"], self._clock.monotonic(), max(0.0, away_s))
            for source, provider, entries in kept.get("opened", []):
                self._opened[source, provider] = deque((int(at_us), int(count)) for at_us, count in entries)
        except FileNotFoundError:
            return
        except (OSError, KeyError, TypeError, ValueError, msgspec.MsgspecError) as problem:
            self._say("throttle_memory_unreadable", file=str(self._memory), problem=str(problem))

    def _recall(self, key: Key, now: float) -> None:
        """What went out before this run counts in its windows."""
        wall_us = self._clock.wall_us()

        def moments(entries: Iterable[tuple[int, int]]) -> list[tuple[float, int]]:
            return [(now - (wall_us - at_us) / 1e6, count) for at_us, count in entries]

        sent = self._sent.pop(key, [])
        # The warm-up remembers for itself what small destinations, which share a cap, were sent together.
        shared = self._warming.sent_before(key) if self._warming is not None else []
        if sum(count for _, count in shared) > sum(count for _, count in sent):
            sent = shared
        self.ledger.remember(key, moments(sent), now, moments(self._opened.get(key, ())))

    def _turned(self, turned: Turned, now: float) -> None:
        """A day of the warm-up is over."""
        self._say(
            "warmup_day_over",
            source=turned.source,
            provider=turned.provider,
            day=turned.before,
            sent=turned.sent,
            accepted=turned.accepted,
            next_day=turned.after.stage,
            reason=turned.after.reason,
        )
        self._limits_anew(now)
        self.save()

    def _limits_anew(self, now: float) -> None:
        for key in self._keys:
            self.ledger.set_limit(key, self._limit(key), now)
            self._tell(self._pace(key, now), None)

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

    # -- limits that machines share (`sharing.Pace`) -------------------------------------------------------------------

    def whole(self, key: Key) -> Limit:
        """The budget, as the operator's word narrows it."""
        budget, word = self._budget(key), self._word(key[1])
        if word is None:
            return budget
        connections, rates = budget.connections, budget.rates
        if word.share is not None:
            share = word.share
            connections = min(connections, max(1, round(budget.connections * share)))
            rates = (*rates, *(rate_of(max(rate.per_second * share, 0.01)) for rate in budget.rates))
        if word.connections is not None:
            connections = min(connections, word.connections)
        if word.per_second is not None:
            rates = (*rates, rate_of(max(word.per_second, 0.01)))
        return Limit(connections, rates, budget.connection_rate)

    def own_connections(self, key: Key) -> int:
        """What the throttle, and the warm-up, leave of the budget's connections."""
        return self._eased_limit(key).connections

    def use(self, key: Key, now: float) -> Use:
        """What is used now."""
        return self.ledger.use(key, now)

    def share_changed(self, key: Key) -> None:
        """Our part of a shared limit is another one."""
        self.ledger.set_limit(key, self._limit(key), self._clock.monotonic())

    # -- limits --------------------------------------------------------------------------------------------------------

    def _limit(self, key: Key) -> Limit:
        """What this machine may use."""
        own = self._eased_limit(key)
        if self._sharing is None or not self._sharing.concerns(key):
            return own
        return self._sharing.confined(key, self.whole(key), own)

    def _eased_limit(self, key: Key) -> Limit:
        """The budget under the throttle's ceiling."""
        budget, ceiling = self.whole(key), self._ceiling(key)
        rates = budget.rates
        most = min((rate.per_second for rate in rates), default=float("inf"))
        if ceiling.rate_per_s is not None and ceiling.rate_per_s < most:
            rates = (*rates, _eased(ceiling.rate_per_s))
        connections = min(budget.connections, ceiling.connections)
        if self._warming is not None and self._warming.caps(key) is not None:
            rates = (*rates, *self._warming.rates(key))
            connections = 0 if self._warming.is_used_up(key) else connections
        return Limit(connections, rates, budget.connection_rate)

    def _word(self, provider: str) -> Word | None:
        """What the operator says of this provider and of each."""
        own, each = self._words.get(provider), self._words.get(EACH)
        return own.tighter(each) if own is not None and each is not None else own or each

    def _most(self, key: throttle.Key) -> throttle.Limits:
        if key.kind is not Kind.SOURCE:
            return throttle.Limits(connections=10_000)
        budget = self._budget((key.name, key.provider))
        rate = min((rate.per_second for rate in budget.rates), default=None)
        return throttle.Limits(connections=budget.connections, rate_per_s=rate)
