"""Reading the planned list: rows in order, rows picked, and files that change under the reader's hands."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from engine.errors import Exit
from engine.rows import ListChanged, ListUnreadable, RowReader, file_fingerprint
from formats.plan import Batch, ListFile, Partition, Plan
from tests.campaign.conftest import Operator

ROWS_IN_GROUP = 1_000


def a_list(path: Path, rows: int = 5_000) -> Path:
    """Rows with an address and a text that compresses badly, so that groups have some length."""
    table = pa.table(
        {
            "email": [f"r{row}@example.org" for row in range(rows)],
            "text": [f"{row * 2654435761 % 2**32:x}" * 5 for row in range(rows)],
        }
    )
    pq.write_table(table, path, row_group_size=ROWS_IN_GROUP)
    return path


def planned(path: Path) -> Plan:
    meta = pq.read_metadata(path)
    groups = [meta.row_group(number).num_rows for number in range(meta.num_row_groups)]
    return Plan(
        campaign_id="rows",
        planned_at_us=0,
        rows=meta.num_rows,
        files=[ListFile(str(path), meta.num_rows, groups, file_fingerprint(str(path)))],
        batches=[Batch(0, meta.num_rows)],
        partitions=[Partition(0, 1)],
        address_column="email",
        columns=[],
        list_fingerprint="",
        settings_fingerprint="",
        templates_fingerprint="",
        key_id="",
    )


def test_rows_come_in_order_and_picked_rows_with_their_numbers(tmp_path: Path) -> None:
    reader = RowReader(planned(a_list(tmp_path / "list.parquet")), ["email"])
    read = [row for span in reader.spans(0, 5_000) for row in reader.read(span, 0, span.rows)]
    assert read == [(f"r{row}@example.org",) for row in range(5_000)]
    assert reader.pick([3, 1_999, 2_000, 4_999]) == [
        (row, (f"r{row}@example.org",)) for row in (3, 1_999, 2_000, 4_999)
    ]


def test_a_file_replaced_since_the_plan_is_named(tmp_path: Path) -> None:
    path = a_list(tmp_path / "list.parquet")
    plan = planned(path)
    a_list(path, rows=4_000)
    with pytest.raises(ListChanged, match=r"list\.parquet"):
        RowReader(plan, ["email"]).check(0, 5_000)


CUT_UNDER_WAY = """
import os, sys
from pathlib import Path
sys.path.insert(0, {root!r})
from tests.campaign.test_rows import RowReader, planned
path = Path({path!r})
reader = RowReader(planned(path), ["email", "text"])
first, *_, last = reader.spans(0, 5_000)
reader.read(first, 0, 10)
os.truncate(path, path.stat().st_size // 3)
try:
    reader.read(last, 0, 10)
except Exception as problem:
    print(type(problem).__name__, problem)
"""


def test_a_file_cut_while_it_is_read_is_an_error_and_not_the_end_of_the_process(tmp_path: Path) -> None:
    path = a_list(tmp_path / "list.parquet")
    script = CUT_UNDER_WAY.format(root=str(Path(__file__).parents[2]), path=str(path))
    root = str(Path(__file__).parents[2])
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=root, timeout=60)
    assert done.returncode == 0, f"ended by signal {-done.returncode}: {done.stderr}"
    assert done.stdout.startswith(ListUnreadable.__name__)
    assert "list.parquet" in done.stdout


@pytest.mark.slow
def test_a_list_cut_under_a_running_sender_ends_the_run_with_its_name_and_can_be_put_back(operator: Operator) -> None:
    # A refusal every ten rows: the supervisor reads refused addresses from the list, too.
    operator.begin(
        [f"550@d{row}.example" if row % 10 == 5 else f"r{row}@example.com" for row in range(1500)],
        messages_per_second=150,
    )
    path = operator.campaign / "list.parquet"
    whole = path.read_bytes()
    sender = operator.start("send")
    operator.until_received(100)
    os.truncate(path, len(whole) // 3)
    _, err = sender.communicate(timeout=60)
    assert sender.returncode in (Exit.LIST, Exit.FROZEN), err
    assert "list.parquet" in err
    path.write_bytes(whole)
    operator.run("send")
    assert operator.outcomes() == {"accepted": 1350, "bounced": 150}
    assert operator.received().twice == ()
