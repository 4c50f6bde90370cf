"""The suppression list: who must not be written to, as bytes. Opens nothing; `engine.lists` maps and locks.

An **entry** says: this address, in this scope, from this time on. The scope is `all`, or the id of a list: who leaves
the weekly letter still gets the daily one. Addresses are canonical (`formats.address.canonical`). A later entry with
`lifted` takes an earlier one back; the last word on (address, scope) holds.

**Truth**, the file `suppressions.log`, format 1, little-endian. Append-only; what is derived from it can be deleted.

    0   16  b"rowpost-suppress"
    16   2  format, 1
    18   6  zero
    24   8  generation: random, new whenever the file is written anew (only `forget` does that)

and then frames:

    0   4  length of the payload
    4   4  CRC-32 of kind and payload
    8   1  kind: 1 = msgpack array of entries, each an array [address, scope, reason, source, at_us, lifted];
                 2 = an Arrow IPC stream (lz4) with the columns of `SCHEMA`, for imports
    9   n  payload

A crash leaves a torn last frame: reading ends at the last whole one, and the next appender cuts the rest off. A bad
frame with other bytes behind it is damage and never cut.

**A forgotten person** stays suppressed without being named: the address is then `#`, four hex digits (the first 16
bits of the address's hash, a sieve, so that almost nobody else has to be hashed with the key) and 32 hex digits of
BLAKE2b with the folder's secret key. No address is without an @, so the two cannot be confused.

**Index** of one scope, format 1, derived: sorted 64-bit hashes behind a table of their first `bits` bits.

    0    8  b"rowpsidx"
    8    4  format, 1
    12   4  bits: the table has 2^bits + 1 numbers
    16   8  count of hashes
    24   8  count of forgotten
    32   8  covered: the truth's length in bytes up to which this index tells all
    40   8  generation of that truth
    48  16  zero
    64      table, uint32: hashes beginning with prefix p are [table[p], table[p + 1])
    ...     zero up to a multiple of 8; hashes, uint64, ascending
    ...     forgotten, 18 bytes each: sieve uint16, keyed hash 16 bytes

The hash is XXH3-64 (seed 0) of the canonical address in UTF-8: stable across machines and versions, which polars'
own `.hash()` is not. Two of a hundred million addresses share one with a chance of 3 in 10,000.
"""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Iterator, Sequence
from enum import StrEnum
from hashlib import blake2b

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

FORMAT = 1
ALL = "all"

Hashes = npt.NDArray[np.uint64]
Mask = npt.NDArray[np.bool_]


class SuppressionError(ValueError):
    """The bytes are not a suppression list this version reads."""


class Reason(StrEnum):
    """Why somebody is suppressed. Bounces and complaints belong to scope `all`, an unsubscribe to its list."""

    BOUNCE = "bounce"
    COMPLAINT = "complaint"
    UNSUBSCRIBE = "unsubscribe"
    MANUAL = "manual"
    IMPORT = "import"
    FORGOTTEN = "forgotten"


