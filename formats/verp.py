"""Return paths and unsubscribe tokens: (campaign, row) with a keyed check, in lower-case letters and digits only.

A token is 44 characters, so that it fits a local part (64, RFC 5321 §4.5.3.1.1) and survives relays that change case,
cut at `+` or `=`, or fold URLs:

    kind        1   `b` a live return path, `u` a live unsubscribe token, `t` and `v` the same of a test message
    key id      2   letters or digits; which key of the ring made the check (rotation)
    (version)   1   `1`
    campaign   10   hex, the first 5 bytes of SHA-256("rowpost campaign\\0" + campaign id)
    row        10   hex, big-endian
    check      20   hex, 10 bytes of the row's mark

The row's mark is HMAC-SHA512 under the key over b"rowpost mark 1" + generation (b"L" live, b"T" test) + campaign (5) +
row (8, big-endian): bytes 0-15 make the Message-ID, 16-25 check the return path, 26-35 the unsubscribe token. One HMAC
a row serves all three, and none of them tells the others.

The token table, `tokens.json` in the campaign folder, says which campaign the ten hex digits stand for once the list
and the plan are gone: UTF-8 JSON, `{"format": 1, "campaigns": {"<10 hex>": {"campaign_id", "list_id", "key_id"}}}`.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Mapping
from enum import StrEnum
from hashlib import sha256, sha512

import msgspec

MAX_ROW = (1 << 40) - 1
KEY_ID = re.compile(r"[a-z0-9]{2}\Z")
_TOKEN = re.compile(r"([butv])([a-z0-9]{2})1([0-9a-f]{10})([0-9a-f]{10})([0-9a-f]{20})\Z")


class TokenUnknown(ValueError):
    """The text is no token of ours, or was made under a key that is not in the ring."""


class TokenForged(ValueError):
    """The text looks like a token of ours but its check does not fit: made up, or damaged on its way."""


class TokenKind(StrEnum):
    """What a token is for."""

    RETURN_PATH = "return_path"
    UNSUBSCRIBE = "unsubscribe"


class Token(msgspec.Struct, frozen=True):
    """What a genuine token says. `campaign` is the short id; `TokenTable` knows the campaign behind it."""

    campaign: str
    row: int
    is_test: bool
    key_id: str
    kind: TokenKind


class Marks(msgspec.Struct, frozen=True):
    """The three names of a row: Message-ID (the part before @), return path (local part), unsubscribe token."""

    message_id: str
    return_path: str
    unsubscribe: str


_PREFIX = {
    (TokenKind.RETURN_PATH, False): "b",
    (TokenKind.UNSUBSCRIBE, False): "u",
    (TokenKind.RETURN_PATH, True): "t",
    (TokenKind.UNSUBSCRIBE, True): "v",
}
_MEANING = {letter: meaning for meaning, letter in _PREFIX.items()}
_CHECK = {TokenKind.RETURN_PATH: slice(16, 26), TokenKind.UNSUBSCRIBE: slice(26, 36)}


def short_campaign(campaign_id: str) -> str:
    """The ten hex digits that stand for the campaign in its tokens."""
    return sha256(b"rowpost campaign\0" + campaign_id.encode()).hexdigest()[:10]


def _mark_prefix(campaign: str, is_test: bool) -> bytes:
    return b"rowpost mark 1" + (b"T" if is_test else b"L") + bytes.fromhex(campaign)


class TokenMaker:
    """Makes the marks of a campaign's rows, one HMAC each."""

    def __init__(self, campaign_id: str, key_id: str, key: bytes, *, is_test: bool = False) -> None:
        if not KEY_ID.match(key_id):
            raise ValueError(f"key id {key_id!r} is not two lower-case letters or digits")
        campaign = short_campaign(campaign_id)
        # HMAC with its two key blocks hashed beforehand (RFC 2104 §4): half of what hmac.digest costs a row.
        block = (key if len(key) <= 128 else sha512(key).digest()).ljust(128, b"\0")
        self._inner = sha512(bytes(octet ^ 0x36 for octet in block) + _mark_prefix(campaign, is_test))
        self._outer = sha512(bytes(octet ^ 0x5C for octet in block))
        self._bounce = f"{_PREFIX[TokenKind.RETURN_PATH, is_test]}{key_id}1{campaign}"
        self._unsubscribe = f"{_PREFIX[TokenKind.UNSUBSCRIBE, is_test]}{key_id}1{campaign}"

    def strings(self, row: int) -> tuple[str, str, str]:
        """`marks(row)` as a bare tuple, for the path that runs once a message."""
        if not 0 <= row <= MAX_ROW:
            raise ValueError(f"row {row} is outside 0..{MAX_ROW}")
        inner, outer = self._inner.copy(), self._outer.copy()
        number = row.to_bytes(8, "big")
        inner.update(number)
        outer.update(inner.digest())
        mark, digits = outer.hexdigest(), number.hex()[6:]
        return mark[:32], f"{self._bounce}{digits}{mark[32:52]}", f"{self._unsubscribe}{digits}{mark[52:72]}"

    def marks(self, row: int) -> Marks:
        """The names of row `row`: the same on every attempt."""
        return Marks(*self.strings(row))


