# ruff: noqa: E501 - tables read better in one line
"""Messages through a real Postfix into a maildir: opened again they are what was composed, and their signatures hold."""

from __future__ import annotations

import smtplib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dkim
import pyarrow as pa
import pytest

from engine.compose.render import Message
from engine.compose.sign import make_key
from formats.address import parse_mailbox
from tests.compose.conftest import NOW_US, Campaign, opened, text_of
from tests.conftest import require
from tests.peers.postfix import Postfix, missing_postfix, running_postfix

ROWS: list[dict[str, Any]] = [
    {"first": "Ann", "items": ["a", "b"]},
    {"first": "Jörg, der «Zweite» <x>", "items": []},
    {"first": ".", "items": [".", "..", "From me"]},
    {"first": "x" * 1200, "items": ["é" * 400]},
    {"first": "\r\nBcc: evil@example.org\r\n\r\n.\r\n", "items": ["\n.\n.\nQUIT\n"]},
    {"first": "🌛 =?utf-8?q?x?= \u2028", "items": ["=", " trailing  ", "\t"]},
    {"first": None, "items": None},
]
TEXT = "Hi {{ first }}\n.\n..dots\nFrom here  \n{% for i in items %}* {{ i }}\n{% endfor %}"
PAGE = "<style>\n.some{}\n.other{}</style><p>Hi {{ first }}</p>\n{% for i in items %}<li>{{ i }}</li>{% endfor %}"
MESSAGE = {
    "subject": "For {{ first }}", "to_name": "{{ first }}", "unsubscribe_url": "https://x.example/u/" + "a" * 120 + "/{token}",
    "headers": {"X-First": "{{ first }}"}, "attachments": [{"path": "terms.pdf", "filename": "Übersicht, lang.pdf"}],
}  # fmt: skip


@pytest.fixture(scope="module")
def postfix() -> Iterator[Postfix]:
    require("postfix", missing_postfix())
    with running_postfix() as running:
        yield running


@pytest.mark.slow
@pytest.mark.postfix
@pytest.mark.parametrize("form", ["relaxed/simple", "relaxed/relaxed"])
def test_what_arrives_is_what_was_composed(postfix: Postfix, tmp_path: Path, form: str) -> None:
    record = make_key(tmp_path / "s.pem", "rsa")
    table = {"domain": "example.org", "selector": "s", "key_file": "s.pem", "canonicalization": form}
    made = Campaign(
        tmp_path, MESSAGE, {"text.txt": TEXT, "page.html": PAGE, "terms.pdf": bytes(range(256))}, {"dkim": [table]}
    )
    schema = pa.schema([("first", pa.string()), ("items", pa.list_(pa.string()))])
    composer = made.composer(schema)
    sent: dict[bytes, Message] = {}
    before = len(postfix.contents())
    with smtplib.SMTP(postfix.host, postfix.port, timeout=10) as client:
        for number, row in enumerate(ROWS):
            to = parse_mailbox(f"r{number}@example.net")
            message = composer.compose(number, to, [row[name] for name in composer.columns], NOW_US)
            client.sendmail(message.return_path, [message.recipient], message.content)
            sent[message.recipient.encode()] = message
    for arrived in postfix.wait_for(before + len(ROWS))[before:]:
        added, _, rest = arrived.partition(b"DKIM-Signature:")
        content = (b"DKIM-Signature:" + rest).replace(b"\n", b"\r\n")
        recipient = added.partition(b"Delivered-To: ")[2].partition(b"\n")[0]
        message = sent.pop(recipient)
        assert content == message.content
        assert b"Return-Path: <" + message.return_path.encode() + b">" in added
        assert dkim.verify(arrived.replace(b"\n", b"\r\n"), dnsfunc=lambda name, timeout=5: record.encode())
        again = opened(content)
        row = ROWS[int(recipient[1:2])]
        assert text_of(again.get_body(("plain",))).startswith(
            f"Hi {'' if row['first'] is None else _lines(row['first'])}\n"
        )  # type: ignore[arg-type]
        (attachment,) = again.iter_attachments()
        assert attachment.get_filename() == "Übersicht, lang.pdf"
        assert attachment.get_payload(decode=True) == bytes(range(256))
    assert not sent


def _lines(text: str) -> str:
    return text.replace("\r\n", "\n")
