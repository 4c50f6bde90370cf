"""Which table a command's suppression folder exchanges with: that of `--control`, else of the campaign's plan."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from engine.campaign import Campaign
from engine.control.opening import control_url, open_suppressions
from engine.errors import EngineError
from engine.lists.exchange import Exchange


@contextmanager
def exchange_of(folder: Path, control: str | None) -> Iterator[Exchange | None]:
    """The folder's exchange, None where nothing says where machines meet."""
    is_campaigns = (folder.parent / "campaign.toml").exists() and folder.name == "suppression"
    if not (control or is_campaigns):
        yield None
        return
    url = control_url(Campaign(folder.parent), None, control)
    if url is None:
        yield None
        return
    exchange = Exchange(folder, open_suppressions(url))
    try:
        yield exchange
    finally:
        exchange.close()


def share(exchange: Exchange | None) -> None:
    """Tell the others now. Raises the store's errors: what was added here goes with the next exchange."""
    if exchange is not None:
        exchange.step()


def hear(exchange: Exchange | None) -> None:
    """Be told what others added; where that cannot be, say so and go on with what is known here."""
    if exchange is None:
        return
    try:
        exchange.step()
    except EngineError as problem:
        click.echo(f"warning: only what this machine knows: {problem}", err=True)
