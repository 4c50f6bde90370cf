"""DNS messages: questions to bytes, and of a reply what a mailer asks for. RFC 1035 §4, RFC 6891 §6.1 (OPT).

    query(id, question)      12 bytes of header (RD), the question, an OPT record with the payload size
    question(name, kind)     QNAME in lower case, QTYPE, QCLASS IN: what a reply must repeat
    read_reply(packet)       code, TC, the answers (MX, A, AAAA, TXT, CNAME) and the negative time to live

Written by hand because it is most of what resolving 300,000 domains costs. Names are text in lower case without the
last dot, "." for the root; a byte of a label that no host name has is written \\\\DDD. Any bytes give a `Reply` or a
ValueError: a name's pointers go back only, and it ends after 255 bytes.
"""

from __future__ import annotations

import re
import socket
import struct
from typing import TypeAlias

import msgspec

A, CNAME, SOA, MX, TXT, AAAA = 1, 5, 6, 15, 16, 28
NOERROR, SERVFAIL, NXDOMAIN, REFUSED = 0, 2, 3, 5
CODES = {0: "NOERROR", 1: "FORMERR", 2: "SERVFAIL", 3: "NXDOMAIN", 4: "NOTIMP", 5: "REFUSED"}
PAYLOAD = 1232  # bytes that pass without fragments (DNS flag day 2020)

_IN, _OPT, _RD, _TC = 1, 41, 0x0100, 0x0200
_HEAD = struct.Struct("!6H")
_RECORD = struct.Struct("!HHIH")
_TAIL = struct.pack("!BHHIH", 0, _OPT, PAYLOAD, 0, 0)
_LABEL = re.compile(rb"[A-Za-z0-9_-]+\Z")
_NAME = re.compile(r"(?:[A-Za-z0-9_-]{1,63}\.)*[A-Za-z0-9_-]{1,63}\.?\Z")
_LONGEST = 255
_WANTED = frozenset({A, CNAME, MX, TXT, AAAA})


class MailHost(msgspec.Struct, frozen=True, gc=False):
    """An MX record."""

    preference: int
    host: str


Value: TypeAlias = MailHost | str | bytes  # MX; an address or an alias; the strings of a TXT record, joined


class Record(msgspec.Struct, frozen=True, gc=False):
    """One answer."""

    name: str
    kind: int
    ttl: int
    value: Value


class Reply(msgspec.Struct, frozen=True, gc=False):
    """What was read. `negative_ttl` is the lesser of the SOA's time to live and its minimum (RFC 2308 §5)."""

    code: int
    is_cut: bool
    answers: tuple[Record, ...]
    has_authority: bool
    negative_ttl: int | None


def question(name: str, kind: int) -> bytes:
    """The question's bytes; raises ValueError for what is no name of ASCII letters, digits, hyphens and underscores."""
    if not _NAME.match(name):
        raise ValueError(f"{name!r} is not a name the DNS can hold")
    labels = name.rstrip(".").lower().encode("ascii").split(b".")
    wire = b"".join([bytes((len(label),)) + label for label in labels]) + b"\0"
    if len(wire) > _LONGEST:
        raise ValueError(f"{name!r} is longer than a name may be")
    return wire + struct.pack("!HH", kind, _IN)


def query(number: int, asked: bytes) -> bytes:
    """A query's bytes: recursion desired, one question, EDNS with our payload size."""
    return _HEAD.pack(number, _RD, 1, 0, 0, 1) + asked + _TAIL


def name_in(wire: bytes) -> str:
    """The name in these bytes, as answers give it; raises ValueError."""
    try:
        return _name(wire, 0)
    except IndexError:
        raise ValueError("a name that is cut short") from None


def read_reply(packet: bytes) -> Reply:
    """The reply in these bytes; raises ValueError where they are none. What follows the records is not looked at."""
    try:
        return _read(packet)
    except (struct.error, IndexError) as problem:
        raise ValueError(f"a DNS message that is cut short: {problem}") from None


def _read(packet: bytes) -> Reply:
    _, flags, questions, answers, authorities, _ = _HEAD.unpack_from(packet)
    at = 12
    for _ in range(questions):
        at = _past_name(packet, at) + 4
    found: list[Record] = []
    for _ in range(answers):
        start = at
        at = _past_name(packet, at)
        kind, class_, ttl, size = _RECORD.unpack_from(packet, at)
        at += 10
        if at + size > len(packet):
            raise ValueError("a DNS record that is cut short")
        if class_ == _IN and kind in _WANTED:
            name = _name(packet, start)
            # RFC 2181 §8: a time to live with its highest bit set is none
            found.append(Record(name, kind, ttl if ttl < 1 << 31 else 0, _value(packet, kind, at, size)))
        at += size
    negative = None
    if not flags & _TC:
        for _ in range(authorities):
            at = _past_name(packet, at)
            kind, _, ttl, size = _RECORD.unpack_from(packet, at)
            at += 10
            if at + size > len(packet):
                raise ValueError("a DNS record that is cut short")
            if kind == SOA:
                after = _past_name(packet, _past_name(packet, at))
                (minimum,) = struct.unpack_from("!I", packet, after + 16)
                least = min(ttl, minimum)
                negative = least if negative is None else min(negative, least)
            at += size
    return Reply(flags & 0xF, bool(flags & _TC), tuple(found), authorities > 0, negative)


def _value(packet: bytes, kind: int, at: int, size: int) -> Value:
    if kind == A:
        if size != 4:
            raise ValueError("an address of another length")
        return f"{packet[at]}.{packet[at + 1]}.{packet[at + 2]}.{packet[at + 3]}"
    if kind == AAAA:
        if size != 16:
            raise ValueError("an address of another length")
        return socket.inet_ntop(socket.AF_INET6, packet[at : at + 16])
    if kind == MX:
        if size < 3:
            raise ValueError("an MX record without a host")
        return MailHost(packet[at] << 8 | packet[at + 1], _name(packet, at + 2))
    if kind == CNAME:
        return _name(packet, at)
    parts, end = [], at + size
    while at < end:
        length = packet[at]
        if at + 1 + length > end:
            raise ValueError("a TXT record that is cut short")
        parts.append(packet[at + 1 : at + 1 + length])
        at += 1 + length
    return b"".join(parts)


def _past_name(packet: bytes, at: int) -> int:
    while (length := packet[at]) != 0:
        if length >= 0xC0:
            return at + 2
        if length > 63:
            raise ValueError("a label of an unknown kind")
        at += 1 + length
    return at + 1


def _name(packet: bytes, at: int) -> str:
    labels: list[str] = []
    room, lowest = _LONGEST, at
    while (length := packet[at]) != 0:
        if length >= 0xC0:
            at = (length & 0x3F) << 8 | packet[at + 1]
            if at >= lowest:
                raise ValueError("a name that points forward")
            lowest = at
            continue
        if length > 63:
            raise ValueError("a label of an unknown kind")
        label = packet[at + 1 : at + 1 + length]
        room -= 1 + length
        if room < 1 or len(label) < length:
            raise ValueError("a name without end")
        labels.append(label.decode("ascii").lower() if _LABEL.match(label) else _escaped(label))
        at += 1 + length
    return ".".join(labels) or "."


def _escaped(label: bytes) -> str:
    """A label with bytes that no host name has: they are visible, and the name is none that could be connected to."""
    return "".join(chr(byte).lower() if _LABEL.match(bytes((byte,))) else f"\\{byte:03d}" for byte in label)
