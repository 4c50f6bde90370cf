"""The unsubscribe endpoint: a small ASGI app that part of a larger one may mount, or that runs alone.

RFC 8058: the receiver's system POSTs `List-Unsubscribe=One-Click` without cookies and follows no redirect, so a POST to
`/TOKEN` alone unsubscribes and answers 200. A GET shows a page with a button and changes nothing, for scanners of
links fetch every URL in a message. A token that is not ours, or forged, gets the same answer whatever is wrong with it.
"""

from __future__ import annotations

import html
import threading
from collections.abc import Sequence
from pathlib import Path

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import Route

from engine.bounce.classify import shipped_rules
from engine.bounce.desk import Desk, Incoming
from engine.bounce.ours import Match, Ours
from engine.clock import Clock, SystemClock
from engine.errors import EngineError
from formats.feedback import Feedback, Kind
from formats.feedbacklog import Decision
from formats.verp import TokenKind

MAX_BODY = 64 * 1024  # a one-click request has 26 bytes
_MINUTE_US = 60_000_000
_HEADERS = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",  # the URL is the key to the subscription
    "X-Robots-Tag": "noindex",
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'unsafe-inline'; form-action 'self'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
}

# title, question, button, done, unknown
_WORDS = {
    "en": (
        "Unsubscribe",
        "Do you want to stop receiving these messages?",
        "Unsubscribe",
        "You are unsubscribed. You will not receive these messages any more.",
        "This link is not valid.",
    ),
    "de": (
        "Abmelden",
        "Möchten Sie diese Nachrichten nicht mehr erhalten?",
        "Abmelden",
        "Sie sind abgemeldet und erhalten diese Nachrichten nicht mehr.",
        "Dieser Link ist nicht gültig.",
    ),
    "fr": (
        "Se désabonner",
        "Souhaitez-vous ne plus recevoir ces messages ?",
        "Se désabonner",
        "Vous êtes désabonné et ne recevrez plus ces messages.",
        "Ce lien n'est pas valable.",
    ),
    "es": (
        "Darse de baja",
        "¿Desea dejar de recibir estos mensajes?",
        "Darse de baja",
        "Se ha dado de baja y no recibirá más estos mensajes.",
        "Este enlace no es válido.",
    ),
    "it": (
        "Annulla iscrizione",
        "Vuole smettere di ricevere questi messaggi?",
        "Annulla iscrizione",
        "La sua iscrizione è annullata: non riceverà più questi messaggi.",
        "Questo link non è valido.",
    ),
    "pt": (
        "Cancelar subscrição",
        "Deseja deixar de receber estas mensagens?",
        "Cancelar subscrição",
        "A sua subscrição foi cancelada. Não receberá mais estas mensagens.",
        "Esta ligação não é válida.",
    ),
    "nl": (
        "Afmelden",
        "Wilt u deze berichten niet meer ontvangen?",
        "Afmelden",
        "U bent afgemeld en ontvangt deze berichten niet meer.",
        "Deze link is niet geldig.",
    ),
    "pl": (
        "Wypisz się",
        "Czy chcesz przestać otrzymywać te wiadomości?",
        "Wypisz się",
        "Wypisano. Nie otrzymasz więcej tych wiadomości.",
        "Ten link jest nieprawidłowy.",
    ),
    "ja": (
        "配信停止",
        "今後このメールの受信を停止しますか？",
        "配信停止",
        "配信を停止しました。今後このメールは届きません。",
        "このリンクは無効です。",
    ),
}


class Unsubscriber:
    """Checks tokens and unsubscribes; safe to call from several threads."""

    def __init__(self, folders: Sequence[Path], clock: Clock | None = None) -> None:
        """Raises KeysError, NothingToMatch, SettingsError."""
        self._clock = clock or SystemClock()
        self._ours = Ours(folders)
        self._desk = Desk(self._ours, shipped_rules(), self._clock)
        self._lock = threading.Lock()

    def check(self, token: str) -> Match:
        """What the token says; `named` is None where it is not a genuine unsubscribe token of ours."""
        match = self._ours.match_token(_request(token))
        return match if match.kind is TokenKind.UNSUBSCRIBE else Match(was_forged=match.was_forged)

    def unsubscribe(self, token: str) -> bool:
        """Durably suppress the token's subscriber for its list; False where the token is not ours.

        Doing it again changes nothing. A test message's token is accepted and does nothing.
        """
        if self.check(token).named is None:
            return False
        with self._lock:
            # One record a minute at most: whoever presses the button a hundred times has left once.
            minute = self._clock.wall_us() // _MINUTE_US
            raw = f"unsubscribe {token.lower()} {minute}".encode()
            taken = self._desk.take([Incoming(raw=raw, source="https", event=_request(token))])[0]
        return taken.was_known or Decision.FORGED not in taken.decisions

    def close(self) -> None:
        """Seal the log."""
        with self._lock:
            self._desk.close()


def _request(token: str) -> Feedback:
    return Feedback(kind=Kind.UNSUBSCRIBE, token_texts=(token,), feedback_type="opt-out")


def create_app(unsubscriber: Unsubscriber) -> Starlette:
    """The app; mount it where `unsubscribe_url` points, so that the token is what follows."""

    async def show(request: Request) -> Response:
        token = request.path_params["token"]
        match = await run_in_threadpool(unsubscriber.check, token)
        if match.named is None:
            return _page(request, 404, unknown=True)
        return _page(request, 200, action=request.url.path)

    async def leave(request: Request) -> Response:
        size = 0
        async for chunk in request.stream():
            size += len(chunk)
            if size > MAX_BODY:
                return PlainTextResponse("too large\n", 413, _HEADERS)
        try:
            is_done = await run_in_threadpool(unsubscriber.unsubscribe, request.path_params["token"])
        except (EngineError, OSError) as problem:
            # Never "done" for what is not recorded: the receiver's system tries again, a person sees why.
            request.app.state.problem = str(problem)
            return PlainTextResponse("not possible now, try again\n", 503, {**_HEADERS, "Retry-After": "60"})
        if not is_done:
            return _page(request, 404, unknown=True)
        return _page(request, 200, done=True)

    app = Starlette(
        routes=[
            Route("/{token}", show, methods=["GET"]),  # HEAD as well
            Route("/{token}", leave, methods=["POST"]),
        ]
    )
    app.state.problem = ""
    return app


def _page(request: Request, status: int, *, action: str = "", done: bool = False, unknown: bool = False) -> Response:
    language = _language(request.headers.get("accept-language", ""))
    title, question, button, left, invalid = _WORDS[language]
    if done:
        body = f"<p>{left}</p>"
    elif unknown:
        body = f"<p>{invalid}</p>"
    else:
        body = (
            f"<p>{question}</p><form method=post action='{html.escape(action, quote=True)}'>"
            f"<input type=hidden name=List-Unsubscribe value=One-Click><button>{button}</button></form>"
        )
    page = (
        f"<!doctype html><html lang={language}><meta charset=utf-8><meta name=viewport content='width=device-width'>"
        f"<title>{title}</title><style>"
        f"body{{font:18px system-ui,sans-serif;max-width:32em;margin:4em auto;padding:0 1em}}"
        f"button{{font:inherit;padding:.5em 1.5em}}</style><h1>{title}</h1>{body}</html>"
    )
    return HTMLResponse(page, status, _HEADERS)


def _language(accepted: str) -> str:
    """The first language the reader accepts that we speak."""
    for part in accepted[:200].split(","):
        name = part.partition(";")[0].strip().lower().partition("-")[0]
        if name in _WORDS:
            return name
    return "en"
