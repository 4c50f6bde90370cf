"""Small campaigns on disk: a list, a plan, and logs written by the real encoder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from formats.plan import Batch, ListFile, Partition, Plan
from formats.sendlog import NAME_PROVIDER, NAME_SOURCE, Encoder, Header, Kind, Reason, Record, Verdict

T0 = 1_780_000_000_000_000  # 2026-05-28 20:26:40 UTC
SECOND = 1_000_000


class LogWriter:
    """A send log, record by record; `records` may be shuffled or cut before it is written."""

    def __init__(
        self, log_id: str, *, campaign: str = "c1", sender: str = "host-a", worker: int = 0, plan: str = "plan-1"
    ) -> None:
        self.header = Header(
            log_id=log_id,
            campaign_id=campaign,
            plan_fingerprint=plan,
            incarnation="i-" + log_id,
            sender=sender,
            host_id="h",
            boot_id="b",
            worker=worker,
            started_at_us=T0,
        )
        self.records: list[Record] = []
        self.serial = 0
        self.at = T0
        self.names: dict[tuple[int, str], int] = {}

    def name(self, kind: int, name: str | None) -> int:
        if name is None:
            return 0
        if (kind, name) not in self.names:
            number = sum(1 for k, _ in self.names if k == kind) + 1
            self.names[kind, name] = number
            self.records.append((Kind.NAME, 0, number, self.at, 0, 0, kind, 0, 0, 0, 0, name))
        return self.names[kind, name]

    def intent(
        self, row: int, attempt: int = 1, provider: str | None = "mail", source: str | None = "s1", resent: bool = False
    ) -> int:
        self.serial += 1
        self.at += SECOND
        p, s = self.name(NAME_PROVIDER, provider), self.name(NAME_SOURCE, source)
        reason = Reason.RESENT if resent else Reason.NONE
        self.records.append((Kind.INTENT, self.serial, row, self.at, attempt, 0, reason, 0, p, s, 0, None))
        return self.serial

    def result(
        self,
        serial: int,
        row: int,
        verdict: Verdict,
        *,
        attempt: int = 1,
        reason: Reason = Reason.NONE,
        code: int = 0,
        text: str | None = None,
        provider: str | None = "mail",
        source: str | None = "s1",
    ) -> None:
        self.at += SECOND
        p, s = self.name(NAME_PROVIDER, provider), self.name(NAME_SOURCE, source)
        self.records.append((Kind.RESULT, serial, row, self.at, attempt, verdict, reason, code, p, s, 0, text))

    def attempt(self, row: int, verdict: Verdict, *, attempt: int = 1, resent: bool = False, **told: object) -> int:
        """An intent and its result."""
        names = {key: told[key] for key in ("provider", "source") if key in told}
        serial = self.intent(row, attempt, resent=resent, **names)  # type: ignore[arg-type]
        self.result(serial, row, verdict, attempt=attempt, **told)  # type: ignore[arg-type]
        return serial

    def accepted(self, row: int, **told: object) -> int:
        return self.attempt(row, Verdict.ACCEPTED, code=250, text="2.0.0 Ok: queued", **told)

    def event(self, text: str, provider: str | None = "mail") -> None:
        p = self.name(NAME_PROVIDER, provider)
        self.records.append((Kind.EVENT, 0, 0, self.at, 0, 0, 0, 0, p, 0, 0, text))

    def raw(self, *, batch: int = 7, close: bool = True) -> bytes:
        encoder = Encoder(self.header)
        out = b"".join(
            encoder.batch(self.records[start : start + batch]) for start in range(0, len(self.records), batch)
        )
        return out + encoder.end() if close else out

    def write(self, folder: Path, *, batch: int = 7, close: bool = True, name: str | None = None) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{name or self.header.log_id}.arrows"
        path.write_bytes(self.raw(batch=batch, close=close))
        return path


def make_plan(rows: int, *, files: Sequence[ListFile] | None = None, batch: int = 10, partitions: int = 1) -> Plan:
    batches = [Batch(first, min(batch, rows - first)) for first in range(0, rows, batch)]
    each = -(-len(batches) // partitions) if batches else 0
    return Plan(
        campaign_id="c1",
        planned_at_us=T0,
        rows=rows,
        files=list(files) if files is not None else [ListFile("list.parquet", rows, [rows], "f")],
        batches=batches,
        partitions=[Partition(p * each, max(0, min(each, len(batches) - p * each))) for p in range(partitions)],
        address_column="email",
        id_column="id",
        columns=["email", "name"],
        list_id="weekly",
        list_fingerprint="l",
        settings_fingerprint="s",
        templates_fingerprint="t",
        key_id="k",
    )


def write_list(folder: Path, rows: int, *, group: int = 10, name: str = "list.parquet") -> ListFile:
    """A list of `rows` users at three domains."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    domains = ["big.test", "Big.Test", "small.test"]
    table = pa.table(
        {
            "id": pa.array([1000 + n for n in range(rows)], pa.int64()),
            "email": [f"u{n}@{domains[n % 3]}" for n in range(rows)],
            "name": [f"User {n}" for n in range(rows)],
        }
    )
    pq.write_table(table, path, row_group_size=group)
    groups = pq.read_metadata(path)
    return ListFile(str(path), rows, [groups.row_group(g).num_rows for g in range(groups.num_row_groups)], "f")


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    return tmp_path / "logs"
