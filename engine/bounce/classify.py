"""What came back -> findings: who it is about, what it means, whether it deserves a suppression. Pure.

The same rules judge a delivery report that judge live replies (`pace.rules`); `reports.toml` adds the words of
reporting hosts that quote no reply. Hard is only what says that nobody is there; everything else may be counted.
Never do delays, successes, automatic replies or what people wrote suppress anybody.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from enum import StrEnum
from functools import cache
from pathlib import Path

import msgspec

from engine.pace.judgement import Class_, Judgement, Scope
from engine.pace.rules import RuleBook, load_rules
from formats.feedback import Action, Feedback, Kind, Origin, Recipient, Stage
from formats.reply import Reply
from formats.sendlog import Reason, Verdict

ProviderOf = Callable[[str], str | None]

_REPORT_WORDS = Path(__file__).with_name("reports.toml")
_STAGE = {
    Stage.NONE: "report",
    Stage.CONNECT: "greeting",
    Stage.EHLO: "ehlo",
    Stage.MAIL: "mail",
    Stage.RCPT: "rcpt",
    Stage.DATA: "data",
    Stage.CONTENT: "dot",
}
# Classes that say "not now" or "not this mailbox now": several of them over days mean that nobody reads there.
_COUNTS = frozenset(
    {
        Class_.MAILBOX_FULL,
        Class_.DISABLED,
        Class_.UNKNOWN_USER,
        Class_.BAD_DOMAIN,
        Class_.MOVED,
        Class_.EXPIRED,
        Class_.NETWORK,
        Class_.RECIPIENT_REFUSES,
    }
)


class Confidence(StrEnum):
    """How sure the recipient is."""

    CERTAIN = "certain"  # a token of ours, checked
    LIKELY = "likely"  # a report's own field, or its words at a recipient's place
    WEAK = "weak"  # guessed, or inside a message that somebody forwarded


class Named(msgspec.Struct, frozen=True):
    """The row that a checked token or Message-ID names."""

    campaign_id: str
    list_id: str
    row: int
    is_test: bool = False
    address: str = ""  # where the list was asked


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One statement about one recipient. `row` is None where only an address is known."""

    kind: Kind
    address: str
    campaign_id: str = ""
    list_id: str = ""
    row: int | None = None
    is_test: bool = False
    verdict: Verdict = Verdict.NONE  # REJECTED: bounced; ACCEPTED: it arrived somewhere; NONE: says nothing
    reason: Reason = Reason.NONE
    class_: Class_ = Class_.UNCLEAR
    scope: Scope = Scope.MESSAGE
    rule: str = ""
    hard: bool = False  # nobody is there
    counts: bool = False  # soft: enough of them over days suppress
    confidence: Confidence = Confidence.LIKELY
    status: str = ""
    code: int = 0
    diagnostic: str = ""
    provider: str = ""
    feedback_type: str = ""


@cache
def report_words() -> RuleBook:
    """The rules for reporting hosts' own words, without those for live replies."""
    from engine.pace.rules import _compiled, read_rules

    return RuleBook(_compiled(text, _REPORT_WORDS.name) for text in read_rules(_REPORT_WORDS).rule)


@cache
def shipped_rules() -> RuleBook:
    """The rules for live replies as shipped."""
    return load_rules()


def no_provider(host: str) -> str | None:
    """Where no table of providers is at hand."""
    return None


def classify(
    feedback: Feedback,
    rules: RuleBook,
    *,
    named: Named | None = None,
    sure: bool = True,
    provider_of: ProviderOf = no_provider,
) -> list[Finding]:
    """What `feedback` says of each recipient; `named` is the row it is about, `sure` if a checked token says so."""
    match feedback.kind:
        case Kind.DELIVERY_REPORT | Kind.DELAY | Kind.DELIVERED | Kind.RELAYED | Kind.EXPANDED:
            findings = [_reported(one, feedback, rules, provider_of) for one in feedback.recipients]
        case Kind.COMPLAINT | Kind.UNSUBSCRIBE | Kind.AUTO_REPLY | Kind.HUMAN:
            findings = [_spoken(one, feedback) for one in feedback.recipients] or [_spoken(None, feedback)]
        case _:
            findings = []
    if named is None:
        return [finding for finding in findings if finding.address]
    return _about(named, findings or [_spoken(None, feedback)], sure)


def _about(named: Named, findings: list[Finding], sure: bool) -> list[Finding]:
    """The findings of a message whose token names one row: one message of ours has one recipient.

    A forward may have given it another address, so the row counts and the reported address is only told. Of several
    reported recipients (an expanded alias) the row is as well off as the best of them.
    """
    best = min(findings, key=lambda one: (one.verdict is Verdict.REJECTED, one.hard))
    if named.address:
        wanted = named.address.casefold()
        mine = [one for one in findings if one.address.casefold() == wanted]
        best = mine[0] if mine else best
    return [
        msgspec.structs.replace(
            best,
            campaign_id=named.campaign_id,
            list_id=named.list_id,
            row=named.row,
            is_test=named.is_test,
            address=named.address or best.address,
            confidence=Confidence.CERTAIN if sure else best.confidence,
        )
    ]


def _confidence(recipient: Recipient | None, feedback: Feedback) -> Confidence:
    if recipient is None or feedback.was_forwarded or recipient.origin in (Origin.GUESS, Origin.RETURNED):
        return Confidence.WEAK
    return Confidence.LIKELY


