"""The last word on each row of a span, from all attempts on them. Pure; whatever order they come in, the same word.

PROTOCOL "Merging": accepted > rejected > in doubt > deferred > the rest, never by time or file order. Between words of
the same strength the higher attempt, then the later time, then the log's id decide which one is shown; the outcome is
the same either way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from engine.results.attempts import ORDERED, REPEATED, REPORTED, RESENT, TAKEN_AS_ACCEPTED
from engine.results.spool import Pieces
from formats.outcomes import WORDS, Outcome
from formats.sendlog import Reason, Verdict

Numbers = npt.NDArray[Any]

_STRONGEST_FIRST = (
    Verdict.ACCEPTED,
    TAKEN_AS_ACCEPTED,
    Verdict.REJECTED,
    Verdict.IN_DOUBT,
    # From here on nobody was or may have been sent anything. What ends a row stands above what lets it wait.
    Verdict.EXPIRED,
    Verdict.UNSENT,
    Verdict.SUPPRESSED,
    Verdict.INVALID,
    Verdict.DEFERRED,
    RESENT,
    Verdict.LOST,
    Verdict.UNTOUCHED,
)
_STRENGTH = np.zeros(256, np.uint8)
for _place, _verdict in enumerate(reversed(_STRONGEST_FIRST)):
    _STRENGTH[_verdict] = _place + 1

# Attempts that count: something was, or may have been, said about the recipient.
COUNTED = np.zeros(256, bool)
COUNTED[[Verdict.ACCEPTED, Verdict.REJECTED, Verdict.DEFERRED, Verdict.IN_DOUBT, RESENT, TAKEN_AS_ACCEPTED]] = True
# Results without an attempt still tell how many went before.
_TELLS_ATTEMPTS = COUNTED.copy()
_TELLS_ATTEMPTS[[Verdict.EXPIRED, Verdict.UNSENT, Verdict.SUPPRESSED]] = True


def _word(outcome: Outcome, reason: str | None) -> int:
    return WORDS.index((outcome, reason))


NOT_REACHED = _word(Outcome.UNSENT, "not_reached")
WAITING = _word(Outcome.UNSENT, "waiting")
# Of a campaign that has ended for good: what its open rows are.
ENDED = {reason: _word(Outcome.UNSENT, reason) for reason in ("expired", "cancelled")}
ACCEPTED = _word(Outcome.ACCEPTED, None)
IN_DOUBT = _word(Outcome.IN_DOUBT, None)

# (verdict, reason) -> word.
_WORD = np.zeros((256, 256), np.uint8)
_WORD[Verdict.ACCEPTED] = ACCEPTED
_WORD[TAKEN_AS_ACCEPTED] = _word(Outcome.ACCEPTED, "operator")
# A rejection without a stated reason must not reach the suppression list: it is policy, not the recipient.
_WORD[Verdict.REJECTED] = _word(Outcome.BOUNCED, "policy")
_WORD[Verdict.REJECTED, Reason.RECIPIENT] = _word(Outcome.BOUNCED, "recipient")
_WORD[Verdict.REJECTED, [Reason.CONTENT, Reason.SIZE]] = _word(Outcome.BOUNCED, "content")
_WORD[Verdict.IN_DOUBT] = IN_DOUBT
_WORD[Verdict.EXPIRED] = _word(Outcome.DEFERRED, None)
_WORD[Verdict.UNSENT] = _word(Outcome.UNSENT, "cancelled")
_WORD[Verdict.UNSENT, Reason.EXPIRED] = _word(Outcome.UNSENT, "expired")
_WORD[Verdict.SUPPRESSED] = _word(Outcome.SUPPRESSED, None)
_WORD[Verdict.INVALID] = _word(Outcome.INVALID, "address")
_WORD[Verdict.INVALID, Reason.RENDER] = _word(Outcome.INVALID, "render")
_WORD[[Verdict.DEFERRED, RESENT]] = WAITING
_WORD[[Verdict.LOST, Verdict.UNTOUCHED]] = NOT_REACHED


class Duplicate:
    """A row that was accepted more than once. `ordered`: an operator's `resend` stands behind it."""

    __slots__ = ("at_us", "machines", "ordered", "row", "times")

    def __init__(self, row: int, times: int, ordered: bool, at_us: list[int], machines: list[int]) -> None:
        self.row, self.times, self.ordered, self.at_us, self.machines = row, times, ordered, at_us, machines


