"""Direct delivery to a loopback internet: own DNS, providers at addresses of their own, two sources."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import dkim
import msgspec
import pytest

from engine.compose.sign import make_key
from engine.lists.suppressions import Suppressions
from engine.rehearse.counting import fullest_window, share_used
from engine.rehearse.internet import InternetSettings, RunningInternet, run_internet, willing, zone_of
from engine.rehearse.models import Model, World
from engine.rehearse.record import read_record
from engine.rehearse.sink import SinkSettings
from tests.campaign.conftest import Operator

ADDRESSES = {"bigmail": "127.1.0.1", "midmail": "127.1.0.2", "smallmail": "127.1.0.3"}
NOBODY = "127.1.0.99"  # nothing listens there
SOURCES = """
[source.first]
bind = "127.0.0.2"
greeting_name = "first.sender.test"

[source.second]
bind = "127.0.0.3"
greeting_name = "second.sender.test"
"""


class Direct:
    """An operator's direct campaign and the internet it goes to."""

    def __init__(self, operator: Operator, net: RunningInternet, records: Path) -> None:
        self.operator, self.net, self.records = operator, net, records

    def begin(self, addresses: list[str], budgets: str = SOURCES, *, plan: bool = True, **delivery: object) -> None:
        """Planned and ready to send."""
        self.operator.begin(
            addresses,
            plan=plan,
            mode="direct",
            nameservers=[self.net.nameserver],
            smtp_port=self.net.port,
            allow_private_hosts=True,
            **delivery,
        )
        self.budgets(budgets)

    def budgets(self, text: str) -> None:
        (self.operator.campaign / "budgets.toml").write_text(text, "utf-8")

    def received(self, provider: str) -> list[str]:
        """Recipients whose message a provider took."""
        found: list[str] = read_record(self.records / f"{provider}.tsv")["recipient"].to_pylist()
        return sorted(found)


@pytest.fixture
def direct(tmp_path: Path) -> Iterator[Callable[..., Direct]]:
    """Makes a `Direct` of models; the domain of each is NAME.test."""
    with contextlib.ExitStack() as stack:

        def make(
            *models: Model,
            broken: dict[str, str] | None = None,
            speed: float = 1.0,
            sink: SinkSettings = SinkSettings(),  # noqa: B008  # frozen
        ) -> Direct:
            hosts = {f"mx.{name}.test": address for name, address in ADDRESSES.items()}
            zone = zone_of(hosts, {f"{name}.test": f"mx.{name}.test" for name in ADDRESSES})
            zone.records["nullmx.test"] = {"MX": ["0 ."]}
            zone.records["gone.test"] = {"MX": ["10 mx.gone.test."]}
            zone.records["mx.gone.test"] = {"A": [NOBODY]}
            zone.broken = broken or {}
            records = tmp_path / "records"
            played = {model.name: model for model in models}
            world = World("three providers", tuple(played.get(name, willing(name)) for name in ADDRESSES))
            settings = InternetSettings(
                world=world, zone=zone, addresses=ADDRESSES, records=records, speed=speed, sink=sink
            )
            return Direct(Operator(tmp_path, None), stack.enter_context(run_internet(settings)), records)

        yield make


def mixed(each: int) -> list[str]:
    """So many addresses at each provider, in turn."""
    return [f"r{n}@{name}.test" for n in range(each) for name in ADDRESSES]


def until(holds: Callable[[], bool], within_s: float = 30) -> None:
    deadline = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def greylisting(name: str, seconds: float) -> Model:
    """A provider that wants to see each recipient twice."""
    return msgspec.structs.replace(
        willing(name), greylist_share=1.0, greylist_s=seconds, greylist_reply="450 4.2.0 Greylisted"
    )


@pytest.mark.slow
def test_a_campaign_straight_to_its_providers_from_two_sources(direct: Callable[..., Direct]) -> None:
    d = direct()
    d.begin([*mixed(40), "a@nosuchdomain.test", "b@nullmx.test"])
    d.operator.run("send", "--processes", "2", "--yes")
    assert d.operator.outcomes() == {"accepted": 120, "bounced": 2}
    for name in ADDRESSES:
        assert d.received(name) == sorted(f"r{n}@{name}.test" for n in range(40))
        sources = d.net.reports()[name].sources
        assert {source: told.accepted > 5 for source, told in sources.items()} == {"127.0.0.2": True, "127.0.0.3": True}
    refused = {str(row["last_reply"]) for row in d.operator.rows() if row["outcome"] == "bounced"}
    assert refused == {
        "5.1.2 no such domain: there is no such domain",
        "5.1.10 the domain takes no mail (null MX, RFC 7505)",
    }


