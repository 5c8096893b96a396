"""The line at the end: where the run is, and its first finding, worked out in another process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

SECONDS = 60.0
"""An analysis that takes longer is left to the user."""


def say(run: Path, *, analyse: bool = True) -> None:
    """Print the line on stderr: stdout is the training program's."""
    finding = first_finding(run) if analyse else None
    shown = _shown(run)
    text = f"recorded in {shown}"
    if finding:
        text += f"; {finding}"
    try:
        print(f"advisor: {text} (advisor analyze {shown})", file=sys.stderr, flush=True)
    except (OSError, ValueError, AttributeError):  # closed, or None under pythonw
        return


def first_finding(run: Path) -> str | None:
    """Title of the finding worth most, or that there is none; ``None``: it could not be told."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("ADVISOR")}
    env["ADVISOR"] = "0"
    paths = env.get("PYTHONPATH", "").split(os.pathsep)
    env["PYTHONPATH"] = os.pathsep.join(p for p in paths if p != str(injected()))
    command = [sys.executable, "-m", "advisor", "analyze", str(run), "--format", "json"]
    try:
        done = subprocess.run(
            [*command, "--no-progress"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=SECONDS,
            check=False,
            env=env,
        )
        report = json.loads(done.stdout)
        return _headline(report)
    except (OSError, subprocess.SubprocessError, ValueError, KeyError, TypeError):
        return None


def _headline(report: dict[str, Any]) -> str:
    for section in ("findings", "risks"):
        for finding in report[section]:
            return f"first finding: {finding['title']}"
    return str(report["verdict"])


def _shown(run: Path) -> str:
    try:
        return str(run.relative_to(Path.cwd()))
    except (ValueError, OSError):
        return str(run)


def injected() -> Path:
    """The folder that ``advisor record`` puts on PYTHONPATH."""
    return Path(__file__).parent / "inject"