class Resolved:
    """What is known of the rows first_row .. first_row + rows - 1, an array per question. 0 in names is "none"."""

    __slots__ = (
        "_texts",
        "_winner",
        "attempts",
        "bounced_at",
        "code",
        "duplicates",
        "first_at",
        "first_row",
        "has_word",
        "last_at",
        "log",
        "provider",
        "rows",
        "soft",
        "source",
        "told",
        "word",
    )

    def __init__(self, first_row: int, rows: int) -> None:
        self.first_row, self.rows = first_row, rows
        self.word: Numbers = np.zeros(rows, np.uint8)
        self.has_word: Numbers = np.zeros(rows, bool)
        self.attempts: Numbers = np.zeros(rows, np.uint16)
        self.first_at: Numbers = np.zeros(rows, np.int64)  # 0: no attempt that counts
        self.last_at: Numbers = np.zeros(rows, np.int64)
        self.code: Numbers = np.zeros(rows, np.uint16)
        self.provider: Numbers = np.zeros(rows, np.int32)
        self.source: Numbers = np.zeros(rows, np.int32)
        self.log: Numbers = np.full(rows, -1, np.int32)
        self.bounced_at: Numbers | None = None  # 0: nothing came back
        self.soft: set[int] = set()  # places whose bounce says nothing against writing there again
        self.told: dict[int, str] = {}  # texts that a bounce brought, in place of the last reply's
        self.duplicates: list[Duplicate] = []
        self._texts: pa.ChunkedArray | None = None
        self._winner: Numbers = np.zeros(0, np.int64)

    def texts(self) -> pa.Array:
        """The last word's text, one per row."""
        if self._texts is None:
            return pa.nulls(self.rows, pa.string())
        index = pa.array(self._winner, mask=self._winner < 0)
        taken = self._texts.combine_chunks().take(index)
        return taken


def resolve(
    first_row: int,
    rows: int,
    pieces: Pieces,
    providers: Sequence[Numbers],
    sources: Sequence[Numbers],
    same_log: Numbers,
    resent_rows: frozenset[int] = frozenset(),
    *,
    words_only: bool = False,
) -> Resolved:
    """The rows' last words. `words_only`: word, provider and duplicates, and nothing else.

    `providers[log]` and `sources[log]` turn a log's numbers into the merge's; `same_log[log]` is the log whose attempts
    these are, where only the store told them.
    """
    found = Resolved(first_row, rows)
    if not pieces:
        return found
    row = _joined(pieces, "row").astype(np.int64)
    verdict = _joined(pieces, "verdict")
    log = np.concatenate([np.full(batch.num_rows, number, np.int32) for number, batch in pieces])
    started, ended, attempt = _joined(pieces, "started"), _joined(pieces, "ended"), _joined(pieces, "attempt")
    flags = _joined(pieces, "flags")
    winner = np.full(rows, -1, np.int64)
    winner[row] = np.arange(len(row))
    origin = same_log[log]
    stale = _answered_elsewhere(row, origin, attempt, verdict, flags)
    if len(stale):
        # Weaker than any word of the row, the answer included.
        verdict = verdict.copy()
        verdict[stale] = Verdict.UNTOUCHED
    # Most rows have one attempt, and their word is at hand; only the others need an order.
    several = np.flatnonzero(np.bincount(row, minlength=rows)[row] > 1)
    counted, tells = COUNTED[verdict], _TELLS_ATTEMPTS[verdict]
    if not words_only:
        found.attempts[row[tells]] = attempt[tells]
        found.first_at[row[counted]] = started[counted]
    if len(several):
        order = several[
            np.lexsort(
                (
                    log[several],
                    started[several],
                    ended[several],
                    attempt[several],
                    _STRENGTH[verdict[several]],
                    row[several],
                )
            )
        ]
        rows_of = row[order]
        last = np.concatenate((rows_of[1:] != rows_of[:-1], [True]))
        winner[rows_of[last]] = order[last]
        if not words_only:
            _add_history(found, several, row, attempt, started, counted, tells)
        found.duplicates = _duplicates(first_row, order, row, origin, attempt, verdict, ended, flags, resent_rows)
    places = np.flatnonzero(winner >= 0)
    chosen = winner[places]
    reason = _joined(pieces, "reason")
    found.has_word[places] = True
    found.word[places] = _WORD[verdict[chosen], reason[chosen]]
    found.provider[places] = _named(pieces, "provider", providers)[chosen]
    if words_only:
        return found
    found.last_at[places] = ended[chosen]
    found.code[places] = _joined(pieces, "code")[chosen]
    found.log[places] = log[chosen]
    found.source[places] = _named(pieces, "source", sources)[chosen]
    found._texts = pa.chunked_array([batch.column("text") for _, batch in pieces], pa.string())
    found._winner = winner
    return found


