# ruff: noqa: E501 - template sources and tables read better in one line
"""Whole messages, opened again. T-numbers are public reports whose input is tried here."""

from __future__ import annotations

import email
import email.policy
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.compose.keys import KeysError
from engine.compose.render import Composer, Message, RowProblem
from engine.compose.template import TemplateError
from engine.config import SettingsError
from formats.address import AddressError, Mailbox, parse_mailbox
from formats.message import clean_text
from formats.verp import TokenKind, read_token
from tests.compose.conftest import NOW_US, MakeCampaign, check_wire_rules, opened, text_of

BULK: dict[str, Any] = {
    "from_name": "Weekly, News",
    "to_name": "{{ first }}",
    "subject": "News for {{ first }}",
    "reply_to": "answer@example.org",
    "list_id": "weekly.example.org",
    "unsubscribe_url": "https://news.example.org/u/{token}",
    "unsubscribe_mailto": "leave@example.org",
    "feedback_id": "spring:weekly:example",
    "cfbl_address": "fbl@example.org",
    "precedence": "bulk",
    "language": "en",
    "headers": {"X-Customer": "{{ first }}", "X-Campaign": "spring"},
}
ORDER = [
    "Date", "From", "To", "Reply-To", "Subject", "Message-ID", "List-Id", "List-Unsubscribe", "List-Unsubscribe-Post",
    "Feedback-ID", "CFBL-Address", "Precedence", "Content-Language", "X-Customer", "X-Campaign", "MIME-Version", "Content-Type",
]  # fmt: skip
FILES: dict[str, str | bytes] = {"page.html": "<p>Hi {{ first }}</p>", "text.txt": "Hi {{ first }}\n"}


def other_parser(content: bytes) -> list[tuple[str, str]]:
    """Header fields as a second, naive reader sees them: split at CRLF, continued by white space."""
    fields: list[tuple[str, str]] = []
    for line in content.partition(b"\r\n\r\n")[0].split(b"\r\n"):
        if line[:1] in (b" ", b"\t"):
            fields[-1] = (fields[-1][0], fields[-1][1] + line.decode())
        else:
            name, colon, value = line.partition(b":")
            assert colon
            fields.append((name.decode(), value.decode()))
    return fields


def test_a_bulk_message_has_every_header_in_order(campaign: MakeCampaign) -> None:
    made = campaign(FILES, **BULK)
    sent = made.send({"first": "Ann"})
    message = opened(sent.content)
    assert [name for name, _ in message.items()] == ORDER
    assert message["To"] == "Ann <ann@example.net>"
    assert message["From"].addresses[0].display_name == "Weekly, News"
    assert message["Date"] == "Mon, 21 Sep 2026 14:13:20 +0000"
    assert message["List-Unsubscribe-Post"] == "List-Unsubscribe=One-Click"
    assert message["CFBL-Address"] == "fbl@example.org; report=arf"
    keys = made.composer(pa.schema([("first", pa.string())]))  # builds
    assert keys.columns == ("first",)
    assert sent.recipient == "ann@example.net"
    assert not sent.smtputf8
    assert sent.content.isascii()


def test_return_path_and_unsubscribe_name_the_row(campaign: MakeCampaign) -> None:
    from engine.compose.keys import load_keys

    made = campaign(FILES, **BULK)
    sent = made.send({"first": "Ann"})
    ring = load_keys(made.folder / "keys/secret.keys").keys
    bounce = read_token(sent.return_path, ring)
    assert (bounce.row, bounce.kind, bounce.is_test) == (7, TokenKind.RETURN_PATH, False)
    assert sent.return_path.endswith("@example.org")
    url, mailto = opened(sent.content)["List-Unsubscribe"].split(", ")
    for token in (url[1:-1].rpartition("/")[2], mailto[1:-1].rpartition("=")[2]):
        leave = read_token(token, ring)
        assert (leave.row, leave.kind) == (7, TokenKind.UNSUBSCRIBE)


