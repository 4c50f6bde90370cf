"""`prepare`: sources in, one clean, mixed list out, in an order that reads like a table of contents.

Every step is counted. The output appears by rename when all of it is on the disk; until then there is nothing.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, Protocol

import msgspec
import numpy as np
import numpy.typing as npt
import polars as pl

from engine.errors import EngineError, Exit
from engine.lists import dedup
from engine.lists.columns import address_column, one_scan
from engine.lists.mixing import MixingMeter, Places, mixed
from engine.lists.rejects import Rejects, Status
from engine.lists.scan import DomainChecker, Scanned, SuppressionList, batches_of, scan
from engine.lists.source import Source
from engine.lists.writing import DOMAIN_COLUMN, DuplicateWriter, ListWriter, write_by_buckets, write_in_memory
from formats import listmeta

MEMORY_BYTES = 4 << 30


class Wishes(msgspec.Struct, frozen=True, kw_only=True):
    """What the operator asked of `prepare`."""

    address: str | None = None
    id: str | None = None
    where: str | None = None
    keep: str = "first"  # "first", "last", or a column: its smallest, or with " desc" its largest value
    engaged_first: str | None = None  # within a domain, rows with the largest value of this column come first
    fold_local: bool = True
    fold_provider: bool = False
    seed: int = 1
    row_group_rows: int = 10_000
    way: Literal["auto", "memory", "buckets"] = "auto"
    memory_bytes: int = MEMORY_BYTES


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What became of the rows: `rows` read, `kept` written, the rest by reason."""

    rows: int
    kept: int
    rejected: dict[str, int]
    domains: int
    largest: dict[str, int]
    mixing: listmeta.Mixing
    way: str
    output: str
    rejects: str
    notes: list[str] = []


class Progress(Protocol):
    """Told about stages of a known number of rows."""

    def stage(self, name: str, rows: int) -> None: ...
    def advance(self, rows: int) -> None: ...


class Silent:
    """Nobody watches."""

    def stage(self, name: str, rows: int) -> None:
        pass

    def advance(self, rows: int) -> None:
        pass


class NothingLeft(EngineError):
    """No row is left of {rows}: {counts}."""

    exit_code = Exit.LIST
    hint = "{rejects} tells for each row why; no list was written."


class ColumnMissing(EngineError):
    """The list has no column {column!r} (for {option}); it has {names}."""

    exit_code = Exit.USAGE
    hint = "Name one of the list's columns."


def prepare(
    sources: Sequence[Source],
    output: Path,
    rejects_path: Path,
    wishes: Wishes,
    *,
    work: Path,
    suppressions: Sequence[SuppressionList] = (),
    check_domains: DomainChecker | None = None,
    providers: dict[str, str] | None = None,
    progress: Progress | None = None,
    now_us: int = 0,
) -> Report:
    """Make the list at `output`; the rows left out are at `rejects_path`. `providers` tells domains' providers."""
    told = progress or Silent()
    rows = sum(source.rows for source in sources)
    listed = one_scan(sources)
    names = listed.collect_schema().names()
    address = address_column(names, wishes.address, file=sources[0].name)
    notes = [note for source in sources for note in source.notes]
    if DOMAIN_COLUMN in names and address != DOMAIN_COLUMN:
        notes.append("the column `domain` is written anew from the addresses")
        listed = listed.drop(DOMAIN_COLUMN)
    for option, column in (("--engaged-first", wishes.engaged_first), ("--keep", _keep_column(wishes.keep))):
        if column is not None and column not in names:
            raise ColumnMissing(column=column, option=option, names=", ".join(names))

    with _beside(output) as new_list, _beside(rejects_path) as new_rejects:
        rejects = Rejects(new_rejects, sources)
        told.stage("checking addresses", rows)
        known = scan(
            listed,
            rows,
            address,
            where=wishes.where,
            suppressions=suppressions,
            fold_local=wishes.fold_local,
            fold_provider=wishes.fold_provider,
            rejects=rejects,
            advance=told.advance,
        )
        no_mail = _without_mail(known, check_domains) if check_domains is not None else {}
        duplicates, keepers = _leave_out_duplicates(known, listed, wishes.keep)
        known.hashes = np.empty(0, dtype=np.uint64)  # 8 bytes a row that nobody needs any more

        told.stage("mixing domains", rows)
        kept = known.kept
        by_provider = _provider_numbers(known.names, providers) if providers else None
        places = mixed(
            known.domains,
            kept,
            seed=wishes.seed,
            providers=by_provider[0] if by_provider else None,
            order=_engagement_order(listed, wishes.engaged_first),
        )
        told.advance(rows)
        written = _write(
            sources, listed, address, known, places, wishes, rejects, duplicates, keepers, no_mail, told, work,
            new_list, by_provider, now_us,
        )  # fmt: skip
        rejects.close()
        _sync(new_rejects)
        os.replace(new_rejects, rejects_path)
        counts = {name: count for name, count in _rejected(known, sources).items() if count}
        if written is None:
            said = ", ".join(f"{count} {name}" for name, count in counts.items()) or "the sources are empty"
            raise NothingLeft(
                rows=rows + sum(len(source.skipped) for source in sources), counts=said, rejects=rejects_path
            )
        _sync(new_list)
        os.replace(new_list, output)
    meta, way = written
    assert meta.mixing is not None
    return Report(
        rows=rows + sum(len(source.skipped) for source in sources),
        kept=meta.rows,
        rejected=counts,
        domains=meta.domains,
        largest=dict(list(meta.domain_rows.items())[:20]),
        mixing=meta.mixing,
        way=way,
        output=str(output),
        rejects=str(rejects_path),
        notes=notes,
    )


