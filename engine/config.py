"""Campaign settings: `campaign.toml` read into frozen structs. Unknown keys, wrong types and missing files are errors
that name key, file and what was expected.

One struct per table of the file. Durations are written "90s", "5m", "1h", "2d" or as a number of seconds. Secrets
never stand in the file: `password_env` and `password_file` say where they are.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, ClassVar, Literal

import msgspec

from engine.errors import EngineError, Exit

SETTINGS_FILE = "campaign.toml"

_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(s|m|h|d)\Z")
_UNIT_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}


class SettingsError(EngineError):
    """{file}: {problem}."""

    exit_code = Exit.SETTINGS
    hint = "Correct {file}; the guide `settings.md` lists every key with its default and reason."


class Duration:
    """A length of time in seconds.

    A plain class, for msgspec asks `decode_custom` only about types it does not know.
    """

    __slots__ = ("seconds",)

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Duration) and other.seconds == self.seconds

    def __hash__(self) -> int:
        return hash(self.seconds)

    def __repr__(self) -> str:
        return f"Duration({self.seconds:g})"

    @classmethod
    def parse(cls, text: object) -> Duration:
        """From "90s", "5m", "1h", "2d" or a number of seconds; raises ValueError."""
        if isinstance(text, int | float) and not isinstance(text, bool) and text >= 0:
            return cls(float(text))
        if isinstance(text, str) and (found := _DURATION.match(text)):
            return cls(float(found[1]) * _UNIT_S[found[2]])
        raise ValueError(f'expected a duration such as "90s", "5m", "1h" or "2d", got {text!r}')

    def __str__(self) -> str:
        for unit in ("d", "h", "m"):
            if self.seconds >= _UNIT_S[unit] and self.seconds % _UNIT_S[unit] == 0:
                return f"{self.seconds / _UNIT_S[unit]:g}{unit}"
        return f"{self.seconds:g}s"


def _minutes(*values: float) -> tuple[Duration, ...]:
    return tuple(Duration(value * 60) for value in values)


class Table(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One table of the settings file."""


class CampaignTable(Table, frozen=True, kw_only=True):
    """[campaign]"""

    id: str  # names the campaign in tokens, logs and the store; frozen at plan
    list_id: str = "main"  # the scope of an unsubscribe
    # Rows are attempted from `not_before` on and no more after `expires_at` (ISO 8601 with offset).
    not_before: str | None = None
    expires_at: str | None = None


class ListTable(Table, frozen=True, kw_only=True):
    """[list]"""

    address_column: str = "email"
    id_column: str | None = None  # default: `id` where the list has one
    # A column of IANA zones ("Europe/Berlin"): each row goes in the hours of [schedule] as its own clocks show them.
    zone_column: str | None = None
    batch_rows: int = 10_000


class InlineImage(Table, frozen=True, kw_only=True):
    """[[message.inline]]: an image that the HTML names as cid:NAME."""

    cid: str
    path: str


class Attachment(Table, frozen=True, kw_only=True):
    """[[message.attachments]]: a fixed file, or one named by a column of the row."""

    path: str | None = None
    column: str | None = None
    filename: str | None = None
    content_type: str | None = None


class MessageTable(Table, frozen=True, kw_only=True):
    """[message]: what the recipient sees. Frozen at plan. Texts may hold template fields where marked (T)."""

    from_address: str
    from_name: str | None = None  # (T)
    to_name: str | None = None  # (T)
    reply_to: str | None = None
    subject: str  # (T)
    text: str | None = None  # template file, relative to the campaign folder
    html: str | None = None  # template file
    text_from_html: bool = True  # without `text`, make the text part from the HTML
    preheader: str | None = None
    language: str | None = None  # Content-Language, and the locale of filters
    timezone: str = "UTC"  # zone in which the `date` filter shows timestamps
    list_id: str | None = None  # List-Id header, e.g. "weekly.example.org"
    unsubscribe_url: str | None = None  # https URL; {token} is filled in (RFC 8058)
    unsubscribe_mailto: str | None = None  # address; the token goes into the subject
    one_click: bool = True
    feedback_id: str | None = None
    cfbl_address: str | None = None
    precedence: str | None = None
    auto_submitted: str | None = None
    headers: dict[str, str] = {}  # own headers (T)
    inline: tuple[InlineImage, ...] = ()
    attachments: tuple[Attachment, ...] = ()
    return_path_domain: str | None = None  # VERP return paths at this domain; default: the domain of from_address
    return_path: str | None = None  # one fixed return path in place of VERP


