"""What the report folder holds, read back as its readers will."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import msgspec
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner, Result
from conftest import T0, LogWriter, make_plan, write_list

from engine.campaign import fingerprint
from engine.cli import engine
from engine.errors import Exit
from engine.results import charts
from engine.results.feedback import Came, Feedback, Return
from engine.results.merge import merge
from engine.results.page import render_page
from engine.results.report import NoReport, read_summary, redraw, write_report
from engine.results.summary import Summary
from formats import outcomes
from formats import plan as plans
from formats.feedbacklog import FeedbackRecord, feedback_encoder
from formats.outcomes import OutcomesError, open_outcomes
from formats.plan import ListFile, Plan
from formats.sendlog import Reason, Verdict
from formats.suppression import SCHEMA as SUPPRESSION

SCRIPT = "<script>alert('x')</script>"
GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture(autouse=True)
def without_charts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes a second; only the stories about pictures pay it."""
    if "pictures" not in request.fixturenames:
        monkeypatch.setattr(charts, "available", lambda: False)


@pytest.fixture
def pictures() -> None:
    """The charts are drawn."""


def a_log(log_id: str = "a", plan: str = "plan-1") -> LogWriter:
    log = LogWriter(log_id, plan=plan)
    for row in range(20):
        match row:
            case 3:
                log.attempt(row, Verdict.REJECTED, reason=Reason.RECIPIENT, code=550, text="5.1.1 no such user")
            case 4:
                log.attempt(row, Verdict.REJECTED, reason=Reason.POLICY, code=554, text=f"5.7.1 {SCRIPT}")
            case 5:
                log.attempt(row, Verdict.DEFERRED, code=451, text="4.7.0 later")
            case 6:
                log.intent(row)
            case 7:
                log.result(0, row, Verdict.INVALID, attempt=0, reason=Reason.ADDRESS, text="no @", provider=None)
            case 8:
                log.attempt(row, Verdict.DEFERRED, code=451, text="later, without a status")
                log.accepted(row, attempt=2, provider=f"odd {SCRIPT}")
            case 19:
                pass
            case _:
                log.accepted(row)
    return log


def write(folder: Path, plan: Plan, log: LogWriter, **options: object) -> Summary:
    with merge(plan, [log.write(folder / "logs")], **options) as merged:  # type: ignore[arg-type]
        return write_report(merged, plan, None, folder / "report", merged_at_us=T0)


def two_files(folder: Path) -> list[ListFile]:
    """Rows 0..19 in two files, the groups of which do not end where spans do."""
    first = write_list(folder, 12, group=5, name="a.parquet")
    table = pq.read_table(first.path)
    shifted = table.set_column(1, "email", pa.array([f"v{n}@other.test" for n in range(8)] + [None] * 4))
    pq.write_table(shifted.slice(0, 8), folder / "b.parquet", row_group_size=3)
    return [first, ListFile(str(folder / "b.parquet"), 8, [3, 3, 2], "f")]


def test_each_row_stands_once_with_its_last_word(tmp_path: Path) -> None:
    plan = make_plan(20, files=two_files(tmp_path))
    summary = write(tmp_path, plan, a_log())
    header, _ = open_outcomes(tmp_path / "report" / "recipients.parquet")
    assert (header.rows, header.campaign_id) == (20, "c1")
    table = pl.read_parquet(tmp_path / "report" / "recipients.parquet")
    assert table["row"].to_list() == list(range(20))
    assert table["address"].to_list()[:2] == ["u0@big.test", "u1@Big.Test"]
    assert table["address"].to_list()[12:14] == ["v0@other.test", "v1@other.test"]
    assert table["id"].to_list()[11:13] == [1011, 1000]
    by_row = {line["row"]: line for line in table.to_dicts()}
    assert (by_row[3]["outcome"], by_row[3]["reason"], by_row[3]["code"]) == ("bounced", "recipient", 550)
    assert (by_row[3]["enhanced_status"], by_row[3]["last_reply"]) == ("5.1.1", "5.1.1 no such user")
    assert by_row[8]["attempts"] == 2
    assert by_row[8]["provider"] == f"odd {SCRIPT}"
    assert by_row[8]["first_at"] < by_row[8]["last_at"]
    assert (by_row[6]["outcome"], by_row[6]["last_reply"], by_row[6]["machine"]) == ("in_doubt", None, "host-a")
    assert (by_row[7]["first_at"], by_row[7]["attempts"]) == (None, 0)
    assert (by_row[19]["outcome"], by_row[19]["reason"], by_row[19]["machine"]) == ("unsent", "not_reached", None)
    assert summary.outcomes == {
        "accepted": 14,
        "bounced": 2,
        "deferred": 0,
        "in_doubt": 1,
        "suppressed": 0,
        "invalid": 1,
        "unsent": 2,
    }
    told = json.loads((tmp_path / "report" / "summary.json").read_bytes())
    assert (told["rows"], told["outcomes"]) == (20, summary.outcomes)
    assert [line.name for line in summary.domains] == ["big.test", "other.test", "small.test"]


