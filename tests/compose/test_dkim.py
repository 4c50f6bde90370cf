# ruff: noqa: E501 - template sources and tables read better in one line
"""DKIM: vectors of the RFCs, and every signature verified by dkimpy."""

from __future__ import annotations

import base64
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import dkim
import pyarrow as pa
import pytest
from cryptography.hazmat.primitives.asymmetric import ed25519
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.compose.render import Message
from engine.compose.sign import DkimKeyError, make_key, record_of
from engine.errors import Exit
from formats.address import Mailbox
from formats.dkim import (
    BodyHasher,
    empty_body_hash,
    key_record,
    record_strings,
    relaxed_body,
    relaxed_field,
    signature_field,
    signed_names,
    simple_body,
)
from tests.compose.conftest import NOW_US, Campaign, MakeCampaign

FILES: dict[str, str | bytes] = {
    "page.html": "<p>  Hi   {{ first }}</p>\n\n\t<p>x</p>\n",
    "text.txt": "Hi  {{ first }}\n\n\n",
}
SIGNED: dict[str, Any] = {
    "unsubscribe_url": "https://news.example.org/u/{token}", "unsubscribe_mailto": "leave@example.org", "feedback_id": "a:b:c:sender",
    "list_id": "weekly.example.org", "to_name": "{{ first }}", "subject": "News  for {{ first }}", "headers": {"X-A": "{{ first }}"},
}  # fmt: skip


@pytest.fixture(scope="session")
def key_folder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    folder = tmp_path_factory.mktemp("dkim")
    return folder, {"r": make_key(folder / "rsa.pem", "rsa"), "e": make_key(folder / "ed.pem", "ed25519")}


def signing(
    make: MakeCampaign, keys: tuple[Path, dict[str, str]], *tables: tuple[str, str], **message: Any
) -> Campaign:
    dkim_tables = [
        {
            "domain": "example.org",
            "selector": selector,
            "key_file": str(keys[0] / ("rsa.pem" if selector == "r" else "ed.pem")),
            "algorithm": "rsa-sha256" if selector == "r" else "ed25519-sha256",
            "canonicalization": form,
            "also": number > 0,
        }
        for number, (selector, form) in enumerate(tables)
    ]
    return make(FILES, more={"dkim": dkim_tables}, **{**SIGNED, **message})


def is_good(content: bytes, records: dict[str, str], index: int = 0) -> bool:
    def answer(name: bytes, timeout: int = 5) -> bytes:
        selector, _, domain = name.decode().rstrip(".").partition("._domainkey.")
        assert domain == "example.org"
        return records[selector].encode()

    try:
        return bool(dkim.DKIM(content).verify(idx=index, dnsfunc=answer))
    except dkim.ValidationError:
        return False


@pytest.mark.slow
@pytest.mark.parametrize("selector", ["r", "e"])
@pytest.mark.parametrize("form", ["relaxed/simple", "relaxed/relaxed"])
@pytest.mark.parametrize("first", ["Ann", "Jörg, the  second", "", "x\r\nBcc: y", "é" * 300, "a" * 300, "  "])
def test_every_signature_verifies(
    campaign: MakeCampaign, key_folder: Any, selector: str, form: str, first: str
) -> None:
    sent = signing(campaign, key_folder, (selector, form)).send({"first": first})
    assert is_good(sent.content, key_folder[1])
    assert f"c={form};".encode() in sent.content


def test_two_signatures_only_where_asked(campaign: MakeCampaign, key_folder: Any) -> None:
    both = signing(campaign, key_folder, ("r", "relaxed/simple"), ("e", "relaxed/relaxed")).send({"first": "Ann"})
    assert both.content.count(b"DKIM-Signature:") == 2
    assert is_good(both.content, key_folder[1], 0)
    assert is_good(both.content, key_folder[1], 1)


