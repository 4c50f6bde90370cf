"""The document describes the API: schemathesis asks every operation, rightly and wrongly, and finds nothing."""

from __future__ import annotations

import pytest
from starlette.applications import Starlette

from engine.campaign import Campaign
from engine.web.app import ServeOptions, create_app
from engine.web.auth import Keyring
from engine.web.guard import Buckets
from engine.web.openapi import document
from engine.web.shelf import Shelf
from tests.web.conftest import Client, Sender, counters, provider


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


def app_of(campaign: Campaign) -> tuple[Starlette, str]:
    root = campaign.folder.parent
    keyring = Keyring(root / "web.token")
    return create_app(Shelf(root), keyring, ServeOptions(hosts=frozenset({"*"}))), keyring.first


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
def test_schemathesis_finds_nothing(campaign: Campaign, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Buckets, "take", lambda self, address, now: True)  # it guesses tokens without end
    schemathesis = pytest.importorskip("schemathesis")
    hypothesis = pytest.importorskip("hypothesis")
    from schemathesis.specs.openapi.checks import positive_data_acceptance as valid_is_taken

    sender = Sender(campaign)
    sender.tell(counters(1000, accepted=10, providers={"gmail": provider(accepted=10)}))
    app, token = app_of(campaign)
    schema = schemathesis.openapi.from_dict(document())
    schema.app = app
    headers = {"Authorization": f"Bearer {token}"}
    asked = 0
    known = {"campaign": "weekly", "provider": "gmail", "incarnation": sender.id, "batch": "0"}
    for result in schema.get_all_operations():
        operation = result.ok()
        if operation.label.endswith(("/stream", "/start")) or operation.label == "POST /campaigns":
            continue  # an endless answer; processes: these have their own tests

        @hypothesis.settings(
            max_examples=5,
            deadline=None,
            database=None,
            suppress_health_check=list(hypothesis.HealthCheck),
            derandomize=True,
        )
        @hypothesis.given(case=operation.as_strategy(), is_known=hypothesis.strategies.booleans())
        def ask(case: object, is_known: bool) -> None:
            nonlocal asked
            asked += 1
            if is_known:
                case.path_parameters = {name: known[name] for name in case.path_parameters or {}}  # type: ignore[attr-defined]
            # What a schema cannot say (is it an address? is the row in that window?) is refused by 422.
            case.call_and_validate(headers=headers, excluded_checks=[valid_is_taken])  # type: ignore[attr-defined]

        ask()
    assert asked > 50
    sender.close()
