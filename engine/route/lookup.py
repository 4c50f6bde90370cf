"""One record set at a time, as text, for checks that a person waits for. Sending uses `resolver`.

dnspython, four seconds a question at most. RFC 1035.
"""

from __future__ import annotations

from collections.abc import Sequence

import dns.exception
import dns.resolver

PATIENCE_S = 4.0


class NoAnswer(OSError):
    """The DNS did not answer."""


class TextLookup:
    """Asks the given name servers ("ADDRESS" or "ADDRESS:PORT"), or the machine's."""

    def __init__(self, nameservers: Sequence[str] = ()) -> None:
        self._resolver = dns.resolver.Resolver(configure=not nameservers)
        if nameservers:
            servers = [text.partition(":") if text.count(":") == 1 else (text, "", "") for text in nameservers]
            self._resolver.nameservers = [address for address, _, _ in servers]
            self._resolver.port = int(servers[0][2] or 53)
        self._resolver.lifetime = PATIENCE_S

    def __call__(self, name: str, kind: str) -> list[str]:
        """The records of `kind`, MX as host names, TXT strings joined; [] where there is none. Raises NoAnswer."""
        try:
            answer = self._resolver.resolve(name, kind, search=False)
        except (dns.resolver.NXDOMAIN, dns.resolver.NoAnswer):
            return []
        except (dns.exception.DNSException, ValueError, OSError) as problem:
            raise NoAnswer(f"{name} {kind}: {problem}") from None
        match kind:
            case "TXT":
                return [b"".join(record.strings).decode("utf-8", "replace") for record in answer]
            case "MX":
                return [record.exchange.to_text().rstrip(".") for record in answer]
            case "PTR":
                return [record.target.to_text().rstrip(".") for record in answer]
            case _:
                return [record.to_text() for record in answer]
