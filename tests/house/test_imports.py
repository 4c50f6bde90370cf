"""Imports go down only, siblings do not know each other, and `formats` knows nothing of `engine`."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Highest first. A module may import modules of floors below its own, and of its own room.
FLOORS: tuple[frozenset[str], ...] = (
    frozenset({"__main__"}),
    frozenset({"cli"}),
    frozenset({"commands"}),
    frozenset({"web"}),
    frozenset({"work", "results", "bounce", "rehearse"}),
    frozenset({"lists", "planner", "capacity", "counts", "issues", "outbox", "zones"}),
    frozenset({"accepting"}),
    frozenset({"smtp", "compose", "route", "control", "pace", "warmup", "schedule"}),
    frozenset({"config", "clock", "errors", "campaign", "host", "rows", "__init__"}),
    frozenset({"formats"}),
)
# Packages of data, which hold no code.
DATA_ROOMS = frozenset({"init", "guide", "placement"})
# The ground floor's modules may know each other.
GROUND = len(FLOORS) - 2
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}


def room_of(module: str) -> str:
    """`engine.pace.retry` is in the room `pace`, `engine.planner` is one, `formats.reply` is in `formats`."""
    parts = module.split(".")
    if parts[0] == "formats":
        return "formats"
    return parts[1] if len(parts) > 1 else "__init__"


def imported(tree: ast.AST, package: str) -> Iterator[tuple[int, str]]:
    """Line and module of each import of ours, also inside functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, *([node.module] if node.module else [])])
            # `from engine import clock` names the module in its second half.
            names = [f"{base}.{alias.name}" for alias in node.names] if base == "engine" else [base]
        else:
            continue
        for name in names:
            if name.split(".")[0] in ("engine", "formats"):
                yield node.lineno, name


def complaints(path: Path, source: str) -> list[str]:
    """What is wrong with the imports of one module, in words."""
    parts = path.with_suffix("").parts
    room = room_of(".".join(parts))
    found = []
    if room not in FLOOR_OF:
        return [f"{path}: the room {room!r} has no floor in {Path(__file__).name}"]
    for line, name in imported(ast.parse(source), ".".join(parts[:-1])):
        other = room_of(name)
        if other not in FLOOR_OF:
            # `from engine import __version__`: a name of the package itself.
            other = "__init__"
        mine, theirs = FLOOR_OF[room], FLOOR_OF[other]
        if room == other or theirs > mine or (mine == theirs == GROUND):
            continue
        kind = "a sibling" if mine == theirs else "a room above"
        found.append(f"{path}:{line}: {room} imports {name}, {kind}")
    return found


def modules() -> list[Path]:
    """Every module of the two packages, relative to the root."""
    return sorted(
        path.relative_to(ROOT)
        for package in ("engine", "formats")
        for path in (ROOT / package).rglob("*.py")
        if path.relative_to(ROOT).parts[1] not in DATA_ROOMS
    )


def test_imports_go_down_only() -> None:
    found = [words for path in modules() for words in complaints(path, (ROOT / path).read_text())]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("path", "source", "is_fine"),
    [
        ("engine/pace/retry.py", "from engine.config import Settings", True),
        ("engine/pace/retry.py", "import engine.pace.wheel", True),
        ("engine/pace/retry.py", "from . import wheel", True),
        ("engine/pace/retry.py", "from ..smtp import pool", False),
        ("engine/pace/retry.py", "from engine.work.worker import Worker", False),
        ("engine/pace/retry.py", "def late():\n    import engine.smtp.pool", False),
        ("engine/pace/retry.py", "from engine import planner", False),
        ("engine/cli.py", "from engine import __version__", True),
        ("engine/config.py", "from engine.errors import Exit", True),
        ("engine/config.py", "from engine.pace import retry", False),
        ("formats/reply.py", "from formats.address import Mailbox", True),
        ("formats/reply.py", "from engine.errors import Exit", False),
        ("engine/results/merge.py", "from engine.work.logbook import Logbook", False),
    ],
)
def test_the_check_sees_what_it_should(path: str, source: str, is_fine: bool) -> None:
    assert (complaints(Path(path), source) == []) is is_fine


def test_every_module_says_what_it_is() -> None:
    silent = [
        str(path)
        for path in modules()
        if (text := (ROOT / path).read_text().strip()) and not ast.get_docstring(ast.parse(text))
    ]
    assert not silent, f"without a docstring: {', '.join(silent)}"


def test_only_the_clock_reads_a_clock() -> None:
    """Deciding code takes `now` as an argument (engine/DESIGN.md): `time.time` and friends are the clock's alone."""
    readers = []
    names = {"time", "monotonic", "time_ns", "monotonic_ns", "now", "utcnow", "today"}
    for path in modules():
        if path.parts[1] in ("pace", "route") or path == Path("engine/smtp/dialogue.py") or path.parts[0] == "formats":
            for node in ast.walk(ast.parse((ROOT / path).read_text())):
                if (
                    isinstance(node, ast.Call)
                    and isinstance(node.func, ast.Attribute)
                    and node.func.attr in names
                    and isinstance(node.func.value, ast.Name)
                    and node.func.value.id in ("time", "datetime", "date")
                ):
                    readers.append(f"{path}:{node.lineno}")
    assert not readers, "\n".join(readers)
