"""`engine bounces`: read what came back. `engine bounces report`, `engine bounces confirm`."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

if TYPE_CHECKING:
    from engine.bounce.desk import Desk
    from engine.bounce.intake import Tally
    from engine.bounce.ours import Ours
    from engine.bounce.sources import Source

from engine.clock import SystemClock
from engine.errors import EngineError, Exit


class NoSources(EngineError):
    """Nothing to read: no source is named, and {folder} has none in [bounces]."""

    exit_code = Exit.USAGE
    hint = (
        "Name a Maildir, an mbox, a folder of messages, or `-` for one message on stdin; "
        "or set [bounces] sources or [[bounces.imap]]."
    )


class NotEverythingRead(EngineError):
    """{count} of the sources could not be read; what was read of the others is recorded."""

    exit_code = Exit.TRY_AGAIN
    hint = "The lines above say why. Run the same command again: nothing is read twice."


class ReadThenReport(click.Group):
    """`engine bounces SOURCE...` reads; `engine bounces report` and `confirm` are commands of their own."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] in self.commands:
            return super().resolve_command(ctx, args)
        return "read", self.commands["read"], args

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args or (args[0] not in self.commands and args[0] not in ("--help", "-h")):
            args = ["read", *args]
        return super().parse_args(ctx, args)


_campaigns = click.option(
    "--campaign",
    "folders",
    multiple=True,
    type=click.Path(path_type=Path, file_okay=False),
    default=(Path("campaign"),),
    help="Campaign folder; repeat it where one mailbox serves several campaigns. By default ./campaign.",
)


@click.group(cls=ReadThenReport)
def bounces() -> None:
    """Read bounces, complaints, replies and unsubscribes.

    \b
    engine bounces ~/Maildir --campaign weekly-31          once
    engine bounces --campaign weekly-31 --follow           the sources of campaign.toml, for as long as it runs
    engine bounces - --campaign weekly-31 < message.eml    from an MTA's pipe
    """


@bounces.command(hidden=True)
@click.argument("sources", nargs=-1)
@_campaigns
@click.option("--follow", is_flag=True, help="Stay and read what comes; SIGTERM or Ctrl-C ends it.")
@click.option("--delete-handled", is_flag=True, help="Delete matched, recorded messages from Maildirs and IMAP.")
@click.option("--json", "as_json", is_flag=True, help="Print the tally as JSON.")
def read(
    sources: tuple[str, ...], folders: tuple[Path, ...], follow: bool, delete_handled: bool, as_json: bool
) -> None:
    """Read SOURCES (Maildir, mbox, folder, message, `-`), or those of campaign.toml.

    \b
    engine bounces read Maildir --follow
    """
    from engine.bounce import intake
    from engine.bounce.classify import shipped_rules
    from engine.bounce.desk import Desk
    from engine.bounce.ours import Ours
    from engine.bounce.sources import SpoolSource, spool

    if "-" in sources:
        # An MTA waits for our exit code: the message is safe first, and read by whoever holds the lock.
        raw = head_and_tail_of_pipe()
        try:
            spool(folders[0] / "feedback" / intake.INBOX, raw, ".eml")
        except OSError as problem:
            from engine.bounce.record import FeedbackUnwritable

            raise FeedbackUnwritable(file=folders[0] / "feedback" / intake.INBOX, problem=problem.strerror) from None
        sources = tuple(source for source in sources if source != "-")
        if not sources:
            return
    ours = Ours(folders)
    first = ours.campaigns[0]
    feedback = first.campaign.feedback
    opened = _open_sources(sources, ours, delete_handled)
    inbox = feedback / intake.INBOX
    inbox.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not opened and not any(inbox.iterdir()) and not follow:
        raise NoSources(folder=first.folder)
    opened.append(SpoolSource(inbox, feedback / intake.UNMATCHED))
    with ExitStack() as stack:
        stack.enter_context(intake.intake_lock([one.campaign.feedback for one in ours.campaigns]))
        desk = Desk(ours, shipped_rules(), SystemClock())
        stack.callback(desk.close)
        for source in opened:
            stack.callback(source.close)
        if not follow:
            tally = intake.read_once(opened, desk, _tell)
            _print(tally, as_json)
            _warn(desk)
            if tally.problems:
                raise NotEverythingRead(count=len(tally.problems))
            return
        stopped: list[int] = []
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda received, _frame: stopped.append(received))
        intake.follow(
            opened,
            desk,
            is_stopped=lambda: bool(stopped),
            told=lambda tally: _print(tally, as_json),
            tell=_tell,
            sleep=lambda seconds: _sleep(seconds, stopped),
        )


