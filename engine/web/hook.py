"""Tells a URL of the operator's choice when a campaign finished, stopped by itself, or a provider's breaker opened.

One POST of JSON for each: {"event", "campaign", "at_us", "detail"}. With a secret, `X-Rowpost-Signature: sha256=HEX` is
the HMAC of the body.
Three tries, ten seconds each; redirects are not followed. What happened before the web server looked first is not told.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

import msgspec

from engine.web.snapshot import Snapshot

_TRIES_S = (0.0, 5.0, 30.0)
_PATIENCE_S = 10.0
_MOST_WAITING = 100


class News(msgspec.Struct, frozen=True):
    """What is told."""

    event: str  # finished, stopped, breaker_open, paused
    campaign: str
    at_us: int
    detail: str = ""


class Watcher:
    """Finds what is new between two looks at a campaign. Pure."""

    def __init__(self) -> None:
        self._state: str | None = None
        self._event_at = 0

    def news(self, key: str, now: Snapshot) -> list[News]:
        """What happened since the last look."""
        was, self._state = self._state, now.state
        latest = max((int(event["at_us"]) for event in now.events), default=0)
        since, self._event_at = self._event_at, max(self._event_at, latest)
        if was is None:
            return []
        told = []
        if now.state == "finished" and was != "finished":
            told.append(News("finished", key, now.at_us, f"{now.accepted} of {now.rows} sent, {now.bounced} bounced"))
        if now.state == "stopped" and was in ("sending", "waiting"):
            told.append(News("stopped", key, now.at_us, f"{now.left} rows left; {_why(now)}"))
        if now.state == "paused" and was != "paused":
            told.append(News("paused", key, now.at_us))
        for event in now.events:
            if event["event"] == "breaker_open" and int(event["at_us"]) > since:
                detail = f"{event.get('provider', '')}: {event.get('why', '')}"
                told.append(News("breaker_open", key, int(event["at_us"]), detail))
        return told


def _why(now: Snapshot) -> str:
    if any(machine.state == "silent" for machine in now.machines):
        return "a sender fell silent"
    return next((str(event.get("reason", "")) for event in now.events if event["event"] == "draining"), "it ended")


class Hook:
    """Posts news, one after another."""

    def __init__(self, url: str, secret: str, post: Callable[[str, bytes, dict[str, str]], None] | None = None) -> None:
        self._url, self._secret, self._post = url, secret, post or _post
        self._watchers: dict[str, Watcher] = {}
        self._waiting: asyncio.Queue[News] = asyncio.Queue(_MOST_WAITING)
        self._task: asyncio.Task[None] | None = None

    def hear(self, key: str, snapshot: Snapshot) -> None:
        """Look at a snapshot; on the event loop."""
        if self._task is None:
            self._task = asyncio.create_task(self._run())
        for news in self._watchers.setdefault(key, Watcher()).news(key, snapshot):
            with contextlib.suppress(asyncio.QueueFull):
                self._waiting.put_nowait(news)

    async def _run(self) -> None:
        while True:
            body = msgspec.json.encode(await self._waiting.get())
            headers = {"Content-Type": "application/json", "User-Agent": "rowpost"}
            if self._secret:
                mac = hmac.new(self._secret.encode(), body, hashlib.sha256).hexdigest()
                headers["X-Rowpost-Signature"] = f"sha256={mac}"
            problem: Exception | None = None
            for wait_s in _TRIES_S:
                await asyncio.sleep(wait_s)
                try:
                    await asyncio.to_thread(self._post, self._url, body, headers)
                    problem = None
                    break
                except (OSError, ValueError) as failed:
                    problem = failed
            if problem is not None:
                # The URL may hold a secret: it is not repeated here.
                print(f"the webhook was not told: {type(problem).__name__}", file=sys.stderr)

    async def stop(self) -> None:
        """End; what was not told stays untold."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None


def _post(url: str, body: bytes, headers: dict[str, str]) -> None:
    if not url.startswith(("http://", "https://")):
        raise ValueError("not an http URL")
    opener = urllib.request.build_opener(_NoRedirect)
    with opener.open(urllib.request.Request(url, body, headers), timeout=_PATIENCE_S) as answer:
        answer.read(1024)
