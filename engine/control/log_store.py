"""Finished logs in an object store (`[log] log_store = "s3://bucket/folder"`), so that merging needs no machine.

Any URI of pyarrow.fs; credentials by the usual environment of the store. A log is uploaded under its own name once its
worker has ended; the copy here stays, for it is what recovery reads. Uploading again writes the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa
import pyarrow.fs as pafs

from engine.campaign import Campaign, make_private_folder
from engine.errors import EngineError, Exit

FETCHED = "fetched-logs"


class LogStoreAway(EngineError):
    """The log store {where} cannot be used: {problem}."""

    exit_code = Exit.TRY_AGAIN
    hint = "Check the URI and the store's credentials in the environment. The logs stay in the campaign folder."


def upload(campaign_id: str, where: str, logs: Iterable[Path]) -> int:
    """Copy these logs there; how many. Raises LogStoreAway."""
    copied = 0
    filesystem, folder = _open(where, campaign_id)
    for path in logs:
        if not path.stat().st_size:
            continue
        try:
            with filesystem.open_output_stream(f"{folder}/{path.name}") as to, path.open("rb") as file:
                while chunk := file.read(4 << 20):
                    to.write(chunk)
        except (pa.ArrowException, OSError) as problem:
            raise LogStoreAway(where=where, problem=_first_line(problem)) from None
        copied += 1
    return copied


def fetch(campaign: Campaign, campaign_id: str, where: str) -> list[Path]:
    """The logs that are there, copied into `fetched-logs`; those that are here already are not copied again."""
    filesystem, folder = _open(where, campaign_id)
    to = campaign.folder / FETCHED
    found: list[Path] = []
    try:
        for entry in filesystem.get_file_info(pafs.FileSelector(folder, allow_not_found=True)):
            if not entry.base_name.endswith(".arrows"):
                continue
            make_private_folder(to)
            path = to / entry.base_name
            if not path.exists() or path.stat().st_size != entry.size:
                with filesystem.open_input_stream(entry.path) as source, path.open("wb") as file:
                    while chunk := source.read(4 << 20):
                        file.write(chunk)
            found.append(path)
    except (pa.ArrowException, OSError) as problem:
        raise LogStoreAway(where=where, problem=_first_line(problem)) from None
    return found


def _open(where: str, campaign_id: str) -> tuple[pafs.FileSystem, str]:
    try:
        filesystem, path = pafs.FileSystem.from_uri(where)
        folder = f"{path.rstrip('/')}/{campaign_id}"
        filesystem.create_dir(folder, recursive=True)
    except (pa.ArrowException, OSError, ValueError) as problem:
        raise LogStoreAway(where=where, problem=_first_line(problem)) from None
    return filesystem, folder


def _first_line(problem: BaseException) -> str:
    return (str(problem).splitlines() or [type(problem).__name__])[0]
