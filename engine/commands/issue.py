"""`engine issue`: which issue of a recurring newsletter is due today."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import click

from engine.issues import SENT_FILE, Issue, next_issue, read_issues
from engine.schedule import zone_named

_where = click.argument("issues", type=click.Path(path_type=Path, exists=True))


@click.group()
def issue() -> None:
    """Issues of a newsletter that goes out again and again: a folder of them, or a table.

    \b
    engine issue next issues --newsletter daily
    """


@issue.command("next")
@_where
@click.option("--newsletter", default="", help="Which one, where there are several.")
@click.option("--on", "day", type=click.DateTime(["%Y-%m-%d"]), help="The day; default: today in --zone.")
@click.option("--zone", default="UTC", show_default=True, help="IANA zone in which today is today.")
@click.option("--grace", type=click.IntRange(0), default=0, help="Days that a missed issue is still sent.")
def next_(issues: Path, newsletter: str, day: datetime | None, zone: str, grace: int) -> None:
    """Print the folder of the issue to send today; exit code 3 and the reason where there is none.

    \b
    engine issue next issues --newsletter daily --zone Europe/Berlin
    engine issue next issues.csv --newsletter weekly --on 2026-12-05
    """
    today = day.date() if day is not None else datetime.now(zone_named(zone)).date()
    click.echo(next_issue(read_issues(issues), today, newsletter, grace=grace).folder)


@issue.command("done")
@click.argument("folder", type=click.Path(path_type=Path, exists=True, file_okay=False))
def done(folder: Path) -> None:
    """Mark an issue as sent, so that it is not picked again.

    \b
    engine issue done issues/2026-12-03-daily
    """
    (folder / SENT_FILE).touch()


@issue.command("list")
@_where
def list_(issues: Path) -> None:
    """All issues and what each waits for.

    \b
    engine issue list issues
    """
    for one in read_issues(issues):
        click.echo(f"{one.date} {one.newsletter:12} {_state(one):10} {one.folder}")


def _state(one: Issue) -> str:
    return "sent" if one.sent else "ready" if one.ready else "not ready"
