"""A finished campaign's replies judged by other rules: what would have differed.

Logs keep code and text but not the command that was answered, so replies are judged as of stage "report", where every
rule may hold; two books are compared by that same reading.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from engine.pace.rules import Judgement, RuleBook
from formats.reply import Reply
from formats.sendlog import NAME_PROVIDER, Kind, LogDamaged, Reader, Verdict

_JUDGED = (Verdict.REJECTED, Verdict.DEFERRED, Verdict.LOST)


class Difference(msgspec.Struct, frozen=True):
    """Replies that other rules read otherwise."""

    replies: int
    provider: str
    then: str
    now: str
    rule: str
    example: str


class Replay(msgspec.Struct, frozen=True):
    """All of it."""

    replies: int
    changed: int
    differences: list[Difference]
    problems: list[str]


def replay(logs: list[Path], before: RuleBook | None, after: RuleBook) -> Replay:
    """Every refusal in `logs` judged by both books, or against the log's own verdicts; the most frequent first."""
    counts: Counter[tuple[str, int, str, int]] = Counter()
    problems: list[str] = []
    for path in logs:
        try:
            _count(path, counts)
        except (LogDamaged, OSError) as problem:
            problems.append(f"{path.name}: {problem}")
    differences: Counter[tuple[str, str, str, str]] = Counter()
    examples: dict[tuple[str, str, str, str], str] = {}
    changed = total = 0
    for (provider, code, text, verdict), number in counts.items():
        total += number
        reply = Reply(code, text)
        now = after.judge("report", reply, provider or None)
        if before is None:
            decided = Verdict(verdict)
            # A row that came back LOST waits as one that was deferred does; by this reading both are deferred.
            if now.verdict is (Verdict.DEFERRED if decided is Verdict.LOST else decided):
                continue
            then_word = decided.name.lower()
        else:
            then = before.judge("report", reply, provider or None)
            if then == now:
                continue
            then_word = _word(then)
        changed += number
        key = (provider, then_word, _word(now), now.rule)
        differences[key] += number
        examples.setdefault(key, f"{code} {text}"[:120])
    listed = [Difference(n, key[0], key[1], key[2], key[3], examples[key]) for key, n in differences.most_common()]
    return Replay(total, changed, listed, problems)


def _word(said: Judgement) -> str:
    return f"{said.verdict.name.lower()}/{said.class_}" + ("+suppress" if said.suppress else "")


def _count(path: Path, counts: Counter[tuple[str, int, str, int]]) -> None:
    """Adds the log's refusals, equal ones together."""
    names: dict[int, str] = {}
    with pa.memory_map(str(path)) as mapped:
        for batch in Reader(mapped.read_buffer()):
            kinds = batch.column("kind")
            named = batch.filter(
                pc.and_(pc.equal(kinds, int(Kind.NAME)), pc.equal(batch.column("reason"), NAME_PROVIDER))
            )
            for row in named.select(["row", "text"]).to_pylist():
                names[row["row"]] = row["text"]
            results = batch.filter(
                pc.and_(
                    pc.and_(pc.equal(kinds, int(Kind.RESULT)), pc.greater_equal(batch.column("code"), 400)),
                    pc.is_in(batch.column("verdict"), pa.array([int(v) for v in _JUDGED], pa.uint8())),
                )
            )
            for row in results.select(["provider", "code", "text", "verdict"]).to_pylist():
                provider = names.get(row["provider"], "")
                counts[provider, row["code"], row["text"] or "", row["verdict"]] += 1
