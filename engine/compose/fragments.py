"""A Jinja2 environment whose output is quoted-printable already: static text once, values as they come.

How: the code generator knows for every output whether it flows straight into the message (*direct*: Jinja2 compiles it
to `yield`) or is collected first, for a macro, a `{% set %}` block, a filter block, a call block, a recursive loop
(*captured*). Direct output is encoded where it is written; captured output stays plain text, and is encoded when what
was made of it is printed. Where encoded text has to become a value again (`super()`, `self.block()`, a block or
include inside a captured stretch) it is decoded, which costs more and gives the same. So every template Jinja2 takes
works, and what is mere text, values, conditions and loops is encoded once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from jinja2 import BaseLoader, Template, TemplateNotFound, nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.environment import TemplateModule
from jinja2.runtime import Context
from markupsafe import Markup, escape

from engine.compose.sandbox import Box, check_length
from engine.compose.segments import escaped
from engine.compose.values import text_of
from formats.message import SOFT_BREAK, decode_qp, qp_fragment, short_fragment

Encode = Callable[[Any], str]


def html_encoder(*, canonical: bool = False) -> Encode:
    """What turns a value into a fragment of an HTML part: text form, escaped unless safe, quoted-printable."""

    def html_fragment(value: Any) -> str:
        if type(value) is str:
            # Letters, digits, blanks: most values, and nothing of them to escape.
            words = value if canonical else value.replace(" ", "")
            if words.isalnum() and value.isascii() and len(value) < 76 and value[0] != "F":
                return value + SOFT_BREAK
            value = escaped(value)
            return short_fragment(value, canonical) or qp_fragment(value, canonical=canonical)
        if value is None:
            return ""
        return qp_fragment(str(escape(text_of(value))), canonical=canonical)

    return html_fragment


def text_encoder(*, canonical: bool = False) -> Encode:
    """What turns a value into a fragment of a text part: text form, quoted-printable."""

    def text_fragment(value: Any) -> str:
        if type(value) is str:
            words = value if canonical else value.replace(" ", "")
            if words.isalnum() and value.isascii() and len(value) < 76 and value[0] != "F":
                return value + SOFT_BREAK
            return short_fragment(value, canonical) or qp_fragment(value, canonical=canonical)
        if value is None:
            return ""
        return qp_fragment(str(text_of(value)), canonical=canonical)

    return text_fragment


class BoxGenerator(CodeGenerator):
    """Jinja2's code generator with the text forms of values in constants and in `~`."""

    def _output_child_to_const(self, node: nodes.Expr, frame: Frame, finalize: Any) -> str:
        if isinstance(node, nodes.TemplateData):
            return super()._output_child_to_const(node, frame, finalize)
        if frame.eval_ctx.volatile:
            raise nodes.Impossible
        const = text_of(node.as_const(frame.eval_ctx))
        return str(escape(const) if frame.eval_ctx.autoescape else const)

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        if frame.eval_ctx.volatile:
            self.write("environment.joined(context.eval_ctx.autoescape, (")
        else:
            self.write(f"environment.joined({frame.eval_ctx.autoescape!r}, (")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")


