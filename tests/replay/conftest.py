"""Lets tests of this folder import the machine and its programs, which lie beside them, and the
naive twin of the benchmark."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
for folder in (HERE, HERE.parents[1] / "benchmarks"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
