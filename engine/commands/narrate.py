"""How a run speaks to the operator: a live table on a terminal, plain lines when piped, JSON lines when asked.

Everything goes to stderr; stdout is for data.
"""

from __future__ import annotations

import sys
import time
from datetime import UTC, datetime
from typing import TextIO

import msgspec
from rich.console import Console
from rich.live import Live
from rich.table import Table

from engine.commands.common import span
from engine.work.progress import Progress

_EVERY_S = {"terminal": 0.25, "plain": 5.0, "json": 5.0}
_LEVELS = ("debug", "info", "warning", "error")
_LEVEL_OF = {
    "connection_ended": "debug",
    "deferred": "debug",
    "worker_died": "warning",
    "worker_silent": "warning",
    "log_damaged": "warning",
    "store_away": "error",
    "stopped": "error",
}


def summary_line(progress: Progress, now: float) -> str:
    """One line: what is done, what is left, how fast, until when."""
    parts = [f"{progress.accepted:,} sent"]
    for count, word in (
        (progress.rejected, "bounced"),
        (progress.invalid, "invalid"),
        (progress.suppressed, "suppressed"),
        (progress.expired, "given up"),
        (progress.in_doubt, "in doubt"),
        (min(progress.waiting, progress.left), "waiting"),
    ):
        if count:
            parts.append(f"{count:,} {word}")
    if progress.before:
        parts.append(f"{progress.before:,} done before")
    line = f"{progress.finished:,} of {progress.rows:,}: " + ", ".join(parts) + f"; {progress.rate(now):,.0f}/s"
    eta = progress.eta_s(now)
    if eta is not None and progress.waiting < progress.left:
        line += f", done in {span(eta)}"
    is_retry = progress.waiting > progress.asleep
    if is_retry and progress.left and progress.next_due_us is not None and not progress.in_flight:
        line += f", next retry in {span(max(0.0, progress.next_due_us / 1e6 - time.time()))}"
    if progress.reason and progress.left:
        line += f" ({progress.reason})"
    return line


class Narration:
    """Plain or JSON lines, or a live table."""

    def __init__(self, *, as_json: bool, level: str, out: TextIO | None = None) -> None:
        self._out = out or sys.stderr
        self._form = "json" if as_json else "terminal" if self._out.isatty() else "plain"
        self._lowest = _LEVELS.index(level)
        self._told_at = -1e9
        self._last = ""
        self._live: Live | None = None
        if self._form == "terminal":
            self._live = Live(console=Console(file=self._out), auto_refresh=False, transient=False)

    def __enter__(self) -> Narration:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *problem: object) -> None:
        if self._live is not None:
            self._live.stop()

    def event(self, name: str, **fields: object) -> None:
        """One event, one line: `time name field=value ...`."""
        level = _LEVEL_OF.get(name, "info")
        if _LEVELS.index(level) < self._lowest:
            return
        at = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        if self._form == "json":
            line = msgspec.json.encode({"at": at, "level": level, "event": name, **fields}, enc_hook=str).decode()
        else:
            words = " ".join(f"{key}={_quoted(value)}" for key, value in fields.items() if value not in (None, ""))
            line = f"{at} {name} {words}".rstrip()
        self._line(line)

    def progress(self, progress: Progress, now: float) -> None:
        """Where the run is; at most every few seconds unless a terminal shows it."""
        if now - self._told_at < _EVERY_S[self._form]:
            return
        first, self._told_at = self._told_at < 0, now
        if self._live is not None:
            self._live.update(_table(progress, now), refresh=True)
        elif self._form == "json":
            self.event("progress", **progress.counters(now))
        elif not first:
            line = summary_line(progress, now)
            if line != self._last:
                self._last = line
                self._line(line)

    def _line(self, line: str) -> None:
        if self._live is not None:
            self._live.console.print(line, markup=False, highlight=False)
        else:
            print(line, file=self._out, flush=True)


def _quoted(value: object) -> str:
    text = str(value)
    return (
        msgspec.json.encode(text).decode() if not text or " " in text or '"' in text or not text.isprintable() else text
    )


def _table(progress: Progress, now: float) -> Table:
    table = Table(title=summary_line(progress, now), title_justify="left", expand=False)
    for name in ("provider", "sent", "bounced", "deferrals", "lost", "in doubt", "connections", "limited by"):
        table.add_column(name, justify="left" if name in ("provider", "limited by") else "right")
    largest = sorted(progress.providers.items(), key=lambda item: -item[1].accepted)[:20]
    for name, p in largest:
        counts = (p.accepted, p.rejected, p.deferred, p.lost, p.in_doubt, p.connections)
        table.add_row(name, *(f"{count:,}" for count in counts), p.limit)
    return table