class Entry(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One word on one address in one scope. `source` says where it came from: a campaign, a file, a person."""

    address: str
    scope: str = ALL
    reason: str = Reason.MANUAL
    source: str = ""
    at_us: int = 0
    lifted: bool = False

    @property
    def is_forgotten(self) -> bool:
        """The address itself was erased; only its keyed hash is known."""
        return self.address.startswith("#") and "@" not in self.address


SCHEMA = pa.schema(
    [
        pa.field("address", pa.large_string(), nullable=False),
        pa.field("scope", pa.dictionary(pa.int32(), pa.string()), nullable=False),
        pa.field("reason", pa.dictionary(pa.int32(), pa.string()), nullable=False),
        pa.field("source", pa.dictionary(pa.int32(), pa.string()), nullable=False),
        pa.field("at_us", pa.int64(), nullable=False),
        pa.field("lifted", pa.bool_(), nullable=False),
    ]
)

# --- hashes --------------------------------------------------------------------------------------------------------


def hash_addresses(addresses: Sequence[str]) -> Hashes:
    """XXH3-64 of each address (70 ns each)."""
    return np.fromiter(map(xxhash.xxh3_64_intdigest, map(str.encode, addresses)), dtype=np.uint64, count=len(addresses))


def sieve_of(hashes: Hashes) -> npt.NDArray[np.uint16]:
    """The first 16 bits: all that a forgotten entry shows of an address without the key."""
    return (hashes >> np.uint64(48)).astype(np.uint16)


def keyed_hash(address: str, key: bytes) -> bytes:
    """16 bytes that tell an address only to who has the key and the address."""
    return blake2b(address.encode(), digest_size=16, key=key).digest()


def forgotten_address(address: str, key: bytes) -> str:
    """What stands in an entry in place of an erased address."""
    sieve = xxhash.xxh3_64_intdigest(address.encode()) >> 48
    return f"#{sieve:04x}{keyed_hash(address, key).hex()}"


def split_forgotten(address: str) -> tuple[int, bytes]:
    """Sieve and keyed hash of a forgotten entry's address; raises SuppressionError."""
    try:
        sieve, digest = int(address[1:5], 16), bytes.fromhex(address[5:])
    except ValueError:
        raise SuppressionError(f"{address!r} is not a forgotten address") from None
    if len(digest) != 16:
        raise SuppressionError(f"{address!r} is not a forgotten address")
    return sieve, digest


# --- truth ---------------------------------------------------------------------------------------------------------

_MAGIC = b"rowpost-suppress"
_HEAD = struct.Struct("<16sH6x8s")
_FRAME = struct.Struct("<IIB")
HEADER_BYTES = _HEAD.size
_MSGPACK, _ARROW = 1, 2
_COLUMNAR_FROM = 1000  # below, an Arrow stream's own kilobyte costs more than its columns save
LARGEST_PAYLOAD = 1 << 30


class Header(msgspec.Struct, frozen=True):
    """The truth file's beginning."""

    generation: bytes


class Frame(msgspec.Struct, frozen=True):
    """What one append wrote: `payload` still encoded, `end` the offset behind it."""

    kind: int
    payload: bytes | memoryview
    end: int

    def entries(self) -> list[Entry]:
        """The entries, one object each."""
        if self.kind == _MSGPACK:
            return _decode_entries(self.payload)
        table = self.table()
        return list(map(Entry, *(table.column(name).to_pylist() for name in SCHEMA.names)))

    def table(self) -> pa.Table:
        """The entries as columns of `SCHEMA`."""
        if self.kind == _ARROW:
            return pa.ipc.open_stream(pa.py_buffer(self.payload)).read_all()
        return entries_to_table(_decode_entries(self.payload))


def _decode_entries(payload: bytes | memoryview) -> list[Entry]:
    return msgspec.msgpack.decode(payload, type=list[Entry])


def entries_to_table(entries: Sequence[Entry]) -> pa.Table:
    """`entries` as columns of `SCHEMA`."""
    columns = [[getattr(entry, name) for entry in entries] for name in SCHEMA.names]
    return pa.table([pa.array(values, type=field.type) for values, field in zip(columns, SCHEMA, strict=True)], SCHEMA)


def encode_header(generation: bytes) -> bytes:
    """The first bytes of a new truth file."""
    return _HEAD.pack(_MAGIC, FORMAT, generation)


def decode_header(raw: bytes) -> Header:
    """The header in `raw`; raises SuppressionError."""
    if len(raw) < HEADER_BYTES:
        raise SuppressionError("shorter than its header")
    magic, version, generation = _HEAD.unpack_from(raw)
    if magic != _MAGIC:
        raise SuppressionError("not a suppression list (wrong first bytes)")
    if version != FORMAT:
        raise SuppressionError(f"suppression format {version}, this version reads {FORMAT}")
    return Header(generation)


def encode_entries(entries: Sequence[Entry]) -> bytes:
    """One frame with these entries."""
    if len(entries) >= _COLUMNAR_FROM:
        return encode_table(entries_to_table(entries))
    return _frame(_MSGPACK, msgspec.msgpack.encode(list(entries)))


def encode_table(table: pa.Table) -> bytes:
    """One frame with the entries in `table`, whose columns are those of `SCHEMA`."""
    sink = io.BytesIO()
    options = pa.ipc.IpcWriteOptions(compression="lz4")
    with pa.ipc.new_stream(sink, SCHEMA, options=options) as writer:
        writer.write_table(table.unify_dictionaries().combine_chunks())
    return _frame(_ARROW, sink.getvalue())


def _frame(kind: int, payload: bytes) -> bytes:
    if len(payload) > LARGEST_PAYLOAD:
        raise SuppressionError("too many entries in one frame")
    return _FRAME.pack(len(payload), zlib.crc32(payload, kind), kind) + payload


def read_frames(raw: bytes | memoryview, *, at: int = 0) -> Iterator[Frame]:
    """The whole frames in `raw`, up to the first that is not. `at` is the offset in the file that `raw` begins at."""
    view = memoryview(raw)
    here = 0
    while here + _FRAME.size <= len(view):
        length, crc, kind = _FRAME.unpack_from(view, here)
        end = here + _FRAME.size + length
        if length > LARGEST_PAYLOAD or end > len(view) or kind not in (_MSGPACK, _ARROW):
            return
        payload = view[here + _FRAME.size : end]
        if zlib.crc32(payload, kind) != crc:
            return
        yield Frame(kind, payload, at + end)
        here = end


def is_torn(rest: bytes) -> bool:
    """Whether bytes behind the last whole frame are one append that a crash cut short, and no damage.

    So it is when the frame does not end within them, or ends exactly with them, or when they are zeros (a file system
    that had grown the file but not yet written it). A frame that is bad in the middle has something behind it.
    """
    if not any(rest) or len(rest) < _FRAME.size:
        return True
    length, _, kind = _FRAME.unpack_from(rest)
    return kind in (0, _MSGPACK, _ARROW) and _FRAME.size + length >= len(rest)


# --- index ---------------------------------------------------------------------------------------------------------

_INDEX_MAGIC = b"rowpsidx"
_INDEX_HEAD = struct.Struct("<8sIIQQQ8s16x")
_FORGOTTEN = np.dtype([("sieve", "<u2"), ("keyed", "V16")])
_MOST_BITS = 24
_CHECK_AT_ONCE = 1 << 14
_TABLE_AT_ONCE = 1 << 22


class Index:
    """Look-ups in the bytes of an index; the buffer may be a memory map shared by many processes."""

    def __init__(self, raw: bytes | memoryview) -> None:
        view = memoryview(raw)
        if len(view) < _INDEX_HEAD.size:
            raise SuppressionError("index is shorter than its header")
        magic, version, bits, count, forgotten, covered, generation = _INDEX_HEAD.unpack_from(view)
        if magic != _INDEX_MAGIC or version != FORMAT:
            raise SuppressionError("not a suppression index of this version")
        table_at = _INDEX_HEAD.size
        hashes_at = _up_to_8(table_at + 4 * (2**bits + 1))
        forgotten_at = hashes_at + 8 * count
        if bits > _MOST_BITS or forgotten_at + _FORGOTTEN.itemsize * forgotten != len(view):
            raise SuppressionError("index is cut short")
        self.covered: int = covered
        self.generation: bytes = generation
        self.hashes: Hashes = np.frombuffer(view, "<u8", count, hashes_at)
        self._table = np.frombuffer(view, "<u4", 2**bits + 1, table_at)
        self._shift = np.uint64(64 - bits)
        records = np.frombuffer(view, _FORGOTTEN, forgotten, forgotten_at)
        self.forgotten: list[tuple[int, bytes]] = [(int(one["sieve"]), one["keyed"].tobytes()) for one in records]

    def __len__(self) -> int:
        return len(self.hashes)

    def check(self, hashes: Hashes) -> Mask:
        """Which of `hashes` are in the index: one table look-up, then a vectorised binary search in about six."""
        found: Mask = np.zeros(len(hashes), dtype=np.bool_)
        if len(self.hashes):
            # In pieces whose numbers stay in the processor's cache.
            for start in range(0, len(hashes), _CHECK_AT_ONCE):
                piece = slice(start, start + _CHECK_AT_ONCE)
                found[piece] = self._check(hashes[piece])
        return found

    def _check(self, hashes: Hashes) -> Mask:
        prefix = (hashes >> self._shift).astype(np.int64)
        low = self._table[prefix].astype(np.int64)
        high = self._table[prefix + 1].astype(np.int64)
        width = int((high - low).max(initial=0))
        last = len(self.hashes) - 1
        for _ in range(width.bit_length()):
            middle = (low + high) >> 1
            # An empty range stays empty: its `middle` is `low`, and `low < high` is asked at the end.
            below = (self.hashes[np.minimum(middle, last)] < hashes) & (low < high)
            low = np.where(below, middle + 1, low)
            high = np.where(below, high, middle)
        found: Mask = self.hashes[np.minimum(low, last)] == hashes
        return found


def _up_to_8(offset: int) -> int:
    return (offset + 7) // 8 * 8


def encode_index(
    hashes: Hashes, *, forgotten: Sequence[tuple[int, bytes]] = (), covered: int = 0, generation: bytes = bytes(8)
) -> list[bytes | memoryview]:
    """The index's bytes in pieces, to be written one after the other. `hashes` are sorted and unique."""
    # One table slot for four to eight hashes: fewer slots make the search longer, more make the table larger than they.
    bits = min(_MOST_BITS, max(4, len(hashes).bit_length() - 2))
    table = np.zeros(2**bits + 1, dtype="<u4")
    for start in range(0, len(hashes), _TABLE_AT_ONCE):
        # Sorted hashes have ascending prefixes: a count of each, without a search, in pieces that stay small.
        prefixes = (hashes[start : start + _TABLE_AT_ONCE] >> np.uint64(64 - bits)).astype(np.int64)
        first, last = int(prefixes[0]), int(prefixes[-1])
        table[first + 1 : last + 2] += np.bincount(prefixes - first, minlength=last - first + 1).astype("<u4")
    np.cumsum(table, out=table)
    records = np.array(sorted(forgotten), dtype=_FORGOTTEN) if forgotten else np.empty(0, dtype=_FORGOTTEN)
    head = _INDEX_HEAD.pack(_INDEX_MAGIC, FORMAT, bits, len(hashes), len(records), covered, generation)
    padding = bytes(_up_to_8(_INDEX_HEAD.size + table.nbytes) - _INDEX_HEAD.size - table.nbytes)
    return [head, table.data.cast("B"), padding, hashes.astype("<u8", copy=False).data.cast("B"), records.tobytes()]
