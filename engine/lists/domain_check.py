"""Which domains take no mail, asked of the DNS (`--check-domains`).

RFC 5321 §5.1: no MX record, and no address either; RFC 7505: a null MX. No such name: neither. A server that does not
answer says nothing about the domain, and its rows stay.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from enum import StrEnum

import dns.asyncresolver
import dns.exception
import dns.resolver

_AT_ONCE = 200
_PATIENCE_S = 5.0


class Answer(StrEnum):
    """What the DNS said to one question."""

    YES = "yes"
    NULL_MX = "null mx"
    NOTHING = "nothing"
    NO_NAME = "no name"
    UNKNOWN = "unknown"


Ask = Callable[[str, str], Awaitable[Answer]]


async def ask_dns(domain: str, kind: str) -> Answer:
    """The system's resolver's answer on records of `kind` (MX, A, AAAA)."""
    try:
        found = await dns.asyncresolver.resolve(domain, kind, lifetime=_PATIENCE_S)
    except dns.resolver.NXDOMAIN:
        return Answer.NO_NAME
    except dns.resolver.NoAnswer:
        return Answer.NOTHING
    except (dns.exception.DNSException, OSError):
        return Answer.UNKNOWN
    if kind == "MX" and all(str(record.exchange) == "." for record in found):
        return Answer.NULL_MX
    return Answer.YES


async def why_no_mail(domain: str, ask: Ask) -> str | None:
    """Why `domain` takes no mail; None where it does, or where nobody could tell."""
    match await ask(domain, "MX"):
        case Answer.NO_NAME:
            return "no such domain"
        case Answer.NULL_MX:
            return "takes no mail (null MX)"
        case Answer.NOTHING:
            answers = [await ask(domain, "A"), await ask(domain, "AAAA")]
            if all(answer in (Answer.NOTHING, Answer.NO_NAME) for answer in answers):
                return "neither mail server nor address"
    return None


def check_domains(domains: Sequence[str], *, ask: Ask = ask_dns) -> dict[str, str]:
    """Those of `domains` that take no mail, each with the reason."""

    async def check_all() -> dict[str, str]:
        slots = asyncio.Semaphore(_AT_ONCE)
        found: dict[str, str] = {}

        async def check_one(domain: str) -> None:
            async with slots:
                why = await why_no_mail(domain, ask)
            if why is not None:
                found[domain] = why

        for start in range(0, len(domains), 10_000):
            await asyncio.gather(*map(check_one, domains[start : start + 10_000]))
        return found

    return asyncio.run(check_all())
