"""Budgets: what each provider lets each source do, resolved from layers, every value with its origin and reason.

Layers, the later wins per key: shipped [default], the campaign's [default], shipped [provider.NAME], the campaign's
[provider.NAME], [source.NAME.provider.NAME]. A shipped provider's number beats the campaign's default on purpose: a
general wish for 50 connections must not open 50 to a provider that allows two.

Pure but for `load_budgets`, which reads files, and `bind_problems`, which tries addresses.
"""

from __future__ import annotations

import ipaddress
import math
import socket
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

import msgspec

from engine.config import Duration, decode_custom
from engine.errors import EngineError, Exit
from engine.pace.allowance import Rate
from engine.pace.slots import Key, Limit

SHIPPED = Path(__file__).with_name("budgets.toml")
BUDGETS_FILE = "budgets.toml"
ALL_SOURCES = "*"

_DAY_SPREAD_S = 8 * 3600.0  # a day's number may be used within eight hours, no faster
Tls = Literal["off", "opportunistic", "required", "verified"]


class BudgetError(EngineError):
    """{file}: [{section}] {problem}."""

    exit_code = Exit.SETTINGS
    hint = "Correct {file}; `engine budgets check` reads it again, the guide `providers.md` lists every key."


class SourceCannotBeBound(EngineError):
    """source {source}: this host cannot send from {address}: {problem}."""

    exit_code = Exit.SETTINGS
    hint = "Give the address to an interface of this host, or correct [source.{source}] in the campaign's budgets.toml."


