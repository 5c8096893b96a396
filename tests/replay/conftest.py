"""Lets tests of this folder import the machine and its programs, which lie beside them, and the
naive twin of the benchmark."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
for folder in (HERE, HERE.parents[1] / "benchmarks"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

LEFT_OUT = json.loads((HERE / "laws_left_out.json").read_text())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A law that says nothing of a file is no test of it."""
    items[:] = [item for item in items if not _is_exempt(item)]


def _is_exempt(item: pytest.Item) -> bool:
    params = getattr(getattr(item, "callspec", None), "params", {})
    laws = LEFT_OUT.get(str(params.get("path")), {}) if item.path.parent == HERE else {}
    why = laws.get(getattr(item, "originalname", ""), "")
    return bool(why) and not ("ADVISOR_LAWS" in why and "ADVISOR_LAWS" in os.environ)
