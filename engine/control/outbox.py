"""The outbox: a table into which applications write single mails, and what the engine asks of it.

One row is one message to one address. A server of the outbox (`engine serve-outbox`, or the part of `engine send` that
serves it beside a campaign) *claims* rows under a fresh token, says `intend` of a group before any of its dots may
leave, and *reports* how each came out. PROTOCOL "The outbox": a row that `intend` does not name is not sent; when a
server is gone, its rows without an intent are queued again (the token is void), the others are in doubt unless the
server's own log says more. Reports need no lease: a late one resolves doubt.

Times at rest are UTC microseconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Protocol

import msgspec

from engine.errors import EngineError, Exit


class OutboxAway(EngineError):
    """The outbox {where} cannot be used now: {problem}."""

    exit_code = Exit.TRY_AGAIN
    hint = "Nothing is attempted without it. Look at the disk or the server; the engine tries again by itself."


class OutboxRefused(EngineError):
    """The outbox refuses this mail: {problem}."""

    exit_code = Exit.USAGE
    hint = "The guide `outbox.md` lists the columns and what they take."


class State(StrEnum):
    """Of a row. Those from `accepted` on are outcomes, the words of campaigns."""

    QUEUED = "queued"
    SENDING = "sending"
    WAITING = "waiting"  # between attempts
    ACCEPTED = "accepted"
    BOUNCED = "bounced"
    DEFERRED = "deferred"  # gave up after the maximum age
    IN_DOUBT = "in_doubt"
    SUPPRESSED = "suppressed"
    INVALID = "invalid"
    UNSENT = "unsent"


OPEN = frozenset({State.QUEUED, State.SENDING, State.WAITING})


class Mail(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an application writes. Either `template` with `fields`, or `subject` with `text` or `html`."""

    address: str
    priority: int = 3  # 1 sign-up, 2 notification, 3 newsletter
    template: str | None = None
    fields: dict[str, object] = {}
    subject: str | None = None
    text: str | None = None
    html: str | None = None
    headers: dict[str, str] = {}
    attachments: tuple[str, ...] = ()  # paths in the outbox folder
    not_before_us: int = 0
    expires_at_us: int | None = None
    idempotency_key: str | None = None


class Enqueued(msgspec.Struct, frozen=True):
    """The row of a mail; `is_new` False: its idempotency key was there before, nothing was added."""

    id: int
    is_new: bool


class Claimed(msgspec.Struct, frozen=True, array_like=True):
    """A row that is ours to attempt, in the order of the claim statement's columns."""

    id: int
    priority: int
    address: str
    template: str | None
    fields: str  # JSON, as written
    subject: str | None
    text: str | None
    html: str | None
    headers: str  # JSON
    attachments: str  # JSON
    expires_at_us: int | None
    attempts: int
    first_at_us: int | None
    created_at_us: int
    token: str
    claimed_at_us: int  # the store's time

    @property
    def is_expired(self) -> bool:
        return self.expires_at_us is not None and self.expires_at_us <= self.claimed_at_us


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """How a claimed row came out. `wait_us` is for `waiting` and `queued`: due so long from the store's now."""

    id: int
    token: str
    state: State
    reason: str | None = None
    code: int | None = None
    reply: str | None = None
    attempts: int = 0
    wait_us: int = 0
    begun: bool = False  # its age counts from now on, though nothing of it was attempted


class Held(msgspec.Struct, frozen=True, array_like=True):
    """A row that a server is sending."""

    id: int
    token: str
    owner: str
    has_intent: bool
    attempts: int


class Server(msgspec.Struct, frozen=True, array_like=True):
    """One start of a process that serves the outbox, and its lease."""

    id: str
    kind: str
    sender: str
    host_id: str
    boot_id: str
    pid: int
    state: str
    started_at_us: int
    renewed_at_us: int
    lease_us: int

    def is_expired(self, now_us: int) -> bool:
        """The lease has run out: it may be dead, and has no right to new intents once superseded."""
        return self.renewed_at_us + self.lease_us < now_us


class Count(msgspec.Struct, frozen=True, array_like=True):
    """Rows of a priority in a state for a reason, and the oldest of them."""

    priority: int
    state: str
    reason: str
    rows: int
    oldest_at_us: int


