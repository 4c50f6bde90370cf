"""What is new between two looks at a campaign: what the page is sent once a second, instead of everything. Pure.

A page that holds the snapshot of `since_us` and takes the changes over has the later snapshot; a page that missed one
is sent a whole snapshot again.
"""

from __future__ import annotations

from typing import Any

import msgspec

from engine.web.snapshot import ProviderView, Snapshot

_FIELDS = tuple(name for name in Snapshot.__struct_fields__ if name != "providers")


class Changes(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """New values of fields, and the providers that are not as they were; `order` where other ones are there."""

    since_us: int
    values: dict[str, Any]
    providers: list[ProviderView] = []
    order: list[str] | None = None


def changes(before: Snapshot, after: Snapshot) -> Changes:
    """What turns `before` into `after`."""
    values = {
        name: value for name in _FIELDS if (value := getattr(after, name)) != getattr(before, name) or name == "at_us"
    }
    known = {one.name: one for one in before.providers}
    order = [one.name for one in after.providers]
    return Changes(
        since_us=before.at_us,
        values=values,
        providers=[one for one in after.providers if known.get(one.name) != one],
        order=order if order != list(known) else None,
    )
