"""From what the operator named to sources: the kind of each file by its name, or by `--format`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from engine.lists.csv_source import TYPES, csv_source
from engine.lists.other_sources import arrow_source, jsonl_source
from engine.lists.parquet_source import parquet_source
from engine.lists.source import ListUnreadable, Source

_KINDS = {
    ".parquet": "parquet",
    ".pq": "parquet",
    ".csv": "csv",
    ".tsv": "csv",
    ".txt": "csv",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".arrow": "arrow",
    ".arrows": "arrow",
    ".feather": "arrow",
    ".ipc": "arrow",
}
FORMATS = ("parquet", "csv", "jsonl", "arrow")


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """How text files are to be read; None is "look and say"."""

    format: str | None = None
    delimiter: str | None = None
    encoding: str | None = None
    types: Mapping[str, str] = {}


def open_files(paths: Sequence[Path], work: Path, reading: Reading) -> list[Source]:
    """Every file, folders opened up, in order; raises ListUnreadable for the first that is none."""
    files = [file for path in paths for file in _inside(path)]
    found = []
    for number, file in enumerate(files):
        stage = work / f"source-{number}"
        stage.mkdir()
        found.append(_open(file, stage, reading))
    return found


def _inside(path: Path) -> list[Path]:
    if not path.exists():
        raise ListUnreadable(file=path, problem="no such file", next="Check the name.")
    if not path.is_dir():
        return [path]
    files = sorted(file for file in path.rglob("*") if _kind(file) and not file.name.startswith((".", "_")))
    if not files:
        raise ListUnreadable(file=path, problem="a folder without a list file in it", next="Name the files themselves.")
    return files


def _kind(path: Path) -> str | None:
    suffixes = [suffix.lower() for suffix in path.suffixes]
    while suffixes and suffixes[-1] in (".gz", ".zst"):
        suffixes.pop()
    return _KINDS.get(suffixes[-1]) if suffixes else None


def _open(path: Path, stage: Path, reading: Reading) -> Source:
    match reading.format or _kind(path):
        case "parquet":
            return parquet_source(path)
        case "csv":
            delimiter = reading.delimiter or ("\t" if ".tsv" in path.suffixes else None)
            return csv_source(path, stage, delimiter=delimiter, encoding=reading.encoding, types=reading.types)
        case "jsonl":
            return jsonl_source(path, stage)
        case "arrow":
            return arrow_source(path, stage)
        case _:
            known = ", ".join(FORMATS)
            raise ListUnreadable(file=path, problem="unknown kind of file", next=f"Give --format, one of {known}.")


def parse_types(pairs: Sequence[str]) -> dict[str, str]:
    """`column=type` pairs; raises ValueError saying what is wrong."""
    types = {}
    for pair in pairs:
        column, equals, kind = pair.rpartition("=")
        if not equals or kind not in TYPES:
            raise ValueError(f"{pair!r}: expected COLUMN=TYPE with a type of {', '.join(TYPES)}")
        types[column] = kind
    return types
