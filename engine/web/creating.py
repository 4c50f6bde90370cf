"""Starting campaigns by the API: a folder beside the others, `engine plan`, `engine send` in processes of their own.

The commands are the same that people type, run as processes in a session of their own: a web server that dies takes no
campaign with it. Lists are named by paths under the folder that `engine serve --lists` names, and nothing outside it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import msgspec

from engine.campaign import Campaign, make_private_folder, write_whole
from engine.compose.keys import write_new_keys
from engine.config import SETTINGS_FILE
from engine.errors import EngineError, Exit
from engine.web.problems import Refused
from engine.web.shelf import Shelf

_PLAN_PATIENCE_S = 600.0
_START_PATIENCE_S = 1.0
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")

Name = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$", description="Names the folder too.")]
Line = Annotated[str, msgspec.Meta(min_length=1, max_length=998, pattern=r"^[^\x00-\x1f\x7f]+$")]
Text = Annotated[str, msgspec.Meta(min_length=1, max_length=1_000_000)]


class NewCampaign(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A campaign to make and plan."""

    id: Name
    list: Annotated[
        str, msgspec.Meta(min_length=1, max_length=1000, description="Parquet file in the folder of lists.")
    ]
    from_address: Annotated[
        str, msgspec.Meta(min_length=3, max_length=254, pattern=r"^[^\s@\x00-\x1f\x7f]+@[^\s@\x00-\x1f\x7f]+$")
    ]
    from_name: Line | None = None
    subject: Line
    text: Annotated[str, msgspec.Meta(max_length=1_000_000, description="Template of the text part.")] | None = None
    html: Annotated[str, msgspec.Meta(max_length=1_000_000, description="Template of the HTML part.")] | None = None
    relay: Annotated[str, msgspec.Meta(max_length=500, pattern=r"^(smtp|smtps)://[^\s@\x00-\x1f\x7f]+$")] | None = None
    unsubscribe_url: Annotated[str, msgspec.Meta(max_length=500, pattern=r"^https://[^\s\x00-\x1f\x7f]+$")] | None = (
        None
    )
    partitions: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 1


class CommandFailed(EngineError):
    """{command} refused: {said}."""

    exit_code = Exit.USAGE
    hint = "Correct what it names and ask again."


def create(shelf: Shelf, lists: Path, wanted: NewCampaign) -> str:
    """Make the campaign and plan it; its key. Raises Refused, CommandFailed; a refused plan leaves no folder."""
    if shelf.is_single:
        raise Refused(409, "this server shows one campaign", "engine serve FOLDER-OF-CAMPAIGNS takes new ones")
    if not (wanted.text or wanted.html):
        raise Refused(422, "a campaign needs `text` or `html`")
    source = inside(lists, wanted.list)
    folder = shelf.root / wanted.id
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        raise Refused(409, f"there is a campaign folder {wanted.id} already") from None
    campaign = Campaign(folder)
    try:
        _write(campaign, wanted)
        words = ["plan", str(source), "--campaign", str(folder), "--partitions", str(wanted.partitions)]
        done = subprocess.run(
            _engine(words), env=_environment(), capture_output=True, text=True, timeout=_PLAN_PATIENCE_S, check=False
        )
        if done.returncode:
            raise CommandFailed(command="engine plan", said=_said(done.stderr).replace(str(folder), wanted.id))
    except BaseException:
        _remove(folder)
        raise
    found = next((one for one in shelf.all(fresh=True) if one.campaign.folder == folder), None)
    return found.key if found is not None else wanted.id


def start(campaign: Campaign, partition: int, processes: int | None, living: list[int | None]) -> int:
    """Begin `engine send` of one partition, apart from this process; its pid. Raises Refused, CommandFailed."""
    if partition in living:
        raise Refused(409, f"partition {partition} is being sent already")
    make_private_folder(campaign.run)
    words = ["send", "--campaign", str(campaign.folder), "--partition", str(partition), "--yes", "--log-format", "json"]
    if processes is not None:
        words += ["--processes", str(processes)]
    said = campaign.run / f"send-{partition}.said"
    with os.fdopen(os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "wb") as out:
        began = out.tell()
        process = subprocess.Popen(
            _engine(words),
            env=_environment(),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    _CHILDREN.append(process)
    # What it refuses at once is an answer to this request; later words are in the file and the counters.
    deadline = time.monotonic() + _START_PATIENCE_S
    while process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    if process.returncode:
        with said.open(encoding="utf-8", errors="replace") as file:
            file.seek(began)
            raise CommandFailed(command="engine send", said=_said(file.read()).replace(str(campaign.folder), ""))
    return process.pid


_CHILDREN: list[subprocess.Popen[bytes]] = []


def reap() -> None:
    """Collect senders that ended, so that none stays a zombie while we live."""
    _CHILDREN[:] = [process for process in _CHILDREN if process.poll() is None]


def inside(folder: Path, name: str) -> Path:
    """The file of this name under the folder; raises Refused for anything outside it, through links as well."""
    root = folder.resolve()
    try:
        found = (root / name).resolve()
        is_there = found.is_relative_to(root) and found.exists()
    except (OSError, ValueError, RuntimeError):
        is_there = False
    if not is_there:
        raise Refused(422, "there is no such list in the folder of lists", "engine serve --lists DIR names the folder")
    return found


def _write(campaign: Campaign, wanted: NewCampaign) -> None:
    make_private_folder(campaign.folder / "templates")
    message: dict[str, str | None] = {
        "from_address": wanted.from_address,
        "from_name": wanted.from_name,
        "subject": wanted.subject,
    }
    for kind, body in (("text", wanted.text), ("html", wanted.html)):
        if body:
            name = f"templates/letter.{'txt' if kind == 'text' else 'html'}"
            write_whole(campaign.folder / name, body.encode())
            message[kind] = name
    message["unsubscribe_url"] = wanted.unsubscribe_url
    delivery: dict[str, str | None] = {"relay": wanted.relay or "sink://"}
    tables: dict[str, dict[str, str | None]] = {"campaign": {"id": wanted.id}, "message": message, "delivery": delivery}
    lines: list[str] = []
    for table, values in tables.items():
        lines.append(f"[{table}]")
        lines += [f"{key} = {_toml(value)}" for key, value in values.items() if value is not None]
        lines.append("")
    write_new_keys(campaign.folder / "keys" / "secret.keys")
    make_private_folder(campaign.logs)
    write_whole(campaign.folder / SETTINGS_FILE, "\n".join(lines).encode())


def _toml(text: str) -> str:
    """A basic string. JSON's escapes are TOML's; control characters were refused before."""
    if _CONTROL.search(text):
        raise Refused(422, "control characters are not allowed there")
    return msgspec.json.encode(text).decode()


def _engine(words: list[str]) -> list[str]:
    return [sys.executable, "-m", "engine", *words]


def _environment() -> dict[str, str]:
    """The package is found also where it is not installed."""
    root = str(Path(__file__).parents[2])
    return {**os.environ, "PYTHONPATH": os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])}


def _said(text: str) -> str:
    """The error of a command's stderr, on one line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return (errors or lines or ["it said nothing"])[-1][:500]


def _remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
