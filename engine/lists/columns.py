"""Columns of sources: which one holds the address, and one schema for several files."""

from __future__ import annotations

from collections.abc import Sequence

import polars as pl

from engine.errors import EngineError, Exit
from engine.lists.source import Source

_USUAL = ("email", "e-mail", "email_address", "emailaddress", "mail", "address")


class NoAddressColumn(EngineError):
    """{file}: no column {wanted}; it has {names}."""

    exit_code = Exit.LIST
    hint = "Name the column that holds the addresses with --address-column."


class ColumnsDiffer(EngineError):
    """{file}: column {column!r} is {kind}, in {first} it is {first_kind}."""

    exit_code = Exit.LIST
    hint = "Export both with the same columns and types, or prepare them one by one."


def bare(name: str) -> str:
    """A column's name without byte-order mark and surrounding space, as exports put them."""
    return name.strip().strip("\ufeff").strip()


def address_column(names: Sequence[str], wanted: str | None, *, file: str) -> str:
    """The column that holds the addresses: the one `wanted`, else the first of the usual names, in any case."""
    for candidate in (wanted,) if wanted else _USUAL:
        for match in (lambda name: name, lambda name: bare(name).casefold()):
            found = [name for name in names if match(name) == match(candidate)]
            if len(found) == 1:
                return found[0]
    said = repr(wanted) if wanted else "called " + ", ".join(_USUAL)
    raise NoAddressColumn(file=file, wanted=said, names=", ".join(names[:20]) + (" ..." if len(names) > 20 else ""))


def one_scan(sources: Sequence[Source]) -> pl.LazyFrame:
    """All rows of `sources`, in order, with one schema; raises ColumnsDiffer naming file, column and types."""
    scans = [_renamed(source.scan()) for source in sources]
    schemas = [scan.collect_schema() for scan in scans]
    target = dict(schemas[0])
    for source, schema in zip(sources[1:], schemas[1:], strict=True):
        for name in [*target, *schema]:
            mine, theirs = target.get(name), schema.get(name)
            if mine == theirs:
                continue
            common = _common(mine, theirs)
            if common is None:
                raise ColumnsDiffer(
                    file=source.name,
                    column=name,
                    kind=theirs or "absent",
                    first=sources[0].name,
                    first_kind=mine or "absent",
                )
            target[name] = common
    cast = [
        scan.select(pl.col(name).cast(kind) if schema[name] != kind else pl.col(name) for name, kind in target.items())
        for scan, schema in zip(scans, schemas, strict=True)
    ]
    return cast[0] if len(cast) == 1 else pl.concat(cast, how="vertical")


def _renamed(scan: pl.LazyFrame) -> pl.LazyFrame:
    names = {name: bare(name) for name in scan.collect_schema().names() if bare(name) != name}
    return scan.rename(names) if names else scan


def _common(mine: pl.DataType | None, theirs: pl.DataType | None) -> pl.DataType | None:
    """A type that holds both without loss, None where there is none (or a column is absent)."""
    if mine is None or theirs is None:
        return None
    if mine == pl.Null or theirs == pl.Null:
        return theirs if mine == pl.Null else mine
    if mine.is_integer() and theirs.is_integer():
        return pl.Int64() if pl.UInt64 not in (mine, theirs) else None
    if mine.is_float() and theirs.is_float():
        return pl.Float64()
    texts = (pl.String, pl.Categorical, pl.Enum)
    if isinstance(mine, texts) and isinstance(theirs, texts):
        return pl.String()
    if isinstance(mine, pl.Datetime) and isinstance(theirs, pl.Datetime) and mine.time_zone == theirs.time_zone:
        return pl.Datetime("us", mine.time_zone)
    return None
