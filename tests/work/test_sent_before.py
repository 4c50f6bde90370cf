"""After a restart the windows of every rate know what went out before it: read from the logs, on a clock of ours."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest

from engine.config import CampaignTable, DeliveryTable, MessageTable, Settings
from engine.pace.budgets import BudgetFile, Budgets, Section
from engine.pace.slots import Allow, Grant
from engine.work import pacing
from engine.work.logbook import Logbook
from engine.work.pacing import Pacing
from engine.work.sent_before import sent_before
from formats.sendlog import Header, Verdict

MINUTE, HOUR, DAY = 60, 3600, 86_400


@pytest.fixture(autouse=True)
def no_saving(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every five seconds of a virtual day would be a sync of the disk."""
    monkeypatch.setattr(pacing, "SAVE_EVERY_S", math.inf)
    monkeypatch.setattr(pacing, "SAVE_WARMUP_EVERY_S", math.inf)


class VirtualClock:
    """Both times, moved by hand."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def wall_us(self) -> int:
        return 1_800_000_000_000_000 + round(self.now * 1e6)


def log_of(folder: Path, clock: VirtualClock, name: str, host: str = "here") -> Logbook:
    header = Header(
        log_id=name, campaign_id="c", plan_fingerprint="p", incarnation="i", sender="s", host_id=host, boot_id="b",
        worker=0, started_at_us=clock.wall_us(),
    )  # fmt: skip
    return Logbook(folder / f"{name}.arrows", header, clock, durability="process")


def send(log: Logbook, clock: VirtualClock, messages: int, verdict: Verdict | None = Verdict.ACCEPTED) -> None:
    """So many from source "first" to provider "big", answered at once; None: the answer was never written."""
    provider, source = log.provider("big"), log.source("first")
    for row in range(messages):
        serial = log.intent(row, 1, provider, source)
        if verdict is not None:
            log.result(serial, row, 1, verdict, provider=provider, source=source)
    log.write()
    os.utime(log.path, (clock.wall_us() / 1e6, clock.wall_us() / 1e6))


def settings(**delivery: object) -> Settings:
    return Settings(
        campaign=CampaignTable(id="c"),
        message=MessageTable(from_address="a@example.org", subject="s", text="t"),
        delivery=DeliveryTable(mode="direct", **delivery),  # type: ignore[arg-type]  # names of its own fields
    )


def pacing_of(clock: VirtualClock, folder: Path, **limits: int) -> Pacing:
    budgets = Budgets(BudgetFile(default=Section(connections=2, messages_per_connection=100, **limits)), BudgetFile())
    return Pacing(settings(), budgets, folder / "throttle-0.json", clock, lambda *_, **__: None, lambda *_: None)


def sent_within(paced: Pacing, clock: VirtualClock, seconds: float) -> int:
    """Messages that one worker with endless rows is allowed and sends in so many seconds."""
    key, sent, until = ("first", "big"), 0, clock.now + seconds
    while clock.now < until:
        paced.demand(0, {key: 1000}, clock.now)
        for decision in paced.tick(clock.now):
            if isinstance(decision, Allow):
                sent += decision.messages
                paced.spent(0, key, decision.messages, clock.now, clock.now)
        clock.now += max(0.05, seconds / 2000)
    return sent


def test_what_left_is_counted_and_what_did_not_is_not(tmp_path: Path) -> None:
    clock = VirtualClock()
    log = log_of(tmp_path, clock, "a")
    send(log, clock, 3)
    clock.now += 10
    send(log, clock, 2, Verdict.LOST)  # the server may have counted it
    send(log, clock, 4, Verdict.UNTOUCHED)
    send(log, clock, 5, None)
    elsewhere = log_of(tmp_path, clock, "b", host="another machine")
    send(elsewhere, clock, 7)
    (tmp_path / "junk.arrows").write_bytes(b"no log")
    (tmp_path / "empty.arrows").touch()
    found = sent_before(sorted(tmp_path.glob("*.arrows")), 0, "here")
    at = clock.wall_us()
    assert found == {("first", "big"): [(at - 10_000_000, 3), (at, 2), (at + 1_000_000, 5)]}
    assert sent_before([tmp_path / "a.arrows"], at - 5_000_000, "here")["first", "big"][0][1] == 2


def test_two_logs_and_many_batches_add_up(tmp_path: Path) -> None:
    clock = VirtualClock()
    for name in ("a", "b"):
        log = log_of(tmp_path, clock, name)
        for _ in range(5):
            send(log, clock, 10)
            clock.now += 1
    found = sent_before(sorted(tmp_path.glob("*.arrows")), clock.wall_us() - 7_000_000, "here")
    assert sum(messages for _, messages in found["first", "big"]) == 70


@pytest.mark.parametrize(
    ("limit", "window_s"), [("messages_per_minute", MINUTE), ("messages_per_hour", HOUR), ("messages_per_day", DAY)]
)
def test_a_restart_gives_no_window_a_second_time(tmp_path: Path, limit: str, window_s: int) -> None:
    clock = VirtualClock()
    log = log_of(tmp_path, clock, "a")
    clock.now += window_s  # long ago: in no window
    send(log, clock, 90)
    clock.now += window_s / 4
    again = pacing_of(clock, tmp_path, **{limit: 100})
    again.sent_before(sent_before([tmp_path / "a.arrows"], clock.wall_us() - DAY * 1_000_000, "here"))
    assert sent_within(again, clock, window_s * 0.74) == 10
    forgetful = pacing_of(clock, tmp_path, **{limit: 100})
    assert sent_within(forgetful, clock, window_s * 0.74) > 60, "without the logs it would have been too many"


def test_a_budget_over_all_sources_counts_all_sources(tmp_path: Path) -> None:
    clock = VirtualClock()
    budgets = Budgets(
        BudgetFile(default=Section(connections=2, messages_per_connection=9, messages_per_hour=50, scope="campaign")),
        BudgetFile(),
    )
    paced = Pacing(settings(), budgets, tmp_path / "throttle-0.json", clock, lambda *_, **__: None, lambda *_: None)
    paced.sent_before({("first", "big"): [(clock.wall_us(), 20)], ("second", "big"): [(clock.wall_us(), 30)]})
    paced.demand(0, {("*", "big"): 10}, clock.now)
    assert not any(isinstance(decision, Allow) for decision in paced.tick(clock.now))


def test_a_relay_s_rate_is_remembered_as_well(tmp_path: Path) -> None:
    clock = VirtualClock()
    relay = settings(messages_per_second=0.1)
    paced = Pacing(relay, None, tmp_path / "throttle-0.json", clock, lambda *_, **__: None, lambda *_: None)
    assert paced.is_rated
    paced.sent_before({("default", "relay:25"): [(clock.wall_us(), 1)]})
    paced.demand(0, {("", "relay:25"): 5}, clock.now)
    assert paced.ledger.decide(clock.now) == []
    clock.now += 11
    assert [type(decision) for decision in paced.ledger.decide(clock.now)] == [Grant, Allow]


def test_connections_opened_before_a_restart_count_in_their_minute(tmp_path: Path) -> None:
    clock, key = VirtualClock(), ("first", "big")
    first = pacing_of(clock, tmp_path, connections_per_minute=4)
    opened = 0
    for _ in range(600):  # half a minute; what is opened closes at once
        first.demand(0, {key: 1000}, clock.now)
        for decision in first.tick(clock.now):
            assert isinstance(decision, Grant)
            opened += decision.connections
            first.ledger.closed(0, key, decision.connections, clock.now)
        clock.now += 0.05
    first.save()
    assert 1 <= opened <= 4
    again = pacing_of(clock, tmp_path, connections_per_minute=4)
    more = 0
    for _ in range(500):  # within the same minute
        again.demand(0, {key: 1000}, clock.now)
        for decision in again.tick(clock.now):
            assert isinstance(decision, Grant)
            more += decision.connections
            again.ledger.closed(0, key, decision.connections, clock.now)
        clock.now += 0.05
    assert opened + more <= 4
