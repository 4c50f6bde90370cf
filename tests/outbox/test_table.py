"""The outbox table keeps its promises, in SQLite and in PostgreSQL."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from engine.control.outbox import Mail, Outbox, OutboxRefused, Report, Server, State
from engine.outbox import connect, insert

if TYPE_CHECKING:
    from tests.control.postgres_server import PostgresServer

_numbers = itertools.count()


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An outbox that nobody used yet."""
    if request.param == "sqlite":
        return str(tmp_path / "outbox.sqlite")
    import psycopg

    found: PostgresServer = request.getfixturevalue("database")
    schema = f"app{next(_numbers)}"
    with psycopg.connect(found.url, autocommit=True) as db:
        db.execute(f"CREATE SCHEMA {schema}")  # type: ignore[arg-type]  # a name of ours
    return f"{found.url}?options=-csearch_path%3D{schema}"


@pytest.fixture
def box(where: str) -> Iterator[Outbox]:
    found = connect(where)
    yield found
    found.close()


def mail(n: int = 0, **more: object) -> Mail:
    return Mail(address=f"u{n}@example.com", template="welcome", fields={"n": n}, **more)  # type: ignore[arg-type]


def me(id_: str, lease_us: int = 60_000_000) -> Server:
    return Server(id_, "serve", "here", "host", "boot", 1, "alive", 0, 0, lease_us)


def test_a_claim_takes_the_oldest_due_rows_of_a_priority_once(box: Outbox) -> None:
    later = box.now_us() + 60_000_000
    box.enqueue([mail(1), mail(2, priority=1), mail(3, not_before_us=later), mail(4)])
    assert [(c.id, c.fields.replace(" ", "")) for c in box.claim("me", "t1", 3, 5)] == [(1, '{"n":1}'), (4, '{"n":4}')]
    assert box.claim("me", "t2", 3, 5) == []
    assert [c.id for c in box.claim("me", "t3", 1, 5)] == [2]


def test_what_is_not_ours_any_more_is_not_granted(box: Outbox) -> None:
    box.join(me("dead"))
    box.enqueue([mail(n) for n in range(4)])
    box.claim("dead", "old", 3, 4)
    assert box.intend([(1, "old")]) == {1}
    box.supersede("dead")
    assert box.release("dead") == 3
    assert [held.id for held in box.held("dead")] == [1]
    assert box.intend([(2, "old"), (3, "old")]) == set()
    assert [c.id for c in box.claim("next", "new", 3, 1)] == [2]
    assert box.intend([(2, "old"), (2, "new"), (1, "new")]) == {2}
    assert not box.renew("dead")


def test_late_reports_resolve_doubt_and_repeats_do_no_harm(box: Outbox) -> None:
    box.enqueue([mail(1)])
    box.claim("me", "t", 3, 1)
    box.intend([(1, "t")])
    box.report([Report(id=1, token="t", state=State.IN_DOUBT)])
    box.report([Report(id=1, token="x", state=State.ACCEPTED)])
    assert box.rows(None, 0, 1)[0].state == "in_doubt"
    for _ in range(2):
        box.report([Report(id=1, token="t", state=State.ACCEPTED, code=250, reply="ok", attempts=1)])
    box.report([Report(id=1, token="t", state=State.IN_DOUBT)])
    row = box.rows(None, 0, 1)[0]
    assert (row.state, row.code, row.attempts) == ("accepted", 250, 1)


def test_a_resend_stands_until_the_first_attempt_says_that_it_arrived(box: Outbox) -> None:
    box.enqueue([mail(1), mail(2)])
    box.claim("me", "t", 3, 2)
    box.intend([(1, "t"), (2, "t")])
    box.report([Report(id=n, token="t", state=State.IN_DOUBT) for n in (1, 2)])
    assert box.resend([1, 2]) == 2
    box.report([Report(id=1, token="t", state=State.ACCEPTED)])
    box.report([Report(id=2, token="t", state=State.WAITING)])
    assert [row.state for row in box.rows(None, 0, 9)] == ["accepted", "queued"]


def test_waiting_rows_are_claimed_when_due(box: Outbox) -> None:
    box.enqueue([mail(1)])
    box.claim("me", "t", 3, 1)
    box.report([Report(id=1, token="t", state=State.WAITING, attempts=1, wait_us=200_000)])
    assert box.claim("me", "t2", 3, 1) == []
    time.sleep(0.25)
    (again,) = box.claim("me", "t3", 3, 1)
    assert again.attempts == 1


