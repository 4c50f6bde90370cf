"""TLS by policy: which contexts we offer to whom, and what a finished handshake came to.

RFC 3207 (STARTTLS), 8314 (implicit TLS), 7435 (opportunistic security).

    off             plain text, also where STARTTLS is offered
    opportunistic   TLS where offered and working, unverified; plain text where it broke, remembered per host
    required        TLS or nothing; the certificate is not looked at (few MX hosts show one that fits)
    verified        TLS with a certificate for the host's name from a trusted authority, or nothing

A password leaves only over verified TLS, or to this very machine, or in the clear where "off" says so in so many words:
`required` with a login therefore verifies.
"""

from __future__ import annotations

import ssl
from enum import StrEnum
from functools import lru_cache

import msgspec


class TlsPolicy(StrEnum):
    """What the connection must be before a message may go over it."""

    OFF = "off"
    OPPORTUNISTIC = "opportunistic"
    REQUIRED = "required"
    VERIFIED = "verified"


class TlsState(msgspec.Struct, frozen=True):
    """What was agreed with the server."""

    version: str
    cipher: str
    verified: bool


@lru_cache(maxsize=32)
def client_context(verify: bool, ca_file: str | None = None) -> ssl.SSLContext:
    """The context for one policy; made once, for loading the authorities takes some 20 ms.

    Raises OSError or ssl.SSLError where `ca_file` cannot be read.
    """
    if verify:
        return ssl.create_default_context(ssl.Purpose.SERVER_AUTH, cafile=ca_file)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    # Unverified TLS keeps out only who listens; old keys and signatures among the MX hosts beat plain text.
    context.set_ciphers("DEFAULT:@SECLEVEL=1")
    return context


def explain(error: BaseException) -> str:
    """A TLS failure in words: the verification's own, else the library's reason."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"certificate not trusted: {error.verify_message}"
    if isinstance(error, ssl.SSLError):
        return (error.reason or str(error)).replace("_", " ").lower()
    return str(error) or type(error).__name__
