"""Errors of the API, in the form of RFC 9457 (`application/problem+json`): what, why, and the next step."""

from __future__ import annotations

import msgspec
from starlette.responses import Response

from engine.errors import EngineError, Exit

_TITLES = {
    400: "Bad request",
    401: "Not signed in",
    403: "Refused",
    404: "Not found",
    405: "Method not allowed",
    408: "Too slow",
    409: "Conflict",
    413: "Too large",
    415: "Unsupported media type",
    421: "Wrong host",
    422: "Not acceptable",
    429: "Too many requests",
    500: "Our mistake",
    503: "Not possible now",
}


class Problem(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The body of every answer from 400 on."""

    type: str = "about:blank"
    title: str
    status: int
    detail: str = ""
    hint: str = ""


class Refused(Exception):
    """Ends a request with a problem."""

    def __init__(self, status: int, detail: str, hint: str = "", headers: dict[str, str] | None = None) -> None:
        super().__init__(detail)
        self.status, self.detail, self.hint, self.headers = status, detail, hint, headers or {}


def problem_response(status: int, detail: str = "", hint: str = "", headers: dict[str, str] | None = None) -> Response:
    """The answer."""
    body = Problem(title=_TITLES.get(status, "Problem"), status=status, detail=detail, hint=hint)
    return Response(msgspec.json.encode(body), status, headers, "application/problem+json")


def of_engine_error(error: EngineError) -> Response:
    """What an error of the engine is over HTTP: its message, and its hint."""
    status = 503 if error.exit_code is Exit.TRY_AGAIN else 500 if error.exit_code is Exit.BUG else 422
    return problem_response(status, str(error), error.next_step)
