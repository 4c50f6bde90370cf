"""While the newsletter uses every connection and every message a second, a sign-up mail goes out at once."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from engine.control.outbox import Mail
from engine.rehearse.record import read_record

if TYPE_CHECKING:
    from tests.outbox.conftest import PostOffice


def newsletter(office: PostOffice, folder: Path, rows: int, *, connections: int, per_second: float | None) -> Path:
    """A planned campaign through the outbox's relay, which serves the outbox beside it."""
    campaign = folder / "newsletter"
    office.run("init", "--campaign", str(campaign))
    file = campaign / "campaign.toml"
    text = file.read_text()
    text = text.replace('relay = "sink://"', f'relay = "smtp://{office.sink.host}:{office.sink.port}"')
    rate = f"messages_per_second = {per_second}\n" if per_second is not None else ""
    text = text.replace("connections = 10 ", f"{rate}connections = {connections} ")
    text = re.sub(r"(?m)^plan = .*", 'plan = ["0.3s", "0.5s"]', text)  # letters beside it are tried again by it, too
    text += '\n[outbox]\nfolder = "../outbox"\n'
    file.write_text(text)
    for kind in ("txt", "html"):
        (campaign / "templates" / f"letter.{kind}").write_text("Hello {{ first_name }}!\n")
    table = pa.table(
        {
            "id": pa.array(range(rows), pa.int64()),
            "email": [f"reader{n}@example.com" for n in range(rows)],
            "first_name": ["R"] * rows,
        }
    )
    pq.write_table(table, campaign / "list.parquet")
    office.run("plan", str(campaign / "list.parquet"), "--campaign", str(campaign))
    return campaign


def signups(office: PostOffice, count: int, priority: int = 1, *, every_s: float = 0.0) -> None:
    for n in range(count):
        office.box.enqueue(
            [
                Mail(
                    address=f"signup{n}@example.com",
                    priority=priority,
                    template="welcome",
                    fields={"name": "A", "confirm_url": ""},
                )
            ]
        )
        time.sleep(every_s)


def waits(office: PostOffice) -> list[float]:
    """Seconds from the INSERT to the moment the sink had the mail, by sign-up."""
    assert office.sink.record is not None
    record = read_record(office.sink.record)
    taken = dict(zip(record["recipient"].to_pylist(), record["time_us"].to_pylist(), strict=True))
    return sorted((taken[row.address] - row.created_at_us) / 1e6 for row in office.box.rows("accepted", 0, 10_000))


@pytest.mark.slow
def test_sign_ups_overtake_a_newsletter_that_saturates_its_rate(office: PostOffice, tmp_path: Path) -> None:
    campaign = newsletter(office, tmp_path, 2000, connections=2, per_second=40)
    sender = office.send(campaign)
    office.until_said("outbox_served")
    office.until_taken(60)
    signups(office, 15, every_s=0.1)
    office.until(accepted=15)
    assert waits(office)[-1] < 2.0
    assert sender.poll() is None
    office.stop(sender)
    assert office.received().twice == ()


@pytest.mark.slow
def test_sign_ups_get_a_connection_though_the_newsletter_holds_them_all(office: PostOffice, tmp_path: Path) -> None:
    campaign = newsletter(office, tmp_path, 20_000, connections=3, per_second=None)
    sender = office.send(campaign)
    office.until_said("outbox_served")
    office.until_taken(200)
    signups(office, 10, every_s=0.05)
    office.until(accepted=10)
    assert waits(office)[-1] < 2.0
    office.stop(sender)
    assert office.sink.counts().peak_open <= 3


@pytest.mark.long
def test_one_connection_is_shared(office: PostOffice, tmp_path: Path) -> None:
    campaign = newsletter(office, tmp_path, 20_000, connections=1, per_second=None)
    sender = office.send(campaign)
    office.until_taken(100)
    signups(office, 5)
    office.until(accepted=5)
    assert waits(office)[-1] < 3.0
    before = office.sink.counts().messages
    office.until_taken(before + 100)
    office.stop(sender)
    assert office.sink.counts().peak_open == 1


@pytest.mark.long
def test_a_server_of_its_own_stands_by_while_a_campaign_serves_the_outbox(office: PostOffice, tmp_path: Path) -> None:
    office.serve_and_join()
    campaign = newsletter(office, tmp_path, 300, connections=2, per_second=60)
    sender = office.send(campaign)
    office.until_said("standing_by")
    signups(office, 3)
    office.until(accepted=3)
    assert sender.wait(timeout=30) == 0
    office.until_said("serving\n")
    signups(office, 3, priority=2)
    office.until(accepted=6)


@pytest.mark.long
def test_a_killed_outbox_process_is_started_again_and_the_campaign_goes_on(office: PostOffice, tmp_path: Path) -> None:
    campaign = newsletter(office, tmp_path, 400, connections=2, per_second=60)
    sender = office.send(campaign)
    office.until_said("outbox_served")
    (server,) = (server for server in office.box.servers() if server.state == "alive")
    office.kill_pid(server.pid)
    signups(office, 3)
    office.until(accepted=3)
    assert sender.wait(timeout=30) == 0
    assert office.received().twice == ()
    assert office.received().recipients == 403
