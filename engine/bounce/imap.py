"""A mailbox over IMAP: what waits is fetched head and tail only, recorded messages are moved, IDLE tells of new ones.

RFC 3501/9051, RFC 2177 (IDLE), RFC 6851 (MOVE), RFC 4315 (UID EXPUNGE). A lost connection costs nothing: what was not
settled is found again, and known by its key. Two readers may share a mailbox: who comes second finds the message gone.
"""

from __future__ import annotations

import contextlib
import os
import ssl
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from engine.bounce.desk import Incoming, Taken
from engine.bounce.sources import HEAD, TAIL, Found, SourceUnreadable
from engine.config import ImapTable, SettingsError
from engine.errors import EngineError, Exit

_FETCH = 25  # messages a round trip
_IDLE_S = 9 * 60.0  # RFC 2177 asks for less than 29 minutes; NAT forgets sooner


class ImapNeedsExtra(EngineError):
    """IMAP mailboxes need the package imapclient."""

    exit_code = Exit.SETTINGS
    hint = "pip install 'rowpost[bounces]'"


class ImapSource:
    """One mailbox on one server."""

    def __init__(self, table: ImapTable, mailbox: str, *, delete: bool = False, folder: Path | None = None) -> None:
        """`folder`: where a relative password_file lies. Raises SettingsError."""
        try:
            import imapclient  # noqa: F401
        except ImportError:
            raise ImapNeedsExtra from None
        url = urlsplit(table.url)
        if url.scheme not in ("imap", "imaps") or not url.hostname or not url.username:
            raise SettingsError(file="[[bounces.imap]]", problem=f"url {table.url!r} is not imaps://user@host")
        self._table = table
        self._host = url.hostname
        self._port = url.port
        self._is_tls = url.scheme == "imaps"
        self._user = unquote(url.username)
        self._password = _password(table, unquote(url.password) if url.password else None, folder)
        self._mailbox = mailbox
        self._delete = delete
        self._client: Any = None
        self.name = f"{url.scheme}://{self._host}/{mailbox}"

    def batches(self) -> Iterator[list[Found]]:
        client = self._connected()
        try:
            client.select_folder(self._mailbox)
            uids = sorted(client.search(["UNDELETED"]))
            for start in range(0, len(uids), _FETCH):
                batch = self._fetch(client, uids[start : start + _FETCH])
                if batch:
                    yield batch
        except GeneratorExit:
            raise
        except _lost() as problem:
            self._forget()
            raise SourceUnreadable(source=self.name, problem=_words(problem)) from None

    def _fetch(self, client: Any, uids: list[int]) -> list[Found]:
        item = f"BODY.PEEK[]<0.{HEAD}>"
        fetched = client.fetch(uids, ["RFC822.SIZE", item])
        found: list[Found] = []
        for uid in uids:
            parts = fetched.get(uid)
            if parts is None:
                continue  # another reader took it
            raw = next((value for key, value in parts.items() if key.startswith(b"BODY[]") and value is not None), b"")
            size = int(parts.get(b"RFC822.SIZE", len(raw)))
            if size > HEAD + TAIL or size > len(raw) >= HEAD:
                start = max(HEAD, size - TAIL)
                rest = client.fetch([uid], [f"BODY.PEEK[]<{start}.{TAIL}>"]).get(uid, {})
                tail = next((value for key, value in rest.items() if key.startswith(b"BODY[]") and value), b"")
                raw = raw + (b"\n" if start > HEAD else b"") + tail
            found.append(Found(incoming=Incoming(raw=raw, source=self.name), place=uid))
        return found

    def settle(self, found: Found, taken: Taken) -> None:
        client = self._client
        if client is None:
            return  # the connection was lost meanwhile: found again, known by its key
        uid = found.place
        try:
            if taken.is_matched and self._delete:
                client.delete_messages([uid])
                self._expunge(client, uid)
                return
            target = self._table.handled if taken.is_matched else self._table.unmatched
            if not client.folder_exists(target):
                client.create_folder(target)
            if client.has_capability("MOVE"):
                client.move([uid], target)
            else:
                client.copy([uid], target)
                client.delete_messages([uid])
                self._expunge(client, uid)
        except _lost() as problem:
            if _is_refusal(problem):
                return  # gone already, or no right to move: it is recorded, so it is only read once more
            self._forget()
            raise SourceUnreadable(source=self.name, problem=_words(problem)) from None

    def _expunge(self, client: Any, uid: object) -> None:
        # Without UIDPLUS an expunge would take what other people marked: they may do it themselves then.
        if client.has_capability("UIDPLUS"):
            client.uid_expunge([uid])

    def wait(self, seconds: float) -> None:
        """IDLE where the server has it."""
        try:
            client = self._connected()
            client.select_folder(self._mailbox)
            if not client.has_capability("IDLE"):
                time.sleep(seconds)
                return
            client.idle()
            try:
                client.idle_check(timeout=min(seconds, _IDLE_S))
            finally:
                client.idle_done()
        except _lost() as problem:
            self._forget()
            raise SourceUnreadable(source=self.name, problem=_words(problem)) from None

    def close(self) -> None:
        if self._client is not None:
            try:
                self._client.logout()
                self._client = None
            except _lost():
                self._forget()

    def _forget(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            _hang_up(client)

    def _connected(self) -> Any:
        if self._client is not None:
            return self._client
        from imapclient import IMAPClient

        context = None
        if self._table.tls != "off":
            context = ssl.create_default_context(cafile=self._table.tls_ca_file)
            if self._table.tls == "unverified":
                context.check_hostname = False
                context.verify_mode = ssl.CERT_NONE
        client: Any = None
        try:
            client = IMAPClient(
                self._host,
                port=self._port,
                ssl=self._is_tls,
                ssl_context=context if self._is_tls else None,
                timeout=60,
            )
            if not self._is_tls and context is not None:
                client.starttls(context)
            client.login(self._user, self._password)
        except _lost() as problem:
            if client is not None:
                _hang_up(client)
            raise SourceUnreadable(source=self.name, problem=_words(problem)) from None
        self._client = client
        return client


def _hang_up(client: Any) -> None:
    """Close the socket without a word: the server may be gone."""
    with contextlib.suppress(*_lost()):
        client.shutdown()
    with contextlib.suppress(OSError, AttributeError):
        client.socket().close()


def _lost() -> tuple[type[BaseException], ...]:
    from imapclient.exceptions import IMAPClientError

    return (IMAPClientError, OSError, EOFError, ValueError)


def _is_refusal(problem: BaseException) -> bool:
    """The server said NO; the connection is fine."""
    from imapclient.exceptions import IMAPClientAbortError, IMAPClientError

    return isinstance(problem, IMAPClientError) and not isinstance(problem, IMAPClientAbortError)


def _words(problem: BaseException) -> str:
    return str(problem).splitlines()[0][:200] if str(problem) else type(problem).__name__


def _password(table: ImapTable, from_url: str | None, folder: Path | None) -> str:
    if from_url is not None:
        raise SettingsError(
            file="[[bounces.imap]]",
            problem="a password does not belong into the url: use password_env or password_file",
        )
    if table.password_env:
        value = os.environ.get(table.password_env)
        if value is None:
            raise SettingsError(
                file="[[bounces.imap]]", problem=f"the environment variable {table.password_env} is not set"
            )
        return value
    if table.password_file:
        path = (folder or Path()) / table.password_file
        try:
            return path.read_text("utf-8").rstrip("\n")
        except OSError as problem:
            raise SettingsError(file=path, problem=problem.strerror) from None
    raise SettingsError(file="[[bounces.imap]]", problem="neither password_env nor password_file is given")
