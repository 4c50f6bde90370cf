"""Jinja2 in a box: templates from the campaign folder alone, no Python behind them, and an end to every loop.

What is stopped, always with the template's name and line: files outside the folder, attributes that lead into Python
(Jinja2's own sandbox), more than `MAX_STEPS` loop rounds and calls for one message, texts over `MAX_TEXT` by
multiplication, padding or replacing.

Rendering is done by one thread per environment: the step counter is an attribute.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from jinja2 import BaseLoader, Environment, StrictUndefined, Template, TemplateNotFound, nodes
from jinja2.exceptions import SecurityError, TemplateError, TemplateRuntimeError
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine.compose.values import NULL, text_of

MAX_STEPS = 1_000_000  # about a second; the largest honest digest we know of has some 10,000 entries
CALL_STEPS = 20  # a macro call takes as long as some twenty rounds of a loop
MAX_TEXT = 4_000_000
_METER = "__metered"
_WIDE_FORMAT = re.compile(r"%[-+ #0]*(?:\d*\.)?(?:\*|\d{5,})|\{[^{}]*(?:\d{5,}|\{)")
_DICT_METHODS = frozenset(dir(dict))
_PADDERS = frozenset({"ljust", "rjust", "center", "zfill", "expandtabs"})
COLUMNS = "columns"  # `columns["First Name"]` reaches a column whose name is no identifier


class OutsideFolder(TemplateError):
    """A template names a file outside the campaign folder."""


class FolderLoader(BaseLoader):
    """Loads templates below `folder`, and remembers their source for the fingerprint."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder.resolve()
        self.sources: dict[str, str] = {}

    def path(self, name: str) -> Path:
        """The file that `name` names; raises OutsideFolder, also where a link leads out."""
        path = (self._folder / name).resolve()
        if not path.is_relative_to(self._folder):
            raise OutsideFolder(f"{name!r} is outside the campaign folder")
        return path

    def get_source(self, environment: Environment, template: str) -> tuple[str, str | None, Callable[[], bool]]:
        if template not in self.sources:
            path = self.path(template)
            try:
                self.sources[template] = path.read_text("utf-8-sig")
            except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
                raise TemplateNotFound(template, f"there is no file {template!r} in the campaign folder") from None
            except UnicodeDecodeError as problem:
                raise TemplateError(f"{template} is not UTF-8: byte {problem.start}") from None
        return self.sources[template], str(self._folder / template), lambda: True


