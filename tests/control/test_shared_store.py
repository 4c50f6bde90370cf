"""What several machines rely on: windows, leases, grants, a server that changes, one that refuses."""

from __future__ import annotations

from collections.abc import Iterator
from uuid import UUID

import numpy as np
import psycopg
import pytest

from engine.control.entries import DUE, FINAL, HELD, WAITING, log_of, view, window_id
from engine.control.postgres import PostgresStore
from engine.control.postgres_link import ControlUrl
from engine.control.store import (
    Advance,
    Decision,
    Life,
    Opening,
    Override,
    Settled,
    StoreAway,
    StoreChanged,
    StoreRefuses,
    StoreSchema,
    Told,
)
from engine.work.messages import Admit, Admitted, Reported
from engine.work.windows import WindowBook
from formats.sendlog import Verdict
from tests.control.cluster_model import PLAN, _incarnation
from tests.control.postgres_server import PostgresServer

pytestmark = pytest.mark.postgres
A, B = f"{1:016x}", f"{2:016x}"


@pytest.fixture
def store(control_url: str) -> Iterator[PostgresStore]:
    made = PostgresStore(control_url, create=True)
    made.load_plan(PLAN, "print", 1)
    for id_ in (A, B):
        made.register(_incarnation(id_))
    made.claim(A, 0, 1)
    yield made
    made.close()


def rows(*offsets: int) -> bytes:
    return np.array(offsets, "<u4").tobytes()


def opening(number: int, *offsets: int, batch: int = 0, who: str = A) -> Opening:
    return Opening(window_id(f"{who}-001", number), batch, rows(*offsets), 10, "seal")


def told(number: int, known: bytes, *verdicts: int, is_due: bool = False) -> Told:
    return Told(window_id(f"{A}-001", number), known, bytes(verdicts), b"", is_due)


def test_a_window_opens_for_the_living_owner_alone(store: PostgresStore) -> None:
    mine, foreign = opening(1, 0, 1), opening(2, 0, batch=1)
    assert store.advance(A, Advance(openings=[mine, foreign])).opened == {mine.window}
    assert store.advance(B, Advance(openings=[opening(1, 2, who=B)])).opened == frozenset()
    store.supersede(A, B)
    late = store.advance(A, Advance(openings=[opening(3, 2)]))
    assert (late.is_alive, late.opened) == (False, frozenset())


def test_an_unanswered_opening_is_repeated_and_counts_once(store: PostgresStore) -> None:
    step = Advance(openings=[opening(1, 0, 1)])
    store.advance(A, step)
    assert store.advance(A, step).opened == {step.openings[0].window}
    store.advance(A, Advance(told=[told(1, bytes(2), Verdict.ACCEPTED, 0)]))
    assert store.advance(A, step).opened == frozenset(), "a row of it has its verdict: nothing of it is attempted"
    assert len(store.entries([0])) == 1


def test_reports_need_no_lease_and_the_first_one_stands(store: PostgresStore) -> None:
    store.advance(A, Advance(openings=[opening(1, 0, 1, 2)]))
    store.supersede(A, B)
    store.advance(A, Advance(told=[told(1, bytes(3), Verdict.ACCEPTED, 0, Verdict.IN_DOUBT)]))
    store.advance(A, Advance(told=[told(1, bytes(3), Verdict.UNTOUCHED, Verdict.REJECTED, Verdict.ACCEPTED)]))
    (entry,) = store.entries([0])
    # The doubt was resolved by what was learnt later; the acceptance was not undone.
    assert entry.verdicts == bytes([Verdict.ACCEPTED, Verdict.REJECTED, Verdict.ACCEPTED])


def test_a_late_word_opens_a_batch_that_was_done(store: PostgresStore) -> None:
    store.advance(A, Advance(openings=[opening(1, 0)]))
    store.supersede(A, B)
    (batch,) = store.claim(B, 0, 1)
    assert store.done_unless_late(B, 0, batch.late)
    store.advance(A, Advance(told=[told(1, bytes(1), Verdict.UNTOUCHED, is_due=True)]))
    assert [b.number for b in store.claim(B, 0, 1)] == [0]


