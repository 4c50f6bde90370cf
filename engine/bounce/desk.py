"""The desk: a message that came back is read, matched, judged, acted upon, recorded. Knows no mailbox.

In this order, so that a crash anywhere repeats work and loses none: suppressions first (adding twice is adding once),
then the record (durable), then the caller may mark the message as handled. A message whose key was recorded before is
only marked.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import msgspec

from engine.bounce.breaker import BreakerLimit, Breakers
from engine.bounce.classify import Confidence, Finding, ProviderOf, classify
from engine.bounce.lastresort import address_by_flufl
from engine.bounce.ours import Match, Ours, Trust, canonical_or_none
from engine.bounce.record import FeedbackWriter, feedback_tables
from engine.bounce.soft import SoftCounts, SoftLimit
from engine.clock import Clock
from engine.config import BouncesTable
from engine.host import boot_id, host_id
from engine.lists.suppressions import Suppressions
from engine.pace.rules import RuleBook
from engine.route.provider import load_providers, registrable_domain
from formats.feedback import Feedback, Kind, Recipient, read_feedback
from formats.feedbacklog import Decision, FeedbackRecord
from formats.sendlog import Header
from formats.suppression import ALL, Entry, Reason
from formats.verp import TokenKind

SOFT_FOLDER = "soft"  # beside the suppressions: soft bounces are counted over all campaigns that share them


class Incoming(msgspec.Struct, frozen=True, kw_only=True):
    """One message or event as a source gave it. `raw` may leave out the middle of a large message."""

    raw: bytes
    source: str
    event: Feedback | None = None  # a webhook's event, read already


class Taken(msgspec.Struct, frozen=True, kw_only=True):
    """What the desk made of one message."""

    key: str
    kind: Kind
    findings: tuple[Finding, ...] = ()
    decisions: tuple[Decision, ...] = ()
    is_matched: bool = False  # about a row of ours, and nothing that people must look at
    was_known: bool = False


@cache
def known_providers() -> ProviderOf:
    """A reporting or remote host's provider: a known name, else its registrable domain; None for a bare IP address."""
    book = load_providers()

    def provider_of(host: str) -> str | None:
        if not any(character.isalpha() for character in host):
            return None
        return book.of_host(host) or registrable_domain(host)

    return provider_of


def message_key(raw: bytes) -> str:
    """What tells one message from another, wherever it is found: 32 hex digits."""
    return hashlib.blake2b(raw, digest_size=16).hexdigest()


