"""`engine sink`: the SMTP server for tries and rehearsals, in the foreground."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Literal

import click

from engine.rehearse.models import load_world
from engine.rehearse.player import Player
from engine.rehearse.sink import Counts, Sink, SinkSettings


@click.command()
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", default=2525, show_default=True, help="Port to listen on; 0 takes a free one.")
@click.option("--record", type=click.Path(path_type=Path), help="File that lists each accepted message.")
@click.option("--folder", type=click.Path(path_type=Path), help="Folder that keeps each content as an .eml file.")
@click.option("--tls", type=click.Choice(["off", "starttls", "implicit"]), default="off", show_default=True)
@click.option("--certificate", type=click.Path(path_type=Path, exists=True), help="PEM; made when left out.")
@click.option("--key", type=click.Path(path_type=Path, exists=True), help="The certificate's key, PEM.")
@click.option("--user", "users", multiple=True, metavar="NAME:PASSWORD", help="Offer AUTH; may be repeated.")
@click.option("--max-connections", type=int, help="Greet further connections with 421.")
@click.option("--messages-per-connection", type=int, help="Then answer MAIL with 421 and close.")
@click.option("--delay", "delay_ms", type=float, default=0.0, metavar="MS", help="Send every reply so much later.")
@click.option("--no-pipelining", is_flag=True, help="Do not offer PIPELINING.")
@click.option("--no-chunking", is_flag=True, help="Do not offer CHUNKING.")
@click.option("--not-steered", is_flag=True, help="Accept addresses such as 550@ like any other.")
@click.option("--defer-share", type=float, default=0.0, help="Share of messages answered 451, 0 to 1.")
@click.option("--seed", type=int, default=0, help="What chance draws from.")
@click.option("--play", metavar="WORLD", help="Play the providers of a model file, each on a port of its own.")
@click.option(
    "--speed", type=click.FloatRange(min=0, min_open=True), default=1.0, help="With --play: time goes so much faster."
)
def sink(
    host: str,
    port: int,
    record: Path | None,
    folder: Path | None,
    tls: Literal["off", "starttls", "implicit"],
    certificate: Path | None,
    key: Path | None,
    users: tuple[str, ...],
    max_connections: int | None,
    messages_per_connection: int | None,
    delay_ms: float,
    no_pipelining: bool,
    no_chunking: bool,
    not_steered: bool,
    defer_share: float,
    seed: int,
    play: str | None,
    speed: float,
) -> None:
    """Take mail on this machine and deliver nothing: somewhere for a first campaign to go.

    Local parts steer it: 550@, 451-twice@, slow-3s@, drop-after-dot@ ... (see the guide sink.md). Ends with Ctrl-C.

    \b
    engine sink --port 2525 --record sink.tsv
    engine sink --play even --speed 60 --folder records
    """
    if (certificate is None) != (key is None):
        raise click.UsageError("--certificate and --key belong together")
    passwords = {}
    for user in users:
        name, colon, password = user.partition(":")
        if not colon:
            raise click.UsageError(f"--user {name}: expected NAME:PASSWORD")
        passwords[name] = password
    if play is not None and record is not None:
        raise click.UsageError("--play keeps a record of each provider: name their folder with --folder")
    settings = SinkSettings(
        pipelining=not no_pipelining,
        chunking=not no_chunking,
        tls=tls,
        certificate=certificate,
        key=key,
        users=passwords,
        max_connections=max_connections,
        messages_per_connection=messages_per_connection,
        delay_s=delay_ms / 1000,
        steered=not not_steered,
        defer_share=defer_share,
        seed=seed,
        record=record,
        folder=folder if play is None else None,
    )
    if play is not None:
        asyncio.run(_play(host, Player(load_world(play), settings=settings, speed=speed, seed=seed, records=folder)))
        return
    counts = asyncio.run(_run(settings, host, port))
    click.echo(
        f"{counts.messages} messages for {counts.recipients} recipients in {counts.connections} connections", err=True
    )


async def _run(settings: SinkSettings, host: str, port: int) -> Counts:
    sink = Sink(settings)
    bound_host, bound_port = await sink.start(host, port)
    click.echo(f"{bound_host}:{bound_port}")
    click.echo(f"sink: listening on {bound_host} port {bound_port}, nothing is delivered; Ctrl-C ends it", err=True)
    if sink.certificate is not None:
        click.echo(f"sink: its certificate is {sink.certificate}", err=True)
    await _until_signalled()
    await sink.stop()
    return sink.counts


async def _play(host: str, player: Player) -> None:
    for name, (bound_host, bound_port) in (await player.start(host)).items():
        click.echo(f"{name} {bound_host}:{bound_port}")
    click.echo("sink: playing, nothing is delivered; Ctrl-C ends it", err=True)
    await _until_signalled()
    await player.stop()
    for name, report in player.reports().items():
        said = [f"{report.accepted} accepted", f"at most {report.most_connections} connections of one source"]
        said += [
            f"{count} {kind.replace('_', ' ')}" for kind, count in sorted(report.answers.items()) if kind != "accepted"
        ]
        click.echo(f"{name}: {', '.join(said)}", err=True)


async def _until_signalled() -> None:
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, ended.set)
    await ended.wait()