class DkimTable(Table, frozen=True, kw_only=True):
    """[[dkim]]: one signature. The first is used alone unless `also = true` on a later one."""

    domain: str
    selector: str
    key_file: str
    algorithm: Literal["rsa-sha256", "ed25519-sha256"] = "rsa-sha256"
    canonicalization: Literal["relaxed/simple", "relaxed/relaxed"] = "relaxed/simple"
    also: bool = False


class KeysTable(Table, frozen=True, kw_only=True):
    """[keys]: the secret behind Message-IDs, return paths and unsubscribe tokens."""

    file: str = "keys/secret.keys"


class DeliveryTable(Table, frozen=True, kw_only=True):
    """[delivery]: how messages leave. Live: connections, messages_per_second, messages_per_connection."""

    mode: Literal["relay", "direct"] = "relay"
    relay: str = "smtp://127.0.0.1:2525"  # smtp:// or smtps://, host and port
    tls: Literal["required", "verified", "opportunistic", "off"] = "required"  # for smtp:// by STARTTLS
    tls_ca_file: str | None = None
    username: str | None = None
    password_env: str | None = None
    password_file: str | None = None
    greeting_name: str | None = None  # EHLO; default: this host's name
    connections: int = 20
    messages_per_connection: int = 1000
    messages_per_second: float | None = None
    # Messages handed to a connection and not yet answered. It bounds what a lost connection leaves in doubt.
    pipeline_depth: int = 4
    pipelining: bool = True
    chunking: bool = True
    # uvloop costs less CPU with TLS and no more without; "auto" takes it for TLS where it is installed.
    event_loop: Literal["auto", "asyncio", "uvloop"] = "auto"
    # mode = "direct": sources and limits per provider stand in budgets.toml beside this file.
    nameservers: tuple[str, ...] = ()  # "ADDRESS" or "ADDRESS:PORT"; default: the machine's
    smtp_port: int = 25
    allow_private_hosts: bool = False  # MX hosts at private and loopback addresses, for tests and inner networks
    # RFC 8461: a domain's published word that its hosts speak verified TLS. It costs a DNS question a domain.
    mta_sts: bool = True
    mta_sts_port: int = 443
    connect_timeout: Duration = Duration(10.0)
    idle_timeout: Duration = Duration(30.0)
    dot_timeout: Duration = Duration(600.0)  # RFC 5321 §4.5.3.2.6 asks for ten minutes
    # A connection that has messages in hand and answers none of them for so long is cut, and told; a provider that
    # answers nothing is told. Twice the longest wait that RFC 5321 grants for one reply; never less than dot_timeout.
    stuck_after: Duration = Duration(1200.0)
    # Without a connection for so long the run ends (exit 75), so that a job scheduler may start it again later.
    give_up_after: Duration = Duration(300.0)


class RetryTable(Table, frozen=True, kw_only=True):
    """[retry]: live. After 1, 5, 30 minutes, then hourly, up to 24 hours."""

    plan: tuple[Duration, ...] = _minutes(1, 5, 30, 60)  # the last one repeats
    max_age: Duration = Duration(24 * 3600.0)
    jitter: float = 0.1  # each interval is multiplied by 1 ± jitter


class LogTable(Table, frozen=True, kw_only=True):
    """[log]"""

    durability: Literal["disk", "process"] = "disk"
    log_addresses: bool = False
    level: Literal["debug", "info", "warning", "error"] = "info"
    log_store: str | None = None  # finished logs are copied there as well: s3://, gs:// or file:// (pyarrow.fs)


class ControlTable(Table, frozen=True, kw_only=True):
    """[control]: where machines meet."""

    store: str = "sqlite"  # or postgresql://... ; a password belongs into PGPASSWORD or ~/.pgpass
    lease: Duration = Duration(60.0)


class ImapTable(Table, frozen=True, kw_only=True):
    """[[bounces.imap]]: a mailbox that gets what comes back."""

    url: str  # imaps://user@host[:port] or imap:// (STARTTLS, unless tls = "off")
    tls: Literal["verified", "unverified", "off"] = "verified"
    tls_ca_file: str | None = None
    password_env: str | None = None
    password_file: str | None = None
    mailboxes: tuple[str, ...] = ("INBOX",)
    handled: str = "Handled"  # where messages are moved once they are recorded
    unmatched: str = "Unmatched"  # and those that are for people to look at


