"""Servers that go wrong before the first message: never a recipient's fault, always named by stage and reason."""

from __future__ import annotations

import asyncio
import base64
import hmac
import ssl
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path

import msgspec
import pytest

from engine.smtp.destination import Credentials, Destination, Host
from engine.smtp.dialogue import Accepted, Stage
from engine.smtp.handshake import Connected, Ended, Failure, establish
from tests.smtp.conftest import QUICK, Sender, greet, mail, pooling, read_line, serving
from tests.smtp.test_session import good_server

Run = Callable[[Coroutine[object, object, None]], None]
Reader, Writer = asyncio.StreamReader, asyncio.StreamWriter
LOGIN = Credentials("ann", "pass-word-123")


async def shake(host: Host, **settings: object) -> Connected | Failure:
    wanted = {"key": "test", "hosts": (host,), "tls": "off", "greeting_name": "client.test", **settings}
    outcome = await establish(Destination(**wanted), host, QUICK)  # type: ignore[arg-type]
    if isinstance(outcome, Connected):
        outcome.transport.abort()
        await asyncio.sleep(0)
    return outcome


async def failure(converse: Callable[[Reader, Writer], Awaitable[None]], **settings: object) -> Failure:
    async with serving(converse) as host:
        outcome = await shake(msgspec.structs.replace(host, **settings.pop("host", {})), **settings)  # type: ignore[arg-type]
    assert isinstance(outcome, Failure)
    return outcome


def saying(*sayings: bytes, then_wait: bool = False) -> Callable[[Reader, Writer], Awaitable[None]]:
    """A server that says these things, one behind each line it hears."""

    async def converse(reader: Reader, writer: Writer) -> None:
        for number, saying in enumerate(sayings):
            if number:
                await read_line(reader)
            writer.write(saying)
            await writer.drain()
        if then_wait:
            await asyncio.sleep(10)
        else:
            await reader.read(1)

    return converse


EHLO = b"250-test\r\n250 "


@pytest.mark.parametrize(
    ("sayings", "why", "stage", "text"),
    [
        ((b"554 5.7.1 your address is listed\r\n",), Ended.REFUSED, Stage.GREETING, "554 5.7.1 your address is listed"),
        ((b"421 4.7.0 too many connections\r\n",), Ended.REFUSED, Stage.GREETING, "421 4.7.0 too many connections"),
        ((b"220-host ESMTP\r\n521 5.7.1 blocked\r\n",), Ended.REFUSED, Stage.GREETING, "521 host ESMTP 5.7.1 blocked"),
        ((b"220 hi\r\n", b"550 5.7.1 bad name\r\n"), Ended.REFUSED, Stage.EHLO, "550 5.7.1 bad name"),
        ((b"220 hi\r\n", b"421 bye\r\n"), Ended.REFUSED, Stage.EHLO, "421 bye"),
        ((b"SSH-2.0-OpenSSH_9\r\n",), Ended.OUT_OF_STEP, Stage.GREETING, ""),
        ((b"\xff\xfe\x00\r\n",), Ended.OUT_OF_STEP, Stage.GREETING, ""),
        ((b"220 hi\r\n", b"\x00garbage\r\n"), Ended.OUT_OF_STEP, Stage.EHLO, ""),
        ((b"250 wrong\r\n",), Ended.OUT_OF_STEP, Stage.GREETING, "250 wrong"),
        ((b"x" * 100_000 + b"\r\n",), Ended.OUT_OF_STEP, Stage.GREETING, ""),
        ((b"220 hi\r\n", b"250-x\r\n" * 50_000), Ended.OUT_OF_STEP, Stage.EHLO, ""),
    ],
)
def test_refused_and_garbled_handshakes(
    run: Run, sayings: tuple[bytes, ...], why: Ended, stage: Stage, text: str
) -> None:
    async def story() -> None:
        found = await failure(saying(*sayings))
        assert (found.why, found.stage) == (why, stage)
        assert found.reply is not None
        if text:
            assert str(found.reply) == text
        assert len(str(found.reply)) < 1100

    run(story())


@pytest.mark.slow
@pytest.mark.parametrize("after", range(3))
def test_closing_and_silence_at_each_point(run: Run, after: int) -> None:
    """The server hangs up, or falls silent, after so many of its lines. Silence ends with the patience."""
    lines = (b"220 hi\r\n", b"250-test\r\n250 PIPELINING\r\n")[:after]

    async def hang_up(reader: Reader, writer: Writer) -> None:
        for line in lines:
            writer.write(line)
            await read_line(reader)

    async def story() -> None:
        async with serving(hang_up) as host:
            outcome = await shake(host)
        if after < 2:
            assert isinstance(outcome, Failure)
            assert outcome.why is Ended.BROKEN
            assert outcome.stage is (Stage.GREETING, Stage.EHLO)[after]
        async with serving(saying(*lines, then_wait=True)) as host:
            outcome = await shake(host)
        if after < 2:
            assert isinstance(outcome, Failure)
            assert outcome.why is Ended.TIMED_OUT
            assert outcome.stage is (Stage.GREETING, Stage.EHLO)[after]
        else:
            assert isinstance(outcome, Connected)

    run(story())


