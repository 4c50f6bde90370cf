"""Try a destination without sending anything: connect, greeting, extensions, TLS, login. For `engine check`."""

from __future__ import annotations

import msgspec

from engine.errors import EngineError, Exit
from engine.smtp.destination import ConnectionLimits, Destination
from engine.smtp.handshake import Connected, Ended, establish

WAIT_S = 20.0  # a person waits for it


class RelayUnusable(EngineError):
    """{host}: {problem}."""

    exit_code = Exit.TRY_AGAIN
    hint = "Check [delivery] of campaign.toml: relay, tls, username and where the password is."


class LoginRefused(RelayUnusable):
    """{host}: {problem}."""

    exit_code = Exit.SETTINGS


class Line(msgspec.Struct, frozen=True):
    """One thing that was tried: ok or warn, and what came of it."""

    state: str
    text: str


class ProbeReport(msgspec.Struct):
    """What was tried, in order, and what ended it where something did."""

    lines: list[Line]
    problem: EngineError | None = None


async def probe(destination: Destination, limits: ConnectionLimits) -> ProbeReport:
    """Shake hands with the first host of the destination and leave. Takes `WAIT_S` at most."""
    host = destination.hosts[0]
    found = await establish(destination, host, msgspec.structs.replace(limits, handshake_timeout_s=WAIT_S))
    if not isinstance(found, Connected):
        said = f": {found.reply or found.error}" if found.reply or found.error else ""
        refused = found.why is Ended.AUTH_REFUSED
        kind = LoginRefused if refused else RelayUnusable
        return ProbeReport([], kind(host=host, problem=f"{found.why} at {found.stage.upper()}{said}"))
    # QUIT, and no waiting for its answer: nothing hangs on it.
    found.transport.write(b"QUIT\r\n")
    found.transport.close()
    return ProbeReport(list(_lines(destination, found)))


def _lines(destination: Destination, found: Connected) -> list[Line]:
    lines = [Line("ok", f"{found.host} ({found.address}) greets: {found.greeting}")]
    offer = found.offer
    names = {
        "PIPELINING": offer.pipelining,
        "CHUNKING": offer.chunking,
        "8BITMIME": offer.eight_bit,
        "SMTPUTF8": offer.smtputf8,
        "ENHANCEDSTATUSCODES": offer.enhanced_status_codes,
    }
    lines.append(Line("ok", f"offers {', '.join(name for name, there in names.items() if there) or 'no extension'}"))
    if not offer.pipelining:
        lines.append(Line("warn", "no PIPELINING: four round trips a message, so use more connections"))
    if offer.size:
        lines.append(Line("ok", f"takes messages of {offer.size:,} bytes at most"))
    if found.tls is not None:
        trust = "verified" if found.tls.verified else "not verified"
        lines.append(Line("ok", f"{found.tls.version} with {found.tls.cipher}, certificate {trust}"))
    elif not found.host.is_this_machine:
        lines.append(Line("warn", "no TLS: what is sent can be read on the way"))
    if destination.credentials is not None:
        lines.append(Line("ok", f"login of {destination.credentials.username} by {found.login}"))
    elif found.auth_methods:
        lines.append(Line("warn", "the server offers a login, and no username is set"))
    return lines
