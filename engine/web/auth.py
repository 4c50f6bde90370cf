"""Who may do what: tokens in a file, a cookie for browsers, and proof that a post comes from our own page.

The token file has one `NAME TOKEN` a line and mode 0600; the name is who an action is recorded under. Programs send
`Authorization: Bearer TOKEN`. Browsers sign in once and get a cookie (HttpOnly, SameSite=Strict) that says who, since
when, and carries an HMAC keyed with the token: taking the token out of the file signs everybody of it out.

A request signed in by cookie that changes something must come from our own origin: by `Origin`, and by a header that
no form can send. A bearer token proves as much by itself.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import re
import secrets
import stat
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
from starlette.requests import HTTPConnection

from engine.errors import EngineError, Exit

COOKIE = "rowpost_session"
CSRF_HEADER = "x-rowpost"
SESSION_S = 12 * 3600
_NAME = re.compile(r"[A-Za-z0-9][\w.@+-]{0,63}\Z", re.ASCII)
_MIN_TOKEN = 16


class TokenFileError(EngineError):
    """The token file {file} cannot be used: {problem}."""

    exit_code = Exit.SETTINGS
    hint = "One `NAME TOKEN` a line, tokens of 16 characters or more, mode 0600. Without the file a new one is made."


class Person(msgspec.Struct, frozen=True):
    """Who asks."""

    name: str
    by_cookie: bool


class Keyring:
    """The tokens of one file; read again when it changes."""

    def __init__(self, file: Path) -> None:
        """Makes the file with a fresh token where it is missing; raises TokenFileError."""
        self._file = file
        self._seen = (-1, -1)
        self._tokens: dict[str, str] = {}
        if not file.exists():
            _make(file)
        self._refresh()
        if not self._tokens:
            raise TokenFileError(file=file, problem="it has no token")

    @property
    def first(self) -> str:
        """The first token, for the link that `engine serve` prints."""
        return next(iter(self._tokens.values()))

    def _refresh(self) -> None:
        try:
            found = self._file.stat()
            if (found.st_mtime_ns, found.st_ino) == self._seen:
                return
            if found.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
                raise TokenFileError(file=self._file, problem="others may read it")
            text = self._file.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as problem:
            raise TokenFileError(file=self._file, problem=problem) from None
        tokens: dict[str, str] = {}
        for number, line in enumerate(text.splitlines(), 1):
            if not line.strip() or line.startswith("#"):
                continue
            name, _, token = line.strip().partition(" ")
            token = token.strip()
            if not _NAME.match(name) or len(token) < _MIN_TOKEN or not token.isascii():
                raise TokenFileError(file=self._file, problem=f"line {number} is no `NAME TOKEN`")
            tokens[name] = token
        self._tokens, self._seen = tokens, (found.st_mtime_ns, found.st_ino)

    def of_token(self, given: str) -> str | None:
        """Whose token it is. Every token is compared, in constant time."""
        self._refresh()
        found = None
        for name, token in self._tokens.items():
            if hmac.compare_digest(token.encode(), given.encode()):
                found = name
        return found

    def session(self, token_name: str, person: str, now_s: int) -> str:
        """The cookie's value for a person who showed this token."""
        who = base64.urlsafe_b64encode(person.encode()).decode().rstrip("=")
        body = f"{token_name}~{who}~{now_s}~{secrets.token_urlsafe(8)}"
        return f"{body}~{self._mac(token_name, body)}"

    def of_session(self, cookie: str, now_s: int) -> str | None:
        """Who the cookie names, if it is ours and not too old."""
        self._refresh()
        parts = cookie.split("~")
        if len(parts) != 5 or parts[0] not in self._tokens or not parts[2].isdigit():
            return None
        body = "~".join(parts[:4])
        if not hmac.compare_digest(self._mac(parts[0], body).encode(), parts[4].encode()):
            return None
        if not 0 <= now_s - int(parts[2]) < SESSION_S:
            return None
        try:
            return base64.urlsafe_b64decode(parts[1] + "=" * (-len(parts[1]) % 4)).decode()
        except ValueError:
            return None

    def _mac(self, token_name: str, body: str) -> str:
        key = hashlib.sha256(b"rowpost session " + self._tokens[token_name].encode()).digest()
        return hmac.new(key, body.encode(), hashlib.sha256).hexdigest()

    def who(self, request: HTTPConnection, now_s: int) -> Person | None:
        """Who asks, or None."""
        given = request.headers.get("authorization", "")
        scheme, _, token = given.partition(" ")
        if given:
            name = self.of_token(token.strip()) if scheme.lower() == "bearer" else None
            return Person(name, by_cookie=False) if name is not None else None
        named = self.of_session(request.cookies.get(COOKIE, ""), now_s)
        return Person(named, by_cookie=True) if named is not None else None


def is_from_our_page(request: HTTPConnection) -> bool:
    """A changing request by cookie: from our own origin, with the header that forms cannot send."""
    if request.headers.get(CSRF_HEADER) != "1":
        return False
    if request.headers.get("sec-fetch-site", "same-origin") != "same-origin":
        return False
    origin = request.headers.get("origin")
    return origin is None or urlsplit(origin).netloc == request.headers.get("host")


def clean_name(text: str, otherwise: str) -> str:
    """A person's name as they typed it at sign-in: printable, short."""
    name = "".join(c for c in text if c.isprintable()).strip()[:60]
    return name or otherwise


def _make(file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as problem:
        raise TokenFileError(file=file, problem=problem.strerror) from None
    with os.fdopen(descriptor, "w") as out:
        out.write(f"operator {secrets.token_urlsafe(24)}\n")
