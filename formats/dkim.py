"""DKIM: canonical forms, what a signature covers, the field's bytes. Knows no keys: gives digests, takes signatures.

RFC 6376 (§3.4 canonicalisation, §3.5 the field, §3.7 the hashes, §5.4.2 and §8.15 over-signing), RFC 8301 (no SHA-1,
RSA keys of 1024 and more), RFC 8463 (ed25519-sha256: PureEdDSA over the SHA-256 of what RSA would sign).

The signature field is written in the form that relaxed canonicalisation leaves alone, apart from its folds.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

Algorithm = Literal["rsa-sha256", "ed25519-sha256"]
BodyForm = Literal["simple", "relaxed"]

# Listed once more than they stand in the message, so that none can be added without breaking the signature.
OVERSIGNED = (
    "from",
    "to",
    "cc",
    "reply-to",
    "subject",
    "date",
    "message-id",
    "mime-version",
    "content-type",
    "content-transfer-encoding",
    "list-id",
    "list-unsubscribe",
    "list-unsubscribe-post",
    "feedback-id",
    "cfbl-address",
)
# Never signed: relays write them, or rewrite them (RFC 6376 §5.4.1).
UNSIGNED = frozenset({"return-path", "received", "comments", "keywords", "bcc", "resent-bcc", "dkim-signature"})

_WSP_RUN = re.compile(r"[ \t]+")
_WSP_RUN_BYTES = re.compile(rb"[ \t]+")
_LINE_END_WSP = re.compile(rb"[ \t]+(?=\r\n)")


def relaxed_field(name: str, value: str) -> str:
    """A field in relaxed form (§3.4.2), CRLF included: unfolded, blanks as one, none at the ends."""
    if "\r" in value:
        value = value.replace("\r\n", "")
    if "  " in value or "\t" in value or value[:1] == " " or value[-1:] == " ":
        value = _WSP_RUN.sub(" ", value).strip(" \t")
    return f"{name.lower()}:{value}\r\n"


def simple_body(body: bytes) -> bytes:
    """A body in simple form (§3.4.3): one CRLF at its end, and nothing else changed."""
    if body.endswith(b"\r\n") and not body.endswith(b"\r\n\r\n"):
        return body
    end = len(body)
    while body[end - 2 : end] == b"\r\n" and end >= 2:
        end -= 2
    return body[:end] + b"\r\n"


def relaxed_body(body: bytes) -> bytes:
    """A body in relaxed form (§3.4.4). An empty one stays empty. By regular expression: not for once a message."""
    text = _LINE_END_WSP.sub(b"", body if body.endswith(b"\r\n") or not body else body + b"\r\n")
    text = _WSP_RUN_BYTES.sub(b" ", text)
    while text.endswith(b"\r\n\r\n"):
        text = text[:-2]
    return b"" if text == b"\r\n" else text


def empty_body_hash(form: BodyForm) -> str:
    """bh= of a message without body."""
    return base64.b64encode(hashlib.sha256(b"\r\n" if form == "simple" else b"").digest()).decode()


class BodyHasher:
    """bh= of bodies that begin alike: the common beginning is hashed once.

    The body must be in canonical form already but for empty lines at its end: CRLF, and for relaxed no blanks that
    would go.
    """

    def __init__(self, prefix: bytes, form: BodyForm) -> None:
        self._prefix = prefix
        self._midstate = hashlib.sha256(prefix)
        self._form: BodyForm = form

    def digest(self, pieces: Sequence[bytes]) -> bytes:
        """SHA-256 of the canonical form of the joined pieces, which must begin with the prefix.

        The pieces are not joined where they end like a multipart: what rows share is read from where it lies, mostly
        the processor's cache.
        """
        if len(pieces) > 1 and pieces[0] == self._prefix and pieces[-1].endswith(b"--\r\n"):
            state = self._midstate.copy()
            for piece in pieces[1:]:
                state.update(piece)
            return state.digest()
        body = b"".join(pieces)
        if body[-4:] == b"\r\n\r\n" or len(body) < len(self._prefix) + 4 or body == b"\r\n":
            stripped = simple_body(body)
            return hashlib.sha256(b"" if self._form == "relaxed" and stripped == b"\r\n" else stripped).digest()
        state = self._midstate.copy()
        state.update(memoryview(body)[len(self._prefix) :])
        return state.digest()


class SignatureTemplate(msgspec.Struct, frozen=True):
    """A DKIM-Signature field but for time, body hash and signature; each piece as written and in relaxed form."""

    before_time: str
    before_hash: str
    relaxed_before_time: str
    relaxed_before_hash: str
    body_form: BodyForm

    def unsigned(self, now_s: int, body_digest: bytes) -> tuple[str, str]:
        """The field up to and with `b=`: as written, and in relaxed form without CRLF, ready to be hashed."""
        hash_text = binascii.b2a_base64(body_digest, newline=False).decode("ascii")
        return (
            f"{self.before_time}{now_s}{self.before_hash}{hash_text};\r\n b=",
            f"{self.relaxed_before_time}{now_s}{self.relaxed_before_hash}{hash_text}; b=",
        )


def signature_template(
    *, domain: str, selector: str, algorithm: Algorithm, body_form: BodyForm, signed: Sequence[str]
) -> SignatureTemplate:
    """The field's template. `signed` are the names for h=, in the order in which their fields are hashed."""
    lines: list[str] = []
    line = "h=" + signed[0]
    for name in signed[1:]:
        # h= may fold beside its colons (§3.5, [FWS] ":" [FWS]).
        if len(line) + len(name) > 70:
            lines.append(line + ":")
            line = name
        else:
            line += ":" + name
    lines.append(line + ";")
    head = f"DKIM-Signature: v=1; a={algorithm}; c=relaxed/{body_form};\r\n d={domain}; s={selector}; t="
    middle = ";\r\n " + "\r\n ".join(lines) + "\r\n bh="
    relaxed_head = head.replace("\r\n ", " ").replace("DKIM-Signature: ", "dkim-signature:")
    return SignatureTemplate(head, middle, relaxed_head, middle.replace("\r\n ", " "), body_form)


def signed_names(present: Iterable[str]) -> list[str]:
    """The names for h=: every field present that may be signed, then the over-signed ones once more."""
    names = [name.lower() for name in present if name.lower() not in UNSIGNED]
    return [*names, *OVERSIGNED]


def signature_field(unsigned: str, signature: bytes) -> str:
    """The finished field, CRLF included: `unsigned` and the signature in folded base64."""
    text = base64.b64encode(signature).decode("ascii")
    first, rest = text[:72], text[72:]
    return unsigned + first + "".join(f"\r\n {rest[at : at + 74]}" for at in range(0, len(rest), 74)) + "\r\n"


def key_record(public_key: bytes, key_type: Literal["rsa", "ed25519"]) -> str:
    """The TXT record's text: of RSA the SubjectPublicKeyInfo in DER, of Ed25519 the 32 bytes (RFC 8463 §4)."""
    return f"v=DKIM1; k={key_type}; p={base64.b64encode(public_key).decode('ascii')}"


def record_strings(text: str) -> list[str]:
    """The record in character-strings of at most 255 octets (RFC 1035 §3.3.14)."""
    return [text[at : at + 255] for at in range(0, len(text), 255)]
