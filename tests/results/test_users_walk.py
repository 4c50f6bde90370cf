"""The walk from users table to users table that the guide write-back.md links."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

WALK = Path(__file__).parents[2] / "sample_data" / "apps" / "users_walk" / "walk.py"


@pytest.mark.long
def test_the_walk_ends_with_the_users_table_as_it_should_be(tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, str(WALK), str(tmp_path / "walk")], capture_output=True, text=True, timeout=120, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "5 have no newsletter any more" in ran.stdout
