"""The campaigns that one web process shows: a campaign folder, or a folder of campaign folders.

Each is `Watched`: its counters are read at most once a second, however many people look, and told to all of them. The
senders are not asked anything: see `engine.web.reading`.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from pathlib import Path

from engine.campaign import Campaign
from engine.capacity import OurRate, capacity
from engine.clock import Clock, SystemClock
from engine.config import SETTINGS_FILE
from engine.errors import EngineError
from engine.pace.budgets import load_budgets
from engine.route.provider import load_providers
from engine.web.history import History
from engine.web.reading import OpenReader, Reader, Reading, open_reader
from engine.web.snapshot import Expected, Snapshot, take_snapshot
from engine.web.told import ProviderCounts, sums

FRESH_S = 0.9  # senders tell once a second
KEPT_S = 15.0  # for lists of campaigns: the round reads the busy ones once a second, the others every ten
_SCAN_S = 2.0
_MOST = 1_000  # campaigns on one shelf


class Watched:
    """One campaign. Safe to use from several threads."""

    def __init__(self, key: str, folder: Path, clock: Clock, open_reader: OpenReader = open_reader) -> None:
        self.key = key
        self.campaign = Campaign(folder)
        self.history = History()
        self._clock, self._open = clock, open_reader
        self._reader: Reader | None = None
        self._lock = threading.Lock()
        self._expected: tuple[int, Expected] = (-1, Expected())
        self._id: tuple[int, str] = (-1, folder.name)
        self._read_at = -1e9
        self._last: Snapshot | None = None
        self.reading: Reading | None = None  # the last one
        self.problem = ""
        self.reads = 0  # how often the store was read: shown by tests, and by /metrics

    @property
    def id(self) -> str:
        """As the settings name it, else the folder's name."""
        file = self.campaign.folder / SETTINGS_FILE
        try:
            changed = file.stat().st_mtime_ns
            if changed != self._id[0]:
                self._id = (changed, self.campaign.settings().campaign.id)
        except (OSError, EngineError):
            pass
        return self._id[1]

    def look(self, *, fresh: bool = False) -> Snapshot:
        """The campaign now; at most a second old, or read now. A store that is away shows the last.

        While another thread reads, the last is shown as well: a store that hangs holds up one thread, not all.
        """
        if not self._lock.acquire(blocking=False):
            last = self._last
            if last is not None and not fresh:
                return last
            self._lock.acquire()
        try:
            now = self._clock.monotonic()
            if self._last is None or fresh or now - self._read_at >= FRESH_S:
                self._read_at = now
                try:
                    self._last = self._take(now)
                    self.problem = ""
                except (EngineError, OSError) as problem:
                    self.problem = str(problem)
                    if self._last is None:
                        self._last = self._show(None, {}, self._clock.wall_us())
            return self._last
        finally:
            self._lock.release()

    def glance(self) -> Snapshot:
        """The campaign as the round saw it last, for lists of many; read now where it did not look yet."""
        last = self._last
        if last is None or self._clock.monotonic() - self._read_at >= KEPT_S:
            return self.look()
        return last

    def _take(self, now: float) -> Snapshot:
        if self._reader is None:
            self._reader = self._open(self.campaign)
        reading = self._reader.read(now) if self._reader is not None else None
        self.reads += 1
        self.reading = reading
        now_us = self._clock.wall_us()
        by_provider = sums(reading.incarnations, now_us) if reading is not None else {}
        if reading is not None:
            self.history.add(now, by_provider)
        return self._show(reading, by_provider, now_us)

    def _show(self, reading: Reading | None, by_provider: dict[str, ProviderCounts], now_us: int) -> Snapshot:
        return take_snapshot(
            self.key,
            self.id,
            reading,
            self.expected(),
            by_provider,
            self.history.rates,
            now_us=now_us,
            has_report=(self.campaign.report / "summary.json").exists(),
        )

    def expected(self) -> Expected:
        """What the plan says; read again when its file changes."""
        try:
            changed = self.campaign.plan_file.stat().st_mtime_ns
        except OSError:
            return Expected()
        if changed != self._expected[0]:
            self._expected = (changed, _expect(self.campaign))
        return self._expected[1]

    def close(self) -> None:
        """Let go of the store."""
        with self._lock:
            if self._reader is not None:
                self._reader.close()
                self._reader = None


def _expect(campaign: Campaign) -> Expected:
    """Rows by provider from the plan's counts; rates where sending is direct and budgets say something."""
    try:
        plan, settings = campaign.plan(), campaign.settings()
        if settings.delivery.mode != "direct":
            return Expected()
        rows = dict(plan.provider_rows)
        if not rows:
            book = load_providers()
            for domain, count in plan.domain_rows.items():
                name = book.of_domain(domain)
                if name is not None:
                    rows[name] = rows.get(name, 0) + count
        told = capacity(
            rows,
            load_budgets(campaign.folder / "budgets.toml"),
            OurRate(),
            other_rows=max(0, plan.rows - sum(rows.values())),
        )
    except (EngineError, ValueError, OSError):
        return Expected()
    return Expected(rows, {one.provider: one.rate_per_s for one in told.providers}, told.eta_s)


class Shelf:
    """All campaigns under one folder, by key."""

    def __init__(self, root: Path, clock: Clock | None = None, open_reader: OpenReader = open_reader) -> None:
        self.root = root
        self.clock = clock or SystemClock()
        self._open = open_reader
        self._known: dict[Path, Watched] = {}
        self._scanned_at = -1e9
        self._lock = threading.Lock()
        self.is_single = (root / SETTINGS_FILE).exists()

    def all(self, *, fresh: bool = False) -> list[Watched]:
        """Every campaign, by key."""
        with self._lock:
            now = self.clock.monotonic()
            if fresh or now - self._scanned_at >= _SCAN_S:
                self._scanned_at = now
                self._scan()
            return sorted(self._known.values(), key=lambda one: one.key)

    def get(self, key: str) -> Watched | None:
        """The campaign of this key."""
        return next((one for one in self.all() if one.key == key), None)

    def _scan(self) -> None:
        found = (
            [self.root] if self.is_single else sorted(p.parent for p in self.root.glob(f"*/{SETTINGS_FILE}"))[:_MOST]
        )
        for gone in self._known.keys() - set(found):
            self._known.pop(gone).close()
        taken = {one.key for one in self._known.values()}
        for folder in found:
            if folder not in self._known:
                key = free_key(folder.resolve().name, taken.__contains__)
                taken.add(key)
                self._known[folder] = Watched(key, folder, self.clock, self._open)

    def close(self) -> None:
        """Let go of every store."""
        for one in self._known.values():
            one.close()


def free_key(name: str, is_taken: Callable[[str], bool]) -> str:
    """A name for URLs: letters, digits, dots, dashes."""
    key = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.")[:80] or "campaign"
    number, free = 1, key
    while is_taken(free):
        number += 1
        free = f"{key}-{number}"
    return free
