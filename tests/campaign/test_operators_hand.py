"""What an operator may say to a running `engine send`, and that it obeys: pause, slow, cancel, other budgets."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator

import pytest
from click.testing import CliRunner

from engine import cli
from tests.campaign.conftest import Operator


def tell(operator: Operator, *words: str) -> str:
    """A command of the operator's, beside the sender."""
    done = CliRunner().invoke(cli.engine, [*words, "--campaign", str(operator.campaign)])
    assert done.exit_code == 0, done.output
    return done.output


def until(holds: Callable[[], bool], what: str, within_s: float = 20) -> None:
    deadline = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def pace(operator: Operator, over_s: float = 2.0) -> float:
    """Messages a second now."""
    before, began = operator.sink.counts().messages, time.monotonic()
    time.sleep(over_s)
    return (operator.sink.counts().messages - before) / (time.monotonic() - began)


pytestmark = pytest.mark.slow
Begin = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def begin(operator: Operator) -> Iterator[Begin]:
    """Plans 20,000 rows with these settings of [delivery] and gives a sender that is under way."""
    started: list[subprocess.Popen[str]] = []

    def start(**delivery: object) -> subprocess.Popen[str]:
        operator.begin([f"p{n}@example.com" for n in range(20_000)], **delivery)
        started.append(operator.start("send"))
        operator.until_received(20)
        return started[-1]

    yield start
    for sender in started:
        stop(sender)


def stop(sender: subprocess.Popen[str]) -> str:
    """What it said until its end."""
    if sender.poll() is None:
        sender.terminate()
    if sender.stderr is None or sender.stderr.closed:
        return ""
    return sender.communicate(timeout=40)[1]


def test_pause_stops_it_and_resume_goes_on(operator: Operator, begin: Begin) -> None:
    sender = begin(messages_per_second=200)
    tell(operator, "pause")
    until(lambda: pace(operator, 0.7) == 0, "it goes on though it is paused")
    assert sender.poll() is None
    tell(operator, "resume")
    operator.until_received(operator.sink.counts().messages + 50)
    said = stop(sender)
    assert 'paused reason="paused by the operator"' in said
    assert "resumed" in said
    assert operator.received().twice == ()


def test_slow_holds_everywhere_until_it_is_lifted(operator: Operator, begin: Begin) -> None:
    sender = begin(messages_per_second=200)
    assert "share 0.1" in tell(operator, "slow", "--share", "0.1")
    until(lambda: pace(operator) < 35, "it is not slower")
    assert pace(operator) > 5
    tell(operator, "slow", "--lift")
    until(lambda: pace(operator) > 60, "it is not quicker again")
    said = stop(sender)
    assert "slowed provider=each share=0.1" in said


def test_slow_holds_at_one_provider_by_its_name_and_for_a_time(operator: Operator, begin: Begin) -> None:
    begin(connections=4, messages_per_second=200)
    relay = f"{operator.sink.host}:{operator.sink.port}"
    tell(operator, "slow", "--provider", "elsewhere", "--per-second", "1")
    tell(operator, "slow", "--provider", relay, "--per-second", "10", "--connections", "1", "--for", "12s")
    until(lambda: pace(operator) < 25, "it is not slower")
    until(lambda: operator.sink.counts().open <= 1, "it has more connections than it was told")
    until(lambda: pace(operator) > 60, "the word did not end by itself", within_s=40)


def test_a_word_is_all_or_nothing(operator: Operator) -> None:
    operator.begin(["ann@example.com"])
    for words in (["slow"], ["slow", "--lift", "--share", "0.5"], ["slow", "--share", "2"]):
        done = CliRunner().invoke(cli.engine, [*words, "--campaign", str(operator.campaign)])
        assert done.exit_code == 2, done.output


def test_cancel_ends_it_and_what_is_left_is_unsent_for_that_reason(operator: Operator, begin: Begin) -> None:
    sender = begin(messages_per_second=200)
    tell(operator, "cancel", "--yes")
    sender.wait(timeout=40)
    said = stop(sender)
    assert sender.returncode == 0, said
    assert "rows stay unsent: the campaign was cancelled" in said
    operator.run("merge-logs")
    outcomes = operator.outcomes()
    assert outcomes == {"accepted": outcomes["accepted"], "unsent": 20_000 - outcomes["accepted"]}
    reasons = {row["reason"] for row in operator.rows() if row["outcome"] == "unsent"}
    assert reasons == {"cancelled"}
    # Taken back, it goes on.
    operator.set("messages_per_second", 100_000)
    tell(operator, "resume")
    operator.run("merge-logs", code=3)


@pytest.mark.parametrize(("first", "then"), [(20, 300), (300, 20)])
def test_a_rate_in_the_settings_is_raised_and_lowered_while_it_runs(
    operator: Operator, begin: Begin, first: int, then: int
) -> None:
    sender = begin(messages_per_second=first)
    operator.set("messages_per_second", then)
    if then > first:
        until(lambda: pace(operator) > 3 * first, "it is not quicker")
    else:
        until(lambda: pace(operator) < 2 * then, "it is not slower")
    assert f"setting_changed key=delivery.messages_per_second old={first}.0 new={then}.0" in stop(sender)


def test_connections_in_the_settings_are_raised_and_lowered_while_it_runs(operator: Operator, begin: Begin) -> None:
    begin(connections=1, messages_per_second=150)
    assert operator.sink.counts().open <= 1
    operator.set("connections", 5)
    until(lambda: operator.sink.counts().open >= 3, "no more connections are made")
    operator.set("connections", 2)
    until(lambda: operator.sink.counts().open <= 2, "it keeps more than two")
    assert operator.received().twice == ()
