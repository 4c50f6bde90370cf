"""The send log: what a worker was about to do and how it came out, append-only, readable as far as it is whole.

Bytes, format 1. An Arrow IPC **stream** (a file without its footer would be unreadable after a crash), one per process
start, never appended to after a restart. Batches are lz4, those of fewer than 16 records plain: Arrow says in each
batch which it is, so readers of either read both. The schema's metadata is the header, a JSON `Header` under the key
`rowpost`. Columns:

    kind      uint8    1 intent ("about to"), 2 result ("came out so"), 3 name, 4 event
    serial    uint64   intents are numbered from 1 in each log; a result carries its intent's number, 0 where an
                       outcome needed no attempt (invalid, suppressed, expired)
    row       uint64   the row in the list; in a name record the number that `text` names
    at        timestamp[us, UTC]
    attempt   uint16   the row's attempts so far, this one included; a field of its history, never a key
    verdict   uint8    `Verdict`, 0 in intents
    reason    uint8    `Reason`, 0 where there is none
    code      uint16   the reply's code, 0 where no reply was had
    provider  uint16   number declared by a name record with reason 1; 0 is "none"
    source    uint16   number declared by a name record with reason 2; 0 is "none"
    wait_s    uint32   in a deferred result: the row is due this many seconds after `at`
    text      string   the reply's text (enhanced status first), or our own words; null where there is none

**Seals.** Each record batch's custom metadata holds `seal`: 16 hex digits, a CRC-32 over every byte of the stream up to
the batch's own end with the seal's digits read as zeros, then the batch's number. pyarrow reads most flipped bits
without noticing, and takes a cut on a message border or a tail of zeros for a clean end (measured: 285 of 500 flips in
lz4 bodies silent); the seal tells. A log that was closed properly ends in an empty batch with `end` = "1" in its
metadata. What follows the last good seal is thrown away: a batch is durable once its write was synced, not before.

`row` and `serial` never shrink their width; times are UTC microseconds.
"""

from __future__ import annotations

import io
import re
import struct
import zlib
from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import Any

import msgspec
import pyarrow as pa

FORMAT = 1

_SEAL_BLANK = b"0" * 16

# Smaller batches are not compressed: two dozen frames around a few bytes each make them a third larger, and twice as
# slow to read. A worker that sends thirty a second writes hardly any others.
_WORTH_COMPRESSING = 16

SCHEMA = pa.schema(
    [
        pa.field("kind", pa.uint8(), nullable=False),
        pa.field("serial", pa.uint64(), nullable=False),
        pa.field("row", pa.uint64(), nullable=False),
        pa.field("at", pa.timestamp("us", tz="UTC"), nullable=False),
        pa.field("attempt", pa.uint16(), nullable=False),
        pa.field("verdict", pa.uint8(), nullable=False),
        pa.field("reason", pa.uint8(), nullable=False),
        pa.field("code", pa.uint16(), nullable=False),
        pa.field("provider", pa.uint16(), nullable=False),
        pa.field("source", pa.uint16(), nullable=False),
        pa.field("wait_s", pa.uint32(), nullable=False),
        pa.field("text", pa.string()),
    ]
)


class Kind(IntEnum):
    """What a record says."""

    INTENT = 1
    RESULT = 2
    NAME = 3
    EVENT = 4


class Verdict(IntEnum):
    """How an attempt, or a row without one, came out. The numbers are at rest: never change one."""

    NONE = 0
    ACCEPTED = 1
    REJECTED = 2  # for good: outcome bounced
    DEFERRED = 3  # the row waits `wait_s` seconds for its next attempt
    LOST = 4  # the connection ended before the final dot: safe to try again, no attempt counted
    UNTOUCHED = 5  # given back without an attempt
    IN_DOUBT = 6  # the final dot left and no reply came
    SUPPRESSED = 7
    INVALID = 8
    EXPIRED = 9  # deferred past the maximum age: outcome deferred
    UNSENT = 10  # will not be attempted: cancelled, campaign expired


