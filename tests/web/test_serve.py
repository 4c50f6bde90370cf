"""The command: what it prints, what it refuses, and that its death touches no campaign."""

from __future__ import annotations

import signal
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner

from engine.campaign import Campaign
from engine.commands.serve import OpenToOthers, serve
from engine.outbox import open_outbox
from tests.web.conftest import Sender, client_of, counters, run, start


@contextmanager
def serving(campaign: Campaign) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`engine serve` as a process, and where it listens."""
    process = start(campaign.folder.parent, "serve", campaign.folder.name, "--listen", "127.0.0.1:0")
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        yield process, process.stdout.readline().strip()
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(10)
        process.stdout.close()
        process.stderr.close()


@pytest.mark.slow
def test_it_prints_where_it_is_and_ends_when_asked(campaign: Campaign) -> None:
    with serving(campaign) as (process, url):
        token = (campaign.run / "web.token").read_text().split()[1]
        asked = urllib.request.Request(f"{url}api/v1/campaigns/weekly", headers={"Authorization": f"Bearer {token}"})
        with urllib.request.urlopen(asked, timeout=10) as answer:
            assert answer.status == 200
            assert "server" not in answer.headers
        # Unsubscribing is mounted for the planned campaign: a token that is none gets its page.
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"{url}u/nonsense", timeout=10)
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) in (0, -signal.SIGTERM)


@pytest.mark.slow
def test_a_server_that_dies_touches_no_campaign(campaign: Campaign) -> None:
    sender = Sender(campaign)
    with serving(campaign) as (process, url):
        urllib.request.urlopen(f"{url}healthz", timeout=10).close()
        sender.tell(counters(1000))
        process.kill()
        process.wait(10)
    assert sender.tell(counters(1000, accepted=1))
    assert sender.store.campaign().state == "ready"  # type: ignore[union-attr]
    sender.close()


def test_others_are_let_in_by_tls_or_behind_a_proxy_only(campaign: Campaign) -> None:
    told = CliRunner().invoke(serve, [str(campaign.folder), "--listen", "0.0.0.0:0"])
    assert isinstance(told.exception, OpenToOthers)


def test_the_outbox_takes_mails_once(campaign: Campaign) -> None:
    root = campaign.folder.parent
    with open_outbox(root / "outbox.sqlite"), client_of(root, outbox=str(root / "outbox.sqlite")) as client:
        mail = {"address": "ann@example.com", "subject": "Welcome", "text": "Hello", "idempotency_key": "k"}
        first = client.act("/outbox", {"mails": [mail]}, code=201)["mails"]
        again = client.act("/outbox", {"mails": [mail]}, code=201)["mails"]
        assert (first[0]["is_new"], again[0]["is_new"]) == (True, False)
        assert first[0]["id"] == again[0]["id"]
        # Neither a template nor a subject: all are refused.
        unfit = {"address": "b@example.com"}
        refused = client.act("/outbox", {"mails": [{**mail, "idempotency_key": "l"}, unfit]}, code=422)
        assert "template" in refused["detail"]
    with open_outbox(root / "outbox.sqlite") as outbox:
        assert sum(count.rows for count in outbox.tally()) == 1


def test_without_an_outbox_it_says_how_to_name_one(campaign: Campaign) -> None:
    with client_of(campaign.folder.parent) as client:
        mail = {"address": "ann@example.com", "subject": "s", "text": "t"}
        assert "--outbox" in client.act("/outbox", {"mails": [mail]}, code=409)["hint"]


def test_the_help_has_an_example(tmp_path: Path) -> None:
    assert "engine serve" in run(tmp_path, "serve", "--help")
