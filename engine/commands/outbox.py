"""`engine enqueue`, `engine serve-outbox` and `engine outbox`: single mails of applications."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import sys
from collections.abc import Iterable, Iterator
from datetime import datetime
from pathlib import Path

import click
import msgspec

from engine.campaign import Campaign, make_private_folder
from engine.clock import SystemClock
from engine.commands.common import RowNumbers, campaign_option, moment, span
from engine.commands.narrate import Narration
from engine.config import Settings
from engine.control.outbox import Mail, OutboxRefused, State
from engine.errors import EngineError, Exit
from engine.outbox import connect, open_outbox, parse_mail
from engine.rehearse.running import run_sink_in_process
from engine.rehearse.sink import SinkSettings
from engine.work.outbox_desk import Desk

_AT_ONCE = 1000  # mails a transaction takes from stdin


class BadMoment(EngineError):
    """{text!r} is no moment: {problem}."""

    exit_code = Exit.USAGE
    hint = "Write it with its offset from UTC, for example 2026-03-29T08:00:00+02:00."


class BadField(EngineError):
    """{text!r} is no field: NAME=VALUE is expected."""

    exit_code = Exit.USAGE


@click.command()
@campaign_option
@click.option("--to", "address", metavar="ADDRESS", help="Whom it is for. Without it, JSON lines are read from stdin.")
@click.option("--template", help="The template's name: templates/NAME.toml in the outbox folder.")
@click.option("--field", "fields", multiple=True, metavar="NAME=VALUE", help="A field of the template, as text.")
@click.option("--fields-json", metavar="JSON", help="The fields as one JSON object.")
@click.option("--subject", help="Instead of a template: the subject.")
@click.option("--text", help="Instead of a template: the text.")
@click.option("--html", help="Instead of a template: the HTML.")
@click.option("--attach", multiple=True, metavar="PATH", help="A file below attachments/ of the outbox folder.")
@click.option("--priority", type=click.IntRange(1, 3), default=3, show_default=True)
@click.option("--not-before", metavar="MOMENT", help="Not attempted before, ISO 8601 with an offset.")
@click.option("--expires-at", metavar="MOMENT", help="Not attempted after.")
@click.option("--key", help="Idempotency key: a second mail with the same key is not added.")
@click.option("--json", "as_json", is_flag=True, help="Print each row as a line of JSON.")
def enqueue(
    campaign: Campaign,
    address: str | None,
    template: str | None,
    fields: tuple[str, ...],
    fields_json: str | None,
    subject: str | None,
    text: str | None,
    html: str | None,
    attach: tuple[str, ...],
    priority: int,
    not_before: str | None,
    expires_at: str | None,
    key: str | None,
    as_json: bool,
) -> None:
    """Put one mail into the outbox, or many as JSON lines from stdin.

    \b
    engine enqueue --campaign outbox --to ann@example.com --template welcome --field name=Ann --priority 1
    engine enqueue --campaign outbox < mails.jsonl
    """
    if address is None:
        mails: Iterable[Mail] = _from_stdin()
    else:
        given = dict(_field(one) for one in fields)
        if fields_json:
            given |= _json_object(fields_json)
        mails = [
            Mail(
                address=address,
                priority=priority,
                template=template,
                fields=given,
                subject=subject,
                text=text,
                html=html,
                attachments=attach,
                not_before_us=_moment_us(not_before) or 0,
                expires_at_us=_moment_us(expires_at),
                idempotency_key=key,
            )
        ]
    added = known = 0
    with open_outbox(campaign.folder) as outbox:
        for some in _chunks(mails):
            for one in outbox.enqueue(some):
                added, known = added + one.is_new, known + (not one.is_new)
                if as_json:
                    click.echo(msgspec.json.encode(one).decode())
                elif address is not None:
                    click.echo(str(one.id))
    if address is None or known:
        click.echo(f"{added:,} added" + (f", {known:,} were there already" if known else ""), err=True)


def _from_stdin() -> Iterator[Mail]:
    for number, line in enumerate(sys.stdin.buffer, 1):
        if line.strip():
            try:
                yield parse_mail(line)
            except OutboxRefused as problem:
                raise OutboxRefused(problem=f"line {number}: {problem.fields['problem']}") from None


def _chunks(mails: Iterable[Mail]) -> Iterator[list[Mail]]:
    some: list[Mail] = []
    for mail in mails:
        some.append(mail)
        if len(some) == _AT_ONCE:
            yield some
            some = []
    if some:
        yield some


def _field(text: str) -> tuple[str, object]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise BadField(text=text)
    return name, value


def _json_object(text: str) -> dict[str, object]:
    try:
        return msgspec.json.decode(text, type=dict[str, object])
    except msgspec.MsgspecError as problem:
        raise OutboxRefused(problem=f"--fields-json: {problem}") from None


def _moment_us(text: str | None) -> int | None:
    if text is None:
        return None
    try:
        moment_at = datetime.fromisoformat(text)
    except ValueError as problem:
        raise BadMoment(text=text, problem=str(problem)) from None
    if moment_at.tzinfo is None:
        raise BadMoment(text=text, problem="it has no offset from UTC")
    return int(moment_at.timestamp() * 1e6)


@click.command("serve-outbox")
@campaign_option
@click.option("--name", help="Names this server in table and logs; the host's name by default.")
@click.option("--log-format", type=click.Choice(["text", "json"]), default="text", show_default=True)
@click.pass_context
def serve_outbox(context: click.Context, campaign: Campaign, name: str | None, log_format: str) -> None:
    """Send what applications put into the outbox, until stopped (SIGTERM). Start it again after any crash.

    \b
    engine serve-outbox --campaign outbox
    """
    settings = campaign.settings()
    make_private_folder(campaign.logs)
    with (
        Narration(as_json=log_format == "json", level=settings.log.level) as narration,
        _sink(campaign, settings, narration) as relay,
    ):
        desk = Desk(campaign, settings, name or socket.gethostname(), SystemClock(), narration.event, relay=relay)
        narration.event("serving", outbox=str(campaign.folder), store=settings.outbox.store.partition("@")[2] or "here")
        code = asyncio.run(_serve(desk, narration))
    click.echo(f"{desk.accepted:,} sent, {desk.bounced:,} bounced, {desk.in_doubt:,} in doubt", err=True)
    if desk.stopped is not None:
        click.echo(f"error: {desk.stopped.problem}", err=True)
        if desk.stopped.hint:
            click.echo(f"  next: {desk.stopped.hint}", err=True)
    context.exit(code)


@contextlib.contextmanager
def _sink(campaign: Campaign, settings: Settings, narration: Narration) -> Iterator[str | None]:
    """`relay = "sink://"`: a test server of our own for this run."""
    if not settings.delivery.relay.startswith("sink:"):
        yield None
        return
    record = campaign.folder / "sink.record"
    with run_sink_in_process(SinkSettings(record=record)) as running:
        narration.event("sink_listens", host=running.host, port=running.port, record=str(record))
        yield f"smtp://{running.host}:{running.port}"


async def _serve(desk: Desk, narration: Narration) -> Exit:
    loop = asyncio.get_running_loop()

    def reload() -> None:
        try:
            desk.reload()
        except EngineError as problem:
            narration.event("settings_refused", problem=str(problem))

    loop.add_signal_handler(signal.SIGTERM, desk.drain, "SIGTERM")
    loop.add_signal_handler(signal.SIGINT, desk.drain, "SIGINT")
    loop.add_signal_handler(signal.SIGHUP, reload)
    return await desk.run()


@click.group()
def outbox() -> None:
    """The outbox: what is in it, what became of it, and the operator's word on single mails.

    \b
    engine outbox status --campaign outbox
    """


@outbox.command()
@campaign_option
@click.option("--json", "as_json", is_flag=True)
def status(campaign: Campaign, as_json: bool) -> None:
    """Mails by priority and state, and who serves them.

    \b
    engine outbox status --campaign outbox
    """
    with open_outbox(campaign.folder) as box:
        tally, servers, knobs, now_us = box.tally(), box.servers(), box.knobs(), box.now_us()
    alive = [server for server in servers if server.state == "alive" and not server.is_expired(now_us)]
    if as_json:
        told = {
            "counts": tally,
            "servers": alive,
            "paused": knobs.get("paused", ""),
            "rows": sum(c.rows for c in tally),
        }
        click.echo(msgspec.json.encode(msgspec.to_builtins(told)).decode())
        return
    names = {1: "1 sign-up", 2: "2 notification", 3: "3 newsletter"}
    for count in tally:
        reason = f"/{count.reason}" if count.reason else ""
        age = ""
        if count.state in ("queued", "sending", "waiting"):
            age = f", the oldest since {span((now_us - count.oldest_at_us) / 1e6)}"
        click.echo(f"{names[count.priority]:16} {count.state + reason:24} {count.rows:>12,}{age}")
    click.echo(f"{'all':16} {'':24} {sum(count.rows for count in tally):>12,}")
    for server in alive:
        click.echo(f"served by {server.sender} (pid {server.pid}) since {moment(server.started_at_us)}")
    if not alive:
        click.echo("nobody serves it: engine serve-outbox")
    if knobs.get("paused"):
        click.echo(f"paused: {knobs['paused']}")
    if any(count.state == State.IN_DOUBT for count in tally):
        click.echo("in doubt: engine outbox show --state in_doubt, then engine outbox resend or accept")


@outbox.command()
@campaign_option
@click.option("--state", type=click.Choice([state.value for state in State]))
@click.option("--after", type=int, default=0, help="Begin behind this row.")
@click.option("--most", type=click.IntRange(1, 100_000), default=50, show_default=True)
@click.option("--json", "as_json", is_flag=True)
def show(campaign: Campaign, state: str | None, after: int, most: int, as_json: bool) -> None:
    """Single mails: what became of each and what the server said.

    \b
    engine outbox show --campaign outbox --state in_doubt
    """
    with open_outbox(campaign.folder) as box:
        rows = box.rows(state, after, most)
    for row in rows:
        if as_json:
            named = dict(zip(row.__struct_fields__, msgspec.structs.astuple(row), strict=True))
            click.echo(msgspec.json.encode(named).decode())
        else:
            why = f"/{row.reason}" if row.reason else ""
            said = f"  {row.code or ''} {row.reply}" if row.reply else ""
            click.echo(f"{row.id:>8} {row.priority} {row.state + why:20} {row.address}  {row.template or ''}{said}")


def _word(name: str, help_: str, word: str) -> click.Command:
    @outbox.command(name, help=f"{help_}\n\n\b\nengine outbox {name} --campaign outbox --rows 17")
    @campaign_option
    @click.option("--rows", type=RowNumbers(), required=True, help="Row numbers: 5, 0-9, 3,17.")
    def said(campaign: Campaign, rows: list[int]) -> None:
        with open_outbox(campaign.folder) as box:
            method = {"resend": box.resend, "accept": box.accept, "cancel": box.cancel}[word]
            click.echo(f"{method(rows):,} of {len(rows):,} mails")

    return said


_word("resend", "Attempt mails again that are in doubt, invalid, unsent or given up.", "resend")
_word("accept", "Mails in doubt were sent: record them as accepted.", "accept")
_word("cancel", "Queued mails will not be sent.", "cancel")


@outbox.command()
@campaign_option
@click.option("--reason", default="by the operator", show_default=True)
def pause(campaign: Campaign, reason: str) -> None:
    """Attempt nothing new until `engine outbox resume`; applications may go on to write.

    \b
    engine outbox pause --campaign outbox --reason "the relay moves"
    """
    _set(campaign, reason)


@outbox.command()
@campaign_option
def resume(campaign: Campaign) -> None:
    """Go on after `engine outbox pause`.

    \b
    engine outbox resume --campaign outbox
    """
    _set(campaign, "")


def _set(campaign: Campaign, reason: str) -> None:
    with open_outbox(campaign.folder) as box:
        box.set_knob("paused", reason)


@outbox.command()
@campaign_option
@click.option("--older-than", "days", type=click.IntRange(0), default=90, show_default=True, help="Days.")
def forget(campaign: Campaign, days: int) -> None:
    """Delete mails that had their outcome so long ago, with addresses and fields.

    \b
    engine outbox forget --campaign outbox --older-than 90
    """
    with open_outbox(campaign.folder) as box:
        click.echo(f"{box.forget(box.now_us() - days * 86_400_000_000):,} mails deleted")


_SETTINGS = """\
# An outbox: single mails that applications write into a table. `engine serve-outbox` sends them.