def test_nobody_listens(run: Run) -> None:
    async def story() -> None:
        async with serving(good_server([])) as host:
            pass
        outcome = await shake(host)
        assert isinstance(outcome, Failure)
        assert (outcome.why, outcome.stage) == (Ended.COULD_NOT_CONNECT, Stage.CONNECT)
        assert "refused" in outcome.error.lower() or "connect" in outcome.error.lower()

    run(story())


def test_addresses_are_tried_in_turn(run: Run) -> None:
    """The first address does not answer, the second does."""

    async def story() -> None:
        async with serving(good_server([])) as host:
            several = msgspec.structs.replace(host, name="mx.test", addresses=("127.0.0.9", "127.0.0.1"))
            outcome = await shake(several)
            assert isinstance(outcome, Connected)
            assert outcome.address == "127.0.0.1"
            outcome = await shake(host, source_address="127.0.0.7")
            assert isinstance(outcome, Connected)
        outcome = await shake(msgspec.structs.replace(host, name="no-such-name.invalid"))
        assert isinstance(outcome, Failure)
        assert "no-such-name.invalid" in outcome.error

    run(story())


def test_the_source_address_and_the_greeting_name_are_ours_to_choose(run: Run) -> None:
    heard: list[str] = []

    async def converse(reader: Reader, writer: Writer) -> None:
        heard.append(str(writer.get_extra_info("peername")[0]))
        heard.append(await greet(reader, writer))
        await reader.read()

    async def story() -> None:
        async with serving(converse) as host:
            await shake(host, source_address="127.0.0.7", greeting_name="out7.sender.test")
            await shake(host, source_address="127.0.0.8", greeting_name=None)
        assert heard == ["127.0.0.7", "EHLO out7.sender.test", "127.0.0.8", "EHLO [127.0.0.8]"]

    run(story())


def test_an_old_server_gets_helo_and_nothing_is_offered(run: Run) -> None:
    async def story() -> None:
        async with serving(saying(b"220 old\r\n", b"502 what?\r\n", b"250 hello\r\n", then_wait=True)) as host:
            outcome = await shake(host)
        assert isinstance(outcome, Connected)
        assert not outcome.offer.pipelining

    run(story())


def test_a_reply_too_many_ends_it(run: Run) -> None:
    """Said twice, it would answer our MAIL."""

    async def story() -> None:
        twice = EHLO + b"PIPELINING\r\n" + EHLO + b"PIPELINING\r\n"
        assert (await failure(saying(b"220 hi\r\n", twice))).why is Ended.OUT_OF_STEP

    run(story())


# ---- TLS


def server_context(certificate: tuple[Path, Path]) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)
    return context


def tls_server(
    certificate: tuple[Path, Path], offer_after: list[str], behind_220: bytes = b"", heard: list[str] | None = None
) -> Callable[[Reader, Writer], Awaitable[None]]:
    """Offers STARTTLS, and after it `offer_after`."""

    async def converse(reader: Reader, writer: Writer) -> None:
        await greet(reader, writer, "STARTTLS", "PIPELINING", "AUTH PLAIN")
        assert await read_line(reader) == "STARTTLS"
        writer.write(b"220 go ahead\r\n" + behind_220)
        await writer.drain()
        await writer.start_tls(server_context(certificate))
        await read_line(reader)
        words = ["test", *offer_after]
        for number, word in enumerate(words):
            writer.write(b"250%b%b\r\n" % (b" " if number == len(words) - 1 else b"-", word.encode()))
        while True:
            line = await read_line(reader)
            if heard is not None:
                heard.append(line)
            if line == "DATA":
                writer.write(b"354 go\r\n")
                await reader.readuntil(b"\r\n.\r\n")
                writer.write(b"250 queued\r\n")
            else:
                writer.write(b"235 welcome\r\n" if line.startswith("AUTH") else b"250 ok\r\n")

    return converse


