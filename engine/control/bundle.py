"""What another machine needs of a campaign beside the store's URL: plan, settings, templates, suppressions, tokens.

The bundle holds no password and no DKIM key. It does hold the key behind Message-IDs and unsubscribe tokens, for a
resend must carry the same Message-ID whichever machine sends it: guard the store like the campaign folder. The list
itself stays where it is: every machine must reach it by the planned path or URI.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from engine.campaign import Campaign, fingerprint, make_private_folder, write_whole
from engine.config import SETTINGS_FILE, Settings
from engine.control.store import SharedStore
from engine.errors import EngineError, Exit
from formats import plan as plan_format
from formats.plan import PlanError

_PLAIN = ("tokens.json", "budgets.toml", "warmup.toml", "rules.toml")


class BundleRefused(EngineError):
    """What the store {where} holds for {name} cannot be used: {problem}."""

    exit_code = Exit.PLAN
    hint = "Load the store again with `engine plan --control URL --replace`, or use an empty campaign folder here."


def gather(campaign: Campaign, settings: Settings, plan: bytes) -> dict[str, bytes]:
    """The files of the bundle by their path in the campaign folder."""
    files = {"plan.json": plan}
    for path in _paths(campaign, settings):
        if path.is_file():
            files[path.relative_to(campaign.folder).as_posix()] = path.read_bytes()
    files[SETTINGS_FILE] = _without_password(files[SETTINGS_FILE])
    return files


def _paths(campaign: Campaign, settings: Settings) -> Iterator[Path]:
    folder, message = campaign.folder, settings.message
    named = [message.text, message.html, settings.keys.file, *_PLAIN, SETTINGS_FILE]
    named += [image.path for image in message.inline] + [attached.path for attached in message.attachments]
    for name in filter(None, named):
        path = folder / name
        if ".." not in Path(name).parts and not Path(name).is_absolute():
            yield path
    for inside in ("templates", "suppression"):
        yield from sorted(path for path in (folder / inside).rglob("*") if path.is_file() and not path.is_symlink())


def _without_password(toml: bytes) -> bytes:
    """The settings, without a password in the store's URL where somebody wrote one there."""
    return re.sub(rb"(postgres(?:ql)?://[^:@/\s\"']*):[^@\s\"']*@", rb"\1@", toml)


def unpack(store: SharedStore, campaign: Campaign) -> None:
    """Fill the campaign folder from the store; what is there already must be the same. Raises BundleRefused."""
    files = store.bundle()
    found = store.campaign()
    plan = files.get("plan.json", b"")
    if found is None or fingerprint(plan) != found.plan_fingerprint:
        raise BundleRefused(where=store.url, name="plan.json", problem="it is not the plan that was loaded")
    try:
        plan_format.decode(plan)
    except PlanError as problem:
        raise BundleRefused(where=store.url, name="plan.json", problem=problem) from None
    for name, body in files.items():
        pure = PurePosixPath(name)
        if pure.is_absolute() or ".." in pure.parts or "\\" in name:
            raise BundleRefused(where=store.url, name=name, problem="it would lie outside the campaign folder")
        path = campaign.folder / pure
        if path.exists() and path.read_bytes() != body:
            raise BundleRefused(where=store.url, name=name, problem=f"{path} is another file")
    make_private_folder(campaign.folder)
    make_private_folder(campaign.logs)
    # The plan last: a folder with a plan is a whole one.
    for name, body in sorted(files.items(), key=lambda file: file[0] == "plan.json"):
        path = campaign.folder / name
        make_private_folder(path.parent)
        write_whole(path, body)
