"""Permanent refusals about a recipient reach the suppression list: `send` adds them itself, scope `all`.

While a provider's breaker is open its refusals are held back: who suddenly calls everybody unknown is wrong.
Row numbers come from the workers; addresses are read from the list, for no content travels between processes.

Where machines share a store, its table and this machine's folder tell each other what is new every second, in a thread
of its own: what one machine adds the others obey within a few seconds. While the store is away the folder goes on.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

from engine.campaign import Campaign
from engine.clock import Clock
from engine.config import Settings
from engine.errors import EngineError
from engine.lists.exchange import Exchange, Exchanged, Table
from engine.lists.suppressions import Suppressions
from engine.rows import RowReader, first_texts
from formats.address import Mailbox, canonical, parse_mailboxes
from formats.plan import Plan
from formats.suppression import ALL, Entry


class Teller(Protocol):
    """Who is told of events."""

    def event(self, name: str, **fields: object) -> None:
        """Something happened."""


class Suppressing:
    """One per supervisor; `table` is the one that machines share, where there is one."""

    def __init__(
        self, campaign: Campaign, settings: Settings, plan: Plan, clock: Clock, teller: Teller, table: Table | None
    ) -> None:
        self._list = Suppressions(campaign.suppression, list_id=settings.campaign.list_id)
        self._reader = RowReader(plan, [plan.address_column])
        self._clock = clock
        self._source = f"send {plan.campaign_id}"
        self._held: dict[int, tuple[str, str]] = {}  # row -> provider, reply
        self._teller = teller
        self._exchange = Exchange(campaign.suppression, table) if table is not None else None
        self._thread = ThreadPoolExecutor(1, "suppressions")
        self._under_way: Future[Exchanged] | None = None
        self._away = ""

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

    def exchange(self) -> None:
        """Tell other machines and be told, without waiting for it: once a second."""
        if self._exchange is None or (self._under_way is not None and not self._under_way.done()):
            return
        self._hear()
        self._under_way = self._thread.submit(self._exchange.step)

    def finish(self, patience_s: float) -> None:
        """Tell other machines what is new at the end of the run; what cannot be told now the next run tells."""
        if self._exchange is not None:
            self._hear(patience_s)
            self._under_way = self._thread.submit(self._exchange.step)
            self._hear(patience_s)
        self._thread.shutdown(wait=False)

    def _hear(self, patience_s: float = 0) -> None:
        future, self._under_way = self._under_way, None
        if future is None:
            return
        try:
            done = future.result(patience_s)
        except (EngineError, OSError, TimeoutError) as problem:
            if not self._away:
                self._away = str(problem) or "no answer"
                self._teller.event("suppressions_not_shared", problem=self._away)
            return
        if self._away:
            self._away = ""
            self._teller.event("suppressions_shared_again")
        if done.taken:
            self._teller.event("suppressions_from_others", entries=done.taken)
