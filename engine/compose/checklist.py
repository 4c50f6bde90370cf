"""What bulk senders' rules ask of a composed message, and whether all rows compose.

The rules are those that Gmail, Yahoo, Microsoft, Apple, GMX and Orange publish for senders of many messages (2024 to
2026); each finding says who asks. Pure: takes bytes, gives findings. What DNS must say is `dnscheck.py`.
"""

from __future__ import annotations

import email
import email.policy
import re
from collections.abc import Iterable, Iterator, Sequence
from email.message import EmailMessage
from enum import StrEnum
from html.parser import HTMLParser

import msgspec

from engine.compose.render import Composer, RowProblem
from formats.address import AddressError, Mailbox, parse_mailbox

GMAIL_CLIP = 102 * 1024  # bytes of HTML after which Gmail hides the rest behind a link
_FREE_MAIL = frozenset(
    {"gmail.com", "googlemail.com", "yahoo.com", "aol.com", "outlook.com", "hotmail.com", "live.com", "icloud.com",
     "me.com", "gmx.de", "gmx.net", "web.de", "mail.ru", "t-online.de", "orange.fr", "laposte.net"}
)  # fmt: skip
_ABSOLUTE = re.compile(r"(?:https?://[^/\s]|mailto:|tel:|sms:|cid:|data:image/|#)", re.IGNORECASE)


class Severity(StrEnum):
    """How bad a finding is."""

    OK = "ok"
    WARN = "warn"
    ERROR = "error"


class Finding(msgspec.Struct, frozen=True):
    """One line of the checklist: what was looked at, how it is, and why that matters."""

    subject: str
    severity: Severity
    reason: str


def worst(findings: Iterable[Finding]) -> Severity:
    """The worst severity among them."""
    return max((finding.severity for finding in findings), key=list(Severity).index, default=Severity.OK)


def are_aligned(domain: str, other: str) -> bool:
    """DMARC's relaxed alignment, as far as names tell without the DNS: one is the other, or lies below it."""
    return domain == other or domain.endswith("." + other) or other.endswith("." + domain)


