"""RFC 8058 over HTTP, and webhooks into the spool."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from sent_campaign import Sent, StoppedClock

pytest.importorskip("starlette")
pytest.importorskip("httpx")

import httpx
from starlette.applications import Starlette
from starlette.routing import Mount

from engine.bounce.record import feedback_tables
from engine.lists.suppressions import Suppressions
from engine.web.unsubscribe import MAX_BODY, Unsubscriber, create_app
from engine.web.webhook import create_webhook_app


class Client:
    """Requests to an ASGI app, without a socket."""

    def __init__(self, app: Starlette) -> None:
        self._app = app

    def request(self, method: str, path: str, **options: object) -> httpx.Response:
        import asyncio

        async def ask() -> httpx.Response:
            transport = httpx.ASGITransport(app=self._app)
            async with httpx.AsyncClient(transport=transport, base_url="https://example.com") as client:
                return await client.request(method, path, **options)  # type: ignore[arg-type]

        return asyncio.run(ask())


@pytest.fixture
def unsubscriber(sent: Sent, clock: StoppedClock) -> Iterator[Unsubscriber]:
    opened = Unsubscriber([sent.folder], clock)
    yield opened
    opened.close()


@pytest.fixture
def client(unsubscriber: Unsubscriber) -> Client:
    return Client(Starlette(routes=[Mount("/u", create_app(unsubscriber))]))


def suppressed(sent: Sent, list_id: str = "weekly") -> list[str]:
    names = [f"{name}@example.org" for name in ("ann", "ben", "cleo")]
    found = Suppressions(sent.folder / "suppression", list_id=list_id).check(names)
    return [name for name, is_in in zip(names, found, strict=True) if is_in]


ONE_CLICK = {"data": {"List-Unsubscribe": "One-Click"}}


def test_one_click(client: Client, sent: Sent) -> None:
    answer = client.request("POST", f"/u/{sent.marks(1).unsubscribe}", **ONE_CLICK)
    assert answer.status_code == 200
    assert not {"location", "set-cookie"} & set(answer.headers)
    assert suppressed(sent) == ["ben@example.org"]
    assert suppressed(sent, "other-list") == []


def test_get_and_head_change_nothing(client: Client, sent: Sent) -> None:
    """Scanners fetch every link of a message."""
    for method in ("GET", "HEAD"):
        answer = client.request(method, f"/u/{sent.marks(1).unsubscribe}")
        assert answer.status_code == 200
    assert suppressed(sent) == []
    page = client.request("GET", f"/u/{sent.marks(1).unsubscribe}", headers={"accept-language": "de-CH, en;q=0.5"})
    assert "<form method=post" in page.text
    assert "Abmelden" in page.text
    assert page.headers["referrer-policy"] == "no-referrer"


def test_twice_is_once(client: Client, sent: Sent) -> None:
    for _ in range(3):
        assert client.request("POST", f"/u/{sent.marks(1).unsubscribe}", **ONE_CLICK).status_code == 200
    assert len(Suppressions(sent.folder / "suppression", list_id="weekly")) == 1
    assert sum(table.num_rows for _, table in feedback_tables([sent.folder / "feedback"])) == 1


def test_body_of_any_form_or_none(client: Client, sent: Sent) -> None:
    token = sent.marks(2).unsubscribe
    assert client.request("POST", f"/u/{token.upper()}").status_code == 200
    assert client.request("POST", f"/u/{token}", files={"List-Unsubscribe": (None, "One-Click")}).status_code == 200
    assert client.request("POST", f"/u/{token}", content=b"x" * (MAX_BODY + 1)).status_code == 413


def test_forged_foreign_and_wrong_tokens_get_one_answer(client: Client, sent: Sent) -> None:
    genuine = sent.marks(1).unsubscribe
    forged = genuine[:-1] + ("0" if genuine[-1] != "0" else "1")
    another_row = genuine[:14] + "0000000002" + genuine[24:]
    answers = [
        client.request("POST", f"/u/{token}", **ONE_CLICK)
        for token in (forged, another_row, "x", sent.marks(1).return_path, "u" * 44, "%00", "ü")
    ]
    assert {answer.status_code for answer in answers} == {404}
    assert len({answer.text for answer in answers}) == 1
    assert suppressed(sent) == []


def test_test_message_is_accepted_and_suppresses_nobody(client: Client, sent: Sent) -> None:
    assert client.request("POST", f"/u/{sent.marks(1, is_test=True).unsubscribe}", **ONE_CLICK).status_code == 200
    assert suppressed(sent) == []


def test_never_done_what_is_not_recorded(client: Client, sent: Sent) -> None:
    (sent.folder / "suppression").write_text("in the way")
    answer = client.request("POST", f"/u/{sent.marks(1).unsubscribe}", **ONE_CLICK)
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "60")


def test_list_file_gone_keeps_the_request_for_people(sent: Sent, clock: StoppedClock) -> None:
    (sent.folder / "list.parquet").unlink()
    opened = Unsubscriber([sent.folder], clock)
    assert opened.unsubscribe(sent.marks(1).unsubscribe)
    opened.close()
    ((_, table),) = feedback_tables([sent.folder / "feedback"])
    assert table["row"].to_pylist() == [1]
    assert table["decision"].to_pylist() == ["unmatched"]


def test_webhook_spools_events_and_refuses_the_rest(tmp_path: Path) -> None:
    inbox = tmp_path / "inbox"
    client = Client(create_webhook_app(inbox, "s3cret"))
    event = b'{"event": "bounce", "recipient": "ann@example.org", "status": "5.1.1"}'
    assert client.request("POST", "/s3cret", content=event).status_code == 202
    assert [path.read_bytes() for path in inbox.iterdir()] == [event]
    assert client.request("POST", "/wrong", content=event).status_code == 404
    assert client.request("POST", "/s3cret", content=b"{}").status_code == 400
    assert client.request("POST", "/s3cret", content=b"x" * 1_100_000).status_code == 413
    assert len(list(inbox.iterdir())) == 1