class Box(ImmutableSandboxedEnvironment):
    """The environment behind all three kinds of templates."""

    intercepted_binops = frozenset({"*", "**", "%", "+"})

    def __init__(self, loader: BaseLoader, filters: Mapping[str, Callable[..., Any]], *, autoescape: bool) -> None:
        super().__init__(
            loader=loader,
            autoescape=autoescape,
            undefined=StrictUndefined,
            finalize=text_of,
            auto_reload=False,
            cache_size=-1,
        )
        self.steps_left = MAX_STEPS
        self.filters.update(filters)
        self.filters[_METER] = self.metered
        self.filters.pop("random")  # a second attempt must be the same message
        self.filters.pop("pprint")
        self.globals.pop("lipsum")
        self.tests["none"] = lambda value: value is None or value == NULL
        self._guard_filters()

    def _guard_filters(self) -> None:
        for name, widths in (("center", (0,)), ("indent", (0,)), ("batch", (0,)), ("slice", (0,))):
            self.filters[name] = _bounded(name, self.filters[name], widths)
        replace = self.filters["replace"]

        def bounded_replace(eval_ctx: Any, s: Any, old: Any, new: Any, count: int | None = None) -> Any:
            check_length((len(str(s)) + 1) * (len(str(new)) + 1), "replace")
            return replace(eval_ctx, s, old, new, count)

        bounded_replace.jinja_pass_arg = replace.jinja_pass_arg  # type: ignore[attr-defined]
        self.filters["replace"] = bounded_replace
        plain_format = self.filters["format"]

        def bounded_format(value: Any, *args: Any, **kwargs: Any) -> Any:
            check_format(value)
            return plain_format(value, *args, **kwargs)

        self.filters["format"] = bounded_format

    # --- compiling

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all(nodes.For):
            loop.iter = nodes.Filter(loop.iter, _METER, [], [], None, None, lineno=loop.lineno)
        if any(name.name == COLUMNS for name in tree.find_all(nodes.Name)):
            _rename_columns(tree)
        tree.set_environment(self)
        return tree

    # --- running

    def begin(self) -> None:
        """A new message: all steps again."""
        self.steps_left = MAX_STEPS

    def charge(self, steps: int) -> None:
        """Takes steps from the message's allowance; raises SecurityError at its end."""
        self.steps_left -= steps
        if self.steps_left < 0:
            raise SecurityError(f"more than {MAX_STEPS:,} loop rounds and calls in one message: a loop without end?")

    def metered(self, items: Iterable[Any]) -> Iterable[Any]:
        """What a `for` goes through, paid for in advance."""
        if not hasattr(items, "__len__"):
            items = list(islice(items, self.steps_left + 1))
        self.charge(len(items) + 1)  # type: ignore[arg-type]
        return items

    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """A call in a template: safe things only, and each one `CALL_STEPS`."""
        self.charge(CALL_STEPS)
        if isinstance(obj, LoopContext) and args:
            args = (self.metered(args[0]), *args[1:])
        method = getattr(obj, "__name__", "")
        owner = getattr(getattr(obj, "__wrapped__", obj), "__self__", None)  # the sandbox wraps str.format
        if isinstance(owner, str):
            if method in _PADDERS:
                check_length(max((int(a) for a in (*args, *kwargs.values()) if isinstance(a, int)), default=0), method)
            elif method == "replace" and len(args) > 1:
                check_length((len(owner) + 1) * (len(str(args[1])) + 1), method)
            elif method in ("format", "format_map"):
                check_format(owner)
        return super().call(context, obj, *args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            if isinstance(left, int) and isinstance(right, int):
                _check_bits(left.bit_length() + right.bit_length())
            for text, times in ((left, right), (right, left)):
                if isinstance(text, str | list | tuple | bytes) and isinstance(times, int):
                    check_length(len(text) * times, "*")
        elif operator == "**":
            if isinstance(left, int) and isinstance(right, int):
                _check_bits(left.bit_length() * abs(right))
        elif operator == "%":
            if isinstance(left, str | bytes):
                check_format(str(left))
        elif isinstance(left, str | list | tuple | bytes):
            check_length(len(left), "+")
        return super().call_binop(context, operator, left, right)

    def getattr(self, obj: Any, attribute: str) -> Any:
        # The common case, a field of a struct: without the exception that asking a dict for an attribute costs.
        if isinstance(obj, dict) and attribute not in _DICT_METHODS:
            try:
                return obj[attribute]
            except KeyError:
                return self.undefined(obj=obj, name=attribute)
        return super().getattr(obj, attribute)


def check_length(length: int, what: str) -> None:
    """Refuses a text that would grow beyond all use."""
    if length > MAX_TEXT:
        raise SecurityError(f"{what!r} would make a text of {length:,} characters")


def _check_bits(bits: int) -> None:
    if bits > 10_000:
        raise SecurityError(f"a number of {bits:,} bits")


def check_format(text: Any) -> None:
    """Refuses a format with a width of five digits or one taken from a value."""
    text = str(text)
    if _WIDE_FORMAT.search(text):
        raise SecurityError(f"the format {text[:40]!r} has a width out of all use")


def _bounded(name: str, plain: Callable[..., Any], widths: tuple[int, ...]) -> Callable[..., Any]:
    first = 2 if hasattr(plain, "jinja_pass_arg") else 1

    def bounded(*args: Any, **kwargs: Any) -> Any:
        for value in (*(args[first + place] for place in widths if len(args) > first + place), *kwargs.values()):
            if isinstance(value, int) and value > 10_000:
                raise SecurityError(f"{name!r} by {value:,}")
        return plain(*args, **kwargs)

    if hasattr(plain, "jinja_pass_arg"):
        bounded.jinja_pass_arg = plain.jinja_pass_arg  # type: ignore[attr-defined]
    return bounded


def alias(column: str) -> str:
    """The identifier that stands for a column in templates: itself, or one made for it."""
    return column if column.isidentifier() else f"column_{column.encode().hex()}"


def _rename_columns(node: nodes.Node) -> None:
    """`columns["First Name"]` becomes a plain name, so that plan sees which column it is."""
    for field, child in node.iter_fields():
        if isinstance(child, list):
            for place, item in enumerate(child):
                if isinstance(item, nodes.Node):
                    child[place] = _renamed(item)
        elif isinstance(child, nodes.Node):
            setattr(node, field, _renamed(child))


def _renamed(node: nodes.Node) -> nodes.Node:
    if (
        isinstance(node, nodes.Getitem)
        and isinstance(node.node, nodes.Name)
        and node.node.name == COLUMNS
        and isinstance(node.arg, nodes.Const)
        and isinstance(node.arg.value, str)
    ):
        return nodes.Name(alias(node.arg.value), "load", lineno=node.lineno)
    _rename_columns(node)
    return node


def place_of(error: BaseException) -> tuple[str, int] | None:
    """Template name and line where the error arose, from the compiled template's frames; None where there is none."""
    if getattr(error, "lineno", None) and getattr(error, "name", None):
        return str(error.name), int(error.lineno)  # type: ignore[attr-defined]
    found = None
    trace = error.__traceback__
    while trace is not None:
        template = trace.tb_frame.f_globals.get("__jinja_template__")
        if isinstance(template, Template):
            found = (template.name or "template", template.get_corresponding_lineno(trace.tb_lineno))
        trace = trace.tb_next
    return found


def reason_of(error: BaseException) -> str:
    """The error in words, with template and line in front where they are known."""
    if isinstance(error, RecursionError):
        words = "the template calls itself without end"
    elif isinstance(error, TemplateNotFound | TemplateRuntimeError | TemplateError):
        words = str(error.message or error)
    else:
        words = f"{type(error).__name__}: {error}" if not str(error) else str(error)
    place = place_of(error)
    return f"{place[0]} line {place[1]}: {words}" if place else words
