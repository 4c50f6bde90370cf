"""The operator's word on hard bounces that were recorded while a provider's breaker was open."""

from __future__ import annotations

from collections.abc import Sequence

from engine.bounce.ours import OurCampaign, canonical_or_none
from engine.bounce.record import feedback_tables
from engine.lists.suppressions import Suppressions
from formats.feedbacklog import Decision
from formats.suppression import ALL, Entry, Reason


def confirm(campaigns: Sequence[OurCampaign], provider: str, now_us: int) -> int:
    """Suppress what was provisional for `provider`; how many addresses that were new."""
    count = 0
    for one in campaigns:
        entries: dict[str, Entry] = {}
        for _, table in feedback_tables([one.campaign.feedback]):
            for record in table.select(["provider", "decision", "address", "campaign"]).to_pylist():
                if record["decision"] != Decision.PROVISIONAL or record["provider"] != provider:
                    continue
                address = canonical_or_none(record["address"])
                if address is not None:
                    source = f"campaign {record['campaign']}, confirmed"
                    entries.setdefault(address, Entry(address, ALL, Reason.BOUNCE, source, now_us))
        if entries:
            count += Suppressions(one.campaign.suppression, list_id=None).add(list(entries.values()))
    return count