def test_a_fixed_return_path_or_one_at_another_domain(campaign: MakeCampaign) -> None:
    assert campaign(FILES, return_path="bounces@example.org").send({"first": "A"}).return_path == "bounces@example.org"
    assert (
        campaign(FILES, return_path_domain="bücher.example")
        .send({"first": "A"})
        .return_path.endswith("@xn--bcher-kva.example")
    )


def test_every_attempt_has_the_same_message_id_and_its_own_date(campaign: MakeCampaign) -> None:
    composer = campaign(FILES).composer(pa.schema([("first", pa.string())]))
    to = Mailbox("ann", "example.net")
    one, two = (opened(composer.compose(7, to, ["Ann"], NOW_US + later).content) for later in (0, 60_000_000))
    assert one["Message-ID"] == two["Message-ID"]
    assert one["Date"] != two["Date"]
    assert opened(composer.compose(8, to, ["Ann"], NOW_US).content)["Message-ID"] != one["Message-ID"]


def test_a_test_generation_has_names_of_its_own(campaign: MakeCampaign) -> None:
    made, schema, to = campaign(FILES, **BULK), pa.schema([("first", pa.string())]), Mailbox("me", "example.org")
    live = made.composer(schema).compose(7, to, ["Ann"], NOW_US)
    test = made.composer(schema, generation="test").compose(7, to, ["Ann"], NOW_US)
    again = made.composer(schema, generation="test").compose(7, to, ["Ann"], NOW_US + 1)
    assert len({live.return_path, test.return_path}) == 2
    assert len({opened(m.content)["Message-ID"] for m in (live, test, again)}) == 3
    from engine.compose.keys import load_keys

    assert read_token(test.return_path, load_keys(made.folder / "keys/secret.keys").keys).is_test


def test_the_plans_key_is_used_or_its_loss_refused(campaign: MakeCampaign) -> None:
    from engine.compose.keys import load_keys, rotate_keys

    made = campaign(FILES)
    schema = pa.schema([("first", pa.string())])
    rotate_keys(made.folder / "keys/secret.keys")
    ring = load_keys(made.folder / "keys/secret.keys")
    old = made.composer(schema, key_id="k1").compose(1, Mailbox("a", "b.example"), ["x"], NOW_US)
    assert read_token(old.return_path, ring.keys).key_id == "k1"
    with pytest.raises(KeysError, match="'zz'"):
        made.composer(schema, key_id="zz")


# --- kinds of bodies ------------------------------------------------------------------------------


def test_text_alone(campaign: MakeCampaign) -> None:
    made = campaign({"text.txt": "Grüße, {{ first }}\n"}).open({"first": "Ann"})
    assert made.get_content_type() == "text/plain"
    assert text_of(made) == "Grüße, Ann"


def test_an_empty_text_is_still_a_message(campaign: MakeCampaign) -> None:
    assert (
        text_of(campaign({"text.txt": "{{ first }}"}).open({"first": None}, schema=pa.schema([("first", pa.string())])))
        == ""
    )


def test_html_alone(campaign: MakeCampaign) -> None:
    made = campaign({"page.html": "<p>{{ first }}</p>"}, text_from_html=False).open({"first": "<Ann>"})
    assert made.get_content_type() == "text/html"
    assert text_of(made) == "<p>&lt;Ann&gt;</p>"


def test_the_text_part_is_made_from_the_html(campaign: MakeCampaign) -> None:
    page = (
        '<html><body><h1>Hi {{ first }}</h1>\n<p>See <a href="https://x.example/{{ first }}?a=1&amp;b=2">our offer</a></p>'
        "{% if vip %}<p>For VIPs &amp; friends</p>{% endif %}<ul>{% for i in things %}<li>{{ i }}</li>{% endfor %}</ul></body></html>"
    )
    made = campaign({"page.html": page})
    message = made.open({"first": "Ann", "vip": True, "things": ["a", "b<"]})
    assert message.get_content_type() == "multipart/alternative"
    text = text_of(message.get_body(("plain",)))
    for piece in ("Hi Ann", "[our offer](https://x.example/Ann?a=1&b=2)", "For VIPs & friends", "* a\n", "* b<\n"):
        assert piece in text
    assert "{" not in text
    schema = pa.schema([("first", pa.string()), ("vip", pa.bool_()), ("things", pa.list_(pa.string()))])
    assert not made.composer(schema).warnings


