"""What the logs say of rows: derived from all entries, whatever their order; doubt is held."""

from __future__ import annotations

import pyarrow as pa
import pytest

from engine.work.recovery import DUE, FINAL, HELD, WAITING, RowStates, Waiting, read_states
from formats.sendlog import Encoder, Header, Kind, Reason, Record, Verdict

T0 = 1_700_000_000_000_000


def header(log_id: str) -> Header:
    return Header(
        log_id=log_id,
        campaign_id="spring",
        plan_fingerprint="f",
        incarnation=log_id[:1],
        sender="a",
        host_id="h",
        boot_id="b",
        worker=0,
        started_at_us=T0,
    )


def intent(serial: int, row: int, attempt: int = 1, at: int = 0, reason: Reason = Reason.NONE) -> Record:
    return (Kind.INTENT, serial, row, T0 + at, attempt, 0, reason, 0, 1, 1, 0, None)


def result(serial: int, row: int, verdict: Verdict, attempt: int = 1, at: int = 0, wait_s: int = 0) -> Record:
    return (Kind.RESULT, serial, row, T0 + at, attempt, verdict, 0, 250, 1, 1, wait_s, None)


def log(log_id: str, *records: Record) -> pa.Buffer:
    encoder = Encoder(header(log_id))
    return pa.py_buffer(encoder.batch(list(records)))


def states(*logs: pa.Buffer, decisions: tuple[tuple[str, int, str], ...] = ()) -> RowStates:
    return read_states(list(logs), 100, 10, decisions)


def test_rows_without_a_word_are_due_and_other_batches_do_not_matter() -> None:
    found = states(log("a-1", intent(1, 99), intent(2, 110), result(2, 110, Verdict.ACCEPTED)))
    assert found.states().tolist() == [DUE] * 10
    assert found.held() == set()


def test_an_intent_without_a_result_is_held() -> None:
    found = states(log("a-1", intent(1, 103)))
    assert found.states()[3] == HELD
    assert [(d.log_id, d.serial, d.row) for d in found.doubts] == [("a-1", 1, 103)]


@pytest.mark.parametrize("verdict", [Verdict.LOST, Verdict.UNTOUCHED])
def test_lost_before_the_dot_is_due_again(verdict: Verdict) -> None:
    found = states(log("a-1", intent(1, 103), result(1, 103, verdict)))
    assert found.states()[3] == DUE


def test_lost_after_the_dot_is_held() -> None:
    found = states(log("a-1", intent(1, 103), result(1, 103, Verdict.IN_DOUBT)))
    assert found.states()[3] == HELD


def test_a_late_answer_from_another_log_resolves_doubt_in_any_order() -> None:
    doubt = log("a-1", intent(1, 103))
    answer = log("b-1", intent(1, 103), result(1, 103, Verdict.ACCEPTED))
    for order in ((doubt, answer), (answer, doubt)):
        assert states(*order).states()[3] == FINAL


def test_the_same_serial_in_another_log_is_another_intent() -> None:
    found = states(log("a-1", intent(1, 103)), log("b-1", intent(1, 104), result(1, 104, Verdict.DEFERRED, wait_s=60)))
    assert found.states()[3:5].tolist() == [HELD, WAITING]


def test_a_deferred_row_keeps_its_plan() -> None:
    minute = 60_000_000
    found = states(
        log("a-1", intent(1, 103), result(1, 103, Verdict.DEFERRED, 1, 5, 60)),
        log("b-1", intent(1, 103, 2, minute), result(1, 103, Verdict.DEFERRED, 2, minute + 7, 300)),
    )
    assert found.waiting() == [Waiting(103, 2, T0, T0 + minute + 7 + 300_000_000)]


def test_doubt_after_a_deferral_holds_the_row() -> None:
    found = states(
        log("a-1", intent(1, 103), result(1, 103, Verdict.DEFERRED, wait_s=60), intent(2, 103, 2, 61_000_000))
    )
    assert found.states()[3] == HELD
    assert found.waiting() == []


def test_a_resend_cancels_one_doubt_and_not_the_row() -> None:
    one, two = log("a-1", intent(1, 103)), log("b-1", intent(1, 103, reason=Reason.RESENT))
    assert states(one, decisions=(("a-1", 1, "resend"),)).states()[3] == DUE
    # The resend was attempted and its answer is missing too: held again.
    assert states(one, two, decisions=(("a-1", 1, "resend"),)).states()[3] == HELD
    assert states(one, decisions=(("a-1", 1, "resend"),)).resent() == {103}


def test_an_accepted_doubt_is_final() -> None:
    assert states(log("a-1", intent(1, 103)), decisions=(("a-1", 1, "accept"),)).states()[3] == FINAL


@pytest.mark.parametrize("verdict", [Verdict.REJECTED, Verdict.INVALID, Verdict.SUPPRESSED, Verdict.EXPIRED])
def test_an_outcome_is_final(verdict: Verdict) -> None:
    assert states(log("a-1", result(0, 103, verdict))).states()[3] == FINAL