def test_the_signature_covers_and_over_signs(campaign: MakeCampaign, key_folder: Any) -> None:
    content = signing(campaign, key_folder, ("r", "relaxed/simple")).send({"first": "Ann"}).content
    field = content.partition(b"\r\nDate:")[0].decode().replace("\r\n", "")
    names = field.partition("h=")[2].partition(";")[0].replace(" ", "").split(":")
    for name in (
        "from",
        "to",
        "subject",
        "date",
        "message-id",
        "list-unsubscribe",
        "list-unsubscribe-post",
        "feedback-id",
    ):
        assert names.count(name) == 2, name
    assert names.count("x-a") == 1
    assert "l=" not in field.replace("rel", "")
    head, _, body = content.partition(b"\r\n\r\n")
    for added in (b"From: evil@x.example", b"Subject: evil", b"List-Unsubscribe: <https://evil.example>", b"Feedback-ID: x:y:z:evil",
                  b"Reply-To: evil@x.example", b"Cc: evil@x.example"):  # fmt: skip
        for changed in (head + b"\r\n" + added, head.replace(b"\r\nDate:", b"\r\n" + added + b"\r\nDate:")):
            assert not is_good(changed + b"\r\n\r\n" + body, key_folder[1]), added
    assert not is_good(content.replace(b"Hi", b"Ho"), key_folder[1])


@pytest.mark.parametrize("body", ["{{ first }}", "{{ first }}\n\n\n", "a\n{{ first }}"])
@pytest.mark.parametrize("first", ["", "\n\n", "x"])
def test_short_and_empty_bodies(campaign: MakeCampaign, key_folder: Any, body: str, first: str) -> None:
    for form in ("relaxed/simple", "relaxed/relaxed"):
        table = {
            "domain": "example.org",
            "selector": "r",
            "key_file": str(key_folder[0] / "rsa.pem"),
            "canonicalization": form,
        }
        sent = campaign({"text.txt": body}, more={"dkim": [table]}).send({"first": first})
        assert is_good(sent.content, key_folder[1])


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(first=st.text(max_size=80), form=st.sampled_from(["relaxed/simple", "relaxed/relaxed"]))
def test_any_row_verifies(campaign: MakeCampaign, key_folder: Any, first: str, form: str) -> None:
    composer = signing(campaign, key_folder, ("e", form)).composer(pa.schema([("first", pa.string())]))
    assert is_good(composer.compose(1, Mailbox("ann", "example.net"), [first], NOW_US).content, key_folder[1])


def test_signing_in_threads(campaign: MakeCampaign, key_folder: Any) -> None:
    composer = signing(campaign, key_folder, ("r", "relaxed/simple")).composer(pa.schema([("first", pa.string())]))
    rows = [(n, Mailbox(f"r{n}", "example.net"), [f"Ann {n}"]) for n in range(30)]
    with ThreadPoolExecutor(2) as pool:
        made = composer.compose_many(rows, NOW_US, pool)
    assert [message.content for message in made if isinstance(message, Message)] == [
        composer.compose(*row, NOW_US).content for row in rows
    ]
    assert is_good(made[17].content, key_folder[1])  # type: ignore[union-attr]


def test_a_utf8_recipient_is_signed_too(campaign: MakeCampaign, key_folder: Any) -> None:
    sent = signing(campaign, key_folder, ("r", "relaxed/simple")).send({"first": "Ann"}, to="jörg@example.net")
    assert is_good(sent.content, key_folder[1])


# --- the RFCs -------------------------------------------------------------------------------------


def test_rfc_6376_3_4_5_examples() -> None:
    assert relaxed_field("A", " X ") + relaxed_field("B ".strip(), " Y\t\r\n\tZ  ") == "a:X\r\nb:Y Z\r\n"
    body = b" C \r\nD \t E\r\n\r\n\r\n"
    assert relaxed_body(body) == b" C\r\nD E\r\n"
    assert simple_body(body) == b" C \r\nD \t E\r\n"


def test_rfc_6376_empty_bodies() -> None:
    assert simple_body(b"") == b"\r\n"
    assert relaxed_body(b"") == b""
    assert empty_body_hash("simple") == "frcCV1k9oG9oKj3dpUqdJg1PxRT2RSN/XKdLCPjaYaY="
    assert empty_body_hash("relaxed") == "47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU="
    for form in ("simple", "relaxed"):
        assert base64.b64encode(BodyHasher(b"", form).digest([b""])).decode() == empty_body_hash(form)  # type: ignore[arg-type]


