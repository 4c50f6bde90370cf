"""Exceptions are for us: the operator or we erred. What a server said is a value, never an exception.

A subclass's docstring is its message, filled in with the keyword arguments it was raised with; `hint` is the next
step; `exit_code` is a row of the one table of exit codes (README, "Exit codes").
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any, ClassVar


class Exit(IntEnum):
    """What the process says when it ends. Worst first when several hold: see `worst`."""

    DONE = 0
    BUG = 1
    USAGE = 2
    ROWS_OPEN = 3
    IN_DOUBT = 4
    DUPLICATES = 5
    LOG_DAMAGED = 6
    SETTINGS = 20
    LIST = 21
    PLAN = 22
    TEMPLATE = 23
    KEYS = 24
    FROZEN = 25
    TRY_AGAIN = 75


_WORST_FIRST = (
    Exit.BUG,
    Exit.DUPLICATES,
    Exit.LOG_DAMAGED,
    Exit.TRY_AGAIN,  # before the rows that are open because of it
    Exit.IN_DOUBT,
    Exit.ROWS_OPEN,
)


def worst(*codes: Exit) -> Exit:
    """The code to exit with when several hold: duplicates before damage before doubt before open rows."""
    for code in _WORST_FIRST:
        if code in codes:
            return code
    return max(codes, default=Exit.DONE)


class EngineError(Exception):
    """Something went wrong: {detail}."""

    exit_code: ClassVar[Exit] = Exit.BUG
    hint: ClassVar[str] = ""

    def __init__(self, **fields: Any) -> None:
        self.fields = fields
        template = " ".join((type(self).__doc__ or "").split())
        super().__init__(template.format_map(_Fields(fields)))

    @property
    def next_step(self) -> str:
        """The hint, filled in with the same fields as the message."""
        return self.hint.format_map(_Fields(self.fields))


class _Fields(dict[str, Any]):
    def __missing__(self, key: str) -> str:
        return "?"
