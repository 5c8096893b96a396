"""Everything that ``make`` installs is pinned, and each file known by its hash, but for torch's
builds."""

from __future__ import annotations

import importlib.util
import re
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
LOCK = (ROOT / "requirements.lock").read_text()
CONSTRAINTS = (ROOT / "constraints.txt").read_text()


@pytest.fixture(scope="module")
def lock() -> ModuleType:
    """The script that writes the lock."""
    spec = importlib.util.spec_from_file_location("advisor_lock", ROOT / "tools" / "lock.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_lock_has_constrained_versions_without_torch(
    lock: ModuleType,
) -> None:
    locked, pinned = dict(lock.pins(LOCK)), dict(lock.pins(CONSTRAINTS))
    assert set(pinned) - set(locked) == {"torch"}, "run make lock"
    assert {name: locked[name] for name in pinned if name != "torch"} == {
        name: version for name, version in pinned.items() if name != "torch"
    }


def test_lock_holds_only_packages_with_hashes() -> None:
    entries = re.split(r"\n(?=\S)", LOCK)
    packages = [entry for entry in entries if not entry.startswith("#")]
    assert len(packages) > 90
    for entry in packages:
        head, *rest = entry.strip().split(" \\\n")
        assert re.fullmatch(r"[a-z0-9][a-z0-9._-]*==\S+( ; .+)?", head), head
        assert rest, f"{head}: no hash"
        for line in rest:
            assert re.fullmatch(r"\s+--hash=sha256:[0-9a-f]{64}", line), (head, line)


def test_all_that_the_extras_of_make_need_is_locked(lock: ModuleType) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["dashboard"]]
    wanted += [text for extra in lock.EXTRAS for text in extras[extra]]
    names = {lock.name(text) for text in wanted} - {"gpu-advisor"}
    assert names <= set(dict(lock.pins(LOCK)))


def test_make_checks_the_hashes() -> None:
    make = (ROOT / "Makefile").read_text()
    assert "--require-hashes --no-deps -r requirements.lock" in make
