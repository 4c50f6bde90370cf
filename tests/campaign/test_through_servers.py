"""The engine against other people's servers: Postfix that relays into a maildir, aiosmtpd."""

from __future__ import annotations

import email
import email.policy
from collections.abc import Iterator
from pathlib import Path

import dkim
import pytest

from engine.compose.sign import make_key
from engine.rehearse.running import run_sink_in_process
from engine.rehearse.sink import SinkSettings
from tests.campaign.conftest import Operator
from tests.conftest import require
from tests.peers.aiosmtpd_server import running_aiosmtpd
from tests.peers.postfix import Postfix, missing_postfix, running_postfix


@pytest.fixture(scope="module")
def postfix() -> Iterator[Postfix]:
    require("postfix", missing_postfix())
    with running_postfix() as running:
        yield running


@pytest.fixture
def through_postfix(tmp_path: Path, postfix: Postfix) -> Iterator[Operator]:
    with run_sink_in_process(SinkSettings(record=tmp_path / "unused")) as unused:
        operator = Operator(tmp_path, unused)
        operator.relay = f"smtp://{postfix.host}:{postfix.port}"  # type: ignore[attr-defined] # told to `begin`
        yield operator


@pytest.mark.slow
@pytest.mark.postfix
def test_a_signed_campaign_arrives_whole_in_postfixs_maildir(through_postfix: Operator, postfix: Postfix) -> None:
    operator = through_postfix
    addresses: list[str | None] = [f"person{n}@signed.example" for n in range(40)]
    addresses += ["550+a@signed.example", "451+b@signed.example"]
    operator.begin(addresses, plan=False, relay=operator.relay, give_up_after="20s")  # type: ignore[attr-defined] # set above
    record = make_key(operator.campaign / "keys" / "dkim.pem", "rsa", 2048)
    file = operator.campaign / "campaign.toml"
    table = '[[dkim]]\ndomain = "example.com"\nselector = "s1"\nkey_file = "keys/dkim.pem"\n\n[keys]'
    file.write_text(file.read_text().replace("\n[keys]\n", f"\n{table}\n", 1))
    (operator.campaign / "templates" / "letter.txt").write_text("Grüße an {{ first_name }}\n.\n..two dots\nFrom here\n")
    operator.set("max_age", "2s")
    operator.run("plan", "list.parquet")
    operator.run("send", "--processes", "2")
    assert operator.outcomes() == {"accepted": 40, "bounced": 1, "deferred": 1}
    contents = [raw for raw in postfix.wait_for(40) if b"@signed.example" in raw]
    assert len(contents) == 40
    seen = set()
    for raw in contents:
        # Postfix writes its own fields in front, and LF; what we signed begins behind them.
        message = email.message_from_bytes(raw, policy=email.policy.default)
        seen.add(message["To"])
        body = message.get_body(("plain",))
        assert body is not None
        number = str(message["To"]).partition("person")[2].partition("@")[0]
        assert body.get_content().splitlines() == [f"Grüße an Name {number}", ".", "..two dots", "From here"]
        signed = raw.replace(b"\r\n", b"\n").replace(b"\n", b"\r\n")
        assert dkim.verify(signed, dnsfunc=lambda name, timeout=5: record.encode())
    assert len(seen) == 40


@pytest.mark.slow
def test_aiosmtpd_takes_every_row_once(tmp_path: Path) -> None:
    with running_aiosmtpd() as server, run_sink_in_process(SinkSettings()) as unused:
        operator = Operator(tmp_path, unused)
        operator.begin([f"p{n}@example.org" for n in range(200)], relay=f"smtp://{server.host}:{server.port}")
        operator.run("send")
        assert operator.outcomes() == {"accepted": 200}
        assert len({tuple(envelope.rcpt_tos) for envelope in server.envelopes}) == len(server.envelopes) == 200
