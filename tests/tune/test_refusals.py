"""What a knob breaks is seen (losses, memory, errors), and the program's files are left alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from advisor.tune.knob import find_knob
from advisor.tune.losses import check
from advisor.tune.spec import KnobSetting, Result

from .conftest import TRAPS

pytest.importorskip("torch")

pytestmark = pytest.mark.timed
Run = Callable[..., Result]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the program runs, with files of earlier runs."""
    folder = tmp_path_factory.mktemp("home")
    (folder / "checkpoints").mkdir()
    (folder / "checkpoints" / "best.pt").write_text("of last week")
    (folder / "log.txt").write_text("of last week\n")
    return folder


@pytest.fixture(scope="module")
def unchanged(run_once: Run, home: Path) -> Result:
    return run_once(TRAPS, here=home)


def test_the_unchanged_program_is_timed_and_its_files_stay_as_they_are(
    unchanged: Result, home: Path
) -> None:
    assert unchanged.problem == "" and unchanged.ended
    assert len(unchanged.steps_ns) == 45 and len(unchanged.losses) >= 49
    assert unchanged.moved >= 3
    assert (home / "checkpoints" / "best.pt").read_text() == "of last week"
    assert (home / "log.txt").read_text() == "of last week\n"
    assert names(home) == ["checkpoints", "log.txt", "program.py"]
    assert names(home / "checkpoints") == ["best.pt"]


@pytest.mark.parametrize(
    ("name", "safety", "why"),
    [
        ("set-to-none", "exact", "on, and must not"),
        ("channels-last", "reordered", "apart in the first losses"),
        ("autocast", "precision", "gradient norms ×"),
    ],
)
def test_a_knob_that_changes_the_losses_is_refused(
    name: str, safety: str, why: str, run_once: Run, home: Path, unchanged: Result
) -> None:
    one = find_knob(name)
    assert one.safety == safety
    result = run_once(TRAPS, KnobSetting(name), here=home, steps=8)
    assert result.problem == "" and result.idle == []
    found = check(one.safety, one.redraws, [unchanged], [result])
    assert not found.passed
    assert why in found.text


def test_a_knob_that_takes_more_memory_than_there_is_is_told_as_that(
    run_once: Run, home: Path
) -> None:
    result = run_once(TRAPS, KnobSetting("gc-freeze"), here=home)
    assert result.kind == "memory" and not result.ended


def test_an_exact_knob_that_meets_nothing_leaves_the_losses_equal_and_says_so(
    run_once: Run, home: Path, unchanged: Result
) -> None:
    result = run_once(TRAPS, KnobSetting("loader-persistent"), here=home, steps=8)
    assert result.idle == ["loader-persistent"]
    assert check("exact", False, [unchanged], [result]).text == "equal"


NATIVE = """
import ctypes, os, sys
import torch
target = os.path.abspath("native.bin")
libc = ctypes.CDLL(None, use_errno=True)
number = libc.open(target.encode(), os.O_WRONLY | os.O_CREAT, 0o600)
print("native", number)
try:
    os.remove("precious.txt")
except PermissionError:
    print("kept")
raise RuntimeError("end")
"""


@pytest.mark.skipif("not __import__('advisor.tune.confine', fromlist=['x']).version()")
def test_what_native_code_would_write_and_what_would_be_deleted_is_refused(
    run_once: Run, tmp_path: Path
) -> None:
    (tmp_path / "precious.txt").write_text("mine")
    result = run_once(NATIVE, here=tmp_path)
    assert names(tmp_path) == ["precious.txt", "program.py"]
    assert any(line.startswith("remove: ") for line in result.refused)
    assert result.kind == "error"
