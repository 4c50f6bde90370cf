"""What the users table should learn: hard bounces, complaints, unsubscribes, each by the operator's own statement.

Batches of 1,000 people, each in one transaction of the target. What was written is remembered in the campaign folder
(`write-back.sqlite`) after the target's commit, so that another run goes on with what is new. A crash between the two
commits repeats at most one batch: statements should bear being run twice, as `SET daily_newsletter = 0` does.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from datetime import UTC, datetime
from enum import StrEnum
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from engine.errors import EngineError, Exit
from engine.results.feedback import Came, Feedback
from engine.results.statement import Statement
from engine.results.target import Target, Value
from formats.outcomes import OutcomesError, open_outcomes

BATCH = 1000
_EXAMPLES = 3


class Kind(StrEnum):
    """Of what is written back."""

    BOUNCED = "bounced"  # hard: nobody is there
    COMPLAINED = "complained"
    UNSUBSCRIBED = "unsubscribed"


class OutcomesUnreadable(EngineError):
    """{problem}."""

    exit_code = Exit.USAGE
    hint = "run `engine merge-logs`; it writes report/recipients.parquet."


class Person(msgspec.Struct, frozen=True):
    """One row of the list and what is to be said of it."""

    row: int
    id: Value
    address: str
    reason: str
    at_us: int


class Written(msgspec.Struct, frozen=True):
    """Of one kind: how many people there are, were written before, now; and rows changed by that."""

    kind: str
    people: int
    before: int
    now: int
    changed: int
    examples: list[Person] = []


def people(recipients: Path, feedback: Feedback, campaign_id: str) -> dict[Kind, list[Person]]:
    """Whom to write back, by kind, in the order of the list; raises OutcomesUnreadable."""
    soft = {one.row for one in feedback.returns if one.came is Came.BOUNCE and not one.hard}
    soft -= {one.row for one in feedback.returns if one.came is Came.BOUNCE and one.hard}
    told = {
        Kind.COMPLAINED: _first(feedback, Came.COMPLAINT),
        Kind.UNSUBSCRIBED: _first(feedback, Came.UNSUBSCRIBE),
    }
    wanted = np.array(sorted({row for rows in told.values() for row in rows}), np.int64)
    found: dict[Kind, list[Person]] = {kind: [] for kind in Kind}
    for record in _records(recipients, wanted, campaign_id):
        row, address = record["row"], record["address"]
        if address is None:
            continue
        if record["outcome"] == "bounced" and record["reason"] == "recipient" and row not in soft:
            at = record["last_at"]
            reason = record["last_reply"] or "bounced"
            found[Kind.BOUNCED].append(Person(row, record["id"], address, reason, _us(at)))
        for kind, rows in told.items():
            if row in rows:
                found[kind].append(Person(row, record["id"], address, str(kind), rows[row]))
    return found


def write_back(
    target: Target,
    ledger: Path,
    statement: Statement,
    whom: Sequence[Person],
    list_id: str,
    *,
    apply: bool,
    batch: int = BATCH,
) -> Written:
    """Run the statement for whom it was not run yet. Without `apply` the first batch is tried and taken back.

    Raises TargetRefused; what was committed before stays, and is remembered.
    """
    key = sha256(f"{target.url}\0{statement.kind}\0{statement.sql}".encode()).hexdigest()
    with closing(_open_ledger(ledger)) as memory:
        done = {row for (row,) in memory.execute("select row from done where statement = ?", (key,))}
        left = [person for person in whom if person.row not in done]
        now = changed = 0
        for start in range(0, len(left), batch):
            part = left[start : start + batch]
            changed += target.run(statement.text, [_values(statement, person, list_id) for person in part])
            if not apply:
                target.rollback()
                break
            target.commit()
            memory.executemany("insert into done values (?, ?)", [(key, person.row) for person in part])
            memory.commit()
            now += len(part)
    return Written(statement.kind, len(whom), len(whom) - len(left), now, changed, left[:_EXAMPLES])


def _first(feedback: Feedback, came: Came) -> dict[int, int]:
    found: dict[int, int] = {}
    for one in feedback.returns:
        if one.came is came:
            found.setdefault(one.row, one.at_us)
    return found


def _records(recipients: Path, wanted: Any, campaign_id: str) -> Iterator[dict[str, Any]]:
    """The lines of recipients.parquet that bounced for good or are `wanted`."""
    try:
        header, file = open_outcomes(recipients)
    except OutcomesError as problem:
        raise OutcomesUnreadable(problem=problem) from None
    if header.campaign_id != campaign_id:
        raise OutcomesUnreadable(problem=f"{recipients} is of campaign {header.campaign_id!r}, not {campaign_id!r}")
    columns = ["row", "id", "address", "outcome", "reason", "last_at", "last_reply"]
    with file:
        for batch in file.iter_batches(batch_size=131_072, columns=columns):
            table = pa.Table.from_batches([batch])
            bounced = pc.and_(
                pc.equal(table["outcome"].cast(pa.string()), "bounced"),
                pc.fill_null(pc.equal(table["reason"].cast(pa.string()), "recipient"), False),
            )
            keep = np.asarray(bounced) | np.isin(np.asarray(table["row"]), wanted)
            yield from table.filter(pa.array(keep)).to_pylist()


def _values(statement: Statement, person: Person, list_id: str) -> list[Value]:
    at = datetime.fromtimestamp(person.at_us / 1e6, UTC)
    known: dict[str, Value] = {
        "address": person.address,
        "id": person.id,
        "row": person.row,
        "list_id": list_id,
        "reason": person.reason,
        "at": at,
    }
    return [known[name] for name in statement.names]


def _us(at: datetime | None) -> int:
    return 0 if at is None else round(at.timestamp() * 1e6)


def _open_ledger(path: Path) -> sqlite3.Connection:
    memory = sqlite3.connect(path, timeout=30)
    path.chmod(0o600)
    memory.execute("create table if not exists done (statement text, row integer, primary key (statement, row))")
    return memory


def choose(statements: Iterable[tuple[str, str, str]], list_id: str) -> dict[Kind, str]:
    """The SQL of each kind for this list, of (list id or "", kind, SQL); one for the list outweighs a general one."""
    found: dict[Kind, str] = {}
    for scope, kind, sql in sorted(statements, key=lambda s: bool(s[0])):
        if scope in ("", list_id):
            found[Kind(kind)] = sql
    return found
