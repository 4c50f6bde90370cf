"""Which provider runs a set of MX hosts. Pure; the table is data (`providers.toml`, then the campaign's file).

A provider is the unit of pacing: whoever runs the hosts counts our connections and messages over all the domains it
hosts. All hosts of the best preference must be its own; a domain with a spare MX at a large provider is not its
customer. Hosts nobody knows are keyed by their registrable domain, so that a hosting company's customers share a pool.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path

import msgspec

from engine.errors import EngineError, Exit

SHIPPED = Path(__file__).with_name("providers.toml")

# Second-level registries under which names are registered one level deeper. Not the Public Suffix List, which has
# thousands more: a missing one merges unknown pools of one country's registry, which is slow and never wrong.
_SECOND_LEVEL = frozenset(
    {"ac", "co", "com", "edu", "go", "gob", "gov", "gouv", "mil", "ne", "net", "nom", "or", "org"}
)
_NAME = re.compile(r"[a-z0-9_]+\Z")
_HOST = re.compile(r"\.?(?:[a-z0-9*_-]+\.)+[a-z0-9-]+\Z")


class ProviderFileError(EngineError):
    """{file}: provider {provider}: {problem}."""

    exit_code = Exit.SETTINGS
    hint = "Correct the table; the guide `providers.md` shows the form."


class Provider(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One provider's hosts."""

    mx: tuple[str, ...]
    title: str = ""
    domains: tuple[str, ...] = ()  # mail domains known to be its own; the DNS decides when it comes to sending


class ProviderBook:
    """MX host names to providers."""

    def __init__(self, providers: Mapping[str, Provider]) -> None:
        self.providers = dict(providers)
        self._suffixes: dict[str, str] = {}
        self._hosts: dict[str, str] = {}
        self._patterns: list[tuple[str, str]] = []
        self._domains = {domain: name for name, provider in providers.items() for domain in provider.domains}
        self._seen: dict[str, str | None] = {}
        for name, provider in providers.items():
            for mx in provider.mx:
                if "*" in mx:
                    self._patterns.append((mx, name))
                elif mx.startswith("."):
                    self._suffixes[mx[1:]] = name
                else:
                    self._hosts[mx] = name

    def of_host(self, host: str) -> str | None:
        """The provider of one MX host, None where nobody knows it."""
        host = host.rstrip(".").lower()
        if host in self._seen:
            return self._seen[host]
        found = self._hosts.get(host)
        if found is None:
            found = next((name for pattern, name in self._patterns if fnmatchcase(host, pattern)), None)
        labels = host.split(".")
        for start in range(len(labels)):  # the longest suffix first
            if found is not None:
                break
            found = self._suffixes.get(".".join(labels[start:]))
        if len(self._seen) > 200_000:
            self._seen.clear()
        self._seen[host] = found
        return found

    def of_domain(self, domain: str) -> str | None:
        """The provider of a well-known mail domain, without asking the DNS."""
        return self._domains.get(domain.rstrip(".").lower())

    def of(self, best_hosts: Iterable[str]) -> str:
        """The provider of the hosts of the best preference: a known name, or a registrable domain (it has a dot)."""
        hosts = sorted({host.rstrip(".").lower() for host in best_hosts})
        if not hosts:
            return "unknown"
        names = {self.of_host(host) for host in hosts}
        if len(names) == 1 and (name := next(iter(names))) is not None:
            return name
        # Mixed hosts: whoever comes first among those that are nobody's, else the first of all; the same every time.
        unknown = [host for host in hosts if self.of_host(host) is None]
        return registrable_domain((unknown or hosts)[0])


def pool_of(best_hosts: Iterable[str]) -> str:
    """What a connection may be shared by: every domain that names the same hosts, and no other.

    Microsoft 365 and filters in the cloud give each customer its own names, and refuse one's mail at another's.
    """
    return ",".join(sorted({host.rstrip(".").lower() for host in best_hosts}))


def registrable_domain(host: str) -> str:
    """The part of a host name that somebody registered: example.co.uk of mx1.example.co.uk."""
    labels = host.rstrip(".").lower().split(".")
    if len(labels) <= 2 or labels[-1].isdigit():
        return ".".join(labels)
    deep = len(labels[-1]) == 2 and labels[-2] in _SECOND_LEVEL
    return ".".join(labels[-3:] if deep else labels[-2:])


def load_providers(*extra: Path) -> ProviderBook:
    """The shipped table with those of `extra` over it, provider by provider; raises ProviderFileError."""
    providers: dict[str, Provider] = {}
    for path in (SHIPPED, *extra):
        try:
            written = msgspec.toml.decode(path.read_bytes(), type=dict[str, Provider])
        except OSError as problem:
            raise ProviderFileError(file=path, provider="-", problem=problem.strerror) from None
        except (msgspec.MsgspecError, UnicodeDecodeError, ValueError) as problem:
            raise ProviderFileError(file=path, provider="-", problem=problem) from None
        claimed: dict[str, str] = {}
        for name, provider in written.items():
            if not _NAME.match(name):
                raise ProviderFileError(file=path, provider=name, problem="a name has lower-case letters, digits and _")
            for mx in provider.mx:
                if not _HOST.match(mx):
                    raise ProviderFileError(file=path, provider=name, problem=f"{mx!r} is no host, suffix or pattern")
                if mx in claimed:
                    raise ProviderFileError(file=path, provider=name, problem=f"{mx} is already {claimed[mx]}'s")
                claimed[mx] = name
        # What a later file claims is taken from whoever had it.
        providers = {
            name: msgspec.structs.replace(provider, mx=tuple(mx for mx in provider.mx if mx not in claimed))
            for name, provider in providers.items()
        }
        providers |= written
    return ProviderBook(providers)
