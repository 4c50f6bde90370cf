"""The header fields of a campaign's messages: what is the same for all rows as finished text, the rest as makers.

Each field comes twice: as written, and in DKIM's relaxed form. The order here is the order in the message and in h=.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from engine.compose.template import Line, TemplateError, Variables
from engine.config import MessageTable, SettingsError
from formats.address import AddressError, Mailbox, domain_to_ascii, parse_mailbox
from formats.dkim import UNSIGNED, relaxed_field
from formats.message import (
    SOFT_LINE,
    HeaderError,
    check_field_name,
    date_value,
    fold,
    mailbox_value,
    structured,
    unstructured,
)

# Ours, or of no sender's business. A setting of its own exists for most of them.
_REFUSED = frozenset(
    [
        "date",
        "from",
        "to",
        "cc",
        "bcc",
        "subject",
        "message-id",
        "reply-to",
        "return-path",
        "received",
        "dkim-signature",
        "mime-version",
        "content-type",
        "content-transfer-encoding",
        "content-disposition",
        "content-id",
        "content-language",
        "list-unsubscribe",
        "list-unsubscribe-post",
        "list-id",
        "feedback-id",
        "cfbl-address",
        "precedence",
        "auto-submitted",
        "authentication-results",
        "arc-seal",
        "arc-message-signature",
        "arc-authentication-results",
        "delivered-to",
    ]
)
# Own fields whose values are structured: written as they are or refused, never encoded (RFC 2047 §5).
_STRUCTURED = frozenset(
    [
        "sender",
        "references",
        "in-reply-to",
        "list-help",
        "list-subscribe",
        "list-post",
        "list-owner",
        "list-archive",
        "importance",
        "priority",
        "x-priority",
        "cfbl-feedback-id",
        "x-csa-complaints",
        "errors-to",
        "resent-from",
        "resent-sender",
    ]
)


class RowState:
    """What the makers of a row's fields look at."""

    __slots__ = (
        "address",
        "mailbox",
        "message_id",
        "now_s",
        "return_path",
        "subject",
        "token",
        "values",
        "variables",
    )

    address: str
    return_path: str

    mailbox: Mailbox
    message_id: str
    now_s: int
    subject: str | None
    token: str
    values: Sequence[Any]
    variables: Variables


Maker = Callable[[RowState], str]  # the field's value; "" leaves the field out


class Field:
    """One field: fixed (`value`) or made for each row (`make`)."""

    __slots__ = ("is_made", "is_signed", "make", "name", "relaxed_name", "room", "value")

    def __init__(self, name: str, *, value: str = "", make: Maker | None = None) -> None:
        self.name, self.value = name, value
        self.is_made = make is not None
        self.make: Maker = make or (lambda row: value)
        self.relaxed_name = name.lower()
        self.is_signed = self.relaxed_name not in UNSIGNED
        self.room = SOFT_LINE - 1 - len(name)

    def write(self, value: str) -> str:
        """The field as written; raises HeaderError."""
        if len(value) < self.room:
            return f"{self.name}: {value}\r\n"
        return fold(self.name, value)

    def relaxed(self, value: str) -> str:
        """The field in relaxed form; "" where it is not signed."""
        if not self.is_signed:
            return ""
        # Values have no line breaks, tabs or blanks at their ends, but for those of the body's own fields.
        if "  " in value or "\r" in value:
            return relaxed_field(self.relaxed_name, value)
        return f"{self.relaxed_name}:{value}\r\n"


def header_fields(message: MessageTable, lines: dict[str, Line], content: Sequence[tuple[str, str]]) -> list[Field]:
    """The message's fields in order.

    `lines` are the compiled templates by settings key, `content` the body's own fields. Raises SettingsError naming
    the key.
    """
    sender = settings_address("from_address", message.from_address)
    domain = sender.domain
    fields = [
        Field("Date", make=_date()),
        _from(sender, lines.get("from_name")),
        Field("To", make=_to(lines.get("to_name"))),
    ]
    if message.reply_to:
        fields.append(Field("Reply-To", value=str(settings_address("reply_to", message.reply_to))))
    fields.append(_line_field("Subject", lines["subject"], subject=True))
    fields.append(Field("Message-ID", make=lambda row: f"<{row.message_id}@{domain}>"))
    if message.list_id:
        fields.append(Field("List-Id", value=f"<{_structured('list_id', message.list_id.strip('<>'))}>"))
    fields += unsubscribe_fields(message)
    for name, key, value in (
        ("Feedback-ID", "feedback_id", message.feedback_id),
        ("CFBL-Address", "cfbl_address", message.cfbl_address),
        ("Precedence", "precedence", message.precedence),
        ("Auto-Submitted", "auto_submitted", message.auto_submitted),
        ("Content-Language", "language", message.language),
    ):
        if value:
            if name == "CFBL-Address":
                settings_address(key, value.partition(";")[0])
                value = value if ";" in value else f"{value}; report=arf"  # RFC 9477 §3.1.1
            fields.append(Field(name, value=_structured(key, value)))
    for name in message.headers:
        fields.append(_own_field(name, lines[f"headers.{name}"]))
    fields.append(Field("MIME-Version", value="1.0"))
    fields += [Field(name, value=value) for name, value in content]
    return fields


def settings_address(key: str, text: str) -> Mailbox:
    """An address of the settings, ASCII; raises SettingsError."""
    try:
        mailbox = parse_mailbox(text)
    except AddressError as problem:
        raise SettingsError(file="campaign.toml", problem=f"message.{key}: {problem}") from None
    if mailbox.needs_smtputf8:
        raise SettingsError(
            file="campaign.toml",
            problem=f"message.{key}: {text!r}: many receivers cannot answer an address beyond ASCII",
        )
    return mailbox