def test_text_of_a_page_with_inheritance_is_made_for_each_row(campaign: MakeCampaign) -> None:
    files = {
        "page.html": "{% extends 'base.html' %}{% block b %}Hi {{ first }}{% endblock %}",
        "base.html": "<p>{% block b %}{% endblock %}</p>",
    }
    made = campaign(files)
    assert text_of(made.open({"first": "Ann <b>"}).get_body(("plain",))) == "Hi Ann <b>\n"
    assert "made from the finished HTML of each row" in made.composer(pa.schema([("first", pa.string())])).warnings[0]


def test_images_and_attachments(campaign: MakeCampaign) -> None:
    files: dict[str, str | bytes] = {
        **FILES,
        "img/logo.png": b"\x89PNG" * 100,
        "terms.pdf": b"%PDF",
        "a/Ann.txt": b"hello",
    }
    made = campaign(
        files,
        inline=[{"cid": "logo@x", "path": "img/logo.png"}],
        attachments=[
            {"path": "terms.pdf", "filename": "Übersicht für alle Kunden und ihre Freunde, sehr lang.pdf"},
            {"column": "file"},
        ],
    )
    message = made.open({"first": "Ann", "file": "a/Ann.txt"})
    kinds = [part.get_content_type() for part in message.walk()]
    assert kinds == [
        "multipart/mixed", "multipart/alternative", "text/plain", "multipart/related", "text/html", "image/png", "application/pdf",
        "text/plain",
    ]  # fmt: skip
    names = [part.get_filename() for part in message.iter_attachments()]
    assert names == ["Übersicht für alle Kunden und ihre Freunde, sehr lang.pdf", "Ann.txt"]
    image = next(part for part in message.walk() if part.get_content_type() == "image/png")
    assert image["Content-ID"] == "<logo@x>"
    assert image.get_payload(decode=True) == b"\x89PNG" * 100
    assert [part.get_payload(decode=True) for part in message.iter_attachments()] == [b"%PDF", b"hello"]
    without = made.open(
        {"first": "Ann", "file": None}, schema=pa.schema([("first", pa.string()), ("file", pa.string())])
    )
    assert [part.get_filename() for part in without.iter_attachments()] == names[:1]


@pytest.mark.parametrize("path", ["gone.txt", "../outside.txt", "/etc/passwd", "a\0b", "folder"])
def test_an_attachment_that_is_not_there_fails_its_row(campaign: MakeCampaign, path: str) -> None:
    made = campaign({**FILES, "folder/x": b"1"}, attachments=[{"column": "file"}])
    (made.folder.parent / "outside.txt").write_text("secret")
    with pytest.raises(RowProblem, match="attachment") as problem:
        made.send({"first": "Ann", "file": path})
    assert problem.value.reason == "render"


@pytest.mark.parametrize(
    "bad",
    [
        {"inline": [{"cid": "logo", "path": "gone.png"}]},
        {"inline": [{"cid": "lo go", "path": "text.txt"}]},
        {"attachments": [{"path": "../x"}]},
        {"attachments": [{"column": "nope"}]},
        {"attachments": [{"path": "text.txt", "content_type": "x\r\ny"}]},
        {"html": "gone.html"},
    ],
)
def test_missing_files_are_refused_at_plan(campaign: MakeCampaign, bad: dict[str, Any]) -> None:
    with pytest.raises(TemplateError):
        campaign({"text.txt": "x", "page.html": "x"}, **{"text": "text.txt", **bad}).composer()


