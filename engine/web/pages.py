"""The pages: sign-in, the list of campaigns, one campaign, its report. Each holds all it shows; nothing is fetched from
elsewhere. Whatever comes from a list, a server or a person is text: Jinja2 escapes it here, `textContent` in the page.
"""

from __future__ import annotations

import secrets
from importlib.resources import files
from urllib.parse import parse_qs

import jinja2
import msgspec
from markupsafe import Markup
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import BaseRoute, Route

from engine.clock import Clock
from engine.web.auth import COOKIE, SESSION_S, Keyring, clean_name
from engine.web.problems import Refused
from engine.web.shelf import Shelf, Watched

_MOST_LOGIN_BYTES = 8 * 1024
_REPORT_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; frame-ancestors 'none'"


class Pages:
    """The pages' handlers."""

    def __init__(self, shelf: Shelf, keyring: Keyring, clock: Clock, *, secure_cookie: bool) -> None:
        self._shelf, self._keyring, self._clock, self._secure = shelf, keyring, clock, secure_cookie
        folder = files("engine.web").joinpath("static")
        environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
        self._templates = {
            name: environment.from_string(folder.joinpath(f"{name}.html").read_text("utf-8"))
            for name in ("campaign", "list", "login")
        }
        self._css = Markup(folder.joinpath("page.css").read_text("utf-8"))
        self._js = Markup(folder.joinpath("page.js").read_text("utf-8"))

    def routes(self) -> list[BaseRoute]:
        """What to mount."""
        return [
            Route("/", self.home),
            Route("/c/{campaign}", self.campaign),
            Route("/c/{campaign}/report", self.report),
            Route("/login", self.login, methods=["GET"]),
            Route("/login", self.sign_in, methods=["POST"]),
            Route("/logout", self.sign_out, methods=["POST"]),
        ]

    async def home(self, request: Request) -> Response:
        """The list; the campaign itself where there is one."""
        if self._shelf.is_single:
            campaigns = await run_in_threadpool(self._shelf.all)
            if campaigns:
                return RedirectResponse(f"/c/{campaigns[0].key}", 303)
        lines = await run_in_threadpool(self._lines)
        return self._page("list", lines=lines, who=request.state.person.name)

    def _lines(self) -> list[dict[str, object]]:
        lines = []
        for one in self._shelf.all():
            s = one.glance()
            shown = {name: getattr(s, name) for name in ("id", "state", "rows", "accepted", "left", "per_second")}
            lines.append({**shown, "key": one.key, "problem": one.problem, "has_report": s.has_report})
        return lines

    def _watched(self, request: Request) -> Watched:
        found = self._shelf.get(request.path_params["campaign"])
        if found is None:
            raise Refused(404, "there is no such campaign here")
        return found

    async def campaign(self, request: Request) -> Response:
        """One campaign's page, with its numbers in it."""
        watched = await run_in_threadpool(self._watched, request)
        snapshot = await run_in_threadpool(watched.look)
        raw = msgspec.json.encode(snapshot)
        # Inside a script element only `</script` and `<!--` could end it: no `<` is left.
        state = Markup(raw.decode().replace("<", "\\u003c"))
        return self._page("campaign", snapshot=snapshot, state=state, js=self._js, who=request.state.person.name)

    async def report(self, request: Request) -> Response:
        """What `engine merge-logs` wrote, under a policy that lets no script run."""
        watched = await run_in_threadpool(self._watched, request)
        try:
            body = await run_in_threadpool((watched.campaign.report / "index.html").read_bytes)
        except OSError:
            raise Refused(404, "there is no report yet", "engine merge-logs writes it") from None
        return HTMLResponse(body, headers={"Content-Security-Policy": _REPORT_POLICY})

    async def login(self, request: Request) -> Response:
        """The form."""
        return self._page("login", problem="", next=_safe_next(request.query_params.get("next", "/")))

    async def sign_in(self, request: Request) -> Response:
        """Check the token, set the cookie."""
        if request.headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
            raise Refused(403, "this sign-in does not come from our own page")
        raw = await request.body()
        if len(raw) > _MOST_LOGIN_BYTES:
            raise Refused(413, "a sign-in is small")
        try:
            fields = {name: values[0] for name, values in parse_qs(raw.decode(), max_num_fields=10).items()}
        except (ValueError, UnicodeDecodeError):
            raise Refused(400, "that is no form") from None
        go_on = _safe_next(fields.get("next", "/"))
        token_name = self._keyring.of_token(fields.get("token", "").strip())
        if token_name is None:
            return self._page("login", 401, problem="That is not a token of this server.", next=go_on)
        person = clean_name(fields.get("name", ""), token_name)
        response = RedirectResponse(go_on, 303)
        response.set_cookie(
            COOKIE,
            self._keyring.session(token_name, person, self._clock.wall_us() // 1_000_000),
            max_age=SESSION_S,
            httponly=True,
            samesite="strict",
            secure=self._secure,
            path="/",
        )
        return response

    async def sign_out(self, request: Request) -> Response:
        """Forget the cookie."""
        response = Response(status_code=204)
        response.delete_cookie(COOKIE, path="/")
        return response

    def _page(self, name: str, status: int = 200, **values: object) -> Response:
        nonce = secrets.token_urlsafe(16)
        policy = (
            f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; connect-src 'self'; "
            "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
        )
        body = self._templates[name].render(nonce=nonce, css=self._css, **values)
        return HTMLResponse(body, status, {"Content-Security-Policy": policy})


def _safe_next(path: str) -> str:
    """A path of ours: nothing that a browser could read as another host."""
    return path if path.startswith("/") and not path.startswith(("//", "/\\")) and path.isprintable() else "/"