[campaign]
id = "outbox"              # names these mails in logs and tokens
list_id = "news"           # priority 3 obeys this list's unsubscribes; 1 and 2 only those who want nothing at all

[message]                  # what every template starts from; templates/NAME.toml stands over it
from_address = "hello@example.com"
from_name = "Example"
subject = "A message from Example"

[delivery]
mode = "relay"
relay = "sink://"          # a test server that delivers nothing; yours: "smtp://mail.example.com:587"
tls = "off"                # "required" for any host but this one
connections = 4

[retry]
plan = ["10s", "1m", "5m", "15m"]
max_age = "24h"

[outbox]
store = "sqlite:outbox.sqlite"     # or the application's database file, or postgresql://HOST/DATABASE
"""
_TEMPLATE = """\
subject = "Welcome, {{ name }}"
text = "templates/welcome.txt"
"""
_LETTER = """\
Hello {{ name }},

please confirm your address: {{ confirm_url }}
"""


class FolderExists(EngineError):
    """{folder} has a campaign.toml already."""

    exit_code = Exit.USAGE


@outbox.command("init")
@click.argument("folder", default="outbox", type=click.Path(path_type=Path))
def init_outbox(folder: Path) -> None:
    """Make an outbox folder that runs as it is: settings, a key, a template and the empty table.

    \b
    engine outbox init outbox
    """
    from engine.compose.keys import write_new_keys

    if (folder / "campaign.toml").exists():
        raise FolderExists(folder=folder)
    for path in (folder, folder / "templates", folder / "attachments"):
        make_private_folder(path)
    (folder / "campaign.toml").write_text(_SETTINGS, "utf-8")
    (folder / "templates" / "welcome.toml").write_text(_TEMPLATE, "utf-8")
    (folder / "templates" / "welcome.txt").write_text(_LETTER, "utf-8")
    write_new_keys(folder / "keys" / "secret.keys")
    connect(folder).close()  # opening makes the tables
    click.echo(f"{folder}: an outbox. Next: engine serve-outbox --campaign {folder}", err=True)
