# ruff: noqa: E501 - template sources and tables read better in one line
"""Templates: the same text as plain Jinja2, nulls, types, errors with file and line, and an end to every loop."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2 import DictLoader, StrictUndefined
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine.compose.filters import make_filters
from engine.compose.fragments import FragmentBox, context_over
from engine.compose.render import RowProblem
from engine.compose.segments import SegmentBody
from engine.compose.template import Body, Surveyed, TemplateError, Workshop
from engine.compose.values import NULL, Null, intake_for
from engine.compose.values import text_of as form_of
from engine.errors import EngineError, Exit
from formats.message import decode_qp, normalise_line_ends
from tests.compose.conftest import MakeCampaign, check_wire_rules, text_of

# --- a grammar of templates -----------------------------------------------------------------------

NAMES = ("first", "last", "n", "items", "person")
TEXT = st.lists(
    st.sampled_from([*"ab .=\t\n\r<>&'\"éß🌛\0\x0c-_", "From ", "\u2028", "\n.", "x" * 70]), max_size=12
).map("".join)
VALUE = st.one_of(TEXT, st.text(max_size=30), st.just("y" * 90))
EXPRESSION = st.sampled_from(
    [
        "first", "last", "n", "person.name", "person['city']", "first|upper", "last|default('you')", "first|length", "n + 1",
        "first ~ '=' ~ last", "items|length", "first|e", "'<b>'|safe", "m(first)", "(first|safe)", "items|map(attribute='k')|join(', ')",
        "first if n > 1 else last", "first|replace('a', '<a>')", "'lit=eral <'", "3", "first.strip()", "first|trim|title",
    ]
).map(lambda e: "{{ " + e + " }}")  # fmt: skip


def blocks(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.one_of(
        st.tuples(inner, inner).map(lambda t: "{% if n > 2 %}" + t[0] + "{% else %}" + t[1] + "{% endif %}"),
        inner.map(lambda t: "{% for i in items %}" + t + "{{ i.k }}{{ loop.index }}{% else %}none{% endfor %}"),
        inner.map(lambda t: "{% for i in items %}{{ i.k }}" + t + "{% endfor %}"),
        inner.map(lambda t: "{% set x %}" + t + "{% endset %}{{ x }}{{ x|upper }}"),
        inner.map(lambda t: "{% filter upper %}" + t + "{% endfilter %}"),
        inner.map(lambda t: "{% macro p(a) %}[" + t + "{{ a }}]{% endmacro %}{{ p(first) }}{{ p('<') }}"),
        inner.map(lambda t: "{% call m('c') %}" + t + "{% endcall %}"),
        inner.map(lambda t: "{% with y = first %}{{ y }}" + t + "{% endwith %}"),
        inner.map(lambda t: "{% autoescape false %}" + t + "{{ first }}{% endautoescape %}"),
        inner.map(lambda t: "{% for i in items recursive %}" + t + "{{ i.k }}{% endfor %}"),
        inner.map(lambda t: "{% include 'part' %}" + t),
        inner.map(lambda t: "{% filter upper %}{% include 'part' %}{% endfilter %}" + t),
        inner.map(lambda t: "{% import 'lib' as lib %}{{ lib.q(last) }}" + t),
    )


TEMPLATE = st.recursive(
    st.one_of(TEXT, EXPRESSION, EXPRESSION),
    lambda inner: st.one_of(st.tuples(inner, inner).map("".join), blocks(inner)),
    max_leaves=8,
)
FILTERS = make_filters("en", "UTC")
PARTS = {
    "part": "part={{ n|default('no n') }} é\n",
    "lib": "{% macro q(a) %}q<{{ a }}>={% endmacro %}text of lib",
    "base": "head {% block a %}A={{ first }}{% endblock %}\n{% block b %}B{% endblock %} foot {{ self.a() }}",
}
MACRO = "{% macro m(a) %}({{ a }}{% if caller is defined %}{{ caller() }}{% endif %}){% endmacro %}"
ROW = st.fixed_dictionaries(
    {
        "first": VALUE,
        "last": VALUE,
        "n": st.integers(-5, 10**20),
        "items": st.lists(st.fixed_dictionaries({"k": VALUE}), max_size=3),
        "person": st.fixed_dictionaries({"name": VALUE, "city": VALUE}),
    }
)


def plain_jinja(autoescape: bool, files: dict[str, str]) -> ImmutableSandboxedEnvironment:
    """Jinja2 as it comes, with our filters and text forms."""
    env = ImmutableSandboxedEnvironment(
        loader=DictLoader(files), autoescape=autoescape, undefined=StrictUndefined, finalize=form_of
    )
    env.filters.update(FILTERS)
    return env


def settle(text: str) -> str:
    return "".join("\ufffd" if "\ud800" <= c <= "\udfff" else c for c in normalise_line_ends(text))


@settings(deadline=None, max_examples=120)
@given(template=TEMPLATE, row=ROW, autoescape=st.booleans(), canonical=st.booleans(), inherits=st.booleans())
def test_any_template_decodes_to_what_plain_jinja2_renders(
    template: str, row: dict[str, Any], autoescape: bool, canonical: bool, inherits: bool
) -> None:
    row = {name: settle_value(value) for name, value in row.items()}
    if inherits and "{% block" not in template:
        template = "{% extends 'base' %}{% block a %}" + MACRO + template + "{{ super() }}{% endblock %}"
    else:
        # Only here: inside a captured stretch Jinja2 itself writes such an include ahead of it.
        template = MACRO + template + "{% include 'part' without context %}"
    files = {**PARTS, "main": template}
    wanted = plain_jinja(autoescape, files).get_template("main").render(row)
    box = FragmentBox(DictLoader(files), FILTERS, autoescape=autoescape, canonical=canonical)
    ours = box.get_template("main")
    body = "".join(ours.root_render_func(context_over(ours, {**box.globals, **row})))
    assert decode_qp(body) == settle(wanted)
    if body:
        check_wire_rules(b"X: y\r\n\r\n" + body.encode())


def settle_value(value: Any) -> Any:
    match value:
        case str():
            return settle(value)
        case list():
            return [settle_value(item) for item in value]
        case dict():
            return {name: settle_value(item) for name, item in value.items()}
    return value


@settings(deadline=None, max_examples=120)
@given(
    texts=st.lists(TEXT, min_size=1, max_size=5),
    row=st.lists(st.one_of(VALUE, st.none(), st.integers(), st.floats(allow_infinity=False)), min_size=3, max_size=3),
    canonical=st.booleans(),
    is_html=st.booleans(),
)  # fmt: skip
def test_segments_give_the_text_of_plain_jinja2(
    texts: list[str], row: list[Any], canonical: bool, is_html: bool
) -> None:
    names = ("a", "b", "c")
    source = "{{ a|default('<none>') }}"
    for number, text in enumerate(texts):
        source += text + "{{ " + names[number % 3] + " }}"
    box = FragmentBox(DictLoader({"main": source}), FILTERS, autoescape=is_html, canonical=canonical)
    body = Body(Surveyed(box, "main", None), {"a": 0, "b": 1, "c": 2}, frozenset(names))
    assert body.segments is not None
    together = b"".join(SegmentBody(body.segments, canonical=canonical).fill(row)).decode()
    alone = "".join(body.fill(row, {}))
    seen = {
        name: None if v is None or v != v else settle(v) if isinstance(v, str) else v
        for name, v in zip(names, row, strict=True)
    }
    wanted = settle(plain_jinja(is_html, {"main": source}).get_template("main").render(seen))
    # The values' own line ends are settled before; a CR that ends one value and an LF that begins the next are two.
    assert decode_qp(together) == decode_qp(alone) == wanted
    check_wire_rules(b"X: y\r\n\r\n" + (together or "\r\n").encode())


# --- values ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "kind", "text"),
    [
        (9007199254740993, pa.int64(), "9007199254740993"),
        (0, pa.int32(), "0"),
        (True, pa.bool_(), "true"),
        (False, pa.bool_(), "false"),
        (0.1 + 0.2, pa.float64(), "0.30000000000000004"),
        (3.0, pa.float64(), "3"),
        (1e22, pa.float64(), "10000000000000000000000"),
        (float("nan"), pa.float64(), ""),
        (Decimal("12.50"), pa.decimal128(9, 2), "12.50"),
        (Decimal("0.00"), pa.decimal128(9, 2), "0.00"),
        (dt.date(2026, 3, 29), pa.date32(), "2026-03-29"),
        (dt.time(7, 5), pa.time64("us"), "07:05:00"),
        (
            dt.datetime(2026, 3, 29, 1, 30, tzinfo=dt.UTC),
            pa.timestamp("us", "Europe/Berlin"),
            "2026-03-29 03:30:00+02:00",
        ),
        (dt.datetime(2026, 3, 29, 1, 30), pa.timestamp("us"), "2026-03-29 01:30:00"),
        (b"caf\xc3\xa9", pa.binary(), "café"),
        (b"\xff\xfe", pa.binary(), "//4="),
        (["a", None, "c"], pa.list_(pa.string()), "a, , c"),
        ({"x": 1, "y": None}, pa.struct([("x", pa.int8()), ("y", pa.string())]), "x: 1, y: "),
        ([("k", "v")], pa.map_(pa.string(), pa.string()), "k: v"),
        ("Lyon", pa.dictionary(pa.int8(), pa.string()), "Lyon"),
        ("Lyon", pa.large_string(), "Lyon"),
        (None, pa.int64(), ""),
        (None, pa.string(), ""),
        (None, pa.timestamp("us"), ""),
    ],
)
def test_every_type_has_its_text_form(campaign: MakeCampaign, value: Any, kind: pa.DataType, text: str) -> None:
    schema = pa.schema([("v", kind), ("list", pa.list_(kind))])
    files = {
        "text.txt": "[{{ v }}] {{ v ~ '' }}|{% for i in list %}[{{ i }}]{% endfor %}",
        "page.html": "[{{ v|string }}]",
    }
    made = campaign(files).open({"v": value, "list": [value]}, schema=schema)
    plain, html = made.iter_parts()
    assert text_of(plain) == f"[{text}] {text}|[{text}]"
    assert text_of(html) == f"[{text}]"
    assert (
        text_of(
            campaign({"text.txt": "[{{ v }}]", "page.html": "."})
            .open({"v": value, "list": []}, schema=schema)
            .get_body(("plain",))
        )
        == f"[{text}]"
    )


def test_t051_t115_null_is_empty_or_the_default_and_zero_is_zero(campaign: MakeCampaign) -> None:
    source = (
        "{{ name }}|{{ name|default('friend') }}|{{ zero|default(5) }}|{{ empty|default('x') }}|{{ empty|default('x', true) }}|"
        "{% if name %}yes{% else %}no{% endif %}|{{ name is none }}|{{ 'Hi ' ~ name }}|{{ name|upper }}|{{ p.x }}{{ p.y|d('z') }}|"
        "{{ name|int }}|{{ m.missing|default('m') }}|{{ name == none }}|{{ when|date|default('soon') }}"
    )
    schema = pa.schema(
        [("name", pa.string()), ("zero", pa.int64()), ("empty", pa.string()), ("when", pa.date32()),
         ("p", pa.struct([("x", pa.string()), ("y", pa.string())])), ("m", pa.map_(pa.string(), pa.string()))]
    )  # fmt: skip
    made = campaign({"text.txt": source}).open(
        {"name": None, "zero": 0, "empty": "", "p": {"x": None, "y": None}, "m": [], "when": None}, schema=schema
    )
    assert text_of(made) == "|friend|0||x|no|true|Hi ||z|0|m|true|soon"


@pytest.mark.parametrize("word", ["None", "nan", "NaT"])
def test_a_row_of_nulls_never_says_none(campaign: MakeCampaign, word: str) -> None:
    kinds = [
        pa.int64(),
        pa.float64(),
        pa.string(),
        pa.timestamp("us"),
        pa.list_(pa.string()),
        pa.struct([("x", pa.float64())]),
    ]
    schema = pa.schema([(f"c{n}", kind) for n, kind in enumerate(kinds)])
    source = " ".join(f"{{{{ c{n} }}}}" for n in range(len(kinds)))
    made = campaign({"text.txt": source}, subject=source + "!").send({}, schema=schema)
    assert word.encode() not in made.content


def test_calculating_with_a_null_names_it(campaign: MakeCampaign) -> None:
    made = campaign({"text.txt": "ok\n{{ price * 2 }}"})
    with pytest.raises(RowProblem, match=r"text.txt line 2: price is null") as problem:
        made.send({"price": None}, schema=pa.schema([("price", pa.int64())]))
    assert problem.value.reason == "render"


def test_filters_know_locale_and_zone(campaign: MakeCampaign) -> None:
    source = (
        "{{ d|date }} {{ d|date('d. MMMM yyyy') }} {{ t|time('short') }} {{ t|datetime('short', tz='America/New_York') }} "
        "{{ n|number }} {{ n|number(1) }} {{ n|money('EUR') }} {{ n|money('USD', locale='en-US') }} {{ 0.256|percent(1) }}"
    )
    made = campaign({"text.txt": source}, language="de", timezone="Europe/Berlin").open(
        {"d": dt.date(2026, 3, 1), "t": dt.datetime(2026, 3, 29, 1, 30, tzinfo=dt.UTC), "n": Decimal("1234.50")},
        schema=pa.schema([("d", pa.date32()), ("t", pa.timestamp("us", "UTC")), ("n", pa.decimal128(9, 2))]),
    )
    wanted = "01.03.2026 1. März 2026 03:30 28.03.26, 21:30 1.234,5 1.234,5 1.234,50 € $1,234.50 25,6 %"
    assert text_of(made).replace("\u202f", " ").replace("\xa0", " ") == wanted


def test_one_instant_in_two_zones_is_two_texts() -> None:
    show = make_filters("en", "UTC")["time"]
    moment = dt.datetime(2026, 1, 1, 12, tzinfo=dt.UTC)
    assert show(moment, "HH:mm", tz="Europe/Paris") == "13:00"
    assert show(moment, "HH:mm", tz="UTC") == "12:00"


def test_null_compares_like_none() -> None:
    assert Null(name="x") == NULL
    assert NULL == None  # noqa: E711
    assert intake_for("x", pa.float64())(float("nan")) == NULL


# --- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("a\n{{ frist }}", r"page.html line 2: the list has no column 'frist'; did you mean 'first'\?"),
        ("a\n{{ columns['Frist Name'] }}", r"line 2: the list has no column 'Frist Name'; did you mean 'First Name'\?"),
        ("a\n{{ columns[first] }}", r"line 2: write"),
        ("a\n{{ person.nmae }}", r"page.html line 2: 'person' has no field 'nmae'; did you mean 'name'\?"),
        ("a\n{% if %}", r"page.html line 2: Expected an expression"),
        ("a\n{{ first|shout }}", r"page.html line 2: No filter named 'shout'"),
        ("a\n{% include 'gone.html' %}", r"page.html line 2: there is no file 'gone.html'"),
        ("a\n{% include '../outside.html' %}", r"page.html line 2: '../outside.html' is outside the campaign folder"),
        ("a\n{% include '/etc/passwd' %}", r"page.html line 2: '/etc/passwd' is outside the campaign folder"),
        ("a\n{% include 'link.html' %}", r"page.html line 2: 'link.html' is outside the campaign folder"),
        ("a\n{% include first %}", r"page.html line 2: the name of an included file must be fixed"),
        ("{% include 'inner.html' %}", r"inner.html line 3: the list has no column 'lsat'"),
        ("a\n{{ unsubscribe_url }}", r"page.html line 2: names unsubscribe_url"),
        ("{{ [1,2]|random }}", r"No filter named 'random'"),
    ],
)
def test_plan_refuses_with_file_and_line(campaign: MakeCampaign, tmp_path: Path, source: str, says: str) -> None:
    made = campaign({"page.html": source, "inner.html": "\n\n{{ lsat }}"})
    (tmp_path.parent / "outside.html").write_text("secret")
    (tmp_path / "link.html").symlink_to(tmp_path.parent / "outside.html")
    schema = pa.schema(
        [
            ("first", pa.string()),
            ("First Name", pa.string()),
            ("last", pa.string()),
            ("person", pa.struct([("name", pa.string())])),
        ]
    )
    with pytest.raises(EngineError, match=says) as refused:
        made.composer(schema)
    assert refused.value.exit_code == Exit.TEMPLATE
    assert refused.value.next_step


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("{% for i in range(99999) %}{% for j in range(99999) %}\n{{ i }}{% endfor %}{% endfor %}", "loop"),
        ("{% macro m(n) %}{{ m(n) }}{% endmacro %}\n{{ m(1) }}", "itself|loop"),
        ("{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}\n{{ m(40) }}", "loop"),
        ("\n{{ 'a' * 99999999999 }}", "characters"),
        ("\n{{ '%99999999d' % 1 }}", "width"),
        ("\n{{ '{:99999999}'.format(1) }}", "width"),
        ("\n{{ first|center(99999999) }}", "center"),
        ("\n{{ first.ljust(99999999) }}", "ljust"),
        ("\n{{ 10 ** 99999999 }}", "bits"),
        ("{% set ns = namespace(n=7) %}\n{% for i in range(60) %}{% set ns.n = ns.n * ns.n %}{% endfor %}", "bits"),
        ("{% set ns = namespace(s='aaaaaaaaaa') %}\n{% for i in range(40) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}", "characters"),
        ("{% set ns = namespace(s='aaaaaaaaaa') %}\n{% for i in range(40) %}{% set ns.s = ns.s|replace('a', 'aaaaaaaaaa') %}{% endfor %}", "replace"),
        ("\n{{ range(999999999) }}", "[Rr]ange"),
        ("\n{{ first.__class__ }}", "unsafe|class"),
        ("\n{{ first.__class__.__mro__ }}", "unsafe|class"),
        ("\n{{ ''.__init__.__globals__ }}", "unsafe|init"),
        ("\n{{ items.append('x') }}", "unsafe|append|callable"),
        ("{% for i in items recursive %}\n{{ loop(items) }}{% endfor %}", "itself|loop"),
    ],
)  # fmt: skip
def test_a_template_without_end_or_out_of_its_box_is_stopped(campaign: MakeCampaign, source: str, says: str) -> None:
    made = campaign({"page.html": source, "text.txt": "x"})
    with pytest.raises((RowProblem, TemplateError), match=says) as stopped:
        made.send({"first": "Ann", "items": ["a"]})
    text = str(stopped.value)
    assert "page.html line " in text, text


def test_columns_are_those_that_templates_name_in_the_lists_order(campaign: MakeCampaign) -> None:
    made = campaign(
        {"page.html": "{{ c }}{% for a in d %}{{ a }}{% endfor %}{{ columns['First Name'] }}", "text.txt": "{{ a }}"},
        subject="{{ b }}", headers={"X-E": "{{ e }}"},
    )  # fmt: skip
    schema = pa.schema([(name, pa.string()) for name in ("unused", "e", "d", "c", "b", "First Name", "a")])
    assert made.composer(schema).columns == ("e", "d", "c", "b", "First Name", "a")


def test_a_column_whose_name_is_no_identifier(campaign: MakeCampaign) -> None:
    made = campaign({"text.txt": "Hi {{ columns['First Name'] }}{% if columns['First Name'] %}!{% endif %}"})
    assert text_of(made.open({"First Name": "Ann"})) == "Hi Ann!"


def test_the_fingerprint_covers_includes_and_images(campaign: MakeCampaign) -> None:
    files = {"page.html": "{% include 'a.html' %}", "a.html": "x", "logo.png": b"1"}
    inline = [{"cid": "logo", "path": "logo.png"}]
    first = campaign(files, inline=inline).composer().fingerprint
    assert campaign(files, inline=inline).composer().fingerprint == first
    assert campaign({**files, "a.html": "y"}, inline=inline).composer().fingerprint != first
    assert campaign({**files, "logo.png": b"2"}, inline=inline).composer().fingerprint != first


def test_a_template_that_is_not_utf8_or_has_a_bom(campaign: MakeCampaign) -> None:
    with pytest.raises(TemplateError, match="not UTF-8"):
        campaign({"text.txt": b"caf\xe9"}).composer()
    assert text_of(campaign({"text.txt": b"\xef\xbb\xbfHi"}).open()) == "Hi"


@pytest.mark.parametrize(("key", "value"), [("language", "tlh-XX"), ("timezone", "Mars/Olympus")])
def test_an_unknown_locale_or_zone_is_refused(campaign: MakeCampaign, key: str, value: str) -> None:
    with pytest.raises(TemplateError, match=value):
        campaign({"text.txt": "x"}, **{key: value}).composer()


def test_rendering_leaves_nothing_between_rows(tmp_path: Path) -> None:
    shop = Workshop(tmp_path, None, "UTC", canonical=False, preheader=False)
    surveyed = shop.text_body("main", "{% set x = a %}{{ x }}")
    body = Body(surveyed, {"a": 0}, frozenset({"a"}))
    assert body.segments is None
    for value in ("1", "2"):
        assert decode_qp("".join(body.fill([value], {**shop.globals(), "a": value}))) == value
