"""Which domains take no mail: only what the DNS says for certain counts."""

from __future__ import annotations

from engine.lists.domain_check import Answer, check_domains

ZONE = {
    ("good.org", "MX"): Answer.YES,
    ("gone.org", "MX"): Answer.NO_NAME,
    ("null.org", "MX"): Answer.NULL_MX,
    ("bare.org", "MX"): Answer.NOTHING,
    ("bare.org", "A"): Answer.NOTHING,
    ("bare.org", "AAAA"): Answer.YES,
    ("web.org", "MX"): Answer.NOTHING,
    ("web.org", "A"): Answer.NOTHING,
    ("web.org", "AAAA"): Answer.NOTHING,
    ("slow.org", "MX"): Answer.UNKNOWN,
    ("half.org", "MX"): Answer.NOTHING,
    ("half.org", "A"): Answer.UNKNOWN,
    ("half.org", "AAAA"): Answer.NOTHING,
}


async def ask(domain: str, kind: str) -> Answer:
    return ZONE[domain, kind]


def test_only_certain_answers_leave_a_domain_out() -> None:
    assert check_domains([domain for domain, kind in ZONE if kind == "MX"], ask=ask) == {
        "gone.org": "no such domain",
        "null.org": "takes no mail (null MX)",
        "web.org": "neither mail server nor address",
    }
