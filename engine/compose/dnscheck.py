"""What DNS must say before bulk mail goes out: PTR and greeting name, SPF, DKIM, DMARC, SOA, a way back for bounces.

Asks through a `Lookup` that is passed in; decides by itself. RFC 7208 (SPF, the part of it that names addresses),
RFC 6376 and 8463 (key records), RFC 9989 (DMARC).
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

from engine.compose.checklist import Finding, Severity, are_aligned
from engine.compose.sign import load_signer
from engine.config import Settings
from formats.address import domain_to_ascii, parse_mailbox

_MAX_SPF_LOOKUPS = 10  # RFC 7208 §4.6.4
Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class Lookup(Protocol):
    """What is asked of a resolver."""

    def __call__(self, name: str, kind: str) -> list[str]:
        """The records of `kind` (A, AAAA, MX, TXT, PTR, SOA) as text, MX as host names, TXT strings joined.

        [] where there is none; raises OSError where the DNS did not answer.
        """


class LookupFailed(OSError):
    """The DNS did not answer."""


class _TooMany(Exception):
    """An SPF record that needs more than ten look-ups, or is in error."""


def check_dns(
    settings: Settings, folder: Path, lookup: Lookup, *, sources: Sequence[str] = (), greeting_name: str | None = None
) -> list[Finding]:
    """The checklist of the campaign's names.

    `sources` are the addresses mail leaves from: ours where we deliver directly, the relay's where it is known. A
    look-up that fails makes a warning of its finding.
    """
    message = settings.message
    from_domain = parse_mailbox(message.from_address).domain
    return_domain = (
        parse_mailbox(message.return_path).domain
        if message.return_path
        else domain_to_ascii(message.return_path_domain or from_domain)
    )
    findings: list[Finding] = []
    checks: list[tuple[str, Callable[[], Iterable[Finding]]]] = [
        ("ptr", lambda: _check_sources(lookup, sources, greeting_name)),
        ("spf", lambda: _check_spf(lookup, return_domain, sources)),
        ("dkim", lambda: _check_dkim(settings, folder, lookup, from_domain)),
        ("dmarc", lambda: _check_dmarc(settings, lookup, from_domain, return_domain)),
        ("soa", lambda: _check_soa(lookup, from_domain, return_domain)),
        ("bounces", lambda: _check_way_back(lookup, return_domain)),
    ]
    for subject, check in checks:
        try:
            findings += check()
        except OSError as problem:
            findings.append(Finding(subject, Severity.WARN, f"the DNS did not answer: {problem}"))
    return findings


def _check_sources(lookup: Lookup, sources: Sequence[str], greeting_name: str | None) -> Iterator[Finding]:
    for source in sources:
        address = ipaddress.ip_address(source)
        names = [name.rstrip(".").lower() for name in lookup(address.reverse_pointer, "PTR")]
        if not names:
            yield Finding(
                "ptr", Severity.ERROR, f"{source} has no PTR record: Gmail, Yahoo, Microsoft and GMX refuse it"
            )
            continue
        confirmed = [name for name in names if source in _addresses(lookup, name)]
        if not confirmed:
            yield Finding("ptr", Severity.ERROR, f"{source} is {names[0]}, but that name does not lead back to it")
            continue
        if _looks_generic(confirmed[0], source):
            yield Finding(
                "ptr",
                Severity.WARN,
                f"{source} is {confirmed[0]}, which looks generic; GMX and Yahoo want a name of its own",
            )
        else:
            yield Finding("ptr", Severity.OK, f"{source} is {confirmed[0]} and back")
        if greeting_name and greeting_name.lower() not in confirmed:
            yield Finding(
                "greeting",
                Severity.WARN,
                f"we greet as {greeting_name}, {source} is {confirmed[0]}; GMX wants them equal",
            )
    if greeting_name and sources:
        if not _addresses(lookup, greeting_name):
            yield Finding("greeting", Severity.ERROR, f"{greeting_name} has no address (RFC 5321 §4.1.4)")
        else:
            yield Finding("greeting", Severity.OK, f"{greeting_name} has an address")


def _addresses(lookup: Lookup, name: str) -> set[str]:
    found = [*lookup(name, "A"), *lookup(name, "AAAA")]
    return {str(ipaddress.ip_address(one)) for one in found}


def _looks_generic(name: str, source: str) -> bool:
    digits = re.findall(r"\d+", source) if "." in source else []
    return len(digits) == 4 and sum(part in re.findall(r"\d+", name) for part in digits) >= 3


# --- SPF --------------------------------------------------------------------------------------------------------------


def _check_spf(lookup: Lookup, domain: str, sources: Sequence[str]) -> Iterator[Finding]:
    records = _spf_records(lookup, domain)
    if len(records) != 1:
        how = "no SPF record" if not records else f"{len(records)} SPF records, which is an error (RFC 7208 §4.5)"
        yield Finding("spf", Severity.ERROR, f"{domain} has {how}; Gmail, Yahoo, Microsoft and Apple want SPF")
        return
    if not sources:
        yield Finding("spf", Severity.OK, f"{domain} has one SPF record")
    for source in sources:
        try:
            verdict = evaluate_spf(lookup, domain, ipaddress.ip_address(source))
        except _TooMany as problem:
            yield Finding("spf", Severity.ERROR, f"{domain}: {problem}")
            return
        if verdict == "pass":
            yield Finding("spf", Severity.OK, f"{domain} names {source}")
        else:
            yield Finding("spf", Severity.ERROR, f"{domain} does not name {source}: SPF says {verdict}")


def _spf_records(lookup: Lookup, domain: str) -> list[str]:
    return [text for text in lookup(domain, "TXT") if text.lower().split(" ")[0] == "v=spf1"]


def evaluate_spf(lookup: Lookup, domain: str, source: Address) -> str:
    """pass, fail, softfail or neutral for mail of `domain` from `source`; raises for a record in error.

    Macros, `exists` and `ptr` are read as not matching: nobody's plan should rest on them.
    """
    budget = [_MAX_SPF_LOOKUPS]
    return _spf(lookup, domain, source, budget)


def _spend(budget: list[int]) -> None:
    budget[0] -= 1
    if budget[0] < 0:
        raise _TooMany(f"SPF needs more than {_MAX_SPF_LOOKUPS} look-ups (RFC 7208 §4.6.4)")


def _spf(lookup: Lookup, domain: str, source: Address, budget: list[int]) -> str:
    records = _spf_records(lookup, domain)
    if len(records) != 1:
        raise _TooMany(f"{domain}, which SPF leads to, has {len(records)} SPF records")
    redirect = ""
    for term in records[0].split()[1:]:
        if term.lower().startswith("redirect="):
            redirect = term[9:]
            continue
        if "=" in term.partition(":")[0]:
            continue
        qualifier, mechanism = (term[0], term[1:]) if term[0] in "+-~?" else ("+", term)
        if _matches(lookup, mechanism, domain, source, budget):
            return {"+": "pass", "-": "fail", "~": "softfail", "?": "neutral"}[qualifier]
    if redirect:
        _spend(budget)
        return _spf(lookup, redirect, source, budget)
    return "neutral"


def _matches(lookup: Lookup, mechanism: str, domain: str, source: Address, budget: list[int]) -> bool:
    kind, _, rest = mechanism.partition(":")
    kind, slash, length = kind.lower().partition("/")
    if kind == "all":
        return True
    if kind in ("ip4", "ip6"):
        try:
            return source in ipaddress.ip_network(rest, strict=False)
        except ValueError:
            raise _TooMany(f"{domain}: {mechanism!r} is no network") from None
    if kind == "include":
        _spend(budget)
        return _spf(lookup, rest, source, budget) == "pass"
    if kind in ("a", "mx"):
        _spend(budget)
        name, _, own_length = rest.partition("/")
        wanted = own_length or (length if slash else "")
        hosts = [name or domain] if kind == "a" else [host.rstrip(".") for host in lookup(name or domain, "MX")]
        found = {one for host in hosts for one in _addresses(lookup, host)}
        prefix = (
            wanted.partition("/")[0] if source.version == 4 else wanted.rpartition("/")[2] if "//" in wanted else ""
        )
        return any(_in_network(source, one, prefix) for one in found)
    return False


def _in_network(source: Address, address: str, prefix: str) -> bool:
    network = ipaddress.ip_network(f"{address}/{prefix}" if prefix else address, strict=False)
    return source.version == network.version and source in network


# --- DKIM, DMARC, SOA, the way back -------------------------------------------------------


def _tags(text: str) -> dict[str, str]:
    pairs = (part.partition("=") for part in text.split(";"))
    return {name.strip().lower(): re.sub(r"\s", "", value) for name, _, value in pairs}


def _check_dkim(settings: Settings, folder: Path, lookup: Lookup, from_domain: str) -> Iterator[Finding]:
    if not settings.dkim:
        yield Finding(
            "dkim", Severity.WARN, "no [[dkim]]: does the relay sign? Large receivers want an aligned signature"
        )
    for number, table in enumerate(settings.dkim):
        if number and not table.also:
            continue
        name = f"{table.selector}._domainkey.{domain_to_ascii(table.domain)}"
        ours = _tags(load_signer(table, folder).record())
        records = lookup(name, "TXT")
        if not records:
            yield Finding("dkim", Severity.ERROR, f"{name} has no record; `engine dkim-key --show` prints it")
        elif not any(_tags(record).get("p") == ours["p"] for record in records):
            revoked = any(_tags(record).get("p") == "" for record in records)
            yield Finding(
                "dkim",
                Severity.ERROR,
                f"{name} holds {'a revoked' if revoked else 'another'} key than {table.key_file}",
            )
        else:
            yield Finding("dkim", Severity.OK, f"{name} holds our key")
        if not are_aligned(domain_to_ascii(table.domain), from_domain):
            yield Finding("dkim", Severity.ERROR, f"{table.domain} is not aligned with {from_domain}")


def _check_dmarc(settings: Settings, lookup: Lookup, from_domain: str, return_domain: str) -> Iterator[Finding]:
    labels = from_domain.split(".")
    for start in range(len(labels) - 1):  # RFC 9989 §4.10: up the tree, the nearest record holds
        name = ".".join(labels[start:])
        records = [
            text for text in lookup(f"_dmarc.{name}", "TXT") if text.replace(" ", "").lower().startswith("v=dmarc1")
        ]
        if len(records) > 1:
            yield Finding("dmarc", Severity.ERROR, f"_dmarc.{name} has {len(records)} records, and so none")
            return
        if records:
            tags = _tags(records[0])
            yield Finding("dmarc", Severity.OK, f"_dmarc.{name} says p={tags.get('p', '?')}")
            strict_dkim = tags.get("adkim") == "s" and all(
                table.domain.lower() != from_domain for table in settings.dkim
            )
            strict_spf = tags.get("aspf") == "s" and return_domain != from_domain
            if strict_dkim and (strict_spf or not are_aligned(return_domain, from_domain)):
                yield Finding(
                    "dmarc",
                    Severity.ERROR,
                    "alignment is strict, and neither DKIM nor SPF is of the very domain of From",
                )
            if "rua" not in tags:
                yield Finding(
                    "dmarc", Severity.WARN, "no rua=: reports would show who sends in your name (La Poste asks for it)"
                )
            return
    yield Finding(
        "dmarc",
        Severity.ERROR,
        f"no DMARC record for {from_domain}: Gmail, Yahoo, Microsoft and Apple want p=none at least",
    )


def _check_soa(lookup: Lookup, *domains: str) -> Iterator[Finding]:
    for domain in dict.fromkeys(domains):
        labels = domain.split(".")
        if any(lookup(".".join(labels[start:]), "SOA") for start in range(len(labels) - 1)):
            yield Finding("soa", Severity.OK, f"{domain} lies in a zone that answers")
        else:
            yield Finding("soa", Severity.ERROR, f"no SOA for {domain}: Yahoo refuses it")


def _check_way_back(lookup: Lookup, domain: str) -> Iterator[Finding]:
    hosts = lookup(domain, "MX")
    if hosts == ["."] or hosts == [""]:
        yield Finding(
            "bounces",
            Severity.ERROR,
            f"{domain} says it takes no mail (null MX, RFC 7505): bounces are lost, many refuse",
        )
    elif hosts or _addresses(lookup, domain):
        yield Finding("bounces", Severity.OK, f"{domain} takes mail")
    else:
        yield Finding("bounces", Severity.ERROR, f"{domain} has neither MX nor address: bounces are lost, many refuse")