def test_the_preheader_stands_behind_the_body_tag(campaign: MakeCampaign) -> None:
    page = '<html><BODY class="x">\n<p>{{ subject }}</p></body></html>'
    made = campaign({"page.html": page, "text.txt": "x"}, preheader="Look, {{ first }} & all", subject="S {{ first }}")
    html = text_of(made.open({"first": "<Ann>"}).get_body(("html",)))
    assert '<BODY class="x"><div style="display:none' in html
    assert "Look, &lt;Ann&gt; &amp; all" in html
    assert "<p>S &lt;Ann&gt;</p>" in html
    own = campaign({"page.html": "<body>{{ preheader }}</body>", "text.txt": "x"}, preheader="P")
    assert text_of(own.open().get_body(("html",))) == "<body>P</body>"


def test_templates_can_show_what_the_engine_knows(campaign: MakeCampaign) -> None:
    source = "{{ unsubscribe_url }} {{ row }} {{ address }} {{ campaign_id }} {{ list_id }}{% if row %}!{% endif %}"
    made = campaign({"text.txt": source}, unsubscribe_url="https://x.example/u/{token}?a=1").open()
    words = text_of(made).split()
    assert made["List-Unsubscribe"] == f"<{words[0]}>"
    assert words[1:] == ["7", "ann@example.net", "spring", "main!"]
    assert text_of(campaign({"text.txt": "{{ row }}"}).open({"row": "mine"})) == "mine"


# --- public reports -------------------------------------------------------------------------------


def test_t005_t113_unsubscribe_urls_are_absolute_https_and_come_with_post(campaign: MakeCampaign) -> None:
    for url in ("/accounts/unsubscribe/?i={token}", "http://x.example/{token}", "https:///{token}", "https://x.example/", "https://{token}.x.example/",
                "https://x.example/{token}/{token}", "https://x.example/ü/{token}", "https://x.example/a b{token}", "x.example/{token}"):  # fmt: skip
        with pytest.raises(SettingsError, match="unsubscribe_url"):
            campaign({"text.txt": "x"}, unsubscribe_url=url).composer()
    message = campaign({"text.txt": "x"}, unsubscribe_url="https://x.example/u/{token}").open()
    assert message["List-Unsubscribe-Post"] == "List-Unsubscribe=One-Click"
    only_mail = campaign({"text.txt": "x"}, unsubscribe_mailto="leave@x.example").open()
    assert only_mail["List-Unsubscribe"].startswith("<mailto:leave@x.example?subject=u")
    assert only_mail["List-Unsubscribe-Post"] is None


def test_t011_a_comma_in_the_sender_is_quoted(campaign: MakeCampaign) -> None:
    made = campaign({"text.txt": "x"}, from_address="mail@company.example", from_name="my name, company name").open()
    assert [(a.display_name, a.addr_spec) for a in made["From"].addresses] == [
        ("my name, company name", "mail@company.example")
    ]


def test_t019_a_subject_is_not_html(campaign: MakeCampaign) -> None:
    made = campaign({"text.txt": "x"}, subject="{{ title }}").open({"title": "Q&A with Alexey's team"})
    assert made["Subject"] == "Q&A with Alexey's team"


def test_t023_a_long_url_arrives_whole(campaign: MakeCampaign) -> None:
    link = "https://x.example/?q=" + "a" * 1100
    made = campaign({"page.html": f'<a href="{link}">x</a><a href="{{{{ u }}}}">y</a>'}).open({"u": link})
    assert text_of(made.get_body(("html",))) == f'<a href="{link}">x</a><a href="{link}">y</a>'


def test_t025_dots_are_single_and_need_no_stuffing(campaign: MakeCampaign) -> None:
    source = "<style>\n.some{}\n.other{}</style>\n{{ v }}"
    made = campaign({"page.html": source}).open({"v": ".\n..x"})
    assert text_of(made.get_body(("html",))) == source.replace("{{ v }}", ".\n..x")


