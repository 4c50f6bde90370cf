"""Lists from JSON lines and Arrow files.

JSON: one object a line; a line that is none is reported with its number. A key that some lines lack is null there.
Arrow: files (also called Feather) and streams.
"""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import polars as pl
import pyarrow as pa

from engine.lists.source import ListUnreadable, Rejected, Source, stage


def jsonl_source(path: Path, work: Path) -> Source:
    """The JSON lines at `path`, staged in `work`; raises ListUnreadable."""
    decoder = msgspec.json.Decoder(dict[str, Any])
    rejected: list[Rejected] = []
    good = work / f"{path.name}.good.jsonl"
    rows = 0
    try:
        with _open(path) as file, open(good, "wb") as kept:
            for number, line in enumerate(file, start=1):
                text = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
                try:
                    # Also blank lines come here; they are left out with the rest and told apart by their value.
                    decoder.decode(text)
                except (msgspec.DecodeError, UnicodeDecodeError) as problem:
                    value = text[:1000].decode(errors="replace").rstrip("\r\n")
                    reason = "malformed" if value.strip() else "empty"
                    rejected.append(
                        Rejected(
                            file=str(path), row=number, line=number, value=value, reason=reason, detail=str(problem)
                        )
                    )
                else:
                    kept.write(text if text.endswith(b"\n") else text + b"\n")
                    rows += 1
    except (EOFError, OSError, zlib.error) as problem:
        raise ListUnreadable(file=path, problem=getattr(problem, "strerror", None) or problem) from None
    if not rows:
        first = rejected[0].detail if rejected else "the file is empty"
        raise ListUnreadable(file=path, problem=f"not one line is a JSON object ({first})")
    staged_at = work / f"{path.name}.arrow"
    try:
        pl.scan_ndjson(good, infer_schema_length=None).sink_ipc(staged_at, compression="lz4")
    except pl.exceptions.PolarsError as problem:
        raise ListUnreadable(file=path, problem=f"a key has values of different kinds: {problem}") from None
    good.unlink()
    return Source(
        name=str(path),
        rows=rows,
        scan=lambda: pl.scan_ipc(staged_at),
        skipped=np.array([one.row for one in rejected], dtype=np.int64),
        rejected=tuple(rejected),
        decoded_bytes=staged_at.stat().st_size * 3,
    )


def _open(path: Path) -> Any:
    with open(path, "rb") as file:
        start = file.read(4)
    if start[:2] == b"\x1f\x8b":
        return gzip.open(path)
    if start == b"\x28\xb5\x2f\xfd":
        import io

        return io.BufferedReader(pa.CompressedInputStream(str(path), "zstd"))
    return open(path, "rb")


def arrow_source(path: Path, work: Path) -> Source:
    """The Arrow file or stream at `path`; a stream is staged in `work`. Raises ListUnreadable."""
    staged_at = work / f"{path.name}.arrow"
    try:
        with pa.memory_map(str(path)) as mapped:
            if mapped.read(6) == b"ARROW1":
                reader = pa.ipc.open_file(mapped)
                batches = (reader.get_batch(one) for one in range(reader.num_record_batches))
                rows, size = stage(_checked(batches), reader.schema, staged_at)
            else:
                mapped.seek(0)
                stream = pa.ipc.open_stream(mapped)
                rows, size = stage(_checked(stream), stream.schema, staged_at)
    except (pa.ArrowException, OSError, ValueError) as problem:
        raise ListUnreadable(file=path, problem=f"damaged or no Arrow data: {problem}") from None
    return Source(name=str(path), rows=rows, scan=lambda: pl.scan_ipc(staged_at), decoded_bytes=size)


def _checked(batches: Any) -> Any:
    for batch in batches:
        batch.validate(full=True)  # pyarrow reads most flipped bits without noticing, and may crash on them later
        yield batch
