"""DKIM signing with keys from files. The private operation is the price of a signed message; it releases the GIL."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ed25519, padding, rsa
from cryptography.hazmat.primitives.asymmetric.utils import Prehashed

from engine.compose.keys import write_secret
from engine.config import DkimTable
from engine.errors import EngineError, Exit
from formats.dkim import Algorithm, BodyForm, key_record

KeyType = Literal["rsa", "ed25519"]
_PREHASHED = Prehashed(hashes.SHA256())
_PADDING = padding.PKCS1v15()


class DkimKeyError(EngineError):
    """{file}: {problem}."""

    exit_code = Exit.KEYS
    hint = "`engine dkim-key --help` makes a key and prints the record to publish; the guide is dkim.md."


class Signer:
    """One key. `sign` may be called from several threads."""

    def __init__(self, key: rsa.RSAPrivateKey | ed25519.Ed25519PrivateKey) -> None:
        self._key = key
        # A bound call: asking an abstract class whether the key is one of its own costs at each signature.
        self._call: Callable[[bytes], bytes]
        if isinstance(key, rsa.RSAPrivateKey):
            sign_rsa = key.sign
            self._call = lambda digest: sign_rsa(digest, _PADDING, _PREHASHED)
        else:
            self._call = key.sign  # RFC 8463 §3: over the digest itself

    @property
    def algorithm(self) -> Algorithm:
        """The a= tag of its signatures."""
        return "rsa-sha256" if isinstance(self._key, rsa.RSAPrivateKey) else "ed25519-sha256"

    @property
    def bits(self) -> int:
        """The key's length."""
        return self._key.key_size if isinstance(self._key, rsa.RSAPrivateKey) else 256

    def sign(self, digest: bytes) -> bytes:
        """The signature of the SHA-256 `digest` of a message's signed fields."""
        return self._call(digest)

    def record(self) -> str:
        """The TXT record to publish at SELECTOR._domainkey.DOMAIN."""
        return record_of(self._key)


def record_of(key: rsa.RSAPrivateKey | ed25519.Ed25519PrivateKey) -> str:
    """The TXT record of the key's public half."""
    public = key.public_key()
    if isinstance(public, rsa.RSAPublicKey):
        der = public.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
        return key_record(der, "rsa")
    raw = public.public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw)
    return key_record(raw, "ed25519")


def load_signer(table: DkimTable, folder: Path) -> Signer:
    """The signer of a [[dkim]] table; raises DkimKeyError."""
    path = folder / table.key_file
    try:
        key = serialization.load_pem_private_key(path.read_bytes(), password=None)
    except FileNotFoundError:
        raise DkimKeyError(file=path, problem="the DKIM key is missing") from None
    except OSError as problem:
        raise DkimKeyError(file=path, problem=f"cannot be read: {problem.strerror}") from None
    except (ValueError, TypeError, UnsupportedAlgorithm) as problem:
        raise DkimKeyError(file=path, problem=f"is no private key in PEM without a password: {problem}") from None
    if not isinstance(key, rsa.RSAPrivateKey | ed25519.Ed25519PrivateKey):
        raise DkimKeyError(file=path, problem="is neither an RSA nor an Ed25519 key")
    signer = Signer(key)
    if signer.algorithm != table.algorithm:
        raise DkimKeyError(file=path, problem=f"is a key for {signer.algorithm}, the settings say {table.algorithm}")
    if signer.algorithm == "rsa-sha256" and signer.bits < 1024:
        raise DkimKeyError(file=path, problem=f"has {signer.bits} bits; receivers want 1024 at least, 2048 is usual")
    return signer


def body_form(table: DkimTable) -> BodyForm:
    """How the body is canonicalised."""
    return "relaxed" if table.canonicalization == "relaxed/relaxed" else "simple"


def make_key(path: Path, kind: KeyType, bits: int = 2048) -> str:
    """Writes a new private key (PKCS #8 PEM, mode 0600, never overwriting) and gives the record to publish."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    key: rsa.RSAPrivateKey | ed25519.Ed25519PrivateKey
    if kind == "rsa":
        key = rsa.generate_private_key(public_exponent=65537, key_size=bits)
    else:
        key = ed25519.Ed25519PrivateKey.generate()
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    write_secret(path, pem)
    return record_of(key)
