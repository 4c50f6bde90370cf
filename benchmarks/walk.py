"""The walks of the list guides, with times: from a CSV export, and from a users table in PostgreSQL, to a plan.

    python benchmarks/walk.py --rows 100_000
    python benchmarks/walk.py --rows 10_000_000                                # the table of guide/lists.md
    python benchmarks/walk.py --rows 1_000_000 --from postgresql://...         # of guide/lists-from-a-database.md

Prints a Markdown table: each command, its seconds, CPU seconds and peak memory. With `--from` the database gets the
tables `walk_users` and `walk_subscriptions`, which are dropped at the end.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
QUERY = (
    "SELECT u.id, u.email, u.first_name FROM walk_users u JOIN walk_subscriptions s ON s.user_id = u.id"
    " WHERE u.active AND s.letter = 'daily'"
)


def timed(words: list[str], folder: Path) -> tuple[str, str]:
    """Run `engine ...` in `folder`; a row of the table, and what it said."""
    began = time.perf_counter()
    child = subprocess.Popen(
        [sys.executable, "-c", "from engine.cli import main; main()", *words],
        cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert child.stdout is not None
    said = child.stdout.read()
    child.stdout.close()
    _, status, used = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise SystemExit(f"engine {' '.join(words)}: exit code {child.returncode}")
    shown = " ".join(word if len(word) < 60 else '"..."' for word in words)
    seconds, cpu = time.perf_counter() - began, used.ru_utime + used.ru_stime
    return f"| `engine {shown}` | {seconds:.1f} | {cpu:.1f} | {used.ru_maxrss / 1e6:.2f} |", said


def fill_database(url: str, rows: int) -> None:
    """Users of whom nine in ten are active, and two letters to which half of them subscribed each."""
    import psycopg

    with psycopg.connect(url) as database:
        database.execute("DROP TABLE IF EXISTS walk_subscriptions, walk_users")
        database.execute(
            "CREATE TABLE walk_users AS SELECT n::bigint AS id, 'user' || n || '@mail' || n %% 997 || '.example'"
            " AS email, 'Name' || n %% 5000 AS first_name, n %% 10 > 0 AS active FROM generate_series(1, %s) n",
            (rows,),
        )
        database.execute(
            "CREATE TABLE walk_subscriptions AS SELECT id AS user_id,"
            " CASE WHEN id % 2 = 0 THEN 'daily' ELSE 'weekly' END AS letter FROM walk_users"
        )


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--rows", type=int, default=100_000)
    ask.add_argument("--from", dest="url", help="walk from a users table in this PostgreSQL")
    ask.add_argument("--folder", type=Path, help="on which disk [default: the temporary folder]")
    given = ask.parse_args()
    with tempfile.TemporaryDirectory(dir=given.folder) as name:
        folder = Path(name)
        if given.url:
            fill_database(given.url, given.rows)
            source = ["--from", given.url, "--query", QUERY]
        else:
            words = [str(folder), "--rows", str(given.rows), "--format", "csv"]
            subprocess.run([sys.executable, str(ROOT / "benchmarks" / "make_list.py"), *words], check=True)
            (folder / "part-000.csv").rename(folder / "export.csv")
            source = ["export.csv"]
        timed(["init"], folder)
        # A letter with the columns that both sources have.
        for letter in (folder / "campaign" / "templates").iterdir():
            if letter.suffix in (".txt", ".html"):
                letter.write_text("Hello {{ first_name }}\n")
        print(f"{given.rows:,} rows, {os.cpu_count()} cores\n\n| command | s | CPU s | GB |\n|---|---|---|---|")
        tell = []
        for command in (
            ["suppress", "add", "ann.0@gmail.com", "--reason", "unsubscribe"],
            ["prepare", *source, "-o", "list.parquet", "--suppress", "campaign/suppression"],
            ["inspect", "list.parquet"],
            ["plan", "list.parquet"],
        ):
            row, said = timed(command, folder)
            print(row.replace(given.url, "postgresql://...") if given.url else row, flush=True)
            tell.append(said)
        print("\n" + tell[1], file=sys.stderr)
    if given.url:
        import psycopg

        with psycopg.connect(given.url) as database:
            database.execute("DROP TABLE walk_subscriptions, walk_users")


if __name__ == "__main__":
    main()
