"""`engine send`: send one partition; run it again after any crash and it goes on."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import secrets
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import msgspec

from engine.campaign import Campaign, make_private_folder
from engine.clock import SystemClock
from engine.commands.common import RowNumbers, campaign_option, span
from engine.commands.narrate import Narration, summary_line
from engine.config import Duration, Settings, SettingsError
from engine.control.sqlite import SqliteStore
from engine.control.store import Incarnation
from engine.errors import EngineError, Exit
from engine.host import boot_id, host_id
from engine.rehearse.running import run_sink_in_process
from engine.rehearse.sink import SinkSettings
from engine.smtp.destination import relay_destination
from engine.work.frozen import check_frozen, read_live
from engine.work.supervisor import RunOptions, Supervisor
from engine.work.takeover import PartitionLock, take_over
from formats.plan import Plan


class WhichPartition(EngineError):
    """The plan has {partitions} partitions."""

    exit_code = Exit.USAGE
    hint = "Say which one this machine sends: engine send --partition 0 (to {last})."


class NoSuchPartition(EngineError):
    """There is no partition {partition}: the plan has {partitions}, numbered from 0."""

    exit_code = Exit.USAGE


class MetricsNeedExtra(EngineError):
    """`--metrics` needs the package prometheus-client."""

    exit_code = Exit.SETTINGS
    hint = "pip install 'rowpost[web]'"


class SpanType(click.ParamType[float]):
    """A duration such as 90s, 5m, 1h; 0 for none."""

    name = "duration"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        try:
            return Duration.parse(float(str(value)) if str(value).isdigit() else value).seconds
        except ValueError as problem:
            self.fail(str(problem), param, ctx)


@click.command()
@campaign_option
@click.option("--partition", type=click.IntRange(0), help="Which one; may be left out where there is one.")
@click.option("--processes", type=click.IntRange(1, 512), help="Worker processes; one per core by default.")
@click.option("--name", help="Names this sender in store and logs; the host's name by default.")
@click.option("--limit", type=click.IntRange(1), help="Attempt at most so many rows in this run.")
@click.option("--max-wait", type=SpanType(), help="Leave rows that would wait longer than this for their next attempt.")
@click.option(
    "--in-doubt",
    type=click.Choice(["hold", "resend"]),
    default="hold",
    show_default=True,
    help="What to do with rows that may have been sent.",
)
@click.option("--adopt", is_flag=True, help="Go on with a folder that was begun on another machine.")
@click.option("--dry-run", is_flag=True, help="Render every message, send nothing.")
@click.option("--test-to", metavar="ADDRESS", help="Send the content of --rows to this address; nothing is recorded.")
@click.option("--rows", type=RowNumbers(), default="0", show_default=True, help="Which rows, for --test-to.")
@click.option("--yes", is_flag=True, help="Do not ask before the first send through a relay elsewhere.")
@click.option("--metrics", metavar="HOST:PORT", help="Serve this run's metrics for Prometheus there.")
@click.option("--log-format", type=click.Choice(["text", "json"]), default="text", show_default=True)
@click.pass_context
def send(
    context: click.Context,
    campaign: Campaign,
    partition: int | None,
    processes: int | None,
    name: str | None,
    limit: int | None,
    max_wait: float | None,
    in_doubt: str,
    adopt: bool,
    dry_run: bool,
    test_to: str | None,
    rows: list[int],
    yes: bool,
    metrics: str | None,
    log_format: str,
) -> None:
    """Send a partition: plan first, then this, then merge-logs. Run again after any crash, it goes on.

    \b
    engine send --partition 0
    engine send --max-wait 0          leave what would have to wait
    engine send --test-to me@example.com --rows 0-4
    """
    settings = campaign.settings()
    made, _ = campaign.plan_and_fingerprint()
    check_frozen(campaign, settings, made)
    if dry_run or test_to:
        from engine.commands import trial

        context.exit(
            trial.dry_run(campaign, settings, made)
            if dry_run
            else trial.test_to(campaign, settings, made, test_to or "", rows)
        )
    chosen = _partition(made, partition)
    options = RunOptions(
        partition=chosen,
        processes=processes or _processes(made, chosen),
        sender=name or socket.gethostname(),
        limit=limit,
        max_wait_s=max_wait,
        resend_doubt=in_doubt == "resend",
    )
    _ask_first(campaign, settings, yes)
    with _metrics(metrics, settings, options.sender) as show:
        context.exit(_run(campaign, settings, made, options, adopt=adopt, as_json=log_format == "json", show=show))


def _partition(made: Plan, partition: int | None) -> int:
    count = len(made.partitions)
    if partition is None:
        if count > 1:
            raise WhichPartition(partitions=count, last=count - 1)
        return 0
    if partition >= count:
        raise NoSuchPartition(partition=partition, partitions=count)
    return partition


def _processes(made: Plan, partition: int) -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores, made.partitions[partition].batches))


def _ask_first(campaign: Campaign, settings: Settings, yes: bool) -> None:
    """The first send through a relay that is not on this machine asks."""
    asked = campaign.run / "asked"
    if settings.delivery.relay.startswith("sink:") or yes or asked.exists():
        return
    destination = relay_destination(settings.delivery, os.environ, folder=campaign.folder)
    if all(host.is_this_machine for host in destination.hosts):
        return
    click.confirm(
        f"This sends real mail through {destination.key}, from {settings.message.from_address}. Go on?",
        abort=True,
        err=True,
    )
    make_private_folder(campaign.run)
    asked.touch(mode=0o600)


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


@contextlib.contextmanager
def _metrics(listen: str | None, settings: Settings, sender: str) -> Iterator[list[Supervisor]]:
    """`--metrics`: whoever is put into the list is shown."""
    show: list[Supervisor] = []
    if listen is None:
        yield show
        return
    try:
        from engine.web.metrics_server import serve_metrics
    except ImportError:
        raise MetricsNeedExtra from None
    lease_s = settings.control.lease.seconds
    with serve_metrics(listen, settings.campaign.id, sender, lease_s, lambda: show[0].told if show else {}):
        yield show


def _run(
    campaign: Campaign,
    settings: Settings,
    made: Plan,
    options: RunOptions,
    *,
    adopt: bool,
    as_json: bool,
    show: list[Supervisor],
) -> Exit:
    clock = SystemClock()
    lock = PartitionLock(campaign, options.partition, f"{options.sender} (pid {os.getpid()})")
    store = SqliteStore(campaign.store_file)
    now = clock.wall_us()
    me = Incarnation(
        id=secrets.token_hex(8),
        sender=options.sender,
        host_id=host_id(),
        boot_id=boot_id(),
        pid=os.getpid(),
        partition=options.partition,
        started_at_us=now,
        renewed_at_us=now,
        lease_us=int(settings.control.lease.seconds * 1e6),
    )
    try:
        with Narration(as_json=as_json, level=settings.log.level) as narration:
            store.register(me)
            take_over(
                campaign,
                settings,
                made,
                store,
                me,
                adopt=adopt,
                say=lambda text: narration.event("takeover", text=text),
                clock=clock,
            )
            with _sink(campaign, settings, narration) as relay:
                options = msgspec.structs.replace(options, relay=relay)
                supervisor = Supervisor(
                    campaign, settings, store, me, options, narration, clock, random.Random(secrets.randbits(64))
                )
                show.append(supervisor)
                code = asyncio.run(_supervise(supervisor, campaign, made, narration))
        store.leave(me.id, clock.wall_us(), supervisor.progress.counters(clock.monotonic()))
        _tell_end(campaign, supervisor, options, code, clock.monotonic())
        return code
    finally:
        store.close()
        lock.release()


async def _supervise(supervisor: Supervisor, campaign: Campaign, made: Plan, narration: Narration) -> Exit:
    loop = asyncio.get_running_loop()

    def reload() -> None:
        try:
            supervisor.reload(read_live(campaign, made))
        except (SettingsError, EngineError) as problem:
            narration.event("settings_refused", problem=str(problem))

    loop.add_signal_handler(signal.SIGTERM, supervisor.drain, "SIGTERM")
    loop.add_signal_handler(signal.SIGINT, supervisor.drain, "SIGINT")
    loop.add_signal_handler(signal.SIGHUP, reload)
    watching = loop.create_task(_watch_settings(campaign.folder / "campaign.toml", reload))
    try:
        return await supervisor.run()
    finally:
        watching.cancel()


async def _watch_settings(file: Path, reload: Callable[[], None]) -> None:
    """Read the live settings again when their file changes; looked at every two seconds."""
    seen = file.stat().st_mtime_ns
    while True:
        await asyncio.sleep(2)
        with contextlib.suppress(OSError):
            now = file.stat().st_mtime_ns
            if now != seen:
                seen = now
                reload()


def _tell_end(campaign: Campaign, supervisor: Supervisor, options: RunOptions, code: Exit, now: float) -> None:
    progress = supervisor.progress
    click.echo(summary_line(progress, now), err=True)
    click.echo(f"mean rate {progress.mean_rate(now):,.0f} messages/s", err=True)
    where = "" if campaign.folder == Path("campaign") else f" --campaign {campaign.folder}"
    if supervisor.stopped is not None:
        click.echo(f"error: {supervisor.stopped.problem}", err=True)
        if supervisor.stopped.hint:
            click.echo(f"  next: {supervisor.stopped.hint}", err=True)
    if code is Exit.DONE:
        click.echo(f"  next: engine merge-logs{where}", err=True)
        return
    if progress.waiting:
        due = progress.next_due_us
        wait = f", the next in {span(max(0.0, (due - SystemClock().wall_us()) / 1e6))}" if due is not None else ""
        click.echo(f"{progress.waiting:,} rows wait for their next attempt{wait}.", err=True)
    click.echo(f"  to go on: engine send --partition {options.partition}{where}", err=True)
