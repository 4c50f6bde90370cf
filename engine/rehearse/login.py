"""The server's side of AUTH PLAIN, LOGIN and CRAM-MD5 (RFC 4954, 4616, 2195), sans I/O: lines in, replies out."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac

from formats.reply import Reply

MECHANISMS = ("PLAIN", "LOGIN", "CRAM-MD5")


class Login:
    """One attempt to log in. `user` is set when it has succeeded; a 334 reply asks for another line."""

    def __init__(self, users: dict[str, str], *, nonce: bytes) -> None:
        self.user: str | None = None
        self._users = users
        self._nonce = nonce
        self._mechanism = ""
        self._name: bytes | None = None

    def begin(self, mechanism: str, initial: bytes | None) -> Reply:
        """The reply to `AUTH mechanism [initial]`."""
        self._mechanism = mechanism
        if initial is not None and mechanism != "CRAM-MD5":
            return self.answer(initial)
        return _ask({"PLAIN": b"", "LOGIN": b"Username:"}.get(mechanism, self._nonce))

    def answer(self, line: bytes) -> Reply:
        """The reply to the client's next line."""
        if line == b"*":
            return Reply(501, "5.7.0 Authentication cancelled")
        try:
            # RFC 4954 §4: a lone "=" stands for an empty initial response.
            raw = b"" if line == b"=" else base64.b64decode(line, validate=True)
        except binascii.Error:
            return Reply(501, "5.5.2 Not base64")
        name, password = b"", b""
        if self._mechanism == "PLAIN":
            _, name, password = [*raw.split(b"\0"), b"", b"", b""][:3]
        elif self._mechanism == "CRAM-MD5":
            name, _, proof = raw.rpartition(b" ")
            known = self._users.get(name.decode("utf-8", "replace"), "")
            if hmac.compare_digest(hmac.new(known.encode(), self._nonce, hashlib.md5).hexdigest().encode(), proof):
                password = known.encode()
        elif self._name is None:
            self._name = raw
            return _ask(b"Password:")
        else:
            name, password = self._name, raw
        user = name.decode("utf-8", "replace")
        if user and self._users.get(user) == password.decode("utf-8", "replace"):
            self.user = user
            return Reply(235, "2.7.0 Authentication successful")
        return Reply(535, "5.7.8 Authentication credentials invalid")


def _ask(text: bytes) -> Reply:
    return Reply(334, base64.b64encode(text).decode())
