"""Make a big recipient list: the same rows for the same seed, several files, a few seconds per ten million rows.

    python benchmarks/make_list.py OUT --rows 10_000_000 --files 4
    python benchmarks/make_list.py OUT --rows 1_000_000 --format csv
    python benchmarks/make_list.py OUT --rows 100_000_000 --files 64 --prepared    # 64 files, 10,048 row groups, 5 GB
    python benchmarks/make_list.py OUT --rows 100_000_000 --files 64 --prepared --linked    # 95 MB, for planning

Domains follow a shape like that of a consumer list: a dozen big ones, then a long tail. Half a percent of the rows are
duplicates, two in a thousand no addresses, some written with spaces and capitals. `--suppressions N` also writes
`suppressed.parquet` with N addresses of which four in ten are in the list. `--prepared` writes clean rows in row groups
of 10,000 with a dictionary column `domain` and the counts in the file's metadata, as `engine prepare` does. `--linked`
writes the first file alone and gives it the names of all: planning, which reads footers, cannot tell links from copies.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow.parquet as pq

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

BIG = {
    "gmail.com": 0.34,
    "yahoo.com": 0.11,
    "hotmail.com": 0.09,
    "outlook.com": 0.07,
    "icloud.com": 0.05,
    "aol.com": 0.03,
    "gmx.de": 0.03,
    "web.de": 0.025,
    "orange.fr": 0.015,
    "mail.ru": 0.015,
    "t-online.de": 0.01,
    "proton.me": 0.01,
    "comcast.net": 0.01,
}
TAIL = 200_000
_SLICE = 1_000_000
_FIRST = ["ann", "bob", "eve", "jörg", "lena", "omar", "paul", "rosa", "tim", "zoé", "maria", "john", "wei", "ivan"]
_LAST = ["smith", "müller", "garcia", "li", "ivanova", "silva", "rossi", "kim", "nowak", "jensen", "dubois", "okafor"]
_LANGUAGES = ["en", "de", "fr", "es", "pt", "it"]


def _domains() -> tuple[np.ndarray, pl.Series]:
    """Cumulative shares, and the names they belong to."""
    tail = 1.0 / np.arange(20, TAIL + 20) ** 0.9
    shares = np.concatenate([list(BIG.values()), tail / tail.sum() * (1 - sum(BIG.values()))])
    names = pl.Series([*BIG, *(f"mail{number}.example{number % 97}.net" for number in range(TAIL))])
    return np.cumsum(shares), names


def rows(first: int, count: int, *, seed: int, clean: bool) -> pl.DataFrame:
    """Rows first .. first + count - 1 of the endless list that `seed` names."""
    rng = np.random.default_rng((seed, first))
    edges, names = _domains()
    domain = names.gather(np.minimum(np.searchsorted(edges, rng.random(count)), len(names) - 1))
    number = np.arange(first, first + count, dtype=np.int64)
    if not clean:  # half a percent repeat an earlier row's number and domain
        repeats = np.flatnonzero(rng.random(count) < 0.005)
        repeats = repeats[repeats > 1000]
        number[repeats] -= 1000
        domain = domain.scatter(repeats, domain.gather(repeats - 1000))
    first_name = pl.Series(_FIRST).gather(number % len(_FIRST))
    last_name = pl.Series(_LAST).gather(number // 7 % len(_LAST))
    local = first_name.str.replace_many(["ö", "é"], ["o", "e"]) + "." + pl.Series(number).cast(pl.String)
    frame = pl.DataFrame(
        {
            "email": local + "@" + domain,
            "id": number,
            "first_name": first_name,
            "last_name": last_name,
            "language": pl.Series(_LANGUAGES).gather(rng.integers(0, len(_LANGUAGES), count)),
            "score": rng.random(count, dtype=np.float32),
            "signed_up": pl.Series(rng.integers(16_000, 20_000, count, dtype=np.int32)).cast(pl.Date),
            "last_opened": pl.Series(rng.integers(1_600_000_000, 1_750_000_000, count) * 1000).cast(pl.Datetime("ms")),
        }
    )
    if clean:
        return frame.with_columns(domain=domain.cast(pl.Categorical))
    dice = pl.Series(rng.random(count, dtype=np.float32))
    return frame.with_columns(
        email=pl.when(dice < 0.002)
        .then(pl.col("email").str.replace("@", " at "))
        .when(dice < 0.01)
        .then(pl.lit("  ") + pl.col("email").str.to_uppercase() + " ")
        .otherwise("email")
    )


def _slices(first: int, count: int) -> Iterator[tuple[int, int]]:
    for start in range(first, first + count, _SLICE):
        yield start, min(_SLICE, first + count - start)


def _write_parquet(path: Path, first: int, count: int, *, seed: int, prepared: bool, row_group: int) -> None:
    writer = None
    counts: dict[str, int] = {}
    for start, size in _slices(first, count):
        frame = rows(start, size, seed=seed, clean=prepared)
        if prepared:
            for name, rows_of_it in frame["domain"].value_counts().iter_rows():
                counts[name] = counts.get(name, 0) + rows_of_it
        table = frame.to_arrow()
        if writer is None:
            writer = pq.ParquetWriter(path, table.schema, compression="zstd", compression_level=1)
        writer.write_table(table, row_group_size=row_group)
    assert writer is not None
    if prepared:
        from formats import listmeta

        writer.add_key_value_metadata({listmeta.KEY: listmeta.encode(listmeta.of_counts(counts))})
    writer.close()


def _write_csv(path: Path, first: int, count: int, *, seed: int) -> None:
    with open(path, "wb") as file:
        for start, size in _slices(first, count):
            rows(start, size, seed=seed, clean=False).write_csv(file, include_header=start == first)


def write_suppressions(path: Path, files: list[tuple[int, int]], count: int, *, seed: int) -> None:
    """`count` addresses, four in ten of them from the list, out of the beginning of each slice of each file."""
    inside = int(count * 0.4)
    slices = [one for first, size in files for one in _slices(first, size)]
    found = [rows(start, size, seed=seed, clean=False).head(inside // len(slices) + 1) for start, size in slices]
    known = pl.concat(found)["email"].head(inside)
    others = pl.Series("email", [f"gone.{number}@elsewhere.example" for number in range(count - len(known))])
    pl.DataFrame({"email": pl.concat([known, others])}).write_parquet(path)


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("out", type=Path)
    ask.add_argument("--rows", type=int, default=1_000_000)
    ask.add_argument("--files", type=int, default=1)
    ask.add_argument("--seed", type=int, default=1)
    ask.add_argument("--format", choices=["parquet", "csv"], default="parquet")
    ask.add_argument("--prepared", action="store_true")
    ask.add_argument("--row-group", type=int, default=None)
    ask.add_argument("--linked", action="store_true")
    ask.add_argument("--suppressions", type=int, default=0)
    given = ask.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    per_file = -(-given.rows // given.files)
    files = [(first, min(per_file, given.rows - first)) for first in range(0, given.rows, per_file)]
    for number, (first, count) in enumerate(files):
        path = given.out / f"part-{number:03d}.{given.format}"
        if given.linked and number:
            path.unlink(missing_ok=True)
            os.link(given.out / f"part-000.{given.format}", path)
            continue
        if given.format == "csv":
            _write_csv(path, first, count, seed=given.seed)
        else:
            row_group = given.row_group or (10_000 if given.prepared else 250_000)
            _write_parquet(path, first, count, seed=given.seed, prepared=given.prepared, row_group=row_group)
        print(path, count, "rows", file=sys.stderr)
    if given.suppressions:
        write_suppressions(given.out / "suppressed.parquet", files, given.suppressions, seed=given.seed)
    print(f"{given.rows} rows in {time.perf_counter() - began:.1f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
