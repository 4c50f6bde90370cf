"""What came back after a message was accepted, as far as it changes an outcome. Pure over feedback logs' records.

A bounce turns `accepted` and `in doubt` into `bounced`: somebody accepted the message, and it came back. A report that
it arrived turns `in doubt` into `accepted`. Neither touches a row with another outcome: what was refused to our face
needs no second opinion. Complaints and unsubscribes change no outcome; they are counted, and written back to the
database.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from engine.results.resolve import ACCEPTED, IN_DOUBT, Resolved
from formats.feedbacklog import LogDamaged, feedback_reader
from formats.outcomes import WORDS, Outcome
from formats.sendlog import Reason, Verdict

Numbers = npt.NDArray[Any]


class Came(StrEnum):
    """What came back."""

    BOUNCE = "bounce"
    ARRIVED = "arrived"
    COMPLAINT = "complaint"
    UNSUBSCRIBE = "unsubscribe"


class Return(msgspec.Struct, frozen=True):
    """One thing that came back about one row. `hard`: nobody is there."""

    row: int
    at_us: int
    came: Came
    reason: str = "policy"  # of a bounce: recipient, policy or content
    hard: bool = False
    text: str | None = None


_CHANGES = np.array([outcome in (Outcome.ACCEPTED, Outcome.IN_DOUBT) for outcome, _ in WORDS])
_BOUNCED = {reason: WORDS.index((Outcome.BOUNCED, reason)) for reason in ("recipient", "policy", "content")}
_REASON = {Reason.RECIPIENT: "recipient", Reason.CONTENT: "content", Reason.SIZE: "content"}


class Feedback:
    """Everything that came back, by row."""

    def __init__(self, returns: Sequence[Return] = (), damage: Sequence[tuple[str, str]] = ()) -> None:
        self.returns = sorted(returns, key=lambda one: (one.row, one.at_us, one.came))
        self.damage = list(damage)  # (path, problem)
        self._told = [one for one in self.returns if one.came in (Came.BOUNCE, Came.ARRIVED)]
        self._rows: Numbers = np.array([one.row for one in self._told], np.int64)

    def counts(self) -> dict[str, int]:
        """Rows about which each kind came back."""
        found: dict[str, set[int]] = {str(came): set() for came in Came}
        for one in self.returns:
            found[one.came].add(one.row)
        return {came: len(rows) for came, rows in found.items()}

    def apply(self, found: Resolved) -> None:
        """Fold bounces into a span's outcomes; the first bounce of a row is the one that counts."""
        low, high = np.searchsorted(self._rows, (found.first_row, found.first_row + found.rows)).tolist()
        if low == high:
            return
        found.bounced_at = np.zeros(found.rows, np.int64)
        # A bounce outweighs a report of arrival: the second may come from a host on the way.
        for one in sorted(self._told[low:high], key=lambda one: one.came is not Came.BOUNCE):
            place = one.row - found.first_row
            if not _CHANGES[found.word[place]]:
                continue
            if one.came is Came.ARRIVED:
                if found.word[place] == IN_DOUBT:
                    found.word[place] = ACCEPTED
                    found.last_at[place] = one.at_us
                continue
            found.bounced_at[place] = one.at_us
            found.word[place] = _BOUNCED[one.reason]
            found.last_at[place] = max(int(found.last_at[place]), one.at_us)
            if not one.hard:
                found.soft.add(place)
            if one.text:
                found.told[place] = one.text


def read_feedback(files: Sequence[Path], campaign_id: str, rows: int) -> Feedback:
    """What the feedback logs say of this campaign's rows; damage is kept beside it."""
    returns: dict[tuple[int, Came, str], Return] = {}
    damage = []
    for path in sorted(files):
        try:
            with pa.memory_map(str(path)) as file:
                reader = feedback_reader(file.read_buffer())
        except (LogDamaged, OSError, pa.ArrowException) as problem:
            damage.append((str(path), str(problem)))
            continue
        for batch in reader:
            for record in batch.to_pylist():
                if record["row"] is None or record["is_test"] or record["campaign"] != campaign_id:
                    continue
                one = _return(record)
                if one is not None and one.row < rows:
                    # The same message read twice says it once.
                    returns.setdefault((one.row, one.came, record["message"]), one)
        if reader.log.damage is not None:
            damage.append((str(path), reader.log.damage))
    return Feedback(list(returns.values()), damage)


def _return(record: dict[str, Any]) -> Return | None:
    kind, verdict = record["kind"], record["verdict"]
    at_us = int(record["at"].timestamp() * 1e6)
    if kind in (Came.COMPLAINT, Came.UNSUBSCRIBE):
        return Return(record["row"], at_us, Came(kind), text=record["text"] or None)
    if verdict == Verdict.ACCEPTED:
        return Return(record["row"], at_us, Came.ARRIVED)
    if verdict == Verdict.REJECTED:
        reason = _REASON.get(record["reason"], "policy")
        return Return(record["row"], at_us, Came.BOUNCE, reason, record["hard"], record["text"] or None)
    return None
