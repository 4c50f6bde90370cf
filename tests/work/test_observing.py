"""What providers did is told in its order: refusals among many accepted ones are no run of refusals."""

from __future__ import annotations

from itertools import groupby

from hypothesis import given
from hypothesis import strategies as st

from engine.pace.throttle import Signal
from engine.work.observing import MOST_SEEN, Observer

KEYS = [("", "big"), ("", "small")]
FINE, BAD = Signal.ACCEPTED.value, Signal.UNREACHABLE.value


class StoppedClock:
    def monotonic(self) -> float:
        return 5.0

    def wall_us(self) -> int:
        return 5_000_000


@given(st.lists(st.tuples(st.sampled_from(KEYS), st.booleans()), max_size=60))
def test_each_key_s_answers_are_told_in_their_order(answers: list[tuple[tuple[str, str], bool]]) -> None:
    observer = Observer(StoppedClock())
    for key, is_fine in answers:
        if is_fine:
            observer.accepted(key, 1, 0.2)
        else:
            observer.unreachable(key, "refused")
    told = observer.take()
    for key in KEYS:
        expected = [
            (FINE if is_fine else BAD, len(list(run)) if is_fine else 1)
            for is_fine, together in groupby(fine for whose, fine in answers if whose == key)
            for run in ([together] if is_fine else [[one] for one in together])
        ]
        assert [(seen.signal, seen.count) for seen in told if seen.key == key] == expected
    assert observer.take() == []


def test_a_flood_is_told_in_part_and_what_was_accepted_in_full() -> None:
    observer = Observer(StoppedClock())
    for _ in range(5 * MOST_SEEN):
        observer.accepted(KEYS[0], 1, 0.1)
        observer.unreachable(KEYS[0], "refused")
    told = observer.take()
    assert len(told) <= MOST_SEEN + 2
    assert sum(seen.count for seen in told if seen.signal == FINE) == 5 * MOST_SEEN
