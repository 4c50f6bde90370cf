"""A row becomes a message: envelope and content."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec
import pyarrow as pa

from engine.compose.keys import load_keys
from engine.config import Settings
from engine.errors import EngineError, Exit
from formats.address import Mailbox
from formats.message import date_value, fold, mailbox_value, qp_fragment, unstructured
from formats.verp import TokenMaker


class TemplateError(EngineError):
    """{problem}."""

    exit_code = Exit.TEMPLATE


class Message(msgspec.Struct, frozen=True, gc=False):
    """Ready for the wire: CRLF everywhere, ends in CRLF, 7-bit, and no line begins with a dot."""

    return_path: str
    recipient: str
    content: bytes
    smtputf8: bool


class RowProblem(Exception):
    """Why this row has no message."""

    def __init__(self, reason: Literal["address", "render"], detail: str) -> None:
        super().__init__(detail)
        self.reason: Literal["address", "render"] = reason
        self.detail = detail


class Composer:
    """Composes a campaign's messages (first, thin version)."""

    columns: tuple[str, ...]
    fingerprint: str

    def __init__(self, settings: Settings, folder: Path, schema: pa.Schema, tokens: TokenMaker) -> None:
        import hashlib

        from jinja2 import meta
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        env = ImmutableSandboxedEnvironment(finalize=lambda v: "" if v is None else v)
        html = ImmutableSandboxedEnvironment(autoescape=True, finalize=lambda v: "" if v is None else v)
        message = settings.message
        sources = [
            message.subject,
            *((folder / name).read_text("utf-8") for name in (message.text, message.html) if name),
        ]
        names = set().union(*(meta.find_undeclared_variables(env.parse(source)) for source in sources))
        if message.to_name:
            names |= meta.find_undeclared_variables(env.parse(message.to_name))
        self.columns = tuple(name for name in schema.names if name in names)
        self.fingerprint = hashlib.sha256("\0".join(sources).encode()).hexdigest()
        self._message, self._tokens = message, tokens
        self._subject = env.from_string(message.subject)
        self._to = env.from_string(message.to_name or "")
        path = message.html or message.text
        assert path
        self._kind = "html" if message.html else "plain"
        self._body = (html if message.html else env).from_string((folder / path).read_text("utf-8"))

    def compose(self, row: int, mailbox: Mailbox, values: Sequence[object], now_us: int) -> Message:
        """The message of the row; raises RowProblem."""
        message_id, return_path, token = self._tokens.strings(row)
        sender = self._message.from_address
        domain = self._message.return_path_domain or sender.rpartition("@")[2]
        fields = dict(zip(self.columns, values, strict=True))
        url = (self._message.unsubscribe_url or "").replace("{token}", token)
        try:
            head = [
                fold("Date", date_value(now_us // 1_000_000)),
                fold("From", mailbox_value(sender, self._message.from_name)),
                fold("To", mailbox_value(str(mailbox), self._to.render(fields))),
                fold("Subject", unstructured(self._subject.render(fields))),
                fold("Message-ID", f"<{message_id}@{domain}>"),
                *([fold("List-Unsubscribe", f"<{url}>")] if url else []),
                fold("MIME-Version", "1.0"),
                fold("Content-Type", f"text/{self._kind}; charset=utf-8"),
                fold("Content-Transfer-Encoding", "quoted-printable"),
            ]
            body = qp_fragment(self._body.render(fields, unsubscribe_url=url))
        except Exception as problem:
            raise RowProblem("render", str(problem)) from problem
        content = ("".join(head) + "\r\n" + (body or "\r\n")).encode()
        return Message(
            self._message.return_path or f"{return_path}@{domain}", str(mailbox), content, mailbox.needs_smtputf8
        )


def build_composer(
    settings: Settings, folder: Path, schema: pa.Schema, *, generation: Literal["live", "test"] = "live"
) -> Composer:
    """The campaign's composer; raises EngineError (Exit.TEMPLATE, Exit.KEYS)."""
    ring = load_keys(folder / settings.keys.file)
    tokens = TokenMaker(settings.campaign.id, ring.current_id, ring.key(), is_test=generation == "test")
    try:
        return Composer(settings, folder, schema, tokens)
    except OSError as problem:
        raise TemplateError(problem=str(problem)) from None