class FragmentGenerator(BoxGenerator):
    """Encodes direct output (see the module's docstring)."""

    _direct = False

    def visit_Output(self, node: nodes.Output, frame: Frame) -> None:
        outer, self._direct = self._direct, frame.buffer is None
        try:
            super().visit_Output(node, frame)
        finally:
            self._direct = outer

    def _output_const_repr(self, group: Iterable[Any]) -> str:
        if not self._direct:
            return super()._output_const_repr(group)
        environment = self.environment
        assert isinstance(environment, FragmentBox)
        return repr(environment.encode_static("".join(group)))

    def _output_child_pre(self, node: nodes.Expr, frame: Frame, finalize: Any) -> None:
        if not self._direct:
            super()._output_child_pre(node, frame, finalize)
        elif frame.eval_ctx.volatile:
            self.write("(environment.encode_html if context.eval_ctx.autoescape else environment.encode_text)(")
        else:
            self.write("environment.encode_html(" if frame.eval_ctx.autoescape else "environment.encode_text(")

    def _output_child_post(self, node: nodes.Expr, frame: Frame, finalize: Any) -> None:
        if self._direct:
            self.write(")")
        else:
            super()._output_child_post(node, frame, finalize)

    # What calls, filter blocks and recursive loops return is finished text: encoded, never escaped.
    def start_write(self, frame: Frame, node: nodes.Node | None = None) -> None:
        super().start_write(frame, node)
        if frame.buffer is None:
            self.write("environment.encode_text(")

    def end_write(self, frame: Frame) -> None:
        if frame.buffer is None:
            self.write(")")
        super().end_write(frame)

    # Events of blocks and includes: fragments already.
    def simple_write(self, s: str, frame: Frame, node: nodes.Node | None = None) -> None:
        CodeGenerator.start_write(self, frame, node)
        self.write(s if frame.buffer is None else f"environment.decoded(({s},))")
        CodeGenerator.end_write(self, frame)

    def visit_Include(self, node: nodes.Include, frame: Frame) -> None:
        if node.with_context:
            super().visit_Include(node, frame)
            return
        self.start_write(frame, node)
        self.write("environment.included(")
        self.visit(node.template, frame)
        self.write(f", {self.name!r}, {node.ignore_missing!r})")
        self.end_write(frame)


class _FragmentTemplate(Template):
    """A template whose module (what `import` gives) is plain text."""

    def make_module(
        self, vars: dict[str, Any] | None = None, shared: bool = False, locals: Any = None
    ) -> TemplateModule:
        context = self.new_context(vars, shared, locals)
        environment = self.environment
        assert isinstance(environment, FragmentBox)
        return TemplateModule(self, context, [environment.decoded(self.root_render_func(context))])


class PlainBox(Box):
    """Renders to plain text: header fields, and the reference that fragments are compared with."""

    code_generator_class = BoxGenerator

    def joined(self, autoescape: bool, parts: Iterable[Any]) -> str:
        """The `~` operator."""
        if not autoescape:
            text = "".join([str(text_of(part)) for part in parts])
        else:
            forms = [text_of(part) for part in parts]
            if any(hasattr(form, "__html__") for form in forms):
                text = Markup("").join(forms)
            else:
                text = "".join(map(str, forms))
        check_length(len(text), "~")
        return text


class FragmentBox(PlainBox):
    """Renders to fragments: join what `root_render_func` yields, and it is a quoted-printable body."""

    code_generator_class = FragmentGenerator
    template_class = _FragmentTemplate

    def __init__(
        self,
        loader: BaseLoader,
        filters: dict[str, Callable[..., Any]],
        *,
        autoescape: bool,
        canonical: bool = False,
    ) -> None:
        super().__init__(loader, filters, autoescape=autoescape)
        self.canonical = canonical
        self.encode_html = html_encoder(canonical=canonical)
        self.encode_text = text_encoder(canonical=canonical)

    def encode_static(self, text: str) -> str:
        """The fragment of static text."""
        return qp_fragment(text, canonical=self.canonical)

    def decoded(self, fragments: Iterable[str]) -> str:
        """The text that fragments encode."""
        return decode_qp("".join(fragments))

    def concat(self, pieces: Iterable[str]) -> str:
        """What compiled templates join with: buffers of captured text are lists, and stay as they are; what `super()`
        and `self.block()` join is a block's generator of fragments."""
        return "".join(pieces) if type(pieces) is list else self.decoded(pieces)

    def included(self, name: Any, parent: str, ignore_missing: bool) -> str:
        """The text of an include without context."""
        try:
            template = self.get_or_select_template(name, parent)
        except TemplateNotFound:
            if ignore_missing:
                return ""
            raise
        return str(template._get_default_module())


def context_over(template: Template, variables: dict[str, Any]) -> Context:
    """A context over `variables` themselves, globals among them: nothing is copied for a message."""
    return Context(template.environment, variables, template.name, template.blocks)
