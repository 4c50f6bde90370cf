"""The web application of `engine serve`: page, API, events, metrics, health, unsubscribing and webhooks. Assembles
only; a crash of this process touches no running campaign.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import BaseRoute, Mount, Route

from engine.campaign import make_private_folder
from engine.clock import Clock, SystemClock
from engine.errors import EngineError
from engine.web import metrics
from engine.web.api import OPERATIONS, Api
from engine.web.auth import Keyring
from engine.web.events import Round
from engine.web.guard import Guard
from engine.web.hook import Hook
from engine.web.idempotency import Memory
from engine.web.openapi import BASE, document
from engine.web.operation import Site
from engine.web.pages import Pages
from engine.web.problems import Refused, of_engine_error, problem_response
from engine.web.shelf import Shelf, Watched
from engine.web.snapshot import Snapshot
from engine.web.starting import reap

LOOPBACK = ("localhost", "127.0.0.1", "[::1]")


class ServeOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How the server is reached, and what it does besides."""

    hosts: frozenset[str] = frozenset(LOOPBACK)  # names in the Host header; "*" takes any
    lists: Path | None = None  # where lists of new campaigns may lie; by default the root folder
    secure_cookie: bool = False  # browsers speak https to us, or to a proxy in front
    open_metrics: bool = False  # /metrics without a token
    hook_url: str | None = None
    hook_secret: str = ""
    outbox: str | None = None  # a folder, a file or a URL, for POST /outbox
    state_folder: Path | None = None  # for idempotency keys; by default the root folder


def create_app(
    shelf: Shelf,
    keyring: Keyring,
    options: ServeOptions | None = None,
    *,
    extra: Sequence[BaseRoute] = (),
    clock: Clock | None = None,
) -> Starlette:
    """The application. `extra` routes are served in front: /u/ for unsubscribing, /webhook/ for bounces."""
    options = options or ServeOptions()
    clock = clock or SystemClock()
    hook = Hook(options.hook_url, options.hook_secret) if options.hook_url else None

    def hear(watched: Watched, snapshot: Snapshot) -> None:
        if hook is not None:
            hook.hear(watched.key, snapshot)
        reap()

    round_ = Round(shelf, hear)
    memory = Memory((options.state_folder or _state_folder(shelf)) / "web.sqlite", clock)
    site = Site(shelf=shelf, round=round_, clock=clock, lists=options.lists or shelf.root, outbox=options.outbox)
    api = Api(site, memory)
    pages = Pages(shelf, keyring, clock, secure_cookie=options.secure_cookie)
    schema = msgspec.json.encode(document())

    async def openapi(request: Request) -> Response:
        return Response(schema, media_type="application/json")

    async def healthz(request: Request) -> Response:
        return PlainTextResponse("alive\n")

    async def readyz(request: Request) -> Response:
        """Ready: the folder can be listed and no store is away. Names nothing: anybody may ask."""
        try:
            campaigns = await run_in_threadpool(shelf.all)
        except OSError:
            return PlainTextResponse("the folder cannot be read\n", 503)
        away = sum(1 for one in campaigns if one.problem)
        return PlainTextResponse(f"{away} stores are away\n" if away else "ready\n", 503 if away else 200)

    async def scrape(request: Request) -> Response:
        body, content_type = await run_in_threadpool(_expose, shelf, clock, request.headers.get("accept", ""))
        return Response(body, headers={"Content-Type": content_type})

    async def no_icon(request: Request) -> Response:
        return Response(status_code=204)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        round_.start()
        try:
            yield
        finally:
            await round_.stop()
            if hook is not None:
                await hook.stop()
            memory.close()
            shelf.close()

    operations = [
        Route(f"{BASE}{one.path}", api.endpoint(one), methods=[one.method], name=one.name) for one in OPERATIONS
    ]
    app = Starlette(
        routes=[
            *extra,
            Route(f"{BASE}/openapi.json", openapi),
            *_joined(operations),
            Route("/metrics", scrape),
            Route("/healthz", healthz),
            Route("/readyz", readyz),
            Route("/favicon.ico", no_icon),
            *pages.routes(),
        ],
        middleware=[Middleware(Guard, keyring=keyring, hosts=options.hosts, open_metrics=options.open_metrics)],
        exception_handlers={
            Refused: _refused,
            EngineError: _engine_error,
            HTTPException: _http_error,
        },
        lifespan=lifespan,
    )
    app.state.round = round_
    app.state.api = api
    return app


def _joined(routes: list[Route]) -> list[BaseRoute]:
    """Routes of one path as one, so that a wrong method is told all right ones (RFC 9110 §15.5.6)."""
    by_path: dict[str, list[Route]] = {}
    for route in routes:
        by_path.setdefault(route.path, []).append(route)
    joined: list[BaseRoute] = []
    for path, same in by_path.items():
        if len(same) == 1:
            joined.append(same[0])
            continue
        table = {method: route.endpoint for route in same for method in route.methods or ()}

        async def choose(request: Request, table: dict[str, Callable[..., Any]] = table) -> Response:
            response: Response = await table[request.method](request)
            return response

        joined.append(Route(path, choose, methods=list(table)))
    return joined


def _state_folder(shelf: Shelf) -> Path:
    folder = shelf.root / "run" if shelf.is_single else shelf.root
    make_private_folder(folder)
    return folder


def _expose(shelf: Shelf, clock: Clock, accept: str) -> tuple[bytes, str]:
    sources = []
    for watched in shelf.all():
        snapshot = watched.glance()
        if watched.reading is not None:
            sources.append(metrics.of_reading(snapshot, watched.reading, clock.wall_us()))
    return metrics.expose(sources, accept)


async def _refused(request: Request, refused: Exception) -> Response:
    assert isinstance(refused, Refused)
    return problem_response(refused.status, refused.detail, refused.hint, refused.headers)


async def _engine_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, EngineError)
    return of_engine_error(error)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return problem_response(error.status_code, "", headers=dict(error.headers or {}))


def public_routes(
    folders: list[Path], webhook_secret: str | None
) -> tuple[list[BaseRoute], contextlib.AbstractContextManager[object]]:
    """/u/TOKEN for these campaigns, and /webhook/SECRET; with what closes them at the end."""
    from engine.web.unsubscribe import Unsubscriber
    from engine.web.unsubscribe import create_app as create_unsubscribe_app
    from engine.web.webhook import create_webhook_app

    unsubscriber = Unsubscriber(folders)
    routes: list[BaseRoute] = [Mount("/u", create_unsubscribe_app(unsubscriber))]
    if webhook_secret:
        routes.append(Mount("/webhook", create_webhook_app(folders[0] / "feedback" / "inbox", webhook_secret)))
    return routes, contextlib.closing(unsubscriber)
