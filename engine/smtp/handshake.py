"""From nothing to a connection on which messages may go: connect, greeting, EHLO, TLS, login.

aiosmtplib speaks this part, in lock-step; afterwards its transport is handed over and the client forgotten. What ends
in failure here is never about a recipient.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import socket
import ssl
from enum import StrEnum
from typing import Any, cast

import aiosmtplib
import msgspec

from engine.smtp.destination import ConnectionLimits, Credentials, Destination, Host
from engine.smtp.dialogue import Offer, Stage
from engine.smtp.tls import TlsPolicy, TlsState, client_context, explain
from formats.reply import Reply, clean_text


class Ended(StrEnum):
    """Why a connection ended or never came to be."""

    COULD_NOT_CONNECT = "could not connect"  # no address answered
    REFUSED = "refused"  # greeting or EHLO with 4xx or 5xx, or no SMTP at all
    TLS_FAILED = "tls failed"
    AUTH_REFUSED = "login refused"  # must stop the run: every further try may lock the account
    AUTH_DEFERRED = "login deferred"  # 4xx to AUTH: the server's trouble, not the password's
    FINISHED = "finished"  # its number of messages is reached, or we asked it to close
    IDLE = "idle"
    CLOSED = "closed by the server"  # 421, or a hang-up between messages
    BROKEN = "connection lost"
    TIMED_OUT = "timed out"
    OUT_OF_STEP = "out of step"  # the server said what no rule allows
    ABORTED = "aborted"


class Failure(msgspec.Struct, frozen=True):
    """Why there is no connection."""

    why: Ended
    stage: Stage
    reply: Reply | None
    error: str
    tls_broken: bool = False  # plain text may be tried, where the policy allows it


class Connected(msgspec.Struct):
    """An open, greeted, perhaps encrypted and logged-in connection, paused for its new protocol."""

    transport: asyncio.Transport
    host: Host
    address: str
    offer: Offer
    tls: TlsState | None
    greeting: Reply
    extensions: dict[str, str]
    auth_methods: tuple[str, ...]
    login: str | None  # the mechanism used


class _Stop(Exception):
    """Internal: carries the Failure out of the nested steps."""

    def __init__(self, failure: Failure) -> None:
        self.failure = failure


async def establish(
    destination: Destination, host: Host, limits: ConnectionLimits, *, plain: bool = False
) -> Connected | Failure:
    """A connection to `host`, or why there is none. `plain`: its TLS is known to be broken and policy lets it go."""
    client: aiosmtplib.SMTP | None = None
    at = [Stage.CONNECT]
    try:
        sock, address = await _connect(destination, host, limits)
        try:
            async with asyncio.timeout(limits.handshake_timeout_s):
                client = _client(destination, host, sock, limits)
                return await _shake_hands(client, destination, host, address, at, plain)
        except BaseException:
            _cut(client, sock)
            raise
    except _Stop as stop:
        return stop.failure
    except TimeoutError:
        tls_broken = at[0] is Stage.STARTTLS
        why = Ended.TLS_FAILED if tls_broken else Ended.TIMED_OUT
        return Failure(why, at[0], None, f"no answer within {limits.handshake_timeout_s:g} s", tls_broken)


def _cut(client: aiosmtplib.SMTP | None, sock: socket.socket) -> None:
    """Let go of a connection that came to nothing.

    Its transport closes the socket, not we: a descriptor that is closed while the loop still watches it is soon the
    next connection's, and what the old transport then does at its end it does to that one. A TLS transport that is
    closed in good order waits for the peer's last words; a socket shut down both ways gives it an end at once.
    """
    if client is None:
        sock.close()
        return
    transport = cast("asyncio.Transport | None", client.transport)
    if transport is not None:
        transport.abort()
    client.close()
    if sock.fileno() >= 0:
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
        # Where no transport came to be nobody else closes it; to close one twice does no harm.
        asyncio.get_running_loop().call_later(1.0, sock.close)


async def _connect(destination: Destination, host: Host, limits: ConnectionLimits) -> tuple[socket.socket, str]:
    loop = asyncio.get_running_loop()
    addresses = host.addresses or await _resolve(host, limits)
    problem = "no address"
    for address in addresses:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            # Content and the envelope behind it leave in one write; nothing is gained by waiting for more.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if destination.source_address is not None:
                sock.bind((destination.source_address, 0))
            async with asyncio.timeout(limits.connect_timeout_s):
                await loop.sock_connect(sock, (address, host.port))
            return sock, address
        except TimeoutError:
            problem = f"{address}: no answer within {limits.connect_timeout_s:g} s"
            sock.close()
        except OSError as error:
            problem = f"{address}: {error.strerror or error}"
            sock.close()
        except BaseException:
            sock.close()
            raise
    raise _Stop(Failure(Ended.COULD_NOT_CONNECT, Stage.CONNECT, None, problem))


async def _resolve(host: Host, limits: ConnectionLimits) -> tuple[str, ...]:
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(limits.connect_timeout_s):
            found = await loop.getaddrinfo(host.name, host.port, type=socket.SOCK_STREAM)
    except TimeoutError:
        problem = f"the name {host.name} was not resolved within {limits.connect_timeout_s:g} s"
        raise _Stop(Failure(Ended.COULD_NOT_CONNECT, Stage.CONNECT, None, problem)) from None
    except (OSError, UnicodeError) as error:
        problem = f"the name {host.name} cannot be resolved: {error}"
        raise _Stop(Failure(Ended.COULD_NOT_CONNECT, Stage.CONNECT, None, problem)) from None
    return tuple(dict.fromkeys(str(entry[4][0]) for entry in found))


def _client(destination: Destination, host: Host, sock: socket.socket, limits: ConnectionLimits) -> aiosmtplib.SMTP:
    local = sock.getsockname()[0]
    name = destination.greeting_name or (f"[IPv6:{local}]" if ":" in local else f"[{local}]")
    context: ssl.SSLContext | None = None
    if host.implicit_tls or destination.tls is not TlsPolicy.OFF:
        try:
            context = client_context(destination.verifies(host), destination.tls_ca_file)
        except (OSError, ssl.SSLError) as error:
            problem = f"the authorities in {destination.tls_ca_file} cannot be read: {explain(error)}"
            raise _Stop(Failure(Ended.TLS_FAILED, Stage.STARTTLS, None, problem)) from None
    return aiosmtplib.SMTP(
        hostname=host.name,
        sock=sock,
        local_hostname=name,
        timeout=limits.handshake_timeout_s,
        use_tls=host.implicit_tls,
        start_tls=False,
        tls_context=context,
    )


async def _shake_hands(
    client: aiosmtplib.SMTP, destination: Destination, host: Host, address: str, at: list[Stage], plain: bool
) -> Connected:
    at[0] = Stage.STARTTLS if host.implicit_tls else Stage.GREETING
    try:
        greeting = await client.connect()
    except aiosmtplib.SMTPResponseException as refused:
        raise _Stop(_refusal(Stage.GREETING, refused)) from None
    except aiosmtplib.SMTPException as error:
        cause = error.__cause__
        if isinstance(cause, ssl.SSLError) or (host.implicit_tls and client.protocol is None and cause is not None):
            raise _Stop(Failure(Ended.TLS_FAILED, Stage.STARTTLS, None, explain(cause), True)) from None
        raise _Stop(_no_answer(Stage.GREETING, error)) from None
    at[0] = Stage.EHLO
    await _greet(client)
    if not host.implicit_tls:
        at[0] = Stage.STARTTLS
        await _start_tls(client, destination, plain)
        if client.is_ehlo_or_helo_needed:
            at[0] = Stage.EHLO
            await _greet(client)  # what was offered before TLS is not believed (RFC 3207 §4.2)
    login = None
    methods = tuple(client.server_auth_methods)
    if destination.credentials is not None:
        at[0] = Stage.AUTH
        login = await _log_in(client, destination, host, destination.credentials)
    protocol = client.protocol
    transport = cast("asyncio.Transport | None", client.transport)
    if protocol is None or transport is None or transport.is_closing():
        raise _Stop(Failure(Ended.CLOSED, Stage.EHLO, None, "the server hung up after its greeting"))
    if getattr(protocol, "_buffer", b""):
        # A reply beyond those we asked for would answer our first MAIL.
        raise _Stop(Failure(Ended.OUT_OF_STEP, at[0], None, "the server sent more replies than it was asked for"))
    transport.pause_reading()
    extensions = dict(client.esmtp_extensions)
    return Connected(
        transport=transport,
        host=host,
        address=address,
        offer=Offer.read(extensions),
        tls=_tls_state(transport, destination.verifies(host)),
        greeting=Reply(greeting.code, clean_text(greeting.message.encode("utf-8", "replace"))),
        extensions=extensions,
        auth_methods=methods,
        login=login,
    )


async def _greet(client: aiosmtplib.SMTP) -> None:
    try:
        try:
            await client.ehlo()
        except aiosmtplib.SMTPHeloError as refused:
            if refused.code not in (500, 501, 502, 504) or not client.is_connected:
                raise
            await client.helo()  # an old server; it offers nothing
    except aiosmtplib.SMTPResponseException as refused:
        raise _Stop(_refusal(Stage.EHLO, refused)) from None
    except aiosmtplib.SMTPException as error:
        raise _Stop(_no_answer(Stage.EHLO, error)) from None


async def _start_tls(client: aiosmtplib.SMTP, destination: Destination, plain: bool) -> None:
    policy = destination.tls
    if policy is TlsPolicy.OFF or (plain and policy is TlsPolicy.OPPORTUNISTIC):
        return
    if not client.supports_extension("starttls"):
        if policy is TlsPolicy.OPPORTUNISTIC:
            return
        problem = f'the server does not offer STARTTLS and tls = "{policy}"'
        raise _Stop(Failure(Ended.TLS_FAILED, Stage.STARTTLS, None, problem))
    try:
        await client.starttls()
    except aiosmtplib.SMTPResponseException as refused:
        failure = _refusal(Stage.STARTTLS, refused)
        raise _Stop(msgspec.structs.replace(failure, why=Ended.TLS_FAILED, tls_broken=True)) from None
    except (aiosmtplib.SMTPException, OSError) as error:
        cause = error.__cause__ or error
        # A certificate that is not trusted is no broken TLS: under `opportunistic` none is looked at.
        raise _Stop(Failure(Ended.TLS_FAILED, Stage.STARTTLS, None, explain(cause), True)) from None


def _tls_state(transport: asyncio.Transport, verified: bool) -> TlsState | None:
    sslobj: Any = transport.get_extra_info("ssl_object")
    if sslobj is None:
        return None
    cipher = sslobj.cipher()
    return TlsState(sslobj.version() or "?", cipher[0] if cipher else "?", verified)


async def _log_in(client: aiosmtplib.SMTP, destination: Destination, host: Host, login: Credentials) -> str:
    """The mechanism that worked. Stops at the first refusal: more tries with a bad password lock accounts."""
    encrypted = client.get_transport_info("sslcontext") is not None
    if not (encrypted or host.is_this_machine or destination.tls is TlsPolicy.OFF):
        problem = "the connection is not encrypted, and a password must not go over it"
        raise _Stop(Failure(Ended.TLS_FAILED, Stage.AUTH, None, problem))
    if destination.tls is TlsPolicy.OPPORTUNISTIC and not host.is_this_machine:
        problem = 'tls = "opportunistic" verifies nobody, and a password must not go to a stranger: use "verified"'
        raise _Stop(Failure(Ended.TLS_FAILED, Stage.AUTH, None, problem))
    offered = client.server_auth_methods
    order = ("plain", "login", "cram-md5") if encrypted else ("cram-md5", "plain", "login")
    usable = [method for method in order if method in offered]
    if not usable:
        names = ", ".join(offered).upper() or "none"
        problem = f"no common login mechanism: the server offers {names}, we know PLAIN, LOGIN and CRAM-MD5"
        raise _Stop(Failure(Ended.AUTH_REFUSED, Stage.AUTH, None, problem))
    for method in usable:
        try:
            match method:
                case "plain":
                    await client.auth_plain(login.username, login.password)
                case "login":
                    await client.auth_login(login.username, login.password)
                case _:
                    await client.auth_crammd5(login.username, login.password)
        except aiosmtplib.SMTPResponseException as refused:
            if refused.code == 504 and method != usable[-1]:
                continue  # offered and not known after all; no password was judged
            failure = _without(_refusal(Stage.AUTH, refused), login)
            why = Ended.AUTH_DEFERRED if 400 <= refused.code < 500 else Ended.AUTH_REFUSED
            raise _Stop(msgspec.structs.replace(failure, why=why, error=f"login by {method.upper()}")) from None
        except aiosmtplib.SMTPException as error:
            raise _Stop(_no_answer(Stage.AUTH, error)) from None
        else:
            return method.upper()
    raise AssertionError("the last mechanism returned or raised")


def _without(failure: Failure, login: Credentials) -> Failure:
    """A server may repeat what it was sent; the password goes into no log."""
    if failure.reply is None:
        return failure
    text = failure.reply.text
    plain = f"\0{login.username}\0{login.password}"
    for secret in (login.password, *(base64.b64encode(part.encode()).decode() for part in (plain, login.password))):
        text = text.replace(secret, "***")
    return msgspec.structs.replace(failure, reply=Reply(failure.reply.code, text))


def _refusal(stage: Stage, refused: aiosmtplib.SMTPResponseException) -> Failure:
    code = refused.code if 200 <= refused.code <= 599 else 0
    reply = Reply(code, clean_text(str(refused.message).replace("\n", " ").encode("utf-8", "replace")))
    if code == 421:
        return Failure(Ended.REFUSED, stage, reply, "the server closed the connection")
    error = "" if code >= 400 else "that is no answer to this command"
    return Failure(Ended.REFUSED if code >= 400 else Ended.OUT_OF_STEP, stage, reply, error)


def _no_answer(stage: Stage, error: aiosmtplib.SMTPException) -> Failure:
    if isinstance(error, aiosmtplib.SMTPTimeoutError):
        return Failure(Ended.TIMED_OUT, stage, None, "no answer in time")
    cause = error.__cause__
    text = str(cause) if isinstance(cause, OSError) and str(cause) else "the server hung up"
    return Failure(Ended.BROKEN, stage, None, text)