def return_domain(message: MessageTable) -> str:
    """Where VERP return paths live; raises SettingsError."""
    if not message.return_path_domain:
        return settings_address("from_address", message.from_address).domain
    try:
        return domain_to_ascii(message.return_path_domain)
    except AddressError as problem:
        raise SettingsError(file="campaign.toml", problem=f"message.return_path_domain: {problem}") from None


def _structured(key: str, value: str) -> str:
    try:
        value = structured(value)
        fold(key, value)
    except HeaderError as problem:
        raise SettingsError(file="campaign.toml", problem=f"message.{key}: {problem}") from None
    return value


def _date() -> Maker:
    last = (-1, "")

    def make(row: RowState) -> str:
        nonlocal last
        if last[0] != row.now_s:
            last = (row.now_s, date_value(row.now_s))
        return last[1]

    return make


def _from(sender: Mailbox, name: Line | None) -> Field:
    address = str(sender)
    if name is None or name.fixed is not None:
        return Field("From", value=mailbox_value(address, name.fixed if name else None))
    line = name
    return Field("From", make=lambda row: mailbox_value(address, line.text(row.values, row.variables)))


def _to(name: Line | None) -> Maker:
    if name is None or name.fixed == "":
        return lambda row: row.address
    line = name
    return lambda row: mailbox_value(row.address, line.text(row.values, row.variables))


def _line_field(name: str, line: Line, *, subject: bool = False) -> Field:
    lead = len(name) + 2
    if line.fixed is not None:
        return Field(name, value=unstructured(line.fixed, lead=lead))

    def make(row: RowState) -> str:
        # A subject that a body shows too is rendered already.
        text = row.subject if subject and row.subject is not None else line.text(row.values, row.variables)
        return unstructured(text, lead=lead)

    return Field(name, make=make)


def _own_field(name: str, line: Line) -> Field:
    try:
        check_field_name(name)
    except HeaderError as problem:
        raise SettingsError(file="campaign.toml", problem=f"message.headers: {problem}") from None
    if name.lower() in _REFUSED:
        raise SettingsError(
            file="campaign.toml", problem=f"message.headers: {name} is written by the engine or by relays, not here"
        )
    if name.lower() not in _STRUCTURED:
        return _line_field(name, line)
    if line.fixed is not None:
        return Field(name, value=_structured(f"headers.{name}", line.fixed))
    return Field(name, make=lambda row: structured(line.text(row.values, row.variables)))


def unsubscribe_fields(message: MessageTable) -> list[Field]:
    """List-Unsubscribe and, for one click, List-Unsubscribe-Post (RFC 2369, RFC 8058)."""
    uris = []
    if message.unsubscribe_url:
        check_unsubscribe_url(message.unsubscribe_url)
        before, _, after = message.unsubscribe_url.partition("{token}")
        uris.append((f"<{before}", f"{after.replace('{token}', '')}>"))
    if message.unsubscribe_mailto:
        address = settings_address("unsubscribe_mailto", message.unsubscribe_mailto)
        local = address.local.replace("%", "%25").replace("?", "%3F").replace("&", "%26").replace("#", "%23")
        uris.append((f"<mailto:{local}@{address.domain}?subject=", ">"))
    if not uris:
        return []

    def make(row: RowState) -> str:
        token = row.token
        return ", ".join([f"{before}{token}{after}" for before, after in uris])

    fields = [Field("List-Unsubscribe", make=make)]
    if message.unsubscribe_url and message.one_click:
        fields.append(Field("List-Unsubscribe-Post", value="List-Unsubscribe=One-Click"))
    return fields


def check_unsubscribe_url(url: str) -> None:
    """Raises SettingsError unless `url` is absolute https, in ASCII, with one `{token}` (RFC 8058 §3.1)."""

    def refuse(problem: str) -> SettingsError:
        return SettingsError(file="campaign.toml", problem=f"message.unsubscribe_url: {url!r} {problem}")

    scheme, _, rest = url.partition("://")
    if scheme.lower() != "https" or not rest.partition("/")[0].partition(":")[0].strip("."):
        raise refuse("is no absolute https URL (RFC 8058 §3.1)")
    if "{" in rest.partition("/")[0]:
        raise refuse("has a field in its host name")
    if not url.isascii() or any(c <= " " or c in '<>"\\^`|' for c in url):
        raise refuse("holds characters that a URL must write with %: blanks, quotes, letters beyond ASCII")
    if url.count("{token}") != 1:
        raise refuse("needs {token} exactly once: it says who leaves which list")
    if len(url) > 800:
        raise refuse("is too long for a header line")


def merged(fields: Sequence[Field]) -> list[tuple[str, str] | Field]:
    """Fields with fixed neighbours written and joined."""
    out: list[tuple[str, str] | Field] = []
    for field in fields:
        if field.is_made:
            out.append(field)
            continue
        if not field.value:
            continue
        try:
            ready = "\r\n" in field.value  # folded already
            written = f"{field.name}: {field.value}\r\n" if ready else field.write(field.value)
            relaxed = field.relaxed(field.value)
        except HeaderError as problem:
            raise TemplateError(place="campaign.toml [message]", problem=str(problem)) from None
        if out and isinstance(out[-1], tuple):
            out[-1] = (out[-1][0] + written, out[-1][1] + relaxed)
        else:
            out.append((written, relaxed))
    return out
