"""Each signal turns its own dial, once per cohort, and what a provider documents wins."""

from __future__ import annotations

import pytest

from engine.pace.easing import Adaptive, Classic
from engine.pace.throttle import EventKind, Key, Kind, Limits, Observation, Signal, Throttle, ThrottleEvent

KEY = Key("192.0.2.1", "example")
BUDGET = Limits(connections=16, rate_per_s=None, per_connection=100)


def throttle(limits: Limits = BUDGET, easing: Adaptive | Classic | None = None) -> Throttle:
    return Throttle(lambda key: limits, easing)


def minutes(
    subject: Throttle,
    start: float,
    count: int,
    *,
    per_s: float = 10.0,
    limit_per_s: float = 1e9,
    refused: float = 0.0,
    reply_s: float = 0.2,
) -> list[ThrottleEvent]:
    """Traffic that obeys the ceiling, all its connections in use, at a provider that takes `limit_per_s` and refuses
    the rest, and a share of all besides."""
    events: list[ThrottleEvent] = []
    owed = due = 0.0
    for second in range(count * 60):
        now = start + second
        ceiling = subject.ceiling(KEY)
        due += min(per_s, ceiling.rate_per_s or per_s) if ceiling.connections else 0.0
        attempts, due = int(due), due - int(due)
        for n in range(attempts):
            owed += max(refused, 1 - limit_per_s / attempts)
            signal = Signal.RATE if owed >= 1 else Signal.ACCEPTED
            owed -= owed >= 1
            at = now + n / attempts
            used = subject.ceiling(KEY).connections
            subject.observe(KEY, Observation(signal, at, started_at=at, reply_s=reply_s, connections=used))
        events += subject.tick(now + 1)
    return events


def test_nothing_happens_where_everything_is_accepted() -> None:
    subject = throttle()
    assert minutes(subject, 0, 5) == []
    assert subject.ceiling(KEY).connections == 16
    assert subject.ceiling(KEY).reason == "as budgeted"


def test_the_rate_becomes_what_was_accepted() -> None:
    subject = throttle()
    minutes(subject, 0, 1, per_s=20)
    events = minutes(subject, 60, 1, per_s=20, limit_per_s=10)
    assert [event.kind for event in events][:1] == [EventKind.EASED]
    rate = events[0].after.rate_per_s
    assert rate is not None
    assert 8 <= rate <= 11, "half of twenty a second were accepted"
    assert events[0].after.connections == 16, "a rate limit takes no connections"
    assert events[0].at - 60 < 5, "within some twenty replies"


@pytest.mark.parametrize("idle_s", [17, 600, 86_400])
def test_time_in_which_nothing_was_tried_is_no_part_of_the_rate(idle_s: int) -> None:
    subject = throttle()
    minutes(subject, 0, 2, per_s=20)
    events = minutes(subject, 120 + idle_s, 1, per_s=20, refused=0.25)
    rate = events[0].after.rate_per_s
    assert rate is not None
    assert 7 <= rate <= 16, "a quarter of twenty a second was refused; a pause, a restart, a night are no slow traffic"


def test_a_slow_rate_is_not_taken_for_pauses() -> None:
    subject = throttle()
    minutes(subject, 0, 10, per_s=1 / 20)
    events = minutes(subject, 600, 60, per_s=1 / 20, limit_per_s=0.7)
    rates = [event.after.rate_per_s for event in events if event.after.rate_per_s]
    assert rates
    assert max(rates) <= 1 / 20


def test_a_rate_that_was_a_budget_s_is_probed_when_the_budget_is_raised() -> None:
    budget = [Limits(connections=4, rate_per_s=5.0, per_connection=100)]
    subject = Throttle(lambda key: budget[0], None)
    minutes(subject, 0, 1, per_s=5)
    subject.from_dict(subject.to_dict(60.0), 60.0, 0.0)
    (state,) = subject._states.values()
    state.rate_per_s = 5.0
    budget[0] = Limits(connections=4, rate_per_s=400.0, per_connection=100)
    state.limits = budget[0]
    minutes(subject, 60, 3, per_s=5)
    rate = subject.ceiling(KEY).rate_per_s
    assert rate is None or rate > 5


def test_a_stray_refusal_changes_nothing() -> None:
    subject = throttle()
    assert minutes(subject, 0, 5, refused=0.01) == []


def test_one_cohort_eases_once() -> None:
    subject = throttle()
    minutes(subject, 0, 1, per_s=20)
    for n in range(400):  # all begun before the first answer came
        subject.observe(KEY, Observation(Signal.RATE if n % 2 else Signal.ACCEPTED, 61 + n / 1000, started_at=60.5))
    assert len(subject.tick(62)) == 1


