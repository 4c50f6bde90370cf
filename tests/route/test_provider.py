"""MX hosts to providers."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.route.provider import ProviderFileError, load_providers, pool_of, registrable_domain

BOOK = load_providers()


@pytest.mark.parametrize(
    ("hosts", "provider"),
    [
        (["gmail-smtp-in.l.google.com."], "google"),
        (["ASPMX.L.GOOGLE.COM", "alt1.aspmx.l.google.com"], "google"),
        (["example-org.mail.protection.outlook.com"], "exchange_online"),
        (["hotmail-com.olc.protection.outlook.com"], "outlook_consumer"),
        (["example-org.v-v1.mx.microsoft"], "exchange_online"),
        (["mta5.am0.yahoodns.net", "mta6.am0.yahoodns.net"], "yahoo"),
        (["inbound-smtp.eu-west-1.amazonaws.com"], "aws"),
        (["mx1.example.co.uk", "mx2.example.co.uk"], "example.co.uk"),
        (["mx.example.org"], "example.org"),
        (["mx1.example.org", "aspmx.l.google.com"], "example.org"),
        (["notgoogle.com"], "notgoogle.com"),
        (["mx.mail.com"], "united_internet"),
        ([], "unknown"),
    ],
)
def test_hosts_of_the_best_preference_name_the_provider(hosts: list[str], provider: str) -> None:
    assert BOOK.of(hosts) == provider
    assert BOOK.of(reversed(hosts)) == provider


def test_tenants_keep_their_connections_and_share_the_budget() -> None:
    a, b = ["a-org.mail.protection.outlook.com"], ["b-org.mail.protection.outlook.com"]
    assert BOOK.of(a) == BOOK.of(b)
    assert pool_of(a) != pool_of(b)
    google = ["aspmx.l.google.com", "alt1.aspmx.l.google.com"]
    assert pool_of(google) == pool_of(reversed(google))


@pytest.mark.parametrize(
    ("host", "domain"),
    [("mx1.example.org", "example.org"), ("a.b.example.com.br", "example.com.br"), ("x.de", "x.de"),
     ("mx.co.de", "mx.co.de"), ("192.0.2.1", "192.0.2.1"), ("localhost", "localhost")],
)  # fmt: skip
def test_registrable_domain(host: str, domain: str) -> None:
    assert registrable_domain(host) == domain


def test_campaign_table_takes_hosts_over(tmp_path: Path) -> None:
    own = tmp_path / "providers.toml"
    own.write_text('[our_filter]\nmx = [".filter.example.net"]\n[gsuite]\nmx = [".psmtp.com"]\n')
    book = load_providers(own)
    assert book.of(["mx1.filter.example.net"]) == "our_filter"
    assert book.of(["x.psmtp.com"]) == "gsuite"
    assert book.of(["aspmx.l.google.com"]) == "google"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('[a]\nmx = [".x.org"]\n[b]\nmx = [".x.org"]', "already a's"),
        ('[a]\nmx = ["x y"]', "no host"),
        ('[a]\nmx = [".x.org"]\nfoo = 1', "foo"),
        ('["A b"]\nmx = [".x.org"]', "lower-case"),
    ],
)
def test_mistakes_in_the_table_are_named(tmp_path: Path, text: str, says: str) -> None:
    own = tmp_path / "providers.toml"
    own.write_text(text)
    with pytest.raises(ProviderFileError, match=says):
        load_providers(own)
