"""The bulk senders' checklist, the DNS's part of it, and a whole list rendered."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from engine.compose.checklist import Finding, Severity, are_aligned, check_composer, check_message, render_all, worst
from engine.compose.dnscheck import check_dns
from engine.compose.sign import make_key
from tests.compose.conftest import NOW_US, Campaign, MakeCampaign

GOOD: dict[str, Any] = {
    "unsubscribe_url": "https://news.example.org/u/{token}",
    "feedback_id": "a:b:c:sender",
    "list_id": "weekly.example.org",
}
PAGE = '<html><body><p>Hi</p><a href="{{ unsubscribe_url }}">leave</a></body></html>'


def signed(make: MakeCampaign, page: str = PAGE, **message: Any) -> Campaign:
    made = make(
        {"page.html": page},
        more={"dkim": [{"domain": "example.org", "selector": "s", "key_file": "k/s.pem"}]},
        **message,
    )
    if not (made.folder / "k/s.pem").exists():
        make_key(made.folder / "k/s.pem", "rsa")
    return made


def findings(made: Campaign) -> dict[str, Finding]:
    sent = made.send()
    return {
        f.subject: f for f in check_message(sent.content, return_path=sent.return_path) if f.severity != Severity.OK
    }


def test_a_message_by_the_book_has_no_findings(campaign: MakeCampaign) -> None:
    assert findings(signed(campaign, **GOOD)) == {}
    sent = signed(campaign, **GOOD).send()
    assert worst(check_message(sent.content)) == Severity.OK


@pytest.mark.parametrize(
    ("change", "subject", "severity", "says"),
    [
        ({"feedback_id": None}, "feedback-id", "warn", "Orange"),
        ({"list_id": None}, "list-id", "warn", "out-of-office"),
        ({"one_click": False}, "unsubscribe", "warn", "RFC 8058"),
        ({"from_address": "news@gmail.com"}, "from", "error", "your own domain"),
        ({"from_address": "news@other.example"}, "dkim", "error", "not aligned|no signature is aligned"),
        ({"return_path": "b@relay.example"}, "return-path", "warn", "DMARC rests on DKIM"),
        ({"subject": "Re: your order"}, "subject", "warn", "reply"),
        ({"subject": ""}, "subject", "warn", "empty"),
        ({"text_from_html": False}, "text part", "warn", "absent"),
    ],
)
def test_what_is_missing_is_named_with_a_reason(
    campaign: MakeCampaign, change: dict[str, Any], subject: str, severity: str, says: str
) -> None:
    import re

    found = findings(signed(campaign, **{**GOOD, **change}))
    assert found[subject].severity == severity
    assert re.search(says, found[subject].reason)


@pytest.mark.parametrize(
    ("page", "subject", "says"),
    [
        (PAGE + "<a href='/shop'>x</a>", "links", "relative"),
        (PAGE + "<img src='img/a.png' alt=''>", "images", "relative"),
        (PAGE + "<img src='cid:none' alt=''>", "images", "inline"),
        (PAGE + "<img src='https://x.example/a.png'>", "images", "alt"),
        (PAGE + "<meta charset='iso-8859-1'>", "charset", "iso-8859-1"),
        (PAGE + "<p>" + "x" * 105_000 + "</p>", "size", "hides"),
        ("<p>no link</p>", "unsubscribe link", "visible"),
    ],
)
def test_the_page_is_looked_at(campaign: MakeCampaign, page: str, subject: str, says: str) -> None:
    assert says in findings(signed(campaign, page, **GOOD))[subject].reason


def test_without_a_signature(campaign: MakeCampaign) -> None:
    sent = campaign({"text.txt": "x"}).send()
    found = {f.subject: f.severity for f in check_message(sent.content)}
    assert found["dkim"] == Severity.ERROR
    assert found["unsubscribe"] == Severity.WARN


def test_alignment() -> None:
    assert are_aligned("example.org", "mail.example.org")
    assert not are_aligned("example.org", "badexample.org")
    assert not are_aligned("a.example", "b.example")


def test_a_slow_text_part_is_told(campaign: MakeCampaign) -> None:
    made = campaign({"page.html": "{% set x = 1 %}{% macro m() %}{% endmacro %}<p>x</p>"})
    assert "milliseconds" in check_composer(made.composer())[0].reason


def test_all_rows_are_rendered_and_the_failing_ones_named(campaign: MakeCampaign) -> None:
    made = campaign({"text.txt": "{{ 10 // n }}"})
    composer = made.composer(pa.schema([("n", pa.int64())]))
    rows = [(5, "a@b.example", [1]), (6, "a@b.example", [0]), (7, "nobody", [1]), (8, None, [1])]
    report = list(render_all(composer, rows, NOW_US))
    assert [(row, problem.reason if problem else None) for row, problem in report] == [
        (5, None),
        (6, "render"),
        (7, "address"),
        (8, "address"),
    ]
    assert "text.txt line 1" in report[1][1].detail  # type: ignore[union-attr]


# --- DNS --------------------------------------------------------------------------------------


class Zone:
    """A resolver over a table."""

    def __init__(self, records: dict[tuple[str, str], list[str]]) -> None:
        self.records = records

    def __call__(self, name: str, kind: str) -> list[str]:
        answer = self.records.get((name.rstrip(".").lower(), kind), [])
        if answer == ["broken"]:
            raise OSError(f"{name} {kind}: timed out")
        return answer


def good_zone(made: Campaign) -> dict[tuple[str, str], list[str]]:
    from engine.compose.sign import load_signer

    return {
        ("1.2.0.192.in-addr.arpa", "PTR"): ["mail.example.org."],
        ("mail.example.org", "A"): ["192.0.2.1"],
        ("example.org", "TXT"): ["other", "v=spf1 include:_spf.example.net ~all"],
        ("_spf.example.net", "TXT"): ["v=spf1 ip4:192.0.2.0/28 ip6:2001:db8::/32 -all"],
        ("s._domainkey.example.org", "TXT"): [load_signer(made.settings.dkim[0], made.folder).record()],
        ("_dmarc.example.org", "TXT"): ["v=DMARC1; p=none; rua=mailto:d@example.org"],
        ("example.org", "SOA"): ["ns. host. 1"],
        ("example.org", "MX"): ["mail.example.org."],
    }


def dns(made: Campaign, records: dict[tuple[str, str], list[str]], **options: Any) -> dict[str, Finding]:
    found = check_dns(
        made.settings,
        made.folder,
        Zone(records),
        **{"sources": ["192.0.2.1"], "greeting_name": "mail.example.org", **options},
    )
    return {f.subject: f for f in found if f.severity != Severity.OK}


def test_a_good_zone_has_no_findings(campaign: MakeCampaign) -> None:
    made = signed(campaign, **GOOD)
    assert dns(made, good_zone(made)) == {}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("key", "answer", "subject", "severity", "says"),
    [
        (("1.2.0.192.in-addr.arpa", "PTR"), [], "ptr", "error", "no PTR"),
        (("mail.example.org", "A"), ["192.0.2.9"], "ptr", "error", "does not lead back"),
        (("1.2.0.192.in-addr.arpa", "PTR"), ["ip-192-0-2-1.isp.example."], "ptr", "error", "does not lead back"),
        (("example.org", "TXT"), [], "spf", "error", "no SPF"),
        (("example.org", "TXT"), ["v=spf1 -all", "v=spf1 ~all"], "spf", "error", "2 SPF"),
        (("_spf.example.net", "TXT"), ["v=spf1 ip4:198.51.100.0/24 -all"], "spf", "error", "softfail"),
        (("_spf.example.net", "TXT"), ["v=spf1 include:_spf.example.net"], "spf", "error", "10 look-ups"),
        (("_spf.example.net", "TXT"), [], "spf", "error", "leads to"),
        (("s._domainkey.example.org", "TXT"), [], "dkim", "error", "no record"),
        (("s._domainkey.example.org", "TXT"), ["v=DKIM1; p="], "dkim", "error", "revoked"),
        (("s._domainkey.example.org", "TXT"), ["v=DKIM1; p=AAAA"], "dkim", "error", "another key"),
        (("_dmarc.example.org", "TXT"), [], "dmarc", "error", "p=none at least"),
        (("_dmarc.example.org", "TXT"), ["v=DMARC1; p=none"], "dmarc", "warn", "rua"),
        (("example.org", "SOA"), [], "soa", "error", "Yahoo"),
        (("example.org", "SOA"), ["broken"], "soa", "warn", "did not answer"),
        (("example.org", "MX"), ["."], "bounces", "error", "null MX"),
        (("example.org", "MX"), [], "bounces", "error", "neither"),
    ],
)
def test_what_the_dns_lacks(
    campaign: MakeCampaign, key: tuple[str, str], answer: list[str], subject: str, severity: str, says: str
) -> None:
    made = signed(campaign, **GOOD)
    found = dns(made, {**good_zone(made), key: answer})
    assert found[subject].severity == severity, found
    assert says in found[subject].reason


def test_spf_by_a_and_mx_and_redirect(campaign: MakeCampaign) -> None:
    made = signed(campaign, **GOOD)
    for record in (
        "v=spf1 a:mail.example.org -all",
        "v=spf1 mx -all",
        "v=spf1 a:mail.example.org/24 -all",
        "v=spf1 redirect=_spf.example.net",
    ):
        assert "spf" not in dns(made, {**good_zone(made), ("example.org", "TXT"): [record]}), record
    assert "spf" in dns(made, {**good_zone(made), ("example.org", "TXT"): ["v=spf1 a -all"]})


def test_a_generic_ptr_and_another_greeting_are_warned_of(campaign: MakeCampaign) -> None:
    made = signed(campaign, **GOOD)
    name = "ip-192-0-2-1.isp.example"
    zone = {**good_zone(made), ("1.2.0.192.in-addr.arpa", "PTR"): [f"{name}."], (name, "A"): ["192.0.2.1"]}
    found = dns(made, zone)
    assert "generic" in found["ptr"].reason
    assert "GMX wants them equal" in found["greeting"].reason
    assert "no address" in dns(made, good_zone(made), greeting_name="gone.example.org")["greeting"].reason


def test_strict_alignment_that_nothing_meets(campaign: MakeCampaign) -> None:
    made = signed(campaign, **{**GOOD, "from_address": "news@mail.example.org", "return_path_domain": "b.example.org"})
    zone = {
        **good_zone(made),
        ("_dmarc.example.org", "TXT"): ["v=DMARC1; p=reject; adkim=s; aspf=s; rua=mailto:d@example.org"],
    }
    assert "strict" in dns(made, zone)["dmarc"].reason
