"""What came back, counted: by kind, class and provider, from the feedback logs of a campaign."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec

from engine.bounce.record import feedback_tables
from formats.feedbacklog import Decision


class Problem(msgspec.Struct, frozen=True):
    """Messages that people must look at."""

    message: str
    kind: str
    decision: str
    source: str
    text: str


class BounceReport(msgspec.Struct, kw_only=True):
    """Counts of distinct messages, and of rows."""

    messages: int = 0
    kinds: dict[str, int] = {}
    classes: dict[str, int] = {}  # of failed recipients
    providers: dict[str, int] = {}
    decisions: dict[str, int] = {}
    rows_bounced: int = 0
    rows_hard: int = 0
    rows_complained: int = 0
    for_people: list[Problem] = []
    provisional: dict[str, int] = {}  # provider -> hard bounces that wait for a word


def report(folders: Sequence[Path], *, most: int = 50) -> BounceReport:
    """The report over these feedback folders; a message that several readers recorded counts once."""
    seen: set[tuple[str, str, str]] = set()
    kinds: dict[str, str] = {}
    classes: Counter[str] = Counter()
    providers: Counter[str] = Counter()
    decisions: Counter[str] = Counter()
    provisional: Counter[str] = Counter()
    bounced: set[tuple[str, int]] = set()
    hard: set[tuple[str, int]] = set()
    complained: set[tuple[str, int]] = set()
    for_people: list[Problem] = []
    for _, table in feedback_tables(folders):
        for record in table.to_pylist():
            key = (record["message"], record["address"], record["decision"])
            if key in seen or record["is_test"]:
                continue
            seen.add(key)
            kinds[record["message"]] = record["kind"]
            row = (record["campaign"], record["row"])
            if record["kind"] == "delivery_report" and record["verdict"] == 2:
                classes[record["class"]] += 1
                providers[record["provider"] or "unknown"] += 1
                if row[1] is not None:
                    bounced.add(row)
                    if record["hard"]:
                        hard.add(row)
            elif record["kind"] == "complaint" and row[1] is not None:
                complained.add(row)
            if record["decision"]:
                decisions[record["decision"]] += 1
            if record["decision"] == Decision.PROVISIONAL:
                provisional[record["provider"]] += 1
            if record["decision"] in (Decision.UNMATCHED, Decision.FORGED) and len(for_people) < most:
                for_people.append(
                    Problem(
                        record["message"], record["kind"], record["decision"], record["source"], record["text"][:120]
                    )
                )
    return BounceReport(
        messages=len(kinds),
        kinds=_sorted(Counter(kinds.values())),
        classes=_sorted(classes),
        providers=_sorted(providers),
        decisions=_sorted(decisions),
        rows_bounced=len(bounced),
        rows_hard=len(hard),
        rows_complained=len(complained),
        for_people=for_people,
        provisional=_sorted(provisional),
    )


def _sorted(counts: Counter[str]) -> dict[str, int]:
    return dict(counts.most_common())


def table(told: BounceReport) -> str:
    """The report as text."""
    lines = [f"{told.messages} messages came back: {told.rows_bounced} rows bounced ({told.rows_hard} hard), "
             f"{told.rows_complained} complained"]  # fmt: skip
    for title, counts in (
        ("kind", told.kinds),
        ("reason", told.classes),
        ("provider", told.providers),
        ("done", told.decisions),
    ):
        if counts:
            lines.append("")
            lines += [f"{title:10} {name:24} {count:>9,}" for name, count in counts.items()]
    if told.provisional:
        lines.append("")
        lines += [
            f"doubted    {provider:24} {count:>9,}   confirm with: engine bounces confirm {provider}"
            for provider, count in told.provisional.items()
        ]
    if told.for_people:
        lines.append("")
        lines.append("for people to look at:")
        lines += [
            f"  {one.message[:12]}  {one.decision:10} {one.kind:16} {one.source}  {one.text}" for one in told.for_people
        ]
    return "\n".join(lines)
