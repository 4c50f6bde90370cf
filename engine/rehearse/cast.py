"""Who plays whom in a rehearsal: which domains a played provider has, where it listens, what it lets us do. Pure.

Known domains go to their providers. Of the others, large ones and those that a budget or the warm-up names are
played each by itself; all that are left are the tail, one model whose domains are destinations of their own.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import msgspec

from engine.accepting import CONNECT_S, MESSAGE_S
from engine.pace.budgets import Budget
from engine.rehearse.models import Model
from engine.rehearse.nameserver import Zone
from engine.route.provider import ProviderBook, registrable_domain

TAIL = "tail"  # all domains that nobody knows and that have few rows, each played by itself
LARGE_SHARE = 0.02  # of the rows: a domain that gets a line of its own
_MOST_LARGE = 20
_WIDER = 1.1  # the ledger spends a rate up to a twentieth faster to make up for stalls; its windows hold all the same


class Cast(msgspec.Struct, frozen=True):
    """Rows per provider, the domains of each, and where each listens."""

    rows: dict[str, int]
    domains: dict[str, dict[str, int]]  # provider -> domain -> rows
    hosts: dict[str, str]  # provider -> the MX host its domains name; not the tail, where each has its own
    addresses: dict[str, str]

    def zone(self) -> Zone:
        """The name server's table."""
        records: dict[str, dict[str, list[str]]] = {}
        for provider, domains in self.domains.items():
            for domain in domains:
                host = self.hosts.get(provider, f"mx.{domain}")
                records.setdefault(domain, {})["MX"] = [f"10 {host}."]
                records.setdefault(host, {})["A"] = [self.addresses[provider]]
        return Zone(records=records)

    def tail(self) -> dict[str, int]:
        """Rows of the tail's destinations, by the name the engine gives them."""
        rows: dict[str, int] = {}
        for domain, count in self.domains.get(TAIL, {}).items():
            name = registrable_domain(f"mx.{domain}")
            rows[name] = rows.get(name, 0) + count
        return rows


def cast_of(domain_rows: Mapping[str, int], book: ProviderBook, named: Collection[str] = ()) -> Cast:
    """The cast of a list with these rows per domain; `named` get a line of their own, however small."""
    domains: dict[str, dict[str, int]] = {}
    unknown: dict[str, dict[str, int]] = {}
    for domain, rows in domain_rows.items():
        known = book.of_domain(domain)
        place = unknown if known is None else domains
        place.setdefault(known or registrable_domain(f"mx.{domain}"), {})[domain] = rows
    sums = {name: sum(rows.values()) for name, rows in unknown.items()}
    least = LARGE_SHARE * sum(domain_rows.values())
    large = sorted((name for name, rows in sums.items() if rows >= least), key=lambda name: -sums[name])[:_MOST_LARGE]
    for name, rows_of in unknown.items():
        domains.setdefault(name if name in named or name in large else TAIL, {}).update(rows_of)
    hosts = {
        name: _host(book.providers[name].mx[0]) if name in book.providers else f"mx.{name}"
        for name in domains
        if name != TAIL
    }
    addresses = {name: f"127.9.{number // 250}.{number % 250 + 1}" for number, name in enumerate(domains)}
    return Cast({name: sum(rows.values()) for name, rows in domains.items()}, domains, hosts, addresses)


def _host(mx: str) -> str:
    """A host name that the provider's rule matches."""
    return ("mx" + mx if mx.startswith(".") else mx).replace("*", "x")


def model_of(name: str, rows: int, budget: Budget, domains: int = 1) -> Model:
    """A provider that lets us do exactly what its budget says.

    Its bucket is a little wider than the limit: what we promise is checked by counting, not by refusals.
    """
    rates = [rate.count / (rate.spread_s or rate.per_s) for rate in budget.limit().rates]
    return Model(
        name=name,
        share=float(rows),
        domains=domains,
        connect_s=CONNECT_S,
        message_s=MESSAGE_S,
        connections=budget.connections,
        messages_per_connection=budget.messages_per_connection,
        rate_per_s=min(rates) * _WIDER if rates else None,
    )
