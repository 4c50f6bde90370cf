"""The document describes the API: schemathesis asks every operation, rightly and wrongly, and finds nothing."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette

import engine.web.creating as creating_module
import engine.web.starting as starting_module
from engine.campaign import Campaign
from engine.outbox import open_outbox
from engine.web.api import OPERATIONS
from engine.web.app import ServeOptions, create_app
from engine.web.auth import Keyring
from engine.web.events import Round
from engine.web.guard import Buckets
from engine.web.openapi import document
from engine.web.shelf import Shelf, Watched
from tests.conftest import require
from tests.control.postgres_server import PostgresServer, binaries
from tests.web.conftest import Client, Sender, client_of, counters, make_campaign, provider, run


def test_every_reference_of_the_document_is_there(client: Client) -> None:
    told = client.ask("/openapi.json")
    assert told["openapi"] == "3.1.0"
    assert set(told["paths"]) == set(document()["paths"])

    def references(part: object) -> set[str]:
        if isinstance(part, dict):
            return {part["$ref"]} if "$ref" in part else set().union(*map(references, part.values()))
        return set().union(*map(references, part)) if isinstance(part, list) and part else set()

    known = {f"#/components/schemas/{name}" for name in told["components"]["schemas"]}
    assert references(told) <= known


def app_of(root: Path) -> tuple[Starlette, str]:
    keyring = Keyring(root / "web.token")
    options = ServeOptions(hosts=frozenset({"*"}), outbox=str(root / "outbox.sqlite"))
    return create_app(Shelf(root), keyring, options), keyring.first


def ask_all(app: Starlette, token: str, known: dict[str, Any], only: str = "") -> Counter[str]:
    """Ask each operation (whose path begins so) rightly and wrongly; how often each was asked."""
    schemathesis = pytest.importorskip("schemathesis")
    hypothesis = pytest.importorskip("hypothesis")
    from schemathesis.specs.openapi.checks import positive_data_acceptance as valid_is_taken

    schema = schemathesis.openapi.from_dict(document())
    schema.app = app
    headers = {"Authorization": f"Bearer {token}"}
    asked: Counter[str] = Counter()
    for result in schema.get_all_operations():
        operation = result.ok()
        if not operation.path.startswith(only):
            continue

        @hypothesis.settings(
            max_examples=5,
            deadline=None,
            database=None,
            suppress_health_check=list(hypothesis.HealthCheck),
            derandomize=True,
        )
        @hypothesis.given(case=operation.as_strategy(), is_known=hypothesis.strategies.booleans())
        def ask(case: object, is_known: bool) -> None:
            asked[case.operation.label] += 1  # type: ignore[attr-defined]
            if is_known:
                case.path_parameters = {name: known[name] for name in case.path_parameters or {}}  # type: ignore[attr-defined]
                for name in known.keys() & set(case.body if isinstance(case.body, dict) else ()):  # type: ignore[attr-defined]
                    case.body[name] = known[name]  # type: ignore[attr-defined]
            # What a schema cannot say (is it an address? is the row in that window?) is refused by 422.
            case.call_and_validate(headers=headers, excluded_checks=[valid_is_taken])  # type: ignore[attr-defined]

        ask()
    return asked


QUIET = ("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")


@pytest.mark.slow
@pytest.mark.filterwarnings(*QUIET)
def test_schemathesis_finds_nothing(campaign: Campaign, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every operation. Commands refuse at once instead of running, and the stream of events has an end."""
    monkeypatch.setattr(Buckets, "take", lambda self, address, now: True)  # it guesses tokens without end
    refusing = [sys.executable, "-c", "import sys; sys.exit('error: not now')"]
    monkeypatch.setattr(starting_module, "engine_command", lambda words: refusing)
    monkeypatch.setattr(creating_module, "engine_command", lambda words: refusing)

    async def short(self: Round, watched: Watched) -> AsyncIterator[bytes]:
        yield b"retry: 2000\n\n"

    monkeypatch.setattr(Round, "stream", short)
    sender = Sender(campaign)
    sender.tell(counters(1000, accepted=10, providers={"gmail": provider(accepted=10)}))
    with open_outbox(str(campaign.folder.parent / "outbox.sqlite")):
        pass
    app, token = app_of(campaign.folder.parent)
    known = {"campaign": "weekly", "provider": "gmail", "incarnation": sender.id, "batch": "0"}
    known["list"] = "weekly/list.parquet"
    asked = ask_all(app, token, known)
    assert set(asked) == {f"{one.method} {one.path}" for one in OPERATIONS}
    assert min(asked.values()) >= 2
    sender.close()


@pytest.mark.long
@pytest.mark.postgres
@pytest.mark.filterwarnings(*QUIET)
def test_schemathesis_finds_nothing_in_batches_of_a_shared_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require("postgres", None if binaries() else "no PostgreSQL server binary here")
    monkeypatch.setattr(Buckets, "take", lambda self, address, now: True)
    server = PostgresServer()
    try:
        folder = tmp_path / "site" / "shared"
        make_campaign(folder, [f"user{i}@example.com" for i in range(100)])
        (folder / "control.sqlite").unlink()
        run(folder.parent, "plan", "list.parquet", "--campaign", "shared", "--replace", "--control", server.url)
        app, token = app_of(folder.parent)
        with client_of(folder.parent) as client:
            me = client.act("/batches/claim", {"campaign": "shared", "sender": "first"})["incarnation"]
        asked = ask_all(app, token, {"campaign": "shared", "batch": "0", "incarnation": me}, only="/batches/")
        assert set(asked) == {"POST /batches/claim", "POST /batches/{batch}/progress"}
    finally:
        server.remove()
