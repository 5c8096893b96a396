"""Programs that nobody wrote run to the same numbers, outcomes and step counts with a recorder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
COUNT = int(os.environ.get("ADVISOR_TEST_PROGRAMS", "36"))
"""Programs in all; more of them by this variable, as ``ADVISOR_TEST_PROGRAMS=5000``."""
PARTS = 4


@pytest.mark.parametrize("part", range(PARTS))
def test_random_programs_are_the_same_with_a_recorder(part: int, tmp_path: Path) -> None:
    size = COUNT // PARTS
    script = Path(__file__).with_name("random_programs.py")
    result = subprocess.run(
        [sys.executable, script, tmp_path, str(part * size), str((part + 1) * size)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60 + 5 * size,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    *differences, last = result.stdout.splitlines() or [""]
    assert [json.loads(line) for line in differences] == []
    assert last == f"ran {size}", result.stderr[-2000:]
    assert result.returncode == 0
