"""One route of the API, what its handler is given, and how a body becomes a value and a value an answer.

Each noun of the API is a module `api_*` with its bodies, its handlers and its table of operations; `engine.web.openapi`
writes the document of the same tables, so that the two agree. A handler is a function of (site, request), for a POST of
(site, request, body); it runs in a thread and raises `Refused` or the engine's errors.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from engine.clock import Clock
from engine.web.actions import Acts
from engine.web.auth import Person
from engine.web.events import Round
from engine.web.guard import client_of
from engine.web.problems import Refused
from engine.web.shelf import Shelf, Watched

T = TypeVar("T")

# What any POST may be refused with.
ACT_REFUSALS = (404, 409, 413, 415, 422, 503)


class Operation(msgspec.Struct, frozen=True, kw_only=True):
    """One route."""

    method: str
    path: str  # below /api/v1
    name: str
    summary: str
    handler: Callable[..., Any]
    body: type | None = None
    answer: Any = None  # a type; None: not JSON
    media: str = "application/json"
    status: int = 200
    refusals: tuple[int, ...] = ()
    query: tuple[tuple[str, bool, str], ...] = ()  # name, needed, description
    is_endpoint: bool = False  # the handler is asynchronous and makes the whole response


class Site(msgspec.Struct, frozen=True, kw_only=True):
    """What handlers work with."""

    shelf: Shelf
    round: Round
    clock: Clock
    lists: Path  # where lists of new campaigns may lie
    outbox: str | None = None

    def watched(self, key: str) -> Watched:
        """The campaign of this key; raises Refused."""
        found = self.shelf.get(key)
        if found is None:
            raise Refused(404, "there is no such campaign here")
        return found

    def named(self, request: Request) -> Watched:
        """The campaign that the path names; raises Refused."""
        return self.watched(request.path_params["campaign"])

    def acts(self, request: Request, watched: Watched) -> Acts:
        """What whoever asks may do to it."""
        return Acts(watched.campaign, self.clock, person_of(request).name, client_of(request))


def person_of(request: Request) -> Person:
    """Who asks; the guard let them in."""
    person: Person = request.state.person
    return person


def read_body(request: Request, raw: bytes, kind: type[T]) -> T:
    """The body as this type; raises Refused. No body is an empty object."""
    media = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if raw and media != "application/json":
        raise Refused(415, "the body is application/json")
    try:
        return msgspec.json.decode(raw or b"{}", type=kind)
    except (msgspec.ValidationError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as problem:
        raise Refused(422, str(problem)) from None


def json_response(answer: Any, status: int = 200) -> Response:
    """JSON."""
    return Response(msgspec.json.encode(answer), status, media_type="application/json")
