"""MTA-STS: a domain's published word that its MX hosts speak verified TLS. RFC 8461.

A policy is found in two steps: a TXT record says that there is one and which (`id`), an HTTPS file says what. A policy
once seen holds for its `max_age`, whatever the DNS says later: an attacker who hides the record must not weaken it
(§10.2). `enforce` means: only the listed hosts, only with a certificate that verifies, else the message waits.
DANE (RFC 7672) needs a validating resolver in the same process and is not implemented.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import ssl
from collections.abc import Callable
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
_FETCH_S = 15.0  # for the whole of it, however many addresses there are
_ADDRESSES = 2  # tried of each family
_FETCHES = 100  # at once: one that hangs must not hold up the others
_REMEMBERED = 500_000


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

    def __init__(
        self,
        client: DnsClient,
        *,
        port: int = 443,
        context: ssl.SSLContext | None = None,
        is_usable: Callable[[str], bool] = lambda address: True,
    ) -> None:
        """`is_usable`: which addresses may be asked. A stranger's name must not make us speak to our own network."""
        self._dns, self._port, self._is_usable = client, port, is_usable
        self._context = context or ssl.create_default_context()
        self._slots = asyncio.Semaphore(_FETCHES)

    async def fetch(self, domain: str) -> bytes | None:
        name = f"mta-sts.{domain}"
        async with self._slots:
            try:
                async with asyncio.timeout(_FETCH_S):
                    for kind in (dns.rdatatype.A, dns.rdatatype.AAAA):
                        answer = await self._dns.ask(name, kind)
                        found: list[str] = []
                        if isinstance(answer, Answer):
                            found = [record.address for record in answer.records]  # type: ignore[attr-defined]
                        for address in [address for address in found if self._is_usable(address)][:_ADDRESSES]:
                            with contextlib.suppress(
                                OSError, ssl.SSLError, ValueError, EOFError, asyncio.LimitOverrunError
                            ):
                                return await self._get(name, address)
            except TimeoutError:
                pass
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
    """Policies by domain, asked for once and kept for their age, in `file` over restarts.

    The file has a line of JSON for each policy that was fetched, [domain, policy], the last one of a domain counts.
    Lines are only ever appended, so that several processes may share it; one that a crash cut short is not read.
    """

    def __init__(self, client: DnsClient, fetcher: Fetcher, clock: Clock, file: Path | None = None) -> None:
        self._dns, self._fetcher, self._clock, self._file = client, fetcher, clock, file
        self._policies: dict[str, StsPolicy] = _read(file) if file is not None else {}
        self._looked_at: dict[str, float] = {}
        self._asking: dict[str, asyncio.Task[None]] = {}

    async def policy(self, domain: str) -> StsPolicy | None:
        """The policy in force for `domain`, or None."""
        now = self._clock.monotonic()
        looked_at = self._looked_at.get(domain)
        task = self._asking.get(domain)
        if task is None and (looked_at is None or now - looked_at >= _ASK_AGAIN_S):
            if len(self._looked_at) >= _REMEMBERED:
                self._looked_at.clear()
            self._looked_at[domain] = now
            task = self._asking[domain] = asyncio.ensure_future(self._look(domain))
            task.add_done_callback(lambda _: self._asking.pop(domain, None))
        if task is not None:
            await asyncio.shield(task)  # whoever asks meanwhile must not go by what is not known yet
        return self._known(domain)

    def _known(self, domain: str) -> StsPolicy | None:
        known = self._policies.get(domain)
        return known if known is not None and known.holds_at(self._clock.wall_us()) else None

    async def _look(self, domain: str) -> None:
        answer = await self._dns.ask(f"_mta-sts.{domain}", dns.rdatatype.TXT)
        texts: list[str] = []
        if isinstance(answer, Answer):
            # The strings of a record are one text (§3.1).
            texts = [b"".join(record.strings).decode("ascii", "replace") for record in answer.records]  # type: ignore[attr-defined]
        policy_id, known = parse_record(texts), self._known(domain)
        if policy_id is None or (known is not None and known.id == policy_id):
            return  # no record, or no news: what was seen holds for its age
        raw = await self._fetcher.fetch(domain)
        fresh = parse_policy(raw, policy_id, self._clock.wall_us()) if raw is not None else None
        if fresh is not None:
            self._policies[domain] = fresh
            self._keep(domain, fresh)

    def _keep(self, domain: str, policy: StsPolicy) -> None:
        if self._file is None:
            return
        line = msgspec.json.encode((domain, policy)) + b"\n"
        # A full disk stops attempts elsewhere; without the file a policy is fetched again.
        with contextlib.suppress(OSError):
            handle = os.open(self._file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            try:
                os.write(handle, line)
            finally:
                os.close(handle)


def _read(file: Path) -> dict[str, StsPolicy]:
    """What earlier processes learned; what cannot be read is as if it were not there."""
    policies: dict[str, StsPolicy] = {}
    try:
        lines = file.read_bytes().split(b"\n")
    except OSError:
        return policies
    for line in lines:
        with contextlib.suppress(msgspec.MsgspecError):
            domain, policy = msgspec.json.decode(line, type=tuple[str, StsPolicy])
            policies[domain] = policy
    return policies