class Reasoned(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A value with its reason: { value = 5, why = "..." }."""

    value: int | bool | str
    why: str


Written = int | bool | str | Reasoned


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The budget keys, each a plain value or one with a reason."""

    connections: Written | None = None
    messages_per_connection: Written | None = None
    messages_per_minute: Written | None = None
    messages_per_hour: Written | None = None
    messages_per_day: Written | None = None
    connections_per_minute: Written | None = None
    tls: Written | None = None
    pipelining: Written | None = None
    chunking: Written | None = None
    retry_after: Written | None = None
    scope: Written | None = None


class SourceSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[source.NAME]: an address to send from."""

    bind: str
    greeting_name: str | None = None
    dkim_selector: str | None = None
    weight: int = 1
    warmup_day: int | None = None  # days this address has been sending; None: warm
    provider: dict[str, Section] = {}


class BudgetFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A budgets.toml."""

    default: Section = Section()
    provider: dict[str, Section] = {}
    source: dict[str, SourceSection] = {}


class Source(msgspec.Struct, frozen=True):
    """An address to send from, what it greets with, and its share of the rows."""

    name: str
    bind: str | None = None
    greeting_name: str | None = None
    dkim_selector: str | None = None
    weight: int = 1
    warmup_day: int | None = None


class Setting(msgspec.Struct, frozen=True):
    """One resolved value, and whose word it is."""

    key: str
    value: int | bool | str | float | None
    origin: str
    why: str


class Budget(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a provider lets a source do."""

    connections: int
    messages_per_connection: int
    messages_per_minute: int | None = None
    messages_per_hour: int | None = None
    messages_per_day: int | None = None
    connections_per_minute: int | None = None
    tls: Tls = "opportunistic"
    pipelining: bool = True
    chunking: bool = True
    retry_after_s: float | None = None
    scope: Literal["source", "campaign"] = "source"

    def limit(self) -> Limit:
        """What the ledger of slots keeps."""
        rates = []
        if self.messages_per_minute is not None:
            rates.append(Rate(self.messages_per_minute, 60.0))
        if self.messages_per_hour is not None:
            rates.append(Rate(self.messages_per_hour, 3600.0))
        if self.messages_per_day is not None:
            rates.append(Rate(self.messages_per_day, 86_400.0, _DAY_SPREAD_S))
        opening = Rate(self.connections_per_minute, 60.0) if self.connections_per_minute is not None else None
        return Limit(self.connections, tuple(rates), opening)


class Budgets:
    """All budgets of a campaign."""

    def __init__(self, shipped: BudgetFile, own: BudgetFile, own_name: str = BUDGETS_FILE) -> None:
        self._shipped, self._own, self._own_name = shipped, own, own_name
        self.sources: tuple[Source, ...] = tuple(
            Source(name, s.bind, s.greeting_name, s.dkim_selector, s.weight, s.warmup_day)
            for name, s in own.source.items()
        )
        self._resolved: dict[tuple[str, str | None], Budget] = {}

    def explain(self, provider: str, source: str | None = None) -> list[Setting]:
        """Every key's value in force, with its origin and reason."""
        settings: dict[str, Setting] = {}
        for origin, section in self._layers(provider, source):
            for key in Section.__struct_fields__:
                written: Written | None = getattr(section, key)
                if isinstance(written, Reasoned):
                    settings[key] = Setting(key, written.value, origin, written.why)
                elif written is not None:
                    settings[key] = Setting(key, written, origin, "")
        unset = "no limit" if provider else ""
        return [settings.get(key, Setting(key, None, "nobody", unset)) for key in Section.__struct_fields__]

    def of(self, provider: str, source: str | None = None) -> Budget:
        """The budget in force for a provider, from a source."""
        at = (provider, source)
        if at not in self._resolved:
            values: dict[str, Any] = {s.key: s.value for s in self.explain(provider, source) if s.value is not None}
            if "retry_after" in values:
                values["retry_after_s"] = Duration.parse(values.pop("retry_after")).seconds
            self._resolved[at] = msgspec.convert(values, Budget)
        return self._resolved[at]

    def key(self, source: str, provider: str) -> Key:
        """Whose ledger a message is counted in: the source's, or one for all sources."""
        scope = self.of(provider, source).scope
        return (ALL_SOURCES if scope == "campaign" else source, provider)

    def limit_of(self, key: Key) -> Limit:
        """The limit of a ledger key, for `Ledger(limit_of)`."""
        source, provider = key
        return self.of(provider, None if source == ALL_SOURCES else source).limit()

    def has_own(self, provider: str, source: str) -> bool:
        """Whether the source has words of its own for the provider; without, its budget is everybody's."""
        section = self._own.source.get(source)
        return section is not None and provider in section.provider

    def named_providers(self) -> set[str]:
        """Providers that some section names."""
        return set(self._shipped.provider) | set(self._own.provider)

    def _layers(self, provider: str, source: str | None) -> Iterator[tuple[str, Section]]:
        yield "shipped [default]", self._shipped.default
        yield f"{self._own_name} [default]", self._own.default
        if provider in self._shipped.provider:
            yield f"shipped [provider.{provider}]", self._shipped.provider[provider]
        if provider in self._own.provider:
            yield f"{self._own_name} [provider.{provider}]", self._own.provider[provider]
        if source is not None and source in self._own.source:
            own = self._own.source[source].provider
            if provider in own:
                yield f"{self._own_name} [source.{source}.provider.{provider}]", own[provider]


def relay_limit(connections: int, messages_per_second: float | None) -> Limit:
    """The limit of a relay's account, from [delivery]."""
    return Limit(connections, () if messages_per_second is None else (rate_of(messages_per_second),))


def rate_of(per_second: float) -> Rate:
    """A rate that is never above `per_second`: 0.5 is one in two seconds, 29.5 is 295 in ten."""
    if per_second >= 1:
        return Rate(int(per_second), 1.0) if per_second == int(per_second) else Rate(math.floor(per_second * 10), 10.0)
    share = Fraction(per_second).limit_denominator(100_000)
    return Rate(1, math.ceil(share.denominator / max(share.numerator, 1) * 1000) / 1000)


def load_budgets(own: Path | None = None) -> Budgets:
    """The shipped budgets and the campaign's file over them; raises BudgetError naming section, key and reason."""
    shipped = _read(SHIPPED, "shipped budgets.toml")
    if own is None or not own.exists():
        return Budgets(shipped, BudgetFile())
    return Budgets(shipped, _read(own, own.name), own.name)


def find_dead(
    own: BudgetFile, known: set[str], provider_of_host: Any, provider_of_domain: Any
) -> list[tuple[str, str]]:
    """(section, problem) of sections that can never be asked for."""
    problems: list[tuple[str, str]] = []
    sections = [(f"provider.{name}", name) for name in own.provider]
    sections += [(f"source.{s}.provider.{name}", name) for s, inner in own.source.items() for name in inner.provider]
    for section, name in sections:
        if "." not in name:
            if name not in known:
                problems.append((section, f"is dead: there is no provider {name!r}"))
        elif (provider := provider_of_host("mx." + name)) is not None:
            problems.append((section, f"is dead: hosts under {name} belong to the provider {provider!r}"))
        elif (provider := provider_of_domain(name)) is not None:
            problems.append((section, f"is dead: mail for {name} goes to the provider {provider!r}, name that"))
    return problems


def bind_problems(sources: tuple[Source, ...]) -> list[SourceCannotBeBound]:
    """Which sources this host cannot send from, by trying."""
    problems = []
    for source in sources:
        if source.bind is None:
            continue
        family = socket.AF_INET6 if ":" in source.bind else socket.AF_INET
        try:
            with socket.socket(family, socket.SOCK_STREAM) as trial:
                trial.bind((source.bind, 0))
        except OSError as problem:
            problems.append(SourceCannotBeBound(source=source.name, address=source.bind, problem=problem.strerror))
    return problems


def read_budget_file(path: Path) -> BudgetFile:
    """One file, checked for itself; raises BudgetError."""
    return _read(path, path.name)


def _read(path: Path, name: str) -> BudgetFile:
    try:
        file = msgspec.toml.decode(path.read_bytes(), type=BudgetFile, dec_hook=decode_custom)
    except OSError as problem:
        raise BudgetError(file=name, section="-", problem=problem.strerror) from None
    except (msgspec.MsgspecError, UnicodeDecodeError, ValueError) as problem:
        raise BudgetError(file=name, section="-", problem=problem) from None
    _check_section(file.default, "default", name)
    for provider, section in file.provider.items():
        _check_section(section, f"provider.{provider}", name)
    bound: dict[str, str] = {}
    for source, inner in file.source.items():
        _check_source(source, inner, name, bound)
        for provider, section in inner.provider.items():
            _check_section(section, f"source.{source}.provider.{provider}", name)
            if section.scope is not None:
                where = f"source.{source}.provider.{provider}"
                raise BudgetError(file=name, section=where, problem="scope: a budget of one source has no other scope")
    return file


_COUNTS = (
    "connections",
    "messages_per_connection",
    "messages_per_minute",
    "messages_per_hour",
    "messages_per_day",
    "connections_per_minute",
)
_CHOICES = {"tls": ("off", "opportunistic", "required", "verified"), "scope": ("source", "campaign")}


def _check_section(section: Section, where: str, file: str) -> None:
    def wrong(problem: str) -> BudgetError:
        return BudgetError(file=file, section=where, problem=problem)

    values: dict[str, Any] = {}
    for key in Section.__struct_fields__:
        written = getattr(section, key)
        value = written.value if isinstance(written, Reasoned) else written
        if value is None:
            continue
        values[key] = value
        if key in _COUNTS and (isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= 10**9):
            # Zero would be a pause in disguise that no report explains.
            raise wrong(f"{key} = {value!r}: expected a whole number from 1 on; to stop a provider pause it")
        if key in ("pipelining", "chunking") and not isinstance(value, bool):
            raise wrong(f"{key} = {value!r}: expected true or false")
        if key in _CHOICES and value not in _CHOICES[key]:
            raise wrong(f"{key} = {value!r}: expected one of {', '.join(_CHOICES[key])}")
        if key == "retry_after":
            try:
                Duration.parse(value)
            except ValueError as problem:
                raise wrong(f"{key}: {problem}") from None
    spans = [("messages_per_minute", 60), ("messages_per_hour", 3600), ("messages_per_day", 86_400)]
    for at, (short, short_s) in enumerate(spans):
        for long, long_s in spans[at + 1 :]:
            if short in values and long in values:
                most = values[short] * long_s // short_s
                if values[long] > most:
                    raise wrong(f"{long} = {values[long]} is never reached: {short} = {values[short]} allows {most}")
                if values[short] > values[long]:
                    raise wrong(f"{short} = {values[short]} is more than {long} = {values[long]} allows")


def _check_source(source: str, inner: SourceSection, file: str, bound: dict[str, str]) -> None:
    def wrong(problem: str) -> BudgetError:
        return BudgetError(file=file, section=f"source.{source}", problem=problem)

    if source == ALL_SOURCES:
        raise wrong("a source cannot be called *")
    try:
        address = str(ipaddress.ip_address(inner.bind))
    except ValueError:
        raise wrong(f"bind = {inner.bind!r}: expected an IPv4 or IPv6 address") from None
    if address in bound:
        raise wrong(f"bind = {inner.bind} is already the address of source {bound[address]}")
    bound[address] = source
    if not 0 <= inner.weight <= 1000:
        raise wrong(f"weight = {inner.weight}: expected 0 to 1000")
    if inner.warmup_day is not None and inner.warmup_day < 1:
        raise wrong(f"warmup_day = {inner.warmup_day}: days count from 1")
