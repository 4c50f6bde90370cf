"""A warm-up as `engine send` keeps it, day after day, counted by the receivers. A day lasts seconds here, as in a
rehearsal; every run of `send` is a process of its own, so that what it knows of the days before came from the folder.
"""

from __future__ import annotations

import contextlib
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from engine.campaign import Campaign
from engine.rehearse.counting import fullest_window
from engine.rehearse.internet import InternetSettings, RunningInternet, run_internet, willing, zone_of
from engine.rehearse.models import Model, Outage, World
from engine.rehearse.record import read_record
from engine.route.answers import Kept
from tests.campaign.conftest import Operator

ADDRESSES = {"bigmail": "127.1.0.1", "midmail": "127.1.0.2"}
YOUNG, OLD = "127.0.0.2", "127.0.0.3"
BLOCKED = "421 4.7.1 Service unavailable; Client host [127.0.0.2] blocked using zen.spamhaus.org"


class WarmUp:
    """An operator whose sources are young, and whose days are short."""

    def __init__(self, operator: Operator, net: RunningInternet, records: Path) -> None:
        self.operator, self.net, self.records = operator, net, records
        self.days: list[dict[str, str]] = []  # `warmup_day_over`, as told

    def plan(self, addresses: list[str], sources: str, *, day_s: float, schedule: str = "sendgrid-manual") -> dict:  # type: ignore[type-arg]  # JSON
        """`engine plan --warmup`, and then its days made short."""
        operator = self.operator
        operator.begin(
            addresses,
            plan=False,
            mode="direct",
            nameservers=[self.net.nameserver],
            smtp_port=self.net.port,
            allow_private_hosts=True,
        )
        (operator.campaign / "budgets.toml").write_text(sources)
        answers = [
            Kept(domain=f"{name}.test", kind="route", at_us=1, provider=f"{name}.test", pool=name) for name in ADDRESSES
        ]
        lines = b"".join(msgspec.json.encode(answer) + b"\n" for answer in answers)
        (operator.campaign / "domains.jsonl").write_bytes(lines)
        told = msgspec.json.decode(operator.run("plan", "list.parquet", "--warmup", schedule, "--json").stdout)
        made = Campaign(operator.campaign).plan()
        assert made.warmup is not None
        warmup = msgspec.structs.replace(made.warmup, day_s=day_s)
        file = operator.campaign / "plan.json"
        file.write_bytes(msgspec.json.encode(msgspec.structs.replace(made, warmup=warmup)))
        self.day_s = day_s
        return told  # type: ignore[no-any-return]  # JSON

    def send(self, *, code: int | None = None) -> int:
        """One run, to its end; returns its exit code."""
        said = self.operator.run("send", "--yes", "--processes", "2", code=code, within_s=200)
        self.heard(said.stderr)
        return said.returncode

    def heard(self, said: str) -> None:
        for line in said.splitlines():
            if " warmup_day_over " in line:
                self.days.append(dict(re.findall(r'(\w+)=("[^"]*"|\S+)', line)))

    def until_the_turn(self) -> None:
        """Sleep until the first stage that has begun is over."""
        stages = msgspec.json.decode((self.operator.campaign / "run" / "warmup-0.json").read_bytes())
        began = min(stage["began_us"] for stage in stages.values() if stage["began_us"])
        time.sleep(max(0.0, began / 1e6 + self.day_s - time.time()) + 0.1)

    def received(self, provider: str) -> tuple[list[int], np.ndarray]:  # type: ignore[type-arg]  # of int64
        """Rows in the order in which they came, by the number in their address, and when (microseconds)."""
        table = read_record(self.records / f"{provider}.tsv")
        rows = [int(address[1 : address.index("@")]) for address in table["recipient"].to_pylist()]
        return rows, table["time_us"].to_numpy()


@pytest.fixture
def warm_up(tmp_path: Path) -> Iterator[Callable[..., WarmUp]]:
    """Makes one, with these models in place of willing providers."""
    with contextlib.ExitStack() as stack:

        def make(*models: Model) -> WarmUp:
            hosts = {f"mx.{name}.test": address for name, address in ADDRESSES.items()}
            zone = zone_of(hosts, {f"{name}.test": f"mx.{name}.test" for name in ADDRESSES})
            played = {model.name: model for model in models}
            world = World("two providers", tuple(played.get(name, willing(name)) for name in ADDRESSES))
            settings = InternetSettings(world=world, zone=zone, addresses=ADDRESSES, records=tmp_path / "records")
            net = stack.enter_context(run_internet(settings))
            return WarmUp(Operator(tmp_path, None), net, tmp_path / "records")

        yield make


def source(name: str, bind: str, day: int | None, weight: int = 1) -> str:
    young = "" if day is None else f"warmup_day = {day}\n"
    return f'[source.{name}]\nbind = "{bind}"\nweight = {weight}\n{young}'