def _write(
    sources: Sequence[Source],
    listed: pl.LazyFrame,
    address: str,
    known: Scanned,
    places: Places,
    wishes: Wishes,
    rejects: Rejects,
    duplicates: dedup.Rows,
    keepers: dedup.Rows,
    no_mail: dict[int, str],
    told: Progress,
    work: Path,
    path: Path,
    by_provider: tuple[npt.NDArray[np.uint32], list[str]] | None,
    now_us: int,
) -> tuple[listmeta.ListMeta, str] | None:
    late = DuplicateWriter(rejects, duplicates, keepers, no_mail, known.domains)
    kept = known.kept
    if not kept.any():
        if len(duplicates) or no_mail:
            for start, batch in batches_of(listed.select(address)):
                late.take(batch.to_series(), start, known.status[start : start + batch.height])
        return None
    counts = np.bincount(known.domains[kept], minlength=len(known.numbers))
    meta = msgspec.structs.replace(
        listmeta.of_numbers(known.names, counts),
        mixing=_measured(known, kept, places, counts, by_provider),
        provider_rows=_provider_rows(counts, by_provider),
        roles=listmeta.Roles(address=address, domain=DOMAIN_COLUMN, id=_id_column(listed, wishes.id)),
        row_group_rows=wishes.row_group_rows,
        prepared_at_us=now_us,
        rejected={name: n for name, n in _rejected(known, sources).items() if n},
        sources=[source.name for source in sources],
        engaged_first=wishes.engaged_first,
    )
    metadata = {listmeta.KEY: listmeta.encode(meta)}
    writer = ListWriter(path, known.names, address, metadata, wishes.row_group_rows)
    needed = sum(source.decoded_bytes for source in sources)
    way = wishes.way
    if way == "auto":
        # Half of the memory for the rows themselves; the rest goes to what is known of them and to the piece in hand.
        way = "memory" if needed < wishes.memory_bytes // 2 else "buckets"
    told.stage("writing", int(kept.sum()))
    try:
        if way == "memory":
            write_in_memory(
                listed, places, known, address, writer=writer, rejected=late,
                row_group_rows=wishes.row_group_rows, advance=told.advance,
            )  # fmt: skip
        else:
            write_by_buckets(
                listed, places, known, address, writer=writer, rejected=late,
                row_group_rows=wishes.row_group_rows, advance=told.advance, work=work,
                row_bytes=needed // len(kept),
            )  # fmt: skip
        writer.close()
    finally:
        writer.abandon()
    return meta, way


def _rejected(known: Scanned, sources: Sequence[Source]) -> dict[str, int]:
    counts = {name: count for name, count in known.counts().items() if name != Status.KEPT.label}
    for source in sources:
        for one in source.rejected:
            counts[one.reason] = counts.get(one.reason, 0) + 1
        untold = len(source.skipped) - len(source.rejected)
        if untold:
            counts["ragged"] = counts.get("ragged", 0) + untold
    return counts


def _without_mail(known: Scanned, check: DomainChecker) -> dict[int, str]:
    """Rows of domains that take no mail are left out; the domains' numbers and why."""
    present = np.flatnonzero(np.bincount(known.domains[known.kept], minlength=len(known.numbers)))
    names = known.names
    problems = check([names[number] for number in present.tolist()])
    bad = {number: problems[names[number]] for number in present.tolist() if names[number] in problems}
    is_bad = np.zeros(max(1, len(names)), dtype=np.bool_)
    is_bad[list(bad)] = True
    known.status[known.kept & is_bad[known.domains]] = Status.NO_MAIL_DOMAIN
    return bad


