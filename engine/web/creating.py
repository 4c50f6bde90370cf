"""Making campaigns by the API: a folder beside the others, and `engine plan` over it.

Lists are named by paths under the folder that `engine serve --lists` names, and nothing outside it.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from engine.campaign import Campaign, make_private_folder, write_whole
from engine.compose.keys import write_new_keys
from engine.config import SETTINGS_FILE
from engine.web.command import CommandFailed, engine_command, environment, said
from engine.web.problems import Refused
from engine.web.shelf import Shelf

_PLAN_PATIENCE_S = 600.0
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
    tls: Literal["required", "verified", "opportunistic", "off"] | None = None  # to the relay; by default required
    messages_per_second: Annotated[float, msgspec.Meta(ge=0.01, le=1_000_000)] | None = None
    unsubscribe_url: Annotated[str, msgspec.Meta(max_length=500, pattern=r"^https://[^\s\x00-\x1f\x7f]+$")] | None = (
        None
    )
    partitions: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 1


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
            engine_command(words),
            env=environment(),
            capture_output=True,
            text=True,
            timeout=_PLAN_PATIENCE_S,
            check=False,
        )
        if done.returncode:
            raise CommandFailed(command="engine plan", said=said(done.stderr).replace(str(folder), wanted.id))
    except BaseException:
        _remove(folder)
        raise
    found = next((one for one in shelf.all(fresh=True) if one.campaign.folder == folder), None)
    return found.key if found is not None else wanted.id


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
    delivery: dict[str, str | float | None] = {
        "relay": wanted.relay or "sink://",
        "tls": wanted.tls,
        "messages_per_second": wanted.messages_per_second,
    }
    tables: dict[str, Mapping[str, str | float | None]] = {
        "campaign": {"id": wanted.id},
        "message": message,
        "delivery": delivery,
    }
    lines: list[str] = []
    for table, values in tables.items():
        lines.append(f"[{table}]")
        lines += [f"{key} = {_toml(value)}" for key, value in values.items() if value is not None]
        lines.append("")
    write_new_keys(campaign.folder / "keys" / "secret.keys")
    make_private_folder(campaign.logs)
    write_whole(campaign.folder / SETTINGS_FILE, "\n".join(lines).encode())


def _toml(value: str | float) -> str:
    """A number or a basic string. JSON's escapes are TOML's; control characters were refused before."""
    if isinstance(value, str) and _CONTROL.search(value):
        raise Refused(422, "control characters are not allowed there")
    return msgspec.json.encode(value).decode()


def _remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
