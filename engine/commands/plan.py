"""`engine plan`: decide everything that can be decided before the first connection."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import click
import msgspec

from engine.campaign import (
    Campaign,
    fingerprint,
    frozen_fingerprint,
    make_private_folder,
    sync_folder,
    write_whole,
)
from engine.clock import SystemClock
from engine.commands import forecast as forecasting
from engine.commands.capacity import parse_deadline
from engine.commands.common import campaign_option
from engine.commands.forecast import forecast
from engine.compose.keys import load_keys, write_token_table
from engine.compose.render import build_composer
from engine.config import Settings
from engine.control.bundle import gather
from engine.control.opening import control_url, keep_url, open_shared
from engine.control.sqlite import SqliteStore
from engine.control.store import Life
from engine.counts import of_metas
from engine.errors import EngineError, Exit
from engine.planner import (
    ListShape,
    Mixing,
    ZoneSample,
    cut_batches,
    cut_partitions,
    expand,
    read_shape,
    sample_mixing,
    sample_zones,
)
from engine.warmup import schedule_named
from engine.work.timing import schedule_of
from formats import listmeta
from formats import plan as plan_format
from formats.listmeta import ListMeta
from formats.plan import Plan
from formats.verp import TokenOrigin


class LogsExist(EngineError):
    """The campaign in {folder} has a plan and {logs} send logs: rows of it may have been sent."""

    exit_code = Exit.PLAN
    hint = "Go on with `engine send`. `engine plan --replace` puts plan, store and logs aside and starts from nothing."


class SenderRuns(EngineError):
    """{sender} is sending from the store {where}."""

    exit_code = Exit.TRY_AGAIN
    hint = "Stop it first: `engine machines` shows who sends."


@click.command()
@click.argument("sources", nargs=-1, required=True, metavar="LIST...")
@campaign_option
@click.option("--partitions", type=click.IntRange(1, 10_000), default=1, show_default=True, help="One per machine.")
@click.option("--replace", is_flag=True, help="Put an existing plan, store and logs aside first.")
@click.option("--control", metavar="URL", help="Where machines meet: postgresql://user@host/database.")
@click.option("--deadline", default="24h", show_default=True, help="Say whether it can be kept, and what would do it.")
@click.option("--warmup", "schedule_name", metavar="SCHEDULE", help="Keep the caps of this warm-up, day by day.")
@click.option("--json", "as_json", is_flag=True, help="The figures as one JSON object on stdout.")
def plan(
    sources: tuple[str, ...],
    campaign: Campaign,
    partitions: int,
    replace: bool,
    control: str | None,
    deadline: str,
    schedule_name: str | None,
    as_json: bool,
) -> None:
    """Number the rows of LIST (files, folders, patterns, URIs), cut them into batches and partitions, and freeze them
    with templates and settings. Then say what the providers will accept by when.

    \b
    engine plan list.parquet --deadline 6h
    engine plan 'lists/*.parquet' --partitions 5
    engine plan s3://bucket/list/ --partitions 5 --control postgresql://rowpost@db.example.com/rowpost
    engine plan list.parquet --warmup sparkpost
    """
    started = time.perf_counter()
    deadline_s = parse_deadline(deadline)
    schedule = schedule_named(schedule_name) if schedule_name is not None else None
    settings = campaign.settings()
    logs = campaign.log_files()
    if (logs or campaign.plan_file.exists()) and not replace and logs:
        raise LogsExist(folder=campaign.folder, logs=len(logs))
    paths = expand(sources, campaign.folder)
    shape = read_shape(paths, settings.list.address_column, settings.list.id_column)
    url = control_url(campaign, settings, control)
    made = make_plan(campaign, settings, shape, partitions, SystemClock().wall_us(), shared=url is not None)
    metas = _metas(shape)
    engaged = {meta.engaged_first for meta in metas}
    made, ahead = forecast(
        campaign,
        settings,
        made,
        of_metas(metas),
        engaged_first=engaged.pop() if len(engaged) == 1 else None,
        deadline_s=deadline_s,
        schedule=schedule,
    )
    mixing = sample_mixing(shape) if shape.rows else None
    zone_column = settings.list.zone_column
    zones = sample_zones(shape, zone_column) if zone_column is not None and shape.rows else None
    schedule_of(settings)  # a moment, zone or hours that are none are found now, not at night
    if replace:
        _put_aside(campaign)
    _store(campaign, settings, made, url, replace=replace)
    if as_json:
        click.echo(msgspec.json.encode({**_figures(made, mixing), "zones": zones, "forecast": ahead}).decode())
    else:
        _tell(campaign, made, mixing, time.perf_counter() - started)
        if zones is not None:
            _tell_zones(settings, zones)
        forecasting.tell(ahead, campaign)
        _tell_next(campaign, made)


def make_plan(
    campaign: Campaign, settings: Settings, shape: ListShape, partitions: int, now_us: int, *, shared: bool = False
) -> Plan:
    """The plan of this list under these settings; raises the errors of composing (template, key, column)."""
    composer = build_composer(settings, campaign.folder, shape.schema)
    batches = cut_batches([rows for file in shape.files for rows in file.row_groups], settings.list.batch_rows)
    told = of_metas(_metas(shape))
    wanted = {shape.address_column, shape.id_column, settings.list.zone_column, *composer.columns}
    return Plan(
        campaign_id=settings.campaign.id,
        planned_at_us=now_us,
        rows=shape.rows,
        files=shape.files,
        batches=batches,
        partitions=cut_partitions(batches, partitions),
        address_column=shape.address_column,
        id_column=shape.id_column,
        columns=[name for name in shape.schema.names if name in wanted],
        list_id=settings.campaign.list_id,
        list_fingerprint=fingerprint(*(file.fingerprint.encode() for file in shape.files)),
        settings_fingerprint=frozen_fingerprint(settings),
        templates_fingerprint=composer.fingerprint,
        key_id=load_keys(campaign.folder / settings.keys.file).current_id,
        store="postgresql" if shared else "sqlite",
        provider_rows=told.provider_rows,
        domain_rows=told.domain_rows,
    )


def _metas(shape: ListShape) -> list[ListMeta]:
    """What `engine prepare` noted in every file; nothing where one of them is not prepared, or by a newer version."""
    metas = [listmeta.of_metadata(metadata) for metadata in shape.metadata]
    return [meta for meta in metas if meta is not None] if all(metas) else []


def _put_aside(campaign: Campaign) -> None:
    aside = campaign.folder / "replaced" / time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    make_private_folder(aside)
    for path in (campaign.plan_file, campaign.logs, campaign.report, campaign.run):
        if path.exists():
            shutil.move(str(path), aside / path.name)
    for path in campaign.folder.glob("control.sqlite*"):
        shutil.move(str(path), aside / path.name)


def _store(campaign: Campaign, settings: Settings, made: Plan, url: str | None, *, replace: bool) -> None:
    """Write plan and store; where we die in between, `plan` can simply be run again: no log exists yet."""
    make_private_folder(campaign.folder)
    make_private_folder(campaign.logs)
    raw = plan_format.encode(made)
    write_token_table(
        campaign.folder, TokenOrigin(campaign_id=made.campaign_id, list_id=made.list_id or "", key_id=made.key_id)
    )
    if url is None:
        _load_folder(campaign, made, raw)
    else:
        _load_shared(campaign, settings, made, raw, url, replace=replace)
    write_whole(campaign.plan_file, raw)
    sync_folder(campaign.folder)
    os.chmod(campaign.folder, 0o700)


def _load_folder(campaign: Campaign, made: Plan, raw: bytes) -> None:
    store = SqliteStore(campaign.store_file)
    try:
        store.load_plan(made, fingerprint(raw), made.planned_at_us, replace=True)
    finally:
        store.close()


def _load_shared(campaign: Campaign, settings: Settings, made: Plan, raw: bytes, url: str, *, replace: bool) -> None:
    """A shared store may have been sent from by machines that we do not see: it is replaced by order only."""
    store = open_shared(url, made.campaign_id, create=True)
    try:
        now_us = store.now_us()
        for sender in store.incarnations():
            if sender.state is Life.ALIVE and now_us - sender.renewed_at_us < sender.lease_us:
                raise SenderRuns(sender=sender.sender, where=store.url)
        files = gather(campaign, settings, raw)
        store.load_bundle(made, fingerprint(raw), made.planned_at_us, files, replace=replace)
        keep_url(campaign, store.url)
        if not store.is_failover_safe():
            click.echo(
                "warning: the store has standbys that its commits do not wait for (synchronous_standby_names is empty):"
                " a failover may forget what was sent. After one, stop every sender before you go on.",
                err=True,
            )
    finally:
        store.close()


def _figures(made: Plan, mixing: Mixing | None) -> dict[str, object]:
    return {
        "campaign": made.campaign_id,
        "rows": made.rows,
        "files": len(made.files),
        "row_groups": sum(len(file.row_groups) for file in made.files),
        "batches": len(made.batches),
        "partitions": [
            sum(made.batches[b].rows for b in range(p.first_batch, p.first_batch + p.batches)) for p in made.partitions
        ],
        "mixing": msgspec.to_builtins(mixing) if mixing else None,
    }


def _tell(campaign: Campaign, made: Plan, mixing: Mixing | None, seconds: float) -> None:
    figures = _figures(made, mixing)
    click.echo(
        f"campaign {made.campaign_id}: {made.rows:,} rows in {len(made.files)} file(s) and {figures['row_groups']:,}"
        f" row groups, cut into {len(made.batches):,} batches and {len(made.partitions)} partition(s) ({seconds:.1f} s)"
    )
    if mixing is not None and mixing.shares:
        top = ", ".join(f"{domain} {share:.1f} %" for domain, share in mixing.shares[:5])
        click.echo(f"  largest domains in a sample of {mixing.sampled_rows:,} rows: {top}")
        if mixing.empty_rows:
            click.echo(f"  {mixing.empty_rows:,} of them have no address; they will be `invalid`", err=True)
    if mixing is not None and mixing.is_bad:
        click.echo(
            f"warning: the list is badly mixed: {mixing.worst_domain} is {mixing.worst_points:.0f} points off its share"
            " in a row group, so its provider will be asked for all of them at once.\n"
            "  next: mix it with `engine prepare LIST -o mixed.parquet`, then plan that.",
            err=True,
        )


def _tell_zones(settings: Settings, zones: ZoneSample) -> None:
    column, own = settings.list.zone_column, settings.schedule.zone
    hours = settings.schedule.hours or ("whole days" if settings.schedule.days else "[schedule] has none yet")
    top = ", ".join(f"{name} {100 * rows / zones.rows:.1f} %" for name, rows in zones.zones[:5])
    click.echo(f"  sending hours by column {column} ({hours}), {len(zones.zones)} zones in the sample: {top or 'none'}")
    if zones.missing:
        click.echo(f"  {zones.missing:,} rows of the sample have no zone; they follow {own}", err=True)
    if zones.unknown:
        few = ", ".join(repr(text[:40]) for text, _ in zones.unknown[:5])
        rows = sum(rows for _, rows in zones.unknown)
        click.echo(f"  {rows:,} rows of the sample have what is no IANA zone ({few}); they follow {own}", err=True)


def _tell_next(campaign: Campaign, made: Plan) -> None:
    sends = [f"engine send --partition {p}" for p in range(len(made.partitions))]
    where = " --control URL" if made.store != "sqlite" else ""
    where += "" if campaign.folder == Path("campaign") else f" --campaign {campaign.folder}"
    click.echo(f"  next: {sends[0]}{where}" + (f" ... {sends[-1]}{where}" if len(sends) > 1 else ""))
