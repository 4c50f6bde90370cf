"""Permanent refusals about a recipient reach the suppression list: `send` adds them itself, scope `all`.

While a provider's breaker is open its refusals are held back: who suddenly calls everybody unknown is wrong.
Row numbers come from the workers; addresses are read from the list, for no content travels between processes.
"""

from __future__ import annotations

from collections.abc import Callable

from engine.campaign import Campaign
from engine.clock import Clock
from engine.config import Settings
from engine.lists.suppressions import Suppressions
from engine.rows import RowReader, first_texts
from formats.address import Mailbox, canonical, parse_mailboxes
from formats.plan import Plan
from formats.suppression import ALL, Entry


class Suppressing:
    """One per supervisor."""

    def __init__(self, campaign: Campaign, settings: Settings, plan: Plan, clock: Clock) -> None:
        self._list = Suppressions(campaign.suppression, list_id=settings.campaign.list_id)
        self._reader = RowReader(plan, [plan.address_column])
        self._clock = clock
        self._source = f"send {plan.campaign_id}"
        self._held: dict[int, tuple[str, str]] = {}  # row -> provider, reply

    def add(self, refused: list[tuple[int, str, str]]) -> None:
        """Rows refused for good about the recipient: (row, provider, reply)."""
        for row, provider, reply in refused:
            self._held[row] = (provider, reply)

    def flush(self, is_tripped: Callable[[str], bool]) -> int:
        """Write what is not held back; returns how many entries. Durable when it returns."""
        rows = sorted(row for row, (provider, _) in self._held.items() if not is_tripped(provider))
        if not rows:
            return 0
        entries = []
        picked = self._reader.pick(rows)
        for (row, values), mailbox in zip(picked, parse_mailboxes(first_texts([v for _, v in picked])), strict=True):
            del values
            if isinstance(mailbox, Mailbox):
                reason = self._held[row][1]
                entries.append(Entry(canonical(mailbox), ALL, reason, self._source, self._clock.wall_us()))
            del self._held[row]
        self._list.add(entries)
        return len(entries)
