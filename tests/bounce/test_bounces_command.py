"""`engine bounces` as an operator and as an MTA's pipe use it."""

from __future__ import annotations

import json
import mailbox
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from sent_campaign import Sent

from engine.bounce.intake import AnotherIntake, intake_lock
from engine.commands.bounces import NoSources, NotEverythingRead, bounces
from engine.commands.unsubscribe import NotAnAddress, unsubscribe_server
from engine.lists.suppressions import Suppressions


def run(*arguments: str, stdin: bytes = b"") -> Result:
    result = CliRunner().invoke(bounces, list(arguments), input=stdin)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_reads_a_maildir_and_reports(sent: Sent, tmp_path: Path) -> None:
    box = mailbox.Maildir(tmp_path / "Maildir")
    for row in (1, 2):
        box.add(sent.bounce(row))
    box.add(b"From: zoe@elsewhere.example\nTo: news@example.com\nSubject: Re: hi\n\nHello there\n")
    told = run(str(tmp_path / "Maildir"), "--campaign", str(sent.folder))
    assert "3 messages: 2 delivery_report, 1 human; 2 suppressed, 1 unmatched" in told.output
    report = run("report", "--campaign", str(sent.folder))
    assert "2 rows bounced (2 hard)" in report.output
    assert "for people to look at" in report.output
    as_json = json.loads(run("report", "--campaign", str(sent.folder), "--json").output)
    assert (as_json["messages"], as_json["rows_hard"]) == (3, 2)


def test_sources_of_the_settings(sent: Sent) -> None:
    with (sent.folder / "campaign.toml").open("a") as file:
        file.write('\n[bounces]\nsources = ["returned"]\n')
    (sent.folder / "returned").mkdir()
    (sent.folder / "returned" / "1.eml").write_bytes(sent.bounce(1))
    told = run("--campaign", str(sent.folder), "--json")
    assert json.loads(told.output)["decisions"] == {"suppressed": 1}


def test_pipe_is_safe_at_once_and_read_by_the_next_run(sent: Sent) -> None:
    """Even while another intake reads: an MTA that waits for a lock would queue and bounce our bounces."""
    with intake_lock([sent.folder / "feedback"]):
        assert run("-", "--campaign", str(sent.folder), stdin=sent.bounce(1)).exit_code == 0
    assert len(list((sent.folder / "feedback" / "inbox").iterdir())) == 1
    run("--campaign", str(sent.folder))
    assert Suppressions(sent.folder / "suppression", list_id=None).check(["ben@example.org"])[0]


def test_errors_name_the_next_step(sent: Sent, tmp_path: Path) -> None:
    with pytest.raises(NoSources):
        run("--campaign", str(sent.folder))
    (tmp_path / "x.eml").write_bytes(sent.bounce(1))
    with pytest.raises(AnotherIntake), intake_lock([sent.folder / "feedback"]):
        run(str(tmp_path / "x.eml"), "--campaign", str(sent.folder))


def test_source_that_fails_is_told_and_the_exit_code_says_try_again(sent: Sent, tmp_path: Path) -> None:
    folder = tmp_path / "Maildir"
    mailbox.Maildir(folder)
    with (sent.folder / "campaign.toml").open("a") as file:
        file.write(
            f'\n[bounces]\nsources = ["{folder}"]\n'
            '[[bounces.imap]]\nurl = "imap://u@127.0.0.1:9"\ntls = "off"\npassword_file = "password"\n'
        )
    (sent.folder / "password").write_text("secret\n")
    pytest.importorskip("imapclient")
    with pytest.raises(NotEverythingRead) as raised:
        run("--campaign", str(sent.folder))
    assert raised.value.exit_code == 75


def test_help_has_examples() -> None:
    assert "engine bounces ~/Maildir" in run("--help").output


def test_server_wants_host_and_port(sent: Sent) -> None:
    result = CliRunner().invoke(unsubscribe_server, ["--campaign", str(sent.folder), "--listen", "8025"])
    assert isinstance(result.exception, NotAnAddress)
