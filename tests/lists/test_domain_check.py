"""Which domains take no mail: only what the DNS says for certain counts."""

from __future__ import annotations

import asyncio

from engine.lists.domain_check import check_all
from engine.route.resolver import Destination, DnsDeferred, NoSuchDomain, NullMx, Route, Unroutable

ZONE: list[Destination] = [
    Route("good.org", (), "good", "good", 60.0),
    NoSuchDomain("gone.org", "no such domain"),
    NullMx("null.org"),
    Unroutable("odd.org", "its MX is an address"),
    DnsDeferred("slow.org", "no answer"),
]


async def find(domain: str) -> Destination:
    return next(one for one in ZONE if one.domain == domain)


def test_only_certain_answers_leave_a_domain_out() -> None:
    assert asyncio.run(check_all([one.domain for one in ZONE], find)) == {
        "gone.org": "no such domain",
        "null.org": "takes no mail (null MX)",
    }