class Reason(IntEnum):
    """Why, as far as a number can say it."""

    NONE = 0
    RECIPIENT = 1  # bounced/recipient: the only one that may reach the suppression list
    POLICY = 2  # bounced/policy
    CONTENT = 3  # bounced/content
    ADDRESS = 4  # invalid/address
    RENDER = 5  # invalid/render
    CANCELLED = 6  # unsent/cancelled
    EXPIRED = 7  # unsent/expired
    SIZE = 8  # bounced/content: larger than the server takes
    SENDER = 9  # bounced/policy: our sender domain or settings are refused
    RESENT = 10  # an intent that follows an operator's `resend`


NAME_PROVIDER = 1
NAME_SOURCE = 2


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """Who wrote the log, for what."""

    format: int = FORMAT
    log_id: str
    campaign_id: str
    plan_fingerprint: str
    incarnation: str
    sender: str  # the name for people (`--name`)
    host_id: str
    boot_id: str
    worker: int
    started_at_us: int


class LogDamaged(ValueError):
    """Not a send log of a format this version reads, or its header is gone. Damage behind the header is a value."""


# One record, in the order of SCHEMA's columns.
Record = tuple[int, int, int, int, int, int, int, int, int, int, int, str | None]


class Encoder:
    """Records to the bytes of a log, batch by batch. Pure: whoever calls it writes and syncs what it returns.

    `schema` is for the other sealed logs (`feedbacklog`): the same seals around other columns.
    """

    def __init__(self, header: Header, schema: pa.Schema = SCHEMA) -> None:
        self._sink = io.BytesIO()
        schema = schema.with_metadata({"rowpost": msgspec.json.encode(header)})
        # One thread: handing a dozen small buffers to a pool costs more than compressing them.
        options = pa.ipc.IpcWriteOptions(compression="lz4", use_threads=False)
        self._writer = pa.ipc.new_stream(self._sink, schema, options=options)
        self._plain: pa.ipc.RecordBatchStreamWriter | None = None
        self._schema = schema
        self._crc = 0
        self._batches = 0
        self.length = 0

    @property
    def seal(self) -> str:
        """The last batch's seal: with `length`, what a report says of how far the log had come."""
        return f"{self._crc:08x}{self._batches:08x}"

    def batch(self, records: Sequence[tuple[Any, ...]]) -> bytes:
        """The sealed bytes of one batch; the first call's bytes begin with the stream's header."""
        columns = zip(*records, strict=True)
        arrays = [_column(column, field) for column, field in zip(columns, self._schema, strict=True)]
        return self._sealed(pa.RecordBatch.from_arrays(arrays, schema=self._schema), {"seal": _SEAL_BLANK})

    def columns(self, batch: pa.RecordBatch) -> bytes:
        """The same for records that are columns of SCHEMA already."""
        return self._sealed(batch.replace_schema_metadata(self._schema.metadata), {"seal": _SEAL_BLANK})

    def end(self) -> bytes:
        """The bytes that close the log: an empty batch that says so, and Arrow's end of stream."""
        empty = pa.RecordBatch.from_arrays([pa.array([], field.type) for field in self._schema], schema=self._schema)
        closing = self._sealed(empty, {"end": "1", "seal": _SEAL_BLANK})
        self._writer.close()
        return closing + self._taken()

    def _small_writer(self) -> pa.ipc.RecordBatchStreamWriter:
        """A writer of plain batches into the same stream: its own schema message is thrown away."""
        if self._plain is None:
            options = pa.ipc.IpcWriteOptions(use_threads=False)
            self._plain = pa.ipc.new_stream(self._sink, self._schema, options=options)
            self._plain.write_batch(pa.RecordBatch.from_pylist([], self._schema))
            self._taken()
        return self._plain

    def _taken(self) -> bytes:
        raw = self._sink.getvalue()
        self._sink.seek(0)
        self._sink.truncate()
        return raw

    def _sealed(self, batch: pa.RecordBatch, metadata: dict[str, str | bytes]) -> bytes:
        # The stream's schema leaves with the first batch, whichever size it has.
        small = 0 < batch.num_rows < _WORTH_COMPRESSING and self._batches > 0
        (self._small_writer() if small else self._writer).write_batch(batch, custom_metadata=metadata)
        raw = self._taken()
        self._batches += 1
        self._crc = zlib.crc32(raw, self._crc)
        self.length += len(raw)
        # The blank stands in the batch's own metadata, before its body; the header before it holds no zeros so long.
        at = _find_seal(raw, _SEAL_BLANK)
        return raw[:at] + self.seal.encode() + raw[at + 16 :]


