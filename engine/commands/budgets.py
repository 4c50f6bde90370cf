"""`engine budgets`: what each provider lets us do, and whose word that is."""

from __future__ import annotations

from pathlib import Path

import click
import msgspec
from rich.table import Table
from rich.text import Text

from engine.campaign import Campaign
from engine.commands.common import campaign_option
from engine.commands.resolve import wide_console
from engine.errors import EngineError, Exit
from engine.pace.budgets import (
    BUDGETS_FILE,
    BudgetError,
    Budgets,
    bind_problems,
    find_dead,
    load_budgets,
    read_budget_file,
)
from engine.route.answers import read_answers
from engine.route.provider import ProviderBook, load_providers


class UnknownProvider(EngineError):
    """{name} is neither a provider nor a domain whose provider is known without asking the DNS."""

    exit_code = Exit.USAGE
    hint = "Run `engine resolve {name}` and name the provider it prints; `engine budgets show` lists all."


def _books(campaign: Campaign) -> tuple[Budgets, ProviderBook, Path]:
    own = campaign.folder / "providers.toml"
    providers = load_providers(*([own] if own.exists() else []))
    path = campaign.folder / BUDGETS_FILE
    return load_budgets(path), providers, path


@click.group()
def budgets() -> None:
    """Show and check what each provider lets us do.

    \b
    engine budgets show gmail.com
    engine budgets check
    """


@budgets.command()
@click.argument("name", required=False)
@campaign_option
@click.option("--source", help="As it holds for this [source.NAME].")
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def show(name: str | None, campaign: Campaign, source: str | None, as_json: bool) -> None:
    """The values in force for a provider or domain, each with its origin and reason.

    \b
    engine budgets show gmail.com
    engine budgets show
    """
    resolved, providers, _ = _books(campaign)
    if source is not None and source not in {known.name for known in resolved.sources}:
        raise click.BadParameter(f"there is no [source.{source}] in {BUDGETS_FILE}", param_hint="--source")
    if name is None:
        _show_all(resolved, as_json)
        return
    provider = _provider_of(name, campaign, providers)
    settings = resolved.explain(provider, source)
    if as_json:
        click.echo(msgspec.json.encode({"provider": provider, "settings": settings}).decode())
        return
    known = providers.providers.get(provider)
    title = f" ({known.title})" if known and known.title else ""
    click.echo(f"provider {provider}{title}" + (f", source {source}" if source else ""))
    table = Table("key", "value", "from", "why", box=None)
    for setting in settings:
        value = "no limit" if setting.value is None else str(setting.value)
        if setting.value is None and setting.key in ("retry_after", "tls", "scope", "pipelining", "chunking"):
            value = "by the retry plan" if setting.key == "retry_after" else "-"
        origin = "" if setting.value is None else setting.origin
        table.add_row(*map(Text, (setting.key, value, origin, setting.why if origin else "")))
    wide_console().print(table)


def _provider_of(name: str, campaign: Campaign, providers: ProviderBook) -> str:
    if name in providers.providers:
        return name
    domain = name.rpartition("@")[2].lower()
    answer = read_answers(campaign.folder / "domains.jsonl").get(domain)
    if answer is not None and answer.provider:
        return answer.provider
    provider = providers.of_domain(domain)
    if provider is None:
        raise UnknownProvider(name=name)
    return provider


def _show_all(resolved: Budgets, as_json: bool) -> None:
    names = ["(any other)", *sorted(resolved.named_providers())]
    if as_json:
        click.echo(msgspec.json.encode({name: resolved.of(name) for name in names}).decode())
        return
    table = Table("provider", "connections", "per connection", "per minute", "per hour", "per day", "tls", box=None)
    for name in names:
        budget = resolved.of(name)
        limits = (budget.messages_per_minute, budget.messages_per_hour, budget.messages_per_day)
        table.add_row(
            name,
            str(budget.connections),
            str(budget.messages_per_connection),
            *("-" if limit is None else f"{limit:,}" for limit in limits),
            budget.tls,
        )
    wide_console().print(table)


@budgets.command()
@campaign_option
@click.option("--no-bind", is_flag=True, help="Do not try whether this host can send from the sources' addresses.")
def check(campaign: Campaign, no_bind: bool) -> None:
    """Read the campaign's budgets: unknown keys, dead sections, addresses that cannot be bound.

    \b
    engine budgets check --campaign spring
    """
    resolved, providers, path = _books(campaign)
    if not path.exists():
        click.echo(f"{campaign.folder} has no {BUDGETS_FILE}: the shipped budgets hold.", err=True)
        return
    problems: list[EngineError] = [
        BudgetError(file=path.name, section=section, problem=problem)
        for section, problem in find_dead(
            read_budget_file(path), set(providers.providers), providers.of_host, providers.of_domain
        )
    ]
    signing = [source for source in resolved.sources if source.dkim_selector is not None]
    known = {table.selector for table in campaign.settings().dkim} if signing else set()
    for source in signing:
        if source.dkim_selector not in known:
            why = f"dkim_selector: no [[dkim]] of campaign.toml has the selector {source.dkim_selector!r}"
            problems.append(BudgetError(file=path.name, section=f"source.{source.name}", problem=why))
    if not no_bind:
        problems += bind_problems(resolved.sources)
    for problem in problems[1:]:
        click.echo(f"error: {problem}", err=True)
    if problems:
        raise problems[0]
    click.echo(f"{path} is in order: {len(resolved.sources)} sources.", err=True)
