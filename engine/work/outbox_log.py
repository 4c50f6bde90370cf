"""The send log of an outbox server: what goes into the log about a row is also what the table is told of it."""

from __future__ import annotations

from collections.abc import Callable

from engine.control.outbox import State
from engine.work.logbook import Logbook
from formats.sendlog import Reason, Verdict

_STATES = {
    Verdict.ACCEPTED: State.ACCEPTED,
    Verdict.REJECTED: State.BOUNCED,
    Verdict.DEFERRED: State.WAITING,
    Verdict.IN_DOUBT: State.IN_DOUBT,
    Verdict.SUPPRESSED: State.SUPPRESSED,
    Verdict.INVALID: State.INVALID,
    Verdict.EXPIRED: State.DEFERRED,
    Verdict.UNSENT: State.UNSENT,
}
_REASONS = {
    Reason.RECIPIENT: "recipient",
    Reason.POLICY: "policy",
    Reason.CONTENT: "content",
    Reason.SIZE: "content",
    Reason.SENDER: "policy",
    Reason.ADDRESS: "address",
    Reason.RENDER: "render",
    Reason.CANCELLED: "cancelled",
    Reason.EXPIRED: "expired",
}


def state_of(verdict: int) -> State | None:
    """The table's word for a verdict; None where the row's place in the table does not change by it."""
    return _STATES.get(Verdict(verdict))


def reason_of(reason: int) -> str | None:
    """The table's word for a reason."""
    return _REASONS.get(Reason(reason))


class OutboxLog(Logbook):
    """`heard` is called with each result: row, state, attempt, reason, code, text, wait in seconds."""

    heard: Callable[[int, State, int, str | None, int, str | None, float], None]

    def result(
        self,
        serial: int,
        row: int,
        attempt: int,
        verdict: Verdict,
        *,
        reason: int = Reason.NONE,
        code: int = 0,
        provider: int = 0,
        source: int = 0,
        wait_s: int = 0,
        text: str | None = None,
    ) -> None:
        super().result(
            serial,
            row,
            attempt,
            verdict,
            reason=reason,
            code=code,
            provider=provider,
            source=source,
            wait_s=wait_s,
            text=text,
        )
        state = state_of(verdict)
        if state is not None:
            self.heard(row, state, attempt, reason_of(reason), code, text, wait_s)
