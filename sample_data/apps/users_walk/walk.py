"""From the users table to the users table: extract, plan, send, bounces, merge, write back. Nothing leaves the machine.

    python sample_data/apps/users_walk/walk.py FOLDER
    python sample_data/apps/users_walk/walk.py FOLDER postgresql://ann@localhost/scratch

makes FOLDER, with a SQLite users table of 200 people (or makes the table `users` in that database, where there must be
none) and runs every step as one would type it. Two are refused
while sending (their local part steers the test server) and three come back afterwards as delivery reports in a folder.
At the end exactly these five have no newsletter any more; else the walk fails.
"""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

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


def make_users(run: Callable[[str, list[tuple[object, ...]]], object], mark: str) -> None:
    """A users table as an application has one."""
    people = [*REFUSED, *(f"user{number}@example.org" for number in range(198))]
    run("CREATE TABLE users (id INTEGER PRIMARY KEY, email TEXT, first_name TEXT, daily_newsletter INTEGER)", [])
    rows: list[tuple[object, ...]] = [(n, address, f"Person {n}", 1) for n, address in enumerate(people, 1)]
    run(f"INSERT INTO users VALUES ({', '.join([mark] * 4)})", rows)


@contextmanager
def database(url: str, folder: Path) -> Iterator[Callable[[str, list[tuple[object, ...]]], list[Any]]]:
    """A function that runs a statement, once or for each of many, in one transaction."""
    connection: Any
    if url.startswith("sqlite"):
        connection = sqlite3.connect(folder / "users.db")
    else:
        import psycopg

        connection = psycopg.connect(url)

    def run(statement: str, rows: list[tuple[object, ...]]) -> list[Any]:
        cursor = connection.cursor()
        if rows:
            cursor.executemany(statement, rows)
            return []
        cursor.execute(statement)
        return list(cursor.fetchall()) if cursor.description else []

    try:
        yield run
        connection.commit()
    finally:
        connection.close()


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "users-walk").resolve()
    url = sys.argv[2] if len(sys.argv) > 2 else "sqlite:///users.db"
    folder.mkdir(parents=True)
    with database(url, folder) as run:
        make_users(run, "?" if url.startswith("sqlite") else "%s")
    engine(folder, "init")
    for kind in ("txt", "html"):
        (folder / "campaign" / "templates" / f"letter.{kind}").write_text(
            "Hello {{ first_name }}, the news of today.\n"
        )
    query = "SELECT id, email, first_name FROM users WHERE daily_newsletter = 1"
    engine(folder, "prepare", "--from", url, "--query", query, "-o", "list.parquet")
    engine(folder, "plan", "list.parquet")
    engine(folder, "send")
    # What came back in the days after, as a mailbox's folder has it.
    (folder / "returned").mkdir()
    for number, address in enumerate(RETURNED):
        (folder / "returned" / f"{number}.eml").write_text(REPORT.format(address=address))
    engine(folder, "bounces", "returned")
    engine(folder, "merge-logs")
    statement = "UPDATE users SET daily_newsletter = 0 WHERE email = :address"
    engine(folder, "write-back", "--to", url, "--bounced", statement)
    engine(folder, "write-back", "--to", url, "--bounced", statement, "--apply")
    engine(folder, "write-back", "--to", url, "--bounced", statement, "--apply")  # nothing is new
    with database(url, folder) as run:
        without = {email for (email,) in run("SELECT email FROM users WHERE daily_newsletter = 0", [])}
    if without != {*REFUSED, *RETURNED}:
        raise SystemExit(f"the users table is not as it should be: {sorted(without)}")
    print(f"\nthe users table: {len(without)} have no newsletter any more: {', '.join(sorted(without))}")


if __name__ == "__main__":
    main()