@pytest.mark.long
def test_each_source_signs_with_its_own_selector(direct: Callable[..., Direct], tmp_path: Path) -> None:
    d = direct(sink=SinkSettings(folder=tmp_path / "mails"))
    sources = SOURCES.replace("[source.second]", '[source.second]\nweight = 3\ndkim_selector = "s2"')
    d.begin([f"r{n}@bigmail.test" for n in range(80)], sources, plan=False)
    tables, records = "", {}
    for selector in ("s1", "s2"):
        records[selector] = make_key(d.operator.campaign / "keys" / f"{selector}.pem", "rsa", 1024)
        tables += f'[[dkim]]\ndomain = "example.com"\nselector = "{selector}"\nkey_file = "keys/{selector}.pem"\n\n'
    file = d.operator.campaign / "campaign.toml"
    file.write_text(file.read_text("utf-8").replace("\n[keys]\n", f"\n{tables}[keys]\n", 1), "utf-8")
    d.operator.run("plan", "list.parquet")
    d.operator.run("send", "--processes", "2", "--yes")
    signed: Counter[str] = Counter()
    for mail in (tmp_path / "mails").iterdir():
        raw = mail.read_bytes()
        selector = "s2" if b"s=s2;" in raw else "s1"
        signed[selector] += 1
        assert dkim.verify(raw, dnsfunc=lambda name, timeout=5, record=records[selector]: record.encode())
    sources_seen = d.net.reports()["bigmail"].sources
    assert signed["s1"] == sources_seen["127.0.0.2"].accepted > 5
    assert signed["s2"] == sources_seen["127.0.0.3"].accepted > 40

    d.budgets(sources.replace('"s2"', '"s3"'))
    told = d.operator.run("budgets", "check", "--no-bind", code=None)
    assert "no [[dkim]] of campaign.toml has the selector 's3'" in told.stderr
    assert "no [[dkim]] has that selector" in d.operator.run("send", "--yes", code=20).stderr


@pytest.mark.slow
def test_a_source_that_cannot_be_bound_is_refused_before_a_row_is_touched(direct: Callable[..., Direct]) -> None:
    d = direct()
    d.begin(mixed(2), SOURCES.replace("127.0.0.3", "192.0.2.7"))
    said = d.operator.run("send", "--processes", "1", "--yes", code=20)
    assert "source second: this host cannot send from 192.0.2.7" in said.stderr
    d.budgets(SOURCES.replace('bind = "127.0.0.3"', 'bind = "192.0.2.7"\nweight = 0'))
    d.operator.run("send", "--processes", "1", "--yes")
    assert d.operator.outcomes() == {"accepted": 6}


@pytest.mark.slow
def test_domains_whose_dns_fails_wait_together_and_expire(direct: Callable[..., Direct]) -> None:
    d = direct(broken={"broken.test": "servfail"})
    d.begin([*mixed(5), *(f"x{n}@broken.test" for n in range(30))], max_age="2s")
    d.operator.run("send", "--processes", "2", "--yes", code=None)
    assert d.operator.outcomes(code=None) == {"accepted": 15, "deferred": 30}


@pytest.mark.slow
def test_a_host_that_cannot_be_reached_holds_up_nobody_and_expires(direct: Callable[..., Direct]) -> None:
    d = direct()
    d.begin([*(f"x{n}@gone.test" for n in range(300)), *mixed(50)], max_age="3s")
    began = time.monotonic()
    d.operator.run("send", "--processes", "2", "--yes", code=None)
    assert time.monotonic() - began < 20
    assert d.operator.outcomes(code=None) == {"accepted": 150, "deferred": 300}


@pytest.mark.slow
def test_max_wait_leaves_what_waits_for_dns_or_a_dead_host(direct: Callable[..., Direct]) -> None:
    d = direct(broken={"broken.test": "servfail"})
    d.begin([*(f"x{n}@gone.test" for n in range(20)), *(f"y{n}@broken.test" for n in range(20)), *mixed(50)])
    d.operator.set("plan", ["60s"])
    began = time.monotonic()
    said = d.operator.run("send", "--processes", "2", "--yes", "--max-wait", "0", code=3)
    assert time.monotonic() - began < 20
    assert "40 rows wait for their next attempt" in said.stderr
    assert d.operator.outcomes(code=None) == {"accepted": 150, "unsent": 40}


@pytest.mark.slow
def test_a_killed_sender_goes_on_with_what_waited(direct: Callable[..., Direct]) -> None:
    d = direct(
        greylisting("midmail", 2.5),
        broken={"broken.test": "servfail"},
    )
    d.begin([*(f"y{n}@broken.test" for n in range(10)), *mixed(50)], max_age="8s")
    d.operator.set("plan", ["2s"])
    process = d.operator.start("send", "--processes", "2", "--yes")
    until(lambda: d.net.reports()["midmail"].answers.get("greylisted", 0) >= 50)
    time.sleep(0.5)  # their results are in the logs
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    d.operator.run("send", "--processes", "2", "--yes", code=None)
    assert d.operator.outcomes(code=None) == {"accepted": 150, "deferred": 10}
    for name in ADDRESSES:
        assert len(d.received(name)) == len(set(d.received(name))) == 50


