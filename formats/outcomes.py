"""The merged result, one row per recipient: what `report/recipients.parquet` holds, and the words it uses.

Bytes, format 1: a Parquet file (zstd), rows in the order of the list, every row of the plan exactly once. The schema's
metadata holds `rowpost_outcomes`, a JSON `Header`. Columns:

    row              uint64   the row's number in the list
    id               as in the list; null where the list has no id column
    address          string   as it stands in the list
    provider         string   who ran the MX hosts of the last word; null where no attempt came so far
    outcome          string   `Outcome`
    reason           string   `recipient`, `policy`, `content` (bounced), `address`, `render` (invalid), `waiting`,
                              `cancelled`, `expired`, `not_reached` (unsent), `operator` (accepted by an operator's
                              word, not by a reply); else null
    attempts         uint16   attempts that count: connections lost before the final dot do not
    first_at         timestamp[us, UTC]   when the first attempt began; null without one
    last_at          timestamp[us, UTC]   when the last word was had; null where there is none
    code             uint16   the last word's reply code; null where no reply was had
    enhanced_status  string   the reply's enhanced status code (RFC 3463), where it began with one
    last_reply       string   the reply's text, addresses in it masked unless `log_addresses` was set
    machine          string   the sender's name (`--name`) in the log that had the last word
    source           string   the source of the last word
    bounced_at       timestamp[us, UTC]   when a bounce of a message that had been accepted came back

Strings other than address, id and last_reply are dictionary encoded. Readers ask for columns by name; a later format
may add columns, so more columns than these are no error, fewer are.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

FORMAT = 1
KEY = b"rowpost_outcomes"

_TIME = pa.timestamp("us", tz="UTC")
_WORD = pa.dictionary(pa.int32(), pa.string())


class Outcome(StrEnum):
    """The last word on a row. 250 means accepted, not delivered."""

    ACCEPTED = "accepted"
    BOUNCED = "bounced"
    DEFERRED = "deferred"  # gave up after the maximum age
    IN_DOUBT = "in_doubt"
    SUPPRESSED = "suppressed"
    INVALID = "invalid"
    UNSENT = "unsent"


# Every last word there is, as (outcome, reason). The position is the number that dense arrays hold, never at rest.
WORDS: tuple[tuple[Outcome, str | None], ...] = (
    (Outcome.UNSENT, "not_reached"),  # 0, what a row is of which nothing is known
    (Outcome.UNSENT, "waiting"),
    (Outcome.UNSENT, "cancelled"),
    (Outcome.UNSENT, "expired"),
    (Outcome.ACCEPTED, None),
    (Outcome.ACCEPTED, "operator"),
    (Outcome.BOUNCED, "recipient"),
    (Outcome.BOUNCED, "policy"),
    (Outcome.BOUNCED, "content"),
    (Outcome.DEFERRED, None),
    (Outcome.IN_DOUBT, None),
    (Outcome.SUPPRESSED, None),
    (Outcome.INVALID, "address"),
    (Outcome.INVALID, "render"),
)


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """Whose outcomes these are."""

    format: int = FORMAT
    campaign_id: str
    rows: int
    list_fingerprint: str
    merged_at_us: int


class OutcomesError(ValueError):
    """The file is not a table of outcomes that this version reads."""


def schema(header: Header, *, id_type: pa.DataType | None = None) -> pa.Schema:
    """The schema of recipients.parquet; `id_type` is the list's, null without an id column."""
    return pa.schema(
        [
            pa.field("row", pa.uint64(), nullable=False),
            pa.field("id", id_type or pa.null()),
            pa.field("address", pa.string()),
            pa.field("provider", _WORD),
            pa.field("outcome", _WORD, nullable=False),
            pa.field("reason", _WORD),
            pa.field("attempts", pa.uint16(), nullable=False),
            pa.field("first_at", _TIME),
            pa.field("last_at", _TIME),
            pa.field("code", pa.uint16()),
            pa.field("enhanced_status", _WORD),
            pa.field("last_reply", pa.string()),
            pa.field("machine", _WORD),
            pa.field("source", _WORD),
            pa.field("bounced_at", _TIME),
        ],
        metadata={KEY: msgspec.json.encode(header)},
    )


def open_outcomes(path: Path) -> tuple[Header, pq.ParquetFile]:
    """The outcomes at `path`, to be read column by column; raises OutcomesError, also for a format to come."""
    try:
        file = pq.ParquetFile(path, memory_map=True)
    except (pa.ArrowException, OSError) as problem:
        raise OutcomesError(f"{path}: {problem}") from None
    try:
        raw = (file.schema_arrow.metadata or {})[KEY]
        header = msgspec.json.decode(raw, type=Header)
    except (KeyError, msgspec.MsgspecError):
        raise OutcomesError(f"{path}: a Parquet file, but not of outcomes") from None
    if header.format != FORMAT:
        raise OutcomesError(f"{path}: outcomes format {header.format}, this version reads {FORMAT}")
    missing = set(schema(header).names) - set(file.schema_arrow.names)
    if missing:
        raise OutcomesError(f"{path}: no column {', '.join(sorted(missing))}")
    return header, file
