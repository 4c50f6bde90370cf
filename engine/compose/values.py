"""Values of a row as templates see and print them. Knows types and text forms, not templates or headers.

| value | prints as |
|---|---|
| null, NaN, a missing map key | nothing; `default` replaces it, `is none` is true and `is defined` false of it |
| text | itself, line ends as LF |
| integer | all its digits |
| float | shortest digits that read back the same, without exponent; 3.0 is `3` |
| decimal | all its digits, without exponent; 12.50 stays `12.50` |
| boolean | `true`, `false` |
| date, time, timestamp | ISO 8601 with a blank before the time and the zone where it has one |
| list | its items, `, ` between them |
| struct, map | `name: value`, `, ` between them; fields by `person.name` |
| binary | UTF-8 text where it is that, else base64 |

Zero is a value: `{{ 0 }}` prints 0 and `default` leaves it.
"""

from __future__ import annotations

import binascii
from collections.abc import Callable, Mapping
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any, NoReturn

import pyarrow as pa
from jinja2 import ChainableUndefined, Undefined
from markupsafe import Markup

from formats.message import normalise_line_ends


class Null(ChainableUndefined):
    """A null of the list: prints nothing, has no fields, and cannot be calculated with."""

    __slots__ = ()

    @property
    def _undefined_message(self) -> str:
        return f"{self._undefined_name or 'a value'} is null"

    def __eq__(self, other: object) -> bool:
        return other is None or isinstance(other, Null)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(None)

    def _no_number(self) -> NoReturn:
        raise TypeError(self._undefined_message)  # what the filters `int` and `float` answer with their default

    __int__ = _no_number
    __float__ = _no_number


NULL = Null()


class Entries(dict[str, Any]):
    """A map of the list: a key it lacks is null."""

    def __missing__(self, key: object) -> Null:
        return NULL


Intake = Callable[[Any], Any]


def intake_for(name: str, kind: pa.DataType) -> Intake:
    """What turns a value of the column into what templates see: nulls marked, line ends LF, maps as mappings."""
    null = Null(name=name)
    inner = _intake(kind)

    def take(value: Any) -> Any:
        return null if value is None or value != value else inner(value)

    return take


def _intake(kind: pa.DataType) -> Intake:
    if pa.types.is_dictionary(kind):
        return _intake(kind.value_type)
    if pa.types.is_map(kind):
        one = _nullable(_intake(kind.item_type))
        return lambda pairs: Entries(
            (str(key), one(value)) for key, value in (pairs.items() if isinstance(pairs, Mapping) else pairs)
        )
    if pa.types.is_struct(kind):
        fields = {field.name: _nullable(_intake(field.type)) for field in kind}

        def take(struct: dict[str, Any]) -> dict[str, Any]:
            # Most structs are plain text and whole numbers, and can be used as they are.
            for value in struct.values():
                if type(value) is not int and (type(value) is not str or "\r" in value):
                    return {name: fields.get(name, _same)(value) for name, value in struct.items()}
            return struct

        return take
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        item = _nullable(_intake(kind.value_type))
        return lambda items: [item(value) for value in items]
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return normalise_line_ends
    return _same


def _same(value: Any) -> Any:
    return value


def _nullable(inner: Intake) -> Intake:
    return lambda value: NULL if value is None or value != value else inner(value)


def text_of(value: Any) -> Any:
    """The text form of a value (table above); text that is safe HTML stays so. Raises UndefinedError where strict."""
    kind = type(value)
    if kind is str or kind is Markup:
        return value
    if kind is int:
        return str(value)
    if value is None:
        return ""
    form = _FORMS.get(kind)
    if form is not None:
        return form(value)
    if hasattr(value, "__html__"):
        return value if not isinstance(value, Undefined) else str(value)
    for base, form in _FORMS.items():
        if isinstance(value, base):
            return form(value)
    return str(value)


def _float(value: float) -> str:
    if value != value:
        return ""
    text = repr(value)
    if "e" in text:
        text = format(Decimal(text), "f")
    return text.removesuffix(".0")


def _decimal(value: Decimal) -> str:
    return "" if value.is_nan() else format(value, "f")


def _binary(value: bytes) -> str:
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError:
        return binascii.b2a_base64(value, newline=False).decode("ascii")


def _timedelta(value: timedelta) -> str:
    return str(value)


def _items(value: list[Any] | tuple[Any, ...]) -> str:
    return ", ".join(str(text_of(item)) for item in value)


def _fields(value: Mapping[Any, Any]) -> str:
    return ", ".join(f"{text_of(name)}: {text_of(item)}" for name, item in value.items())


_FORMS: dict[type, Callable[[Any], str]] = {
    bool: lambda value: "true" if value else "false",
    float: _float,
    Decimal: _decimal,
    datetime: lambda value: value.isoformat(sep=" "),
    date: date.isoformat,
    time: time.isoformat,
    timedelta: _timedelta,
    bytes: _binary,
    list: _items,
    tuple: _items,
    dict: _fields,
}
