"""SQL in files: each statement under the comment line `-- name: NAME`."""

from __future__ import annotations

import re
from importlib.resources import files

_NAME = re.compile(r"^-- name: (\w+)\s*$", re.MULTILINE)


def load_statements(file: str) -> dict[str, str]:
    """The statements of engine/control/sql/FILE by name."""
    text = files("engine.control").joinpath("sql", file).read_text("utf-8")
    parts = _NAME.split(text)
    return {name: body.strip() for name, body in zip(parts[1::2], parts[2::2], strict=True)}