def test_probes_come_rarely_and_go_straight_back_when_refused() -> None:
    subject = throttle()
    minutes(subject, 0, 1, per_s=40)
    events = minutes(subject, 60, 90, per_s=40, limit_per_s=19)
    eased = [event for event in events if event.kind is EventKind.EASED]
    probes = [event for event in events if event.kind is EventKind.GREW]
    assert 3 <= len(probes) <= 12, "rarely, once the limit is known"
    assert all(event.after.rate_per_s <= 22.5 for event in probes if event.after.rate_per_s)
    assert all(event.after.rate_per_s >= 18 for event in eased[1:] if event.after.rate_per_s), "straight back"
    back = [event for event in eased if event.before.rate_per_s == probes[-1].after.rate_per_s]
    assert not back or back[0].after.rate_per_s == probes[-1].before.rate_per_s


def test_a_limit_that_rises_is_found_and_followed() -> None:
    subject = throttle()
    minutes(subject, 0, 1, per_s=40)
    minutes(subject, 60, 60, per_s=40, limit_per_s=10)
    minutes(subject, 3660, 40, per_s=40, limit_per_s=30)
    rate = subject.ceiling(KEY).rate_per_s
    assert rate is not None
    assert 27 <= rate <= 33


def test_too_many_connections_takes_connections_only() -> None:
    subject = throttle()
    subject.observe(KEY, Observation(Signal.TOO_MANY_CONNECTIONS, 1.0, connections=5))
    subject.observe(KEY, Observation(Signal.TOO_MANY_CONNECTIONS, 1.1, started_at=0.9, connections=5))
    assert subject.ceiling(KEY).connections == 5
    assert subject.ceiling(KEY).rate_per_s is None
    assert len(subject.tick(2.0)) == 1
    grown = minutes(subject, 2, 6)
    assert [event.after.connections for event in grown] == [6, 7], "one more after five minutes, then sooner"
    assert grown[0].at >= 301


def test_too_many_per_connection_sets_that_dial_only() -> None:
    subject = throttle()
    subject.observe(KEY, Observation(Signal.TOO_MANY_PER_CONNECTION, 1.0, on_connection=20))
    ceiling = subject.ceiling(KEY)
    assert (ceiling.connections, ceiling.rate_per_s, ceiling.per_connection) == (16, None, 20)


def test_greylisting_and_bounces_are_no_pressure() -> None:
    subject = throttle()
    for n in range(1000):
        signal = (Signal.GREYLISTED, Signal.BOUNCED, Signal.ACCEPTED)[n % 3]
        subject.observe(KEY, Observation(signal, n / 5))
        assert subject.tick(n / 5) == []


def test_documented_recovery_ten_minutes_then_one_connection_then_one_more_at_a_time() -> None:
    subject = throttle()
    minutes(subject, 0, 1)
    told = Observation(Signal.RATE, 61.0, pause_s=600.0, then_connections=1, text="421 4.7.28")
    subject.observe(KEY, told)
    suspended = subject.tick(62)[0]
    assert suspended.kind is EventKind.SUSPENDED
    assert "4.7.28" in suspended.reason
    assert subject.ceiling(KEY).connections == 0
    assert subject.tick(660.9) == []
    assert subject.tick(661)[0].kind is EventKind.RESUMED
    assert subject.ceiling(KEY).connections == 1
    events = minutes(subject, 662, 1)
    counts = [event.after.connections for event in events]
    assert counts == list(range(2, 2 + len(counts)))
    assert len(counts) >= 5
    # Refused again on the way back: ten minutes again, then one again.
    subject.observe(KEY, Observation(Signal.RATE, 723.0, pause_s=600.0, then_connections=1))
    assert subject.ceiling(KEY).suspended_until == 1323.0
    subject.tick(1323.0)
    assert subject.ceiling(KEY).connections == 1


def test_a_storm_pauses_and_comes_back_by_doubling() -> None:
    subject = throttle()
    minutes(subject, 0, 1)
    for n in range(12):
        subject.observe(KEY, Observation(Signal.BUSY, 61 + n, text="421 try later"))
    assert subject.ceiling(KEY).connections == 0
    until = subject.ceiling(KEY).suspended_until
    assert until is not None
    assert 121 <= until <= 132
    subject.tick(until)
    for n in range(12):
        subject.observe(KEY, Observation(Signal.BUSY, until + 1 + n))
    again = subject.ceiling(KEY).suspended_until
    assert again is not None
    assert 121 <= again - until <= 132, "twice as long"
    subject.tick(again)
    counts = [event.after.connections for event in minutes(subject, again + 1, 1)]
    assert counts == [2, 4, 8, 16]


