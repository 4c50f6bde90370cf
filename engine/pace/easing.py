"""How one (source, provider) answers its signals: the classic rule and ours. Pure; times are arguments.

`Classic` is the rule that operators write down: windows of one minute; a rising share of 4xx at constant volume halves
the pool; five minutes of waiting; then one connection more a minute while the share stays low.

`Adaptive` is the default:
- the limiter is measured, not guessed: from the first refusal some twenty replies are counted, and the rate becomes
  what was accepted of them. Once per cohort: replies to attempts begun before the last change say nothing new
  (Postfix's SCHEDULER_README measured 50 % of the mail deferred at an active limiter with feedback per failure, 16.5 %
  with its best);
- the last good level is remembered; a probe goes a few percent above it, and comes straight back when refused; each
  refused probe doubles the wait for the next, each accepted one halves it and doubles the step;
- connections, messages per connection and rate are three dials, each turned by its own signal; greylisting and
  refusals about a recipient turn none;
- reply times that rise steeply stop growth before the refusals come;
- what a provider documents wins (Gmail 4.7.28: ten minutes of nothing, then one connection, then one more at a time).
"""

from __future__ import annotations

from typing import Protocol

from engine.pace.signals import FINE, PRESSURE, WINDOW_S, Observation, Signal, State


class Easing(Protocol):
    """One way to answer signals. Both methods change the state; what they changed is told by comparing it."""

    def observe(self, state: State, seen: Observation) -> None:
        """Answer one observation."""

    def window(self, state: State, now: float) -> None:
        """A window of a minute has ended (it is in the state still)."""


def _back_to_work(state: State, seen: Observation) -> None:
    """The way back after a pause: each step wants as many successes as there are connections."""
    state.recovered += seen.count
    if state.recovered < state.connections or seen.now - state.stepped_at < 5.0:
        return
    state.recovered, state.stepped_at = 0, seen.now
    goal = min(state.goal_connections, state.limits.connections)
    state.connections = min(goal, state.connections * 2 if state.doubles else state.connections + 1)
    state.reason = "growing back after a pause"
    if state.connections >= goal:
        state.is_recovering, state.repeats = False, 0


def _documented(state: State, seen: Observation, default_pause_s: float, doubles_pause: bool) -> None:
    """Pause as the provider asks, or as is usual for this signal."""
    pause = seen.pause_s if seen.pause_s is not None else default_pause_s
    if doubles_pause:
        pause *= 2 ** min(state.repeats, 2)
    state.repeats += 1
    state.suspend(seen.now, pause, f"{seen.signal}: {seen.text}" if seen.text else str(seen.signal))
    state.doubles = False
    state.connections = min(state.limits.connections, max(1, seen.then_connections or 1))


