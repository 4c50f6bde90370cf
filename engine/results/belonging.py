"""Which logs are this campaign's, each once. What does not belong is named, and the rest is merged."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from engine.results.merged import Damage
from engine.results.scan import open_log, verified_length
from formats.plan import Plan
from formats.sendlog import LogDamaged


def belonging(
    plan: Plan, logs: Sequence[Path], fingerprint: str | None, damage: list[Damage], notes: list[str]
) -> list[tuple[str, Path]]:
    """The logs that belong here, each once, in the order of their ids: whatever order they were named in."""
    copies: dict[str, list[Path]] = {}
    for path in sorted({path.resolve() for path in logs}):
        if path.exists() and path.stat().st_size == 0:
            notes.append(f"{path} is empty: its worker ended before it attempted anything")
            continue
        try:
            header = open_log(str(path)).log.header
        except LogDamaged as problem:
            damage.append(Damage(str(path), str(problem)))
            continue
        if header.campaign_id != plan.campaign_id:
            problem_text = f"is a log of campaign {header.campaign_id!r}, not of {plan.campaign_id!r}: not merged"
            damage.append(Damage(str(path), problem_text, header.log_id))
        elif fingerprint is not None and header.plan_fingerprint != fingerprint:
            damage.append(Damage(str(path), "was written for another plan of this campaign: not merged", header.log_id))
        else:
            copies.setdefault(header.log_id, []).append(path)
    return [(log_id, _longest(log_id, paths, damage, notes)) for log_id, paths in sorted(copies.items())]


def _longest(log_id: str, paths: list[Path], damage: list[Damage], notes: list[str]) -> Path:
    """Of copies of one log the one with the longest whole prefix."""
    if len(paths) == 1:
        return paths[0]
    verified = sorted(((verified_length(str(path)), path) for path in paths), key=lambda v: (-v[0][0], v[1]))
    (_, _, seals), best = verified[0]
    for (length, seal, _), path in verified[1:]:
        if length and seals.get(length) != seal:
            damage.append(Damage(str(path), f"has the id of {best} and other content: not merged", log_id))
        else:
            notes.append(f"{path} is a copy of {best}: counted once")
    return best
