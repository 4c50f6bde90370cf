"""A worker in another language, in plain HTTP over a socket: from the claim to a campaign that is proved finished.

It knows nothing of the engine but the guide `api.md`: the rules there are its rules. It attempts nothing before the 200
that names its window.
"""

from __future__ import annotations

import http.client
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import require
from tests.control.postgres_server import PostgresServer, binaries
from tests.web.conftest import Running, make_campaign, run

pytestmark = [pytest.mark.postgres, pytest.mark.slow]
ROWS, GROUP = 300, 40


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Running]:
    """A web server over a campaign of three batches in a PostgreSQL of its own."""
    require("postgres", None if binaries() else "no PostgreSQL server binary here")
    postgres = PostgresServer()
    folder = tmp_path / "site" / "shared"
    make_campaign(folder, [f"user{i}@example.com" for i in range(ROWS)])
    settings = folder / "campaign.toml"
    settings.write_text(settings.read_text().replace("[list]\n", "[list]\nbatch_rows = 100\n"))
    (folder / "control.sqlite").unlink()
    run(folder.parent, "plan", "list.parquet", "--campaign", "shared", "--replace", "--control", postgres.url)
    try:
        with Running(folder.parent) as running:
            yield running
    finally:
        postgres.remove()


class Worker:
    """Claims, attempts, tells. `attempted` counts the rows that left."""

    def __init__(self, server: Running, name: str, attempted: Counter[int]) -> None:
        self._port, self._token, self.name, self.attempted = server.port, server.token, name, attempted
        self.me: str | None = None
        self._window = 0
        self.untold: list[dict[str, Any]] = []  # verdicts of the last window, when it was stopped
        self.asked: list[tuple[str, bytes]] = []

    def post(self, path: str, body: dict[str, Any], *, lose_the_answer: bool = False) -> tuple[int, Any]:
        raw = json.dumps(body).encode()
        self.asked.append((path, raw))
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=30)
        headers = {"Authorization": f"Bearer {self._token}", "Content-Type": "application/json"}
        connection.request("POST", f"/api/v1{path}", raw, headers)
        answer = connection.getresponse()
        told = json.load(answer)
        connection.close()
        return (0, None) if lose_the_answer else (answer.status, told)

    def claim(self) -> list[dict[str, Any]]:
        wanted = {"campaign": "shared", "sender": self.name}
        code, told = self.post("/batches/claim", wanted if self.me is None else {**wanted, "incarnation": self.me})
        assert code == 200, told
        self.me = told["incarnation"]
        return list(told["batches"])

    def tell(self, batch: int, verdicts: list[dict[str, Any]], rows: list[int], *, lose: bool = False) -> Any:
        """One call: verdicts of the last window, and the next rows. Attempts nothing: that comes after the 200."""
        body: dict[str, Any] = {"campaign": "shared", "incarnation": self.me, "verdicts": verdicts}
        if rows:
            self._window += 1
            body["next"] = {"window": self._window, "rows": rows}
        code, told = self.post(f"/batches/{batch}/progress", body, lose_the_answer=lose)
        while code == 0:  # no answer: the same again, and nothing of it is attempted meanwhile
            code, told = self.post(f"/batches/{batch}/progress", body)
            assert self.asked[-1] == self.asked[-2]
        return code, told

    def attempt(self, rows: list[int]) -> list[dict[str, Any]]:
        """To a server that takes all but each tenth, and wants each hundredth again later."""
        verdicts = []
        for row in rows:
            verdict = "deferred" if row % 100 == 50 and not self.attempted[row] else "accepted"
            verdict = "rejected" if row % 10 == 3 else verdict
            self.attempted[row] += 1
            verdicts.append({"window": self._window, "row": row, "verdict": verdict, "attempts": self.attempted[row]})
        return verdicts

    def work(self, batch: dict[str, Any], *, stop_after: int = 10**9, lose_one: bool = False) -> bool:
        """One batch; whether it is done. Stops (as if killed) after so many windows, with the last one open."""
        waiting = [row for first, last in batch["due"] for row in range(first, last + 1)]
        waiting += [one["row"] for one in batch["waiting"]]
        verdicts: list[dict[str, Any]] = []
        told: Any = {"is_done": False}
        while waiting or verdicts:
            rows, waiting = waiting[:GROUP], waiting[GROUP:]
            code, told = self.tell(batch["batch"], verdicts, rows, lose=lose_one and bool(rows))
            assert (code, told.get("opened")) == (200, self._window if rows else None), told
            verdicts = self.attempt(rows)
            waiting += [one["row"] for one in verdicts if one["verdict"] == "deferred"]
            stop_after -= 1
            if not stop_after:
                self.untold = verdicts
                return False
        return bool(told["is_done"])


def test_a_campaign_is_sent_by_workers_in_another_language(server: Running, tmp_path: Path) -> None:
    attempted: Counter[int] = Counter()
    first = Worker(server, "go-worker-1", attempted)
    assert first.work(first.claim()[0], lose_one=True)
    # The second batch: it is stopped with a window open, and its lease is ended by the operator.
    half = first.claim()[0]
    assert not first.work(half, stop_after=2)
    code, released = first.post(f"/campaigns/shared/machines/{first.me}/release", {})
    assert code == 200, released
    # It comes back late with the verdicts of its last window, and wants more: those count, these it may not attempt.
    last = [row for first_row, _ in half["due"] for row in range(first_row + GROUP, first_row + 2 * GROUP)]
    assert [one["row"] for one in first.untold] == last
    held, told_late = first.untold[:5], first.untold[5:]
    code, refused = first.tell(half["batch"], told_late, [half["due"][0][0] + 2 * GROUP])
    assert (code, refused["taken"], refused["is_alive"]) == (409, len(told_late), False)
    code, _ = first.post("/batches/claim", {"campaign": "shared", "sender": "go-worker-1", "incarnation": first.me})
    assert code == 409
    # Another takes over. What the first never told of is held: it may have been sent.
    second = Worker(server, "go-worker-2", attempted)
    done = []
    while batches := second.claim():
        for batch in batches:
            assert not {row for a, b in batch["due"] for row in range(a, b + 1)} & set(last)
            if batch["batch"] == half["batch"]:
                assert batch["held"] == [one["row"] for one in held]
                assert [(one["row"], one["attempts"]) for one in batch["waiting"]] == [(150, 1)]
            done.append(second.work(batch))
        if len(done) > 3:
            break
    # With doubt in it a batch is not done; the first tells of those too at last, which needs no lease.
    code, told = first.tell(half["batch"], held, [])
    assert (code, told["opened"]) == (200, None)
    code, told = second.tell(half["batch"], [], [])
    assert (code, told["is_done"]) == (200, True)
    # Each row left once, or a second time because a server said "later".
    assert set(attempted) == set(range(ROWS))
    assert {row for row, times in attempted.items() if times > 1} == {50, 150, 250}
    # The engine's own proof of it, of the store's reports alone: these workers have no logs here.
    run(tmp_path / "site", "merge-logs", "--campaign", "shared")
    summary = json.loads((tmp_path / "site" / "shared" / "report" / "summary.json").read_text())
    assert summary["adds_up"]
    outcomes = {name: count for name, count in summary["outcomes"].items() if count}
    assert outcomes == {"accepted": ROWS - ROWS // 10, "bounced": ROWS // 10}
    assert summary["duplicate_rows"] == 0