@pytest.mark.parametrize("ends", ["\n", "\r\n", "\r"])
def test_t027_t029_every_line_end_is_crlf(campaign: MakeCampaign, ends: str) -> None:
    made = campaign({"text.txt": f"one{ends}{{{{ v }}}}{ends}three"}).send({"v": f"a{ends}b"})
    check_wire_rules(made.content)
    assert text_of(opened(made.content)) == "one\na\nb\nthree"


@pytest.mark.parametrize(
    "text",
    [
        "gets@ignored.none>\r\nRCPT TO:<target@somewhere.none>",
        "Test",
        "Test@test",
        "a b@x.org",
        "a..b@x.org",
        "b@x.org,c@x.org",
        "",
        "x@x.org\0",
    ],
)
def test_t031_t043_no_such_address_reaches_a_message(text: str) -> None:
    with pytest.raises(AddressError):
        parse_mailbox(text)


def test_t033_a_field_value_with_line_breaks_adds_nothing(campaign: MakeCampaign) -> None:
    made = campaign({"text.txt": "x"}, headers={"X-Size": "{{ v }}"}).open({"v": "100\r\nRCPT TO:<evil@x>"})
    assert made["X-Size"] == "100 RCPT TO:<evil@x>"
    with pytest.raises(RowProblem):
        campaign({"text.txt": "x"}, headers={"Sender": "{{ v }}"}).send({"v": "a\r\nBcc: x"})


def test_t015_t035_a_utf8_local_part_needs_smtputf8_and_stands_as_it_is(campaign: MakeCampaign) -> None:
    sent = campaign(FILES, to_name="Jörg").send({"first": "Jörg"}, to="jörg@bücher.example")
    assert sent.smtputf8
    assert sent.recipient == "jörg@xn--bcher-kva.example"
    assert "To: =?utf-8?q?J=C3=B6rg?= <jörg@xn--bcher-kva.example>\r\n".encode() in sent.content
    assert not campaign(FILES).send({"first": "x"}, to="joerg@bücher.example").smtputf8


def test_t037_idna_2008(campaign: MakeCampaign) -> None:
    assert campaign(FILES).send({"first": "x"}, to="joe@straße.de").recipient == "joe@xn--strae-oqa.de"


def test_t039_t041_an_address_keeps_its_plus_and_loses_its_blanks(campaign: MakeCampaign) -> None:
    assert campaign(FILES).open({"first": "x"}, to="me+1234@gmail.com \u200b")["To"] == "me+1234@gmail.com"
    made = campaign({"text.txt": "{{ e|urlencode }}"}).open({"e": "me+1234@gmail.com"})
    assert text_of(made) == "me%2B1234%40gmail.com"


def test_t117_a_render_error_is_a_row_problem_with_its_reason(campaign: MakeCampaign) -> None:
    with pytest.raises(RowProblem, match=r"text\.txt line 1") as problem:
        campaign({"text.txt": "{{ 1 // n }}"}).send({"n": 0})
    assert problem.value.reason == "render"


def test_t053_a_map_column_is_read(campaign: MakeCampaign) -> None:
    schema = pa.schema([("tags", pa.map_(pa.string(), pa.string()))])
    assert (
        text_of(
            campaign({"text.txt": "{{ tags.color }}{{ tags.size }}"}).open({"tags": [("color", "red")]}, schema=schema)
        )
        == "red"
    )


@pytest.mark.parametrize("name", ["Bcc", "From", "DKIM-Signature", "Content-Type", "Return-Path", "X Y", "X:\r\nBcc"])
def test_own_headers_cannot_take_the_engines_place(campaign: MakeCampaign, name: str) -> None:
    with pytest.raises(SettingsError):
        campaign({"text.txt": "x"}, headers={name: "v"}).composer()


@pytest.mark.parametrize("key", ["feedback_id", "list_id", "precedence", "cfbl_address", "from_address", "reply_to"])
def test_structured_settings_are_refused_not_encoded(campaign: MakeCampaign, key: str) -> None:
    with pytest.raises(SettingsError, match=key):
        campaign({"text.txt": "x"}, **{key: "ü\r\nBcc: x"}).composer()


