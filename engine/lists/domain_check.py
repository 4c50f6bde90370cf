"""Which domains take no mail, asked of the DNS (`--check-domains`).

Only what is permanent counts: no such name, neither MX nor address (RFC 5321 §5.1), a null MX (RFC 7505). A server that
does not answer, or MX hosts that cannot be reached today, say nothing about the domain, and its rows stay.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from engine.clock import SystemClock
from engine.route.dns_client import DnsClient, system_servers
from engine.route.provider import load_providers
from engine.route.resolver import Destination, NoSuchDomain, NullMx, Resolver

_TOGETHER = 10_000  # tasks; the client bounds the questions in flight

Find = Callable[[str], Awaitable[Destination]]


def why_no_mail(found: Destination) -> str | None:
    """Why a destination takes no mail, ever; None where it does, or where nobody can tell."""
    match found:
        case NullMx():
            return "takes no mail (null MX)"
        case NoSuchDomain(why=why):
            return why
        case _:
            return None


async def check_all(domains: Sequence[str], find: Find) -> dict[str, str]:
    """Those of `domains` that take no mail, each with the reason."""
    found: dict[str, str] = {}
    for start in range(0, len(domains), _TOGETHER):
        some = domains[start : start + _TOGETHER]
        for domain, destination in zip(some, await asyncio.gather(*map(find, some)), strict=True):
            if (why := why_no_mail(destination)) is not None:
                found[domain] = why
    return found


def check_domains(domains: Sequence[str]) -> dict[str, str]:
    """As `check_all`, asking the name servers that this machine is set up with."""

    async def ask() -> dict[str, str]:
        client = DnsClient(system_servers())
        try:
            return await check_all(domains, Resolver(client, load_providers(), SystemClock()).route)
        finally:
            await client.close()

    return asyncio.run(ask())
