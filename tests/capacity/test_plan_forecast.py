"""`engine plan` and `engine capacity` as an operator meets them: counts, deadlines, warm-ups, and what is missing."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner, Result

from engine.campaign import Campaign
from engine.cli import main
from engine.commands.capacity import capacity_command
from engine.commands.forecast import NobodyWarmsUp, WarmupNeedsCounts, WarmupNeedsDirect
from engine.commands.plan import plan
from engine.commands.prepare import prepare
from engine.pace.budgets import BudgetError
from engine.route.answers import Kept
from engine.warmup import UnknownSchedule

ROWS = [*(f"p{n}@gmail.com" for n in range(60)), *(f"p{n}@shop.example" for n in range(39)), "x@nomail.example"]
ANSWERS = (
    Kept(domain="gmail.com", kind="route", at_us=1, provider="google", pool="a"),
    Kept(domain="shop.example", kind="route", at_us=1, provider="google", pool="b"),
    Kept(domain="nomail.example", kind="null_mx", at_us=1, why="takes no mail"),
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fresh campaign for direct delivery, and a list that nobody prepared."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["engine", "init"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    campaign = tmp_path / "campaign"
    for kind in ("txt", "html"):
        (campaign / "templates" / f"letter.{kind}").write_text("Hello {{ first_name }}\n")
    settings = campaign / "campaign.toml"
    settings.write_text(settings.read_text().replace('mode = "relay"', 'mode = "direct"'))
    table = pa.table({"email": ROWS, "first_name": ["A"] * len(ROWS), "opened": list(range(len(ROWS)))})
    pq.write_table(table, tmp_path / "raw.parquet")
    return tmp_path


def run(command, *words: str) -> Result:  # type: ignore[no-untyped-def]  # a click command
    return CliRunner().invoke(command, list(words), catch_exceptions=False)


def resolved(folder: Path) -> None:
    lines = b"".join(msgspec.json.encode(answer) + b"\n" for answer in ANSWERS)
    (folder / "campaign" / "domains.jsonl").write_bytes(lines)


def sources(folder: Path, *days: int | None) -> None:
    parts = []
    for number, day in enumerate(days):
        parts.append(f'[source.s{number}]\nbind = "127.0.0.{number + 2}"\n')
        parts.append(f"warmup_day = {day}\n" if day is not None else "")
    (folder / "campaign" / "budgets.toml").write_text("".join(parts))


def test_a_list_without_counts_is_planned_and_told_how_to_get_them(folder: Path) -> None:
    said = run(plan, "raw.parquet")
    assert said.exit_code == 0
    assert "engine resolve LIST" in said.stderr
    assert "engine prepare" in said.stderr
    assert "next: engine send" in said.stdout
    assert Campaign(folder / "campaign").plan().planned_per_hour == {}


def test_the_answers_of_resolve_tell_the_providers_of_a_list_that_nobody_prepared(folder: Path) -> None:
    resolved(folder)
    said = run(plan, "raw.parquet", "--deadline", "2h")
    assert "the answers of `engine resolve`" in said.stderr
    assert "1 rows have a domain that takes no mail" in said.stderr
    made = Campaign(folder / "campaign").plan()
    assert made.provider_rows == {"google": 99}
    assert made.planned_per_hour["google"] > 99
    assert "within 2 h 0 min: possible" in said.stdout
    assert "google" in run(capacity_command).stdout


def test_prepare_reads_the_answers_that_lie_in_the_campaign(folder: Path) -> None:
    resolved(folder)
    said = run(prepare, "raw.parquet", "-o", "list.parquet", "--engaged-first", "opened")
    assert "by the answers of `engine resolve`" in said.stderr
    (folder / "campaign" / "domains.jsonl").unlink()
    figures = msgspec.json.decode(run(plan, "list.parquet", "--json").stdout)
    counts = figures["forecast"]["counts"]
    assert counts["providers"]["google"] == 99
    assert "prepare" in counts["told_by"]


def test_a_warmup_is_spread_over_days_and_stands_in_the_plan(folder: Path) -> None:
    resolved(folder)
    sources(folder, 1, None)
    run(prepare, "raw.parquet", "-o", "list.parquet", "--engaged-first", "opened")
    said = run(plan, "list.parquet", "--warmup", "sendgrid-manual")
    assert "put them by opened" in said.stderr
    made = Campaign(folder / "campaign").plan()
    assert made.warmup is not None
    assert made.warmup.days == {"s0": 1}
    assert made.warmup.daily[:3] == [50, 100, 500]
    assert made.warmup.shares == {"google": 1.0}
    sources(folder, 1)
    figures = msgspec.json.decode(run(plan, "list.parquet", "--warmup", "sendgrid-manual", "--json").stdout)
    assert figures["forecast"]["rows_per_day"] == [50, 49]
    google = figures["forecast"]["capacity"]["providers"][0]
    assert (google["today"], google["spills"], google["binding"]) == (50, 49, "warm-up day 1")


def test_a_warmup_that_cannot_be_kept_is_refused_by_name(folder: Path) -> None:
    with pytest.raises(UnknownSchedule):
        run(plan, "raw.parquet", "--warmup", "overnight")
    with pytest.raises(WarmupNeedsCounts):
        run(plan, "raw.parquet", "--warmup", "sparkpost")
    resolved(folder)
    sources(folder, None)
    with pytest.raises(NobodyWarmsUp):
        run(plan, "raw.parquet", "--warmup", "sparkpost")
    sources(folder, 0)
    with pytest.raises(BudgetError, match="warmup_day"):
        run(plan, "raw.parquet", "--warmup", "sparkpost")
    settings = folder / "campaign" / "campaign.toml"
    settings.write_text(settings.read_text().replace('mode = "direct"', 'mode = "relay"'))
    with pytest.raises(WarmupNeedsDirect):
        run(plan, "raw.parquet", "--warmup", "sparkpost")
    assert not (folder / "campaign" / "plan.json").exists()


def test_an_impossible_budget_is_told_in_days(folder: Path) -> None:
    resolved(folder)
    (folder / "campaign" / "budgets.toml").write_text("[provider.google]\nmessages_per_day = 10\n")
    said = run(plan, "raw.parquet")
    assert "not possible" in said.stdout
    assert "google: messages a day" in said.stdout
    assert "(9." in said.stdout  # days
    assert "10 warm sources in place of 1" in said.stdout


def test_a_relay_is_one_provider_with_the_limits_of_delivery(folder: Path) -> None:
    settings = folder / "campaign" / "campaign.toml"
    text = settings.read_text().replace('mode = "direct"', 'mode = "relay"')
    settings.write_text(text.replace("connections = 10 ", "messages_per_second = 0.5\nconnections = 10 "))
    said = run(plan, "raw.parquet", "--deadline", "1m")
    assert "messages a minute" in said.stdout
    assert "not possible" in said.stdout
    assert "sink" in run(capacity_command).stdout


def test_measuring_composes_and_sends_for_real_and_is_kept(folder: Path) -> None:
    resolved(folder)
    run(plan, "raw.parquet")
    told = msgspec.json.decode(run(capacity_command, "--measure", "--messages", "200", "--json").stdout)
    measured = told["measured"]
    assert measured["messages"] == 200
    assert measured["tls"] is True  # direct delivery is over TLS
    assert measured["per_process"] < measured["composing_per_s"]
    assert told["message_bytes"] == measured["message_bytes"] > 300
    assert "measured here" in run(plan, "raw.parquet").stdout


def test_deadlines_that_are_none_are_usage_errors(folder: Path) -> None:
    assert CliRunner().invoke(plan, ["raw.parquet", "--deadline", "soon"]).exit_code == 2
    assert CliRunner().invoke(plan, ["raw.parquet", "--deadline", "0s"]).exit_code == 2
