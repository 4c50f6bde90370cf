# ruff: noqa: E501 - template sources and tables read better in one line
"""Fragments: valid by themselves and in any sequence, and the text comes back."""

from __future__ import annotations

import quopri

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from formats.dkim import relaxed_body, simple_body
from formats.message import base64_lines, decode_qp, normalise_line_ends, qp_fragment

# Texts that lean to what breaks encoders.
AWKWARD = st.lists(
    st.one_of(
        st.sampled_from([".", "..", "From ", "=", "=20", " ", "  ", "\t", "\n", "\r\n", "\r", "é", "ß", "🌛", "\0", "\x0c",
                         "\u2028",
                         "\ud800", "a" * 75, "a" * 76, "b" * 77, "é" * 30, "🌛" * 20, "x" * 1100, " " * 80, "." * 80]),
        st.text(max_size=20),
    ),
    max_size=8,
).map("".join)  # fmt: skip


def check_lines(body: str) -> None:
    assert body.isascii()
    assert body == "" or body.endswith("\r\n")
    bare = body.replace("\r\n", "")
    assert "\r" not in bare
    assert "\n" not in bare
    for line in body.split("\r\n"):
        assert len(line) <= 76
        assert not line.endswith((" ", "\t"))
        assert not line.startswith((".", "From "))
        assert all(character == "\t" or " " <= character <= "~" for character in line)
        soft = line.removesuffix("=")
        # No soft break inside an escape, nor between the octets of one character.
        assert soft[-1:] != "="
        assert soft[-2:-1] != "="
        octets = bytes(int(e, 16) for e in [soft[k + 1 : k + 3] for k in range(len(soft)) if soft[k] == "="])
        octets.decode("utf-8")


def expected(text: str) -> str:
    return "".join("\ufffd" if "\ud800" <= c <= "\udfff" else c for c in normalise_line_ends(text))


@settings(deadline=None, max_examples=120)
@given(texts=st.lists(AWKWARD, max_size=4), canonical=st.booleans())
@example(texts=["\r", "\n"], canonical=False)
@example(texts=["a\r", "\nb"], canonical=True)
def test_any_sequence_of_fragments_is_a_valid_body_of_the_joined_text(texts: list[str], canonical: bool) -> None:
    body = "".join(qp_fragment(text, canonical=canonical) for text in texts)
    check_lines(body)
    wanted = "".join(expected(text) for text in texts)
    assert decode_qp(body) == wanted
    assert quopri.decodestring(body.encode()).replace(b"\r\n", b"\n").decode() == wanted
    if canonical and body.strip():
        assert relaxed_body(body.encode()) == simple_body(body.encode())


def test_what_relays_spoil_is_escaped() -> None:
    assert qp_fragment("end \nnext\t\n") == "end=20\r\nnext=09\r\n"
    assert qp_fragment(".css\n..b\n") == "=2Ecss\r\n=2E.b\r\n"
    assert qp_fragment("From here\n") == "=46rom here\r\n"
    assert qp_fragment("a=b") == "a=3Db=\r\n"
    assert qp_fragment("Ann") == "Ann=\r\n"
    assert qp_fragment("") == ""


@pytest.mark.parametrize("length", range(60, 90))
def test_a_soft_break_never_cuts_a_character(length: int) -> None:
    for character in "é€🌛":
        text = "a" * length + character * 9
        check_lines(qp_fragment(text))
        assert decode_qp(qp_fragment(text)) == text


def test_base64_lines_are_76_long() -> None:
    lines = base64_lines(bytes(200)).split("\r\n")
    assert [len(line) for line in lines] == [76, 76, 76, 40, 0]
    assert base64_lines(b"") == ""
