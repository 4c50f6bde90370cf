"""`engine` commands that the web server runs: the same that people type, as processes of their own."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from engine.errors import EngineError, Exit


class CommandFailed(EngineError):
    """{command} refused: {said}."""

    exit_code = Exit.USAGE
    hint = "Correct what it names and ask again."


def engine_command(words: list[str]) -> list[str]:
    """`engine WORDS` by this interpreter."""
    return [sys.executable, "-m", "engine", *words]


def environment() -> dict[str, str]:
    """The package is found also where it is not installed."""
    root = str(Path(__file__).parents[2])
    return {**os.environ, "PYTHONPATH": os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])}


def said(text: str) -> str:
    """The error of a command's stderr, on one line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return (errors or lines or ["it said nothing"])[-1][:500]
