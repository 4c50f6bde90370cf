"""Which store a campaign has, and the open store: SQLite in its folder, or the PostgreSQL that machines share.

The URL of a shared store comes from `--control`, else from ROWPOST_CONTROL, else from `control.url` in the campaign
folder (written by `engine plan --control`, without a password), else from `[control] store` of campaign.toml.
"""

from __future__ import annotations

import os
from urllib.parse import urlsplit

from engine.campaign import Campaign, NoPlan, write_whole
from engine.config import Settings
from engine.control.sqlite import SqliteStore
from engine.control.store import SharedStore, SharedSuppressions, Store
from engine.errors import EngineError, Exit

URL_FILE = "control.url"


class NotAStore(EngineError):
    """{url} is no control store."""

    exit_code = Exit.USAGE
    hint = "A store that machines share is postgresql://user@host/database; without it SQLite in the folder is used."


class NoDriver(EngineError):
    """The driver for PostgreSQL is not installed: {problem}."""

    exit_code = Exit.USAGE
    hint = "pip install 'rowpost[cluster]'"


class StoreMissing(EngineError):
    """The plan of {folder} uses a store that machines share, and nothing says where it is."""

    exit_code = Exit.SETTINGS
    hint = "Say --control postgresql://..., or set ROWPOST_CONTROL, or [control] store in campaign.toml."


class StoreGone(EngineError):
    """{file} is gone, and {logs} send logs are here: rows of the campaign were sent."""

    exit_code = Exit.PLAN
    hint = "Put it back from a copy, or `engine restore-store` makes it anew from plan and logs."


class OtherPlan(EngineError):
    """The plan in {folder} is not the one that the store {where} holds."""

    exit_code = Exit.PLAN
    hint = "Use the folder the campaign was planned in, or an empty one: it is filled from the store."


def control_url(campaign: Campaign, settings: Settings | None, given: str | None = None) -> str | None:
    """The URL of the shared store, or None for SQLite. Raises NotAStore."""
    file = campaign.folder / URL_FILE
    kept = file.read_text("utf-8").strip() if file.exists() else None
    url = given or os.environ.get("ROWPOST_CONTROL") or kept or (settings.control.store if settings else "sqlite")
    if url in ("sqlite", ""):
        return None
    if urlsplit(url).scheme not in ("postgresql", "postgres"):
        raise NotAStore(url=url.partition(":")[0] + ":...")
    return url


def keep_url(campaign: Campaign, shown: str) -> None:
    """Remember where the store is. `shown` has no password."""
    write_whole(campaign.folder / URL_FILE, shown.encode() + b"\n")


def open_shared(url: str, campaign_id: str | None, *, create: bool = False) -> SharedStore:
    """The store that machines share. Raises StoreAway, StoreRefuses, StoreSchema, NoDriver."""
    try:
        from engine.control.postgres import PostgresStore
    except ImportError as problem:
        raise NoDriver(problem=problem) from None
    return PostgresStore(url, campaign_id, create=create)


def open_suppressions(url: str) -> SharedSuppressions:
    """The suppressions that the campaigns of a database share. Connects when it is first asked. Raises NoDriver."""
    try:
        from engine.control.postgres_link import ControlUrl
        from engine.control.suppressions_postgres import SuppressionTable
    except ImportError as problem:
        raise NoDriver(problem=problem) from None
    found = ControlUrl(url)
    return SuppressionTable(found.dsn, found.shown)


def open_store(campaign: Campaign, given: str | None = None) -> Store:
    """The planned campaign's store: shared where its plan says so. Raises NoPlan, StoreMissing, the stores' errors."""
    if not campaign.plan_file.exists():
        raise NoPlan(folder=campaign.folder)
    plan, fingerprint = campaign.plan_and_fingerprint()
    if plan.store == "sqlite":
        if not campaign.store_file.exists():
            if logs := campaign.log_files():
                raise StoreGone(file=campaign.store_file, logs=len(logs))
            raise NoPlan(folder=campaign.folder)
        return SqliteStore(campaign.store_file)
    store = shared_of(campaign, given)
    found = store.campaign()
    if found is None or found.plan_fingerprint != fingerprint:
        store.close()
        raise OtherPlan(folder=campaign.folder, where=store.url)
    return store


def shared_of(campaign: Campaign, given: str | None = None) -> SharedStore:
    """The shared store of a planned campaign, opened anew."""
    url = control_url(campaign, campaign.settings(), given)
    if url is None:
        raise StoreMissing(folder=campaign.folder)
    return open_shared(url, campaign.plan().campaign_id)
