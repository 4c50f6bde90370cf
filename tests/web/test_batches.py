"""Workers in other languages, over PostgreSQL: the store's promises by HTTP."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import require
from tests.control.postgres_server import PostgresServer, binaries
from tests.web.conftest import Client, client_of, make_campaign, run, start

pytestmark = pytest.mark.postgres
_numbers = itertools.count()


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    require("postgres", None if binaries() else "no PostgreSQL server binary here")
    server = PostgresServer()
    yield server
    server.remove()


@pytest.fixture
def shared(server: PostgresServer, tmp_path: Path) -> Iterator[Client]:
    """A server over a campaign of 300 rows in three batches that machines share."""
    folder = tmp_path / "site" / "shared"
    make_campaign(folder, [f"user{i}@example.com" for i in range(300)])
    settings = folder / "campaign.toml"
    text = settings.read_text().replace("[list]\n", "[list]\nbatch_rows = 100\n")
    settings.write_text(text.replace("first-letter", f"shared-{next(_numbers)}"))
    (folder / "control.sqlite").unlink()
    run(folder.parent, "plan", "list.parquet", "--campaign", "shared", "--replace", "--control", server.url)
    with client_of(folder.parent) as client:
        yield client


def claim(client: Client, code: int = 200, **more: Any) -> Any:
    return client.act("/batches/claim", {"campaign": "shared", "sender": "go-worker", **more}, code=code)


def progress(client: Client, batch: int, me: str, code: int = 200, **more: Any) -> Any:
    body = {"campaign": "shared", "incarnation": me, **more}
    return client.act(f"/batches/{batch}/progress", body, code=code)


def accepted(window: int, rows: list[int]) -> list[dict[str, Any]]:
    return [{"window": window, "row": row, "verdict": "accepted"} for row in rows]


@pytest.mark.slow
def test_a_batch_from_claim_to_done(shared: Client) -> None:
    got = claim(shared)
    me, batch = got["incarnation"], got["batches"][0]
    assert (batch["batch"], batch["due"], batch["held"]) == (0, [[0, 99]], [])
    first, second = list(range(60)), list(range(60, 100))
    assert progress(shared, 0, me, next={"window": 1, "rows": first})["opened"] == 1
    slid = progress(shared, 0, me, verdicts=accepted(1, first), next={"window": 2, "rows": second})
    assert (slid["opened"], slid["unreported"], slid["is_done"]) == (2, 40, False)
    assert progress(shared, 0, me, verdicts=accepted(2, second))["is_done"] is True
    told = shared.ask("/campaigns/shared")
    assert (told["accepted"], told["left"], told["machines"][0]["sender"]) == (100, 200, "go-worker")
    assert claim(shared, incarnation=me)["batches"][0]["batch"] == 1


def test_an_opening_whose_answer_was_lost_is_repeated_and_a_second_use_is_refused(shared: Client) -> None:
    me = claim(shared)["incarnation"]
    for _ in range(2):
        assert progress(shared, 0, me, next={"window": 1, "rows": [0, 1]})["opened"] == 1
    refused = progress(shared, 0, me, code=409, next={"window": 1, "rows": [2, 3]})
    assert refused["is_alive"] is True
    # Rows in a window are in no second one.
    assert "held" in progress(shared, 0, me, code=422, next={"window": 2, "rows": [1]})["detail"]


def test_repeated_verdicts_count_once_and_the_first_stands(shared: Client) -> None:
    me = claim(shared)["incarnation"]
    progress(shared, 0, me, next={"window": 1, "rows": [0]})
    progress(shared, 0, me, verdicts=accepted(1, [0]))
    progress(shared, 0, me, verdicts=[{"window": 1, "row": 0, "verdict": "rejected"}])
    told = shared.ask("/campaigns/shared")
    assert (told["accepted"], told["bounced"]) == (1, 0)
    assert "outcome" in progress(shared, 0, me, code=422, next={"window": 2, "rows": [0]})["detail"]


def test_a_lost_lease_answers_409_and_still_takes_the_verdicts(shared: Client) -> None:
    me = claim(shared)["incarnation"]
    progress(shared, 0, me, next={"window": 1, "rows": [0, 1, 2]})
    shared.act(f"/campaigns/shared/machines/{me}/release", {})
    refused = progress(shared, 0, me, code=409, verdicts=accepted(1, [0]), next={"window": 2, "rows": [3]})
    assert (refused["taken"], refused["is_alive"]) == (1, False)
    # Who takes over finds the row that was reported done, the others held, and row 3 untouched.
    batch = claim(shared)["batches"][0]
    assert batch["held"] == [1, 2]
    assert batch["due"] == [[3, 99]]
    # A report needs no lease, ever: late verdicts resolve the doubt.
    assert progress(shared, 0, me, verdicts=accepted(1, [1, 2]))["opened"] is None
    claim(shared, code=409, incarnation=me)


def test_a_deferred_row_waits_and_is_told_to_a_successor(shared: Client) -> None:
    me = claim(shared)["incarnation"]
    progress(shared, 0, me, next={"window": 1, "rows": [0, 1]})
    later = {"window": 1, "row": 0, "verdict": "deferred", "attempts": 2, "code": 451, "due_in_s": 600}
    progress(shared, 0, me, verdicts=[later, {"window": 1, "row": 1, "verdict": "untouched"}])
    shared.act(f"/campaigns/shared/machines/{me}/release", {})
    batch = claim(shared)["batches"][0]
    assert batch["due"] == [[1, 99]]
    (waiting,) = batch["waiting"]
    assert (waiting["row"], waiting["attempts"]) == (0, 2)
    assert 550 < waiting["due_in_s"] <= 600


@pytest.mark.long
def test_a_silent_worker_loses_its_batches_when_its_lease_ends(shared: Client) -> None:
    silent = claim(shared, lease_s=5, most=3)
    assert len(silent["batches"]) == 3
    assert claim(shared)["batches"] == []
    time.sleep(5.2)
    assert len(claim(shared, most=3)["batches"]) == 3
    progress(shared, 0, silent["incarnation"], code=409, next={"window": 1, "rows": [0]})


def test_what_is_no_batch_or_too_much_is_refused(shared: Client) -> None:
    me = claim(shared)["incarnation"]
    progress(shared, 0, me, code=422, next={"window": 1, "rows": [100]})
    progress(shared, 0, me, code=422, next={"window": 1, "rows": [0, 0]})
    progress(shared, 0, me, code=422, verdicts=accepted(9, [0]))
    progress(shared, 99, me, code=404)
    progress(shared, 1, me, code=409, next={"window": 1, "rows": [100]})  # not ours
    shared.act("/campaigns/shared/pause", {})
    assert "paused" in progress(shared, 0, me, code=409, next={"window": 3, "rows": [0]})["detail"]
    claim(shared, code=409)
    shared.act("/batches/claim", {"campaign": "none", "sender": "x"}, code=404)


@pytest.mark.long
def test_a_real_sender_tells_how_long_its_windows_took(shared: Client, tmp_path: Path) -> None:
    """`engine send` over the shared store, to the sink that needs no relay: what `/metrics` says afterwards."""
    sender = start(tmp_path / "site", "send", "--campaign", "shared", "--processes", "1", "--yes")
    said = sender.communicate(timeout=120)
    assert sender.returncode == 0, said
    told = shared.ask("/campaigns/shared")
    assert (told["accepted"], told["left"], told["state"]) == (300, 0, "finished")
    lines = dict(line.rsplit(" ", 1) for line in shared.get("/metrics").text.splitlines() if line[0] != "#")
    for name in ("rowpost_window_seconds", "rowpost_log_commit_seconds"):
        assert float(lines[f'{name}_count{{campaign="shared"}}']) > 0
        assert float(lines[f'{name}_bucket{{campaign="shared",le="+Inf"}}']) > 0
        assert float(lines[f'{name}_sum{{campaign="shared"}}']) > 0
    assert float(lines['rowpost_rows_left{campaign="shared"}']) == 0