class Desk:
    """Takes messages for the campaigns in `ours`; close it when done."""

    def __init__(
        self,
        ours: Ours,
        rules: RuleBook,
        clock: Clock,
        *,
        provider_of: ProviderOf | None = None,
        settings: BouncesTable | None = None,
    ) -> None:
        self._ours = ours
        self._rules = rules
        self._clock = clock
        self._provider_of = provider_of or known_providers()
        first = ours.campaigns[0]
        self._settings = settings or (first.settings.bounces if first.settings else BouncesTable())
        self._incarnation = secrets.token_hex(8)
        self._writers: dict[Path, FeedbackWriter] = {}
        self._suppressions: dict[Path, Suppressions] = {}
        self._soft: dict[Path, SoftCounts] = {}
        self._known: dict[str, bool] = {}  # message -> was it matched
        for one in ours.campaigns:
            for _, table in feedback_tables([one.campaign.feedback]):
                for key, decision in zip(table["message"].to_pylist(), table["decision"].to_pylist(), strict=True):
                    self._known[key] = self._known.get(key, True) and decision not in _FOR_PEOPLE
        provider_rows: dict[str, int] = {}
        all_rows = 0
        for one in ours.campaigns:
            if one.plan is not None:
                all_rows += one.plan.rows
                for provider, rows in one.plan.provider_rows.items():
                    provider_rows[provider] = provider_rows.get(provider, 0) + rows
        table_ = self._settings
        limit = BreakerLimit(table_.breaker_bounces, table_.breaker_share, table_.breaker_within.seconds / 3600.0)
        self.breakers = Breakers(limit, provider_rows, all_rows)

    def close(self) -> None:
        """Seal the logs of this run."""
        for writer in self._writers.values():
            writer.close()
        self._writers.clear()

    def take(self, messages: Sequence[Incoming]) -> list[Taken]:
        """Read, match, judge, act on and record `messages`; what this returns is durable.

        Raises FeedbackUnwritable, SuppressionsUnreadable; the messages are then still unhandled.
        """
        keys = [message_key(message.raw) for message in messages]
        fresh: dict[int, Feedback] = {}
        seen: set[str] = set()
        for place, (key, message) in enumerate(zip(keys, messages, strict=True)):
            if key not in self._known and key not in seen:
                fresh[place] = message.event or _read(message.raw)
                seen.add(key)
        matches = self._match(fresh)
        taken: list[Taken] = []
        records: dict[Path, list[FeedbackRecord]] = {}
        now = self._clock.wall_us()
        for place, (key, message) in enumerate(zip(keys, messages, strict=True)):
            feedback = fresh.get(place)
            if feedback is None:
                taken.append(Taken(key=key, kind=Kind.UNKNOWN, is_matched=self._known.get(key, False), was_known=True))
                continue
            match = matches[place]
            if match.kind is TokenKind.UNSUBSCRIBE and feedback.kind in (Kind.HUMAN, Kind.UNKNOWN):
                # Mail to the address that List-Unsubscribe names, the token in its subject: there is no other reason.
                feedback = msgspec.structs.replace(feedback, kind=Kind.UNSUBSCRIBE)
            sure = match.trust is not Trust.ADDRESS
            findings = classify(feedback, self._rules, named=match.named, sure=sure, provider_of=self._provider_of)
            decisions = [self._decide(finding, match, now) for finding in findings]
            if not findings:
                findings = [Finding(kind=feedback.kind, address="", diagnostic=feedback.subject[:200])]
                decisions = [Decision.FORGED if match.was_forged else Decision.UNMATCHED]
            for finding, decision in zip(findings, decisions, strict=True):
                home = self._ours.home_of(finding.campaign_id) if finding.campaign_id else self._ours.campaigns[0]
                record = _record(key, now, finding, decision, message.source)
                records.setdefault(home.campaign.feedback, []).append(record)
                if decision is Decision.COUNTED:
                    soft = home.campaign.suppression / SOFT_FOLDER
                    records.setdefault(soft, []).append(record)
            is_matched = not _FOR_PEOPLE.intersection(decisions)
            taken.append(
                Taken(
                    key=key,
                    kind=feedback.kind,
                    findings=tuple(findings),
                    decisions=tuple(decisions),
                    is_matched=is_matched,
                )
            )
            self._known[key] = is_matched
        for folder, lines in records.items():
            self._writer(folder).append(lines)
        return taken

    # --- matching --------------------------------------------------------------------------------------------------

    def _match(self, fresh: dict[int, Feedback]) -> dict[int, Match]:
        matches = {place: self._ours.match_token(feedback) for place, feedback in fresh.items()}
        addresses = self._ours.with_addresses([match.named for match in matches.values() if match.named])
        for place, match in matches.items():
            if match.named is not None:
                address = addresses.get((match.named.campaign_id, match.named.row), "")
                matches[place] = msgspec.structs.replace(
                    match, named=msgspec.structs.replace(match.named, address=address)
                )
        wanted = {
            place: (feedback, _addresses(feedback))
            for place, feedback in fresh.items()
            # A forged token spoils the message: whoever made it up wanted to be believed. One of another house's
            # campaign says that the message is about their mail, not ours.
            if matches[place] == Match() and _addresses(feedback)
        }
        if wanted and self._settings.by_address:
            matches.update(self._ours.match_addresses(wanted))
        return matches

    # --- deciding --------------------------------------------------------------------------------------------------

    def _decide(self, finding: Finding, match: Match, now: int) -> Decision:
        """What to do about one finding; suppressions are added here."""
        if match.was_forged:
            return Decision.FORGED
        if match.named is None or finding.kind is Kind.HUMAN:
            return Decision.UNMATCHED
        if finding.is_test:
            return Decision.NONE
        home = self._ours.home_of(finding.campaign_id)
        address = canonical_or_none(finding.address)
        if address is None:
            return Decision.UNMATCHED if finding.kind in _ACTS else Decision.NONE
        is_sure = finding.confidence is not Confidence.WEAK
        match finding.kind:
            case Kind.COMPLAINT if is_sure:
                self._suppress(home.campaign.suppression, address, ALL, Reason.COMPLAINT, finding.campaign_id, now)
                return Decision.SUPPRESSED
            case Kind.UNSUBSCRIBE if is_sure:
                scope = finding.list_id or home.list_id
                self._suppress(home.campaign.suppression, address, scope, Reason.UNSUBSCRIBE, finding.campaign_id, now)
                return Decision.UNSUBSCRIBED
            case Kind.DELIVERY_REPORT if finding.hard and is_sure:
                if self.breakers.add(finding.provider, now):
                    return Decision.PROVISIONAL
                self._suppress(home.campaign.suppression, address, ALL, Reason.BOUNCE, finding.campaign_id, now)
                return Decision.SUPPRESSED
            case Kind.DELIVERY_REPORT if finding.counts and is_sure:
                if self._counts(home.campaign.suppression).add(address, now):
                    self._suppress(home.campaign.suppression, address, ALL, Reason.BOUNCE, finding.campaign_id, now)
                    return Decision.SUPPRESSED
                return Decision.COUNTED
            case Kind.DELIVERED:
                self._counts(home.campaign.suppression).forget(address)
        return Decision.NONE

    def _suppress(self, folder: Path, address: str, scope: str, reason: Reason, campaign_id: str, now: int) -> None:
        if folder not in self._suppressions:
            self._suppressions[folder] = Suppressions(folder, list_id=None)
        self._suppressions[folder].add([Entry(address, scope, reason, f"campaign {campaign_id}", now)])

    def _counts(self, folder: Path) -> SoftCounts:
        if folder not in self._soft:
            table = self._settings
            limit = SoftLimit(
                table.soft_bounces, table.soft_over.seconds / 86400.0, table.soft_within.seconds / 86400.0
            )
            counts = SoftCounts(limit)
            for _, past in feedback_tables([folder / SOFT_FOLDER]):
                ats = past["at"].cast("int64").to_pylist()
                for address, at in zip(past["address"].to_pylist(), ats, strict=True):
                    if (known := canonical_or_none(address)) is not None:
                        counts.add(known, at)
            self._soft[folder] = counts
        return self._soft[folder]

    def _writer(self, folder: Path) -> FeedbackWriter:
        if folder not in self._writers:
            now = self._clock.wall_us()
            header = Header(
                log_id=secrets.token_hex(16),
                campaign_id=self._ours.campaigns[0].campaign_id,
                plan_fingerprint="",
                incarnation=self._incarnation,
                sender="bounces",
                host_id=host_id(),
                boot_id=boot_id(),
                worker=0,
                started_at_us=now,
            )
            self._writers[folder] = FeedbackWriter(folder / f"{now:020}-{self._incarnation}.arrows", header)
        return self._writers[folder]