def test_a_provider_that_accepts_and_then_refuses_everything_for_good_is_paused() -> None:
    subject = throttle()
    minutes(subject, 0, 2)
    for n in range(100):
        subject.observe(KEY, Observation(Signal.REFUSED, 120.5 + n / 2))
    events = subject.tick(181)
    assert events[0].kind is EventKind.SUSPENDED
    assert "refused for good" in events[0].reason
    assert events[0].at < 131, "twenty recipients, not a thousand"


def test_slow_replies_stop_growth() -> None:
    subject = throttle()
    minutes(subject, 0, 1, per_s=20)
    minutes(subject, 60, 1, per_s=20, limit_per_s=10)
    assert minutes(subject, 120, 6, per_s=10, reply_s=1.5) == []
    assert "replies take" in subject.ceiling(KEY).reason


def test_reputation_suspends_for_an_hour_and_longer_each_time() -> None:
    subject = throttle()
    subject.observe(KEY, Observation(Signal.REPUTATION, 0.0, text="550 5.7.1 very low reputation"))
    assert subject.ceiling(KEY).suspended_until == 3600
    subject.tick(3600)
    subject.observe(KEY, Observation(Signal.REPUTATION, 3700.0))
    assert subject.ceiling(KEY).suspended_until == 3700 + 7200


def test_wider_signals_are_kept_as_such_and_obeyed_elsewhere() -> None:
    here, there = throttle(), throttle()
    domain = Key("example.org", "example", Kind.SIGNING_DOMAIN)
    here.observe(domain, Observation(Signal.RATE, 5.0, pause_s=600.0, then_connections=1))
    assert here.ceiling(KEY, domain).connections == 0
    assert here.ceiling(KEY).connections == 16
    for key, ceiling in here.wide().items():
        there.obey(key, ceiling, 6.0)
    assert there.ceiling(KEY, domain).suspended_until == 605.0


def test_state_survives_a_restart_with_its_clock() -> None:
    subject = throttle()
    minutes(subject, 0, 1, per_s=20)
    minutes(subject, 60, 1, per_s=20, limit_per_s=10)
    domain = Key("example.org", "example", Kind.SIGNING_DOMAIN)
    subject.observe(domain, Observation(Signal.RATE, 120.0, pause_s=600.0, then_connections=1))
    kept = subject.to_dict(now=130.0)
    again = throttle()
    again.from_dict(kept, now=5000.0, away_s=60.0)
    assert again.ceiling(KEY).rate_per_s == subject.ceiling(KEY).rate_per_s
    assert again.ceiling(domain).suspended_until == pytest.approx(720 - 130 + 5000 - 60)
    tighter = throttle(Limits(connections=3, rate_per_s=1.0))
    tighter.from_dict(kept, now=0.0)
    assert tighter.ceiling(KEY).connections == 3
    assert tighter.ceiling(KEY).rate_per_s == 1.0


def test_a_limit_of_zero_stays_zero() -> None:
    subject = throttle(Limits(connections=0))
    assert subject.ceiling(KEY).connections == 0
    subject.observe(KEY, Observation(Signal.ACCEPTED, 1.0))
    subject.observe(KEY, Observation(Signal.RATE, 2.0, pause_s=1.0, then_connections=1))
    subject.tick(100.0)
    minutes(subject, 100, 3)
    assert subject.ceiling(KEY).connections == 0


def test_a_budget_changed_while_running_holds_at_once() -> None:
    limits = [BUDGET]
    subject = Throttle(lambda key: limits[0])
    minutes(subject, 0, 1)
    limits[0] = Limits(connections=4, rate_per_s=2.0)
    subject.budgets_changed()
    assert subject.ceiling(KEY).connections == 4
    assert subject.ceiling(KEY).rate_per_s == 2.0
    limits[0] = Limits(connections=8)
    subject.budgets_changed()
    assert subject.ceiling(KEY).connections == 8


def test_a_clock_that_jumps_ahead_only_ends_pauses() -> None:
    subject = throttle()
    minutes(subject, 0, 1)
    subject.observe(KEY, Observation(Signal.RATE, 61.0, pause_s=600.0, then_connections=1))
    subject.tick(61.0)
    events = subject.tick(1e7)
    assert [event.kind for event in events] == [EventKind.RESUMED]
    assert subject.ceiling(KEY).connections == 1


def test_the_classic_rule_halves_waits_five_minutes_and_grows_by_one() -> None:
    subject = throttle(easing=Classic())
    minutes(subject, 0, 2)
    halved = minutes(subject, 120, 3, refused=0.3)
    assert [event.after.connections for event in halved] == [8], "once, then it waits"
    grown = minutes(subject, 300, 8)
    counts = [event.after.connections for event in grown]
    assert counts[0] == 9
    assert counts == list(range(9, 9 + len(counts)))
