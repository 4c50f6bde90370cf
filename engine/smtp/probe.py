"""What a destination's hosts say to us, step by step and without sending: for `engine check`."""

from __future__ import annotations

import asyncio

import msgspec

from engine.errors import EngineError, Exit
from engine.smtp.destination import ConnectionLimits, Destination, Host
from engine.smtp.handshake import Connected, Ended, Failure, establish
from engine.smtp.tls import TlsPolicy


class HostUnusable(EngineError):
    """{host} cannot be used: {why} at {stage}: {said}."""

    exit_code = Exit.TRY_AGAIN
    hint = "{advice}"


class HostMisconfigured(HostUnusable):
    """{host} cannot be used as [delivery] says: {why} at {stage}: {said}."""

    exit_code = Exit.SETTINGS


_ADVICE = {
    Ended.COULD_NOT_CONNECT: "Check host and port of [delivery] relay, and whether a firewall is between.",
    Ended.REFUSED: "The server does not want this connection: see its reply; it may know this address as unwanted.",
    Ended.TLS_FAILED: "tls_ca_file names further authorities; [delivery] tls says what is asked for (guide smtp.md).",
    Ended.AUTH_REFUSED: "Check username and password. Nothing else was tried, for some servers lock after a few tries.",
    Ended.AUTH_DEFERRED: "The server could not check the login now; try again later.",
    Ended.OUT_OF_STEP: "This does not look like a mail server: is the port right, or does it want smtps://?",
    Ended.TIMED_OUT: "Something accepts connections and does not answer: does the port want smtps://?",
}
# What the operator can mend in the settings, and what only time or the other side can.
_OURS = frozenset({Ended.TLS_FAILED, Ended.AUTH_REFUSED, Ended.OUT_OF_STEP})


class ProbeLine(msgspec.Struct, frozen=True):
    """One finding; `state` is "ok" or "warn"."""

    state: str
    text: str


class ProbeReport(msgspec.Struct):
    """What was found, in order; `problem` is the first thing that would stop a send."""

    lines: list[ProbeLine] = []
    problem: EngineError | None = None
    connections: list[Connected] = []  # closed; for those who want more than lines


async def probe(destination: Destination, limits: ConnectionLimits = ConnectionLimits()) -> ProbeReport:  # noqa: B008
    """Connect to each host as a send would, up to and with the login, and close again. Raises nothing."""
    report = ProbeReport()
    for host in destination.hosts:
        outcome = await establish(destination, host, limits)
        if isinstance(outcome, Failure):
            report.problem = report.problem or _problem(host, outcome)
            continue
        await _say_goodbye(outcome)
        report.connections.append(outcome)
        report.lines += _findings(destination, host, outcome, limits)
        if outcome.tls is not None and not outcome.tls.verified:
            report.lines.append(await _would_verify(destination, host, limits))
    return report


def _problem(host: Host, failure: Failure) -> EngineError:
    kind = HostMisconfigured if failure.why in _OURS else HostUnusable
    return kind(
        host=host,
        why=failure.why,
        stage=failure.stage.upper(),
        said=failure.reply or failure.error,
        advice=_ADVICE.get(failure.why, "Try again; if it stays so, ask who runs the server."),
    )


def _findings(destination: Destination, host: Host, connected: Connected, limits: ConnectionLimits) -> list[ProbeLine]:
    offer, manner = connected.offer, limits.manner
    lines = [ProbeLine("ok", f"{host} ({connected.address}) greets: {connected.greeting}")]
    if connected.tls is not None:
        how = "verified" if connected.tls.verified else "not verified"
        lines.append(ProbeLine("ok", f"{connected.tls.version}, {connected.tls.cipher}, certificate {how}"))
    elif destination.tls is TlsPolicy.OFF and not host.is_this_machine:
        lines.append(ProbeLine("warn", "messages travel unencrypted (tls = off)"))
    elif destination.tls is TlsPolicy.OPPORTUNISTIC:
        lines.append(ProbeLine("warn", "STARTTLS is not offered: messages travel unencrypted"))
    offered = ", ".join(" ".join((name.upper(), value)).strip() for name, value in connected.extensions.items() if name)
    lines.append(ProbeLine("ok", f"offers {offered or 'nothing'}"))
    if offer.pipelining and offer.chunking and manner.pipelining and manner.chunking:
        lines.append(ProbeLine("ok", f"up to {manner.depth} messages in one round trip (PIPELINING, CHUNKING)"))
    elif offer.pipelining and manner.pipelining:
        lines.append(ProbeLine("ok", "one round trip a message (PIPELINING)"))
    else:
        lines.append(ProbeLine("warn", "four round trips a message: PIPELINING is not offered, or switched off"))
    if connected.login is not None and destination.credentials is not None:
        lines.append(ProbeLine("ok", f"{destination.credentials.username} logged in by {connected.login}"))
    elif connected.auth_methods and destination.credentials is None and not host.is_this_machine:
        lines.append(ProbeLine("warn", "a login is offered and none is configured: the relay may refuse recipients"))
    return lines


async def _would_verify(destination: Destination, host: Host, limits: ConnectionLimits) -> ProbeLine:
    strict = msgspec.structs.replace(destination, tls=TlsPolicy.VERIFIED, credentials=None)
    outcome = await establish(strict, host, limits)
    if isinstance(outcome, Connected):
        await _say_goodbye(outcome)
        return ProbeLine("ok", 'the certificate is good: tls = "verified" would work too')
    return ProbeLine("warn", f"the certificate would not be verified: {outcome.error}")


async def _say_goodbye(connected: Connected) -> None:
    """QUIT, without waiting for an answer that nobody needs, nor for the closing words of TLS."""
    connected.transport.write(b"QUIT\r\n")
    await asyncio.sleep(0.02)
    connected.transport.abort()
    await asyncio.sleep(0)  # the transport closes its socket in the next turn of the loop
