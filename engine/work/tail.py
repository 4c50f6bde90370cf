"""Whether to take one of the last batches, or to leave it to a faster machine. Pure.

A batch that a slow machine takes late is what all the others wait for at the end. It is left where the others would
have done everything that nobody has begun before we had done this one batch. The fastest worker never leaves one once
its hands are empty, so that the last batch is always taken; a machine that stands still counts as not there.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from engine.control.store import Incarnation, Life

PATIENCE_S = 1.0  # speeds are rough, and a claim takes a moment
_MARGIN = 1.2


class Peer(msgspec.Struct, frozen=True):
    """Another machine: messages a second in all, and of one worker."""

    per_s: float
    worker_per_s: float


def peers_of(incarnations: Iterable[Incarnation], me: str, now_us: int) -> list[Peer]:
    """Those that send now, as their last renewal told."""
    peers = []
    for one in incarnations:
        per_s, workers = one.counters.get("per_second", 0), one.counters.get("processes", 1)
        if one.id == me or one.state is not Life.ALIVE or one.renewed_at_us + one.lease_us < now_us:
            continue
        if isinstance(per_s, int | float) and isinstance(workers, int) and per_s > 0:
            peers.append(Peer(per_s, per_s / max(1, workers)))
    return peers


def is_worth_taking(batch_rows: int, in_hand: int, worker_per_s: float, pending_rows: int, peers: list[Peer]) -> bool:
    """`in_hand` rows and a batch by one worker of ours, against `pending_rows`, ours among them, by the others."""
    if not peers or worker_per_s <= 0:
        return True
    # A batch is one worker's: however many there are, the last one takes as long as the fastest needs for it.
    others_s = max(pending_rows / sum(peer.per_s for peer in peers), batch_rows / max(p.worker_per_s for p in peers))
    return (in_hand + batch_rows) / worker_per_s <= _MARGIN * others_s + PATIENCE_S
