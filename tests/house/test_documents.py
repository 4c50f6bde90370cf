"""Links in documents lead somewhere, commands that guides show exist, and every command explains itself."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from engine.cli import COMMANDS, engine

ROOT = Path(__file__).parents[2]
_FENCE = re.compile(r"^(```|~~~).*?^\1[ \t]*$", re.MULTILINE | re.DOTALL)
_INDENTED = re.compile(r"^(?: {4}|\t).*$", re.MULTILINE)
_LINK = re.compile(r"!?\[[^\]]*\]\(\s*<?([^)\s>]+)>?[^)]*\)")
_HTML_LINK = re.compile(r"(?:src|href)=\"([^\"]+)\"")
_HEADING = re.compile(r"^#{1,6}\s+(.*?)\s*#*$", re.MULTILINE)
_COMMAND_LINE = re.compile(r"^\s*\$?\s*(engine [a-z].*)$", re.MULTILINE)


def documents() -> list[Path]:
    """Every Markdown file of the project."""
    skipped = {".venv", "build", "dist", "node_modules", ".git", "campaign", "demo"}
    return sorted(path for path in ROOT.rglob("*.md") if not skipped & set(path.relative_to(ROOT).parts))


def prose(text: str) -> str:
    """The text without its code blocks."""
    return _INDENTED.sub("", _FENCE.sub("", text))


def anchors(text: str) -> set[str]:
    """The anchors of a document's headings, as GitHub makes them."""
    found: dict[str, int] = {}
    for heading in _HEADING.findall(_FENCE.sub("", text)):
        plain = re.sub(r"[`*_]|\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        anchor = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
        found[anchor] = found.get(anchor, -1) + 1
    return {name if not number else f"{name}-{number}" for name, last in found.items() for number in range(last + 1)}


def dead_links(document: Path, text: str) -> list[str]:
    """The links of a document that lead nowhere."""
    dead = []
    plain = prose(text)
    for target in [*_LINK.findall(plain), *_HTML_LINK.findall(plain)]:
        if re.match(r"[a-z][a-z0-9+.-]*:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (document.parent / path).resolve() if path else document
        if not file.exists():
            dead.append(f"{document.name}: {target}")
        elif anchor and file.suffix == ".md" and anchor not in anchors(text if file == document else file.read_text()):
            dead.append(f"{document.name}: {target} (no such heading)")
    return dead


def test_relative_links_lead_somewhere() -> None:
    dead = [link for document in documents() for link in dead_links(document, document.read_text())]
    assert not dead, "\n".join(dead)


def test_the_link_check_sees_dead_links(tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text("# A *good* heading, really\n")
    text = "[a](other.md) [b](gone.md) [c](other.md#a-good-heading-really) [d](other.md#no) [e](https://example.com)\n"
    assert dead_links(tmp_path / "page.md", text) == ["page.md: gone.md", "page.md: other.md#no (no such heading)"]


def test_every_guide_is_linked_from_the_readme() -> None:
    readme = ROOT / "README.md"
    if not readme.exists():
        pytest.skip("no README yet")
    guides = {f"engine/guide/{path.name}" for path in (ROOT / "engine" / "guide").glob("*.md")}
    assert not guides - set(_LINK.findall(readme.read_text()))


def commands() -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Every command with the words that name it, groups and what is in them."""
    context = click.Context(engine)

    def below(words: tuple[str, ...], command: click.Command) -> Iterator[tuple[tuple[str, ...], click.Command]]:
        yield words, command
        if isinstance(command, click.Group):
            for name in command.list_commands(context):
                child = command.get_command(context, name)
                assert child is not None
                yield from below((*words, name), child)

    for name in COMMANDS:
        command = engine.get_command(context, name)
        assert command is not None, name
        yield from below((name,), command)


def test_every_command_explains_itself() -> None:
    for words, command in commands():
        result = CliRunner().invoke(engine, [*words, "--help"])
        assert result.exit_code == 0, f"{words}: {result.output}"
        summary = command.get_short_help_str(limit=200)
        assert summary, f"engine {' '.join(words)} has no help"
        if not isinstance(command, click.Group):
            assert f"engine {' '.join(words)}" in (command.help or ""), f"engine {' '.join(words)} --help: no example"


def shown_commands() -> Iterator[tuple[str, str]]:
    """Document and line of each `engine ...` in a code block."""
    for document in documents():
        text = document.read_text()
        for block in [found[0] for found in _FENCE.finditer(text)] + _INDENTED.findall(text):
            for line in _COMMAND_LINE.findall(block):
                yield document.relative_to(ROOT).as_posix(), line


def test_commands_in_documents_exist_with_their_options() -> None:
    known = dict(commands())
    wrong = []
    for document, line in shown_commands():
        if document.endswith("DESIGN.md"):
            continue  # written before the commands
        try:
            words = shlex.split(line.split(" #")[0].split("|")[0].split(">")[0].split("&")[0], comments=True)[1:]
        except ValueError:
            continue  # a line that goes on
        name = next((tuple(words[:length]) for length in (2, 1) if tuple(words[:length]) in known), None)
        if name is None:
            if words and not words[0].startswith("-"):
                wrong.append(f"{document}: no command in `{line}`")
            continue
        command = known[name]
        if isinstance(command, click.Group) and "read" in command.commands:
            command = command.commands["read"]  # `engine bounces WHERE` reads
        options = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
        for word in words[len(name) :]:
            if word.startswith("--") and word.split("=")[0] not in options | {"--help"}:
                wrong.append(f"{document}: `{line}` has no option {word}")
    assert not wrong, "\n".join(wrong)
