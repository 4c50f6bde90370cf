"""Looks at a campaign without sending it: `engine send --dry-run` renders every row, `--test-to` sends some to you."""

from __future__ import annotations

import asyncio
import os
import time

import click

from engine.campaign import Campaign
from engine.clock import SystemClock
from engine.compose.render import RowProblem
from engine.config import Settings
from engine.errors import EngineError, Exit
from engine.rows import RowReader, first_texts
from engine.smtp.destination import ConnectionLimits, Destination, relay_destination
from engine.smtp.dialogue import Accepted, Event, Outgoing, Stage
from engine.smtp.handshake import Ended
from engine.smtp.pool import Pool
from engine.smtp.session import Session
from engine.work.frozen import planned_composer
from formats.address import AddressError, Mailbox, parse_mailbox, parse_mailboxes
from formats.plan import Plan
from formats.reply import Reply

_SHOWN = 20
_STRETCH = 1000


class NotAnAddress(EngineError):
    """{address!r} is not an address to send tests to: {problem}."""

    exit_code = Exit.USAGE


class TestNotSent(EngineError):
    """The test could not be sent through {relay}: {problem}."""

    exit_code = Exit.TRY_AGAIN
    hint = "`engine check` tries the relay step by step."
    __test__ = False


def dry_run(campaign: Campaign, settings: Settings, plan: Plan) -> Exit:
    """Render every row; problems are named row by row. DONE, or ROWS_OPEN where a row has no message."""
    composer = planned_composer(campaign, settings, plan)
    reader = RowReader(plan, [plan.address_column, *composer.columns])
    started, now_us = time.perf_counter(), SystemClock().wall_us()
    good = bad = size = 0
    for batch in plan.batches:
        for span in reader.spans(batch.first_row, batch.rows):
            for first in range(0, span.rows, _STRETCH):
                found = reader.read(span, first, _STRETCH)
                for place, (row, mailbox) in enumerate(zip(found, parse_mailboxes(first_texts(found)), strict=True)):
                    number = span.first_row + first + place
                    try:
                        if isinstance(mailbox, AddressError):
                            raise RowProblem("address", str(mailbox))
                        size += len(composer.compose(number, mailbox, row[1:], now_us).content)
                        good += 1
                    except RowProblem as problem:
                        bad += 1
                        if bad <= _SHOWN:
                            click.echo(f"row {number}: invalid/{problem.reason}: {problem.detail}")
    if bad > _SHOWN:
        click.echo(f"... and {bad - _SHOWN:,} more")
    seconds = time.perf_counter() - started
    mean = size / good if good else 0
    click.echo(
        f"{good:,} messages rendered, {mean:,.0f} bytes each; {bad:,} rows invalid;"
        f" {good / max(seconds, 1e-9):,.0f}/s on one core. Nothing was sent.",
        err=True,
    )
    return Exit.ROWS_OPEN if bad else Exit.DONE


def test_to(campaign: Campaign, settings: Settings, plan: Plan, address: str, rows: list[int]) -> Exit:
    """Send these rows' content to `address`, under Message-IDs and tokens of the test generation; record nothing."""
    try:
        mailbox = parse_mailbox(address)
    except AddressError as problem:
        raise NotAnAddress(address=address, problem=problem) from None
    composer = planned_composer(campaign, settings, plan, generation="test")
    reader = RowReader(plan, [plan.address_column, *composer.columns])
    now_us = SystemClock().wall_us()
    outgoing = []
    for number, row in reader.pick(sorted(row for row in rows if row < plan.rows)):
        message = composer.compose(number, mailbox, row[1:], now_us)
        outgoing.append(Outgoing(number, message.return_path, message.recipient, message.content, message.smtputf8))
    destination = relay_destination(settings.delivery, os.environ, folder=campaign.folder)
    results = asyncio.run(_send(destination, ConnectionLimits.of(settings.delivery), outgoing, mailbox))
    refused = 0
    for event in results:
        if isinstance(event, Accepted):
            click.echo(f"row {event.ticket}: accepted: {event.reply}")
        else:
            refused += 1
            click.echo(f"row {event.ticket}: {event}")
    return Exit.ROWS_OPEN if refused else Exit.DONE


async def _send(
    destination: Destination, limits: ConnectionLimits, outgoing: list[Outgoing], mailbox: Mailbox
) -> list[Event]:
    results: list[Event] = []
    left = list(reversed(outgoing))
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    class OneSlot:
        def __init__(self) -> None:
            self.free = True

        def acquire(self) -> bool:
            had, self.free = self.free, False
            return had

        def release(self) -> None:
            self.free = True

    class Ear:
        def on_ready(self, session: Session) -> None:
            while left and session.capacity > 0:
                session.send([left.pop()])

        def on_events(self, session: Session, events: list[Event]) -> None:
            results.extend(events)
            if len(results) == len(outgoing) and not done.done():
                done.set_result(None)

        def on_session_ended(
            self, subject: Session | Destination, why: Ended, stage: Stage, reply: Reply | None, error: str
        ) -> None:
            if not done.done() and len(results) < len(outgoing):
                problem = f"{why} at {stage.upper()}: {reply or error}"
                done.set_exception(TestNotSent(relay=destination.key, problem=problem))

    if not outgoing:
        return results
    pool = Pool(destination, limits, OneSlot(), Ear(), SystemClock())
    pool.want(1)
    try:
        await asyncio.wait_for(done, 120)
    finally:
        await pool.close()
    return results
