"""`after` and `within` of the reply rules: an action is due when such replies come in numbers, and not before."""

from __future__ import annotations

from engine.pace.alarms import Alarms


def due_at(alarms: Alarms, refused_every: int, answers: int, *, gap_s: float = 1.0, after: int = 20) -> list[int]:
    """At which answers the action was due, when each `refused_every`-th one is refused."""
    found = []
    for n in range(answers):
        alarms.answered("big", 1)
        if n % refused_every == 0 and alarms.refused("source", "big", "policy", after, 600.0, n * gap_s) is not None:
            found.append(n)
    return found


def test_the_twentieth_within_ten_minutes_is_due_where_they_are_a_fair_share() -> None:
    assert due_at(Alarms(), 1, 20) == [19]
    assert due_at(Alarms(), 4, 100) == [76]
    assert due_at(Alarms(), 6, 1000) == [], "one in six is a list with strict companies in it"


def test_slower_than_that_is_never_due() -> None:
    assert due_at(Alarms(), 1, 100, gap_s=32.0) == []


def test_it_is_due_again_after_as_many_more() -> None:
    assert due_at(Alarms(), 1, 60) == [19, 39, 59]


def test_rules_sources_and_providers_are_counted_apart() -> None:
    alarms = Alarms()
    for who, rule in (("a", "policy"), ("b", "policy"), ("a", "content")):
        for n in range(4):
            alarms.answered("big", 1)
            assert alarms.refused(who, "big", rule, 5, 60.0, float(n)) is None
    alarms.answered("big", 1)
    due = alarms.refused("b", "big", "policy", 5, 60.0, 4.0)
    assert due is not None
    assert str(due) == "5 such replies within 4 s, 56% of the answers"


def test_the_operator_is_told_once_an_hour() -> None:
    alarms = Alarms()
    alarms.answered("big", 1)
    assert alarms.refused("a", "big", "blocked", 1, 0.0, 0.0) is not None
    assert alarms.may_tell("a", "blocked", 0.0)
    assert not alarms.may_tell("a", "blocked", 3599.0)
    assert alarms.may_tell("a", "blocked", 3601.0)
