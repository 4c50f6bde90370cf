"""`engine preview` and `engine dkim-key`, as an operator runs them."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner, Result

from engine.cli import engine
from engine.commands.preview import PreviewError, dkim_key, preview
from engine.compose.keys import write_new_keys
from engine.errors import Exit
from tests.compose.conftest import opened, text_of

SETTINGS = """
[campaign]
id = "spring"
[message]
from_address = "news@example.org"
subject = "Hi {{ first }}"
html = "page.html"
[[message.inline]]
cid = "logo"
path = "logo.png"
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "campaign.toml").write_text(SETTINGS)
    (tmp_path / "page.html").write_text('<p>Hello {{ first }}, {{ 10 // n }}</p><img src="cid:logo" alt="">')
    (tmp_path / "logo.png").write_bytes(b"\x89PNG")
    write_new_keys(tmp_path / "keys/secret.keys")
    for name, start in (("a.parquet", 0), ("b.parquet", 5)):
        table = pa.table(
            {
                "\ufeffemail": [f"r{n}@example.net" if n != 6 else "nobody" for n in range(start, start + 5)],
                "first": [f"Ann {n}" for n in range(start, start + 5)],
                "n": [n - 8 for n in range(start, start + 5)],
            }
        )
        pq.write_table(table, tmp_path / name, row_group_size=2)
    return tmp_path


def run(folder: Path, *options: str) -> Result:
    lists = ["--list", str(folder / "a.parquet"), "--list", str(folder / "b.parquet")]
    return CliRunner().invoke(preview, ["--campaign", str(folder), *lists, *options])


def test_rows_by_number_are_written_as_messages(folder: Path) -> None:
    result = run(folder, "--rows", "0,4-5,9")
    assert result.exit_code == 0, result.output
    assert [Path(line).name for line in result.stdout.splitlines()] == ["0.eml", "4.eml", "5.eml", "9.eml"]
    message = opened((folder / "preview/5.eml").read_bytes())
    assert message["To"] == "r5@example.net"
    assert message["Subject"] == "Hi Ann 5"
    assert "warn: unsubscribe" in result.stderr


def test_rows_by_condition_as_pages_with_images(folder: Path) -> None:
    result = run(folder, "--where", "n < -4 and first like 'Ann%'", "--html", "--limit", "2", "--json")
    assert result.exit_code == 0, result.output
    facts = [json.loads(line) for line in result.stdout.splitlines()]
    assert [fact["row"] for fact in facts] == [0, 1]
    page = Path(facts[1]["file"]).read_text()
    assert "Hello Ann 1" in page
    assert "data:image/png;base64,iVBORw==" in page


def test_a_row_without_a_message_is_named(folder: Path) -> None:
    result = run(folder, "--rows", "6-8")
    assert result.exit_code == Exit.ROWS_OPEN
    lines = result.stdout.splitlines()
    assert lines[0].startswith("row 6: address: address has no @")
    assert lines[1].endswith("7.eml")
    assert lines[2].startswith("row 8: render: page.html as text line 1: integer division")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--rows", "10"], "past the end: the list has 10 rows"),
        (["--where", "nope = 1"], "--where 'nope = 1'"),
    ],
)
def test_what_cannot_be_shown_is_said(folder: Path, options: list[str], says: str) -> None:
    result = run(folder, *options)
    assert isinstance(result.exception, PreviewError)
    assert says in str(result.exception)


def test_without_plan_or_list(folder: Path) -> None:
    result = CliRunner().invoke(preview, ["--campaign", str(folder)])
    assert "no plan yet" in str(result.exception)


def test_a_dkim_key_and_its_record(folder: Path) -> None:
    result = CliRunner().invoke(dkim_key, ["--campaign", str(folder), "--domain", "example.org", "--selector", "s1"])
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith('s1._domainkey.example.org. IN TXT ( "v=DKIM1; k=rsa; p=')
    assert all(len(piece) <= 255 for piece in result.stdout.split('"')[1::2])
    snippet = result.stderr.partition("campaign.toml:\n")[2]
    with (folder / "campaign.toml").open("a") as file:
        file.write(snippet)
    shown = CliRunner().invoke(dkim_key, ["--campaign", str(folder), "--show", "--json"])
    record = json.loads(shown.stdout)
    assert record["name"] == "s1._domainkey.example.org"
    assert record["text"].replace(" ", "") in result.stdout.replace('" "', "").replace(" ", "")
    sent = run(folder, "--rows", "0")
    assert sent.exit_code == 0
    assert (folder / "preview/0.eml").read_bytes().startswith(b"DKIM-Signature:")
    assert text_of(opened((folder / "preview/0.eml").read_bytes()).get_body(("html",))).startswith("<p>Hello")  # type: ignore[arg-type]


def test_an_ed25519_key(folder: Path) -> None:
    options = ["--campaign", str(folder), "--domain", "example.org", "--selector", "e1", "--type", "ed25519"]
    result = CliRunner().invoke(dkim_key, options)
    assert 'algorithm = "ed25519-sha256"' in result.stderr
    again = CliRunner().invoke(dkim_key, options)
    assert "never overwritten" in str(again.exception)
    assert CliRunner().invoke(dkim_key, ["--domain", "x.example"]).exit_code == Exit.USAGE


def test_both_are_commands_of_engine() -> None:
    assert {"preview", "dkim-key"} <= set(engine.list_commands(None))  # type: ignore[arg-type]
