"""The filters that templates get beside Jinja2's own: `date`, `time`, `datetime`, `number`, `money`, `percent`.

All of them leave a null null, so that `{{ due|date|default("soon") }}` works. Locale and zone are the message's
(`language`, `timezone`), and can be given: `{{ sum|money("EUR", locale="de") }}`. Formats are Babel's: `short`,
`medium`, `long`, `full`, or a pattern of Unicode TR 35 such as `d. MMMM yyyy`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import UTC, date, datetime, time
from decimal import Decimal
from functools import lru_cache
from typing import Any
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from babel import Locale, UnknownLocaleError
from babel import dates as babel_dates
from babel import numbers as babel_numbers
from jinja2 import Undefined, pass_eval_context
from jinja2.exceptions import TemplateRuntimeError
from jinja2.nodes import EvalContext
from markupsafe import Markup, escape

from engine.compose.values import text_of

_CACHED = 4096  # formatted values kept; Babel needs some 50 µs for each, and lists repeat their dates and prices


def locale_of(tag: str | None) -> Locale:
    """The locale of a language tag such as `de-AT`; raises ValueError naming it."""
    try:
        return Locale.parse((tag or "en").replace("-", "_"))
    except (UnknownLocaleError, ValueError):
        raise ValueError(f"language {tag!r} is not a locale that Babel knows") from None


def zone_of(name: str) -> ZoneInfo:
    """The time zone; raises ValueError naming it."""
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        raise ValueError(f"time zone {name!r} is not known to this machine") from None


def _moment(value: Any) -> date | datetime | time:
    if isinstance(value, date | time):
        return value
    if isinstance(value, str):
        text = value.strip()
        try:
            return date.fromisoformat(text) if len(text) == 10 else datetime.fromisoformat(text)
        except ValueError:
            pass
    raise TemplateRuntimeError(f"{value!r} is no date or timestamp (ISO 8601)")


def _number(value: Any) -> Decimal:
    if isinstance(value, bool) or not isinstance(value, int | float | Decimal | str):
        raise TemplateRuntimeError(f"{value!r} is no number")
    try:
        number = Decimal(str(value).strip())
    except ArithmeticError:
        raise TemplateRuntimeError(f"{value!r} is no number") from None
    if not number.is_finite():
        raise TemplateRuntimeError(f"{value!r} is no finite number")
    return number


def make_filters(language: str | None, timezone: str) -> dict[str, Callable[..., Any]]:
    """The filters, with the message's locale and zone as defaults; raises ValueError for an unknown one."""
    default_locale, default_zone = locale_of(language), zone_of(timezone)
    locales = lru_cache(maxsize=64)(locale_of)
    zones = lru_cache(maxsize=64)(zone_of)

    def in_zone(value: Any, zone: str | None) -> date | datetime | time:
        moment = _moment(value)
        if isinstance(moment, datetime) and moment.tzinfo is not None:
            return moment.astimezone(zones(zone) if zone else default_zone)
        return moment

    @lru_cache(maxsize=_CACHED)
    def format_moment(kind: str, moment: Any, zone: str, style: str, locale: str | None) -> str:
        # `zone` is there for the cache alone: one instant in two zones is equal, and prints differently.
        where = locales(locale) if locale else default_locale
        if kind == "time" and isinstance(moment, datetime | time):
            return babel_dates.format_time(moment, style, tzinfo=_tz(moment), locale=where)
        if kind == "datetime" and isinstance(moment, datetime):
            return babel_dates.format_datetime(moment, style, tzinfo=_tz(moment), locale=where)
        if kind == "date" and isinstance(moment, date):
            return babel_dates.format_date(moment, style, locale=where)
        raise TemplateRuntimeError(f"{moment!r} has no {kind}")

    @lru_cache(maxsize=_CACHED)
    def format_number(value: Any, kind: str, decimals: int | None, pattern: str | None, locale: str | None) -> str:
        where, number = locales(locale) if locale else default_locale, _number(value)
        if decimals is not None:
            pattern = "#,##0" + ("." + "0" * decimals if decimals else "")
        return babel_numbers.format_decimal(
            number, format=pattern, locale=where, decimal_quantization=pattern is not None
        )

    @lru_cache(maxsize=_CACHED)
    def format_money(value: Any, kind: str, currency: str, pattern: str | None, locale: str | None) -> str:
        where = locales(locale) if locale else default_locale
        if not babel_numbers.is_currency(currency):
            raise TemplateRuntimeError(f"{currency!r} is no ISO 4217 currency code")
        return babel_numbers.format_currency(_number(value), currency, format=pattern, locale=where)

    @lru_cache(maxsize=_CACHED)
    def format_percent(value: Any, kind: str, decimals: int, locale: str | None) -> str:
        where = locales(locale) if locale else default_locale
        return babel_numbers.format_percent(
            _number(value).quantize(Decimal(1).scaleb(-decimals - 2)), locale=where, decimal_quantization=False
        )

    def moment_filter(kind: str) -> Callable[..., Any]:
        def shown(value: Any, format: str = "medium", tz: str | None = None, locale: str | None = None) -> Any:
            if _is_null(value):
                return value
            moment = in_zone(value, tz)
            return format_moment(kind, moment, str(getattr(moment, "tzinfo", None)), format, locale)

        return shown

    def number(value: Any, decimals: int | None = None, format: str | None = None, locale: str | None = None) -> Any:
        return value if _is_null(value) else format_number(value, type(value).__name__, decimals, format, locale)

    def money(value: Any, currency: str, format: str | None = None, locale: str | None = None) -> Any:
        return value if _is_null(value) else format_money(value, type(value).__name__, currency, format, locale)

    def percent(value: Any, decimals: int = 0, locale: str | None = None) -> Any:
        return value if _is_null(value) else format_percent(value, type(value).__name__, decimals, locale)

    return {
        "date": moment_filter("date"),
        "time": moment_filter("time"),
        "datetime": moment_filter("datetime"),
        "number": number,
        "money": money,
        "percent": percent,
        "default": default,
        "d": default,
        "join": join,
        "string": string,
    }


def _tz(moment: Any) -> Any:
    return getattr(moment, "tzinfo", None) or UTC


def _is_null(value: Any) -> bool:
    return value is None or isinstance(value, Undefined) or value != value


def default(value: Any, default_value: Any = "", boolean: bool = False) -> Any:
    """`value`, or the default for a null and (with `boolean`) for whatever is false, as Jinja2 has it."""
    return default_value if _is_null(value) or (boolean and not value) else value


@pass_eval_context
def join(eval_ctx: EvalContext, values: Iterable[Any], d: str = "", attribute: str | int | None = None) -> str:
    """The items' text forms with `d` between them; escaped where the template escapes."""
    if attribute is not None:
        environment, path = eval_ctx.environment, str(attribute).split(".")

        def dig(item: Any) -> Any:
            for step in path:
                item = environment.getitem(item, int(step) if step.isdigit() else step)
            return item

        values = [dig(item) for item in values]
    if not eval_ctx.autoescape:
        return str(text_of(d)).join(str(text_of(item)) for item in values)
    return Markup(escape(d)).join(escape(text_of(item)) for item in values)


def string(value: Any) -> str:
    """The text form of `value`; safe HTML stays safe."""
    text = text_of(value)
    return text if isinstance(text, str) else str(text)
