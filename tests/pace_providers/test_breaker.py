"""The breaker: a provider gone mad is not believed, a bad list is."""

from __future__ import annotations

from engine.pace.breaker import Breaker, Released, Tripped


def fed(breaker: Breaker, *, minutes: int, accepted: int, unknown: int, begin: float = 0.0) -> list[object]:
    said: list[object] = []
    for minute in range(minutes):
        at = begin + minute * 60
        said.append(breaker.answered("google", accepted=accepted, unknown=unknown, now=at))
    return [word for word in said if word is not None]


def test_a_usual_share_never_trips() -> None:
    breaker = Breaker()
    assert fed(breaker, minutes=600, accepted=980, unknown=20) == []
    assert not breaker.is_tripped("google")


def test_a_provider_that_calls_everybody_unknown_trips_within_minutes() -> None:
    breaker = Breaker()
    fed(breaker, minutes=120, accepted=980, unknown=20)
    said = fed(breaker, minutes=5, accepted=100, unknown=900, begin=7200.0)
    assert len(said) == 1
    tripped = said[0]
    assert isinstance(tripped, Tripped)
    assert tripped.since <= 7200.0
    assert breaker.is_tripped("google")
    assert breaker.tripped() == ["google"]
    assert not breaker.is_tripped("yahoo")


def test_it_trips_at_the_start_of_a_campaign_too() -> None:
    breaker = Breaker()
    said = fed(breaker, minutes=1, accepted=0, unknown=200)
    assert len(said) == 1


def test_three_of_four_are_no_jump() -> None:
    assert fed(Breaker(), minutes=1, accepted=1, unknown=3) == []


def test_a_list_that_is_bad_throughout_does_not_trip_for_ever() -> None:
    breaker = Breaker()
    assert fed(breaker, minutes=300, accepted=90, unknown=9) == []


def test_probes_release() -> None:
    breaker = Breaker()
    fed(breaker, minutes=1, accepted=0, unknown=200)
    assert not breaker.may_probe("google", 300.0)
    assert breaker.may_probe("google", 601.0)
    assert not breaker.may_probe("google", 602.0)  # one at a time
    assert breaker.probed("google", accepted=False, now=603.0) is None
    assert breaker.may_probe("google", 1300.0)
    assert breaker.probed("google", accepted=True, now=1301.0) is None
    assert breaker.may_probe("google", 1301.0)
    assert breaker.probed("google", accepted=True, now=1302.0) is None
    assert breaker.may_probe("google", 1302.0)
    assert breaker.probed("google", accepted=True, now=1303.0) == Released("google", by_hand=False)
    assert not breaker.is_tripped("google")
    assert not breaker.may_probe("google", 9999.0)


def test_other_answers_while_it_is_tripped_prove_nothing() -> None:
    breaker = Breaker()
    fed(breaker, minutes=1, accepted=0, unknown=200)
    assert fed(breaker, minutes=10, accepted=1000, unknown=0, begin=60.0) == []
    assert breaker.is_tripped("google")


def test_released_by_hand() -> None:
    breaker = Breaker()
    assert breaker.release("google", 0.0) is None
    fed(breaker, minutes=1, accepted=0, unknown=200)
    assert breaker.release("google", 10.0) == Released("google", by_hand=True)
    assert not breaker.is_tripped("google")
    assert breaker.probed("google", accepted=True, now=11.0) is None
