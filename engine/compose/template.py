"""Templates of a campaign: found, surveyed for the columns they name, and compiled to what fills in a row.

A body template becomes a `Body`. Where the template is static text and values alone it is a list of encoded segments
with places for values; else its Jinja2 code, which yields encoded fragments (`fragments.py`). A header template
becomes a `Line`, plain text. Both check every name against the list's columns before the first row.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from jinja2 import Template, TemplateNotFound, TemplateSyntaxError, meta, nodes

from engine.compose.filters import make_filters
from engine.compose.fragments import FragmentBox, PlainBox, context_over
from engine.compose.sandbox import COLUMNS, FolderLoader, OutsideFolder, alias
from engine.compose.segments import Slot
from engine.compose.values import text_of
from engine.errors import EngineError, Exit

# What the engine knows of a row beside its columns. A column of the same name wins.
EXTRAS = ("unsubscribe_url", "campaign_id", "list_id", "row", "address", "subject", "preheader")

_BODY_TAG = re.compile(r"<body\b[^>]*>", re.IGNORECASE)
# The invisible characters behind it keep the body's first words out of that line.
_PREHEADER = (
    '<div style="display:none;max-height:0;overflow:hidden;mso-hide:all">{{ preheader }}'
    + "&#847;&zwnj;&nbsp;" * 60
    + "</div>"
)


class TemplateError(EngineError):
    """{place}: {problem}"""

    exit_code = Exit.TEMPLATE
    hint = "correct {place}; `engine preview --rows 0` shows what becomes of it."


class PreheaderLoader(FolderLoader):
    """Puts the hidden line that mail programs show beside the subject behind `<body>`, unless a template names it."""

    def get_source(self, environment: Any, template: str) -> tuple[str, str | None, Callable[[], bool]]:
        source, file, fresh = super().get_source(environment, template)
        if "preheader" not in source:
            source = _BODY_TAG.sub(lambda tag: tag[0] + _PREHEADER, source, count=1)
        return source, file, fresh


class Surveyed:
    """A template and what it includes, extends and imports: parsed, with the names it wants from a row."""

    def __init__(self, box: PlainBox, place: str, source: str | None) -> None:
        self.box, self.place = box, place
        self.names: dict[str, tuple[str, int]] = {}
        self.trees: dict[str, nodes.Template] = {}
        self._walk(place, source, None)
        try:
            # Compiling the root now finds unknown filters and tests, in included files too.
            self.template: Template = self._compile(source) if source is not None else box.get_template(place)
            for name in list(self.trees)[1:]:
                box.get_template(name)
        except Exception as error:
            raise _refused(error, place) from None

    def _compile(self, source: str) -> Template:
        # As `from_string`, which would forget the name that errors are told with.
        box = self.box
        return box.template_class.from_code(box, box.compile(source, self.place), box.make_globals(None))

    @property
    def tree(self) -> nodes.Template:
        return self.trees[self.place]

    def _walk(self, name: str, source: str | None, wanted_by: tuple[str, int] | None) -> None:
        if name in self.trees:
            return
        try:
            if source is None:
                assert self.box.loader is not None
                source = self.box.loader.get_source(self.box, name)[0]
            self.trees[name] = tree = self.box.parse(source, name)
            undeclared = meta.find_undeclared_variables(tree)
        except Exception as error:
            if wanted_by and isinstance(error, TemplateNotFound | OutsideFolder):
                raise TemplateError(place=f"{wanted_by[0]} line {wanted_by[1]}", problem=error.message) from None
            raise _refused(error, name) from None
        lines = {node.name: node.lineno for node in reversed(list(tree.find_all(nodes.Name)))}
        for variable in undeclared:
            if variable == COLUMNS:
                raise TemplateError(
                    place=f"{name} line {lines.get(COLUMNS, 1)}", problem='write `columns["Name of the column"]`'
                )
            if variable not in self.box.globals:
                self.names.setdefault(variable, (name, lines.get(variable, 1)))
        for node in tree.find_all((nodes.Include, nodes.Extends, nodes.Import, nodes.FromImport)):
            self._follow(node, name)

    def _follow(self, node: nodes.Node, name: str) -> None:
        try:
            wanted = node.template.as_const()  # type: ignore[attr-defined]
        except nodes.Impossible:
            raise TemplateError(
                place=f"{name} line {node.lineno}",
                problem="the name of an included file must be fixed, so that `plan` knows which columns are read",
            ) from None
        choices = [wanted] if isinstance(wanted, str) else list(wanted)
        missing: TemplateError | None = None
        for choice in choices:
            try:
                self._walk(str(choice), None, (name, node.lineno))
                return
            except TemplateError as problem:
                if not str(problem.fields.get("problem", "")).startswith("there is no file"):
                    raise
                missing = problem
        if missing and not getattr(node, "ignore_missing", False):
            raise missing

    def check(self, schema: pa.Schema) -> None:
        """Raises TemplateError for a name, or a field of a struct, that the list lacks, with the nearest one."""
        known = {alias(column): column for column in schema.names}
        # In the order of the text, so that the same template is refused by the same name each time.
        for variable, (file, line) in sorted(self.names.items(), key=lambda named: (named[1], named[0])):
            if variable not in known and variable not in EXTRAS:
                raise TemplateError(
                    place=f"{file} line {line}",
                    problem=f"the list has no column {_shown(variable)!r}{_nearest(_shown(variable), schema.names)}",
                )
        for name, tree in self.trees.items():
            stored = {node.name for node in tree.find_all(nodes.Name) if node.ctx != "load"}
            for node in tree.find_all(nodes.Getattr):
                owner = node.node
                if not isinstance(owner, nodes.Name) or owner.name in stored or owner.name not in known:
                    continue
                kind = schema.field(known[owner.name]).type
                fields = [field.name for field in kind] if pa.types.is_struct(kind) else [node.attr]
                if node.attr not in fields and node.attr not in dir(dict):
                    raise TemplateError(
                        place=f"{name} line {node.lineno}",
                        problem=f"{known[owner.name]!r} has no field {node.attr!r}{_nearest(node.attr, fields)}",
                    )


def _shown(variable: str) -> str:
    if variable.startswith("column_"):
        try:
            return bytes.fromhex(variable.removeprefix("column_")).decode()
        except ValueError:
            pass
    return variable


def _nearest(name: str, names: Iterable[str]) -> str:
    folded = {known.casefold(): known for known in names}
    near = difflib.get_close_matches(name.casefold(), folded, 1, 0.5)
    if near:
        return f"; did you mean {folded[near[0]]!r}?"
    return f"; it has {', '.join(map(repr, list(folded.values())[:12]))}"


def _refused(error: Exception, place: str) -> EngineError:
    if isinstance(error, EngineError):
        return error
    if isinstance(error, TemplateSyntaxError):
        # Jinja2 names the survey's own compiler where a filter is unknown.
        name = place if error.name in (None, "<introspection>") else error.name
        return TemplateError(place=f"{name} line {error.lineno}", problem=str(error.message).rstrip("."))
    return TemplateError(place=place, problem=(getattr(error, "message", None) or str(error)).rstrip("."))


Variables = dict[str, Any]


class Body:
    """A compiled body template. `fill` gives the fragments for a row."""

    def __init__(self, surveyed: Surveyed, places: Mapping[str, int], plain: frozenset[str]) -> None:
        box = surveyed.box
        assert isinstance(box, FragmentBox)
        self._box = box
        self._render = surveyed.template.root_render_func
        self._template = surveyed.template
        is_html = box.autoescape is True
        encode = box.encode_html if is_html else box.encode_text
        parts = _segments(surveyed.tree, plain)
        self.segments: list[str | Slot] | None = None
        if parts is not None:
            self.segments = [
                box.encode_static(part) if isinstance(part, str) else Slot(places[part[0]], part[1], is_html, encode)
                for part in parts
            ]

    @property
    def leading(self) -> str:
        """The static fragment every row begins with; "" where that is not known."""
        return self.segments[0] if self.segments and isinstance(self.segments[0], str) else ""

    def fill(self, values: Sequence[Any], variables: Variables) -> Iterable[str]:
        """The fragments of a row, in order. `values` serve a body of segments, `variables` any other."""
        if self.segments is not None:
            return [part if isinstance(part, str) else part.fragment(values) for part in self.segments]
        self._box.begin()
        return self._render(context_over(self._template, variables))


class Line:
    """A compiled header template: `text` gives its plain text for a row."""

    def __init__(self, surveyed: Surveyed, places: Mapping[str, int], plain: frozenset[str]) -> None:
        self._box = surveyed.box
        self._template = surveyed.template
        parts = _segments(surveyed.tree, plain)
        self.needs_variables = parts is None
        self._static: list[str] = []
        self._slots: list[tuple[int, int, str]] = []
        for part in parts or ():
            if isinstance(part, str):
                self._static.append(part)
            else:
                self._slots.append((len(self._static), places[part[0]], part[1]))
                self._static.append("")
        self.fixed = "".join(self._static) if parts is not None and not self._slots else None

    def text(self, values: Sequence[Any], variables: Variables) -> str:
        """The field's text for a row, not yet encoded. `values` serve texts and values alone, `variables` the rest."""
        if self.needs_variables:
            self._box.begin()
            return "".join(self._template.root_render_func(context_over(self._template, variables)))
        out = self._static.copy()
        for at, index, default in self._slots:
            value = values[index]
            if type(value) is str:
                out[at] = value
            else:
                out[at] = default if value is None or value != value else str(text_of(value))
        return "".join(out)