def _keep_column(keep: str) -> str | None:
    return None if keep in ("first", "last") else keep.removesuffix(" desc").removesuffix(" asc")


def _leave_out_duplicates(known: Scanned, listed: pl.LazyFrame, keep: str) -> tuple[dedup.Rows, dedup.Rows]:
    rows = dedup.repeated_rows(known.hashes, known.kept)
    order: npt.NDArray[np.generic] = -rows if keep == "last" else rows
    if (column := _keep_column(keep)) is not None and len(rows):
        values = listed.select(column).collect(engine="streaming").to_series().gather(rows)
        by = values.arg_sort(descending=keep.endswith(" desc"), nulls_last=True).to_numpy()
        place = np.empty(len(rows), dtype=np.int64)
        place[by] = np.arange(len(rows))
        # Equal values share a rank, so that between them the first row stays.
        ordered = values.gather(by)
        is_new = ordered.ne_missing(ordered.shift(1)).to_numpy()
        is_new[:1] = False
        order = np.cumsum(is_new)[place]
    duplicates, keepers = dedup.losers(known.hashes, rows, order)
    known.status[duplicates] = Status.DUPLICATE
    return duplicates, keepers


def _engagement_order(listed: pl.LazyFrame, column: str | None) -> npt.NDArray[np.uint32] | None:
    if column is None:
        return None
    values = listed.select(column).collect(engine="streaming").to_series()
    return values.arg_sort(descending=True, nulls_last=True).to_numpy().astype(np.uint32)


def _provider_numbers(names: Sequence[str], providers: dict[str, str]) -> tuple[npt.NDArray[np.uint32], list[str]]:
    """Each domain's group: its provider where that is known, else itself."""
    numbers: dict[str, int] = {}
    groups = [numbers.setdefault(providers.get(name, name), len(numbers)) for name in names]
    return np.array(groups, dtype=np.uint32), list(numbers)


def _provider_rows(
    counts: npt.NDArray[np.integer], by_provider: tuple[npt.NDArray[np.uint32], list[str]] | None
) -> dict[str, int]:
    if by_provider is None:
        return {}
    groups, names = by_provider
    rows = np.bincount(groups, weights=counts, minlength=len(names)).astype(np.int64)
    largest = np.argsort(-rows, kind="stable")[: listmeta.DOMAINS_KEPT]
    return {names[one]: int(rows[one]) for one in largest.tolist() if rows[one]}


def _measured(
    known: Scanned,
    kept: npt.NDArray[np.bool_],
    places: Places,
    counts: npt.NDArray[np.integer],
    by_provider: tuple[npt.NDArray[np.uint32], list[str]] | None,
) -> listmeta.Mixing:
    names, by = known.names, "domain"
    if by_provider is not None:
        names, by = by_provider[1], "provider"
        counts = np.bincount(by_provider[0], weights=counts, minlength=len(names)).astype(np.int64)
    sequence = np.empty(int(kept.sum()), dtype=np.uint32)
    for start in range(0, len(kept), 1 << 20):
        piece = slice(start, start + (1 << 20))
        groups = known.domains[piece][kept[piece]]
        sequence[places[piece][kept[piece]]] = groups if by_provider is None else by_provider[0][groups]
    meter = MixingMeter(counts, names, by=by)
    for start in range(0, len(sequence), 1 << 20):
        meter.take(sequence[start : start + (1 << 20)])
    return meter.result()


def _id_column(listed: pl.LazyFrame, wanted: str | None) -> str | None:
    names = listed.collect_schema().names()
    if wanted is not None and wanted not in names:
        raise ColumnMissing(column=wanted, option="--id-column", names=", ".join(names))
    return wanted or ("id" if "id" in names else None)


@contextmanager
def _beside(path: Path) -> Iterator[Path]:
    """A new name in the same folder, gone again unless it was renamed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}")
    try:
        yield new
    finally:
        new.unlink(missing_ok=True)


@contextmanager
def work_folder(parent: Path) -> Iterator[Path]:
    """A folder for stages and buckets, gone afterwards."""
    parent.mkdir(parents=True, exist_ok=True)
    folder = parent / f".prepare-{os.getpid()}-{secrets.token_hex(4)}"
    folder.mkdir(mode=0o700)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
