"""The feedback log: what came back and what was made of it, append-only, sealed like the send log.

Bytes, format 1: the stream, seals and header of `formats.sendlog` around other columns. One file per run of
`engine bounces`; nothing is appended behind an end. A record is one finding; a message without any has one record with
no row and no address, so that it is never read twice.

    message     string   32 hex digits: BLAKE2b of the message's bytes; the same message found twice counts once
    at          timestamp[us, UTC]   when it was read
    kind        string   `formats.feedback.Kind`
    campaign    string   the campaign's id, "" where no checked token named one
    row         uint64   null where only an address is known
    is_test     bool     a test message's token: counts nowhere
    address     string
    verdict     uint8    `sendlog.Verdict`: 2 it bounced, 1 it arrived, 0 says nothing of that
    reason      uint8    `sendlog.Reason`
    class       string   `pace.judgement.Class_`
    scope       string
    hard        bool     nobody is there
    counts      bool     soft: enough of these over days suppress
    confidence  string   certain, likely, weak
    decision    string   `Decision`: what was done about it
    status      string   enhanced status
    code        uint16   reply code, 0 where none was quoted
    provider    string
    text        string   the diagnostic, one line
    source      string   the mailbox, file or webhook it came from
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

import pyarrow as pa

from formats.sendlog import Encoder, Header, LogDamaged, Reader

__all__ = ["SCHEMA", "Decision", "FeedbackRecord", "LogDamaged", "feedback_encoder", "feedback_reader"]

SCHEMA = pa.schema(
    [
        pa.field("message", pa.string(), nullable=False),
        pa.field("at", pa.timestamp("us", tz="UTC"), nullable=False),
        pa.field("kind", pa.string(), nullable=False),
        pa.field("campaign", pa.string(), nullable=False),
        pa.field("row", pa.uint64()),
        pa.field("is_test", pa.bool_(), nullable=False),
        pa.field("address", pa.string(), nullable=False),
        pa.field("verdict", pa.uint8(), nullable=False),
        pa.field("reason", pa.uint8(), nullable=False),
        pa.field("class", pa.string(), nullable=False),
        pa.field("scope", pa.string(), nullable=False),
        pa.field("hard", pa.bool_(), nullable=False),
        pa.field("counts", pa.bool_(), nullable=False),
        pa.field("confidence", pa.string(), nullable=False),
        pa.field("decision", pa.string(), nullable=False),
        pa.field("status", pa.string(), nullable=False),
        pa.field("code", pa.uint16(), nullable=False),
        pa.field("provider", pa.string(), nullable=False),
        pa.field("text", pa.string(), nullable=False),
        pa.field("source", pa.string(), nullable=False),
    ]
)


class Decision(StrEnum):
    """What was done about a finding."""

    NONE = ""
    SUPPRESSED = "suppressed"  # for the whole house: a hard bounce, a complaint, or too many soft ones
    UNSUBSCRIBED = "unsubscribed"  # from the campaign's list
    COUNTED = "counted"  # a soft bounce, one more
    PROVISIONAL = "provisional"  # hard, but the provider misbehaves: waits for `engine bounces --confirm`
    UNMATCHED = "unmatched"  # about nobody we know: kept for people to look at
    FORGED = "forged"  # carries a token whose check does not fit


class FeedbackRecord(NamedTuple):
    """One record, in the order of SCHEMA's columns."""

    message: str
    at: int
    kind: str
    campaign: str = ""
    row: int | None = None
    is_test: bool = False
    address: str = ""
    verdict: int = 0
    reason: int = 0
    class_: str = ""
    scope: str = ""
    hard: bool = False
    counts: bool = False
    confidence: str = ""
    decision: str = ""
    status: str = ""
    code: int = 0
    provider: str = ""
    text: str = ""
    source: str = ""


def feedback_encoder(header: Header) -> Encoder:
    """An encoder of FeedbackRecords."""
    return Encoder(header, SCHEMA)


def feedback_reader(buffer: pa.Buffer) -> Reader:
    """A reader of a feedback log; raises LogDamaged where not even the header can be read."""
    return Reader(buffer, SCHEMA)
