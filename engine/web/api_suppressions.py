"""Suppressions in the API: is an address suppressed for a campaign, suppress some."""

from __future__ import annotations

from typing import Annotated

import msgspec
from starlette.requests import Request

from engine.lists.suppressions import Suppressions
from engine.web.operation import ACT_REFUSALS, Operation, Site
from engine.web.problems import Refused
from engine.web.shelf import Watched
from formats.address import AddressError, canonical, parse_mailbox
from formats.suppression import Entry, Reason

Address = Annotated[str, msgspec.Meta(min_length=3, max_length=320)]


class NewSuppressions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Addresses that must not be written to; `everywhere` for all lists, else the campaign's own list."""

    addresses: Annotated[list[Address], msgspec.Meta(min_length=1, max_length=10_000)]
    reason: Reason = Reason.MANUAL
    everywhere: bool = False


class Added(msgspec.Struct, frozen=True):
    """How many were new. Senders obey within a second."""

    added: int


class Suppressed(msgspec.Struct, frozen=True):
    """Whether the campaign would leave the address out."""

    address: str
    is_suppressed: bool


def _suppressed(site: Site, request: Request) -> Suppressed:
    address = _canonical(request.query_params.get("address", ""))
    known = _suppressions(site.named(request))
    return Suppressed(address, bool(known.check([address])[0]))


def _suppress(site: Site, request: Request, body: NewSuppressions) -> Added:
    watched = site.named(request)
    scope = "all" if body.everywhere else watched.campaign.settings().campaign.list_id
    now_us = site.clock.wall_us()
    addresses = [_canonical(address) for address in body.addresses]
    entries = [Entry(address=one, scope=scope, reason=body.reason, source="api", at_us=now_us) for one in addresses]
    site.acts(request, watched).record("suppress", value=f"{len(entries)} addresses")
    return Added(_suppressions(watched).add(entries))


def _canonical(address: str) -> str:
    try:
        return canonical(parse_mailbox(address))
    except AddressError as problem:
        raise Refused(422, f"no address: {str(problem)[:100]}") from None


def _suppressions(watched: Watched) -> Suppressions:
    return Suppressions(watched.campaign.suppression, list_id=watched.campaign.settings().campaign.list_id)


_ONE = "/campaigns/{campaign}"
OPERATIONS: tuple[Operation, ...] = (
    Operation(
        method="GET",
        path=_ONE + "/suppressions",
        name="suppressed",
        handler=_suppressed,
        summary="Is an address suppressed for this campaign?",
        answer=Suppressed,
        refusals=(404, 422, 503),
        query=(("address", True, "The address."),),
    ),
    Operation(
        method="POST",
        path=_ONE + "/suppressions",
        name="suppress",
        handler=_suppress,
        summary="Suppress addresses",
        body=NewSuppressions,
        answer=Added,
        refusals=ACT_REFUSALS,
    ),
)
