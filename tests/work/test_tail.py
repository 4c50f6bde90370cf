"""The last batches: who is slow leaves them to who is fast, and somebody always takes them."""

from __future__ import annotations

from engine.control.store import Incarnation, Life
from engine.work.tail import Peer, is_worth_taking, peers_of

FAST, SLOW = Peer(100.0, 50.0), Peer(10.0, 10.0)


def test_a_slow_machine_leaves_what_others_have_done_before_it_has() -> None:
    assert is_worth_taking(200, 0, 10.0, 20_000, [FAST]), "20 s for us, 200 s for what is left"
    assert not is_worth_taking(200, 0, 10.0, 600, [FAST])


def test_the_fastest_takes_the_last_one_once_its_hands_are_empty() -> None:
    assert not is_worth_taking(200, 800, 50.0, 200, [FAST])
    assert is_worth_taking(200, 0, 50.0, 200, [FAST]), "equals do not wait for each other"
    assert is_worth_taking(200, 0, 50.0, 200, [SLOW])


def test_without_others_or_without_knowing_the_own_speed_it_is_taken() -> None:
    assert is_worth_taking(200, 0, 1.0, 200, [])
    assert is_worth_taking(200, 0, 0.0, 200, [FAST])


def test_only_machines_that_send_now_count() -> None:
    def machine(id_: str, state: Life = Life.ALIVE, renewed: int = 100, **counters: object) -> Incarnation:
        return Incarnation(id=id_, sender=id_, host_id="h", boot_id="b", pid=1, partition=0, started_at_us=1,
                           renewed_at_us=renewed, lease_us=50, state=state, counters=counters)  # fmt: skip

    found = peers_of(
        [
            machine("me", per_second=9.0),
            machine("ended", Life.ENDED, per_second=9.0),
            machine("silent", renewed=10, per_second=9.0),
            machine("still", per_second=0.0),
            machine("new"),
            machine("other", per_second=90.0, processes=3),
        ],
        "me",
        120,
    )
    assert found == [Peer(90.0, 30.0)]
