"""What one machine learns about the signing domain or the campaign, every machine obeys with its next renewal."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from engine.clock import SystemClock
from engine.control.sqlite import SqliteStore
from engine.control.store import Incarnation, Override
from engine.pace.throttle import Key, Kind, Limits, Observation, Signal, Throttle
from engine.work.shared import Shared
from engine.work.wide import WideWords

DOMAIN = Key("example.org", "big", Kind.SIGNING_DOMAIN)
HOUR_US = 3_600_000_000


def throttle() -> Throttle:
    return Throttle(lambda key: Limits(connections=10 if key.kind is Kind.SOURCE else 10_000))


def pause(learnt: Throttle, now: float, pause_s: float = 600.0) -> None:
    seen = Observation(Signal.RATE, now, started_at=now, pause_s=pause_s, then_connections=1, text="your domain")
    learnt.observe(DOMAIN, seen)


def words(news: dict[str, bytes], who: str) -> list[Override]:
    return [Override(scope, who, value.decode(), who, 1, None) for scope, value in news.items()]


def test_a_pause_is_told_once_obeyed_and_not_told_back() -> None:
    here, there = throttle(), throttle()
    ours, theirs = WideWords(here), WideWords(there)
    pause(here, 50.0)
    # Monotonic clocks begin anywhere; the store's time is one.
    news = ours.news(50.0, 8 * HOUR_US)
    assert ours.news(51.0, 8 * HOUR_US + 1_000_000) == {}
    theirs.hear(words(news, "a"), 9000.0, 8 * HOUR_US + 2_000_000)
    told = there.ceiling(DOMAIN)
    assert told.connections == 0
    assert told.suspended_until == pytest.approx(9598.0)
    assert "your domain" in told.reason
    assert theirs.news(9001.0, 8 * HOUR_US + 3_000_000) == {}


def test_a_pause_that_is_over_and_words_of_another_version_do_nothing() -> None:
    here, there = throttle(), throttle()
    pause(here, 50.0)
    news = WideWords(here).news(50.0, HOUR_US)
    theirs = WideWords(there)
    theirs.hear(words(news, "a"), 10.0, 2 * HOUR_US)
    theirs.hear([Override("campaign:big", "a", "5", "ann", 1, None)], 10.0, HOUR_US)
    assert there.ceiling(DOMAIN).suspended_until is None


class Shop(SqliteStore):
    """A store that has the time, as a shared one."""

    def now_us(self) -> int:
        return SystemClock().wall_us() + HOUR_US


def shared(store: Shop, name: str) -> Shared:
    me = Incarnation(id=name, sender=name, host_id="h", boot_id="b", pid=1, partition=0, started_at_us=1,
                     renewed_at_us=1, lease_us=60_000_000)  # fmt: skip
    store.register(me)
    nothing = cast(Any, None)
    return Shared(nothing, nothing, nothing, cast(Any, store), cast(Any, store), me, nothing, SystemClock(),
                  steal=False, resend_doubt=False)  # fmt: skip


class Loop:
    """Calls at once."""

    def call_soon_threadsafe(self, call: Any, *args: Any) -> None:
        call(*args)


def test_words_go_through_the_store_beside_the_operators(tmp_path: Path) -> None:
    store = Shop(tmp_path / "control.sqlite")
    # An operator's word is no machine's: it must neither be read as one nor end the renewing of leases.
    store.set_override(Override("provider:big", "connections", "5", "ann", 0, None))
    first, second = shared(store, "a"), shared(store, "b")
    heard: list[Override] = []
    second.heard = heard.extend
    first._loop = second._loop = cast(Any, Loop())
    learnt = throttle()
    pause(learnt, 50.0)
    first._attend_once(1.0, set())
    first.tell_wide(WideWords(learnt).news(50.0, first.store_us()))
    first._attend_once(2.5, set())
    second._attend_once(2.5, set())
    second._attend_once(5.0, set())
    assert [word.scope for word in heard] == ["signing_domain:big"]
    obeying = throttle()
    WideWords(obeying).hear(heard, 7.0, second.store_us())
    until = obeying.ceiling(DOMAIN).suspended_until
    assert until is not None
    assert 595 < until - 7.0 < 605, "the store's clock, an hour from ours, is the same for both"
    store.close()