@pytest.mark.slow
def test_eight_processes_keep_one_budget_by_the_receiver_s_count(direct: Callable[..., Direct]) -> None:
    d = direct(msgspec.structs.replace(willing("bigmail"), message_s=0.01))
    budget = SOURCES.replace("[source.second]", "[source.unused]\nweight = 0")
    budget = "[default]\nconnections = 3\nconnections_per_minute = 100000\n" + budget
    d.begin([f"r{n}@bigmail.test" for n in range(600)], budget, plan=False)
    d.operator.set("list.batch_rows", 100)
    d.operator.run("plan", "list.parquet")
    d.operator.run("send", "--processes", "8", "--yes", within_s=100)
    (source,) = d.net.reports()["bigmail"].sources.values()
    assert (source.accepted, source.most_connections) == (600, 3)


@pytest.mark.long
def test_ten_a_minute_are_ten_in_any_minute(direct: Callable[..., Direct]) -> None:
    d = direct()
    d.begin([f"r{n}@bigmail.test" for n in range(13)], "[default]\nmessages_per_minute = 10\n")
    d.operator.run("send", "--processes", "8", "--yes", within_s=150)
    times = read_record(d.records / "bigmail.tsv")["time_us"].to_numpy()
    assert len(times) == 13
    assert fullest_window(times, 60) <= 10
    assert share_used(times, 10 / 60) >= 0.98


@pytest.mark.long
def test_killed_and_resumed_at_once_no_minute_holds_more_than_its_limit(direct: Callable[..., Direct]) -> None:
    d = direct()
    d.begin([f"r{n}@bigmail.test" for n in range(3)], "[default]\nmessages_per_minute = 2\n")
    for sent in (1, 2):
        process = d.operator.start("send", "--processes", "2", "--yes")
        until(lambda sent=sent: d.net.reports()["bigmail"].accepted >= sent, within_s=100)
        time.sleep(0.5)  # its result is in the log
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    d.operator.run("send", "--processes", "2", "--yes", within_s=150)
    times = read_record(d.records / "bigmail.tsv")["time_us"].to_numpy()
    assert len(times) == 3
    assert fullest_window(times, 60) <= 2
    assert d.operator.outcomes() == {"accepted": 3}


@pytest.mark.slow
def test_a_changed_budget_holds_at_once_and_a_broken_one_changes_nothing(direct: Callable[..., Direct]) -> None:
    d = direct(msgspec.structs.replace(willing("bigmail"), message_s=0.1))
    d.begin([f"r{n}@bigmail.test" for n in range(400)], "[default]\nconnections = 1\n")
    process = d.operator.start("send", "--processes", "2", "--yes")
    until(lambda: d.net.reports()["bigmail"].accepted > 10)
    d.budgets("[default]\nconnections = 0\n")
    time.sleep(2.5)
    assert d.net.reports()["bigmail"].sources["127.0.0.1"].most_connections == 1
    d.budgets("[default]\nconnections = 12\nconnections_per_minute = 100000\n")
    _, err = process.communicate(timeout=40)
    assert process.returncode == 0, err
    assert "settings_refused" in err
    assert d.net.reports()["bigmail"].sources["127.0.0.1"].most_connections == 12


@pytest.mark.slow
def test_unknown_users_are_suppressed_unless_suddenly_everybody_is_unknown(direct: Callable[..., Direct]) -> None:
    d = direct(
        msgspec.structs.replace(willing("bigmail"), unknown_share=0.05),
        msgspec.structs.replace(willing("midmail"), outages=(), unknown_share=1.0),
    )
    d.begin(mixed(200), max_age="6s")
    said = d.operator.run("send", "--processes", "2", "--yes", "--max-wait", "0", code=None)
    assert "breaker_open provider=midmail.test" in said.stderr
    suppressed = Suppressions(d.operator.campaign / "suppression", list_id="news")
    answers = d.net.reports()["bigmail"].answers
    assert answers["bounced"] > 0
    held = {name: int(suppressed.check([f"r{n}@{name}.test" for n in range(200)]).sum()) for name in ADDRESSES}
    assert held == {"bigmail": answers["bounced"], "midmail": 0, "smallmail": 0}


@pytest.mark.slow
def test_what_the_throttle_learnt_survives_a_restart(direct: Callable[..., Direct]) -> None:
    d = direct(msgspec.structs.replace(willing("bigmail"), message_s=0.05, connections=2))
    d.begin([f"r{n}@bigmail.test" for n in range(300)], "[default]\nconnections = 10\n")
    process = d.operator.start("send", "--processes", "1", "--yes")
    memory = d.operator.campaign / "run" / "throttle-0.json"
    until(lambda: memory.exists() and b"too many connections" in memory.read_bytes())
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    refused = d.net.reports()["bigmail"].answers["too_many_connections"]
    d.operator.run("send", "--processes", "1", "--yes")
    assert refused > 0
    assert d.net.reports()["bigmail"].answers["too_many_connections"] <= refused + 1
    assert d.operator.outcomes() == {"accepted": 300}