def test_rows_not_accepted_are_a_list_again(tmp_path: Path) -> None:
    write(tmp_path, make_plan(20, files=[write_list(tmp_path, 20)]), a_log())
    table = pl.read_parquet(tmp_path / "report" / "undeliverable.parquet")
    assert table["name"].to_list() == [f"User {row}" for row in (3, 4, 5, 6, 7, 19)]
    assert table.columns == ["id", "email", "name", "last_outcome", "last_reason", "last_code", "last_reply"]
    # Planned again, those columns are the list's own; the next report replaces them.
    again = make_plan(6, files=[ListFile(str(tmp_path / "report" / "undeliverable.parquet"), 6, [6], "f")])
    (tmp_path / "second").mkdir()
    write(tmp_path / "second", again, LogWriter("b"))
    second = pl.read_parquet(tmp_path / "second" / "report" / "undeliverable.parquet")
    assert second.columns == table.columns
    assert second["last_outcome"].to_list() == ["unsent"] * 6


def test_only_hard_bounces_reach_the_suppression_list(tmp_path: Path) -> None:
    came = [
        Return(0, T0, Came.BOUNCE, "recipient", hard=True, text="5.1.1 gone"),
        Return(1, T0, Came.BOUNCE, "recipient", hard=False, text="5.2.2 mailbox full"),
        Return(2, T0, Came.BOUNCE, "policy", hard=False),
        Return(6, T0, Came.ARRIVED),
        Return(5, T0, Came.BOUNCE, "recipient", hard=True),
        Return(9, T0, Came.COMPLAINT),
    ]
    plan = make_plan(20, files=[write_list(tmp_path, 20)])
    summary = write(tmp_path, plan, a_log(), feedback=Feedback(came))
    suppress = pq.read_table(tmp_path / "report" / "suppress.parquet")
    assert suppress.schema.equals(SUPPRESSION)
    assert suppress.column("address").to_pylist() == ["u0@big.test", "u3@big.test"]
    table = pl.read_parquet(tmp_path / "report" / "recipients.parquet")
    said = [f"{o}/{r}" for o, r in table.select("outcome", "reason").rows()]
    assert said[0:3] == ["bounced/recipient", "bounced/recipient", "bounced/policy"]
    assert said[6] == "accepted/None", "a report that it arrived resolves doubt"
    assert said[5] == "unsent/waiting", "a bounce does not touch a row that was never accepted"
    assert table["last_reply"][1] == "5.2.2 mailbox full"
    assert table["bounced_at"].is_null().to_list()[:4] == [False, False, False, True]
    assert summary.came_back == {"bounce": 4, "arrived": 1, "complaint": 1, "unsubscribe": 0}


def test_a_list_that_is_gone_or_changed_costs_names_not_the_proof(tmp_path: Path) -> None:
    files = two_files(tmp_path)
    Path(files[1].path).write_bytes(b"PAR1 truncated")
    summary = write(tmp_path, make_plan(20, files=files), a_log())
    assert sum(summary.outcomes.values()) == 20
    assert "b.parquet" in summary.list_problems[0]
    table = pl.read_parquet(tmp_path / "report" / "recipients.parquet")
    assert table["address"].null_count() == 8
    Path(files[0].path).unlink()
    assert write(tmp_path, make_plan(20, files=files), a_log()).outcomes == summary.outcomes