def test_tls_by_policy(certificate: tuple[Path, Path]) -> None:
    """Unverified where that is asked for; verified against the authorities and the name."""

    async def story() -> None:
        async with serving(tls_server(certificate, ["SIZE 1000"])) as host:
            for policy in ("required", "opportunistic"):
                outcome = await shake(host, tls=policy)
                assert isinstance(outcome, Connected)
                assert outcome.tls is not None
                assert outcome.tls.version.startswith("TLSv1")
                assert not outcome.tls.verified
                assert outcome.offer.size == 1000
                assert not outcome.offer.pipelining, "what was offered before TLS is not believed"
            outcome = await shake(host, tls="verified")
            assert isinstance(outcome, Failure)
            assert outcome.why is Ended.TLS_FAILED
            assert "certificate not trusted" in outcome.error
            outcome = await shake(host, tls="verified", tls_ca_file=str(certificate[0]))
            assert isinstance(outcome, Connected)
            stranger = msgspec.structs.replace(host, name="other.test", addresses=("127.0.0.1",))
            outcome = await shake(stranger, tls="verified", tls_ca_file=str(certificate[0]))
            assert isinstance(outcome, Failure)

    asyncio.run(story())


def test_messages_over_tls(certificate: tuple[Path, Path], run: Run) -> None:
    """The transport is handed over after the handshake, on both loops; large messages too."""
    sender = Sender([mail(ticket, 100_000 if ticket % 5 == 0 else 10) for ticket in range(30)])

    async def story() -> None:
        server = tls_server(certificate, ["PIPELINING"])
        async with serving(server, limit=1 << 20) as host, pooling(sender, host, tls="required"):
            await sender.until(lambda heard: len(heard.events) == 30)
        assert all(isinstance(event, Accepted) for event in sender.events)

    run(story())


def test_implicit_tls(certificate: tuple[Path, Path], run: Run) -> None:
    async def story() -> None:
        async with serving(good_server(["PIPELINING"]), ssl=server_context(certificate)) as host:
            outcome = await shake(msgspec.structs.replace(host, implicit_tls=True), tls="required")
            assert isinstance(outcome, Connected)
            assert outcome.tls is not None
        async with serving(good_server(["PIPELINING"])) as host:
            outcome = await shake(msgspec.structs.replace(host, implicit_tls=True), tls="required")
            assert isinstance(outcome, Failure)
            assert outcome.why is Ended.TLS_FAILED

    run(story())


@pytest.mark.parametrize(
    "injected", [b"250-evil\r\n250 AUTH PLAIN\r\n", b"250 evil\r\n", b"235 welcome\r\n"], ids=["ehlo", "line", "auth"]
)
def test_what_is_injected_before_tls_is_not_believed(certificate: tuple[Path, Path], injected: bytes) -> None:
    """RFC 3207 §4.2, CVE-2011-0411 and its kin: plain text slipped in behind the 220."""

    async def story() -> None:
        async with serving(tls_server(certificate, ["SIZE 77"], injected)) as host:
            outcome = await shake(host, tls="required")
            if isinstance(outcome, Connected):
                assert outcome.offer.size == 77
                assert "auth" not in outcome.extensions
            else:
                assert outcome.stage is Stage.STARTTLS

    asyncio.run(story())


def test_starttls_not_offered_stops_before_the_login(run: Run) -> None:
    """T089: no password in clear text, and a clear error."""
    heard: list[str] = []

    async def converse(reader: Reader, writer: Writer) -> None:
        await greet(reader, writer, "AUTH PLAIN")
        while line := await read_line(reader):
            heard.append(line)
            writer.write(b"235 welcome\r\n")

    async def story() -> None:
        for policy in ("required", "verified"):
            found = await failure(converse, tls=policy, credentials=LOGIN)
            assert found.why is Ended.TLS_FAILED
            assert "does not offer STARTTLS" in found.error
        assert heard == []

    run(story())


@pytest.mark.parametrize("way", ["454 reply", "plain text", "hang-up", "silence"])
def test_tls_that_fails_is_a_connection_error(run: Run, way: str) -> None:
    """T091: offered and broken. `required` fails; `opportunistic` goes on in plain text and remembers the host."""
    tries: list[str] = []

    async def converse(reader: Reader, writer: Writer) -> None:
        await greet(reader, writer, "STARTTLS", "PIPELINING")
        line = await read_line(reader)
        tries.append(line)
        if line != "STARTTLS":
            for _ in range(2):
                await read_line(reader)
            writer.write(b"250 ok\r\n250 ok\r\n354 go\r\n")
            await reader.readuntil(b"\r\n.\r\n")
            writer.write(b"250 queued\r\n")
            await reader.read(1)
            return
        writer.write(b"454 4.7.0 no TLS today\r\n" if way == "454 reply" else b"220 go ahead\r\n")
        if way == "plain text":
            await reader.read(10)
            writer.write(b"250 this is not TLS\r\n" * 10)
        elif way == "silence":
            await asyncio.sleep(10)
        await writer.drain()

    async def story() -> None:
        found = await failure(converse, tls="required")
        assert (found.why, found.stage) == (Ended.TLS_FAILED, Stage.STARTTLS)
        tries.clear()
        sender = Sender([mail(1), mail(2)])
        async with serving(converse) as host, pooling(sender, host, tls="opportunistic") as pool:
            await sender.until(lambda heard: heard.events)
            assert isinstance(sender.events[0], Accepted)
            assert tries[0] == "STARTTLS"
            assert tries[1].startswith("MAIL")
            assert pool._of(host).tls_broken_until > 0
        assert sender.ends[0].why is Ended.TLS_FAILED

    run(story())


