"""What a reply can mean: scopes, classes, what each class does by default. Values only.

A rule names a class; everything it leaves unsaid comes from the class's manner here.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from formats.sendlog import Reason, Verdict


class Scope(StrEnum):
    """Whose affair a reply is: everything that shares it will get the same answer."""

    CONNECTION = "connection"  # this connection, this host, now
    SOURCE = "source"  # our address or its name, at this provider
    SIGNING_DOMAIN = "signing_domain"  # our domain, its records, at this provider
    CAMPAIGN = "campaign"  # the account at the relay: every row
    MESSAGE = "message"  # this message, this attempt
    RECIPIENT = "recipient"  # this mailbox
    OURS = "ours"  # we spoke or were configured wrongly


class Class_(StrEnum):
    """What is the matter."""

    UNKNOWN_USER = "unknown_user"
    BAD_DOMAIN = "bad_domain"  # the domain takes no mail (null MX, RFC 7505; host unknown)
    DISABLED = "disabled"
    MOVED = "moved"
    MAILBOX_FULL = "mailbox_full"
    RECIPIENT_RATE = "recipient_rate"  # this mailbox receives too fast
    RECIPIENT_REFUSES = "recipient_refuses"  # the person or their administrator does not want us
    GREYLISTED = "greylisted"
    RATE = "rate"
    TOO_MANY_CONNECTIONS = "too_many_connections"
    TOO_MANY_PER_CONNECTION = "too_many_per_connection"
    TOO_MANY_RECIPIENTS = "too_many_recipients"
    REPUTATION = "reputation"
    BLOCKLISTED = "blocklisted"
    REVERSE_DNS = "reverse_dns"  # PTR, greeting name
    AUTHENTICATION = "authentication"  # SPF, DKIM, DMARC
    TLS_REQUIRED = "tls_required"
    SENDER_REFUSED = "sender_refused"  # MAIL FROM or its domain
    CONTENT = "content"  # spam, links
    VIRUS = "virus"
    FORMAT = "format"  # RFC 5322 and what providers add to it
    SIZE = "size"
    POLICY = "policy"
    RELAY_DENIED = "relay_denied"
    LOGIN = "login"
    QUOTA = "quota"  # our account's allowance at the relay
    PROTOCOL = "protocol"
    LOOP = "loop"
    SERVER_BUSY = "server_busy"  # theirs: disk, database, configuration
    NETWORK = "network"  # theirs: behind the MX
    EXPIRED = "expired"  # their relay gave up (seen in delivery reports)
    SHUTDOWN = "shutdown"
    UNCLEAR = "unclear"  # no rule knew it: judged by the first digit alone


class Action(msgspec.Struct, frozen=True):
    """What whoever paces this provider does about it, in the judgement's scope.

    It is due at the `after`-th such reply within `within_s` seconds (1: at the first). The pace module may know
    better; these are the providers' own words where they publish any.
    """

    pause_s: float = 0.0  # no new transaction for so long
    connections: int | None = None  # then go on with so many connections, growing one at a time
    fewer_connections: bool = False
    fewer_per_connection: bool = False
    slower: bool = False  # lower the rate
    alarm: bool = False  # tell the operator: retrying alone will not help
    after: int = 1
    within_s: float = 0.0


NOTHING = Action()


class Judgement(msgspec.Struct, frozen=True):
    """Our reading of one reply. `wait_s` is the text's own hint or the rule's, None: the retry plan decides."""

    verdict: Verdict
    reason: Reason
    scope: Scope
    class_: Class_
    rule: str
    suppress: bool = False
    wait_s: float | None = None
    action: Action = NOTHING


class Outcome(StrEnum):
    """How a class turns a code into a verdict."""

    BY_CODE = "by_code"
    DEFERRED = "deferred"
    REJECTED = "rejected"
    LOST = "lost"  # before the final dot; at the dot deferred


class Manner(msgspec.Struct, frozen=True):
    """What a class means where its rule says nothing more."""

    scope: Scope
    outcome: Outcome
    reason: Reason
    action: Action = NOTHING
    wait_s: float | None = None
    suppress: bool = False


_STOP_SOON = Action(pause_s=3600.0, alarm=True, after=5, within_s=60.0)

MANNERS: dict[Class_, Manner] = {
    Class_.UNKNOWN_USER: Manner(Scope.RECIPIENT, Outcome.BY_CODE, Reason.RECIPIENT, suppress=True),
    Class_.BAD_DOMAIN: Manner(Scope.RECIPIENT, Outcome.BY_CODE, Reason.RECIPIENT, suppress=True),
    Class_.DISABLED: Manner(Scope.RECIPIENT, Outcome.BY_CODE, Reason.RECIPIENT, suppress=True),
    Class_.MOVED: Manner(Scope.RECIPIENT, Outcome.BY_CODE, Reason.RECIPIENT, suppress=True),
    Class_.MAILBOX_FULL: Manner(Scope.RECIPIENT, Outcome.BY_CODE, Reason.RECIPIENT),
    Class_.RECIPIENT_RATE: Manner(Scope.RECIPIENT, Outcome.DEFERRED, Reason.RECIPIENT, wait_s=3600.0),
    Class_.RECIPIENT_REFUSES: Manner(Scope.RECIPIENT, Outcome.BY_CODE, Reason.POLICY),
    Class_.GREYLISTED: Manner(Scope.MESSAGE, Outcome.DEFERRED, Reason.POLICY),
    Class_.RATE: Manner(Scope.SOURCE, Outcome.DEFERRED, Reason.POLICY, Action(pause_s=60.0, slower=True)),
    Class_.TOO_MANY_CONNECTIONS: Manner(Scope.CONNECTION, Outcome.LOST, Reason.POLICY, Action(fewer_connections=True)),
    Class_.TOO_MANY_PER_CONNECTION: Manner(
        Scope.CONNECTION, Outcome.LOST, Reason.POLICY, Action(fewer_per_connection=True)
    ),
    Class_.TOO_MANY_RECIPIENTS: Manner(Scope.MESSAGE, Outcome.DEFERRED, Reason.POLICY),
    Class_.REPUTATION: Manner(
        Scope.SOURCE, Outcome.DEFERRED, Reason.POLICY, Action(pause_s=3600.0, connections=1, alarm=True)
    ),
    Class_.BLOCKLISTED: Manner(
        Scope.SOURCE, Outcome.DEFERRED, Reason.POLICY, Action(pause_s=7200.0, connections=1, alarm=True)
    ),
    Class_.REVERSE_DNS: Manner(Scope.SOURCE, Outcome.BY_CODE, Reason.SENDER, _STOP_SOON),
    Class_.AUTHENTICATION: Manner(Scope.SIGNING_DOMAIN, Outcome.BY_CODE, Reason.SENDER, _STOP_SOON),
    Class_.TLS_REQUIRED: Manner(Scope.OURS, Outcome.BY_CODE, Reason.SENDER, _STOP_SOON),
    Class_.SENDER_REFUSED: Manner(Scope.SIGNING_DOMAIN, Outcome.BY_CODE, Reason.SENDER, _STOP_SOON),
    # The same content goes to everybody: twenty refusals in ten minutes are the campaign's affair.
    Class_.CONTENT: Manner(
        Scope.MESSAGE, Outcome.BY_CODE, Reason.CONTENT, Action(alarm=True, pause_s=3600.0, after=20, within_s=600.0)
    ),
    Class_.VIRUS: Manner(Scope.MESSAGE, Outcome.BY_CODE, Reason.CONTENT, Action(alarm=True, after=5, within_s=600.0)),
    Class_.FORMAT: Manner(Scope.MESSAGE, Outcome.BY_CODE, Reason.CONTENT, Action(alarm=True, after=5, within_s=600.0)),
    Class_.SIZE: Manner(Scope.MESSAGE, Outcome.BY_CODE, Reason.SIZE),
    Class_.POLICY: Manner(
        Scope.MESSAGE, Outcome.BY_CODE, Reason.POLICY, Action(alarm=True, pause_s=600.0, after=20, within_s=600.0)
    ),
    Class_.RELAY_DENIED: Manner(
        Scope.OURS, Outcome.BY_CODE, Reason.POLICY, Action(alarm=True, pause_s=600.0, after=20, within_s=600.0)
    ),
    Class_.LOGIN: Manner(Scope.CAMPAIGN, Outcome.LOST, Reason.SENDER, Action(pause_s=300.0, connections=1, alarm=True)),
    Class_.QUOTA: Manner(Scope.CAMPAIGN, Outcome.DEFERRED, Reason.POLICY, Action(pause_s=600.0, alarm=True)),
    Class_.PROTOCOL: Manner(Scope.OURS, Outcome.BY_CODE, Reason.POLICY, Action(alarm=True, after=5, within_s=600.0)),
    Class_.LOOP: Manner(Scope.MESSAGE, Outcome.BY_CODE, Reason.POLICY),
    Class_.SERVER_BUSY: Manner(
        Scope.CONNECTION, Outcome.BY_CODE, Reason.POLICY, Action(slower=True, after=5, within_s=60.0)
    ),
    Class_.NETWORK: Manner(Scope.MESSAGE, Outcome.BY_CODE, Reason.POLICY),
    Class_.EXPIRED: Manner(Scope.MESSAGE, Outcome.BY_CODE, Reason.POLICY),
    Class_.SHUTDOWN: Manner(Scope.CONNECTION, Outcome.LOST, Reason.POLICY),
    Class_.UNCLEAR: Manner(Scope.MESSAGE, Outcome.BY_CODE, Reason.POLICY),
}
