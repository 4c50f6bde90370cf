"""The operator's SQL: what is a parameter and what only looks like one."""

from __future__ import annotations

import pytest

from engine.results.statement import BadStatement, parse
from engine.results.target import without_password


@pytest.mark.parametrize(
    ("sql", "text", "names"),
    [
        ("update u set a=0 where e=:address", "update u set a=0 where e=%s", ("address",)),
        ("update u set a=':id', b=:at where i = :id ;", "update u set a=':id', b=%s where i = %s", ("at", "id")),
        ("update u set a=:at::timestamptz where i=:id", "update u set a=%s::timestamptz where i=%s", ("at", "id")),
        ("delete from u where e like '%x' and i=:id", "delete from u where e like '%%x' and i=%s", ("id",)),
        ("delete from u where i=:id -- :nobody", "delete from u where i=%s -- :nobody", ("id",)),
        ("delete from u where i=:id /* :x; */", "delete from u where i=%s /* :x; */", ("id",)),
        ('update u set ":odd"=1 where i=:id', 'update u set ":odd"=1 where i=%s', ("id",)),
        ("update u set a=10 % 3, b=';' where i=:id", "update u set a=10 %% 3, b=';' where i=%s", ("id",)),
    ],
)
def test_names_become_placeholders(sql: str, text: str, names: tuple[str, ...]) -> None:
    statement = parse("bounced", sql, "%s")
    assert (statement.text, statement.names) == (text, names)


@pytest.mark.parametrize("sql", ["", " ; ", "delete from u", "delete from u where e=:email", "select :id; select :id"])
def test_what_cannot_be_meant_is_refused(sql: str) -> None:
    with pytest.raises(BadStatement):
        parse("bounced", sql, "?")


def test_a_password_is_never_shown() -> None:
    shown = without_password("postgresql://ann:s3cret@db.test:5432/users?password=s3cret&x=1")
    assert shown == "postgresql://ann@db.test:5432/users"
