"""What is new between two looks at a campaign: what the page is sent once a second, instead of everything. Pure.

A page that holds the snapshot of `since_us` and takes the changes over has the later snapshot; a page that missed one
is sent a whole snapshot again.
"""

from __future__ import annotations

from typing import Any

import msgspec

from engine.web.snapshot import ProviderView, Snapshot

_FIELDS = tuple(name for name in Snapshot.__struct_fields__ if name not in ("at_us", "providers"))
_OF_PROVIDER = ProviderView.__struct_fields__


class Changes(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """New values of fields, by provider too; `order` names all providers where they are others or in another order."""

    since_us: int
    at_us: int
    values: dict[str, Any] = {}
    providers: dict[str, dict[str, Any]] = {}
    order: list[str] | None = None


def changes(before: Snapshot, after: Snapshot) -> Changes:
    """What turns `before` into `after`."""
    known = {one.name: one for one in before.providers}
    providers = {}
    for one in after.providers:
        was = known.get(one.name)
        if was is None:
            providers[one.name] = msgspec.structs.asdict(one)
        elif was != one:
            providers[one.name] = _differing(was, one, _OF_PROVIDER)
    order = [one.name for one in after.providers]
    return Changes(
        since_us=before.at_us,
        at_us=after.at_us,
        values=_differing(before, after, _FIELDS),
        providers=providers,
        order=order if order != list(known) else None,
    )


def _differing(before: msgspec.Struct, after: msgspec.Struct, fields: tuple[str, ...]) -> dict[str, Any]:
    return {name: value for name in fields if (value := getattr(after, name)) != getattr(before, name)}
