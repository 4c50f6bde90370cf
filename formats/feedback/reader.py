"""One message that came back -> `Feedback`. Puts the readers of this package in their order.

Fields first (RFC 3464, 5965), words where there are none, headers of the returned message last. A returned message is
never itself read as a report: a bounce of a bounce must not blame the first one's recipient. Only where the outer
message says nothing at all is one message inside looked at, for people forward reports to each other.
"""

from __future__ import annotations

import re
from functools import cached_property

import msgspec

from formats.feedback import automatic, mime
from formats.feedback.complaint import looks_like_complaint, read_feedback_report, recipients_of
from formats.feedback.events import read_mailed_event
from formats.feedback.report import Report, read_report
from formats.feedback.smtpwords import addresses_in, enhanced_in, fold, reply_in, squeezed, stage_in
from formats.feedback.text import Notice, from_returned, is_delay, read_notice
from formats.feedback.values import Action, Feedback, Kind, Origin, Recipient, Stage

MAX_MESSAGE = 2 * 1024 * 1024  # bytes that are looked at; the reader cuts what is longer
MAX_FORWARDS = 2

_STATUS_TYPES = frozenset({"message/delivery-status", "message/global-delivery-status"})
_RETURNED_TYPES = frozenset(
    {
        "message/rfc822",
        "message/global",
        "text/rfc822-headers",
        "message/rfc822-headers",
        "text/rfc822",
        "message/global-headers",
    }
)
_URL = re.compile(r"https://[^\s<>\"']{1,600}|mailto:[^\s<>\"']{1,400}")
# "Begin forwarded message:", "---------- Forwarded message ---------", "-----Ursprüngliche Nachricht-----"
_FORWARD = re.compile(
    r"^[ \t>-]*(?:begin forwarded message:?|forwarded message|weitergeleitete nachricht|message transféré"
    r"|mensaje reenviado|messaggio inoltrato|ursprüngliche nachricht|original message)[ \t:-]*\n"
    r"(?=(?:[ \t]*\n){0,3}[> \t]*(?:from|von|de|da)[ \t]*:)",
    re.I | re.M,
)
_ID = re.compile(r"<([^<>\s]{1,300})>")
_RANK = (Action.FAILED, Action.DELAYED, Action.EXPANDED, Action.RELAYED, Action.DELIVERED)
_KIND = {
    Action.FAILED: Kind.DELIVERY_REPORT,
    Action.NONE: Kind.DELIVERY_REPORT,
    Action.DELAYED: Kind.DELAY,
    Action.DELIVERED: Kind.DELIVERED,
    Action.RELAYED: Kind.RELAYED,
    Action.EXPANDED: Kind.EXPANDED,
}


def read_feedback(raw: bytes) -> Feedback:
    """What a message says that came back to a return path or a feedback mailbox.

    Never raises, whatever the bytes are; time and memory are linear in the bytes looked at (MAX_MESSAGE).
    """
    return _read(mime.normalised(raw[:MAX_MESSAGE]), 0)


def _read(raw: bytes, forwards: int) -> Feedback:
    headers, body = mime.split(raw)
    statuses: list[str] = []
    feedback_reports: list[str] = []
    texts: list[str] = []
    returned: list[bytes] = []
    for part in mime.leaves(headers, body):
        if part.content_type in _STATUS_TYPES:
            # Behind the returned message it is that message's own, which may use the same boundary.
            if not (statuses and returned):
                statuses.append(part.text())
        elif part.content_type == "message/feedback-report":
            feedback_reports.append(part.text())
        elif part.content_type in _RETURNED_TYPES:
            returned.append(mime.normalised(part.raw()))
        elif part.content_type.startswith("text/") and len(texts) < 4:
            texts.append(part.text())
    text = next((text for text in texts if text.strip()), "")
    read = _Message(headers, text, texts, returned)

    if feedback_reports:
        return read.complaint(feedback_reports[0])
    if statuses:
        report = read_report("\n\n".join(statuses))
        if report.recipients:
            return read.report(report)
    if looks_like_complaint(read.subject, read.returned):
        return read.complaint("")
    if text.lstrip()[:1] in ("{", "["):
        event = read_mailed_event(text)
        if event is not None:
            return event
    found = read.notice(has_report=bool(statuses))
    if found is not None:
        return found
    found = read.written()
    if found.kind in (Kind.HUMAN, Kind.UNKNOWN) and forwards < MAX_FORWARDS:
        enclosed = returned[0] if returned else _quoted_message(text)
        if enclosed:
            inner = _read(enclosed, forwards + 1)
            if inner.kind in (Kind.DELIVERY_REPORT, Kind.DELAY, Kind.COMPLAINT):
                return msgspec.structs.replace(inner, was_forwarded=True)
    return found


