"""MTA-STS: a domain's published word that its MX hosts speak verified TLS. RFC 8461.

A policy is found in two steps: a TXT record says that there is one and which (`id`), an HTTPS file says what. A policy
once seen holds for its `max_age`, whatever the DNS says later: an attacker who hides the record must not weaken it
(§10.2). `enforce` means: only the listed hosts, only with a certificate that verifies, else the message waits.
DANE (RFC 7672) needs a validating resolver in the same process and is not implemented.
"""

from __future__ import annotations

import asyncio
import re
import ssl
from pathlib import Path
from typing import Literal, Protocol

import dns.rdatatype
import msgspec

from engine.clock import Clock
from engine.route.dns_client import Answer, DnsClient

_ID = re.compile(r"[A-Za-z0-9]{1,32}\Z")
_LONGEST_AGE_S = 31_557_600  # §3.2
_MOST_BYTES = 64 * 1024
_ASK_AGAIN_S = 3600.0  # how often the record is looked at for a known policy, and a failure is remembered


class StsPolicy(msgspec.Struct, frozen=True):
    """One domain's policy file, and when it was fetched (wall microseconds)."""

    id: str
    mode: Literal["enforce", "testing", "none"]
    mx: tuple[str, ...]
    max_age_s: int
    fetched_at_us: int = 0

    def lists(self, host: str) -> bool:
        """Whether the policy allows this MX host; a wildcard stands for exactly one label (§4.1)."""
        host = host.rstrip(".").lower()
        return any(
            host == pattern or (pattern.startswith("*.") and host.partition(".")[2] == pattern[2:])
            for pattern in self.mx
        )

    def holds_at(self, wall_us: int) -> bool:
        """Whether the policy is younger than its maximum age."""
        return wall_us < self.fetched_at_us + self.max_age_s * 1_000_000


def parse_record(texts: list[str]) -> str | None:
    """The policy id in the TXT records of `_mta-sts.DOMAIN`; None where there is not exactly one (§3.1)."""
    records = [text for text in texts if text.startswith("v=STSv1;")]
    if len(records) != 1:
        return None
    for field in records[0].split(";")[1:]:
        key, _, value = field.strip().partition("=")
        if key.strip() == "id":
            value = value.strip()
            return value if _ID.match(value) else None
    return None


def parse_policy(raw: bytes, policy_id: str, fetched_at_us: int) -> StsPolicy | None:
    """The policy in the bytes of a policy file; None where it is not one (§3.2)."""
    try:
        lines = raw.decode("utf-8").splitlines()
    except UnicodeDecodeError:
        return None
    fields: dict[str, str] = {}
    mx: list[str] = []
    for line in lines:
        key, colon, value = line.partition(":")
        key, value = key.strip(), value.strip()
        if not colon:
            continue
        if key == "mx":
            mx.append(value.rstrip(".").lower())
        else:
            fields.setdefault(key, value)  # §3.2: of a repeated field the first counts
    mode, age = fields.get("mode"), fields.get("max_age", "")
    if fields.get("version") != "STSv1" or mode not in ("enforce", "testing", "none"):
        return None
    if not age.isdigit() or len(age) > 10 or (mode != "none" and not mx):
        return None
    return StsPolicy(policy_id, mode, tuple(mx), min(int(age), _LONGEST_AGE_S), fetched_at_us)  # type: ignore[arg-type]


class Fetcher(Protocol):
    """Who gets a policy file."""

    async def fetch(self, domain: str) -> bytes | None:
        """The bytes of https://mta-sts.DOMAIN/.well-known/mta-sts.txt, or None; never raises."""


class HttpsFetcher:
    """Gets policy files: certificate verified, no redirect followed (§3.3), bounded in time and size."""

    def __init__(self, client: DnsClient, *, port: int = 443, context: ssl.SSLContext | None = None) -> None:
        self._dns, self._port = client, port
        self._context = context or ssl.create_default_context()
        self._slots = asyncio.Semaphore(20)

    async def fetch(self, domain: str) -> bytes | None:
        name = f"mta-sts.{domain}"
        async with self._slots:
            try:
                async with asyncio.timeout(15):
                    answer = await self._dns.ask(name, dns.rdatatype.A)
                    if not isinstance(answer, Answer) or not answer.records:
                        return None
                    address = answer.records[0].address  # type: ignore[attr-defined]
                    return await self._get(name, address)
            except (OSError, ssl.SSLError, ValueError, EOFError, TimeoutError, asyncio.LimitOverrunError):
                return None

    async def _get(self, name: str, address: str) -> bytes | None:
        reader, writer = await asyncio.open_connection(
            address, self._port, ssl=self._context, server_hostname=name, limit=_MOST_BYTES
        )
        try:
            request = f"GET /.well-known/mta-sts.txt HTTP/1.0\r\nHost: {name}\r\nConnection: close\r\n\r\n"
            writer.write(request.encode("ascii"))
            status = await reader.readline()
            if not re.match(rb"HTTP/1\.[01] 200\b", status):
                return None
            length = _MOST_BYTES
            while (line := (await reader.readline()).strip()) != b"":
                key, _, value = line.partition(b":")
                match key.strip().lower():
                    case b"content-length":
                        length = int(value)
                    case b"transfer-encoding":
                        return None  # we spoke HTTP/1.0: chunks may not come
            if not 0 < length <= _MOST_BYTES:
                return None
            body = b""
            while len(body) < length and (part := await reader.read(length - len(body))):
                body += part
            return body
        finally:
            writer.close()


class PolicyCache:
    """Policies by domain, asked for once and kept for their age; `save` and `load` carry them over a restart."""

    def __init__(self, client: DnsClient, fetcher: Fetcher, clock: Clock) -> None:
        self._dns, self._fetcher, self._clock = client, fetcher, clock
        self._policies: dict[str, StsPolicy] = {}
        self._looked_at: dict[str, float] = {}

    async def policy(self, domain: str) -> StsPolicy | None:
        """The policy in force for `domain`, or None."""
        known = self._policies.get(domain)
        if known is not None and not known.holds_at(self._clock.wall_us()):
            known = None
        now = self._clock.monotonic()
        looked_at = self._looked_at.get(domain)
        if looked_at is not None and now - looked_at < _ASK_AGAIN_S:
            return known
        self._looked_at[domain] = now
        answer = await self._dns.ask(f"_mta-sts.{domain}", dns.rdatatype.TXT)
        texts: list[str] = []
        if isinstance(answer, Answer):
            texts = [b"".join(record.strings).decode("ascii", "replace") for record in answer.records]  # type: ignore[attr-defined]
        policy_id = parse_record(texts)
        if policy_id is None or (known is not None and known.id == policy_id):
            return known  # no record, or no news: what was seen holds for its age
        raw = await self._fetcher.fetch(domain)
        fresh = parse_policy(raw, policy_id, self._clock.wall_us()) if raw is not None else None
        if fresh is None:
            return known
        self._policies[domain] = fresh
        return fresh

    def save(self, path: Path) -> None:
        """Writes what is known, whole or not at all."""
        draft = path.with_suffix(".new")
        draft.write_bytes(msgspec.json.encode(self._policies))
        draft.replace(path)

    def load(self, path: Path) -> None:
        """Reads what an earlier process saved; a missing or broken file is an empty one."""
        try:
            self._policies |= msgspec.json.decode(path.read_bytes(), type=dict[str, StsPolicy])
        except (OSError, msgspec.MsgspecError):
            return
