"""What stands before every request: the host it names, the size and pace of its body, who asks, and how often.

Plain ASGI, so that streams pass through. Answers carry security headers; pages add a policy with their nonce.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

from starlette.datastructures import MutableHeaders
from starlette.requests import HTTPConnection, Request
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.web.auth import Keyring, is_from_our_page
from engine.web.problems import Refused, problem_response

MAX_BODY = 4 * 1024 * 1024
BODY_PATIENCE_S = 20.0
PUBLIC = ("/u/", "/webhook/")
OPEN_PATHS = frozenset({"/login", "/healthz", "/readyz", "/favicon.ico"})
_SAFE = frozenset({"GET", "HEAD", "OPTIONS"})
_HEADERS = {
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
    "cache-control": "no-store",
    "content-security-policy": "default-src 'none'; frame-ancestors 'none'",
}


class Buckets:
    """A token bucket per address; the least recently seen addresses are forgotten."""

    def __init__(self, per_s: float, burst: float, most: int = 10_000) -> None:
        self._per_s, self._burst, self._most = per_s, burst, most
        self._known: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def take(self, address: str, now: float) -> bool:
        """One request; False: too many."""
        left, at = self._known.pop(address, (self._burst, now))
        left = min(self._burst, left + (now - at) * self._per_s)
        is_allowed = left >= 1
        self._known[address] = (left - 1 if is_allowed else left, now)
        while len(self._known) > self._most:
            self._known.popitem(last=False)
        return is_allowed


class Guard:
    """Middleware around everything."""

    def __init__(
        self,
        app: ASGIApp,
        keyring: Keyring,
        hosts: frozenset[str],
        *,
        open_metrics: bool = False,
        now: Callable[[], float] = time.monotonic,
        now_s: Callable[[], float] = time.time,
    ) -> None:
        self._app, self._keyring, self._hosts, self._open_metrics = app, keyring, hosts, open_metrics
        self._now, self._now_s = now, now_s
        self._public = Buckets(per_s=5.0, burst=50.0)
        self._failures = Buckets(per_s=0.2, burst=20.0)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = Request(scope)

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        refusal = self._refusal(request)
        if refusal is not None:
            await refusal(scope, receive, send_guarded)
            return
        await self._app(scope, _patient(receive, request), send_guarded)

    def _refusal(self, request: Request) -> Response | None:
        host = (
            (request.headers.get("host") or "").rsplit(":", 1)[0] if _has_port(request) else request.headers.get("host")
        )
        if "*" not in self._hosts and (host or "").lower() not in self._hosts:
            # A name that an attacker's DNS points at us would otherwise be "our own origin".
            return problem_response(421, "this server is not known by that name", "engine serve --host-name NAME")
        length = request.headers.get("content-length", "")
        if length.isdigit() and int(length) > MAX_BODY:
            return problem_response(413, f"at most {MAX_BODY} bytes", headers={"Connection": "close"})
        path, address = request.url.path, client_of(request)
        if path.startswith(PUBLIC):
            if not self._public.take(address, self._now()):
                return problem_response(429, "slower, please", headers={"Retry-After": "10"})
            return None
        person = self._keyring.who(request, int(self._now_s()))
        request.state.person = person
        if path in OPEN_PATHS or (path == "/metrics" and self._open_metrics):
            return self._login_refusal(request, path, address)
        if person is None:
            return self._unknown(request, address)
        if person.by_cookie and request.method not in _SAFE and not is_from_our_page(request):
            return problem_response(403, "this request does not come from our own page")
        return None

    def _login_refusal(self, request: Request, path: str, address: str) -> Response | None:
        if path == "/login" and request.method == "POST" and not self._failures.take(address, self._now()):
            return problem_response(429, "too many sign-ins", headers={"Retry-After": "60"})
        return None

    def _unknown(self, request: Request, address: str) -> Response:
        if request.headers.get("authorization") and not self._failures.take(address, self._now()):
            return problem_response(429, "too many wrong tokens", headers={"Retry-After": "60"})
        if request.method == "GET" and "text/html" in request.headers.get("accept", ""):
            return RedirectResponse(f"/login?next={quote(request.url.path)}", 303)
        return problem_response(
            401,
            "a token is needed",
            "Authorization: Bearer TOKEN, with a token of the file that `engine serve` names.",
            {"WWW-Authenticate": 'Bearer realm="rowpost"'},
        )


def _has_port(request: HTTPConnection) -> bool:
    host = request.headers.get("host") or ""
    return host.rsplit(":", 1)[-1].isdigit() and (host.count(":") == 1 or "]:" in host)


def client_of(request: HTTPConnection) -> str:
    """The address of whoever asks (behind a trusted proxy uvicorn puts the client's here)."""
    return request.client.host if request.client else ""


def _patient(receive: Receive, request: Request) -> Receive:
    """`receive`, but a body that is too large or too slow ends the request."""
    deadline: float | None = None
    size = 0
    is_over = False

    async def limited() -> Any:
        nonlocal deadline, size, is_over
        if is_over:
            return await receive()
        loop = asyncio.get_running_loop()
        if deadline is None:
            deadline = loop.time() + BODY_PATIENCE_S
        try:
            message = await asyncio.wait_for(receive(), max(0.0, deadline - loop.time()))
        except TimeoutError:
            raise Refused(408, "the body came too slowly", headers={"Connection": "close"}) from None
        size += len(message.get("body", b""))
        if size > MAX_BODY:
            raise Refused(413, f"at most {MAX_BODY} bytes", headers={"Connection": "close"})
        is_over = not message.get("more_body", False)
        return message

    return limited
