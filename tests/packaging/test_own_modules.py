"""Nothing of the current folder is executed when advisor starts itself there."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from advisor.core.errors import AdvisorError
from advisor.mcp import programs
from advisor.recorder import folder

ROOT = Path(__file__).resolve().parents[2]
TRAP = (
    "from pathlib import Path\nPath(__file__).with_name('executed').touch()\nraise SystemExit(9)\n"
)


@pytest.fixture
def folder_of_traps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with modules named like those that advisor imports."""
    for name in ("typer", "msgspec", "polars", "rich", "numpy", "gzip", "csv"):
        (tmp_path / f"{name}.py").write_text(TRAP)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return tmp_path


def test_the_lines_at_the_end_of_a_recording(folder_of_traps: Path) -> None:
    with contextlib.suppress(AdvisorError):
        folder.summarize_findings(folder_of_traps)
    assert not (folder_of_traps / "executed").exists()


def test_programs_that_an_agent_records(folder_of_traps: Path) -> None:
    code, _, messages = programs._run_command(["--version"], folder_of_traps, 60.0)
    assert (code, messages.split()[0]) == (0, "advisor")
    assert not (folder_of_traps / "executed").exists()


def test_python_m_advisor_as_a_person_types_it(folder_of_traps: Path) -> None:
    command = [sys.executable, "-m", "advisor", "--version"]
    result = subprocess.run(
        command, cwd=folder_of_traps, capture_output=True, text=True, check=False
    )
    assert result.stdout.startswith("advisor ")
    assert not (folder_of_traps / "executed").exists()


def test_advisor_starts_without_the_current_folder_in_the_path() -> None:
    without = [
        f"{file.relative_to(ROOT)}:{number}"
        for folder in ("advisor", "rules", "dashboard", "sample_workloads")
        for file in (ROOT / folder).rglob("*.py")
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1)
        if re.search(r'"-m", ?"advisor', line) and '"-P"' not in line
    ]
    assert without == []
