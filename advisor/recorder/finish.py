"""The lines at the end: where the run is, and its first finding, worked out in another process."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path

from advisor.core.errors import AdvisorError

SECONDS = 60.0
"""An analysis that takes longer is left to the user."""
WIDTH = 80
NAME = "advisor: "
_INJECTED = str(Path(__file__).parent / "inject")
"""The folder that ``advisor record`` puts on PYTHONPATH."""


def print_message(*paragraphs: str) -> None:
    """Print on stderr (stdout is the training program's), at 80 columns, as one piece."""
    lines: list[str] = []
    for text in paragraphs:
        lines += textwrap.wrap(
            text,
            WIDTH - len(NAME),
            break_long_words=False,
            break_on_hyphens=False,
        )
    text = "\n".join(f"{' ' * len(NAME) if i else NAME}{line}" for i, line in enumerate(lines))
    try:
        print(text, file=sys.stderr, flush=True)
    except (OSError, ValueError, AttributeError):  # closed, or None under pythonw
        return


def print_result(run: Path, *, analyse: bool = True) -> None:
    """Say where a run is, and what was found first in it."""
    shown = _shown(run)
    sentences = [f"recorded in {shown}"]
    result = summarise_findings(run) if analyse else None
    if result:
        sentences += result
    sentences.append(f"More: advisor analyze {shlex.quote(shown)}")
    print_message(*sentences)


def summarise_findings(run: Path) -> list[str] | None:
    """Sentences about what was found, the most important first; ``None``: it is unknown."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("ADVISOR")}
    env["ADVISOR"] = "0"
    paths = env.get("PYTHONPATH", "").split(os.pathsep)
    env["PYTHONPATH"] = os.pathsep.join(p for p in paths if p != _INJECTED)
    command = [sys.executable, "-P", "-m", "advisor", "analyze", str(run), "--format", "json"]
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
        return _outcome(done.stdout)
    except (OSError, subprocess.SubprocessError, AdvisorError):
        return None


def _outcome(text: bytes) -> list[str]:
    from advisor.core import labels
    from advisor.core import text as t
    from advisor.core.report import Report

    report = Report.from_json(text)
    sentences = []
    if report.recorded is not None:
        step = "" if report.step is None else f", {t.format_duration(report.step.ns)} each (median)"
        count = report.recorded.steps
        kind = "inference " if report.recorded.inference else ""
        sentences.append(f"{t.format_count(count)} {kind}step{'' if count == 1 else 's'}{step}")
        if report.recorded.ended == "disk":
            sentences.append("the disk was full: later steps are not recorded")
    if report.crashes:
        sentences.append(t.describe_crashes(report.crashes))
    for finding in (*report.findings, *report.risks):
        return [*sentences, f"First finding: {labels.clean(finding.title)}"]
    if report.crashes:
        return sentences
    return [*sentences, labels.clean(report.verdict)]


def _shown(run: Path) -> str:
    try:
        return str(run.relative_to(Path.cwd()))
    except (ValueError, OSError):
        return str(run)


def with_injected(paths: str) -> str:
    """A PYTHONPATH with the folder in front that makes processes begin to record."""
    return os.pathsep.join([_INJECTED, *([paths] if paths else [])])
