"""Letters are signed as their source does."""

from __future__ import annotations

from pathlib import Path

import dkim
import pytest
from click.testing import CliRunner

from engine.cli import engine
from engine.clock import SystemClock
from engine.compose.sign import make_key
from engine.config import load_settings
from engine.control.outbox import Claimed
from engine.work.outbox_letters import LetterComposer, read_letter
from formats.address import Mailbox

LETTER = read_letter(
    Claimed(1, 1, "ann@example.net", None, "{}", "Welcome", "Hello Ann\n", None, "{}", "[]", None, 0, None, 0, "t", 0)
)


@pytest.mark.parametrize(("selector", "signed_by"), [(None, "s1"), ("s2", "s2"), ("unknown-here", "s1")])
def test_a_letter_is_signed_as_its_source_does(tmp_path: Path, selector: str | None, signed_by: str) -> None:
    folder = tmp_path / "campaign"
    assert CliRunner().invoke(engine, ["init", "--campaign", str(folder)]).exit_code == 0
    tables, records = "", {}
    for name in ("s1", "s2"):
        records[name] = make_key(folder / "keys" / f"{name}.pem", "rsa", 1024)
        tables += f'[[dkim]]\ndomain = "example.com"\nselector = "{name}"\nkey_file = "keys/{name}.pem"\n\n'
    file = folder / "campaign.toml"
    file.write_text(file.read_text("utf-8").replace("\n[keys]\n", f"\n{tables}[keys]\n", 1), "utf-8")
    composer = LetterComposer(load_settings(folder), folder, SystemClock(), {"s2", "unknown-here"})
    message = composer.compose(1, Mailbox("ann", "example.net"), [LETTER], 1_700_000_000_000_000, selector)
    assert f"s={signed_by};".encode() in message.content
    assert dkim.verify(message.content, dnsfunc=lambda name, timeout=5: records[signed_by].encode())