def _segments(tree: nodes.Template, plain: frozenset[str]) -> list[str | tuple[str, str]] | None:
    """Static texts and (name, default) in order, neighbours joined; None where the template needs Jinja2."""
    parts: list[str | tuple[str, str]] = []
    for node in tree.body:
        if not isinstance(node, nodes.Output):
            return None
        for child in node.nodes:
            part = _segment(child, plain)
            if part is None:
                return None
            if isinstance(part, str) and parts and isinstance(parts[-1], str):
                parts[-1] += part
            elif part != "":
                parts.append(part)
    return parts


def _segment(node: nodes.Expr, plain: frozenset[str]) -> str | tuple[str, str] | None:
    match node:
        case nodes.TemplateData():
            return node.data
        case nodes.Name(name=name) if name in plain:
            return name, ""
        case nodes.Filter(node=nodes.Name(name=name), name="default" | "d", args=[nodes.Const(value=str(default))]) if (
            name in plain and not node.kwargs and node.dyn_args is None and node.dyn_kwargs is None
        ):
            return name, default
    return None


class Workshop:
    """Where a campaign's templates are surveyed: one loader, one set of filters, three environments."""

    def __init__(self, folder: Path, language: str | None, timezone: str, *, canonical: bool, preheader: bool) -> None:
        try:
            filters = make_filters(language, timezone)
        except ValueError as problem:
            raise TemplateError(place="campaign.toml [message]", problem=str(problem)) from None
        self.files = FolderLoader(folder)
        html_files = PreheaderLoader(folder) if preheader else self.files
        self.html = FragmentBox(html_files, filters, autoescape=True, canonical=canonical)
        self.text = FragmentBox(self.files, filters, autoescape=False, canonical=canonical)
        self.header = PlainBox(self.files, filters, autoescape=False)
        self._loaders = (self.files, html_files)

    @property
    def sources(self) -> dict[str, str]:
        """Every template file read, by name."""
        return {name: source for loader in self._loaders for name, source in loader.sources.items()}

    def html_body(self, name: str) -> Surveyed:
        """The template file of the HTML part."""
        return Surveyed(self.html, name, None)

    def text_body(self, name: str, source: str | None = None) -> Surveyed:
        """The template file of the text part, or `source` for it."""
        return Surveyed(self.text, name, source)

    def line(self, key: str, source: str) -> Surveyed:
        """A template that stands in the settings under `key`."""
        return Surveyed(self.header, f"campaign.toml, {key}", source)

    def globals(self) -> Variables:
        """What variables begin with."""
        return dict(self.header.globals)