def _spoken(recipient: Recipient | None, feedback: Feedback) -> Finding:
    """A complaint, a request or a reply: it arrived, whatever else it says."""
    # An authentication report and "not spam" are no complaints, though they come in the same envelope (RFC 6591).
    kind = feedback.kind
    if kind is Kind.COMPLAINT and feedback.feedback_type in ("auth-failure", "not-spam", "dmarc"):
        kind = Kind.UNKNOWN
    return Finding(
        kind=kind,
        address=(recipient.original or recipient.address) if recipient else "",
        verdict=Verdict.ACCEPTED if kind is not Kind.UNKNOWN else Verdict.NONE,
        confidence=_confidence(recipient, feedback),
        diagnostic=feedback.subject[:200],
        feedback_type=feedback.feedback_type,
    )


def _reported(recipient: Recipient, feedback: Feedback, rules: RuleBook, provider_of: ProviderOf) -> Finding:
    host = recipient.remote_mta or feedback.reporting_mta
    provider = provider_of(host) if host else None
    if provider is None and recipient.remote_mta and feedback.reporting_mta:
        provider = provider_of(feedback.reporting_mta)
    failed = recipient.action in (Action.FAILED, Action.NONE)
    judgement = judge(recipient, rules, provider) if failed or recipient.action is Action.DELAYED else None
    is_hard = failed and judgement is not None and judgement.suppress
    return Finding(
        kind=feedback.kind if feedback.kind is not Kind.DELIVERY_REPORT or failed else _kind_of(recipient.action),
        address=recipient.original or recipient.address,
        verdict=Verdict.REJECTED if failed else Verdict.ACCEPTED,
        reason=_reason(judgement) if failed and judgement else Reason.NONE,
        class_=judgement.class_ if judgement else Class_.UNCLEAR,
        scope=judgement.scope if judgement else Scope.MESSAGE,
        rule=judgement.rule if judgement else "",
        hard=is_hard,
        counts=bool(failed and judgement and not is_hard and judgement.class_ in _COUNTS),
        confidence=_confidence(recipient, feedback),
        status=recipient.status,
        code=recipient.reply.code,
        diagnostic=recipient.diagnostic,
        provider=provider or "",
    )


def _kind_of(action: Action) -> Kind:
    return {
        Action.DELAYED: Kind.DELAY,
        Action.DELIVERED: Kind.DELIVERED,
        Action.RELAYED: Kind.RELAYED,
        Action.EXPANDED: Kind.EXPANDED,
    }.get(action, Kind.DELIVERY_REPORT)


def _reason(judgement: Judgement) -> Reason:
    return judgement.reason if judgement.reason is not Reason.NONE else Reason.POLICY


def judge(recipient: Recipient, rules: RuleBook, provider: str | None) -> Judgement:
    """The rules' word on what a report quotes; the reporting host's own words where it quotes nothing.

    A report that gave up for a passing reason (`Status: 4.x`) never is hard: it is the host that lost patience.
    """
    reply = quoted_reply(recipient)
    judgement = rules.judge(_STAGE[recipient.stage], reply, provider)
    is_unclear = judgement.class_ is Class_.UNCLEAR
    if is_unclear or judgement.class_ in _BROAD or judgement.rule.endswith("-by-number"):
        told = report_words().judge("report", Reply(reply.code, f"{reply.text} {recipient.diagnostic}".strip()), None)
        # Before RCPT nothing is about the recipient, whatever the words are.
        may_suppress = told.suppress and recipient.stage not in _NOT_YET
        if may_suppress or (is_unclear and told.class_ is not Class_.UNCLEAR and not told.suppress):
            judgement = told
    if judgement.suppress and _says_otherwise(recipient):
        judgement = msgspec.structs.replace(judgement, suppress=False)
    return judgement


def _says_otherwise(recipient: Recipient) -> bool:
    """Whether the words contradict a status that says nobody is there: `550 5.1.1 ... too many recipients this hour`.

    Status codes are set by hand in filters; 41 % of the 5xx in a public corpus were not about the recipient.
    """
    words = _URL.sub("", recipient.reply.text or recipient.diagnostic)
    told = report_words().judge("report", Reply(550, words), None)
    return told.class_ in _CONTRADICT


_URL = re.compile(r"\S*(?:https?://|www\.)\S*")
_CONTRADICT = frozenset(
    {
        Class_.RATE,
        Class_.BLOCKLISTED,
        Class_.AUTHENTICATION,
        Class_.REVERSE_DNS,
        Class_.CONTENT,
        Class_.VIRUS,
        Class_.MAILBOX_FULL,
    }
)
# Classes that a live rule may have read off the status' number alone: words that say nobody is there outweigh them.
_BROAD = frozenset({Class_.NETWORK, Class_.SERVER_BUSY, Class_.POLICY})
_NOT_YET = frozenset({Stage.CONNECT, Stage.EHLO, Stage.MAIL})


def quoted_reply(recipient: Recipient) -> Reply:
    """The reply that a report quotes, its best status in front; made up from the status where it quotes none."""
    reply, status = recipient.reply, recipient.status
    code = reply.code
    if not code:
        code = 450 if status.startswith("4") or recipient.action is Action.DELAYED else 550
    elif status.startswith("4") and code >= 500:
        code = 450
    text = reply.text or recipient.diagnostic
    if status and not text.startswith(status):
        text = f"{status} {text}"
    return Reply(code, text)


def hard(findings: Iterable[Finding]) -> list[Finding]:
    """Those that deserve a suppression by themselves: nobody is there, and it is sure enough whom it is about."""
    return [one for one in findings if one.hard and one.confidence is not Confidence.WEAK and not one.is_test]