_FOR_PEOPLE = frozenset({Decision.UNMATCHED, Decision.FORGED})
_ACTS = frozenset({Kind.COMPLAINT, Kind.UNSUBSCRIBE, Kind.DELIVERY_REPORT})


def _read(raw: bytes) -> Feedback:
    """`read_feedback`, and the last resort for the address where a report names nobody."""
    feedback = read_feedback(raw)
    if feedback.kind is Kind.DELIVERY_REPORT and not any(one.address for one in feedback.recipients):
        found = address_by_flufl(raw)
        if found:
            old = feedback.recipients[0] if feedback.recipients else Recipient(address="")
            recipients = tuple(msgspec.structs.replace(old, address=address) for address in found)
            feedback = msgspec.structs.replace(feedback, recipients=recipients)
    return feedback


def _addresses(feedback: Feedback) -> list[str]:
    """The addresses by which a message without a token may be matched, the best first."""
    named = [address for one in feedback.recipients for address in (one.original, one.address) if address]
    if feedback.kind in (Kind.COMPLAINT, Kind.DELIVERY_REPORT, Kind.DELAY):
        named += feedback.original_recipients
    return list(dict.fromkeys(named))[:20]


def _record(key: str, now: int, finding: Finding, decision: Decision, source: str) -> FeedbackRecord:
    return FeedbackRecord(
        message=key,
        at=now,
        kind=finding.kind,
        campaign=finding.campaign_id,
        row=finding.row,
        is_test=finding.is_test,
        address=finding.address,
        verdict=finding.verdict,
        reason=finding.reason,
        class_=finding.class_,
        scope=finding.scope,
        hard=finding.hard,
        counts=finding.counts,
        confidence=finding.confidence,
        decision=decision,
        status=finding.status,
        code=finding.code if 0 <= finding.code < 65536 else 0,
        provider=finding.provider,
        text=finding.diagnostic,
        source=source,
    )
