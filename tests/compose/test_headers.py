"""Header values by our own writer, each read back by Python's parser. T-numbers are public reports."""

from __future__ import annotations

import email
import email.policy
import re
from email.header import decode_header, make_header
from email.utils import getaddresses, parsedate_to_datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from formats.message import (
    HeaderError,
    check_field_name,
    clean_text,
    date_value,
    encoded_words,
    fold,
    mailbox_value,
    parameter,
    parameters,
    phrase,
    structured,
    unstructured,
)

_WORD = re.compile(r"=\?utf-8\?([qb])\?([^? ]*)\?=", re.IGNORECASE)


def read_text(value: str) -> str:
    return str(make_header(decode_header(value)))


def unfold(field: str) -> str:
    assert field.endswith("\r\n")
    for line in field[:-2].split("\r\n")[1:]:
        assert line[0] == " "
        assert line.strip()
    return field[:-2].replace("\r\n", "")


def one_field(field: str) -> None:
    """It is one field to the parser, and its lines keep the limits."""
    parsed = email.message_from_bytes(field.encode() + b"\r\nbody\r\n", policy=email.policy.compat32)
    assert len(parsed.keys()) == 1
    assert not parsed.defects
    assert all(len(line) <= 998 for line in field.split("\r\n"))


@settings(deadline=None, max_examples=120)
@given(
    text=st.text(max_size=200)
    | st.text(alphabet='ab =?_éß🌛\r\n\t\0\x0b\x0c\x85\u2028\ud800,;:"\\()<>@.', max_size=120)
)
def test_any_subject_is_one_field_and_reads_back(text: str) -> None:
    value = unstructured(text)
    assert value.isascii()
    field = fold("Subject", value)
    one_field(field)
    assert unfold(field) == f"Subject: {value}"
    assert all(len(line) <= 76 for line in field.split("\r\n") if "=?utf-8?" in line)
    assert read_text(value) == clean_text(text)
    for word in value.split(" "):
        if word.startswith("=?") and word.endswith("?="):
            assert len(word) <= 75
            assert _WORD.fullmatch(word)
            assert not word.endswith("??=")
            read_text(word).encode()  # whole characters


@settings(deadline=None, max_examples=120)
@given(name=st.text(max_size=120) | st.text(alphabet='ab, ;:"\\()<>@.é🌛=?[]\n', max_size=60))
def test_any_display_name_is_one_mailbox(name: str) -> None:
    value = mailbox_value("ann@example.net", name)
    one_field(fold("To", value))
    pairs = getaddresses([value])
    assert len(pairs) == 1
    assert pairs[0][1] == "ann@example.net"
    wanted = clean_text(name)
    assert read_text(pairs[0][0]) == wanted if _WORD.search(value) else pairs[0][0] == wanted
    parsed = email.message_from_bytes(f"To: {value}\r\n\r\n".encode(), policy=email.policy.default)
    assert len(parsed["To"].addresses) == 1
    assert parsed["To"].addresses[0].addr_spec == "ann@example.net"


def test_t001_no_empty_encoded_word() -> None:
    subject = "Re: some few filler words here RE: Routeraustausch und übriggebliebene Glasfaser"
    assert "??=" not in fold("Subject", unstructured(subject))
    assert read_text(unstructured(subject)) == subject


def test_t003_a_long_unsubscribe_url_stays_raw_on_its_line() -> None:
    url = "https://x.example/u?hash_token=" + "0123456789abcdef" * 10
    field = fold("List-Unsubscribe", f"<{url}>")
    assert field == f"List-Unsubscribe: <{url}>\r\n"
    two = fold("List-Unsubscribe", f"<{url}>, <mailto:leave@x.example?subject=abc>")
    assert two == f"List-Unsubscribe: <{url}>,\r\n <mailto:leave@x.example?subject=abc>\r\n"


def test_t007_folding_adds_no_blank() -> None:
    subject = (
        "<a10-52-58-28.qa.plesk.ru> Notification: Resource usage by subscription has exceeded the allotments  and  more"
    )
    field = fold("Subject", unstructured(subject))
    assert field.count("\r\n") == 2
    assert unfold(field) == f"Subject: {subject}"


