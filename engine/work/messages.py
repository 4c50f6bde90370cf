"""What supervisor and worker say to each other: batches, slots, counters and row numbers; never content.

Each message is one msgpack object in one frame of a `Channel`. Times at rest are UTC microseconds, spans are seconds.
A key is (source, provider): the unit in which slots and allowances are handed out.
"""

from __future__ import annotations

import msgspec

from engine.work.recovery import Waiting

Key = tuple[str, str]


class Message(msgspec.Struct, frozen=True, tag=True):
    """One message, told apart by its tag."""


# -- supervisor to worker ---------------------------------------------------------------------------------------------


class Assign(Message, frozen=True):
    """Rows first_row .. first_row + rows - 1 are this worker's until each has its outcome.

    `skip` has a bit set (numpy.packbits order) for each row that is not to be attempted now: final, held in doubt, or
    waiting; empty means none. `waiting` are the rows between attempts. `limit` caps the rows attempted.
    """

    batch: int
    first_row: int
    rows: int
    skip: bytes = b""
    waiting: list[Waiting] = []
    resent: list[int] = []
    limit: int | None = None


class Grant(Message, frozen=True):
    """Connections that may be opened, until given back."""

    key: Key
    connections: int


class Revoke(Message, frozen=True):
    """Connections to close, when what is in hand is answered."""

    key: Key
    connections: int


class Allow(Message, frozen=True):
    """Messages that may be sent, within `valid_s` from now."""

    key: Key
    messages: int
    valid_s: float


class Pace(Message, frozen=True):
    """The throttle's word on a key: nothing for `for_s` seconds (0: go on), at most so many messages a connection."""

    key: Key
    for_s: float
    reason: str
    per_connection: int | None = None
    is_rated: bool = False


class Tripped(Message, frozen=True):
    """The breaker of a provider opened or closed: "unknown user" defers meanwhile."""

    provider: str
    is_open: bool


class Resend(Message, frozen=True):
    """An operator's word: the doubt of these rows is cancelled, attempt them again."""

    rows: list[int]


class Live(Message, frozen=True):
    """Live settings, as JSON of the tables `delivery`, `retry` and `schedule`."""

    delivery: bytes
    retry: bytes
    schedule: bytes = b"{}"


class Pause(Message, frozen=True):
    """Attempt nothing new (or go on), with the reason the operator sees."""

    paused: bool
    reason: str


class Drain(Message, frozen=True):
    """No new attempts; final dots awaited; seal the log and end."""


class Admitted(Message, frozen=True):
    """The rows of these intents are in an open window: they may be sent."""

    serials: list[int]


class NotAdmitted(Message, frozen=True):
    """They are in none: they are given back unattempted."""

    serials: list[int]
    is_alive: bool  # our lease


Down = Assign | Grant | Revoke | Allow | Pace | Tripped | Resend | Live | Pause | Drain | Admitted | NotAdmitted

# -- worker to supervisor ---------------------------------------------------------------------------------------------


class Started(Message, frozen=True):
    """The worker holds its log and takes batches."""

    log_id: str


class ProviderCount(msgspec.Struct, frozen=True, array_like=True):
    """Since the last pulse: verdicts at one provider, and its connections now."""

    provider: str
    accepted: int
    rejected: int
    deferred: int
    lost: int
    in_doubt: int
    connections: int


class Seen(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An answer (or `count` accepted ones) as the throttle wants it. Times are the machine's monotonic seconds."""

    key: Key
    scope: str
    signal: str
    count: int
    at: float
    started_at: float
    reply_s: float | None = None
    on_connection: int | None = None  # messages accepted before it on its connection
    pause_s: float | None = None
    then_connections: int | None = None
    unknown: bool = False
    text: str = ""
    # What the rule that judged it asks for, at the `after`-th such reply within `within_s`.
    rule: str = ""
    after: int = 1
    within_s: float = 0.0
    alarm: bool = False


class Pulse(Message, frozen=True):
    """Five times a second: what happened since the last one, and what is so now. It is the worker's sign of life."""

    invalid: int
    suppressed: int
    expired: int
    providers: list[ProviderCount]
    unread: int  # rows assigned and not looked at yet
    open_rows: int  # rows without an outcome
    ready: int
    parked: int
    waiting: int
    in_flight: int
    next_due_us: int | None
    demand: list[tuple[Key, int]]
    spent: list[tuple[Key, int, float]]  # messages sent on allowances, and when
    seen: list[Seen]
    suppress: list[tuple[int, str, str]]  # rows refused for good about the recipient: row, provider, reply
    rejected_unsent: int  # refused by DNS, without a connection
    reason: str  # why nothing moves, where nothing does
    warm: list[Key] = []  # keys at which a connection is to be kept though no row waits
    urgent: list[tuple[Key, int]] = []  # rows of the demand that go before everybody else's
    asleep: int = 0  # of `waiting`, rows for the hours of their zone
    opens_at: tuple[int, str] | None = None  # when the first of them wake, and how people of their zone write that
    zoneless: tuple[int, int] = (0, 0)  # rows read without a zone, and with what is none: they follow the campaign's
    commits: list[float] = []  # of the log since the last pulse: by time taken (COMMIT_BUCKETS_S), then their seconds


class BatchDone(Message, frozen=True):
    """Each row of the batch has its outcome, or is held in doubt."""

    batch: int
    in_doubt: int


class Released(Message, frozen=True):
    """Connection slots given back."""

    key: Key
    connections: int


class Unused(Message, frozen=True):
    """Allowance given back before it expired."""

    key: Key
    messages: int


class Reported(msgspec.Struct, frozen=True, array_like=True):
    """A result, for the store. Times are this machine's wall clock; `serial` 0: it needed no attempt."""

    serial: int
    row: int
    batch: int
    verdict: int
    reason: int
    code: int
    attempt: int
    due_us: int
    first_us: int


class Admit(Message, frozen=True):
    """A shared store: may these rows be sent? (intent's serial, row, batch); and how far the log has come."""

    rows: list[tuple[int, int, int]]
    length: int
    seal: str


class Report(Message, frozen=True):
    """A shared store: what became of rows."""

    reports: list[Reported]


class Told(Message, frozen=True):
    """An event for the operator's log."""

    level: str
    event: str
    fields: dict[str, str | int | float]


class Stopped(Message, frozen=True):
    """The worker attempts nothing more, for a reason that concerns the whole run."""

    exit_code: int
    problem: str
    hint: str


class Goodbye(Message, frozen=True):
    """The log is sealed; the process ends now. `open_rows` were given back unattempted or wait."""

    open_rows: int


Up = Started | Pulse | BatchDone | Released | Unused | Told | Stopped | Goodbye | Admit | Report