def encode_return_path(campaign_id: str, row: int, key: bytes, *, key_id: str, is_test: bool = False) -> str:
    """The local part of the row's return path."""
    return TokenMaker(campaign_id, key_id, key, is_test=is_test).marks(row).return_path


def encode_unsubscribe(campaign_id: str, row: int, key: bytes, *, key_id: str, is_test: bool = False) -> str:
    """The row's unsubscribe token."""
    return TokenMaker(campaign_id, key_id, key, is_test=is_test).marks(row).unsubscribe


def read_token(text: str, keys: Mapping[str, bytes]) -> Token:
    """What the token says, from the token alone or an address whose local part it is; any case.

    Raises TokenUnknown (not ours, or its key is not in `keys`) or TokenForged.
    """
    local = text.strip().strip("<>").partition("@")[0].lower()
    found = _TOKEN.match(local)
    if not found:
        raise TokenUnknown(f"{text[:80]!r} is not a token")
    letter, key_id, campaign, row_digits, check = found.groups()
    if key_id not in keys:
        raise TokenUnknown(f"the token was made under key {key_id!r}, which is not in the ring")
    kind, is_test = _MEANING[letter]
    row = int(row_digits, 16)
    mark = hmac.digest(keys[key_id], _mark_prefix(campaign, is_test) + row.to_bytes(8, "big"), "sha512")
    if not hmac.compare_digest(mark[_CHECK[kind]].hex(), check):
        raise TokenForged(f"the check of token {local[:24]}... does not fit")
    return Token(campaign, row, is_test, key_id, kind)


class TokenOrigin(msgspec.Struct, frozen=True):
    """The campaign that a short id stands for."""

    campaign_id: str
    list_id: str
    key_id: str


class TokenTable(msgspec.Struct, frozen=True):
    """The content of tokens.json."""

    campaigns: dict[str, TokenOrigin] = {}
    format: int = 1

    def with_campaign(self, origin: TokenOrigin) -> TokenTable:
        """This table and `origin`."""
        return TokenTable({**self.campaigns, short_campaign(origin.campaign_id): origin})


def encode_table(table: TokenTable) -> bytes:
    """The bytes of tokens.json."""
    return msgspec.json.format(msgspec.json.encode(table), indent=1) + b"\n"


def decode_table(raw: bytes) -> TokenTable:
    """The table in `raw`; raises ValueError naming what does not fit."""
    try:
        table = msgspec.json.decode(raw, type=TokenTable)
    except msgspec.MsgspecError as problem:
        raise ValueError(str(problem)) from None
    if table.format != 1:
        raise ValueError(f"token table format {table.format}, this version reads 1")
    return table
