"""The outbox in the API: an application on another machine puts single mails in."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from starlette.requests import Request

from engine.control.outbox import Enqueued, Mail
from engine.outbox import open_outbox
from engine.web.operation import ACT_REFUSALS, Operation, Site
from engine.web.problems import Refused

Address = Annotated[str, msgspec.Meta(min_length=3, max_length=320)]
ShortText = Annotated[str, msgspec.Meta(min_length=1, max_length=998)]


class NewMail(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One mail: a template with fields, or a subject with text or html. Priority 1 is sign-up, 2 notification."""

    address: Address
    priority: Annotated[int, msgspec.Meta(ge=1, le=3)] = 3
    template: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_-]{1,64}$")] | None = None
    fields: dict[str, Any] = {}
    subject: ShortText | None = None
    text: Annotated[str, msgspec.Meta(max_length=1_000_000)] | None = None
    html: Annotated[str, msgspec.Meta(max_length=1_000_000)] | None = None
    not_before_us: Annotated[int, msgspec.Meta(ge=0, le=2**53)] = 0
    expires_at_us: Annotated[int, msgspec.Meta(ge=0, le=2**53)] | None = None
    idempotency_key: Annotated[str, msgspec.Meta(min_length=1, max_length=200)] | None = None


class Enqueue(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Mails for the outbox; all are added, or none. One with an idempotency key that is known is not added again."""

    mails: Annotated[list[NewMail], msgspec.Meta(min_length=1, max_length=1_000)]


class EnqueuedMails(msgspec.Struct, frozen=True):
    """The rows of the mails, in their order."""

    mails: list[Enqueued]


def _enqueue(site: Site, request: Request, body: Enqueue) -> EnqueuedMails:
    if site.outbox is None:
        raise Refused(409, "this server has no outbox", "engine serve --outbox FOLDER names it.")
    # Attachments are files of the outbox folder: applications on other machines do not name them.
    mails = [Mail(**msgspec.structs.asdict(one)) for one in body.mails]
    with open_outbox(site.outbox) as outbox:
        return EnqueuedMails(outbox.enqueue(mails))


OPERATIONS: tuple[Operation, ...] = (
    Operation(
        method="POST",
        path="/outbox",
        name="enqueue",
        handler=_enqueue,
        summary="Put single mails into the outbox",
        body=Enqueue,
        answer=EnqueuedMails,
        status=201,
        refusals=ACT_REFUSALS,
    ),
)
