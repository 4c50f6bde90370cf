"""What came back after a message was accepted, as far as it changes an outcome. Pure.

A hard bounce turns `accepted` and `in doubt` into `bounced`: the message was accepted by somebody, and came back. It
does not touch a row that has another outcome. Complaints and unsubscribes change no outcome; they are counted, and
written back to the database.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from engine.results.resolve import Resolved
from formats.outcomes import WORDS, Outcome

Numbers = npt.NDArray[Any]

HARD, SOFT, COMPLAINT, UNSUBSCRIBE = "hard", "soft", "complaint", "unsubscribe"

_CHANGES = np.array([outcome in (Outcome.ACCEPTED, Outcome.IN_DOUBT) for outcome, _ in WORDS])
_BOUNCED = {reason: WORDS.index((Outcome.BOUNCED, reason)) for reason in ("recipient", "policy", "content")}


class Return(msgspec.Struct, frozen=True):
    """One thing that came back about one row."""

    row: int
    at_us: int
    kind: str  # hard, soft, complaint, unsubscribe
    reason: str = "recipient"  # of a hard bounce: recipient, policy or content
    text: str | None = None


class Feedback:
    """Everything that came back, by row."""

    def __init__(self, returns: list[Return] | None = None) -> None:
        self.returns = sorted(returns or [], key=lambda one: (one.row, one.at_us))
        hard = [one for one in self.returns if one.kind == HARD]
        self._row: Numbers = np.array([one.row for one in hard], np.int64)
        self._hard = hard

    def counts(self) -> dict[str, int]:
        """How many of each kind."""
        found: dict[str, int] = {}
        for one in self.returns:
            found[one.kind] = found.get(one.kind, 0) + 1
        return found

    def apply(self, found: Resolved) -> None:
        """Fold hard bounces into a span's outcomes; the first bounce of a row is the one that counts."""
        low, high = np.searchsorted(self._row, (found.first_row, found.first_row + found.rows)).tolist()
        if low == high:
            return
        found.bounced_at = np.zeros(found.rows, np.int64)
        for one in self._hard[low:high]:
            place = one.row - found.first_row
            if found.bounced_at[place]:
                continue
            if _CHANGES[found.word[place]]:
                found.bounced_at[place] = one.at_us
                found.word[place] = _BOUNCED.get(one.reason, _BOUNCED["policy"])
                found.last_at[place] = max(int(found.last_at[place]), one.at_us)
                found.has_word[place] = True
                if one.text is not None:
                    found.told[place] = one.text