def _quoted_message(text: str) -> bytes:
    """A message that somebody forwarded inside their own text, quoted or not; empty where there is none."""
    text = text[: 128 * 1024]
    begin = _FORWARD.search(text)
    if begin is None:
        return b""
    rest = text[begin.end() :].lstrip("\n")
    if rest.startswith(">"):
        rest = "\n".join(re.sub(r"^>[ ]?", "", line) for line in rest.split("\n"))
    return rest.encode("utf-8", "replace")


class _Message:
    """The parts of one message and what is needed of them again and again."""

    def __init__(self, headers: mime.Headers, text: str, texts: list[str], returned: list[bytes]) -> None:
        self.headers = headers
        self.text = text
        self.texts = texts
        self.subject = headers.words("subject")[:400]
        self.returned = mime.split(returned[0])[0] if returned else None
        if self.returned is not None and not len(self.returned):
            self.returned = None
        sender = addresses_in(headers.words("from"), 1)
        self.sender = sender[0] if sender else ""

    @cached_property
    def _notice(self) -> Notice:
        return Notice(self.text)

    def report(self, report: Report) -> Feedback:
        """A delivery report by its fields, completed from its words."""
        recipients = [self._completed(recipient, len(report.recipients)) for recipient in report.recipients]
        worst = min((recipient.action for recipient in recipients), key=_rank)
        return self._feedback(_KIND[worst], tuple(recipients), mta=report.reporting_mta, message_id=report.message_id)

    def _completed(self, recipient: Recipient, count: int) -> Recipient:
        """`recipient` with the address and the reason that the fields lack and the words have."""
        lacks_reason = not recipient.diagnostic or (not recipient.reply.code and len(recipient.diagnostic) < 4)
        if recipient.address and not lacks_reason:
            if recipient.stage is Stage.NONE and recipient.reply.code and count == 1:
                return msgspec.structs.replace(recipient, stage=stage_in(self.text))
            return recipient
        notice = self._notice
        address, origin = recipient.address, recipient.origin
        if not address:
            named = self._named()
            if count == 1 and len(named) == 1:
                address, origin = named[0], Origin.HEADER
            else:
                told = read_notice(notice, ours=self._ours(), returned_to=self._returned_to(), named=named)
                told = told or from_returned(notice, self._returned_to())
                if count == 1 and told:
                    address, origin = told[0].address, told[0].origin
        reply, status, diagnostic, stage = recipient.reply, recipient.status, recipient.diagnostic, recipient.stage
        if lacks_reason and self.text:
            told = read_notice(notice, ours=frozenset(), returned_to=(), named=())
            wanted = {fold(address), fold(recipient.original)}
            mine = [one for one in told if fold(one.address) in wanted] or (told if count == len(told) == 1 else [])
            words = mine[0].diagnostic if mine else (squeezed(notice.words) if count == 1 else "")
            if words:
                diagnostic = squeezed(f"{diagnostic} {words}")
                reply = reply if reply.code else reply_in(words)
                quoted = enhanced_in(words)
                if quoted and (not status or status.endswith(".0.0")):
                    status = quoted
        if stage is Stage.NONE and count == 1:
            stage = stage_in(notice.words)
        return msgspec.structs.replace(
            recipient, address=address, status=status, reply=reply, diagnostic=diagnostic, stage=stage, origin=origin
        )

    def complaint(self, fields: str) -> Feedback:
        """A complaint, by its report or by the message it encloses."""
        read = read_feedback_report(fields, self.returned)
        origin = Origin.REPORT if fields else Origin.RETURNED
        recipients = tuple(Recipient(address=address, action=Action.NONE, origin=origin) for address in read.recipients)
        return self._feedback(Kind.COMPLAINT, recipients, mta=read.reporting_mta, feedback_type=read.feedback_type)

    def notice(self, *, has_report: bool) -> Feedback | None:
        """A notice in words, None where this is none."""
        headers = self.headers
        is_report = has_report or "delivery-status" in headers.get("content-type").lower()
        is_system = is_report or automatic.is_from_system(headers)
        announces = automatic.announces_failure(self.subject)
        if not is_system and not announces and automatic.is_automatic_reply(headers, self.subject, self.text):
            return None
        for text in self.texts or [""]:
            fields = read_report(text) if "-recipient" in text.lower() else None
            if fields and fields.recipients and any(one.address for one in fields.recipients) and _has_verdict(text):
                return self.report(fields)
            notice = Notice(text)
            if not (is_system or announces or (notice.is_plausible and self._is_machine())):
                continue
            if not notice.is_plausible and not is_system:
                continue
            returned_to = self._returned_to() or tuple(
                recipients_of(mime.Headers(notice.returned.lstrip("\n").encode("utf-8", "replace")))
                if notice.returned
                else ()
            )
            if not notice.returned and not returned_to:
                returned_to = _mentioned_to(text)
            recipients = read_notice(notice, ours=self._ours(notice), returned_to=returned_to, named=self._named())
            if not recipients and (is_report or announces or notice.is_plausible):
                recipients = from_returned(notice, returned_to)
            if not recipients:
                continue
            if is_delay(self.subject):
                recipients = [_delayed(recipient) for recipient in recipients]
            kind = Kind.DELAY if all(one.action is Action.DELAYED for one in recipients) else Kind.DELIVERY_REPORT
            return self._feedback(kind, tuple(recipients), notice=notice)
        if is_report or (is_system and announces):
            # A notice that names nobody: our token may still tell whom it is about.
            kind = Kind.DELAY if is_delay(self.subject) or is_delay(self.text[:4000]) else Kind.DELIVERY_REPORT
            named = self._named()
            nobody = Recipient(
                address=named[0] if len(named) == 1 else "",
                action=Action.DELAYED if kind is Kind.DELAY else Action.FAILED,
                status=enhanced_in(self.text),
                reply=reply_in(self.text[:4000]),
                diagnostic=squeezed(self.text),
                stage=stage_in(self.text[:8000]),
                origin=Origin.HEADER if named else Origin.GUESS,
            )
            return self._feedback(kind, (nobody,))
        return None

    def written(self) -> Feedback:
        """What a person, or a program in a person's name, wrote."""
        headers, subject, text = self.headers, self.subject, self.text
        author = Recipient(address=self.sender, action=Action.NONE, origin=Origin.HEADER)
        authors = (author,) if self.sender else ()
        if automatic.asks_to_unsubscribe(subject, text):
            return self._feedback(Kind.UNSUBSCRIBE, authors, feedback_type="opt-out")
        if automatic.is_automatic_reply(headers, subject, text):
            return self._feedback(Kind.AUTO_REPLY, authors)
        if automatic.is_from_system(headers) or not self.sender or not (subject or text.strip()):
            return self._feedback(Kind.UNKNOWN, ())
        return self._feedback(Kind.HUMAN, authors)

    def _is_machine(self) -> bool:
        headers = self.headers
        submitted = headers.get("auto-submitted").lower()
        return (
            automatic.has_null_return_path(headers)
            or submitted not in ("", "no")
            or bool(
                re.search(
                    r"no-?reply|do-?not-?reply|admin|owner|list|notify|notification",
                    self.sender.partition("@")[0],
                    re.I,
                )
            )
        )

    def _named(self) -> tuple[str, ...]:
        return tuple(address for value in self.headers.all("x-failed-recipients") for address in addresses_in(value))

    def _returned_to(self) -> tuple[str, ...]:
        return tuple(recipients_of(self.returned)) if self.returned is not None else ()

    def _ours(self, notice: Notice | None = None) -> frozenset[str]:
        """Folded addresses that are likely ours: where the report went, and who sent the returned message."""
        values = [self.headers.get("to"), self.headers.get("delivered-to"), self.headers.get("from")]
        returned = self.returned
        if returned is None and notice is not None and notice.returned:
            returned = mime.Headers(notice.returned.lstrip("\n").encode("utf-8", "replace"))
        if returned is not None:
            values += [returned.get("from"), returned.get("return-path"), returned.get("sender")]
        return frozenset(fold(address) for value in values for address in addresses_in(value, 3))

    def _feedback(
        self,
        kind: Kind,
        recipients: tuple[Recipient, ...],
        *,
        mta: str = "",
        message_id: str = "",
        feedback_type: str = "",
        notice: Notice | None = None,
    ) -> Feedback:
        headers, returned = self.headers, self.returned
        if returned is None and notice is not None and notice.returned:
            returned = mime.Headers(_header_of(notice.returned))
        ids = [message_id] if message_id else []
        sources = [headers.get("in-reply-to"), headers.get("references")]
        original_to: tuple[str, ...] = ()
        original_sender = ""
        if returned is not None:
            sources.insert(0, returned.get("message-id"))
            original_to = tuple(recipients_of(returned))
            senders = addresses_in(returned.get("from"), 1)
            original_sender = senders[0] if senders else ""
        for value in sources:
            ids.extend(found[1] for found in _ID.finditer(value[:4000]))
        return Feedback(
            kind=kind,
            recipients=recipients,
            reporting_mta=mta or self._greeting_host(),
            feedback_type=feedback_type,
            token_texts=self._token_texts(returned, kind),
            message_ids=tuple(dict.fromkeys(ids))[:10],
            original_recipients=original_to[:20],
            original_sender=original_sender,
            sender=self.sender,
            subject=self.subject,
        )

    def _greeting_host(self) -> str:
        host = self.sender.rpartition("@")[2].lower()
        return host if automatic.is_from_system(self.headers) else ""

    def _token_texts(self, returned: mime.Headers | None, kind: Kind) -> tuple[str, ...]:
        """Where one of our tokens may stand: the address it came to first, then what the returned message carries."""
        texts: list[str] = []
        for name in ("x-original-to", "envelope-to", "delivered-to", "x-envelope-to", "x-rcpt-to", "to", "cc"):
            for value in self.headers.all(name):
                texts.extend(addresses_in(value, 5))
        if kind in (Kind.UNSUBSCRIBE, Kind.HUMAN, Kind.AUTO_REPLY):
            texts.append(self.subject)
        if returned is not None:
            for name in ("return-path", "x-return-path", "sender", "errors-to"):
                texts.extend(addresses_in(returned.get(name), 2))
            texts.extend(found[0] for found in _URL.finditer(returned.get("list-unsubscribe")))
        return tuple(dict.fromkeys(text for text in texts if text))[:20]


def _header_of(returned: str) -> bytes:
    """The header block of a returned message quoted in a notice, behind the marker line."""
    lines = returned.lstrip("\n").split("\n")
    for number, line in enumerate(lines[:12]):
        if re.match(r"[A-Za-z][A-Za-z0-9-]*:[ \t]?\S", line):
            return "\n".join(lines[number : number + 400]).partition("\n\n")[0].encode("utf-8", "replace")
    return b""


def _mentioned_to(text: str) -> tuple[str, ...]:
    """A `To:` line in the notice itself, where hosts list the returned header without a marker."""
    found = re.findall(r"^[> \t]*To[ \t]*:[ \t]*([^\n]*@[^\n]*)", text[:20_000], re.M | re.I)
    return tuple(addresses_in(found[-1], 5)) if found else ()


def _has_verdict(text: str) -> bool:
    return bool(re.search(r"^[ \t>]*(?:action|status)[ \t]*:", text, re.M | re.I))


def _delayed(recipient: Recipient) -> Recipient:
    return msgspec.structs.replace(recipient, action=Action.DELAYED)


def _rank(action: Action) -> int:
    return _RANK.index(action) if action in _RANK else 0
