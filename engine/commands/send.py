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
from typing import cast

import click
import msgspec

from engine.campaign import Campaign, make_private_folder
from engine.clock import SystemClock
from engine.commands.common import RowNumbers, campaign_option, span
from engine.commands.narrate import Narration, summary_line
from engine.config import Duration, Settings, SettingsError
from engine.control.bundle import unpack
from engine.control.log_store import LogStoreAway, upload
from engine.control.opening import control_url, keep_url, open_shared, open_store, shared_of
from engine.control.sqlite import SqliteStore
from engine.control.store import Incarnation, SharedStore
from engine.errors import EngineError, Exit
from engine.host import boot_id, host_id
from engine.pace.budgets import BUDGETS_FILE
from engine.smtp.destination import relay_destination
from engine.work.frozen import check_frozen, check_sources, read_live
from engine.work.inheritance import go_on_here
from engine.work.shared import Shared
from engine.work.sharing import Sharing
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
@click.option("--control", metavar="URL", help="Where machines meet, as given to `engine plan`.")
@click.option(
    "--steal/--no-steal",
    default=True,
    show_default=True,
    help="With a shared store: take batches of other partitions when the own one has none left.",
)
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
    control: str | None,
    steal: bool,
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
    engine send --partition 3 --control postgresql://rowpost@db.example.com/rowpost
    engine send --test-to me@example.com --rows 0-4
    """
    if not campaign.plan_file.exists() and (url := control_url(campaign, None, control)) is not None:
        _fetch(campaign, url)
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
    check_sources(campaign, settings)
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
    as_json = log_format == "json"
    with _metrics(metrics, settings, options.sender) as show:
        code = _run(
            campaign, settings, made, options, adopt=adopt, as_json=as_json, control=control, steal=steal, show=show
        )
    context.exit(code)


def _fetch(campaign: Campaign, url: str) -> None:
    """A fresh machine: the campaign folder is filled from the store."""
    store = open_shared(url, None)
    try:
        unpack(store, campaign)
        keep_url(campaign, store.url)
        click.echo(f"the campaign was fetched from {store.url} into {campaign.folder}", err=True)
    finally:
        store.close()


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
    """The first send that leaves this machine asks."""
    asked = campaign.run / "asked"
    if yes or asked.exists() or _has_own_sink(settings):
        return
    where = "straight to the recipients' mail hosts"
    if settings.delivery.mode == "relay":
        destination = relay_destination(settings.delivery, os.environ, folder=campaign.folder)
        if all(host.is_this_machine for host in destination.hosts):
            return
        where = f"through {destination.key}"
    click.confirm(f"This sends real mail {where}, from {settings.message.from_address}. Go on?", abort=True, err=True)
    make_private_folder(campaign.run)
    asked.touch(mode=0o600)


def _has_own_sink(settings: Settings) -> bool:
    """`relay = "sink://"`, unless nothing goes through a relay."""
    return settings.delivery.mode == "relay" and settings.delivery.relay.startswith("sink:")


@contextlib.contextmanager
def _sink(campaign: Campaign, settings: Settings, narration: Narration) -> Iterator[str | None]:
    """`relay = "sink://"`: a test server of our own for this run."""
    if not _has_own_sink(settings):
        yield None
        return
    # Here: a tenth of the time until the first attempt went into importing a server that nearly nobody asks for.
    from engine.rehearse.running import run_sink_in_process
    from engine.rehearse.sink import SinkSettings

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
    control: str | None,
    steal: bool,
    show: list[Supervisor],
) -> Exit:
    clock = SystemClock()
    lock = PartitionLock(campaign, options.partition, f"{options.sender} (pid {os.getpid()})")
    store = open_store(campaign, control)
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
            say = lambda text: narration.event("takeover", text=text)  # noqa: E731
            shared = None
            if made.store == "sqlite":
                dead = take_over(campaign, settings, made, store, me, adopt=adopt, say=say, clock=clock)
            else:
                first, second = cast(SharedStore, store), shared_of(campaign, control)
                dead = go_on_here(campaign, settings, made, first, me, adopt=adopt, say=say, clock=clock)
                resend = options.resend_doubt
                shared = Shared(
                    campaign, settings, made, first, second, me, narration, clock, steal=steal, resend_doubt=resend
                )
            with _sink(campaign, settings, narration) as relay:
                options = msgspec.structs.replace(options, relay=relay)
                rng = random.Random(secrets.randbits(64))
                sharing = _sharing(campaign, settings, made, me, control, dead) if _is_shared(made) else None
                supervisor = Supervisor(campaign, settings, store, me, options, narration, clock, rng, shared, sharing)
                show.append(supervisor)
                code = asyncio.run(_supervise(supervisor, campaign, made, narration))
        store.leave(me.id, clock.wall_us(), supervisor.progress.counters(clock.monotonic()))
        if settings.log.log_store is not None:
            _upload(campaign, made, settings.log.log_store, me.id)
        _tell_end(campaign, supervisor, options, code, clock.monotonic())
        return code
    finally:
        store.close()
        lock.release()


def _is_shared(made: Plan) -> bool:
    """Whether other senders may be at the campaign at the same time."""
    return made.store != "sqlite" or len(made.partitions) > 1


def _sharing(
    campaign: Campaign, settings: Settings, made: Plan, me: Incarnation, control: str | None, dead: frozenset[str]
) -> Sharing:
    """Our part of the limits that all senders of the campaign share, over a connection of its own."""
    return Sharing(
        lambda: SqliteStore(campaign.store_file) if made.store == "sqlite" else shared_of(campaign, control),
        me.id,
        settings.control.lease.seconds,
        SystemClock(),
        quiet_s=settings.delivery.dot_timeout.seconds,
        all_keys=settings.delivery.mode == "relay",
        dead=dead,
    )


def _upload(campaign: Campaign, made: Plan, where: str, incarnation: str) -> None:
    """Copies of this run's logs; where that fails the logs here are enough, and the next run tries again."""
    mine = [path for path in campaign.log_files() if path.name.startswith(incarnation)]
    try:
        copied = upload(made.campaign_id, where, mine)
        click.echo(f"{copied} logs copied to {where}", err=True)
    except LogStoreAway as problem:
        click.echo(f"warning: {problem}", err=True)


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
    files = [campaign.folder / "campaign.toml", campaign.folder / BUDGETS_FILE]
    watching = loop.create_task(_watch_settings(files, reload))
    try:
        return await supervisor.run()
    finally:
        watching.cancel()