@settings(deadline=None, max_examples=60)
@given(prefix=st.binary(max_size=9), rest=st.lists(st.sampled_from([b"a", b"\r\n", b"bc d"]), max_size=6).map(b"".join))
def test_a_shared_beginning_changes_no_hash(prefix: bytes, rest: bytes) -> None:
    import hashlib

    for end in (b"\r\n", b"--\r\n"):
        pieces = [prefix, rest, end]
        wanted = hashlib.sha256(simple_body(b"".join(pieces))).digest()
        assert BodyHasher(prefix, "simple").digest(pieces) == wanted
        assert BodyHasher(prefix, "simple").digest([b"".join(pieces)]) == wanted


def test_rfc_8463_vector() -> None:
    """Appendix A: the key, its record, and the signature over the message of A.3."""
    secret = base64.b64decode("nWGxne/9WmC6hEr0kuwsxERJxWl7MmkZcDusAxyuf2A=")
    key = ed25519.Ed25519PrivateKey.from_private_bytes(secret)
    assert record_of(key) == "v=DKIM1; k=ed25519; p=11qYAYKxCrfVS/7TyWQHOg7hcvPapiMlrwIaaPcHURo="
    body = b"Hi.\r\n\r\nWe lost the game.  Are you hungry yet?\r\n\r\nJoe.\r\n"
    assert (
        base64.b64encode(__import__("hashlib").sha256(relaxed_body(body)).digest())
        == b"2jUSOH9NhtVGCQWNr9BrIAPreKQjO6Sn7XIkfJVOzv8="
    )
    fields = [
        ("From", "Joe SixPack <joe@football.example.com>"),
        ("To", "Suzie Q <suzie@shopping.example.net>"),
        ("Subject", "Is dinner ready?"),
        ("Date", "Fri, 11 Jul 2003 21:00:37 -0700 (PDT)"),
        ("Message-ID", "<20030712040037.46341.5F8J@football.example.com>"),
    ]
    # h= of the vector names from, to, subject, date, message-id, and from, subject, date once more.
    covered = "".join(relaxed_field(name, value) for name, value in fields)
    signature = (
        "v=1; a=ed25519-sha256; c=relaxed/relaxed; d=football.example.com; i=@football.example.com; q=dns/txt; s=brisbane; "
        "t=1528637909; h=from : to : subject : date : message-id : from : subject : date; "
        "bh=2jUSOH9NhtVGCQWNr9BrIAPreKQjO6Sn7XIkfJVOzv8=; b="
    )
    digest = __import__("hashlib").sha256((covered + relaxed_field("DKIM-Signature", signature)[:-2]).encode()).digest()
    expected = "/gCrinpcQOoIfuHNQIbq4pgh9kyIK3AQUdt9OdqQehSwhEIug4D11BusFa3bT3FY5OsU7ZbnKELq+eXdp1Q1Dw=="
    assert base64.b64encode(key.sign(digest)).decode() == expected


def test_records_and_fields() -> None:
    assert key_record(b"\x01", "ed25519") == "v=DKIM1; k=ed25519; p=AQ=="
    assert [len(piece) for piece in record_strings("x" * 400)] == [255, 145]
    assert signed_names(["From", "Received", "X-A"])[:2] == ["from", "x-a"]
    field = signature_field("DKIM-Signature: b=", bytes(256))
    assert all(len(line) <= 78 + 14 for line in field.split("\r\n"))


# --- keys -----------------------------------------------------------------------------------------


def test_a_new_key_is_private_and_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "keys/s1.pem"
    record = make_key(path, "ed25519")
    assert record.startswith("v=DKIM1; k=ed25519; p=")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(Exception, match="never overwritten"):
        make_key(path, "ed25519")


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("gone.pem", None, "missing"),
        ("junk.pem", b"junk", "no private key"),
        ("ed.pem", "ed", "the settings say rsa-sha256"),
    ],
)
def test_a_wrong_key_is_a_clear_refusal(
    campaign: MakeCampaign, tmp_path: Path, name: str, content: Any, says: str
) -> None:
    if content == "ed":
        make_key(tmp_path / name, "ed25519")
    elif content:
        (tmp_path / name).write_bytes(content)
    table = {"domain": "example.org", "selector": "s", "key_file": name}
    with pytest.raises(DkimKeyError, match=says) as refused:
        campaign({"text.txt": "x"}, more={"dkim": [table]}).composer()
    assert refused.value.exit_code == Exit.KEYS
