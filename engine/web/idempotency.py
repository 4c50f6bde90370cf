"""Idempotency keys: a request repeated under the same key is answered as the first one was, and done once.

`Idempotency-Key` on any POST of the API. Kept for a day in a small SQLite file of the web server (0600), so that a
restart forgets nothing; written before the work begins. Per person: nobody sees another's answers.
"""

from __future__ import annotations

import hashlib
import os
import sqlite3
import threading
from pathlib import Path

import msgspec

from engine.clock import Clock
from engine.web.problems import Refused

KEEP_US = 24 * 3600 * 1_000_000
MAX_KEY = 200
_SCHEMA = """
CREATE TABLE IF NOT EXISTS request (
    who TEXT NOT NULL, key TEXT NOT NULL, what TEXT NOT NULL, at_us INTEGER NOT NULL,
    status INTEGER, body BLOB, PRIMARY KEY (who, key)
) STRICT, WITHOUT ROWID
"""


class Answered(msgspec.Struct, frozen=True):
    """What the first request was answered."""

    status: int
    body: bytes


class Memory:
    """The requests of the last day. Safe to use from several threads."""

    def __init__(self, file: Path, clock: Clock) -> None:
        os.close(os.open(file, os.O_RDWR | os.O_CREAT, 0o600))
        self._db = sqlite3.connect(file, timeout=10, isolation_level=None, check_same_thread=False)
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = FULL")
        self._db.execute(_SCHEMA)
        self._clock, self._lock = clock, threading.Lock()

    def begin(self, who: str, key: str, request: str, body: bytes) -> Answered | None:
        """None: it is new, do it and `end`. Raises Refused for another request under this key, or one under way."""
        what = hashlib.sha256(request.encode() + b"\0" + body).hexdigest()
        now_us = self._clock.wall_us()
        with self._lock:
            self._db.execute("DELETE FROM request WHERE at_us < ?", (now_us - KEEP_US,))
            added = self._db.execute(
                "INSERT INTO request (who, key, what, at_us) VALUES (?, ?, ?, ?) ON CONFLICT DO NOTHING",
                (who, key, what, now_us),
            ).rowcount
            if added:
                return None
            known, status, answer = self._db.execute(
                "SELECT what, status, body FROM request WHERE who = ? AND key = ?", (who, key)
            ).fetchone()
        if known != what:
            raise Refused(422, "this Idempotency-Key was used for another request")
        if status is None:
            raise Refused(
                409, "the first request under this key has no answer yet, or was interrupted: look before you repeat"
            )
        return Answered(status, answer)

    def end(self, who: str, key: str, status: int, body: bytes) -> None:
        """Remember the answer. One that says "try again" is not kept, so that the same key may."""
        with self._lock:
            if status in (408, 429) or status >= 500:
                self._db.execute("DELETE FROM request WHERE who = ? AND key = ?", (who, key))
            else:
                sql = "UPDATE request SET status = ?, body = ? WHERE who = ? AND key = ?"
                self._db.execute(sql, (status, body, who, key))

    def close(self) -> None:
        """Let go of the file."""
        self._db.close()