_CODES = {  # of `struct`, by what each value takes at rest
    pa.uint8(): "B",
    pa.uint16(): "H",
    pa.uint32(): "I",
    pa.uint64(): "Q",
    pa.timestamp("us", tz="UTC"): "q",
}


def _column(numbers: tuple[Any, ...], field: pa.Field) -> pa.Array:
    """A column of a batch. Numbers are packed by hand: pyarrow looks at each twice, and takes half as long again."""
    code = None if field.nullable else _CODES.get(field.type)
    if code is None:
        return pa.array(numbers, field.type)
    packed = struct.pack(f"<{len(numbers)}{code}", *numbers)
    return pa.Array.from_buffers(field.type, len(numbers), [None, pa.py_buffer(packed)])


def _find_seal(raw: bytes | memoryview, digits: bytes) -> int:
    """Where the seal's value stands in a message: behind the key that precedes or follows it, as flatbuffers lay it."""
    text = bytes(raw) if isinstance(raw, memoryview) else raw
    at = text.find(digits)
    while at >= 0:
        # Flatbuffers write a string as its length (uint32) before its bytes.
        if text[at - 4 : at] == b"\x10\x00\x00\x00":
            return at
        at = text.find(digits, at + 1)
    raise ValueError("no seal")


class Log(msgspec.Struct, kw_only=True):
    """What could be read of a log: its header, whole batches, and what was wrong behind them."""

    header: Header
    is_closed: bool = False
    damage: str | None = None  # None: nothing follows the last good seal, or a plain torn tail (see `torn`)
    torn: int = 0  # bytes behind the last good seal that were never sealed: a killed writer leaves them
    length: int = 0  # bytes up to the last good seal
    seal: str = ""


# A thread a column costs several times what it saves on batches of a thousand records: measured, five times the
# processor time and four times the time.
_READING = pa.ipc.IpcReadOptions(use_threads=False)


class Reader:
    """A log's batches up to its last good seal.

    `Reader(buffer)` raises LogDamaged where not even the header can be read. Iterating yields `pa.RecordBatch`es of
    `schema`; afterwards `log` says how it ended. Never raises while iterating, whatever the bytes are.
    """

    def __init__(self, buffer: pa.Buffer, schema: pa.Schema = SCHEMA) -> None:
        self._view = memoryview(buffer)
        self._source = pa.BufferReader(buffer)
        try:
            self._stream = pa.ipc.open_stream(self._source, options=_READING)
            raw = (self._stream.schema.metadata or {})[b"rowpost"]
            header = msgspec.json.decode(raw, type=Header)
        except (pa.ArrowException, OSError, ValueError, KeyError, MemoryError) as problem:
            raise LogDamaged(f"not a send log: {problem}") from None
        if header.format != FORMAT:
            raise LogDamaged(f"send log format {header.format}, this version reads {FORMAT}")
        if not self._stream.schema.equals(schema, check_metadata=False):
            raise LogDamaged("a send log with other columns")
        self.log = Log(header=header)
        self._header_end = self._source.tell()

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        crc, number, start = 0, 0, 0
        size = len(self._view)
        while True:
            try:
                batch, metadata = self._stream.read_next_batch_with_custom_metadata()
                end = self._source.tell()
                seal = (metadata or {})[b"seal"]
                raw = self._view[start:end]
                # The metadata stand before the body; the schema message precedes those of the first batch.
                head = bytes(raw[: 8 + int.from_bytes(raw[4:8], "little")] if start else raw[:_MOST_HEAD])
                at = _find_seal(head, seal)
                crc = zlib.crc32(raw[at + 16 :], zlib.crc32(_SEAL_BLANK, zlib.crc32(raw[:at], crc)))
                number += 1
                if seal != f"{crc:08x}{number:08x}".encode():
                    raise ValueError("the seal does not match the bytes before it")
            except StopIteration:
                # A cut on a message border, or a tail of zeros, looks like this as well: only `end` tells.
                self._ended(size - self.log.length, None)
                return
            except (pa.ArrowException, OSError, ValueError, KeyError, MemoryError) as problem:
                self._ended(size - self.log.length, str(problem) or type(problem).__name__)
                return
            self.log.length, self.log.seal, start = end, seal.decode(), end
            if b"end" in metadata:
                self.log.is_closed = True
                if size - end > 8:  # Arrow's own end of stream
                    self.log.damage = f"{size - end - 8} bytes follow the end of the log"
                return
            yield batch

    def _ended(self, rest: int, problem: str | None) -> None:
        self.log.torn = rest
        # The header leaves with the first batch: a tail behind a whole header alone is a torn first batch.
        tail = self._view[max(self.log.length, self._header_end) :]
        if len(tail) and not _may_be_torn(tail):
            self.log.damage = f"{rest} bytes behind offset {self.log.length} cannot be read: {problem or 'zeros'}"


