"""Budgets: layers, reasons, and what a budgets.toml may not say."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.pace.allowance import Rate
from engine.pace.budgets import (
    SHIPPED,
    BudgetError,
    Reasoned,
    Section,
    bind_problems,
    find_dead,
    load_budgets,
    rate_of,
    read_budget_file,
    relay_limit,
)
from engine.pace.slots import Limit
from engine.route.provider import load_providers


def own(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "budgets.toml"
    path.write_text(text)
    return path


def test_every_shipped_number_has_its_reason_and_every_section_its_provider() -> None:
    shipped = read_budget_file(SHIPPED)
    for section in (shipped.default, *shipped.provider.values()):
        for key in Section.__struct_fields__:
            value = getattr(section, key)
            assert value is None or (isinstance(value, Reasoned) and len(value.why) > 10), key
    book = load_providers()
    assert find_dead(shipped, set(book.providers), book.of_host, book.of_domain) == []
    assert len(shipped.provider) >= 12


def test_campaign_file_is_laid_over_per_key(tmp_path: Path) -> None:
    budgets = load_budgets(
        own(
            tmp_path,
            """
            [default]
            connections = 50
            [provider.google]
            messages_per_day = 20000
            [source.a]
            bind = "192.0.2.1"
            warmup_day = 3
            [source.a.provider.google]
            connections = 1
            """,
        )
    )
    assert budgets.of("example.org").connections == 50
    assert budgets.of("orange").connections == 2  # a general wish does not open fifty where two are allowed
    google = budgets.of("google")
    assert (google.connections, google.messages_per_connection, google.messages_per_day) == (5, 50, 20_000)
    assert google.retry_after_s == 600
    assert budgets.of("google", "a").connections == 1
    assert budgets.of("google", "b").connections == 5
    assert budgets.limit_of(("a", "google")) == Limit(1, (Rate(20_000, 86_400.0, 28_800.0),), Rate(100, 60.0))
    said = {setting.key: setting for setting in budgets.explain("google", "a")}
    assert said["connections"].origin == "budgets.toml [source.a.provider.google]"
    assert said["messages_per_connection"].origin == "shipped [provider.google]"
    assert "KumoMTA" in said["messages_per_connection"].why
    assert said["messages_per_hour"].value is None
    assert budgets.sources[0].warmup_day == 3


def test_campaign_scope_counts_all_sources_together(tmp_path: Path) -> None:
    budgets = load_budgets(own(tmp_path, '[provider.relay_x]\nscope = "campaign"\nmessages_per_minute = 60\n'))
    assert budgets.key("a", "relay_x") == budgets.key("b", "relay_x") == ("*", "relay_x")
    assert budgets.key("a", "google") == ("a", "google")
    assert budgets.limit_of(("*", "relay_x")).rates == (Rate(60, 60.0),)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[provider.google]\nconections = 5", "conections"),
        ("[providers.google]\nconnections = 5", "providers"),
        ("[provider.google]\nconnections = 0", "pause it"),
        ("[provider.google]\nconnections = -1", "pause it"),
        ("[provider.google]\nconnections = true", "whole number"),
        ('[provider.google]\nconnections = "many"', "whole number"),
        ("[provider.google]\nconnections = 1.5", "connections"),
        ("[provider.google]\nmessages_per_minute = 10\nmessages_per_day = 20000", "never reached"),
        ("[provider.google]\nmessages_per_minute = 1000\nmessages_per_hour = 500", "more than"),
        ('[provider.google]\ntls = "sometimes"', "opportunistic"),
        ('[provider.google]\nretry_after = "soon"', "duration"),
        ("[provider.google]\npipelining = 1", "true or false"),
        ('[source.a]\nbind = "myhost"', "IPv4 or IPv6"),
        ('[source.a]\nbind = "192.0.2.1"\n[source.b]\nbind = "192.0.2.1"', "already"),
        ('[source.a]\nbind = "192.0.2.1"\nweight = -1', "weight"),
        ('[source.a]\nbind = "192.0.2.1"\nwarmup_day = 0', "warmup_day"),
        ('[source.a]\ngreeting_name = "x"', "bind"),
        ('[source.a]\nbind = "192.0.2.1"\n[source.a.provider.google]\nscope = "campaign"', "scope"),
        ("[provider", "budgets.toml"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(BudgetError, match=says):
        load_budgets(own(tmp_path, text))


def test_dead_sections_are_found(tmp_path: Path) -> None:
    book = load_providers()
    path = own(
        tmp_path,
        '[provider.gmail]\nconnections = 1\n[provider."gmail.com"]\nconnections = 1\n'
        '[provider."mail.protection.outlook.com"]\nconnections = 1\n[provider."example.net"]\nconnections = 1\n'
        '[source.a]\nbind = "192.0.2.1"\n[source.a.provider.gogle]\nconnections = 1\n',
    )
    dead = dict(find_dead(read_budget_file(path), set(book.providers), book.of_host, book.of_domain))
    assert set(dead) == {
        "provider.gmail",
        "provider.gmail.com",
        "provider.mail.protection.outlook.com",
        "source.a.provider.gogle",
    }
    assert "'google'" in dead["provider.gmail.com"]


def test_a_source_that_cannot_be_bound_is_named(tmp_path: Path) -> None:
    budgets = load_budgets(own(tmp_path, '[source.here]\nbind = "127.0.0.1"\n[source.there]\nbind = "192.0.2.77"\n'))
    problems = bind_problems(budgets.sources)
    assert [problem.fields["source"] for problem in problems] == ["there"]


@pytest.mark.parametrize("per_second", [0.01, 0.1, 1 / 3, 0.5, 0.9, 1, 1.5, 29.55, 231.48, 1000])
def test_rates_are_never_above_what_was_asked(per_second: float) -> None:
    rate = rate_of(per_second)
    assert rate.per_second <= per_second * (1 + 1e-9)
    assert rate.per_second >= per_second * 0.93


def test_relay_limit() -> None:
    assert relay_limit(20, None) == Limit(20)
    assert relay_limit(20, 5.0) == Limit(20, (Rate(5, 1.0),))


def test_missing_file_means_the_shipped_budgets(tmp_path: Path) -> None:
    assert load_budgets(tmp_path / "budgets.toml").of("google").connections == 5
    assert load_budgets().of("nobody.example").connections == 10
