"""What all workers of a run have in hand, what waits, and what limits each provider: summed up for who looks on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from engine.work.crew import Crew
from engine.work.pacing import Pacing
from engine.work.progress import KeyProgress, Progress
from engine.work.shared import Shared
from engine.work.sharing import Sharing


class Overview:
    """Fills in `progress` from what the workers told last."""

    def __init__(
        self,
        crew: Crew,
        progress: Progress,
        pacing: Pacing,
        shared: Shared | None,
        sharing: Sharing | None,
        tell: Callable[..., None],
    ) -> None:
        self._crew, self._progress, self._pacing = crew, progress, pacing
        self._shared, self._sharing, self._tell = shared, sharing, tell
        self._told_opening = 0
        self.last_reason = ""  # why rows waited, when last there was a reason

    def sum_up(self, *, is_draining: bool) -> None:
        """Anew; where all workers are gone, what the last of them told stays."""
        hands = self._crew.hands.values()
        progress = self._progress
        if not hands:
            return
        waiting = sum(hand.waiting for hand in hands)
        # Workers leave one by one; what those that are gone had waiting waits on.
        progress.waiting = max(waiting, progress.waiting) if is_draining else waiting
        progress.in_flight = sum(hand.in_flight for hand in hands)
        progress.ready = sum(hand.ready for hand in hands)
        progress.parked = sum(hand.parked for hand in hands)
        progress.processes = len(hands)
        dues = [hand.next_due_us for hand in hands if hand.next_due_us is not None]
        if not is_draining:
            progress.next_due_us = min(dues, default=None)
        progress.reason = next((hand.reason for hand in hands if hand.reason), "")
        self._sum_up_hours(is_draining=is_draining)
        if self._shared is not None and self._shared.away is not None:
            progress.reason = f"{self._shared.away} Rows that are in windows finish; nothing new is attempted."
        elif self._sharing is not None and self._sharing.waits:
            progress.reason = "others hold all that is allowed (one that fell silent may for ten minutes more)"
        self._show_limits()
        self.last_reason = progress.reason or self.last_reason

    def _sum_up_hours(self, *, is_draining: bool) -> None:
        """Rows that wait for the hours of their zones: how many, and until when nothing else is to do."""
        hands, progress = self._crew.hands.values(), self._progress
        if not is_draining:
            progress.asleep = sum(hand.asleep for hand in hands)
            progress.opens_at = min((hand.opens_at for hand in hands if hand.opens_at is not None), default=None)
        if self._shared is not None:
            self._shared.has_sleepers = progress.asleep > 0
        if progress.opens_at is None or any(hand.unread or hand.in_flight or hand.has_demand for hand in hands):
            return
        words = f"{progress.asleep:,} rows wait for the sending hours of their zones, the first until"
        progress.reason = progress.reason or f"{words} {progress.opens_at[1]}"
        if self._told_opening != progress.opens_at[0]:
            self._told_opening = progress.opens_at[0]
            self._tell("waiting_for_hours", rows=progress.asleep, until=progress.opens_at[1])

    def established(self) -> Counter[str]:
        """Connections by provider, over all workers, as last told."""
        open_: Counter[str] = Counter()
        for hand in self._crew.hands.values():
            open_.update(hand.connections)
        return open_

    def _show_limits(self) -> None:
        open_ = self.established()
        demand: Counter[str] = Counter()
        for hand in self._crew.hands.values():
            for (_, name), rows in hand.demand.items():
                demand[name] += rows
        allowed: Counter[str] = Counter()
        for key in self._pacing.known_keys():
            if (provider := self._progress.providers.get(key[1])) is not None:
                state = self._pacing.state_of(key)
                allowed[key[1]] += state.connections
                told = self._progress.keys.setdefault(key, KeyProgress())
                told.held, told.allowed = self._pacing.ledger.held(key), state.connections
                told.suspended_until_us = state.suspended_until_us
                provider.limit, provider.suspended_until_us = state.limit, state.suspended_until_us
        for name, provider in self._progress.providers.items():
            provider.connections, provider.allowed, provider.waiting = open_[name], allowed[name], demand[name]
