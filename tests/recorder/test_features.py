"""A program sees the same of torch and of itself with a recorder, feature by feature."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from recording_checks import only_rank

pytest.importorskip("torch")


@pytest.mark.slow
def test_features_are_the_same_with_a_recorder(tmp_path: Path) -> None:
    """Scripting, tracing, export, compilation, modes, copies, wrong calls …: see features.py."""
    script = Path(__file__).with_name("features.py")
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    running = [
        subprocess.Popen(
            [sys.executable, script, *more], stdout=subprocess.PIPE, text=True, env=env
        )
        for more in ([], [tmp_path / "run"])
    ]
    plain, recorded = (process.communicate(timeout=500)[0] for process in running)
    seen = [[json.loads(line) for line in out.splitlines()] for out in (plain, recorded)]
    # its own loop of 19 steps, and what features train
    assert len(only_rank(tmp_path / "run").steps) >= 19
    different = [(a, b) for a, b in zip(*seen, strict=False) if a != b]
    assert different == []
    assert seen[0][-1] == seen[1][-1] == ["end", "steps", "19"]
    names = {name for when, name, _ in seen[0] if when == "between"}
    assert len(names) >= 50
    assert not [feature for feature in seen[0] if feature[2][:8] == '"failed:']