def _answered_elsewhere(row: Numbers, log: Numbers, attempt: Numbers, verdict: Numbers, flags: Numbers) -> Numbers:
    """Doubts that only the store reported, on attempts that have a definite word of the same log."""
    doubts = np.flatnonzero((flags & REPORTED != 0) & (verdict == Verdict.IN_DOUBT) & (attempt > 0))
    if not len(doubts):
        return doubts
    others = np.flatnonzero(np.isin(row, row[doubts]) & (verdict != Verdict.IN_DOUBT))
    answered = set(zip(row[others].tolist(), log[others].tolist(), attempt[others].tolist(), strict=True))
    keys = zip(row[doubts].tolist(), log[doubts].tolist(), attempt[doubts].tolist(), strict=True)
    stale: Numbers = doubts[np.array([key in answered for key in keys], bool)]
    return stale


def _joined(pieces: Pieces, name: str) -> Numbers:
    return np.concatenate([batch.column(name).to_numpy() for _, batch in pieces])


def _named(pieces: Pieces, name: str, maps: Sequence[Numbers]) -> Numbers:
    return np.concatenate([maps[log][batch.column(name).to_numpy()] for log, batch in pieces])


def _add_history(
    found: Resolved,
    several: Numbers,
    row: Numbers,
    attempt: Numbers,
    started: Numbers,
    counted: Numbers,
    tells: Numbers,
) -> None:
    told = several[tells[several]]
    found.attempts[row[told]] = 0
    np.maximum.at(found.attempts, row[told], attempt[told])
    real = several[counted[several]]
    found.first_at[row[real]] = np.iinfo(np.int64).max
    np.minimum.at(found.first_at, row[real], started[real])


def _duplicates(
    first_row: int,
    order: Numbers,
    row: Numbers,
    log: Numbers,
    attempt: Numbers,
    verdict: Numbers,
    ended: Numbers,
    flags: Numbers,
    resent_rows: frozenset[int],
) -> list[Duplicate]:
    """Rows with two accepted attempts. Two words on one attempt (a repeat, a report of what a log has) are one."""
    accepted = order[verdict[order] == Verdict.ACCEPTED]
    times = np.bincount(row[accepted]) if len(accepted) else np.zeros(0, np.int64)
    suspects = accepted[times[row[accepted]] > 1] if len(accepted) else accepted
    by_row: dict[int, list[int]] = {}
    for place in suspects.tolist():
        by_row.setdefault(int(row[place]), []).append(place)
    found = []
    for number, places in by_row.items():
        # Plain words first; a repeated or reported one counts only where it is no plain one's attempt.
        own = [p for p in places if not flags[p] & (REPEATED | REPORTED)]
        known = {(int(log[p]), int(attempt[p])) for p in own}
        for place in places:
            key = (int(log[place]), int(attempt[place]))
            if flags[place] & (REPEATED | REPORTED) and key not in known:
                known.add(key)
                own.append(place)
        if len(own) > 1:
            own.sort(key=lambda p: (int(ended[p]), int(log[p])))
            ordered = first_row + number in resent_rows or any(flags[p] & ORDERED for p in own)
            found.append(
                Duplicate(
                    first_row + number, len(own), ordered, [int(ended[p]) for p in own], [int(log[p]) for p in own]
                )
            )
    return found