def test_a_campaign_without_rows_has_a_report(tmp_path: Path) -> None:
    summary = write(tmp_path, make_plan(0, files=[write_list(tmp_path, 0)]), LogWriter("a"))
    assert (summary.rows, summary.exit_code) == (0, 0)
    assert pq.read_table(tmp_path / "report" / "recipients.parquet").num_rows == 0
    assert pq.read_table(tmp_path / "report" / "undeliverable.parquet").num_rows == 0


def test_without_the_shared_store_no_list_of_unsent_rows_is_written(tmp_path: Path) -> None:
    plan = msgspec.structs.replace(make_plan(20, files=[write_list(tmp_path, 20)]), store="postgresql")
    summary = write(tmp_path, plan, a_log())
    assert summary.store_missing
    assert summary.exit_code == Exit.LOG_DAMAGED
    assert not (tmp_path / "report" / "undeliverable.parquet").exists()
    assert not write(tmp_path, plan, a_log(), reports=[]).store_missing


@pytest.mark.usefixtures("pictures")
def test_script_in_a_reply_a_provider_or_a_name_is_text(tmp_path: Path) -> None:
    plan = msgspec.structs.replace(make_plan(20, files=[write_list(tmp_path, 20)]), campaign_id=f"spring {SCRIPT}")
    log = a_log()
    log.header = msgspec.structs.replace(log.header, campaign_id=plan.campaign_id, sender=SCRIPT)
    log.event(f"throttle eased {SCRIPT} connections=4")
    write(tmp_path, plan, log)
    page = (tmp_path / "report" / "index.html").read_text()
    assert "<script" not in page.lower()
    assert "&lt;script&gt;alert" in page
    assert "http://" not in page.replace("http://www.w3.org/", ""), "the page asks no network"
    assert "https://" not in page
    assert page.count("<svg") == 2 * page.count("<figure>") > 0


@pytest.mark.usefixtures("pictures")
def test_without_charts_the_page_has_tables_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(charts, "available", lambda: False)
    write(tmp_path, make_plan(20, files=[write_list(tmp_path, 20)]), a_log())
    page = (tmp_path / "report" / "index.html").read_text()
    assert "<svg" not in page
    assert "rowpost[charts]" in page
    assert "<table" in page
    monkeypatch.undo()
    assert "<svg" in redraw(tmp_path / "report").read_text()


def test_a_clock_that_was_thousands_of_years_ahead_costs_nothing_but_its_times(tmp_path: Path) -> None:
    log = a_log()
    log.at = 1 << 62
    log.accepted(19)
    log.event("eased connections=2")
    summary = write(tmp_path, make_plan(20, files=[write_list(tmp_path, 20)]), log)
    assert summary.outcomes["accepted"] == 15
    assert summary.last_at_us is not None
    assert summary.last_at_us > 1 << 62
    assert summary.timeline.start_us < T0 + 60_000_000
    page = (tmp_path / "report" / "index.html").read_text()
    assert f"{summary.last_at_us} µs" in page


@pytest.mark.long
def test_a_page_of_a_hundred_million_is_small() -> None:
    import numpy as np

    from benchmarks.report import a_large_campaign

    page = render_page(a_large_campaign(np.random.default_rng(1)))
    assert len(page.encode()) < 200_000, "without its pictures, which are a sixth of the 2 MB of the goal"
    assert "<script" not in page


def test_an_older_report_stays_until_the_new_one_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_plan(20, files=[write_list(tmp_path, 20)])
    write(tmp_path, plan, a_log())
    before = (tmp_path / "report" / "summary.json").read_bytes()
    monkeypatch.setattr("engine.results.report.render_page", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write(tmp_path, plan, LogWriter("b"))
    assert (tmp_path / "report" / "summary.json").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_files_are_private(tmp_path: Path) -> None:
    write(tmp_path, make_plan(20, files=[write_list(tmp_path, 20)]), a_log())
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "report").iterdir()} == {0o600}
    assert (tmp_path / "report").stat().st_mode & 0o777 == 0o700


def test_no_report_yet_is_said(tmp_path: Path) -> None:
    with pytest.raises(NoReport, match="no report"):
        read_summary(tmp_path)


def test_the_golden_outcomes_of_format_1_are_read() -> None:
    header, file = open_outcomes(GOLDEN / "outcomes-1.parquet")
    assert header == outcomes.Header(campaign_id="c1", rows=20, list_fingerprint="l", merged_at_us=T0)
    table = pl.DataFrame(file.read())
    assert table.height == 20
    assert table.row(3, named=True)["enhanced_status"] == "5.1.1"


