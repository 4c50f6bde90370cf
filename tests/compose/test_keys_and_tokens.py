"""Keys, return paths and unsubscribe tokens."""

from __future__ import annotations

import hmac
import stat
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.compose.keys import KeysError, load_keys, read_token_table, rotate_keys, write_new_keys, write_token_table
from engine.errors import Exit
from formats.verp import (
    MAX_ROW,
    TokenForged,
    TokenKind,
    TokenMaker,
    TokenOrigin,
    TokenUnknown,
    encode_return_path,
    encode_unsubscribe,
    read_token,
    short_campaign,
)

KEY = bytes(range(32))
RING = {"k1": KEY}


@settings(deadline=None, max_examples=60)
@given(
    campaign=st.text(max_size=40),
    row=st.integers(0, MAX_ROW),
    is_test=st.booleans(),
    case=st.sampled_from([str, str.upper]),
)
def test_a_token_reads_back_in_any_case_and_fits_a_local_part(
    campaign: str, row: int, is_test: bool, case: type
) -> None:
    for make, kind in ((encode_return_path, TokenKind.RETURN_PATH), (encode_unsubscribe, TokenKind.UNSUBSCRIBE)):
        local = make(campaign, row, KEY, key_id="k1", is_test=is_test)
        assert len(local) <= 64
        assert local.isalnum()
        assert local == local.lower()
        token = read_token(f"<{case(local)}@bounces.example.org>", RING)
        assert (token.campaign, token.row, token.is_test, token.key_id, token.kind) == (
            short_campaign(campaign),
            row,
            is_test,
            "k1",
            kind,
        )


def test_a_changed_digit_is_forged_and_strange_text_unknown() -> None:
    local = encode_return_path("spring", 7, KEY, key_id="k1")
    for place in range(4, len(local)):
        other = "0" if local[place] != "0" else "1"
        with pytest.raises(TokenForged):
            read_token(local[:place] + other + local[place + 1 :], RING)
    # The kind is bound too: a return path does not unsubscribe, a test token is no live one.
    for letter in "utv":
        with pytest.raises(TokenForged):
            read_token(letter + local[1:], RING)
    for strange in ("", "postmaster@x.org", local[:-1], local + "0", "é" * 44, local.replace("k1", "k2", 1)):
        with pytest.raises(TokenUnknown):
            read_token(strange, RING)


def test_the_names_of_a_row_stay_and_differ_between_rows_generations_and_keys() -> None:
    live = TokenMaker("spring", "k1", KEY)
    assert live.marks(5) == TokenMaker("spring", "k1", KEY).marks(5)
    others = [
        live.marks(6),
        TokenMaker("autumn", "k1", KEY).marks(5),
        TokenMaker("spring", "k1", KEY, is_test=True).marks(5),
        TokenMaker("spring", "k1", KEY[::-1]).marks(5),
    ]
    assert len({live.marks(5).message_id, *(other.message_id for other in others)}) == 5
    assert len({live.marks(5).return_path, *(other.return_path for other in others)}) == 5


@pytest.mark.parametrize("length", [1, 32, 64, 128, 129, 300])
def test_the_marks_are_hmac_whatever_the_keys_length(length: int) -> None:
    key = bytes(range(256))[:length] * 2 if length > 200 else bytes(range(length))
    marks = TokenMaker("spring", "k1", key).marks(77)
    text = b"rowpost mark 1L" + bytes.fromhex(short_campaign("spring")) + (77).to_bytes(8, "big")
    assert marks.message_id == hmac.digest(key, text, "sha512").hex()[:32]
    assert read_token(marks.unsubscribe, {"k1": key}).row == 77


def test_new_keys_are_private_and_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "keys" / "secret.keys"
    ring = write_new_keys(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert load_keys(path) == ring
    with pytest.raises(KeysError, match="never overwritten") as refused:
        write_new_keys(path)
    assert refused.value.exit_code == Exit.KEYS
    assert load_keys(path) == ring


def test_after_rotation_old_tokens_still_read(tmp_path: Path) -> None:
    path = tmp_path / "secret.keys"
    old = write_new_keys(path)
    token = encode_unsubscribe("spring", 3, old.key(), key_id=old.current_id)
    new = rotate_keys(path)
    assert new.current_id != old.current_id
    assert load_keys(path) == new
    assert read_token(token, new.keys).row == 3
    for _ in range(12):
        new = rotate_keys(path)
    assert len(new.keys) == 14


def test_a_lost_key_is_a_clear_refusal(tmp_path: Path) -> None:
    with pytest.raises(KeysError, match="missing"):
        load_keys(tmp_path / "secret.keys")
    ring = write_new_keys(tmp_path / "secret.keys")
    with pytest.raises(KeysError, match="'k9' that the plan was made with is missing") as lost:
        ring.key("k9")
    assert str(tmp_path) in str(lost.value)


@pytest.mark.parametrize(
    "text", ["", "k1", "k1 zz", f"K1 {'0' * 64}", f"k1 {'g' * 64}", f"k1 {'0' * 64}\nk1 {'1' * 64}", "\xff"]
)
def test_a_damaged_key_file_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "secret.keys"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(KeysError):
        load_keys(path)


def test_keys_never_show_in_a_repr(tmp_path: Path) -> None:
    ring = write_new_keys(tmp_path / "secret.keys")
    assert ring.key().hex() not in repr(ring)
    assert repr(ring.key()) not in repr(ring)


def test_the_token_table_names_the_campaign_after_the_list_is_gone(tmp_path: Path) -> None:
    assert read_token_table(tmp_path).campaigns == {}
    write_token_table(tmp_path, TokenOrigin("spring", "weekly", "k1"))
    write_token_table(tmp_path, TokenOrigin("autumn", "weekly", "k2"))
    token = read_token(encode_return_path("spring", 1, KEY, key_id="k1"), RING)
    assert read_token_table(tmp_path).campaigns[token.campaign] == TokenOrigin("spring", "weekly", "k1")
    (tmp_path / "tokens.json").write_text("{")
    with pytest.raises(KeysError):
        read_token_table(tmp_path)
