"""The text part made from the HTML part, by inscriptis.

Where it can, once a campaign: the template's own tags travel through the conversion as marks, and the result is a text
template, so that a row costs no HTML parsing. Where a tag would be lost or change places (inheritance, includes,
macros, tags between table rows) the finished HTML is converted for each row, at some 1 to 10 ms a message.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from html import escape

from inscriptis import get_text
from inscriptis.css_profiles import STRICT_CSS_PROFILE
from inscriptis.model.config import ParserConfig
from jinja2 import Environment

_FIRST_MARK = 0xF0000  # private use, plane 15
_MARK = re.compile("[\U000f0000-\U000ffffd]")
_BLANK_LINES = re.compile(r"\n[ \t]*\n(?:[ \t]*\n)+")
_TRAILING = re.compile(r"[ \t]+$", re.MULTILINE)
_WHOLE_TEMPLATE = frozenset({"extends", "include", "import", "from", "macro", "call", "filter", "block"})
_OPENS_JINJA = re.compile(r"\{(?=[{%#])")


def html_to_text(html: str) -> str:
    """Readable text: links as `[words](address)`, blank lines at most one, no blanks at line ends."""
    text: str = get_text(html, ParserConfig(css=STRICT_CSS_PROFILE, display_links=True, display_anchors=False))
    return _BLANK_LINES.sub("\n\n", _TRAILING.sub("", text)).strip("\n") + "\n"


def text_template(source: str) -> str | None:
    """The text template of an HTML template; None where it must be made for each row."""
    page, tags = _marked(source)
    if tags is None:
        return None
    text = html_to_text(page)
    # Statements must all have come through, in their order, and each value that did must stand between the same two: it
    # may be gone (an attribute that text does not show) or follow its neighbour (a link's address its words).
    if [mark for mark in _MARK.findall(text) if mark in tags and tags[mark][1] == "%"] != [
        mark for mark, tag in tags.items() if tag[1] == "%"
    ]:
        return None
    home = _stretches(tags, tags)
    if any(home[mark] != stretch for mark, stretch in _stretches(_MARK.findall(text), tags).items()):
        return None
    out: list[str] = []
    for piece in re.split(f"({_MARK.pattern})", text):
        out.append(tags[piece] if piece in tags else _OPENS_JINJA.sub("{{ '{' }}", piece))
    # A statement on a line of its own leaves no blank line.
    return re.sub(r"^[ \t]*((?:\{%[^\n]*?%\}[ \t]*)+)\n", r"\1", "".join(out), flags=re.MULTILINE)


def _stretches(marks: Iterable[str], tags: dict[str, str]) -> dict[str, int]:
    """For each value's mark, how many statements stand before it."""
    count, stretches = 0, {}
    for mark in marks:
        if mark not in tags:
            continue
        if tags[mark][1] == "%":
            count += 1
        else:
            stretches[mark] = count
    return stretches


def _marked(source: str) -> tuple[str, dict[str, str] | None]:
    """The source with each tag as one private-use character, and what each stands for."""
    if _MARK.search(source):
        return source, None
    tags: dict[str, str] = {}
    page: list[str] = []
    inside: list[str] | None = None
    for _, kind, value in Environment().lex(source):
        if kind in ("variable_begin", "block_begin"):
            inside = ["{{" if kind == "variable_begin" else "{%"]
        elif inside is not None and kind in ("variable_end", "block_end"):
            mark = chr(_FIRST_MARK + len(tags))
            tags[mark] = "".join(inside) + ("}}" if kind == "variable_end" else "%}")
            page.append(mark)
            inside = None
        elif inside is not None:
            if kind == "name" and inside[0] == "{%" and value in _WHOLE_TEMPLATE and not "".join(inside[1:]).strip():
                return source, None
            inside.append(value)
        elif kind == "data":
            page.append(value)
        # comments and raw markers go
    if len(tags) > 60_000:
        return source, None
    return "".join(page), tags


def text_as_html(text: str) -> str:
    """Text as a page, for previews."""
    return f"<!doctype html><meta charset=utf-8><pre>{escape(text)}</pre>"
