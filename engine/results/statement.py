"""An operator's SQL with `:names` in it, as a driver wants it. Pure; knows quotes, comments and casts, not SQL.

Names: `:address`, `:id`, `:row`, `:list_id`, `:reason`, `:at`. At least one of the first two must occur: a statement
that names no person would change everybody.
"""

from __future__ import annotations

import re

import msgspec

from engine.errors import EngineError, Exit

NAMES = ("address", "id", "row", "list_id", "reason", "at")

# What may hold a colon that is no parameter comes first: quoted text, quoted names, dollar quotes, comments, casts.
_TOKEN = re.compile(
    r"""'(?:[^']|'')*' | "(?:[^"]|"")*" | `[^`]*` | \$(\w*)\$.*?\$\1\$ | --[^\n]* | /\*.*?\*/
    | :: | :(?P<name>[A-Za-z_]\w*) | %""",
    re.VERBOSE | re.DOTALL,
)


class BadStatement(EngineError):
    """The statement for {kind} {problem}: {sql}."""

    exit_code = Exit.USAGE
    hint = "Use :address, :id, :row, :list_id, :reason and :at; at least :address or :id. One statement, no semicolon."


class Statement(msgspec.Struct, frozen=True):
    """One statement: its text for a driver, and the names whose values go with it, in order."""

    kind: str
    sql: str  # as the operator wrote it
    text: str
    names: tuple[str, ...]


def parse(kind: str, sql: str, placeholder: str) -> Statement:
    """`sql` with each `:name` as `placeholder` ("?" or "%s"); raises BadStatement."""
    names: list[str] = []
    doubles_percent = placeholder == "%s"

    def replaced(found: re.Match[str]) -> str:
        name = found["name"]
        if name is None:
            return found[0].replace("%", "%%") if doubles_percent else found[0]
        if name not in NAMES:
            raise BadStatement(kind=kind, problem=f"names :{name}, which is unknown", sql=sql)
        names.append(name)
        return placeholder

    sql = sql.strip().rstrip(";").strip()
    text = _TOKEN.sub(replaced, sql)
    if not sql:
        raise BadStatement(kind=kind, problem="is empty", sql=sql)
    if ";" in _TOKEN.sub("", sql):
        raise BadStatement(kind=kind, problem="is more than one statement", sql=sql)
    if not {"address", "id"} & set(names):
        raise BadStatement(kind=kind, problem="names neither :address nor :id and would change everybody", sql=sql)
    return Statement(kind, sql, text, tuple(names))