def is_torn_start(buffer: pa.Buffer) -> bool:
    """Whether a file without a readable header is the beginning of a log: its worker was killed in its first write."""
    return _may_be_torn(memoryview(buffer))


# What no batch of ours reaches: a thousand records' fixed columns are 46 kB, and texts are cut by who reads replies.
_MOST_HEAD = 65_536
_MOST_BODY = 1 << 26

# A sealed message's beginning: Arrow's continuation, the head's length, and within the head the seal's key and digits.
# No text can look like it (UTF-8 has no byte of ones), no column of numbers holds words.
_MESSAGE = re.compile(rb"\xff\xff\xff\xff..\x00\x00", re.DOTALL)
_SEAL = re.compile(rb"\x10\x00\x00\x00[0-9a-f]{16}\x00")


def _may_be_torn(tail: memoryview) -> bool:
    """Whether a tail is what a killed process leaves: the beginning of one message, nothing whole behind it.

    A length that was damaged makes a whole message look like the beginning of a longer one: what was sealed after it
    gives it away. In the very last batch of a log without an end, nothing does.
    """
    start = bytes(tail[:_MOST_HEAD])
    if not start.strip(b"\0"):
        return False
    if len(start) < 8:
        return start[:4] == b"\xff\xff\xff\xff"[: len(start)]
    head = int.from_bytes(start[4:8], "little")
    if start[:4] != b"\xff\xff\xff\xff" or head > _MOST_HEAD - 8 or _is_sealed_behind(tail):
        return False
    if len(tail) < 8 + head:
        return True
    try:
        pa.ipc.read_message(pa.BufferReader(tail))
    except (pa.ArrowException, OSError, ValueError, EOFError, MemoryError):
        return _reads_when_filled_up(start[: 8 + head])
    return False


def _reads_when_filled_up(head: bytes) -> bool:
    """Whether a message's head is sound, and lacks nothing but its body."""
    filled = pa.allocate_buffer(len(head) + _MOST_BODY)  # what the body holds does not matter here: never touched
    memoryview(filled).cast("B")[: len(head)] = head
    try:
        pa.ipc.read_message(pa.BufferReader(filled))
    except (pa.ArrowException, OSError, ValueError, EOFError, MemoryError):
        return False
    return True


def _is_sealed_behind(tail: memoryview) -> bool:
    """Whether a sealed message begins anywhere behind the tail's first byte."""
    for found in _MESSAGE.finditer(tail, 8):
        at = found.start()
        head = int.from_bytes(tail[at + 4 : at + 8], "little")
        if head < _MOST_HEAD and _SEAL.search(tail[at + 8 : at + 8 + head]):
            return True
    return False