def test_an_own_header_that_is_empty_is_left_out(campaign: MakeCampaign) -> None:
    made = campaign({"text.txt": "x"}, headers={"X-A": "{{ a }}"})
    assert made.open({"a": None}, schema=pa.schema([("a", pa.string())]))["X-A"] is None


# --- any text in any field ------------------------------------------------------------------------

COMPOSERS: dict[str, Composer] = {}  # templates are the same for all examples
ANY = st.one_of(
    st.text(max_size=60),
    st.text(alphabet='ab,;:<>@"\\() =?_\r\n\t\0\x0b\x0c\x85\u2028éß🌛\ud800.', max_size=60),
    st.sampled_from(
        ["x\r\nBcc: evil@x.example", "=?UTF-8?Q?=0A?=Bcc: e@x.example", ".", "--=_a", "a" * 1200, "é" * 700, "None"]
    ),
)


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(first=ANY, second=ANY, kind=st.sampled_from(["fields", "condition"]))
def test_whatever_a_row_holds_the_message_is_valid(campaign: MakeCampaign, first: str, second: str, kind: str) -> None:
    text = (
        "Hi {{ first }}\n{{ second }}."
        if kind == "fields"
        else "{% if first %}{{ first }}{% endif %}{{ second|upper }}"
    )
    if kind not in COMPOSERS:
        made = campaign({"text.txt": text, "page.html": f"<p>{text}</p>"}, **{**BULK, "from_name": "{{ second }}"})
        COMPOSERS[kind] = made.composer(pa.schema([("first", pa.string()), ("second", pa.string())]))
    composer = COMPOSERS[kind]
    sent = composer.compose(7, Mailbox("ann", "example.net"), [first, second], NOW_US)
    message = opened(sent.content)
    expected = [name for name in ORDER if name != "X-Customer" or clean_text(first)]
    if not clean_text(f"News for {first}"):
        expected.remove("Subject")
    assert [name for name, _ in message.items()] == expected
    assert [name for name, _ in other_parser(sent.content)] == expected
    assert str(message["Subject"]) == clean_text(f"News for {first}")
    assert [a.addr_spec for a in message["To"].addresses] == ["ann@example.net"]
    assert [a.addr_spec for a in message["From"].addresses] == ["news@example.org"]
    assert len(list(message.iter_parts())) == 2
    assert not message.defects
    assert not any(part.defects for part in message.walk())


# --- many -----------------------------------------------------------------------------------------


def test_compose_many_keeps_order_and_problems(campaign: MakeCampaign) -> None:
    made = campaign({"text.txt": "{{ 10 // n }}"})
    composer = made.composer(pa.schema([("n", pa.int64())]))
    rows = [(n, Mailbox(f"r{n}", "example.net"), [n % 5]) for n in range(40)]
    with ThreadPoolExecutor(2) as pool:
        pooled = composer.compose_many(rows, NOW_US, pool)
    alone = composer.compose_many(rows, NOW_US)
    for n, (one, two) in enumerate(zip(pooled, alone, strict=True)):
        if n % 5 == 0:
            assert isinstance(one, RowProblem)
            assert isinstance(two, RowProblem)
        else:
            assert isinstance(one, Message)
            assert one == two
            assert one.recipient == f"r{n}@example.net"


def test_python_reads_back_what_its_own_policy_would_break(campaign: MakeCampaign) -> None:
    sent = campaign(
        FILES, **{**BULK, "unsubscribe_url": "https://x.example/u?hash_token=" + "ab" * 75 + "{token}"}
    ).send({"first": "Ann"})
    assert b"\r\nList-Unsubscribe: <https://x.example/u?hash_token=" in sent.content
    again = email.message_from_bytes(sent.content, policy=email.policy.compat32)
    assert "=?" not in again["List-Unsubscribe"]