# ---- login


def auth_server(offer: str, replies: list[bytes], heard: list[str]) -> Callable[[Reader, Writer], Awaitable[None]]:
    async def converse(reader: Reader, writer: Writer) -> None:
        await greet(reader, writer, offer)
        for reply in replies:
            heard.append(await read_line(reader))
            writer.write(reply)
        await reader.read(1)

    return converse


def test_the_mechanisms(run: Run) -> None:
    plain = base64.b64encode(b"\0ann\0pass-word-123").decode()
    challenge = b"<1.2@test>"
    digest = hmac.new(b"pass-word-123", challenge, "md5").hexdigest()

    async def story() -> None:
        heard: list[str] = []
        async with serving(auth_server("AUTH PLAIN LOGIN", [b"235 ok\r\n"], heard)) as host:
            outcome = await shake(host, credentials=LOGIN)
            assert isinstance(outcome, Connected)
            assert outcome.login == "PLAIN"
            assert heard == [f"AUTH PLAIN {plain}"]
        heard = []
        async with serving(auth_server("AUTH=LOGIN", [b"334 UGFzc3dvcmQ6\r\n", b"235 ok\r\n"], heard)) as host:
            outcome = await shake(host, credentials=LOGIN)
            assert isinstance(outcome, Connected)
            assert base64.b64decode(heard[1]) == b"pass-word-123"
        heard = []
        replies = [b"334 " + base64.b64encode(challenge) + b"\r\n", b"235 ok\r\n"]
        async with serving(auth_server("AUTH CRAM-MD5 PLAIN", replies, heard)) as host:
            outcome = await shake(host, credentials=LOGIN)
            assert isinstance(outcome, Connected)
            assert outcome.login == "CRAM-MD5", "unencrypted: the password itself stays here where it can"
            assert base64.b64decode(heard[1]).decode() == f"ann {digest}"

    run(story())


def test_a_refused_login_is_tried_once_and_stops_the_pool(run: Run) -> None:
    """T093: no second mechanism, no second connection; the reply is the first one and shows no secret."""
    heard: list[str] = []

    async def converse(reader: Reader, writer: Writer) -> None:
        await greet(reader, writer, "AUTH CRAM-MD5 PLAIN LOGIN")
        while line := await read_line(reader):
            heard.append(line)
            challenged = line.startswith("AUTH CRAM")
            echo = base64.b64encode(b"\0ann\0pass-word-123")
            writer.write(b"334 PDE+\r\n" if challenged else b"535 5.7.8 wrong: pass-word-123 %b\r\n" % echo)

    async def story() -> None:
        sender = Sender([mail(1)])
        async with serving(converse) as host, pooling(sender, host, credentials=LOGIN) as pool:
            await sender.until(lambda heard: heard.ends)
            assert pool.is_stopped
            pool.want(3)
            await asyncio.sleep(0.2)
            assert pool.connecting == pool.open == 0
        assert len(heard) == 2
        (end,) = sender.ends
        assert end.why is Ended.AUTH_REFUSED
        assert end.reply is not None
        assert end.reply.code == 535
        assert "pass-word" not in f"{end}{pool.last_failure}{pool.destination}"
        assert base64.b64encode(b"\0ann\0pass-word-123").decode() not in str(end)
        assert sender.events == []

    run(story())


def test_a_login_that_is_put_off_is_tried_again(run: Run) -> None:
    async def story() -> None:
        heard: list[str] = []
        found = await failure(auth_server("AUTH PLAIN", [b"454 4.7.0 later\r\n"], heard), credentials=LOGIN)
        assert found.why is Ended.AUTH_DEFERRED
        found = await failure(auth_server("AUTH GSSAPI", [], heard), credentials=LOGIN)
        assert found.why is Ended.AUTH_REFUSED
        assert "GSSAPI" in found.error

    run(story())


def test_a_password_goes_to_no_stranger() -> None:
    """Unencrypted, or encrypted to whoever: not with a password, unless it is this machine or "off" says so."""
    here, there = Host(name="127.0.0.1"), Host(name="relay.test", addresses=("192.0.2.1",))

    def wanted(**settings: object) -> Destination:
        return Destination(key="x", hosts=(there,), credentials=LOGIN, **settings)  # type: ignore[arg-type]

    assert wanted(tls="required").verifies(there)
    assert wanted(tls="verified").verifies(here)
    assert not wanted(tls="required").verifies(here)
    assert not Destination(key="x", hosts=(there,), tls="required").verifies(there)  # type: ignore[arg-type]
    assert "pass-word" not in repr(wanted(tls="required"))
