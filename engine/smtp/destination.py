"""Where connections go and how they are held: values, and the destination that `[delivery]` describes."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from engine.config import DeliveryTable
from engine.errors import EngineError, Exit
from engine.smtp.dialogue import Manner, Patience
from engine.smtp.tls import TlsPolicy


class RelayError(EngineError):
    """[delivery] {key}: {problem}."""

    exit_code = Exit.SETTINGS
    hint = "Correct [delivery] in campaign.toml; the guide `smtp.md` shows how a relay is written."


class Host(msgspec.Struct, frozen=True, kw_only=True):
    """One mail host. `addresses` are IP addresses to try in turn; none: the name is resolved when connecting."""

    name: str
    port: int = 25
    addresses: tuple[str, ...] = ()
    implicit_tls: bool = False
    preference: int = 0  # lower first (MX); hosts of one preference take turns

    def __str__(self) -> str:
        return f"{self.name}:{self.port}"

    @property
    def is_this_machine(self) -> bool:
        """Every address it can have is a loopback address."""
        for text in self.addresses or (self.name,):
            try:
                if not ipaddress.ip_address(text).is_loopback:
                    return False
            except ValueError:
                if text.lower() != "localhost":
                    return False
        return True


class Credentials(msgspec.Struct, frozen=True):
    """A login. Its text form shows no password."""

    username: str
    password: str

    def __repr__(self) -> str:
        return f"Credentials({self.username!r}, ***)"

    __str__ = __repr__


class Destination(msgspec.Struct, frozen=True, kw_only=True):
    """A set of hosts that take the same mail, and how we appear to them.

    `key` names it in reports: a provider, or the relay. `source_address` is the local IP address to connect from.
    `greeting_name` goes into EHLO; None: the local address as a literal (RFC 5321 §4.1.3).
    """

    key: str
    hosts: tuple[Host, ...]
    tls: TlsPolicy = TlsPolicy.OPPORTUNISTIC
    tls_ca_file: str | None = None
    credentials: Credentials | None = None
    source_address: str | None = None
    greeting_name: str | None = None

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "tls", TlsPolicy(self.tls))  # a plain "required" will do

    def verifies(self, host: Host) -> bool:
        """Whether the host's certificate must be good (see `tls.py`)."""
        if self.tls is TlsPolicy.VERIFIED:
            return True
        return self.credentials is not None and self.tls is TlsPolicy.REQUIRED and not host.is_this_machine


class ConnectionLimits(msgspec.Struct, frozen=True, kw_only=True):
    """How connections are held. All of it may change while they are open."""

    messages_per_connection: int = 1000
    manner: Manner = Manner()
    patience: Patience = Patience()
    connect_timeout_s: float = 10.0  # one address
    handshake_timeout_s: float = (
        60.0  # greeting, EHLO, TLS and login together; RFC 5321 grants the greeting five minutes
    )
    idle_timeout_s: float = 30.0
    session_timeout_s: float = 3600.0  # a connection in use this long ends after what is in hand

    @classmethod
    def of(cls, delivery: DeliveryTable) -> ConnectionLimits:
        """As `[delivery]` says."""
        return cls(
            messages_per_connection=delivery.messages_per_connection,
            manner=Manner(depth=delivery.pipeline_depth, pipelining=delivery.pipelining, chunking=delivery.chunking),
            patience=Patience(dot_s=delivery.dot_timeout.seconds),
            connect_timeout_s=delivery.connect_timeout.seconds,
            idle_timeout_s=delivery.idle_timeout.seconds,
        )


_PORTS = {"smtp": 25, "smtps": 465}


def relay_destination(delivery: DeliveryTable, environ: Mapping[str, str], *, folder: Path = Path()) -> Destination:
    """The relay that `[delivery]` names, with its password from the environment or a file; raises RelayError.

    `folder` is what a relative `password_file` or `tls_ca_file` starts from.
    """
    try:
        url = urlsplit(delivery.relay)
        name, port = url.hostname, url.port
    except ValueError as problem:
        raise RelayError(key="relay", problem=str(problem)) from None
    if url.scheme not in _PORTS or not name or url.path.strip("/") or url.query:
        raise RelayError(key="relay", problem='expected "smtp://HOST:PORT" or "smtps://HOST:PORT"')
    if url.username or url.password:
        raise RelayError(key="relay", problem="a login does not belong into the URL: use username and password_env")
    host = Host(name=name, port=port or _PORTS[url.scheme], implicit_tls=url.scheme == "smtps")
    policy = TlsPolicy(delivery.tls)
    if host.implicit_tls and policy in (TlsPolicy.OFF, TlsPolicy.OPPORTUNISTIC):
        policy = TlsPolicy.REQUIRED
    ca_file = folder / delivery.tls_ca_file if delivery.tls_ca_file else None
    if ca_file is not None and not ca_file.is_file():
        raise RelayError(key="tls_ca_file", problem=f"there is no file {ca_file}")
    return Destination(
        key=str(host),
        hosts=(host,),
        tls=policy,
        tls_ca_file=str(ca_file) if ca_file else None,
        credentials=_credentials(delivery, environ, folder),
        greeting_name=greeting_name(delivery.greeting_name),
    )


def greeting_name(wanted: str | None) -> str | None:
    """The name for EHLO: the wanted one, else this machine's where it is a full one, else None (a literal is used)."""
    if wanted is not None:
        if not (wanted.isascii() and wanted.isprintable() and wanted.strip()) or " " in wanted:
            raise RelayError(key="greeting_name", problem=f"{wanted!r} is not a host name")
        return wanted
    name = socket.getfqdn()
    return name if "." in name and name.isascii() and not name.startswith("localhost") else None


def _credentials(delivery: DeliveryTable, environ: Mapping[str, str], folder: Path) -> Credentials | None:
    if delivery.username is None:
        if delivery.password_env or delivery.password_file:
            raise RelayError(key="username", problem="a password is configured but no username")
        return None
    if delivery.password_env:
        password = environ.get(delivery.password_env)
        if not password:
            raise RelayError(key="password_env", problem=f"the environment variable {delivery.password_env} is not set")
    elif delivery.password_file:
        path = folder / delivery.password_file
        try:
            password = path.read_text("utf-8").rstrip("\r\n")
        except (OSError, UnicodeDecodeError) as problem:
            raise RelayError(key="password_file", problem=f"cannot read {path}: {_reason(problem)}") from None
        if not password:
            raise RelayError(key="password_file", problem=f"{path} is empty")
    else:
        raise RelayError(key="username", problem="a username needs password_env or password_file")
    return Credentials(delivery.username, password)


def _reason(problem: Exception) -> str:
    return problem.strerror or "unreadable" if isinstance(problem, OSError) else "it is not UTF-8 text"