def test_done_is_refused_when_somebody_told_something_meanwhile(store: PostgresStore) -> None:
    store.advance(A, Advance(openings=[opening(1, 0)]))
    store.supersede(A, B)
    (batch,) = store.claim(B, 0, 1)
    store.advance(A, Advance(told=[told(1, bytes(1), Verdict.DEFERRED, is_due=True)]))
    assert not store.done_unless_late(B, 0, batch.late)
    late = store.late(B, 0)
    assert late is not None
    assert store.done_unless_late(B, 0, late)


def test_row_states_are_derived_from_all_windows(store: PostgresStore) -> None:
    book = WindowBook(lambda batch: 6 * batch)
    log = f"{A}-001"
    book.admit(log, Admit(rows=[(n + 1, n, 0) for n in range(5)], length=10, seal="s"))
    step = book.step()
    assert step is not None
    ((_, message),) = book.answered(store.advance(A, step), 0)
    assert isinstance(message, Admitted)
    verdicts = (Verdict.ACCEPTED, Verdict.DEFERRED, Verdict.IN_DOUBT, Verdict.LOST)
    book.report(log, [Reported(n + 1, n, 0, v, 0, 0, 1, 77 if n == 1 else 0, 55) for n, v in enumerate(verdicts)])
    book.report(log, [Reported(0, 5, 0, Verdict.SUPPRESSED, 0, 0, 0, 0, 0)])
    step = book.step()
    assert step is not None
    book.answered(store.advance(A, step), 0)
    seen = view(0, 6, store.entries([0]), [])
    assert seen.states.tolist() == [FINAL, WAITING, HELD, DUE, HELD, FINAL]
    assert (seen.waiting[0].row, seen.waiting[0].attempt) == (1, 1)
    assert {held.row for held in seen.held if held.is_open} == {4}
    assert not book.knows_all_of(0)
    word = Decision(str(seen.held[0].window), seen.held[0].place, seen.held[0].row, "resend", "ann", 1)
    store.decide([word])
    again = view(0, 6, store.entries([0]), store.decisions_between(0, 6))
    assert again.states[word.row] == DUE
    assert again.resent == {word.row}