def head_and_tail_of_pipe() -> bytes:
    """A message on stdin without the middle of a large one, read to its end so that the MTA's write succeeds."""
    from engine.bounce.sources import HEAD, TAIL

    head = sys.stdin.buffer.read(HEAD + TAIL)
    tail = b""
    while chunk := sys.stdin.buffer.read(65536):
        tail = (tail + chunk)[-TAIL:]
    return head[:HEAD] + b"\n" + (head[HEAD:] + tail)[-TAIL:] if tail else head


def _open_sources(named: Sequence[str], ours: Ours, delete: bool) -> list[Source]:
    """The sources named, else those of the first campaign's settings."""
    from engine.bounce.imap import ImapSource
    from engine.bounce.intake import UNMATCHED
    from engine.bounce.sources import open_source

    first = ours.campaigns[0]
    unmatched = first.campaign.feedback / UNMATCHED
    if named:
        return [open_source(Path(name), unmatched, delete=delete) for name in named]
    if first.settings is None:
        return []
    table = first.settings.bounces
    delete = delete or table.delete_handled
    opened = [open_source(first.folder / name, unmatched, delete=delete) for name in table.sources]
    opened += [
        ImapSource(imap, mailbox, delete=delete, folder=first.folder)
        for imap in table.imap
        for mailbox in imap.mailboxes
    ]
    return opened


def _tell(text: str) -> None:
    click.echo(text, err=True)


def _sleep(seconds: float, stopped: list[int]) -> None:
    end = time.monotonic() + seconds
    while not stopped and time.monotonic() < end:
        time.sleep(0.2)


def _print(tally: Tally, as_json: bool) -> None:
    if as_json:
        click.echo(msgspec.json.encode(tally))
        return
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(tally.kinds.items())) or "nothing new"
    done = ", ".join(f"{count} {decision}" for decision, count in sorted(tally.decisions.items()))
    click.echo(f"{tally.messages} messages: {kinds}" + (f"; {done}" if done else ""))
    if tally.known:
        click.echo(f"{tally.known} were recorded before", err=True)
    if tally.unmatched:
        click.echo(f"{tally.unmatched} are for people to look at: `engine bounces report` lists them", err=True)


def _warn(desk: Desk) -> None:
    for provider in desk.breakers.open_ones():
        click.echo(
            f"{provider} calls so many of its users unknown that it may be broken itself: nobody is suppressed for it. "
            f"Look, then `engine bounces confirm {provider}`",
            err=True,
        )


@bounces.command()
@_campaigns
@click.option("--json", "as_json", is_flag=True)
def report(folders: tuple[Path, ...], as_json: bool) -> None:
    """What came back so far: kinds, reasons, providers, and what people must look at.

    \b
    engine bounces report
    """
    from engine.bounce.report import report as counted
    from engine.bounce.report import table

    told = counted([folder / "feedback" for folder in folders])
    click.echo(msgspec.json.encode(told) if as_json else table(told))


@bounces.command()
@click.argument("provider")
@_campaigns
def confirm(provider: str, folders: tuple[Path, ...]) -> None:
    """Suppress the hard bounces of PROVIDER that were doubted while its breaker was open.

    \b
    engine bounces confirm google
    """
    from engine.bounce.confirm import confirm as confirmed
    from engine.bounce.ours import Ours

    count = confirmed(Ours(folders).campaigns, provider, SystemClock().wall_us())
    click.echo(f"{count} addresses suppressed")
