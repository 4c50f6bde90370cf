"""The walk of the guide: a campaign through Postfix, what comes back into Dovecot, read over IMAP, and the next list.

Postfix relays to a sink that refuses some recipients, so that the reports are Postfix's own. The holiday reply and the
complaint are answers to messages that arrived.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import polars as pl
import pytest
from private_dovecot import PASSWORD, PrivateDovecot

from tests.conftest import require
from tests.peers.postfix import Postfix, missing_postfix, running_postfix

pytestmark = [pytest.mark.dovecot, pytest.mark.postfix]

ROOT = Path(__file__).parents[2]
PEOPLE = ["ann@example.org", "ben@example.org", "cleo@example.org", "550+gone@example.org", "552+full@example.org"]


def engine(*arguments: str, folder: Path) -> str:
    """The output of a command; the test fails where it fails."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "BOUNCES_PASSWORD": PASSWORD}
    done = subprocess.run(
        [sys.executable, "-m", "engine", *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode in (0, 3, 4), (
        f"engine {' '.join(arguments)}: {done.returncode}\n{done.stdout}\n{done.stderr}"
    )
    return done.stdout + done.stderr


@pytest.fixture
def dovecot() -> Iterator[PrivateDovecot]:
    pytest.importorskip("imapclient")
    require("postfix", missing_postfix())
    with tempfile.TemporaryDirectory(prefix="dc") as folder:
        server = PrivateDovecot(Path(folder))
        yield server
        server.stop()


@pytest.fixture
def sink(tmp_path: Path) -> Iterator[tuple[int, Path]]:
    kept = tmp_path / "arrived"
    command = [sys.executable, "-m", "engine", "sink", "--port", "0", "--folder", str(kept)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    port = int(process.stdout.readline().rpartition(":")[2])
    yield port, kept
    process.terminate()
    process.wait(10)
    process.stdout.close()


@pytest.fixture
def postfix(dovecot: PrivateDovecot, sink: tuple[int, Path], tmp_path: Path) -> Iterator[Postfix]:
    with running_postfix(
        {
            "virtual_mailbox_domains": "bounces.example.com",
            "virtual_mailbox_base": str(dovecot.folder),
            "virtual_mailbox_maps": "static:Maildir/",
            "smtpd_recipient_restrictions": "permit_mynetworks, reject",
            "relayhost": f"[127.0.0.1]:{sink[0]}",
            "smtp_tls_security_level": "none",
            "disable_dns_lookups": "yes",
            "minimal_backoff_time": "1s",
        }
    ) as running:
        yield running


def wait_for(what: str, condition: object, postfix: Postfix) -> None:
    end = time.monotonic() + 20
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < end, f"{what} did not happen\n{postfix.log[-3000:]}"
        time.sleep(0.1)


@pytest.mark.slow
def test_next_campaign_leaves_the_right_people_out(
    dovecot: PrivateDovecot, sink: tuple[int, Path], postfix: Postfix, tmp_path: Path
) -> None:
    campaign = tmp_path / "weekly"
    pl.DataFrame({"email": PEOPLE, "first_name": [address[:3] for address in PEOPLE]}).write_parquet(
        tmp_path / "people.parquet"
    )
    engine("init", "--campaign", str(campaign), folder=tmp_path)
    settings = (campaign / "campaign.toml").read_text()
    settings = settings.replace('relay = "sink://"', f'relay = "smtp://127.0.0.1:{postfix.port}"')
    (campaign / "templates" / "letter.txt").write_text("Dear {{ first_name }}\n")
    settings = re.sub(r"(?m)^(?:html|preheader) = .*\n", "", settings)
    settings = settings.replace("[message]\n", '[message]\nreturn_path_domain = "bounces.example.com"\n')
    settings += f'\n[[bounces.imap]]\nurl = "{dovecot.url}"\ntls = "off"\npassword_env = "BOUNCES_PASSWORD"\n'
    (campaign / "campaign.toml").write_text(settings)
    engine("prepare", "people.parquet", "-o", "list.parquet", folder=tmp_path)
    engine("plan", "list.parquet", "--campaign", str(campaign), folder=tmp_path)
    engine("send", "--campaign", str(campaign), folder=tmp_path)

    def returned() -> int:
        new = dovecot.maildir / "new"
        return len(os.listdir(new)) if new.exists() else 0

    wait_for("two reports come back", lambda: returned() >= 2, postfix)
    wait_for("three messages arrive", lambda: len(list(sink[1].rglob("*.eml"))) >= 3, postfix)
    arrived = {
        match[1]: raw
        for raw in (path.read_bytes() for path in sink[1].rglob("*.eml"))
        if (match := re.search(rb"^To: .*?([a-z]+)@example\.org", raw, re.M))
    }
    holiday = (
        b"Return-Path: <>\nFrom: Ben <ben@example.org>\nTo: news@example.com\nAuto-Submitted: auto-replied\n"
        b"Subject: Out of office: your letter\n\nI am on holiday.\n"
    )
    complaint = (
        b"From: fbl@provider.example\nTo: fbl@example.com\nSubject: complaint\n"
        b'Content-Type: multipart/report; boundary="=_c"\n\n'
        b"--=_c\nContent-Type: message/feedback-report\n\nFeedback-Type: abuse\nVersion: 1\n\n"
        b"--=_c\nContent-Type: message/rfc822\n\n" + arrived[b"cleo"] + b"\n--=_c--\n"
    )
    dovecot.deliver(holiday, complaint)
    told = engine("bounces", "--campaign", str(campaign), folder=tmp_path)
    assert "4 messages: 1 auto_reply, 1 complaint, 2 delivery_report" in told
    assert "2 suppressed" in told
    assert "1 counted" in told
    assert "nothing new" in engine("bounces", "--campaign", str(campaign), folder=tmp_path)

    engine(
        "prepare", "people.parquet", "-o", "next.parquet", "--suppress", str(campaign / "suppression"), folder=tmp_path
    )
    following = sorted(pl.read_parquet(tmp_path / "next.parquet")["email"].to_list())
    assert following == ["552+full@example.org", "ann@example.org", "ben@example.org"]
