"""Bad input: bombs, endless headers, damage. Never an exception, never long, never much memory."""

from __future__ import annotations

import random
import time
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from notices import FAILED, NOTICES, plain, report

from engine.bounce.classify import classify, shipped_rules
from engine.bounce.lastresort import address_by_flufl
from formats.feedback import Kind, read_feedback


def nested(depth: int) -> bytes:
    head = b"".join(b'Content-Type: multipart/mixed; boundary="b%d"\n\n--b%d\n' % (n, n) for n in range(depth))
    return b"From: MAILER-DAEMON@x.example\n" + head + b"Content-Type: text/plain\n\nx\n"


def many_parts(count: int) -> bytes:
    part = b"--b\nContent-Type: message/delivery-status\n\nFinal-Recipient: rfc822; a@x.example\nAction: failed\n\n"
    return b'From: MAILER-DAEMON@x.example\nContent-Type: multipart/report; boundary="b"\n\n' + part * count


BOMBS = {
    "depth": nested(5_000),
    "100,000 parts": many_parts(100_000),
    "endless header": b"From: MAILER-DAEMON@x.example\nX: " + b"a" * 3_000_000,
    "a million header lines": b"X-A: b\n" * 1_000_000,
    "a million folds": b"Subject: x\n" + b" y\n" * 1_000_000,
    "encoded words": b"Subject: " + b"=?utf-8?q?=?= " * 200_000 + b"\n\n",
    "nothing": b"",
    "newlines": b"\n" * 2_000_000,
    "zeros": bytes(2_000_000),
    "at signs": b"From: MAILER-DAEMON@x.example\n\n" + b"a@" * 500_000,
    "dots and ats": b"From: MAILER-DAEMON@x.example\n\ncould not be delivered\n" + b"a@b.c.d.e.f.g.h.i.j.k " * 50_000,
    "brackets": b"From: MAILER-DAEMON@x.example\n\n" + b"<" * 1_000_000,
    "address lines": b"From: MAILER-DAEMON@x.example\n\ncould not be delivered\n" + b"<a@b.example>:\n" * 60_000,
    "unclosed style": b"Content-Type: text/html\n\n" + b"<style>" * 40_000,
    "fields": b"Content-Type: message/delivery-status\n\n" + b"Final-Recipient: rfc822; a@b.example\n" * 60_000,
    "spaces": b"From: MAILER-DAEMON@x.example\n\nto" + b" " * 500_000 + b"x",
    "digits": b"From: MAILER-DAEMON@x.example\n\n" + b"550 " * 300_000,
    "one boundary over and over": b'Content-Type: multipart/mixed; boundary="b"\n\n' + b"--b\n" * 400_000,
    "json": b"From: a@x.example\n\n" + b"[" * 1_000_000,
    "base64 of nothing": b"Content-Transfer-Encoding: base64\n\n" + b"====\n" * 200_000,
    "could not": b"From: MAILER-DAEMON@x.example\n\n" + b"could not " * 100_000,
    "delivery failed": b"From: MAILER-DAEMON@x.example\n\n" + b"delivery of " * 100_000,
    "user user user": b"From: MAILER-DAEMON@x.example\n\n<a@b.example>: 550 " + b"user " * 100_000,
    "quoted locals": b"From: MAILER-DAEMON@x.example\n\n" + b'"' * 300_000,
    "forwards": b"From: a@x.example\nSubject: Fwd: x\n\n" + b"---- forwarded message ----\n" * 50_000,
}


@pytest.mark.parametrize("name", BOMBS)
def test_bomb_costs_little(name: str) -> None:
    start = time.process_time()
    feedback = read_feedback(BOMBS[name])
    classify(feedback, shipped_rules())
    assert time.process_time() - start < 1.5


def test_memory_is_bounded_by_the_message() -> None:
    raw = many_parts(100_000)
    tracemalloc.start()
    read_feedback(raw)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 40_000_000


def test_bounce_of_a_bounce_of_a_bounce_ends() -> None:
    raw = report(FAILED)
    for level in range(30):
        raw = report(FAILED, returned=raw.decode()).replace(b"=_b1", b"=_b%d" % (level + 100))
    assert [one.address for one in read_feedback(raw).recipients] == ["ann@example.org"]


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=400))
def test_any_bytes_are_read(raw: bytes) -> None:
    classify(read_feedback(raw), shipped_rules())


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=300))
def test_any_text_from_a_mail_system_is_read(text: str) -> None:
    raw = (
        plain("The message could not be delivered to:\n" + text).replace(b"\r", b"").decode("utf-8", "replace").encode()
    )
    for finding in classify(read_feedback(raw), shipped_rules()):
        assert finding.address


def damaged(raw: bytes, rng: random.Random) -> bytes:
    data = bytearray(raw)
    for _ in range(rng.randint(1, 5)):
        at = rng.randrange(max(1, len(data)))
        match rng.randrange(5):
            case 0:
                data[at : at + 1] = bytes([rng.randrange(256)])
            case 1:
                del data[at : at + rng.randint(1, 60)]
            case 2:
                data[at:at] = data[at : at + 200] * rng.randint(1, 4)
            case 3:
                data[at:at] = bytes(rng.randrange(256) for _ in range(20))
            case 4:
                del data[at:]
    return bytes(data)


def test_damaged_notices_are_read() -> None:
    """The benchmark does this 100,000 times."""
    rng = random.Random(7)
    originals = [raw for raw, _, _ in NOTICES.values()] + [report(FAILED)]
    kinds = set()
    for _ in range(1500):
        feedback = read_feedback(damaged(rng.choice(originals), rng))
        classify(feedback, shipped_rules())
        kinds.add(feedback.kind)
    assert Kind.DELIVERY_REPORT in kinds


def test_last_resort_never_raises() -> None:
    rng = random.Random(8)
    for raw in (
        b"",
        b"From: \n\nx",
        b"From:\nSubject: x\n\nTo: a@b",
        *(damaged(report(FAILED), rng) for _ in range(60)),
    ):
        assert isinstance(address_by_flufl(raw), list)
