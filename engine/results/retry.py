"""The next list: rows of `undeliverable.parquet` by outcome, with the list's own columns."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from engine.errors import EngineError, Exit
from engine.results.recipients import LAST
from formats.outcomes import WORDS

# What a second try can help. Not in doubt: those may have been accepted, `engine doubt` is for them. Not suppressed,
# invalid or refused: the answer would be the same.
DEFAULT = ("deferred", "unsent")

_KNOWN = sorted({str(outcome) for outcome, _ in WORDS} | {f"{outcome}/{reason}" for outcome, reason in WORDS if reason})


class NoSuchOutcome(EngineError):
    """{name!r} is no outcome that a row without acceptance can have."""

    exit_code = Exit.USAGE
    hint = "one of: {known}."


class NothingToRetry(EngineError):
    """{file} cannot be read: {problem}."""

    exit_code = Exit.USAGE
    hint = (
        "run `engine merge-logs`; it writes the file, unless a shared store was not asked and unsent rows are unknown."
    )


class ListUnwritable(EngineError):
    """{file} cannot be written: {problem}."""

    exit_code = Exit.TRY_AGAIN
    hint = "Make room, or name another file with --out."


def write_retry_list(undeliverable: Path, out: Path, selected: Sequence[str] = DEFAULT) -> int:
    """Write the selected rows to `out`; the answer is how many.

    Raises NoSuchOutcome, NothingToRetry, ListUnwritable.
    """
    for name in selected:
        if name not in _KNOWN or name.startswith("accepted"):
            known = ", ".join(word for word in _KNOWN if not word.startswith("accepted"))
            raise NoSuchOutcome(name=name, known=known)
    try:
        source = pq.ParquetFile(undeliverable)
    except (OSError, pa.ArrowException) as problem:
        raise NothingToRetry(file=undeliverable, problem=problem) from None
    schema = pa.schema([field for field in source.schema_arrow if field.name not in LAST])
    beside = out.with_name(f".{out.name}.{os.getpid()}.new")
    written = 0
    try:
        with source, pq.ParquetWriter(beside, schema, compression="zstd") as writer:
            beside.chmod(0o600)
            for batch in source.iter_batches(batch_size=65_536):
                outcome = batch.column(LAST[0]).to_numpy(zero_copy_only=False)
                reason = batch.column(LAST[1]).to_numpy(zero_copy_only=False)
                wanted = np.isin(outcome.astype(str), selected)
                both = np.array([f"{o}/{r}" for o, r in zip(outcome, reason, strict=True)], str)
                wanted |= np.isin(both, selected)
                chosen = batch.filter(pa.array(wanted)).select(schema.names)
                writer.write_table(pa.Table.from_batches([chosen], schema), row_group_size=10_000)
                written += chosen.num_rows
        beside.replace(out)
    except OSError as problem:
        raise ListUnwritable(file=out, problem=problem.strerror or problem) from None
    finally:
        beside.unlink(missing_ok=True)
    return written
