"""All logs of a campaign, in any order, from any number of machines: the last word on every row, and what happened.

PROTOCOL "Merging". Each log is read once, verified as it is read; its attempts are scattered over spans of rows and
each span's last words are found on dense arrays: no joins, no sort of the whole. What is in memory is a byte per row of
the list and one span per thread.

A row that no log names is unsent. What is damaged is named and the rest is merged.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from engine.results import scan as scanning
from engine.results.belonging import belonging
from engine.results.feedback import Feedback
from engine.results.merged import (
    Damage,
    Decided,
    Decision,
    Event,
    LogSummary,
    Merged,
    PartitionSummary,
    Reply,
)
from engine.results.reports import reported
from engine.results.resolve import ENDED, Duplicate
from engine.results.scan import Scanned, ScanTask
from engine.results.side_by_side import scan_all
from engine.results.spool import Spool, SpoolWriter
from engine.results.tally import Tally, merged
from formats.outcomes import WORDS
from formats.plan import Plan

__all__ = ["Damage", "Decision", "Event", "LogSummary", "Merged", "PartitionSummary", "Reply", "merge"]

Numbers = npt.NDArray[Any]


def merge(
    plan: Plan,
    logs: Sequence[Path],
    *,
    decisions: Sequence[Decided] = (),
    reports: Iterable[pa.RecordBatch] | None = None,
    feedback: Feedback | None = None,
    ended: str | None = None,
    plan_fingerprint: str | None = None,
    processes: int = 2,
    scratch: Path | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Merged:
    """Everything the logs prove of the plan's rows. Close what is returned, or use it in a `with`.

    `reports` are what a shared store knows (`engine.results.reports`), None where it was not asked. `ended` is
    "expired" or "cancelled" where nothing may be attempted any more: open rows have that reason. A log that names
    another campaign, or another plan than `plan_fingerprint`, is refused by name and the rest is merged. `scratch` is
    where temporary files may lie: 35 bytes per attempt, and the replies' texts. `progress(done, of)` counts bytes.
    """
    folder = tempfile.TemporaryDirectory(prefix=".merge-", dir=scratch)
    spool = Spool(Path(folder.name))
    damage: list[Damage] = []
    notes: list[str] = []
    chosen = belonging(plan, logs, plan_fingerprint, damage, notes)
    of_log, of_row = _by_log(decisions)
    tasks = [
        ScanTask(str(path), number, plan.rows, str(spool.path(number)), of_log.get(log_id, {}), of_row.get(log_id, {}))
        for number, (log_id, path) in enumerate(chosen)
    ]
    scanned = scan_all(tasks, processes, damage, progress)
    for one in scanned:
        spool.add(one.pieces)
        _judge(one, damage, notes)
    damage += [Damage(path, problem) for path, problem in (feedback.damage if feedback is not None else [])]
    providers: dict[str, int] = {}
    sources: dict[str, int] = {}
    # By number of log; the numbers of logs that could not be read stay, so that the others keep theirs.
    provider_maps = [np.zeros(1, np.int32) for _ in tasks]
    source_maps = [np.zeros(1, np.int32) for _ in tasks]
    machines = ["" for _ in tasks]
    origin = list(range(len(tasks)))
    for one in scanned:
        provider_maps[one.log] = scanning.names(one.providers, one.most_provider, providers)
        source_maps[one.log] = scanning.names(one.sources, one.most_source, sources)
        machines[one.log] = one.header.sender
    if reports is not None:
        whole = {one.header.log_id for one in scanned if one.damage is None}
        numbers = {log_id: number for number, (log_id, _) in enumerate(chosen)}
        for part in reported(reports, plan.rows, whole, of_row, providers, sources):
            number = len(machines)
            writer = SpoolWriter(spool.path(number), number)
            writer.add(part.attempts)
            writer.close()
            spool.add(writer.pieces)
            machines.append(part.machine)
            origin.append(numbers.get(part.log_id, number))
            if part.log_id not in whole:
                notes.append(
                    f"log {part.log_id} of {part.machine}: {len(part.attempts):,} words are known from the control"
                    " store; replies and times within the attempt were lost with the machine"
                )
        # Reports are numbered in the merge's own numbers.
        same = np.arange(max(len(providers), len(sources)) + 1, dtype=np.int32)
        provider_maps += [same] * (len(machines) - len(provider_maps))
        source_maps += [same] * (len(machines) - len(source_maps))
    provider_names: list[str | None] = [None, *providers]
    source_names: list[str | None] = [None, *sources]
    store_missing = plan.store != "sqlite" and reports is None
    found = Merged(
        plan=plan,
        word=np.zeros(plan.rows, np.uint8),
        counts=np.zeros(len(WORDS), np.int64),
        provider_counts=np.zeros((len(provider_names), len(WORDS)), np.int64),
        providers=provider_names,
        sources=source_names,
        machines=machines,
        logs=[_summary(one) for one in scanned],
        damage=damage,
        notes=notes,
        duplicates=[],
        partitions=[],
        tally=merged([_renumbered(one.tally, provider_maps[one.log]) for one in scanned]),
        replies=_replies(scanned, provider_maps, provider_names),
        events=_events(scanned, provider_maps, source_maps, provider_names, source_names),
        feedback=feedback or Feedback(),
        store_missing=store_missing,
        # Without the store it is not known what was sent.
        open_word=None if ended is None or store_missing else ENDED[ended],
        _spool=spool,
        _provider_maps=provider_maps,
        _source_maps=source_maps,
        _same_log=np.array(origin, np.int32),
        _resent=frozenset(decision.row for decision in decisions if decision.what == "resend"),
        _scratch=folder,
    )
    _account(found, processes)
    return found


def _by_log(decisions: Sequence[Decided]) -> tuple[dict[str, dict[int, str]], dict[str, dict[int, str]]]:
    """log id -> serial -> what, and log id -> row -> what for those without a serial. `accept` outweighs `resend`."""
    of_log: dict[str, dict[int, str]] = {}
    of_row: dict[str, dict[int, str]] = {}
    for decision in sorted(decisions, key=lambda d: d.what == "accept"):
        if decision.serial:
            of_log.setdefault(decision.log_id, {})[decision.serial] = decision.what
        else:
            of_row.setdefault(decision.log_id, {})[decision.row] = decision.what
    return of_log, of_row


def _judge(one: Scanned, damage: list[Damage], notes: list[str]) -> None:
    """What is wrong with a log, and what is only worth a word."""
    log_id = one.header.log_id
    if one.damage is not None:
        damage.append(Damage(one.path, one.damage, log_id))
    elif one.torn:
        notes.append(f"{one.path} ends in {one.torn:,} bytes of a batch that was never finished: its worker was killed")
    elif not one.is_closed:
        notes.append(f"{one.path} was not closed: its worker was killed, or still runs")
    if one.beyond:
        damage.append(Damage(one.path, f"{one.beyond:,} records name rows that the plan does not have", log_id))
    if one.mismatched:
        damage.append(Damage(one.path, f"{one.mismatched:,} results name another row than their intent", log_id))


def _summary(one: Scanned) -> LogSummary:
    return LogSummary(
        log_id=one.header.log_id,
        path=one.path,
        machine=one.header.sender,
        worker=one.header.worker,
        records=one.intents + one.results,
        in_doubt=one.in_doubt,
        is_closed=one.is_closed,
        torn=one.torn,
        bytes=one.length,
        first_us=one.first_us,
        last_us=one.last_us,
    )


def _renumbered(counts: Tally, providers: Numbers) -> Tally:
    known = np.minimum(counts.provider, len(providers) - 1)
    return Tally(providers[known].astype(np.int64), counts.verdict, counts.code, counts.minute, counts.count)


def _replies(scanned: list[Scanned], maps: list[Numbers], names: list[str | None]) -> list[Reply]:
    counts: Counter[tuple[str | None, int, int, str]] = Counter()
    examples: dict[tuple[str | None, int, int, str], str] = {}
    for one in scanned:
        for (provider, verdict, code, words), count, example in one.replies:
            name = (names[int(maps[one.log][provider])], verdict, code, words)
            counts[name] += count
            # The first in the order of the alphabet: the same whatever order the logs came in.
            examples[name] = min(examples.get(name, example), example)
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0][0] or "", item[0][1:]))
    return [Reply(*name, count, examples[name]) for name, count in ordered]


def _events(
    scanned: list[Scanned],
    provider_maps: list[Numbers],
    source_maps: list[Numbers],
    providers: list[str | None],
    sources: list[str | None],
) -> list[Event]:
    found = []
    for one in scanned:
        for at_us, provider, source, text in one.events:
            p, s = provider_maps[one.log], source_maps[one.log]
            at = providers[int(p[provider])] if provider < len(p) else None
            by = sources[int(s[source])] if source < len(s) else None
            found.append(Event(at_us, at, by, one.header.sender, text))
    return sorted(found, key=lambda event: (event.at_us, event.machine, event.text))


def _account(found: Merged, threads: int) -> None:
    """Resolve every span once for its words and counts; details are asked again by whoever writes them."""
    words = len(WORDS)

    def one(first: int) -> tuple[Numbers, list[Duplicate]]:
        resolved = found.resolved(first, words_only=True)
        found.word[first : first + resolved.rows] = resolved.word
        key = resolved.provider.astype(np.int64) * words + resolved.word
        return np.bincount(key, minlength=found.provider_counts.size), resolved.duplicates

    with _threads(threads) as pool:
        for counts, duplicates in pool.map(one, (first for first, _ in found.spans())):
            found.provider_counts += counts.reshape(found.provider_counts.shape)
            found.duplicates += duplicates
    found.counts = found.provider_counts.sum(axis=0)
    found.partitions = _partitions(found)
    empty = [part for part in found.partitions if part.rows and part.not_reached == part.rows]
    if found.logs and empty and len(empty) < len(found.partitions):
        for part in empty:
            last = part.first_row + part.rows - 1
            found.notes.append(
                f"partition {part.number} (rows {part.first_row:,} to {last:,}): no log names a row of it"
            )


def _partitions(found: Merged) -> list[PartitionSummary]:
    summaries = []
    for number, partition in enumerate(found.plan.partitions):
        batches = found.plan.batches[partition.first_batch : partition.first_batch + partition.batches]
        rows = sum(batch.rows for batch in batches)
        first = batches[0].first_row if batches else 0
        not_reached = int((found.word[first : first + rows] == 0).sum())
        summaries.append(PartitionSummary(number, first, rows, not_reached))
    return summaries


def _threads(number: int) -> Executor:
    return ThreadPoolExecutor(max(1, number), thread_name_prefix="merge")
