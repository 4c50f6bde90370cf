"""From the users table to the users table: extract, plan, send, bounces, merge, write back. Nothing leaves the machine.

    python sample_data/apps/users_walk/walk.py FOLDER

makes FOLDER with a SQLite users table of 200 people and runs every step as one would type it. Two are refused
while sending (their local part steers the test server) and three come back afterwards as delivery reports in a folder.
At the end exactly these five have no newsletter any more; else the walk fails.
"""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
REFUSED = ("550+ann@example.org", "550+bob@example.org")
RETURNED = ("user10@example.org", "user20@example.org", "user30@example.org")
REPORT = """\
Return-Path: <>
From: Mail Delivery System <MAILER-DAEMON@relay.example.net>
To: bounces@example.com
Subject: Undelivered Mail Returned to Sender
MIME-Version: 1.0
Content-Type: multipart/report; report-type=delivery-status; boundary="b"

--b
Content-Type: text/plain

Your message could not be delivered.

--b
Content-Type: message/delivery-status

Reporting-MTA: dns; relay.example.net

Final-Recipient: rfc822; {address}
Action: failed
Status: 5.1.1
Diagnostic-Code: smtp; 550 5.1.1 no such user

--b--
"""


def engine(folder: Path, *words: str, may_end_in: tuple[int, ...] = (0,)) -> None:
    """Run `engine WORDS` in the folder and show it."""
    print("\n$ engine " + " ".join(f'"{word}"' if " " in word else word for word in words), flush=True)
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    code = subprocess.run([sys.executable, "-m", "engine", *words], cwd=folder, env=environ, check=False).returncode
    if code not in may_end_in:
        raise SystemExit(f"engine {words[0]} ended with {code}")


def make_users(path: Path) -> None:
    """A users table as an application has one."""
    people = [*REFUSED, *(f"user{number}@example.org" for number in range(198))]
    with sqlite3.connect(path) as users:
        users.execute(
            "CREATE TABLE users (id INTEGER PRIMARY KEY, email TEXT, first_name TEXT, daily_newsletter INTEGER)"
        )
        rows = [(number + 1, address, f"Person {number + 1}", 1) for number, address in enumerate(people)]
        users.executemany("INSERT INTO users VALUES (?, ?, ?, ?)", rows)
    users.close()


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "users-walk").resolve()
    folder.mkdir(parents=True)
    make_users(folder / "users.db")
    engine(folder, "init")
    for kind in ("txt", "html"):
        (folder / "campaign" / "templates" / f"letter.{kind}").write_text(
            "Hello {{ first_name }}, the news of today.\n"
        )
    query = "SELECT id, email, first_name FROM users WHERE daily_newsletter = 1"
    engine(folder, "prepare", "--from", "sqlite:///users.db", "--query", query, "-o", "list.parquet")
    engine(folder, "plan", "list.parquet")
    engine(folder, "send")
    # What came back in the days after, as a mailbox's folder has it.
    (folder / "returned").mkdir()
    for number, address in enumerate(RETURNED):
        (folder / "returned" / f"{number}.eml").write_text(REPORT.format(address=address))
    engine(folder, "bounces", "returned")
    engine(folder, "merge-logs")
    statement = "UPDATE users SET daily_newsletter = 0 WHERE email = :address"
    engine(folder, "write-back", "--to", "sqlite:///users.db", "--bounced", statement)
    engine(folder, "write-back", "--to", "sqlite:///users.db", "--bounced", statement, "--apply")
    engine(folder, "write-back", "--to", "sqlite:///users.db", "--bounced", statement, "--apply")  # nothing is new
    with sqlite3.connect(folder / "users.db") as users:
        without = {email for (email,) in users.execute("SELECT email FROM users WHERE daily_newsletter = 0")}
    users.close()
    if without != {*REFUSED, *RETURNED}:
        raise SystemExit(f"the users table is not as it should be: {sorted(without)}")
    print(f"\nthe users table: {len(without)} have no newsletter any more: {', '.join(sorted(without))}")


if __name__ == "__main__":
    main()
