"""`engine replies` and `engine budgets`, and a log replayed through other rules."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from engine.commands.budgets import UnknownProvider, budgets
from engine.commands.replies import NoLogs, replies
from engine.errors import EngineError
from engine.pace.rules import RuleError
from formats.sendlog import NAME_PROVIDER, Encoder, Header, Kind, Reason, Record, Verdict


def run(command, *arguments: str) -> str:  # type: ignore[no-untyped-def]
    return CliRunner().invoke(command, list(arguments), catch_exceptions=False).stdout


def log_with(path: Path, answers: list[tuple[Verdict, int, str]]) -> None:
    header = Header(
        log_id="l", campaign_id="c", plan_fingerprint="p", incarnation="i", sender="s", host_id="h", boot_id="b",
        worker=0, started_at_us=0,
    )  # fmt: skip
    encoder = Encoder(header)
    records: list[Record] = [(int(Kind.NAME), 0, 1, 0, 0, 0, NAME_PROVIDER, 0, 0, 0, 0, "tencent")]
    for row, (verdict, code, text) in enumerate(answers):
        reason = int(Reason.POLICY)
        records.append((int(Kind.RESULT), row + 1, row, 0, 1, int(verdict), reason, code, 1, 0, 0, text))
    path.write_bytes(encoder.batch(records) + encoder.end())


@pytest.fixture
def campaign(tmp_path: Path) -> Path:
    folder = tmp_path / "campaign"
    (folder / "logs").mkdir(parents=True)
    throttled = (Verdict.REJECTED, 550, "Ip frequency limited. http://service.mail.qq.com")
    gone = (Verdict.REJECTED, 550, "Mailbox not found. http://service.mail.qq.com")
    log_with(folder / "logs" / "a.arrows", [throttled] * 3 + [gone] * 2 + [(Verdict.ACCEPTED, 250, "ok")])
    return folder


def test_replay_shows_what_was_decided_otherwise_then(campaign: Path) -> None:
    lines = run(replies, "replay", "--campaign", str(campaign), "--json").splitlines()
    assert [msgspec.json.decode(line) for line in lines] == [
        {
            "replies": 3,
            "provider": "tencent",
            "then": "rejected",
            "now": "deferred/rate",
            "rule": "qq-frequency",
            "example": "550 Ip frequency limited. http://service.mail.qq.com",
        }
    ]


def test_replay_through_changed_rules_shows_what_would_differ(campaign: Path, tmp_path: Path) -> None:
    rules = tmp_path / "new.toml"
    rules.write_text(
        '[[rule]]\nname = "ours"\nclass = "mailbox_full"\nprovider = "tencent"\ntext = "not found"\n'
        'samples = ["rcpt 550 mailbox not found"]\n'
    )
    table = run(replies, "replay", "--campaign", str(campaign), "--rules", str(rules))
    assert "rejected/unknown_user+suppress" in table
    assert "rejected/mailbox_full" in table
    assert "frequency" not in table


def test_replay_without_logs_says_so(tmp_path: Path) -> None:
    with pytest.raises(NoLogs):
        run(replies, "replay", "--campaign", str(tmp_path))


def test_a_damaged_log_is_a_warning(campaign: Path) -> None:
    (campaign / "logs" / "b.arrows").write_bytes(b"junk")
    done = CliRunner().invoke(replies, ["replay", "--campaign", str(campaign)], catch_exceptions=False)
    assert "5 replies in 2 logs; 3 would have been judged differently" in done.stderr
    assert "warning: b.arrows" in done.stderr


def test_judge_explains_one_reply() -> None:
    said = msgspec.json.decode(run(replies, "judge", "--stage", "dot", "421 4.7.28 unusual rate gsmtp", "--json"))
    assert said["rule"] == "google-rate"
    assert said["action"] == {"pause_s": 600.0, "connections": 1, "slower": True}
    assert "verdict   rejected" in run(replies, "judge", "550", "5.1.1", "user", "unknown")


def test_check_runs_the_samples(tmp_path: Path) -> None:
    run(replies, "check", "--campaign", str(tmp_path))
    (tmp_path / "replies.toml").write_text(
        '[[rule]]\nname = "wide"\nclass = "rate"\nsamples = ["rcpt 450 x"]\nnot = ["rcpt 450 y"]\n'
    )
    with pytest.raises(RuleError, match="wide"):
        run(replies, "check", "--campaign", str(tmp_path))


def test_budgets_show_explains_by_domain(tmp_path: Path) -> None:
    (tmp_path / "budgets.toml").write_text("[provider.google]\nmessages_per_hour = 5000\n")
    shown = run(budgets, "show", "gmail.com", "--campaign", str(tmp_path))
    assert "provider google" in shown
    assert "budgets.toml [provider.google]" in shown
    assert "shipped [default]" in shown
    as_json = msgspec.json.decode(run(budgets, "show", "google", "--campaign", str(tmp_path), "--json"))
    assert {s["key"]: s["value"] for s in as_json["settings"]}["messages_per_hour"] == 5000
    assert "5,000" in run(budgets, "show", "--campaign", str(tmp_path))
    with pytest.raises(UnknownProvider):
        run(budgets, "show", "nobody.example", "--campaign", str(tmp_path))


def test_budgets_check_finds_dead_sections_and_unbindable_sources(tmp_path: Path) -> None:
    run(budgets, "check", "--campaign", str(tmp_path))
    path = tmp_path / "budgets.toml"
    path.write_text('[provider."gmail.com"]\nconnections = 1\n')
    with pytest.raises(EngineError, match=r"gmail\.com"):
        run(budgets, "check", "--campaign", str(tmp_path))
    path.write_text('[source.a]\nbind = "192.0.2.99"\n')
    with pytest.raises(EngineError, match="cannot send from"):
        run(budgets, "check", "--campaign", str(tmp_path))
    run(budgets, "check", "--campaign", str(tmp_path), "--no-bind")
