"""What an operator does to a running campaign, in the API: pause, resume, cancel, slow a provider, release a lease."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import msgspec
from starlette.requests import Request

from engine.web.actions import Action, Acts
from engine.web.operation import ACT_REFUSALS, Operation, Site
from engine.web.problems import Refused


class Slow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """At most so much to a provider; nothing at all lifts it. `for_s`: for so many seconds."""

    connections: Annotated[int, msgspec.Meta(ge=1, le=10_000)] | None = None
    per_second: Annotated[float, msgspec.Meta(ge=0.01, le=1_000_000)] | None = None
    for_s: Annotated[float, msgspec.Meta(ge=1, le=31_536_000)] | None = None


class Nothing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An empty object."""


class Done(msgspec.Struct, frozen=True):
    """The act is recorded and in the store; senders obey within a second."""

    recorded: Action


def _pause(site: Site, request: Request, body: Nothing) -> Done:
    return _act(site, request, Acts.pause)


def _resume(site: Site, request: Request, body: Nothing) -> Done:
    return _act(site, request, Acts.resume)


def _cancel(site: Site, request: Request, body: Nothing) -> Done:
    return _act(site, request, Acts.cancel)


def _slow(site: Site, request: Request, body: Slow) -> Done:
    provider = request.path_params["provider"]
    known = {one.name for one in site.named(request).look(fresh=True).providers}
    if provider not in known:
        raise Refused(404, "nothing was sent to that provider yet")
    return _act(site, request, lambda acts: acts.slow(provider, body.connections, body.per_second, body.for_s))


def _release(site: Site, request: Request, body: Nothing) -> Done:
    return _act(site, request, lambda acts: acts.release(request.path_params["incarnation"]))


def _act(site: Site, request: Request, act: Callable[[Acts], Action]) -> Done:
    watched = site.named(request)
    action = act(site.acts(request, watched))
    watched.look(fresh=True)
    return Done(action)


_ONE = "/campaigns/{campaign}"
OPERATIONS: tuple[Operation, ...] = (
    *(
        Operation(
            method="POST",
            path=f"{_ONE}/{name}",
            name=name,
            handler=handler,
            summary=summary,
            body=Nothing,
            answer=Done,
            refusals=ACT_REFUSALS,
        )
        for name, handler, summary in (
            ("pause", _pause, "Attempt nothing new until resumed"),
            ("resume", _resume, "Go on"),
            ("cancel", _cancel, "End it for good: what is in flight finishes"),
        )
    ),
    Operation(
        method="POST",
        path=_ONE + "/providers/{provider}/slow",
        name="slow",
        handler=_slow,
        summary="Slow a provider, or lift it",
        body=Slow,
        answer=Done,
        refusals=ACT_REFUSALS,
    ),
    Operation(
        method="POST",
        path=_ONE + "/machines/{incarnation}/release",
        name="release",
        handler=_release,
        summary="End a machine's lease, so that others may take its batches",
        body=Nothing,
        answer=Done,
        refusals=ACT_REFUSALS,
    ),
)
