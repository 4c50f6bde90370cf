"""A campaign folder in a few lines, and messages opened again."""

from __future__ import annotations

import email
import email.policy
from collections.abc import Callable, Mapping, Sequence
from email.message import EmailMessage
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest

from engine.compose.keys import write_new_keys
from engine.compose.render import Composer, Message, build_composer
from engine.config import Settings
from formats.address import Mailbox, parse_mailbox

NOW_US = 1_790_000_000_123_456  # Mon, 21 Sep 2026 14:13:20 UTC

MakeCampaign = Callable[..., "Campaign"]


class Campaign:
    """A folder with templates and keys, and one row of a list."""

    def __init__(
        self, folder: Path, message: Mapping[str, Any], files: Mapping[str, str | bytes], more: Mapping[str, Any]
    ) -> None:
        self.folder = folder
        for name, content in files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content if isinstance(content, bytes) else content.encode())
        if not (folder / "keys/secret.keys").exists():
            write_new_keys(folder / "keys/secret.keys")
        table = {"from_address": "news@example.org", "subject": "Hello", **message}
        if "text.txt" in files and "html" not in table:
            table.setdefault("text", "text.txt")
        if "page.html" in files:
            table.setdefault("html", "page.html")
        self.settings = msgspec.convert({"campaign": {"id": "spring"}, "message": table, **more}, Settings)

    def composer(self, schema: pa.Schema | None = None, **options: Any) -> Composer:
        return build_composer(self.settings, self.folder, schema or pa.schema([]), **options)

    def send(
        self, row: Mapping[str, Any] | None = None, *, schema: pa.Schema | None = None, to: str = "ann@example.net"
    ) -> Message:
        """The message of one row; the schema is inferred where none is given."""
        table = pa.Table.from_pylist([dict(row or {})], schema=schema)
        composer = self.composer(table.schema)
        record = table.to_pylist()[0] if table.num_columns else {}
        return composer.compose(7, parse_mailbox(to), [record[name] for name in composer.columns], NOW_US)

    def open(self, row: Mapping[str, Any] | None = None, **options: Any) -> EmailMessage:
        return opened(self.send(row, **options).content)


def opened(content: bytes) -> EmailMessage:
    """The message as Python's parser reads it, after the rules that hold for every message."""
    check_wire_rules(content)
    message = email.message_from_bytes(content, policy=email.policy.default)
    assert isinstance(message, EmailMessage)
    return message


def check_wire_rules(content: bytes) -> None:
    """CRLF alone, at the end too; no dot begins a line; no line over 998, none of the body over 76 but boundaries."""
    assert content.endswith(b"\r\n")
    assert b"\r" not in content.replace(b"\r\n", b"")
    assert b"\n" not in content.replace(b"\r\n", b"")
    assert b"\0" not in content
    head, _, body = content.partition(b"\r\n\r\n")
    for line in content.split(b"\r\n"):
        assert not line.startswith(b".")
        assert len(line) <= 998
        assert not line.startswith(b"From ")
    for line in body.split(b"\r\n"):
        assert len(line) <= 78
        assert not line.endswith((b" ", b"\t"))
        assert all(32 <= octet < 127 or octet == 9 for octet in line)
    for line in head.split(b"\r\n"):
        assert line.strip()
        assert len(line) <= 76 or b" " not in line.strip() or b"@" in line or b"http" in line


def text_of(part: EmailMessage) -> str:
    """The decoded text of a part, line ends as LF."""
    payload = part.get_payload(decode=True)
    assert isinstance(payload, bytes)
    return payload.decode().replace("\r\n", "\n")


@pytest.fixture
def campaign(tmp_path: Path) -> MakeCampaign:
    def make(files: Mapping[str, str | bytes], *, more: Mapping[str, Any] | None = None, **message: Any) -> Campaign:
        return Campaign(tmp_path, message, files, more or {})

    return make


@pytest.fixture
def ann() -> Mailbox:
    return Mailbox("ann", "example.net")


def values_of(composer: Composer, row: Mapping[str, Any]) -> Sequence[Any]:
    return [row[name] for name in composer.columns]
