"""The JSON API, under /api/v1. Bodies are JSON, errors are problems (RFC 9457), POSTs take `Idempotency-Key`.

Puts the nouns' operations together and carries them out; `engine.web.operation` says what one is.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from engine.errors import EngineError
from engine.web import api_acts, api_batches, api_campaigns, api_outbox, api_suppressions
from engine.web.idempotency import MAX_KEY, Memory
from engine.web.operation import Operation, Site, json_response, person_of, read_body
from engine.web.problems import Refused, of_engine_error, problem_response

OPERATIONS: tuple[Operation, ...] = (
    *api_campaigns.OPERATIONS,
    *api_acts.OPERATIONS,
    *api_suppressions.OPERATIONS,
    *api_outbox.OPERATIONS,
    *api_batches.OPERATIONS,
)


class Api:
    """Carries operations out."""

    def __init__(self, site: Site, memory: Memory) -> None:
        self._site, self._memory = site, memory

    def endpoint(self, operation: Operation) -> Callable[[Request], Awaitable[Response]]:
        """The ASGI endpoint of an operation."""
        handler = partial(operation.handler, self._site)
        if operation.is_endpoint:
            return handler

        async def get(request: Request) -> Response:
            answer = await run_in_threadpool(handler, request)
            return json_response(answer, operation.status)

        async def post(request: Request) -> Response:
            raw = await request.body()
            return await run_in_threadpool(self._once, operation, handler, request, raw)

        return post if operation.body is not None else get

    def _once(self, operation: Operation, handler: Callable[..., Any], request: Request, raw: bytes) -> Response:
        """A POST, under its idempotency key where it has one."""
        key = request.headers.get("idempotency-key", "")
        if not key:
            return self._post(operation, handler, request, raw)
        if len(key) > MAX_KEY or not key.isprintable():
            raise Refused(422, f"an Idempotency-Key has at most {MAX_KEY} printable characters")
        who = person_of(request).name
        known = self._memory.begin(who, key, f"{request.method} {request.url.path}", raw)
        if known is not None:
            media = "application/json" if known.status < 400 else "application/problem+json"
            return Response(known.body, known.status, {"Idempotency-Replayed": "true"}, media)
        try:
            response = self._post(operation, handler, request, raw)
        except Refused as refused:
            response = problem_response(refused.status, refused.detail, refused.hint, refused.headers)
        except EngineError as error:
            response = of_engine_error(error)
        except BaseException:
            self._memory.end(who, key, 500, b"")
            raise
        self._memory.end(who, key, response.status_code, bytes(response.body))
        return response

    @staticmethod
    def _post(operation: Operation, handler: Callable[..., Any], request: Request, raw: bytes) -> Response:
        assert operation.body is not None
        answer = handler(request, read_body(request, raw, operation.body))
        return answer if isinstance(answer, Response) else json_response(answer, operation.status)