class _Page(HTMLParser):
    """Links, images and declared charset of an HTML part."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.links: list[str] = []
        self.images: list[str] = []
        self.without_alt = 0
        self.charset: str | None = None

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if tag in ("a", "area") and "href" in values:
            self.links.append(values["href"] or "")
        if tag == "img":
            self.images.append(values.get("src") or "")
            self.without_alt += "alt" not in values
        if values.get("background"):
            self.images.append(values["background"] or "")
        if tag == "meta":
            declared = values.get("charset") or (values.get("content") or "").lower().partition("charset=")[2]
            self.charset = declared or self.charset


def check_message(content: bytes, *, return_path: str | None = None) -> list[Finding]:
    """The checklist for one message as it would go out."""
    message = email.message_from_bytes(content, policy=email.policy.default)
    assert isinstance(message, EmailMessage)
    return [
        *_check_sender(message, return_path),
        *_check_signature(message),
        *_check_unsubscribe(message),
        *_check_fields(message),
        *_check_body(message),
    ]


def _ok(subject: str, reason: str) -> Finding:
    return Finding(subject, Severity.OK, reason)


def _warn(subject: str, reason: str) -> Finding:
    return Finding(subject, Severity.WARN, reason)


def _error(subject: str, reason: str) -> Finding:
    return Finding(subject, Severity.ERROR, reason)


def _from_domain(message: EmailMessage) -> str:
    addresses = message["From"].addresses if message["From"] else ()
    return str(addresses[0].domain).lower() if addresses else ""


def _check_sender(message: EmailMessage, return_path: str | None) -> Iterator[Finding]:
    domain = _from_domain(message)
    if domain in _FREE_MAIL:
        yield _error(
            "from", f"{domain} asks receivers by DMARC to refuse its name from other servers; use your own domain"
        )
    else:
        yield _ok("from", f"one address at {domain}")
    if return_path:
        theirs = return_path.rpartition("@")[2].lower()
        if are_aligned(theirs, domain):
            yield _ok("return-path", f"{theirs} is aligned with {domain}: SPF counts for DMARC")
        else:
            yield _warn("return-path", f"{theirs} is not aligned with {domain}: DMARC rests on DKIM alone")


def _check_signature(message: EmailMessage) -> Iterator[Finding]:
    signatures = [str(value) for value in message.get_all("DKIM-Signature", [])]
    domain = _from_domain(message)
    if not signatures:
        yield _error(
            "dkim", "not signed here; Gmail, Yahoo, Microsoft, Apple and GMX refuse bulk mail without DKIM. "
            "Sign ([[dkim]]), unless the relay does"
        )  # fmt: skip
        return
    tags = [_tags(signature) for signature in signatures]
    if any(are_aligned(one.get("d", "").lower(), domain) for one in tags):
        yield _ok("dkim", f"signed by {', '.join(one.get('d', '?') for one in tags)}, aligned with {domain}")
    else:
        yield _error(
            "dkim", f"no signature is aligned with {domain}: DMARC fails, and GMX refuses (aligned DKIM mandatory)"
        )
    covered = set(re.sub(r"\s", "", tags[0].get("h", "")).lower().split(":"))
    for name in ("List-Unsubscribe", "List-Unsubscribe-Post", "Feedback-ID"):
        if message[name] and name.lower() not in covered:
            yield _error("dkim", f"{name} is not covered by the signature (RFC 8058 §4)")


def _tags(signature: str) -> dict[str, str]:
    pairs = (part.partition("=") for part in signature.split(";"))
    return {name.strip(): value.strip() for name, _, value in pairs}


def _check_unsubscribe(message: EmailMessage) -> Iterator[Finding]:
    value, post = str(message["List-Unsubscribe"] or ""), str(message["List-Unsubscribe-Post"] or "")
    if not value:
        yield _warn(
            "unsubscribe",
            "no List-Unsubscribe: Gmail and Yahoo ask it of all marketing mail ([message] unsubscribe_url)",
        )
        return
    if "<https://" in value and post == "List-Unsubscribe=One-Click":
        yield _ok("unsubscribe", "one click by RFC 8058")
    else:
        yield _warn(
            "unsubscribe", "no one-click unsubscribe: Gmail, Yahoo and GMX ask for RFC 8058 (https and one_click)"
        )
    url = re.search(r"<(https?://[^>]+)>", value)
    if url:
        bodies = "".join(str(part.get_content()) for part in message.walk() if part.get_content_maintype() == "text")
        if url[1] in bodies or url[1].replace("&", "&amp;") in bodies:
            yield _ok("unsubscribe link", "the body shows it")
        else:
            yield _warn(
                "unsubscribe link",
                "the body does not show {{ unsubscribe_url }}: Gmail, Microsoft and Apple ask for a visible link",
            )


def _check_fields(message: EmailMessage) -> Iterator[Finding]:
    for name in ("Date", "Message-ID", "From", "To"):
        if len(message.get_all(name, [])) != 1:
            yield _error(name.lower(), f"{len(message.get_all(name, []))} {name} fields; RFC 5322 wants one")
    subject = str(message["Subject"] or "")
    if not subject:
        yield _warn("subject", "empty")
    elif re.match(r"(?:re|fwd?|aw|wg)\s*:", subject, re.IGNORECASE):
        yield _warn("subject", "begins like a reply or a forward; Gmail counts that as misleading")
    if not message["Feedback-ID"]:
        yield _warn("feedback-id", "absent: Gmail reports complaints by it, Orange asks it above 1,000 a day")
    if not message["List-Id"]:
        yield _warn(
            "list-id", "absent: readers filter by it, and out-of-office replies stay away from lists (RFC 2919, 5230)"
        )


def _check_body(message: EmailMessage) -> Iterator[Finding]:
    html, text = message.get_body(("html",)), message.get_body(("plain",))
    if text is None:
        yield _warn("text part", "absent; filters and some readers want one")
    if html is None:
        return
    source = str(html.get_content())
    size = len(source.encode("utf-8", "replace"))
    if size > GMAIL_CLIP:
        yield _warn(
            "size",
            f"{size:,} bytes of HTML: Gmail hides what follows the first {GMAIL_CLIP:,}, the unsubscribe link too",
        )
    else:
        yield _ok("size", f"{size:,} bytes of HTML, Gmail clips at {GMAIL_CLIP:,}")
    page = _Page()
    page.feed(source)
    if page.charset and page.charset.lower().strip("'\" ") not in ("utf-8", "utf8"):
        yield _warn("charset", f"the page says {page.charset}, the message is UTF-8: some readers believe the page")
    for kind, found in (("links", page.links), ("images", page.images)):
        relative = [one for one in found if not _ABSOLUTE.match(one.strip())]
        if relative:
            yield _warn(
                kind,
                f"{len(relative)} relative or empty, leading nowhere in a mail: {', '.join(map(repr, relative[:3]))}",
            )
    known = {str(part["Content-ID"] or "").strip("<>") for part in message.walk()}
    for image in page.images:
        if image.lower().startswith("cid:") and image[4:] not in known:
            yield _error("images", f"{image} names no [[message.inline]] image")
    if page.without_alt:
        yield _warn("images", f"{page.without_alt} without alt text: who sees no images sees nothing")


def check_composer(composer: Composer) -> list[Finding]:
    """What building the composer had to say."""
    return [_warn("template", warning) for warning in composer.warnings]


def render_all(
    composer: Composer, rows: Iterable[tuple[int, str | None, Sequence[object]]], now_us: int
) -> Iterator[tuple[int, RowProblem | None]]:
    """Every row composed, unsigned: its number, and what is wrong or None. `rows` are (row, address, values).

    A generator, so that a list of any length takes the memory of one row.
    """
    for row, address, values in rows:
        try:
            mailbox: Mailbox = parse_mailbox(address)
        except AddressError as problem:
            yield row, RowProblem("address", str(problem))
            continue
        try:
            composer.draft(row, mailbox, values, now_us)
        except RowProblem as problem:
            yield row, problem
        else:
            yield row, None
