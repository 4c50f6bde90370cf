"""A planned campaign small enough to look through: ten rows, keys, tokens.json."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pyarrow.parquet as pq

from engine.compose.keys import KeyRing, write_new_keys, write_token_table
from engine.rows import file_fingerprint
from formats import plan as plan_format
from formats.plan import Batch, ListFile, Partition, Plan
from formats.verp import Marks, TokenMaker, TokenOrigin

SETTINGS = """\
[campaign]
id = "{id}"
list_id = "weekly"

[message]
from_address = "news@example.com"
subject = "The weekly"
text = "text.txt"
"""

NAMES = ["ann", "ben", "cleo", "dora", "emil", "fay", "gus", "hal", "ida", "jon"]


class StoppedClock:
    """Time stands still until it is moved."""

    def __init__(self, now_us: int = 1_770_000_000_000_000) -> None:
        self.now_us = now_us

    def monotonic(self) -> float:
        return self.now_us / 1e6

    def wall_us(self) -> int:
        return self.now_us


class Sent:
    """A campaign as it is once it was sent: folder, keys, and the marks of its rows."""

    def __init__(self, folder: Path, campaign_id: str) -> None:
        folder.mkdir()
        self.folder = folder
        self.campaign_id = campaign_id
        (folder / "campaign.toml").write_text(SETTINGS.format(id=campaign_id))
        file = folder / "list.parquet"
        pl.DataFrame({"email": [f"{name}@example.org" for name in NAMES], "name": NAMES}).write_parquet(
            file, row_group_size=4
        )
        groups = [pq.ParquetFile(file).metadata.row_group(g).num_rows for g in range(3)]
        self.ring: KeyRing = write_new_keys(folder / "keys" / "secret.keys")
        plan = Plan(
            campaign_id=campaign_id,
            planned_at_us=0,
            rows=len(NAMES),
            files=[ListFile(str(file), len(NAMES), groups, file_fingerprint(str(file)))],
            batches=[Batch(0, len(NAMES))],
            partitions=[Partition(0, 1)],
            address_column="email",
            columns=["email", "name"],
            list_fingerprint="l",
            settings_fingerprint="s",
            templates_fingerprint="t",
            key_id=self.ring.current_id,
        )
        (folder / "plan.json").write_bytes(plan_format.encode(plan))
        write_token_table(folder, TokenOrigin(campaign_id, "weekly", self.ring.current_id))
        self._makers = {
            is_test: TokenMaker(campaign_id, self.ring.current_id, self.ring.key(), is_test=is_test)
            for is_test in (False, True)
        }

    def marks(self, row: int, *, is_test: bool = False) -> Marks:
        return self._makers[is_test].marks(row)

    def return_path(self, row: int, *, is_test: bool = False) -> str:
        return f"{self.marks(row, is_test=is_test).return_path}@bounces.example.com"

    def bounce(
        self, row: int, status: str = "5.1.1", text: str = "550 5.1.1 User unknown", action: str = "failed"
    ) -> bytes:
        """A report about the row, to its return path."""
        address = f"{NAMES[row]}@example.org"
        return (
            f"Return-Path: <>\nDelivered-To: {self.return_path(row)}\nFrom: MAILER-DAEMON@mx.example.org\n"
            f"To: {self.return_path(row)}\nSubject: Undelivered Mail Returned to Sender\nMIME-Version: 1.0\n"
            'Content-Type: multipart/report; report-type=delivery-status; boundary="=_1"\n\n'
            "--=_1\nContent-Type: text/plain\n\n"
            f"<{address}>: {text}\n\n"
            "--=_1\nContent-Type: message/delivery-status\n\nReporting-MTA: dns; mx.example.org\n\n"
            f"Final-Recipient: rfc822; {address}\nAction: {action}\nStatus: {status}\nDiagnostic-Code: smtp; {text}\n\n"
            f"--=_1\nContent-Type: text/rfc822-headers\n\nMessage-ID: <{self.marks(row).message_id}@example.com>\n"
            f"To: {address}\n\n--=_1--\n"
        ).encode()