@pytest.mark.long
def test_days_and_hours_are_kept_from_run_to_run_and_the_plan_said_so(warm_up: Callable[..., WarmUp]) -> None:
    w = warm_up()
    rows = [f"r{n}@{'bigmail' if n % 8 < 5 else 'midmail'}.test" for n in range(160)]
    told = w.plan(rows, source("young", YOUNG, 1), day_s=20.0)
    # 50, then 100 a day: a hundred rows at bigmail are 31 + 62 + 7, sixty at midmail 18 + 37 + 5.
    assert told["forecast"]["rows_per_day"] == [49, 99, 12]
    planned = {one["provider"]: one for one in told["forecast"]["capacity"]["providers"]}
    assert {name: one["days"] for name, one in planned.items()} == {"bigmail.test": 3, "midmail.test": 3}
    assert {name: one["today"] for name, one in planned.items()} == {"bigmail.test": 31, "midmail.test": 18}

    codes = [w.send()]
    while codes[-1] == 75 and len(codes) < 6:
        w.until_the_turn()
        codes.append(w.send())
    assert codes == [75, 75, 0]

    assert w.operator.outcomes() == {"accepted": 160}
    for provider, days, hourly in (("bigmail", (31, 62, 7), 4), ("midmail", (18, 37, 5), 2)):
        order, times = w.received(provider)
        assert order == sorted(order) or all(
            max(order[at : at + many]) < min(order[at + many :], default=999)
            for at, many in ((0, days[0]), (days[0], days[1]))
        ), "who stands first in the list, the engaged, goes on the first day"
        second, third = days[0], days[0] + days[1]
        day_us = w.day_s * 1e6
        assert times[second] - times[0] >= day_us - 2e5, "no more than the first day's cap within it"
        assert times[third] - times[second] >= day_us - 2e5
        assert times[second - 1] - times[0] >= 0.4 * day_us, "spread over half a day, not burst"
        # An hour lasts 0.83 s; half of one holds what an hour may, however late this machine was.
        assert fullest_window(times[:second], w.day_s / 48) <= hourly
        # When the operator came back is the operator's part; what is left is the plan's, within a tenth.
        late_us = times[third] - times[0] - 2 * day_us
        reached_s = (times[-1] - times[0] - late_us) / day_us * 86_400
        assert reached_s == pytest.approx(planned[f"{provider}.test"]["eta_s"], rel=0.1)
    assert [(day["provider"], day["day"], day["next_day"]) for day in w.days] == [
        ("bigmail.test", "1", "2"),
        ("midmail.test", "1", "2"),
        ("bigmail.test", "2", "3"),
        ("midmail.test", "2", "3"),
    ]


@pytest.mark.long
def test_a_day_that_was_not_well_received_is_repeated_and_a_warm_source_waits_for_nobody(
    warm_up: Callable[..., WarmUp],
) -> None:
    w = warm_up(msgspec.structs.replace(willing("bigmail"), unknown_share=0.3))
    rows = [f"r{n}@bigmail.test" for n in range(160)]
    w.plan(rows, source("young", YOUNG, 1) + source("old", OLD, None), day_s=10.0)
    assert w.send() == 75
    accepted = w.net.reports()["bigmail"].sources
    old = accepted[OLD].accepted
    assert accepted[YOUNG].accepted < 45 < old, "of fifty a third are nobody; the old one's are through"
    w.until_the_turn()
    w.send()
    (day,) = w.days
    assert (day["source"], day["sent"], day["day"], day["next_day"]) == ("young", "50", "1", "1")
    assert "less than nine tenths" in day["reason"]
    assert w.net.reports()["bigmail"].sources[OLD].accepted == old


@pytest.mark.long
def test_a_reputation_block_goes_a_day_back_and_a_drained_run_forgets_nothing(warm_up: Callable[..., WarmUp]) -> None:
    w = warm_up(msgspec.structs.replace(willing("bigmail"), outages=(Outage("block", 14.0, 1e9),), block_reply=BLOCKED))
    rows = [f"r{n}@{name}.test" for n in range(100) for name in ADDRESSES]
    w.plan(rows, source("young", YOUNG, 2), day_s=30.0)
    process = w.operator.start("send", "--processes", "2", "--yes")
    deadline = time.monotonic() + 60
    while not w.net.reports()["bigmail"].answers.get("rate"):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    time.sleep(0.5)
    process.send_signal(signal.SIGTERM)
    w.heard(process.communicate(timeout=60)[1])
    w.until_the_turn()
    process = w.operator.start("send", "--processes", "2", "--yes")
    assert process.stderr is not None
    for line in process.stderr:
        w.heard(line)
        if len(w.days) == 2:
            break
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    turned = {day["provider"]: (day["day"], day["next_day"], day["reason"]) for day in w.days}
    assert turned["bigmail.test"][:2] == ("2", "1")
    assert "blocked for reputation" in turned["bigmail.test"][2]
    # The other provider is none the worse for it: its day was cut short by the operator, and is held.
    assert turned["midmail.test"][:2] in (("2", "2"), ("2", "3"))
