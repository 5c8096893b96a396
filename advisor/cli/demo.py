"""``advisor demo``: the main job on a training run recorded here and now."""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from advisor.cli import output as out
from advisor.cli.analyze import deliver, study
from advisor.core.errors import AdvisorError, install
from advisor.core.scratch import scratch
from advisor.render.formats import REPORTS


def command(
    folder: Annotated[
        Path | None,
        typer.Option("--folder", metavar="DIR", help="Keep the trace in this folder."),
    ] = None,
    device: Annotated[
        str | None, typer.Option(metavar="NAME", help="cpu or cuda; default: cuda where there is.")
    ] = None,
    steps: Annotated[int, typer.Option(metavar="N", min=1, max=1000, help="Steps to record.")] = 8,
    form: Annotated[str, typer.Option("--format", metavar=out.metavar(REPORTS))] = "terminal",
) -> None:
    """Record a small CNN's training loop, slow on purpose, and say why it is slow."""
    if find_spec("torch") is None:
        raise AdvisorError(
            f"the demo records a training run and needs PyTorch: {install('record')}"
        )
    with ExitStack() as stack:
        if folder is None:
            folder = stack.enter_context(scratch())
        trace = _record(folder, device, steps)
        _analyse(trace, form)


def _record(folder: Path, device: str | None, steps: int) -> Path:
    """Record the textbook CNN; the path of the trace."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else the profiler logs its stages to stderr
    from advisor.cli.output import Progress
    from advisor.sample_workloads import Setup
    from advisor.sample_workloads.running import record

    run = Setup(device=_usable(device))
    try:
        with Progress() as shown:
            shown.say(f"recording {steps} steps of a small CNN on the {run.device}")
            return record("simple_cnn", run, folder, steps=steps, memory=False)[0]
    except OSError as error:
        raise AdvisorError(f"{folder}: cannot be written: {error.strerror or error}") from None


def _usable(device: str | None) -> str:
    """The device to record on. Raises AdvisorError for one that is not here."""
    from advisor.sample_workloads.running import default_device

    best = default_device()
    if device not in (None, "cpu", best):
        raise AdvisorError(f"--device {device}: not usable here; choose cpu or leave it out")
    return device or best


def _analyse(trace: Path, form: str) -> None:
    from advisor.advise.engine import Options
    from advisor.cli.output import Progress

    with Progress() as shown:
        report = study([str(trace)], Options(), shown)
    if form == "terminal":
        out.show(f"$ advisor analyze {trace}\n\n")
    deliver(report, REPORTS.renderer(form))
    sys.stdout.flush()