class BouncesTable(Table, frozen=True, kw_only=True):
    """[bounces]: live. What comes back, and when it suppresses."""

    sources: tuple[str, ...] = ()  # Maildirs, mboxes, folders; relative to the campaign folder
    imap: tuple[ImapTable, ...] = ()
    # Five soft bounces on different days, the first and the last a week apart: a full mailbox is no abandoned one.
    soft_bounces: int = 5
    soft_over: Duration = Duration(7 * 86400.0)
    soft_within: Duration = Duration(90 * 86400.0)
    # A provider that calls more than a tenth of its rows unknown within six hours is broken itself.
    breaker_bounces: int = 50
    breaker_share: float = 0.1
    breaker_within: Duration = Duration(6 * 3600.0)
    # Reports without a token of ours are believed where the address is on the list. Anybody can write such a report:
    # false asks for a token or a Message-ID of ours.
    by_address: bool = True
    delete_handled: bool = False  # Maildir and IMAP: delete what was matched and recorded


class SuppressionTable(Table, frozen=True, kw_only=True):
    """[suppression]: live."""

    # Entries older than this become keyed hashes by `engine forget --expired`: nobody is named, all stay suppressed.
    retention_days: int | None = None


class OutboxTable(Table, frozen=True, kw_only=True):
    """[outbox]: live. Single mails of applications; the guide `outbox.md`."""

    store: str = "sqlite:outbox.sqlite"  # beside this file, or postgresql://...
    # In a campaign: the outbox folder that `engine send` serves beside it, within the campaign's budgets.
    folder: str | None = None
    claim_rows: int = 100  # rows of one priority claimed at a time; newsletters in the outbox never more than this
    lease: Duration = Duration(30.0)


class ScheduleTable(Table, frozen=True, kw_only=True):
    """[schedule]: live. When this campaign may send; `not_before` and `expires_at` stand in [campaign]."""

    hours: str | None = None  # "08:00-20:00"; over midnight "22:00-06:00"
    days: tuple[str, ...] = ()  # "mon", "tue", ...; default: every day
    # An IANA zone, e.g. "Europe/Berlin"; also of moments without an offset, and of rows whose zone column is no help.
    zone: str = "UTC"


class StopTable(Table, frozen=True, kw_only=True):
    """[stop]: live. A run pauses its campaign and ends when something is plainly wrong."""

    error_share: float | None = None  # of answered rows, refused for good: 0.1 says that the list is no good
    complaint_share: float | None = None  # 0.003 is what large mailbox providers name as too much
    after_rows: int = 500  # fewer answers prove nothing


class Settings(Table, frozen=True, kw_only=True):
    """The whole file."""

    campaign: CampaignTable
    list: ListTable = ListTable()
    message: MessageTable
    dkim: tuple[DkimTable, ...] = ()
    keys: KeysTable = KeysTable()
    delivery: DeliveryTable = DeliveryTable()
    retry: RetryTable = RetryTable()
    log: LogTable = LogTable()
    control: ControlTable = ControlTable()
    bounces: BouncesTable = BouncesTable()

    suppression: SuppressionTable = SuppressionTable()
    outbox: OutboxTable = OutboxTable()
    schedule: ScheduleTable = ScheduleTable()
    stop: StopTable = StopTable()

    # What may change while the campaign runs; the rest is frozen at `plan`.
    LIVE: ClassVar[frozenset[str]] = frozenset(
        {"delivery", "retry", "log", "bounces", "suppression", "outbox", "schedule", "stop"}
    )


def decode_custom(kind: type, value: Any) -> Any:
    """The `dec_hook` of every settings file: knows `Duration`."""
    if kind is Duration:
        return Duration.parse(value)
    raise NotImplementedError(kind)


def encode_custom(value: Any) -> Any:
    """msgspec's enc_hook for the types of this module."""
    if isinstance(value, Duration):
        return value.seconds
    raise NotImplementedError(type(value))


def parse_settings(raw: bytes, *, file: str = SETTINGS_FILE) -> Settings:
    """The settings in the bytes of a campaign.toml; raises SettingsError naming key and expectation."""
    try:
        return msgspec.toml.decode(raw, type=Settings, dec_hook=decode_custom)
    except (msgspec.MsgspecError, UnicodeDecodeError, ValueError) as problem:
        raise SettingsError(file=file, problem=str(problem)) from None


def load_settings(folder: Path) -> Settings:
    """The settings of the campaign in `folder`; raises SettingsError."""
    path = folder / SETTINGS_FILE
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise NoCampaign(folder=folder) from None
    except OSError as problem:
        raise SettingsError(file=path, problem=problem.strerror) from None
    return parse_settings(raw, file=str(path))


class NoCampaign(EngineError):
    """There is no campaign in {folder}: it has no campaign.toml."""

    exit_code = Exit.SETTINGS
    hint = "run `engine init`, or name the folder with --campaign DIR."