async def _watch_settings(files: list[Path], reload: Callable[[], None]) -> None:
    """Read the live settings again when a file of them changes; looked at every two seconds."""
    seen = [_changed_at(file) for file in files]
    while True:
        await asyncio.sleep(2)
        now = [_changed_at(file) for file in files]
        if now != seen:
            seen = now
            reload()


def _changed_at(file: Path) -> int | None:
    try:
        return file.stat().st_mtime_ns
    except OSError:
        return None


def _tell_end(campaign: Campaign, supervisor: Supervisor, options: RunOptions, code: Exit, now: float) -> None:
    progress = supervisor.progress
    click.echo(summary_line(progress, now), err=True)
    click.echo(f"mean rate {progress.mean_rate(now):,.0f} messages/s", err=True)
    where = "" if campaign.folder == Path("campaign") else f" --campaign {campaign.folder}"
    if supervisor.stopped is not None:
        click.echo(f"error: {supervisor.stopped.problem}", err=True)
        if supervisor.stopped.hint:
            click.echo(f"  next: {supervisor.stopped.hint}", err=True)
    if supervisor.ended is not None and progress.left:
        click.echo(f"{progress.left:,} rows stay unsent: {supervisor.ended}.", err=True)
    if progress.zone_missing or progress.zone_unknown:
        click.echo(
            f"{progress.zone_missing:,} rows had no zone and {progress.zone_unknown:,} what is no IANA zone;"
            " they followed the campaign's own",
            err=True,
        )
    if code is Exit.DONE:
        click.echo(f"  next: engine merge-logs{where}", err=True)
        return
    if progress.asleep and progress.opens_at is not None:
        words = f"{progress.asleep:,} rows wait for the sending hours of their zones"
        click.echo(f"{words}, the first until {progress.opens_at[1]}.", err=True)
    if progress.waiting > progress.asleep:
        due = progress.next_due_us
        wait = f", the next in {span(max(0.0, (due - SystemClock().wall_us()) / 1e6))}" if due is not None else ""
        click.echo(f"{progress.waiting - progress.asleep:,} rows wait for their next attempt{wait}.", err=True)
    click.echo(f"  to go on: engine send --partition {options.partition}{where}", err=True)
