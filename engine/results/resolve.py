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


# So many attempts on rows that have several are numbered in what 64 bits have left beside the rest.
_PACKED = 1 << 24


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
    verdict, reason = _joined(pieces, "verdict"), _joined(pieces, "reason")
    flags = _joined(pieces, "flags")
    log = np.repeat(np.array([number for number, _ in pieces], np.int32), [batch.num_rows for _, batch in pieces])
    if flags.any() and len(
        stale := _answered_elsewhere(row, same_log[log], _joined(pieces, "attempt"), verdict, flags)
    ):
        # Weaker than any word of the row, the answer included.
        verdict = verdict.copy()
        verdict[stale] = Verdict.UNTOUCHED
    winner = np.full(rows, -1, np.int32)
    winner[row] = np.arange(len(row), dtype=np.int32)
    # Most rows have one attempt, and their word is at hand; only the others need an order.
    shared = np.zeros(rows, bool)
    shared[row[winner.take(row) != np.arange(len(row), dtype=np.int32)]] = True
    several = np.flatnonzero(shared.take(row))
    if len(several):
        of = _Several(several, row, verdict, flags, log, pieces)
        winner[of.row[of.last]] = of.place[of.last]
        found.duplicates = of.duplicates(first_row, same_log, resent_rows)
    full = bool((winner >= 0).all())
    places = slice(None) if full else np.flatnonzero(winner >= 0)
    chosen = winner[places]
    found.word[places] = _WORD.take(verdict.take(chosen).astype(np.uint16) << 8 | reason.take(chosen))
    found.provider[places] = _named(pieces, "provider", providers).take(chosen)
    if words_only:
        return found
    attempt, started, ended = (_joined(pieces, name) for name in ("attempt", "started", "ended"))
    counted, tells = COUNTED.take(verdict), _TELLS_ATTEMPTS.take(verdict)
    found.attempts[row[tells]] = attempt[tells]
    found.first_at[row[counted]] = started[counted]
    if len(several):
        _add_history(found, several, row, attempt, started, counted, tells)
    found.last_at[places] = ended.take(chosen)
    found.code[places] = _joined(pieces, "code").take(chosen)
    found.log[places] = log.take(chosen)
    found.source[places] = _named(pieces, "source", sources).take(chosen)
    found._texts = pa.chunked_array([batch.column("text") for _, batch in pieces], pa.string())
    found._winner = winner
    return found


class _Several:
    """The attempts on rows that have more than one: each row's together, the one that counts last.

    Row, strength, attempt and place are one number each, so that they are sorted as values: a sixth of what a sort by
    columns costs. Only what is equal in the first three (words on the same attempt, as a rule) is compared by its times
    and log.
    """

    def __init__(
        self, several: Numbers, row: Numbers, verdict: Numbers, flags: Numbers, log: Numbers, pieces: Pieces
    ) -> None:
        self._log, self._flags = log[several], flags[several]
        self._verdict, self._pieces, self._several = verdict[several], pieces, several
        self._attempt = _joined(pieces, "attempt")[several]
        own_row, strength = row[several].astype(np.uint64), _STRENGTH.take(self._verdict).astype(np.uint64)
        key = (own_row << 20 | strength << 16 | self._attempt) if len(several) < _PACKED else None
        if key is None:
            order = self._by_columns(np.arange(len(several)), own_row, strength)
        else:
            packed = np.sort(key << 24 | np.arange(len(several), dtype=np.uint64))
            order = (packed & np.uint64(_PACKED - 1)).astype(np.int64)
            ranked = packed >> np.uint64(24)
            equal = ranked[1:] == ranked[:-1]
            if equal.any():
                tied = np.flatnonzero(np.append(equal, False) | np.append(False, equal))
                group = np.cumsum(np.append(True, ~equal))[tied]
                order[tied] = order[tied][self._by_columns(order[tied], group)]
        self.row = own_row[order].astype(np.int64)
        self.place = several[order]
        self._order = order
        self.last: Numbers = np.append(self.row[1:] != self.row[:-1], True)

    def _by_columns(self, which: Numbers, *first: Numbers) -> Numbers:
        started, ended = (_joined(self._pieces, name)[self._several[which]] for name in ("started", "ended"))
        return np.lexsort((self._log[which], started, ended, self._attempt[which], *reversed(first)))

    def duplicates(self, first_row: int, same_log: Numbers, resent_rows: frozenset[int]) -> list[Duplicate]:
        """Rows with two accepted attempts. Two words on one attempt (a repeat, a report of what a log has) are one."""
        accepted = self._order[self._verdict[self._order] == Verdict.ACCEPTED]
        row = self.row[self._verdict[self._order] == Verdict.ACCEPTED]
        same = row[1:] == row[:-1]
        suspects = np.append(same, False) | np.append(False, same) if len(row) else np.zeros(0, bool)
        by_row: dict[int, list[int]] = {}
        for number, at in zip(row[suspects].tolist(), accepted[suspects].tolist(), strict=True):
            by_row.setdefault(number, []).append(at)
        if not by_row:
            return []
        ended, attempt, flags = _joined(self._pieces, "ended")[self._several], self._attempt, self._flags
        log = same_log[self._log]
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
                at_us, logs = [int(ended[p]) for p in own], [int(log[p]) for p in own]
                found.append(Duplicate(first_row + number, len(own), ordered, at_us, logs))
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
    return np.concatenate([maps[log].take(batch.column(name).to_numpy()) for log, batch in pieces])


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
