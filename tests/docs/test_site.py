"""The docs build as a site, strictly: every link and anchor leads somewhere."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    said = [line for line in done.stderr.splitlines() if line.startswith(("WARNING", "ERROR"))]
    assert (done.returncode, said) == (0, [])
    first = (tmp_path / "index.html").read_text(encoding="utf-8")
    assert "Your first report in two minutes" in first
    assert (tmp_path / "rules" / "single-process-loader" / "index.html").exists()
    assert (tmp_path / "glossary" / "index.html").exists()