class Shown(msgspec.Struct, frozen=True, array_like=True):
    """A row as `engine outbox show` prints it."""

    id: int
    priority: int
    address: str
    template: str | None
    state: str
    reason: str | None
    code: int | None
    reply: str | None
    attempts: int
    not_before_us: int
    created_at_us: int
    changed_at_us: int | None
    idempotency_key: str | None


class Outbox(Protocol):
    """The promises. What writes has committed, durably, when it returns; any may raise OutboxAway.

    Methods may be called from one thread at a time.
    """

    def enqueue(self, mails: Sequence[Mail]) -> list[Enqueued]:
        """Add mails, all or none; one whose idempotency key is known is not added again. Raises OutboxRefused."""

    def now_us(self) -> int:
        """The store's time."""

    def claim(self, owner: str, token: str, priority: int, most: int) -> list[Claimed]:
        """Up to `most` due rows of a priority, oldest first, marked as being sent by `owner` under `token`."""

    def intend(self, rows: Sequence[tuple[int, str]]) -> set[int]:
        """(row, token) of a group about to be sent: the rows that still may be. One statement."""

    def report(self, reports: Sequence[Report]) -> None:
        """How rows came out. Repeats and late ones are harmless."""

    def join(self, server: Server) -> None:
        """A new server with its lease."""

    def renew(self, server: str) -> bool:
        """Renew the lease. False: superseded; the caller stops wholly."""

    def leave(self, server: str) -> None:
        """The server ends in order."""

    def supersede(self, server: str) -> None:
        """Mark a dead server's lease dead. Done and committed before its rows are looked at."""

    def servers(self) -> list[Server]:
        """All of them, oldest first."""

    def owners(self) -> list[str]:
        """Servers that hold rows."""

    def held(self, owner: str) -> list[Held]:
        """The rows a server is sending."""

    def release(self, owner: str) -> int:
        """The dead server's rows without an intent are queued again, their token void; how many."""

    def resend(self, rows: Sequence[int]) -> int:
        """An operator's word: attempt these again, though they are in doubt, invalid, unsent or given up."""

    def accept(self, rows: Sequence[int]) -> int:
        """An operator's word: these rows in doubt were sent."""

    def cancel(self, rows: Sequence[int]) -> int:
        """These queued or waiting rows will not be sent."""

    def tally(self) -> list[Count]:
        """Rows by priority, state and reason."""

    def rows(self, state: str | None, after: int, most: int) -> list[Shown]:
        """Rows in the order of their numbers."""

    def forget(self, before_us: int) -> int:
        """Delete rows that had their outcome before then; how many."""

    def knobs(self) -> dict[str, str]:
        """What the operator set while servers run: `paused` with a reason."""

    def set_knob(self, name: str, value: str) -> None:
        """Set one; servers see it within a second."""

    def changed(self) -> bool:
        """Whether somebody else may have written since the last call. Never waits."""

    def close(self) -> None:
        """Let go of the store."""


def values_of(mail: Mail) -> tuple[object, ...]:
    """A mail in the order of the enqueue statement's columns; raises OutboxRefused."""
    if mail.priority not in (1, 2, 3):
        raise OutboxRefused(problem=f"priority is 1, 2 or 3, not {mail.priority}")
    if mail.template is None and (mail.subject is None or (mail.text is None and mail.html is None)):
        raise OutboxRefused(problem="it has neither a template nor a subject with text or html")
    if not mail.address or not mail.address.strip():
        raise OutboxRefused(problem="it has no address")
    encode = msgspec.json.encode
    try:
        fields, headers = encode(mail.fields).decode(), encode(mail.headers).decode()
        attachments = encode(mail.attachments).decode()
    except (TypeError, ValueError, msgspec.MsgspecError) as problem:
        raise OutboxRefused(problem=f"its fields are no JSON: {problem}") from None
    return (
        mail.priority,
        mail.address,
        mail.template,
        fields,
        mail.subject,
        mail.text,
        mail.html,
        headers,
        attachments,
        mail.not_before_us,
        mail.expires_at_us,
        mail.idempotency_key,
    )
