"""`engine init`: a campaign to start from, that runs as it is."""

from __future__ import annotations

import os
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

import click

from engine.campaign import Campaign, make_private_folder
from engine.commands.common import campaign_option
from engine.compose.keys import write_new_keys
from engine.errors import EngineError, Exit


class FolderInUse(EngineError):
    """{folder} holds a campaign already."""

    exit_code = Exit.USAGE
    hint = "Choose another folder: engine init --campaign DIR."


@click.command()
@campaign_option
def init(campaign: Campaign) -> None:
    """Write a campaign to start from: settings, a letter as text and HTML, a small list, a key.

    \b
    engine init && engine plan list.parquet && engine send && engine merge-logs
    """
    start_campaign(campaign)
    where = "" if campaign.folder == Path("campaign") else f" --campaign {campaign.folder}"
    click.echo(f"{campaign.folder} is a campaign that runs as it is, against a test server inside the sender.")
    click.echo(f"  settings: {campaign.folder}/campaign.toml, letter: {campaign.folder}/templates/")
    click.echo(f"  next: engine plan list.parquet{where}; engine send{where}; engine merge-logs{where}")


def start_campaign(campaign: Campaign, *, list_file: str = "list.parquet") -> None:
    """The files of a first campaign, 0600 in a folder 0700; raises FolderInUse."""
    if (campaign.folder / "campaign.toml").exists():
        raise FolderInUse(folder=campaign.folder)
    make_private_folder(campaign.folder)
    template = files("engine") / "init"
    _copy(template / "campaign.toml", campaign.folder / "campaign.toml")
    _copy(template / list_file, campaign.folder / "list.parquet")
    make_private_folder(campaign.folder / "templates")
    for letter in (template / "templates").iterdir():
        _copy(letter, campaign.folder / "templates" / letter.name)
    write_new_keys(campaign.folder / "keys" / "secret.keys")
    make_private_folder(campaign.logs)


def _copy(source: Traversable, target: Path) -> None:
    descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(source.read_bytes())
