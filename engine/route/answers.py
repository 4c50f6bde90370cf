"""What the DNS said about a list's domains, kept in a file for `prepare` and `plan`.

Bytes: JSON lines, one object a domain and asking, appended; of several for one domain the last counts. Keys: `domain`,
`kind` ("route", "null_mx", "none", "unroutable", "deferred"), `at_us` (UTC microseconds), and where it is a route
`provider`, `pool`, `hosts` ([name, preference, [address, ...]]), `ttl_s`; else `why`. A last line without its end was
cut by a crash and is asked again.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Literal

import msgspec

from engine.clock import Clock
from engine.route.resolver import Destination, DnsDeferred, NoSuchDomain, NullMx, Resolver, Route, Unroutable

Kind = Literal["route", "null_mx", "none", "unroutable", "deferred"]

_LINES_AT_ONCE = 500


class KeptHost(msgspec.Struct, frozen=True, array_like=True):
    """One MX host as it was."""

    name: str
    preference: int
    addresses: tuple[str, ...]


class Kept(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One domain's answer."""

    domain: str
    kind: Kind
    at_us: int
    provider: str = ""
    pool: str = ""
    hosts: tuple[KeptHost, ...] = ()
    ttl_s: float = 0.0
    why: str = ""

    @property
    def is_final(self) -> bool:
        """Whether asking again soon would say the same: all but a failure for now."""
        return self.kind != "deferred"


def kept(destination: Destination, at_us: int) -> Kept:
    """A destination as it is kept."""
    match destination:
        case Route():
            hosts = tuple(KeptHost(host.name, host.preference, host.addresses) for host in destination.hosts)
            return Kept(
                domain=destination.domain,
                kind="route",
                at_us=at_us,
                provider=destination.provider,
                pool=destination.pool,
                hosts=hosts,
                ttl_s=destination.ttl_s,
            )
        case NullMx():
            return Kept(domain=destination.domain, kind="null_mx", at_us=at_us, why="takes no mail (null MX)")
        case NoSuchDomain():
            return Kept(domain=destination.domain, kind="none", at_us=at_us, why=destination.why)
        case Unroutable():
            return Kept(domain=destination.domain, kind="unroutable", at_us=at_us, why=destination.why)
        case DnsDeferred():
            return Kept(domain=destination.domain, kind="deferred", at_us=at_us, why=destination.why)


def read_answers(path: Path) -> dict[str, Kept]:
    """What is kept, by domain; an absent file is an empty one, lines that are none are passed over."""
    answers: dict[str, Kept] = {}
    decoder = msgspec.json.Decoder(Kept)
    try:
        with path.open("rb") as file:
            for line in file:
                try:
                    answer = decoder.decode(line)
                except msgspec.MsgspecError:
                    continue
                answers[answer.domain] = answer
    except FileNotFoundError:
        pass
    return answers


def still_to_ask(domains: Iterable[str], known: Mapping[str, Kept], *, now_us: int, max_age_s: float) -> list[str]:
    """Those of `domains` without an answer, with one that is too old, or with a failure."""
    oldest = now_us - int(max_age_s * 1e6)
    todo = []
    for domain in domains:
        answer = known.get(domain)
        if answer is None or not answer.is_final or answer.at_us < oldest:
            todo.append(domain)
    return todo


async def ask_all(
    domains: list[str],
    resolver: Resolver,
    path: Path,
    clock: Clock,
    *,
    at_once: int = 300,
    told: Callable[[Kept], None] = lambda _: None,
) -> None:
    """Asks each domain once and appends the answers; may be stopped at any moment and begun again."""
    lines: list[bytes] = []
    encode = msgspec.json.Encoder().encode
    todo: Iterator[str] = iter(domains)

    with path.open("ab") as file:
        if file.tell() and not _ends_in_newline(path):
            file.write(b"\n")  # behind a line that a crash has cut

        def write() -> None:
            file.write(b"".join(lines))
            file.flush()
            lines.clear()

        async def one_after_another() -> None:
            for domain in todo:
                answer = kept(await resolver.route(domain), clock.wall_us())
                lines.append(encode(answer) + b"\n")
                told(answer)
                if len(lines) >= _LINES_AT_ONCE:
                    write()

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(at_once, len(domains))):
                    group.create_task(one_after_another())
        finally:
            write()
            os.fsync(file.fileno())


def _ends_in_newline(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"
