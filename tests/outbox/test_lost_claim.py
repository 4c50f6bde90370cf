"""A claim that was committed and never answered: its rows are held by a server that lives and does not know of them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from engine.control.outbox import Mail, Report, Server, State
from engine.outbox import connect
from engine.work.outbox import OutboxWorker


def test_its_rows_are_given_back_and_what_the_server_knows_of_stays(tmp_path: Path) -> None:
    box = connect(str(tmp_path / "outbox.sqlite"))
    box.enqueue([Mail(address=f"u{n}@example.com", template="welcome") for n in range(5)])
    box.join(Server("me", "serve", "here", "host", "boot", 1, "alive", 0, box.now_us(), 60_000_000))
    box.claim("me", "known", 3, 3)
    box.intend([(3, "known")])
    box.claim("me", "lost", 3, 2)  # of this one the answer never came

    async def speak(words: Any) -> Any:
        return words()

    worker = SimpleNamespace(
        _speak=speak,
        _outbox=box,
        _me=SimpleNamespace(id="me"),
        _queue=SimpleNamespace(seats={1: None}),
        _reports=[Report(id=2, token="known", state=State.SUPPRESSED)],
        _claim_unsure=True,
    )
    asyncio.run(OutboxWorker._take_stock(cast(OutboxWorker, worker)))
    assert not worker._claim_unsure
    assert [row.state for row in box.rows(None, 0, 9)] == ["sending", "sending", "sending", "queued", "queued"]
    assert box.intend([(4, "lost"), (5, "lost"), (1, "known")]) == {1}
    assert [one.id for one in box.claim("me", "next", 3, 9)] == [4, 5]
    box.close()