def test_outcomes_of_another_format_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    header = outcomes.Header(format=2, campaign_id="c", rows=0, list_fingerprint="", merged_at_us=0)
    pq.write_table(outcomes.schema(header).empty_table(), path)
    with pytest.raises(OutcomesError, match="format 2"):
        open_outcomes(path)
    pq.write_table(pa.table({"a": [1]}), path)
    with pytest.raises(OutcomesError, match="not of outcomes"):
        open_outcomes(path)


# -- the commands -----------------------------------------------------------------------------------------------------


@pytest.fixture
def campaign(tmp_path: Path) -> Path:
    """A campaign folder as `plan` and `send` leave it, with feedback."""
    folder = tmp_path / "campaign"
    raw = plans.encode(make_plan(20, files=[write_list(folder, 20)]))
    (folder / "plan.json").write_bytes(raw)
    (folder / "campaign.toml").write_text(
        '[campaign]\nid = "c1"\n[message]\nfrom_address = "news@example.org"\nsubject = "Hello"\n'
    )
    log = a_log(plan=fingerprint(raw))
    log.write(folder / "logs")
    encoder = feedback_encoder(msgspec.structs.replace(log.header, log_id="f"))
    records = [
        FeedbackRecord("m1", T0, "complaint", "c1", 9, address="u9@big.test"),
        FeedbackRecord("m2", T0, "unsubscribe", "c1", 10, address="u10@big.test"),
        FeedbackRecord("m3", T0, "delivery_report", "c1", 0, verdict=2, reason=1, hard=True, text="5.1.1 gone"),
        FeedbackRecord("m3", T0, "delivery_report", "c1", 0, verdict=2, reason=1, hard=True, text="5.1.1 gone"),
        FeedbackRecord("m4", T0, "delivery_report", "c1", 1, verdict=2, reason=1, hard=False, text="5.2.2 full"),
        FeedbackRecord("m5", T0, "delivery_report", "other", 2, verdict=2, reason=1, hard=True),
        FeedbackRecord("m6", T0, "delivery_report", "c1", 11, is_test=True, verdict=2, reason=1, hard=True),
    ]
    (folder / "feedback").mkdir()
    (folder / "feedback" / "f.arrows").write_bytes(encoder.batch(records) + encoder.end())
    return folder


def run(*words: object) -> Result:
    return CliRunner().invoke(engine, [str(word) for word in words])


def test_merge_logs_prints_the_table_and_exits_with_the_worst(campaign: Path) -> None:
    ran = run("merge-logs", "--campaign", campaign)
    assert ran.exit_code == Exit.IN_DOUBT
    lines = ran.stdout.splitlines()
    assert lines[0].split() == [
        "domain",
        "rows",
        "sent",
        "bounced",
        "deferred",
        "in",
        "doubt",
        "suppressed",
        "invalid",
        "unsent",
    ]
    assert lines[-1].split() == ["total", "20", "12", "4", "0", "1", "0", "1", "2"]
    assert "engine doubt list" in ran.stderr
    assert "2 rows are unsent (1 of them wait" in ran.stderr
    shown = run("report", "--campaign", campaign)
    assert (shown.exit_code, shown.stdout) == (0, ran.stdout)
    assert json.loads(run("report", "--campaign", campaign, "--json").stdout)["outcomes"]["bounced"] == 4


def test_logs_of_other_machines_are_named_by_folder(campaign: Path, tmp_path: Path) -> None:
    other = tmp_path / "machine-2"
    (other / "logs").mkdir(parents=True)
    late = LogWriter("late", plan=fingerprint((campaign / "plan.json").read_bytes()), sender="host-b")
    late.accepted(19)
    late.write(other / "logs")
    stray = LogWriter("stray", campaign="another")
    stray.accepted(0)
    stray.write(other / "logs")
    ran = run("merge-logs", other, "--campaign", campaign, "--json")
    assert ran.exit_code == Exit.LOG_DAMAGED
    assert json.loads(ran.stdout)["outcomes"]["accepted"] == 13
    assert "stray.arrows: is a log of campaign 'another'" in ran.stderr
    refused = run("merge-logs", tmp_path / "nowhere", "--campaign", campaign)
    assert isinstance(refused.exception, Exception)
    assert "no folder" in str(refused.exception)


