"""Providers' webhooks over HTTP: checked, put durably into the spool, answered. `engine bounces` reads them from there.

The URL's last part is a secret of the operator's choosing; the app knows no other protection, for SNS and most
providers have none that a small endpoint could check without fetching certificates from a URL in the message.
"""

from __future__ import annotations

import hmac
import sys
from pathlib import Path

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from engine.bounce.sources import spool
from formats.feedback.events import EventError, read_events, subscription_url

MAX_BODY = 1024 * 1024  # SNS sends at most 256 KB


def create_webhook_app(inbox: Path, secret: str) -> Starlette:
    """POST /SECRET takes events of the forms in `formats.feedback.events`; `inbox` is a campaign's feedback/inbox."""

    async def take(request: Request) -> Response:
        if not hmac.compare_digest(request.path_params["secret"].encode(), secret.encode()):
            return PlainTextResponse("not found\n", 404)
        body = b""
        async for chunk in request.stream():
            body += chunk
            if len(body) > MAX_BODY:
                return PlainTextResponse("too large\n", 413)
        if url := subscription_url(body):
            # Anybody may post a confirmation: the operator visits the URL, we do not.
            print(f"Amazon SNS asks to confirm a subscription: visit {url}", file=sys.stderr)
            return PlainTextResponse("noted\n")
        try:
            read_events(body)
        except EventError as problem:
            return PlainTextResponse(f"{problem}\n", 400)
        try:
            await run_in_threadpool(spool, inbox, body, ".json")
        except OSError:
            return PlainTextResponse("not possible now, try again\n", 503, {"Retry-After": "60"})
        return PlainTextResponse("taken\n", 202)

    return Starlette(routes=[Route("/{secret}", take, methods=["POST"])])
