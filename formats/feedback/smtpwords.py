"""SMTP as other hosts quote it: the reply in a diagnostic, the command it answered, the addresses in a line.

RFC 3464 §2.3.6 (Diagnostic-Code), RFC 3463; the quoting habits are those of the hosts named in the comments.
"""

from __future__ import annotations

import re

from formats.feedback.values import Stage
from formats.reply import Reply

MAX_DIAGNOSTIC = 600

_LOCAL = r"""(?:"[^"\n<>]{1,64}"|[A-Za-z0-9!#$%&*+/=?^_`{|}~.'\-\u0080-\U0010ffff]{1,90})"""
_DOMAIN = (
    r"(?:[A-Za-z0-9\u0080-\U0010ffff_-]{1,63}(?:\.[A-Za-z0-9\u0080-\U0010ffff_-]{1,63}){0,12}|\[[0-9A-Fa-f.:]{3,60}\])"
)
ADDRESS = rf"{_LOCAL}@{_DOMAIN}"
_ADDRESS = re.compile(ADDRESS)

# Text of another script right behind an address: no top-level domain mixes the two.
_MIXED_END = re.compile(r"([A-Za-z0-9-]{2,})[^\x00-\x7f]+\Z")
_CODE = re.compile(r"(?<![\w.:/@#+-])([245]\d\d)(?=[ \t\-:;,<\"']|\Z)")
_CODE_BEFORE_HASH = re.compile(r"(?<![\w.])([45]\d\d)(?= ?#?[245]\.\d)")
_ENHANCED = re.compile(r"(?<![\w.:/\[-])([245]\.\d{1,2}\.\d{1,3})(?![\w.]*\w|\])")
_REPEATED = re.compile(r"(?<=\s)([245]\d\d)-(?:[245]\.\d{1,3}\.\d{1,3})?\s*")
_TYPE = re.compile(r"\s*([A-Za-z][A-Za-z0-9_-]{0,30})\s*;\s*(.*)\Z", re.S)
_SPACE = re.compile(r"\s+")
_SMTPISH = re.compile(r"error_code :?(\d{3})|status[ :=]+(\d{3})\b", re.I)

# In the order they are asked: a transcript that reached RCPT went past MAIL, so the later command is told first.
_STAGES: tuple[tuple[Stage, tuple[str, ...]], ...] = (
    (Stage.RCPT, ("in reply to rcpt", "in reply to end of rcpt", "after rcpt", ">>> rcpt to", "[rcpt_to]",
                  "our rcpt to", "not like recipient", "in rcpt to", "for rcpt", "rcpt command", "command: rcpt")),
    (Stage.MAIL, ("in reply to mail", "after mail from", "after pipelined mail from", ">>> mail from", "[mail_from]",
                  "our mail from", "sender was rejected", "in mail from", "for mail from", "mail command")),
    (Stage.CONTENT, ("in reply to end of data", "after end of data", "final data", "failed after i sent the message",
                     "for text command", "after pipelined end of data", "end-of-data", "after i sent the message",
                     "[bodysent]", "after message body", "message text")),
    (Stage.DATA, ("in reply to data", "after data", ">>> data", "[data]", "our data", "in data", "for data",
                  "data command", "command: data")),
    (Stage.EHLO, ("in reply to ehlo", "in reply to helo", "after ehlo", "after helo", ">>> ehlo", ">>> helo",
                  "my name was rejected", "our ehlo", "our helo")),
    (Stage.CONNECT, ("initial connection", "refused to talk to me", "greeting", "while connecting")),
)  # fmt: skip


def squeezed(text: str, most: int = MAX_DIAGNOSTIC) -> str:
    """`text` on one line."""
    return _SPACE.sub(" ", text[: 4 * most]).strip()[:most]


def typed(value: str) -> tuple[str, str]:
    """(type, rest) of a field like `smtp; 550 ...`; the type is "" where the host left it out."""
    found = _TYPE.match(value)
    return (found[1].lower(), found[2].strip()) if found else ("", value.strip())


def reply_in(text: str) -> Reply:
    """The refusal quoted in `text`, with what follows it; code 0 where there is none.

    Prefixes of continued lines are taken out: Gmail wraps its replies, and Postfix folds them into one line.
    """
    found = _CODE_BEFORE_HASH.search(text) or next(
        (code for code in _CODE.finditer(text) if code[1][0] != "2" and _is_reply(text, code)), None
    )
    if found is None:
        named = _SMTPISH.search(text)
        if named is None:
            return Reply(0)
        code = int(named[1] or named[2])
        return Reply(code, squeezed(text[named.end() :].lstrip(" ,:-"))) if 400 <= code < 600 else Reply(0)
    code = int(found[1])
    rest = text[found.end() :].lstrip(" \t-:;,")
    rest = _REPEATED.sub("", " " + rest).strip()
    # Some relays put their own code before the one they were given: "550 550 5.7.1 ...", "554 <421 4.4.2 ...>".
    again = re.match(r"([45]\d\d)[ -]+", rest)
    if again is not None:
        code, rest = int(again[1]), rest[again.end() :]
    return Reply(code, squeezed(rest.lstrip("#(")))


def _is_reply(text: str, code: re.Match[str]) -> bool:
    """Whether three digits are a reply code: not a port, a count, a year or part of an id."""
    before = text[max(0, code.start() - 24) : code.start()].rstrip()
    if re.search(r"(?:port|after|for|than|error|size|line|id|of|in)\s*[:=]?\Z", before, re.I) and not before.endswith(
        ("error:", "Error:", "said:")
    ):
        return bool(re.match(r"[45]\d\d[ -][245]\.\d", text[code.start() : code.start() + 8]))
    return True


def enhanced_in(text: str) -> str:
    """The most telling enhanced status in `text`: the first that is not x.0.0, else the first, else ""."""
    first = ""
    for found in _ENHANCED.finditer(text[:4000]):
        if not found[1].endswith(".0.0"):
            return found[1]
        first = first or found[1]
    return first


def stage_in(text: str) -> Stage:
    """The command that was answered, where the reporting host says so."""
    lowered = " ".join(text[:8000].lower().split())
    for stage, words in _STAGES:
        for word in words:
            if word in lowered:
                return stage
    return Stage.NONE


def addresses_in(text: str, most: int = 50) -> list[str]:
    """The addresses in a short text, in order, without repeats."""
    seen: dict[str, None] = {}
    for found in _ADDRESS.finditer(text[:20_000]):
        seen.setdefault(tidy(found[0]), None)
        if len(seen) >= most:
            break
    return list(seen)


def tidy(address: str) -> str:
    """An address without the punctuation that stood around it."""
    address = address.strip().strip("<>").strip()
    if address.startswith(("'", "`")) and not address.startswith('"'):
        address = address.lstrip("'`")
    for prefix in ("mailto:", "smtp=", "rfc822=", "smtp:"):  # X.400's `dda:SMTP=ann@example.org` among them
        if address.lower().startswith(prefix):
            address = address[len(prefix) :]
    address = _MIXED_END.sub(r"\1", address)
    return address.rstrip(".,;:'")


def fold(address: str) -> str:
    """The form in which two spellings of an address compare."""
    address = tidy(address).lower()
    local, _, domain = address.rpartition("@")
    if len(local) > 1 and local[0] == local[-1] == '"':
        local = local[1:-1]
    return f"{local}@{domain}"