def test_the_retry_list_has_the_lists_own_columns(campaign: Path) -> None:
    run("merge-logs", "--campaign", campaign)
    out = campaign / "next.parquet"
    assert run("retry-list", "--campaign", campaign, "--out", out).stdout == f"2 rows in {out}\n"
    table = pl.read_parquet(out)
    assert table.columns == ["id", "email", "name"]
    assert table["id"].to_list() == [1005, 1019]
    run("retry-list", "--campaign", campaign, "--out", out, "--select", "bounced/policy")
    assert pl.read_parquet(out)["id"].to_list() == [1004]
    assert "is no outcome" in str(
        run("retry-list", "--campaign", campaign, "--out", out, "--select", "accepted").exception
    )


def users(path: Path) -> list[tuple[int, int, str | None]]:
    connection = sqlite3.connect(path)
    found = connection.execute("select id, daily_newsletter, why from users where daily_newsletter <> 1 order by id")
    rows = found.fetchall()
    connection.close()
    return rows


@pytest.fixture
def database(tmp_path: Path) -> Path:
    path = tmp_path / "users.db"
    connection = sqlite3.connect(path)
    connection.execute("create table users (id integer, email text, daily_newsletter integer, why text)")
    people = [(1000 + n, f"u{n}@{['big.test', 'Big.Test', 'small.test'][n % 3]}") for n in range(20)]
    connection.executemany("insert into users values (?, ?, 1, null)", people)
    connection.commit()
    connection.close()
    return path


def test_write_back_walks_to_the_users_table(campaign: Path, database: Path) -> None:
    run("merge-logs", "--campaign", campaign)
    line = [
        "write-back",
        "--campaign",
        campaign,
        "--to",
        f"sqlite:///{database}",
        "--bounced",
        "UPDATE users SET daily_newsletter = 0, why = :reason WHERE email = :address",
        "--complained",
        "UPDATE users SET daily_newsletter = daily_newsletter - 2, why = :list_id || ' ' || :at WHERE id = :id",
        "--on",
        "another",
        "unsubscribed",
        "UPDATE users SET daily_newsletter = 9 WHERE id = :id",
    ]
    dry = run(*line)
    assert "bounced: 2 people, 0 written before, 2 to write; tried with 2, which changed 2 rows" in dry.stdout
    assert "address=u3@big.test" in dry.stdout
    assert users(database) == [], "a dry run changes nothing"
    done = run(*line, "--apply")
    assert "bounced: 2 people, 0 written before, 2 written now, 2 rows changed" in done.stdout
    assert users(database) == [
        (1000, 0, "5.1.1 gone"),
        (1003, 0, "5.1.1 no such user"),
        (1009, -1, "weekly 2026-05-28 20:26:40"),
    ]
    again = run(*line, "--apply")
    assert "bounced: 2 people, 2 written before, 0 written now" in again.stdout
    assert users(database)[2][:2] == (1009, -1), "what was written is not written again"


def test_a_refused_statement_writes_nothing_and_says_why(campaign: Path, database: Path) -> None:
    run("merge-logs", "--campaign", campaign)
    base = ["write-back", "--campaign", campaign, "--to", f"sqlite:///{database}", "--apply", "--bounced"]
    for sql, said in [
        ("UPDATE nowhere SET x = 0 WHERE email = :address", "no such table"),
        ("UPDATE users SET daily_newsletter = 0", "would change everybody"),
        ("UPDATE users SET daily_newsletter = 0 WHERE email = :email", "names :email"),
        ("DELETE FROM users WHERE id = :id; DROP TABLE users", "more than one statement"),
    ]:
        assert said in str(run(*base, sql).exception)
    assert users(database) == []
    missing = run(
        "write-back", "--campaign", campaign, "--to", "sqlite:///nowhere.db", "--bounced", "delete from u where id=:id"
    )
    assert "no such file" in str(missing.exception)
    secret = run(
        "write-back",
        "--campaign",
        campaign,
        "--to",
        "mysql://ann:secret@h/db",
        "--bounced",
        "delete from u where id=:id",
    )
    assert "secret" not in str(secret.exception)
    assert "mysql://ann@h/db" in str(secret.exception)