class Classic:
    """The written-down rule, as a baseline to compare with: connections only, windows of a minute."""

    rising = 0.05  # a share of 4xx that much above the quiet one is "rising"
    wait_s = 300.0

    def observe(self, state: State, seen: Observation) -> None:
        if state.suspended_until_at is not None:
            return
        is_new = state.eased_at is None or (seen.started_at or seen.now) > state.eased_at
        if is_new and (seen.signal is Signal.REPUTATION or (seen.pause_s and seen.then_connections is not None)):
            _documented(state, seen, 3600.0, doubles_pause=False)
            state.is_recovering = False  # it grows back as it always grows: one a minute
            state.next_connection_at = 0.0

    def window(self, state: State, now: float) -> None:
        if state.suspended_until_at is not None or not state.attempts or state.is_recovering:
            return
        share = state.any_4xx / state.attempts
        constant = state.attempts >= 0.8 * state.last_attempts
        if share >= state.quiet_share + self.rising and constant:
            if now >= state.next_connection_at:
                state.connections = max(1, state.connections // 2)
                state.next_connection_at = now + self.wait_s
                state.reason = f"{share:.0%} of a minute's attempts answered 4xx: pool halved"
            return
        if share < 0.15:
            state.quiet_share += 0.2 * (share - state.quiet_share)
        if now >= state.next_connection_at and state.connections < state.limits.connections:
            state.connections += 1
            state.reason = "quiet: one connection more"


class Adaptive:
    """The default rule; see the module's docstring."""

    enough = 20  # replies that make a measurement
    patience_s = 10.0  # or so much time
    clear = 0.3  # a share that is clear after so few; a smaller one is counted three times as long
    small = 0.08  # a share too small to be known then: a whole window tells
    stray = 0.02  # a smaller share of a window's attempts is chance
    margin = 0.98  # of what was accepted
    grace_s = 2.0  # until an eased rate has reached every worker; what begins before tells of the old one
    first_step = 0.04
    largest_step = 0.32
    first_probe_s = 120.0
    last_probe_s = 600.0
    hidden_s = 7.5  # a bucket that holds so many seconds of its rate hides an excess of x for hidden_s / x
    first_connection_s = 300.0
    last_connection_s = 2400.0
    slow = 2.0  # reply times that many times the usual stop growth
    storm = 5  # refusals without one success
    first_storm_pause_s = 60.0
    last_storm_pause_s = 600.0

    def observe(self, state: State, seen: Observation) -> None:
        if state.suspended_until_at is not None:
            return
        begun = seen.started_at if seen.started_at is not None else seen.now
        is_new = state.eased_at is None or begun > state.eased_at
        match seen.signal:
            case Signal.TOO_MANY_CONNECTIONS:
                self._fewer_connections(state, seen, begun)
                return
            case Signal.TOO_MANY_PER_CONNECTION:
                self._fewer_per_connection(state, seen)
                return
            case Signal.REPUTATION:
                if is_new:
                    _documented(state, seen, 3600.0, doubles_pause=True)
                return
            case Signal.UNREACHABLE:
                state.unreachable += seen.count
                if state.unreachable >= self.storm:
                    self._storm(state, seen, "no connection, five times in a row")
                return
        state.unreachable = 0
        if not is_new:
            return
        if seen.signal is Signal.REFUSED:
            # A list has a few; in a row they are about us, and each costs a recipient.
            state.refused_run += seen.count
            if state.refused_run >= (self.storm if state.is_recovering else self.enough):
                self._storm(state, seen, f"{state.refused_run} refused for good in a row: {seen.text or seen.signal}")
            return
        if seen.signal is Signal.ACCEPTED:
            state.refused_run = 0
        if seen.pause_s and seen.then_connections is not None and seen.signal not in FINE:
            rate = state.attempt_rate(seen.now)
            _documented(state, seen, seen.pause_s, doubles_pause=False)
            self._learn_rate(state, seen.now, rate, self._bad_share(state, 0.2))
            return
        if seen.signal in PRESSURE:
            if state.measuring_at is None:
                state.measuring_at, state.measured_fine, state.measured_bad = seen.now, 0, 0
            state.measured_bad += seen.count
            state.refusal = seen.text or str(seen.signal)
        elif seen.signal in FINE:
            if state.measuring_at is not None:
                state.measured_fine += seen.count
            if state.is_recovering:
                _back_to_work(state, seen)
        if state.measuring_at is not None:
            self._measure(state, seen)

    def window(self, state: State, now: float) -> None:
        if state.suspended_until_at is not None or not state.attempts:
            return
        if state.is_recovering:
            return
        if state.bad > 0.01 * state.attempts:
            # Too little to be measured in twenty replies, steady all the same: a level a few percent too high.
            share = state.bad / state.attempts
            settled = state.eased_at is None or (state.window_at is not None and state.eased_at <= state.window_at)
            # A probe is judged more strictly: the level below it was without refusals.
            if settled and state.bad >= 3 and (share >= self.stray or state.probe_from is not None):
                state.measuring_at = None
                self._learn_rate(state, now, state.window_rate(now), share)
                state.reason = f"{share:.0%} of a minute's attempts refused ({state.refusal}): eased"
            return
        self._forget_probes(state, now)
        mean = state.reply_s / state.replies if state.replies else 0.0
        if state.usual_reply_s and mean > self.slow * state.usual_reply_s:
            state.reason = f"replies take {mean:.1f} s, usually {state.usual_reply_s:.1f} s: not growing"
            return
        budget = state.limits.rate_per_s
        if (
            state.rate_per_s is not None
            and (budget is None or state.rate_per_s < budget)
            and state.probe_from is None
            and now >= state.next_probe_at
            and state.attempts / WINDOW_S >= 0.85 * state.rate_per_s  # a level that is not used proves nothing
        ):
            state.step = state.step or self.first_step  # a rate that was a budget's, before it was raised, has none
            state.probe_from = state.rate_per_s
            state.probe_until_at = now + max(WINDOW_S, self.hidden_s / state.step) - 1.0
            rate = state.rate_per_s * (1 + state.step)
            state.rate_per_s = rate if budget is None else min(budget, rate)
            state.reason = f"quiet: probing {state.step:.0%} above the last good rate"
        if (
            state.connections < state.limits.connections
            and now >= state.next_connection_at
            and state.most_connections >= state.connections
        ):
            state.connections += 1
            state.connection_probe = True
            state.reason = "quiet: one connection more"

    def _forget_probes(self, state: State, now: float) -> None:
        """Quiet for long enough after a probe: its level is good; the next one comes sooner and steps further."""
        if state.probe_from is not None and now >= state.probe_until_at:
            state.probe_from = None
            state.step = min(self.largest_step, 2 * state.step)
            state.probe_wait_s = max(WINDOW_S, state.probe_wait_s / 2)
            state.next_probe_at = 0.0
        if state.connection_probe:
            state.connection_probe = False
            state.connection_wait_s = max(WINDOW_S, state.connection_wait_s / 2)
            state.next_connection_at = 0.0

    def _bad_share(self, state: State, default: float) -> float:
        seen = state.measured_fine + state.measured_bad
        return state.measured_bad / seen if state.measuring_at is not None and seen >= 5 else default

    def _measure(self, state: State, seen: Observation) -> None:
        """Count on from the first refusal until the share is known well enough; then ease to what was accepted."""
        assert state.measuring_at is not None
        replies = state.measured_fine + state.measured_bad
        elapsed = seen.now - state.measuring_at
        if replies < self.enough and (elapsed < self.patience_s or replies < self.storm):
            return
        if not state.measured_fine:
            state.barren += 1
            if state.barren >= 2 or elapsed >= self.patience_s or state.is_recovering:
                self._storm(state, seen, f"{state.measured_bad} refusals in a row: {state.refusal}")
                return
        else:
            state.barren = 0
        # The first refusal began the count, and so says nothing about the share.
        share = (state.measured_bad - 1) / (replies - 1)
        if share < self.clear and replies < 3 * self.enough and elapsed < 2 * self.patience_s:
            return
        state.measuring_at = None
        if share < self.small:
            return  # `window` sees whether it is steady
        self._learn_rate(state, seen.now, state.attempt_rate(seen.now), share)
        state.reason = f"{share:.0%} of {replies} attempts refused ({state.refusal}): eased to what was accepted"

    def _learn_rate(self, state: State, now: float, attempted: float, share: float) -> None:
        accepted = max(attempted * (1 - share) * self.margin, attempted / 4, 1 / 60)
        if state.rate_per_s is not None:
            accepted = min(accepted, state.rate_per_s * self.margin)
            if state.eased_at is None or now - state.eased_at > 2 * WINDOW_S:
                state.good_rate_per_s, state.good_until_at = state.rate_per_s, now
        if state.probe_from is not None and share <= 3 * state.step:
            accepted = state.probe_from  # the probe was a little too high: what was good before is good still
        state.rate_per_s = accepted
        state.probe_from = None
        state.step = self.first_step
        state.probe_wait_s = min(
            self.last_probe_s, 2 * state.probe_wait_s if state.probe_wait_s else self.first_probe_s
        )
        state.next_probe_at = now + state.probe_wait_s
        state.eased_at = now + self.grace_s

    def _storm(self, state: State, seen: Observation, reason: str) -> None:
        """Everything is refused: pause, twice as long each time, and come back with one connection, doubling."""
        pause = min(self.last_storm_pause_s, self.first_storm_pause_s * 2.0**state.repeats)
        state.repeats = min(state.repeats + 1, 16)
        state.suspend(seen.now, pause, reason)
        if state.good_rate_per_s is not None and seen.now - state.good_until_at <= 2 * WINDOW_S:
            # What looked like a lower limit a minute ago was the beginning of a block: that says nothing of the rate.
            state.rate_per_s = state.good_rate_per_s
        state.doubles = True
        state.connections = min(1, state.limits.connections)
        state.unreachable = state.refused_run = state.barren = 0

    def _fewer_connections(self, state: State, seen: Observation, begun: float) -> None:
        if state.connections_eased_at is not None and begun <= state.connections_eased_at:
            return
        opened = seen.connections if seen.connections is not None else state.connections
        state.connections = max(1, opened if opened < state.connections else state.connections - 1)
        state.connections_eased_at = seen.now
        # Only a refused probe makes the next one wait longer; a limit that falls step by step does not.
        wait = 2 * state.connection_wait_s if state.connection_probe else state.connection_wait_s
        state.connection_wait_s = min(self.last_connection_s, max(self.first_connection_s, wait))
        state.next_connection_at = seen.now + state.connection_wait_s
        state.connection_probe = False
        state.reason = f"too many connections: {state.connections} were accepted"

    def _fewer_per_connection(self, state: State, seen: Observation) -> None:
        allowed = max(1, seen.on_connection if seen.on_connection is not None else (state.per_connection or 2) // 2)
        if state.per_connection is None or allowed < state.per_connection:
            state.per_connection = allowed
            state.reason = f"{allowed} messages accepted on a connection, no more"
