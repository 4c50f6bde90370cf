"""The peers themselves: what plain smtplib sends them arrives."""

from __future__ import annotations

import smtplib
import ssl

import pytest

from tests.peers.aiosmtpd_server import AiosmtpdServer
from tests.peers.postfix import Postfix

CONTENT = b"From: a@example.com\r\nMessage-ID: <peer-1@example.com>\r\nSubject: x\r\n\r\nHello\r\n"


@pytest.mark.postfix
def test_postfix_delivers_into_its_maildir(postfix: Postfix) -> None:
    before = len(postfix.contents())
    with smtplib.SMTP(postfix.host, postfix.port, timeout=10) as client:
        client.ehlo()
        assert client.has_extn("pipelining")
        assert client.has_extn("chunking")
        client.starttls(context=ssl.create_default_context(cafile=str(postfix.certificate)))
        client.sendmail("a@example.com", ["anna@example.org"], CONTENT)
        client.sendmail("a@example.com", ["bob@some.example"], CONTENT)
    arrived = postfix.wait_for(before + 2)
    assert any(b"Delivered-To: bob@some.example" in content for content in arrived)
    assert all(b"Message-ID: <peer-1@example.com>" in content for content in arrived[before:])


@pytest.mark.postfix
@pytest.mark.parametrize(("recipient", "code"), [("550+x@example.org", 550), ("451@example.org", 451)])
def test_postfix_refuses_as_told(postfix: Postfix, recipient: str, code: int) -> None:
    with smtplib.SMTP(postfix.host, postfix.port, timeout=10) as client:
        client.ehlo()
        client.mail("a@example.com")
        assert client.rcpt(recipient)[0] == code


def test_aiosmtpd_takes_mail(aiosmtpd_server: AiosmtpdServer) -> None:
    with smtplib.SMTP(aiosmtpd_server.host, aiosmtpd_server.port, timeout=10) as client:
        client.sendmail("a@example.com", ["anna@example.org", "bob@example.org"], CONTENT)
        client.mail("a@example.com")
        assert client.rcpt("550@example.org")[0] == 550
    (envelope,) = aiosmtpd_server.envelopes
    assert envelope.rcpt_tos == ["anna@example.org", "bob@example.org"]
    assert envelope.content == CONTENT