def test_at_most_so_many_rows_of_a_worker_are_unreported() -> None:
    book = WindowBook(lambda batch: 0, window_rows=3)
    book.admit("1-001", Admit(rows=[(n, n, 0) for n in range(1, 9)], length=1, seal=""))
    step = book.step()
    assert step is not None
    assert [len(o.rows) // 4 for o in step.openings] == [3]
    assert book.step() is step, "said again until it is answered"


def test_a_done_batch_is_kept_in_fewer_windows_that_say_the_same(store: PostgresStore) -> None:
    for number in range(1, 6):
        store.advance(A, Advance(openings=[opening(number, number)]))
        verdict = Verdict.IN_DOUBT if number == 3 else Verdict.ACCEPTED
        store.advance(A, Advance(told=[told(number, bytes(1), verdict)]))
    before = view(0, 6, store.entries([0]), []).states.tolist()
    assert store.compact(0) == 0, "only when it is done"
    store.done(A, 0)
    assert store.compact(0) == 3
    assert view(0, 6, store.entries([0]), []).states.tolist() == before
    # What is repeated now, whatever became of it, changes nothing.
    assert store.advance(A, Advance(openings=[opening(2, 2)])).opened == frozenset()
    assert len(store.entries([0])) == 2


def test_expired_leases_end_by_the_servers_clock(store: PostgresStore) -> None:
    assert store.supersede_expired(B) == []
    with psycopg.connect(store._url.dsn, autocommit=True) as db:
        db.execute(f"UPDATE \"{store._url.schema}\".incarnation SET renewed_at_us = 5 WHERE id = '{A}'")
    assert [(id_, partition) for id_, _, partition in store.supersede_expired(B)] == [(A, 0)]
    assert not store.renew(A, 0, {})
    assert {i.id: i.state for i in store.incarnations()} == {A: Life.SUPERSEDED, B: Life.ALIVE}


def test_a_store_of_the_first_schema_becomes_one_of_today(store: PostgresStore, control_url: str) -> None:
    with psycopg.connect(store._url.dsn, autocommit=True) as db:
        db.execute(f'SET search_path TO "{store._url.schema}"')
        db.execute("DROP TABLE share; CREATE TABLE bucket (key text); CREATE TABLE connections (key text)")
        db.execute("UPDATE meta SET value = '1' WHERE key = 'schema'")
    older = PostgresStore(control_url)
    assert older.swap_shares({"relay": (0, b"{}")}) == {"relay"}
    assert [batch.number for batch in older.mine(A)] == [0], "what was there is there"
    older.close()
    PostgresStore(control_url).close()  # a second time there is nothing to do


def test_a_newer_schema_is_refused_by_name(store: PostgresStore, control_url: str) -> None:
    with psycopg.connect(store._url.dsn, autocommit=True) as db:
        db.execute(f"UPDATE \"{store._url.schema}\".meta SET value = '99' WHERE key = 'schema'")
    with pytest.raises(StoreSchema, match="99"):
        PostgresStore(control_url)


def test_words_for_every_machine(store: PostgresStore) -> None:
    store.set_override(Override("campaign:example", A, "slower", "ann", 0, None))
    store.set_override(Override("campaign:example", A, "stop", "ann", 0, None))
    store.set_override(Override("campaign:old", A, "x", "ann", 0, 1))
    assert [(o.scope, o.value) for o in store.overrides()] == [("campaign:example", "stop")]


def test_a_server_that_is_another_one_opens_and_claims_nothing(store: PostgresStore, control_url: str) -> None:
    with psycopg.connect(store._url.dsn, autocommit=True) as db:
        db.execute(f"UPDATE \"{store._url.schema}\".campaign SET server = '7/00000001'")
    promoted = PostgresStore(control_url)
    with pytest.raises(StoreChanged, match="7/00000001"):
        promoted.advance(A, Advance(openings=[opening(1, 0)]))
    with pytest.raises(StoreChanged):
        promoted.claim(A, 0, 1)
    with pytest.raises(StoreChanged):
        promoted.renew(A, 0, {})
    settled = Settled(window_id(f"{A}-001", 9), 0, rows(1), bytes([Verdict.ACCEPTED]), b"")
    promoted.advance(A, Advance(settled=[settled]))
    promoted.confirm_server()
    assert promoted.advance(A, Advance(openings=[opening(1, 0)])).opened
    promoted.close()


def test_who_was_cut_off_while_a_failover_was_confirmed_hears_of_it(store: PostgresStore, control_url: str) -> None:
    """It holds windows that the new server may never have heard of: the operator's word was not for them."""
    cut_off = PostgresStore(control_url)
    mark = cut_off.server_mark()
    promoted = PostgresStore(control_url)
    promoted.confirm_server()
    assert promoted.advance(A, Advance(openings=[opening(1, 0)])).opened
    assert promoted.server_mark() != mark
    cut_off.close()  # its connection breaks; the next one finds the server that was confirmed
    with pytest.raises(StoreChanged, match="confirmed"):
        cut_off.advance(A, Advance(openings=[opening(2, 1)]))
    cut_off.close()
    promoted.close()


def test_a_read_only_server_is_away_in_words(store: PostgresStore) -> None:
    store._connection().execute("SET default_transaction_read_only = on")
    with pytest.raises(StoreAway, match="read-only"):
        store.set_campaign_state("paused")
    store.set_campaign_state("paused")  # a new connection


def test_a_server_that_is_gone_is_away_and_comes_back(store: PostgresStore, postgres_server: PostgresServer) -> None:
    pid = store._connection().info.backend_pid
    postgres_server.execute(f"SELECT pg_terminate_backend({pid})")
    with pytest.raises(StoreAway):
        store.renew(A, 1, {})
    assert store.renew(A, 1, {})


def test_a_password_is_never_shown(postgres_server: PostgresServer) -> None:
    url = f"postgresql://nobody-here:s3cret@127.0.0.1:{postgres_server.port}/postgres?campaign=x"
    with pytest.raises(StoreRefuses) as refused:
        PostgresStore(url)
    assert "s3cret" not in str(refused.value)
    assert "s3cret" not in ControlUrl(url).shown
    assert ControlUrl(url).shown == f"postgresql://nobody-here@127.0.0.1:{postgres_server.port}/postgres?campaign=x"


def test_window_ids_tell_their_log() -> None:
    assert log_of(window_id(f"{A}-017", 5)) == f"{A}-017"
    assert isinstance(window_id(f"{A}-017", 5), UUID)
