r"""The sink's record: one line for each recipient of each message whose content the sink has taken.

A text file, tab-separated, in UTF-8 where the wire was; the first line names the columns:

    time_us      UTC microseconds since 1970
    session      number of the connection, from 1
    sender       return path as in MAIL, without the brackets
    recipient    as in RCPT, without the brackets
    message_id   value of the Message-ID field, empty where there is none
    digest       SHA-256 of the content, hexadecimal; the same for DATA (dots removed) and BDAT
    size         octets of the content
    answer       what left in reply: 250, or `lost` where the sink was steered to lose it

Tabs, line ends and backslashes inside a value are written \t, \n, \r, \\. Lines are appended with one write before
the reply leaves, so that the record survives whatever becomes of the sender; it is not synced to disk. A last line
without its line end was cut by the death of the sink and is not read: its reply never left.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterable
from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pacsv

COLUMNS = ("time_us", "session", "sender", "recipient", "message_id", "digest", "size", "answer")
_HEADER = ("\t".join(COLUMNS) + "\n").encode()
_UNSAFE = (b"\\", b"\t", b"\n", b"\r")


def _safe(value: bytes) -> bytes:
    if b"\\" in value or b"\t" in value or b"\n" in value or b"\r" in value:
        for raw, written in zip(_UNSAFE, (b"\\\\", b"\\t", b"\\n", b"\\r"), strict=True):
            value = value.replace(raw, written)
    return value


class Recorder:
    """Appends lines to a record; `flush` before the replies leave."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._size = os.fstat(self._fd).st_size
        if self._size == 0:
            self._size = os.write(self._fd, _HEADER)
        self._lines: list[bytes] = []

    def add(
        self,
        *,
        time_us: int,
        session: int,
        sender: bytes,
        recipients: Iterable[bytes],
        message_id: bytes,
        digest: str,
        size: int,
        answer: bytes,
    ) -> None:
        """A message that was taken, one line a recipient."""
        head = b"%d\t%d\t%b\t" % (time_us, session, _safe(sender))
        tail = b"\t%b\t%b\t%d\t%b\n" % (_safe(message_id), digest.encode(), size, answer)
        for recipient in recipients:
            self._lines.append(head + _safe(recipient) + tail)

    def flush(self) -> None:
        """What was added is in the file; raises OSError where it could not be written, and then none of it is."""
        if not self._lines:
            return
        block = b"".join(self._lines)
        self._lines.clear()
        try:
            written = os.write(self._fd, block)
            while written < len(block):
                written += os.write(self._fd, block[written:])
        except OSError:
            os.ftruncate(self._fd, self._size)  # half a line would spoil the next one
            raise
        self._size += len(block)

    def close(self) -> None:
        if self._fd >= 0:
            self.flush()
            os.close(self._fd)
            self._fd = -1


_SCHEMA = pa.schema(
    [
        ("time_us", pa.int64()),
        ("session", pa.int64()),
        ("sender", pa.string()),
        ("recipient", pa.string()),
        ("message_id", pa.string()),
        ("digest", pa.string()),
        ("size", pa.int64()),
        ("answer", pa.string()),
    ]
)


def read_record(path: Path) -> pa.Table:
    """The record as an Arrow table, a row for each recipient of each message taken."""
    raw = path.read_bytes()
    whole = raw[: raw.rfind(b"\n") + 1]
    if len(whole) <= len(_HEADER):
        return _SCHEMA.empty_table()
    # Values that were not UTF-8 on the wire must not cost the line.
    text = whole.decode("utf-8", "replace").encode()
    return pacsv.read_csv(
        io.BytesIO(text),
        parse_options=pacsv.ParseOptions(delimiter="\t", quote_char=False),
        convert_options=pacsv.ConvertOptions(column_types=_SCHEMA, strings_can_be_null=False),
    )


class Tally(msgspec.Struct, frozen=True):
    """What a record says about exactly-once."""

    messages: int  # lines: recipients of messages taken
    recipients: int  # different recipients
    twice: tuple[str, ...]  # recipients that were taken more than once, sorted
    unanswered: int  # taken, but no 250 left


def tally(path: Path) -> Tally:
    """The record counted by recipient."""
    table = read_record(path)
    counts = table["recipient"].value_counts()
    often = counts.filter(pc.greater(counts.field("counts"), 1)).field("values").to_pylist()
    return Tally(
        messages=len(table),
        recipients=len(counts),
        twice=tuple(sorted(often)),
        unanswered=pc.sum(pc.not_equal(table["answer"], "250")).as_py() or 0,
    )