def test_writers_race_for_a_key_and_servers_for_rows(where: str, box: Outbox) -> None:
    added: list[bool] = []
    claimed: list[int] = []

    def write_and_claim() -> None:
        mine = connect(where)
        for n in range(20):
            added.extend(one.is_new for one in mine.enqueue([mail(n, idempotency_key=f"k{n}")]))
        while found := mine.claim("x", "t", 3, 3):
            claimed.extend(one.id for one in found)
        mine.close()

    threads = [threading.Thread(target=write_and_claim) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    claimed.extend(one.id for one in box.claim("x", "t", 3, 100))
    assert added.count(True) == 20
    assert len(claimed) == len(set(claimed)) == 20


def test_changed_tells_of_other_writers(where: str, box: Outbox) -> None:
    box.changed()
    assert not box.changed()
    other = connect(where)
    other.enqueue([mail(1)])
    deadline = time.monotonic() + 5
    while not box.changed():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert not box.changed()
    other.close()


def test_bad_mails_are_refused_whole(box: Outbox) -> None:
    with pytest.raises(OutboxRefused):
        box.enqueue([mail(1), mail(2, priority=9)])
    with pytest.raises(OutboxRefused):
        box.enqueue([mail(1), Mail(address="x", subject="only a subject")])
    assert box.tally() == []


def test_the_applications_own_connection(where: str, box: Outbox) -> None:
    import sqlite3

    import psycopg

    opened = psycopg.connect(where) if where.startswith("postgres") else sqlite3.connect(where)
    assert insert(opened, mail(1, idempotency_key="k")).is_new
    opened.rollback()
    assert insert(opened, mail(1, idempotency_key="k")).is_new
    opened.commit()
    assert not insert(opened, mail(1, idempotency_key="k")).is_new
    opened.close()
    assert sum(count.rows for count in box.tally()) == 1


def test_operators_words(box: Outbox) -> None:
    box.enqueue([mail(n) for n in range(3)])
    assert box.cancel([1, 2, 99]) == 2
    assert box.resend([2]) == 1
    box.claim("me", "t", 3, 5)
    box.report([Report(id=2, token="t", state=State.IN_DOUBT)])
    assert box.accept([1, 2]) == 1
    assert {(c.state, c.reason, c.rows) for c in box.tally()} == {
        ("unsent", "cancelled", 1),
        ("accepted", "by operator", 1),
        ("sending", "", 1),
    }
    box.set_knob("paused", "why")
    box.set_knob("paused", "because")
    assert box.knobs() == {"paused": "because"}
    assert box.forget(box.now_us() + 1_000_000) == 2
    assert box.owners() == ["me"]


def test_a_claim_in_a_full_table_reads_the_index_in_its_order_and_nothing_else(where: str, box: Outbox) -> None:
    import sqlite3

    import psycopg

    from engine.control.statements import load_statements

    fill = "INSERT INTO outbox (priority, address, template, not_before_us) SELECT 3, 'a@example.com', 't', n * 10 FROM"
    if where.startswith("postgres"):
        with psycopg.connect(where, autocommit=True) as db:
            db.execute(f"{fill} generate_series(1, 20000) AS n")  # type: ignore[arg-type]  # words of ours
            db.execute("ANALYZE outbox")
            claim = load_statements("outbox_postgres.sql")["claim"]
            asked = {"priority": 1, "most": 100, "token": "t", "owner": "me"}
            plan = "\n".join(line for (line,) in db.execute(f"EXPLAIN {claim}", asked).fetchall())  # type: ignore[arg-type]
        assert "Index Scan using outbox_due" in plan, plan
        assert "Sort" not in plan, plan
        assert "Seq Scan on outbox" not in plan, plan
    else:
        opened = sqlite3.connect(where)
        opened.execute(f"WITH RECURSIVE n (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM n LIMIT 20000) {fill} n")
        opened.commit()
        claim = load_statements("outbox_sqlite.sql")["claim"]
        steps = [step for *_, step in opened.execute(f"EXPLAIN QUERY PLAN {claim}", ("t", "me", 1, 100, 10**18))]
        opened.close()
        assert any("INDEX outbox_due (priority=? AND not_before_us<?)" in step for step in steps), steps
        assert not any("B-TREE" in step or step == "SCAN outbox" for step in steps), steps
    assert box.claim("me", "t", 1, 100) == []