@pytest.mark.parametrize(
    "name",
    [
        "A véry long name with non-ASCII char and, comma",
        "my name, company name",
        "Surnamé ,Name",
        "Smith, Ann",
        'a "b" \\c',
    ],
)
def test_t009_t011_t013_a_comma_makes_no_second_mailbox(name: str) -> None:
    parsed = email.message_from_string(
        fold("To", mailbox_value("to@example.com", name)) + "\r\n", policy=email.policy.default
    )
    assert [(a.display_name, a.addr_spec) for a in parsed["To"].addresses] == [(name, "to@example.com")]


def test_t015_an_address_is_never_an_encoded_word() -> None:
    assert mailbox_value("jörg@example.com", "Jörg") == "=?utf-8?q?J=C3=B6rg?= <jörg@example.com>"


def test_t017_emoji_in_a_subject() -> None:
    subject = "3437 🔧 et rouler de nuit 🌛"
    assert read_text(unstructured(subject)) == subject


def test_t021_file_names_by_rfc_2231() -> None:
    assert parameter("filename", "Übersicht") == ["filename*=utf-8''%C3%9Cbersicht"]
    assert parameter("filename", "a b.pdf") == ['filename="a b.pdf"']
    assert parameter("filename", "a.pdf") == ["filename=a.pdf"]


@settings(deadline=None, max_examples=150)
@given(name=st.text(min_size=1, max_size=120).filter(lambda t: clean_text(t).strip('<>"')))
def test_any_file_name_reads_back(name: str) -> None:
    value = parameters("attachment", parameter("filename", name))
    raw = f"Content-Disposition: {value}\r\n\r\n"
    assert all(len(line) <= 78 for line in raw.split("\r\n"))
    read = email.message_from_bytes(raw.encode("ascii"), policy=email.policy.compat32).get_filename()
    assert read is not None
    assert read.strip('<>"') == clean_text(name).strip('<>"')  # get_filename takes such a pair off by itself


@pytest.mark.parametrize(
    "text",
    ["x\r\nBcc: evil@example.org",
     "x\nBcc: e", "x\rBcc: e", "x\0y", "x\x0cBcc: e", "x\u2028Bcc: e", "x\x85Bcc: e", "x\udcff",
     "A 💩 subject=?UTF-8?Q?=0A?=Bcc: injected@example.org", "=?UTF-8?Q?=0A?=Bcc: e", "=?utf-8?q?plain?="],
)  # fmt: skip
def test_injection_adds_no_field(text: str) -> None:
    for field in (fold("Subject", unstructured(text)), fold("To", mailbox_value("a@example.net", text))):
        one_field(field)
        for policy in (email.policy.default, email.policy.SMTP):
            again = email.message_from_bytes(field.encode() + b"\r\n\r\n", policy=policy)
            assert len(again.keys()) == 1
            assert b"\nBcc" not in again.as_bytes()
    assert read_text(unstructured(text)) == clean_text(text)


def test_structured_values_are_refused_not_encoded() -> None:
    assert structured(" <a@b> ") == "<a@b>"
    for value in ("ü", "a\r\nb", "a\0"):
        with pytest.raises(HeaderError):
            structured(value)


def test_a_line_that_cannot_be_folded_is_refused_past_998() -> None:
    with pytest.raises(HeaderError, match="998"):
        fold("X-Long", "a" * 999)
    words = unstructured("a" * 2000)
    assert read_text(words) == "a" * 2000


@pytest.mark.parametrize("name", ["", "X Y", "X:", "Ü", "X\r\n", "a" * 77])
def test_field_names(name: str) -> None:
    with pytest.raises(HeaderError):
        check_field_name(name)


def test_encoded_words_are_separated_by_one_blank() -> None:
    words = encoded_words("ü" * 100).split(" ")
    assert len(words) > 3
    assert all(len(word) <= 75 for word in words)


def test_phrase_is_quoted_only_where_it_must() -> None:
    assert phrase("Ann Miller") == "Ann Miller"
    assert phrase("Dr. Ann") == '"Dr. Ann"'
    assert phrase("  ") == ""


def test_date_is_english_utc() -> None:
    assert date_value(1_790_000_000) == "Mon, 21 Sep 2026 14:13:20 +0000"
    assert parsedate_to_datetime(date_value(0)).timestamp() == 0
