"""Lists from CSV and TSV: every value as the text that stands there, unless `types` says more.

"007" stays "007" and 9007199254740993 keeps its last digit, because nothing is guessed. A record with too many or too
few values is left out and reported with its line; a blank line is a row without an address. RFC 4180, and what
exports do besides: byte-order marks, cp1252, UTF-16, semicolons, gzip and zstd.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.csv as pcsv

from engine.lists.source import ListUnreadable, Rejected, Source, stage
from engine.lists.text_encoding import Utf8Stream, detect_encoding

_SMALLEST_BLOCK, _LARGEST_BLOCK = 4 << 20, 1 << 30
BROKEN_COMPRESSION = (EOFError, OSError, zlib.error)  # what gzip and zstd say of a file that ends early
_KEPT_RAGGED = 100_000  # with text; beyond, they are counted only
TYPES: dict[str, pa.DataType] = {
    "text": pa.string(),
    "int": pa.int64(),
    "float": pa.float64(),
    "bool": pa.bool_(),
    "date": pa.date32(),
    "timestamp": pa.timestamp("us"),
}


def csv_source(
    path: Path,
    work: Path,
    *,
    delimiter: str | None = None,
    encoding: str | None = None,
    types: Mapping[str, str] | None = None,
) -> Source:
    """The CSV file at `path`, staged in the folder `work`; raises ListUnreadable naming what is wrong where."""
    try:
        with _open(path) as file:
            guessed, quotes = detect_encoding(file)
    except BROKEN_COMPRESSION as problem:
        raise ListUnreadable(
            file=path, problem=f"its compression is damaged or cut short: {problem}", next="Copy it again."
        ) from None
    found = encoding or guessed
    with _open(path) as file:
        head = Utf8Stream(file, found).read(1 << 16).decode(errors="replace")
    if not head.strip():
        raise ListUnreadable(file=path, problem="the file is empty")
    mark = delimiter or _sniff_delimiter(head)
    names = _names(path, head, mark)
    notes = []
    if not encoding and not found.startswith("utf-8"):
        notes.append(f"{path}: read as {found}; --encoding says otherwise")
    if quotes % 2:
        notes.append(f"{path}: an odd number of quotes; one that is not closed swallows the lines behind it")

    block = _SMALLEST_BLOCK
    while True:
        ragged = _Ragged(str(path))
        try:
            rows, size = _stage(path, work, found, mark, names, types or {}, block, ragged)
            break
        except pa.ArrowInvalid as problem:
            if "straddling" in str(problem) and block < _LARGEST_BLOCK:
                block *= 16  # one row larger than a block
                continue
            raise ListUnreadable(file=path, problem=_in_words(problem)) from None
    staged_at = work / f"{path.name}.arrow"
    return Source(
        name=str(path),
        rows=rows,
        scan=lambda: pl.scan_ipc(staged_at),
        notes=tuple(notes),
        skipped=np.array(ragged.numbers, dtype=np.int64),
        rejected=tuple(_with_lines(path, found, mark, ragged.rejected)),
        decoded_bytes=size,
    )


def _stage(
    path: Path,
    work: Path,
    encoding: str,
    mark: str,
    names: list[str],
    types: Mapping[str, str],
    block: int,
    ragged: _Ragged,
) -> tuple[int, int]:
    unknown = sorted(set(types) - set(names))
    if unknown:
        raise ListUnreadable(
            file=path, problem=f"no column {unknown[0]!r} to give a type to; it has {', '.join(names)}"
        )
    convert = pcsv.ConvertOptions(
        column_types={name: TYPES[types.get(name, "text")] for name in names},
        strings_can_be_null=True,
        null_values=[""],
        quoted_strings_can_be_null=True,
    )
    parse = pcsv.ParseOptions(
        delimiter=mark, newlines_in_values=True, ignore_empty_lines=False, invalid_row_handler=ragged
    )
    read = pcsv.ReadOptions(
        column_names=names, skip_rows=0, skip_rows_after_names=1, block_size=block, use_threads=False
    )
    with _open(path) as file:
        stream: Any = file if encoding == "utf-8" else Utf8Stream(file, encoding)
        reader = pcsv.open_csv(
            pa.PythonFile(stream, "r"), read_options=read, parse_options=parse, convert_options=convert
        )
        return stage(reader, reader.schema, work / f"{path.name}.arrow")


class _Ragged:
    """Takes the records that have too many or too few values, as pyarrow comes upon them."""

    def __init__(self, file: str) -> None:
        self._file = file
        self.numbers: list[int] = []
        self.rejected: list[Rejected] = []

    def __call__(self, row: pcsv.InvalidRow) -> str:
        number = int(row.number) - 1  # the header is record 1
        self.numbers.append(number)
        if len(self.rejected) < _KEPT_RAGGED:
            detail = f"{row.actual_columns} values, the header has {row.expected_columns}"
            self.rejected.append(
                Rejected(file=self._file, row=number, value=row.text[:1000], reason="ragged", detail=detail)
            )
        return "skip"


def _open(path: Path) -> BinaryIO:
    """The file's bytes, decompressed."""
    try:
        with open(path, "rb") as file:
            start = file.read(4)
    except OSError as problem:
        raise ListUnreadable(file=path, problem=problem.strerror) from None
    if start[:2] == b"\x1f\x8b":
        return gzip.open(path)  # type: ignore[return-value]  # a GzipFile reads bytes as any file
    if start == b"\x28\xb5\x2f\xfd":
        return pa.CompressedInputStream(str(path), "zstd")  # type: ignore[no-any-return]
    return open(path, "rb")


def _sniff_delimiter(head: str) -> str:
    """The separator that stands most often in the header, quotes left out."""
    outside = "".join(head.split("\n", 1)[0].split('"')[::2])
    return max(",;\t|", key=lambda mark: (outside.count(mark), mark == ","))


def _names(path: Path, head: str, mark: str) -> list[str]:
    import csv

    names = [
        name.strip().strip("\ufeff") for name in next(csv.reader(head.splitlines(keepends=True), delimiter=mark), [])
    ]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ListUnreadable(file=path, problem=f"two columns are named {twice[0]!r}", next="Rename one in the header.")
    if any(not name for name in names):
        place = names.index("") + 1
        raise ListUnreadable(file=path, problem=f"column {place} has no name", next="Give it one in the header line.")
    return names


def _in_words(problem: Exception) -> str:
    text = str(problem).removeprefix("CSV parse error: ").removeprefix("CSV conversion error: ")
    return text if len(text) < 500 else text[:500] + "…"


def _with_lines(path: Path, encoding: str, mark: str, rejected: list[Rejected]) -> Iterator[Rejected]:
    """Record numbers become line numbers, which differ once a quoted value holds a newline.."""
    if not rejected:
        return
    wanted = {one.row + 1 for one in rejected}
    lines: dict[int, int] = {}
    record, line, in_quotes, last = 1, 1, False, max(wanted)
    started = True
    with _open(path) as file:
        stream = Utf8Stream(file, encoding)
        rest = b""
        while (chunk := stream.read(1 << 20)) and record <= last:
            pieces = (rest + chunk).split(b"\n")
            rest = pieces.pop()
            for piece in pieces:
                if started and record in wanted:
                    lines[record] = line
                in_quotes ^= piece.count(b'"') % 2 == 1
                line += 1
                started = not in_quotes
                record += started
        if started and record in wanted:
            lines[record] = line
    for one in rejected:
        yield Rejected(
            file=one.file,
            row=one.row,
            line=lines.get(one.row + 1),
            value=one.value,
            reason=one.reason,
            detail=one.detail,
        )
