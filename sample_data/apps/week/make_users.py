"""A users table to try the week with: `python make_users.py users.db`."""

from __future__ import annotations

import sqlite3
import sys

with sqlite3.connect(sys.argv[1]) as users:
    users.execute("CREATE TABLE users (id INTEGER PRIMARY KEY, email TEXT, name TEXT, daily INTEGER, weekly INTEGER)")
    # The second one's mailbox does not exist: write-back takes it off both lists.
    users.executemany(
        "INSERT INTO users (email, name, daily, weekly) VALUES (?, ?, ?, ?)",
        [("ann@example.com", "Ann", 1, 1), ("550+x@example.com", "Bob", 1, 1), ("cleo@example.com", "Cleo", 0, 1)],
    )
