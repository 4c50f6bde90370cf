"""A rehearsal: the campaign's list, letters and budgets against played providers on this machine.

A folder `rehearsal/` in the campaign's gets settings of its own: direct delivery, a name server on loopback that knows
every domain of the list, providers that hold the budgets exactly (or as a model file says), sources at loopback
addresses. So nothing can leave the machine: no other name server is asked, every host has a loopback address, and the
kernel sends nothing elsewhere from one. Suppressions are copied, logs and reports are the rehearsal's own.

Compressed time multiplies rates and divides waits: connections stay as many as they are. The throttle's own windows
are a minute of real time whatever the speed; where limits are as planned it has nothing to do. TLS handshakes are real
work at any speed; how much they were late is told.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from engine.campaign import Campaign, make_private_folder
from engine.capacity import OurRate, capacity
from engine.config import Duration, Settings, encode_custom
from engine.errors import EngineError, Exit
from engine.pace.budgets import BUDGETS_FILE, Budgets, Source
from engine.rehearse.cast import TAIL, Cast, cast_of, model_of
from engine.rehearse.drawing import Moment, course_of
from engine.rehearse.internet import InternetSettings, RunningInternet, run_internet
from engine.rehearse.models import World
from engine.rehearse.player import Report
from engine.rehearse.sink import SinkSettings
from engine.route.provider import ProviderBook
from formats.address import Mailbox, parse_mailboxes
from formats.plan import Plan

_LOOK_EVERY_S = 0.25  # real seconds between two looks
# What belongs to the campaign's own runs and is not lent to the rehearsal.
_OWN = ("plan.json", "logs", "run", "report", "rehearsal", "replaced", "feedback", "suppression", "campaign.toml")


class RehearsalFailed(EngineError):
    """The rehearsal ended early: `engine {words}` said: {said}"""

    exit_code = Exit.TRY_AGAIN
    hint = "Its folder {folder} is kept; run the command there to see more."


class Compared(msgspec.Struct, frozen=True, kw_only=True):
    """One provider: what the capacity plan says and what the rehearsal reached.

    Seconds of the campaign's time, from the first connection to anybody until the last message accepted there. Of
    them a connection spent `late_s` on the average because this machine was busy with handshakes.
    """

    provider: str
    rows: int
    accepted: int
    planned_s: float | None
    reached_s: float | None
    late_s: float
    refused: dict[str, int]
    most_connections: int

    @property
    def ratio(self) -> float | None:
        """Reached, less what this machine was late, over planned."""
        if not self.planned_s or self.reached_s is None:
            return None
        return (self.reached_s - self.late_s) / self.planned_s


class Rehearsed(msgspec.Struct, frozen=True, kw_only=True):
    """What came of it."""

    rows: int
    speed: float
    providers: list[Compared]
    exit_code: int
    course: list[Moment]


class Rehearsal:
    """Prepares the folder, runs, compares."""

    def __init__(
        self,
        campaign: Campaign,
        settings: Settings,
        plan: Plan,
        budgets: Budgets,
        book: ProviderBook,
        *,
        sample: int | None = None,
        speed: float = 1.0,
        world: World | None = None,
        processes: int = 2,
        seed: int = 0,
    ) -> None:
        """`world` has models by provider's name, `tail` for the small ones; the others hold their budgets."""
        self.folder = campaign.folder / "rehearsal"
        self._campaign, self._settings, self._plan, self._budgets = campaign, settings, plan, budgets
        self._sample, self._speed, self._processes, self._seed = sample, speed, processes, seed
        self._sources = budgets.sources or (Source("default"),)
        self._lists = [file.path for file in plan.files]
        self._book = book
        self._seen: list[dict[str, Report]] = []
        self._models = {model.name: model for model in world.provider} if world is not None else {}

    def run(self) -> Rehearsed:
        """Play it; raises RehearsalFailed, SinkCannotListen."""
        self._fresh_folder()
        cast = cast_of(self._count_domains(), self._book, self._budgets.named_providers())
        models = []
        for name, rows in cast.rows.items():
            budget = self._budgets.of(name if name != TAIL else "tail.invalid", self._sources[0].name)
            found = self._models.get(name)
            made = model_of(name, rows, budget, len(cast.domains[name]))
            models.append(
                made if found is None else msgspec.structs.replace(found, domains=made.domains, share=made.share)
            )
        internet = InternetSettings(
            world=World(f"rehearsal of {self._settings.campaign.id}", tuple(models)),
            zone=cast.zone(),
            addresses=cast.addresses,
            speed=self._speed,
            seed=self._seed,
            sink=SinkSettings(tls="starttls"),
        )
        with run_internet(internet) as net:
            self._write_settings(net.nameserver, net.port)
            self._write_budgets(cast)
            self._engine("plan", *self._lists)
            code = self._send(net)
            reports = net.reports()
        return Rehearsed(
            rows=sum(cast.rows.values()),
            speed=self._speed,
            providers=self._compare(cast, reports),
            exit_code=code,
            course=course_of(self._seen),
        )

    # -- the folder ----------------------------------------------------------------------------------------------------

    def _fresh_folder(self) -> None:
        if self.folder.exists():
            shutil.rmtree(self.folder)
        make_private_folder(self.folder)
        for entry in self._campaign.folder.iterdir():
            if entry.name in (*_OWN, BUDGETS_FILE) or entry.name.startswith("control.sqlite"):
                continue
            if entry.is_dir():
                shutil.copytree(entry, self.folder / entry.name)
            elif entry.suffix not in (".parquet", ".record"):
                shutil.copy2(entry, self.folder / entry.name)
        if self._campaign.suppression.exists():
            # A copy: what a played provider calls unknown must not reach the real list.
            shutil.copytree(self._campaign.suppression, self.folder / "suppression")
        if self._sample is not None and self._sample < self._plan.rows:
            (self.folder / "sample.parquet").unlink(missing_ok=True)
            pq.write_table(self._sampled(), self.folder / "sample.parquet", row_group_size=1000)
            self._lists = [str((self.folder / "sample.parquet").resolve())]

    def _sampled(self) -> pa.Table:
        """Rows at even distances over the whole list."""
        assert self._sample is not None
        tables = []
        first = taken = 0
        for path in self._lists:
            with pq.ParquetFile(path) as file:
                for group in range(file.num_row_groups):
                    rows = file.metadata.row_group(group).num_rows
                    due = (first + rows) * self._sample // self._plan.rows - taken
                    if due:
                        places = [place * rows // due for place in range(due)]
                        tables.append(file.read_row_group(group).take(places))
                        taken += due
                    first += rows
        return pa.concat_tables(tables)

    def _count_domains(self) -> dict[str, int]:
        counts: dict[str, int] = {}
        column = self._plan.address_column
        for path in self._lists:
            with pq.ParquetFile(path) as file:
                for batch in file.iter_batches(columns=[column]):
                    for mailbox in parse_mailboxes(batch.column(0).cast(pa.string()).to_pylist()):
                        if isinstance(mailbox, Mailbox):
                            counts[mailbox.domain] = counts.get(mailbox.domain, 0) + 1
        return counts

    def _write_settings(self, nameserver: str, port: int) -> None:
        settings = self._settings
        delivery = msgspec.structs.replace(
            settings.delivery,
            mode="direct",
            nameservers=(nameserver,),
            smtp_port=port,
            allow_private_hosts=True,
            tls_ca_file=None,
            username=None,
            password_env=None,
            password_file=None,
        )
        shorter = tuple(Duration(max(0.5, wait.seconds / self._speed)) for wait in settings.retry.plan)
        age = Duration(max(30.0, settings.retry.max_age.seconds / self._speed))
        batch_rows = min(settings.list.batch_rows, max(100, self._plan.rows // (4 * self._processes)))
        played = msgspec.structs.replace(
            settings,
            delivery=delivery,
            list=msgspec.structs.replace(settings.list, batch_rows=batch_rows),
            retry=msgspec.structs.replace(settings.retry, plan=shorter, max_age=age),
            control=type(settings.control)(),
            log=msgspec.structs.replace(settings.log, durability="process", level="debug"),
        )
        (self.folder / "campaign.toml").write_text(
            toml_of(msgspec.to_builtins(played, enc_hook=encode_custom)), "utf-8"
        )

    def _write_budgets(self, cast: Cast) -> None:
        tables: dict[str, Any] = {"default": self._section("tail.invalid", None), "provider": {}, "source": {}}
        for name in cast.rows:
            if name != TAIL:
                tables["provider"][name] = self._section(name, None)
        for number, source in enumerate(self._sources):
            tables["source"][source.name] = {
                "bind": f"127.8.{number // 250}.{number % 250 + 1}",
                "weight": source.weight,
                **({"greeting_name": source.greeting_name} if source.greeting_name else {}),
                "provider": {
                    name: section
                    for name in tables["provider"]
                    if (section := self._section(name, source.name)) != self._section(name, None)
                },
            }
            for section in tables["source"][source.name]["provider"].values():
                section.pop("scope", None)
        (self.folder / BUDGETS_FILE).write_text(toml_of(tables), "utf-8")

    def _section(self, provider: str, source: str | None) -> dict[str, Any]:
        """The budget in force, its rates as fast as time goes."""
        budget = self._budgets.of(provider, source)
        written = {key: value for key, value in msgspec.structs.asdict(budget).items() if value is not None}
        written.pop("retry_after_s", None)
        for key in ("messages_per_minute", "messages_per_hour", "messages_per_day", "connections_per_minute"):
            if key in written:
                written[key] = max(1, min(10**9, round(written[key] * self._speed)))
        if written["tls"] == "verified":
            written["tls"] = "required"  # the certificates on loopback are nobody's
        return written

    # -- the run -------------------------------------------------------------------------------------------------------

    def _send(self, net: RunningInternet) -> int:
        """Send, and look at what the providers see meanwhile."""
        self._seen = [net.reports()]
        words = ("send", "--yes", "--processes", str(self._processes), "--log-format", "json")
        process = self._begin(*words)
        while process.poll() is None:
            time.sleep(_LOOK_EVERY_S)
            self._seen.append(net.reports())
        return self._ended(process.returncode, words)

    def _engine(self, *words: str) -> int:
        """Raises RehearsalFailed."""
        return self._ended(self._begin(*words).wait(), words)

    def _begin(self, *words: str) -> subprocess.Popen[bytes]:
        root = str(Path(__file__).parents[2])
        paths = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
        command = [sys.executable, "-m", "engine", words[0], "--campaign", str(self.folder), *words[1:]]
        with self._told_by(words).open("wb") as file:
            environ = {**os.environ, "PYTHONPATH": paths}
            return subprocess.Popen(command, env=environ, stdout=subprocess.DEVNULL, stderr=file)

    def _told_by(self, words: Sequence[str]) -> Path:
        return self.folder / f"{words[0]}.jsonl"

    def _ended(self, code: int, words: Sequence[str]) -> int:
        if code not in (Exit.DONE, Exit.ROWS_OPEN):
            lines = self._told_by(words).read_text("utf-8").splitlines()
            said = " / ".join(line for line in lines if not line.startswith("{"))
            raise RehearsalFailed(words=" ".join(words), said=said[-500:], folder=self.folder)
        return code

    def _compare(self, cast: Cast, reports: Mapping[str, Report]) -> list[Compared]:
        rows = {name: count for name, count in cast.rows.items() if name != TAIL}
        tail = cast.tail()
        told = capacity(rows | tail, self._budgets, OurRate(processes=self._processes), sources=self._sources)
        planned = {one.provider: one.eta_s for one in told.providers}
        began = min((r.first_opened_s for r in reports.values() if r.first_opened_s is not None), default=0.0)
        return sorted(
            (
                Compared(
                    provider=name,
                    rows=cast.rows[name],
                    accepted=report.accepted,
                    planned_s=_latest(planned[key] for key in (tail if name == TAIL else (name,))),
                    reached_s=report.last_accepted_s - began if report.last_accepted_s is not None else None,
                    late_s=report.late_s / max(1, _most(report)),
                    refused={kind: count for kind, count in report.answers.items() if kind != "accepted"},
                    most_connections=_most(report),
                )
                for name, report in reports.items()
            ),
            key=lambda one: -one.rows,
        )


def _most(report: Report) -> int:
    """Connections of one source at one time."""
    return max((source.most_connections for source in report.sources.values()), default=0)


def _latest(times: Iterable[float | None]) -> float | None:
    known = list(times)
    return None if not known or any(at is None for at in known) else max(at for at in known if at is not None)


def toml_of(tables: Mapping[str, Any]) -> str:
    """A TOML document of plain values: tables of scalars, lists and tables. JSON's strings are TOML's basic strings."""
    plain = {key: value for key, value in tables.items() if not isinstance(value, Mapping) and value is not None}
    lines = [f"{_text(key)} = {_value(value)}" for key, value in plain.items()]
    for key, value in tables.items():
        if isinstance(value, Mapping):
            lines.append(f"[{_text(key)}]")
            lines += [f"{_text(name)} = {_value(inner)}" for name, inner in value.items() if inner is not None]
    return "\n".join(lines) + "\n"


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_text(k)} = {_value(v)}" for k, v in value.items() if v is not None) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_value(one) for one in value) + "]"
    return _text(value)


def _text(value: Any) -> str:
    return msgspec.json.encode(value).decode().replace("\x7f", "\\u007f")
