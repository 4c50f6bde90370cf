"""Mailbox syntax, IDNA, and the canonical form that dedup and suppression compare.

RFC 5321 §4.1.2 (Mailbox), §4.5.3.1 (limits), RFC 6531 (UTF-8 local parts), UTS 46 non-transitional / IDNA 2008
(RFC 5891) for domains: `straße.de` is xn--strae-oqa.de and never strasse.de.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import idna
import msgspec

_ATEXT = r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~\-\u0080-\U0010ffff]"
_DOT_STRING = re.compile(rf"{_ATEXT}+(?:\.{_ATEXT}+)*\Z")
_QUOTED = re.compile(r'"(?:[ !#-\[\]-~]|\\[ -~])*"\Z')
_LDH = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?\Z")
# An address that needs no thought: ASCII, a top-level domain that begins with a letter, and (asked apart) at most 64
# characters, so that no limit of §4.5.3.1 can be exceeded. Nineteen of twenty in a real list are so.
PLAIN_PATTERN = (
    r"^([A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+(?:\.[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+)*)"
    r"@((?:[A-Za-z0-9]+(?:-+[A-Za-z0-9]+)*\.)+[A-Za-z][A-Za-z0-9]*(?:-+[A-Za-z0-9]+)*)$"
)
PLAIN_MOST = 64
_PLAIN = re.compile(PLAIN_PATTERN)
_CONTROL = re.compile("[\\x00-\\x1f\\x7f\\ud800-\\udfff]")
# Trimmed from both ends before anything is read: white space of any script, zero-width characters, byte-order marks.
PADDING = "\u200b\u200c\u200d\u2060\ufeff\u00ad"


class AddressError(ValueError):
    """Why a text is not a mailbox, in words for the report."""


class Mailbox(msgspec.Struct, frozen=True):
    """A recipient's address, ready for RCPT TO.

    `local` as it was written (case kept), `domain` as lower-case A-labels.
    """

    local: str
    domain: str

    def __str__(self) -> str:
        return f"{self.local}@{self.domain}"

    @property
    def needs_smtputf8(self) -> bool:
        """The local part is not ASCII: only a server that offers SMTPUTF8 can take it (RFC 6531)."""
        return not self.local.isascii()


def clean(text: str) -> str:
    """`text` without the white space and invisible characters that exports leave around an address."""
    while True:
        trimmed = text.strip().strip(PADDING)
        if trimmed == text:
            return text
        text = trimmed


def domain_to_ascii(domain: str) -> str:
    """The domain as lower-case A-labels; raises AddressError."""
    if domain.isascii():
        name = domain.lower()
    else:
        try:
            name = idna.encode(domain, uts46=True, transitional=False).decode("ascii")
        except (idna.IDNAError, UnicodeError) as problem:
            raise AddressError(f"domain {domain!r} is not a valid international name: {problem}") from None
    if len(name) > 255:
        raise AddressError("domain is longer than 255 octets")
    labels = name.split(".")
    if len(labels) < 2:
        raise AddressError(f"domain {domain!r} has no dot")
    for label in labels:
        if not _LDH.match(label):
            raise AddressError(f"domain label {label!r} is not a host name label")
    if labels[-1].isdigit():
        raise AddressError(f"domain {domain!r} ends in a number")
    return name


def parse_mailbox(text: str | None) -> Mailbox:
    """The mailbox that `text` names, after `clean`; raises AddressError with the reason.

    Refused: null, empty, several addresses, display names, address literals, control characters, a local part over
    64 octets, a path over 254.
    """
    if text is None:
        raise AddressError("address is null")
    text = clean(text)
    if not text:
        raise AddressError("address is empty")
    if _CONTROL.search(text):
        raise AddressError("address contains a control character")
    local, at, domain = text.rpartition("@")
    if not at:
        raise AddressError("address has no @")
    if not (_DOT_STRING.match(local) or _QUOTED.match(local)):
        raise AddressError(f"local part {local!r} is not a dot-string or quoted-string")
    if not local.isascii() and any(c.isspace() or not c.isprintable() for c in local):
        raise AddressError("local part contains an invisible character")
    if len(local.encode()) > 64:
        raise AddressError("local part is longer than 64 octets")
    mailbox = Mailbox(local, domain_to_ascii(domain))
    if len(str(mailbox).encode()) > 254:
        raise AddressError("address is longer than 254 octets")
    return mailbox


def parse_mailboxes(texts: Sequence[str | None]) -> list[Mailbox | AddressError]:
    """As `parse_mailbox` for each of `texts`, errors as values, in well under a microsecond for a plain address."""
    plain = _PLAIN.fullmatch
    parsed: list[Mailbox | AddressError] = []
    for text in texts:
        if text is not None and len(text) <= PLAIN_MOST and (found := plain(text)) is not None:
            local, domain = found.groups()
            parsed.append(Mailbox(local, domain.lower()))
        else:
            parsed.append(_parse_or_why_not(text))
    return parsed


def _parse_or_why_not(text: str | None) -> Mailbox | AddressError:
    try:
        return parse_mailbox(text)
    except AddressError as problem:
        # A traceback holds the callers' frames, and with them whole batches until the garbage collector comes by.
        return problem.with_traceback(None)


def canonical(mailbox: Mailbox, *, fold_local: bool = True) -> str:
    """The form that dedup and suppression compare: domain as A-labels, local part folded to lower case by default.

    RFC 5321 §2.4 lets a host tell cases apart; no large provider does, and a suppression that misses `Ann@` after
    `ann@` left costs more than one that catches both.
    """
    local = mailbox.local.casefold() if fold_local else mailbox.local
    return f"{local}@{mailbox.domain}"
