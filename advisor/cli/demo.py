"""``advisor demo``: analysis of a real recording, and what its authors' fix saved."""

from __future__ import annotations

import os
import shlex
import sys
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from advisor.cli import options as o
from advisor.cli import output as out
from advisor.cli.analyze import Top, analyze_paths_in_full, deliver
from advisor.core import text as t
from advisor.core.errors import AdvisorError, install_command
from advisor.core.files import scratch_folder
from advisor.render.formats import REPORTS

if TYPE_CHECKING:
    from advisor.compare.comparison import Comparison
    from advisor.core.finding import Impact

SOURCE = "A ResNet's training on one GPU (a recording of github.com/pytorch/kineto)"
CHANGE = "num_workers=0 → 4"


def command(
    record: Annotated[
        bool,
        typer.Option(
            "--record", help="Record the training of a small CNN here instead (needs torch)."
        ),
    ] = False,
    folder: Annotated[
        Path | None,
        typer.Option("--folder", metavar="DIR", help="With --record: keep the trace there."),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="With --record: cpu or cuda; default: cuda if present."),
    ] = None,
    steps: Annotated[
        int, typer.Option(metavar="N", min=1, max=1000, help="With --record: steps to record.")
    ] = 8,
    format_name: Annotated[
        str, typer.Option("--format", metavar="FORMAT", help=out.format_names(REPORTS))
    ] = "terminal",
    brief: o.Brief = False,
    details: Annotated[bool, o.details_option(o.ALL_DETAILS)] = False,
    top: Top = None,
) -> None:
    """Analyze a real recording of a slow training run, and compare the advice with the fix."""
    if not record:
        if folder is not None or device is not None:
            raise AdvisorError("--folder and --device need --record")
        _show_recording(format_name, brief=brief, details=details, top=top)
        return
    if find_spec("torch") is None:
        raise AdvisorError(
            f"--record trains a small network and needs PyTorch: {install_command('torch')}"
        )
    with ExitStack() as stack:
        if folder is None:
            folder = stack.enter_context(scratch_folder())
        trace = _record_trace(folder, device, steps)
        _analyse(trace, format_name, brief=brief, details=details, top=top)


def _show_recording(format_name: str, **shown_parts: Any) -> None:
    """Analyse the recording from before the fix. On a terminal, also show what the fix saved."""
    from advisor.advise.engine import Options, analyze_in_full
    from advisor.cli.output import Progress
    from advisor.compare.compare import compare_examined

    folder = Path(__file__).parents[1] / "sample_workloads" / "recordings"
    paths = [folder / f"loader_{when}.json.gz" for when in ("before", "after")]
    with Progress() as progress:
        progress.show("analyzing")
        before = analyze_in_full([str(paths[0])], Options())
        is_terminal = format_name == "terminal"
        after = analyze_in_full([str(paths[1])], Options()) if is_terminal else None
    if after is None:
        deliver(before.report, REPORTS.renderer(format_name), analysis=before.main, **shown_parts)
        return
    shown_path = min(str(paths[0]), os.path.relpath(paths[0]), key=len)
    out.show(f"{SOURCE}:\n$ advisor analyze {shlex.quote(shown_path)}\n\n")
    deliver(before.report, REPORTS.renderer(format_name), **shown_parts)
    predicted = before.report.findings[0].impact
    out.show(
        _describe_outcome(predicted, compare_examined(before, after), after.main.steps.host_ns)
    )
    sys.stdout.flush()


def _describe_outcome(
    predicted: Impact | None, comparison: Comparison, host_ns: float | None
) -> str:
    """Describe what the authors' fix saved, next to the prediction of the first finding.
    ``host_ns``: the step after the fix by the host's marks; the GPU's steps end earlier."""
    steps = comparison.steps
    if steps.before is None or steps.after is None or predicted is None or host_ns is None:
        return "\nThe recording from after the change cannot be compared with this one.\n"
    before, after = steps.before.mean_ns, steps.after.mean_ns
    durations = [t.format_duration(ns) for ns in (before, host_ns, after)]
    range_ = t.format_range(predicted.low_ns or 0, predicted.high_ns or 0)
    gain = f"{t.format_duration(predicted.gain_ns)} less per step ({range_})"
    return (
        f"\nThen its authors set {CHANGE} and recorded again:\n"
        f"  predicted  {gain}, with 2 or 4 workers\n"
        f"  measured   {t.format_range(before - host_ns, before - after)} less: "
        f"{durations[0]} → {durations[1]} on the host, {durations[2]} on the GPU\n"
    )


def _record_trace(folder: Path, device: str | None, steps: int) -> Path:
    """Record the small CNN of the sample workloads, and return the path of the trace."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else the profiler logs its stages to stderr
    from advisor.cli.output import Progress
    from advisor.sample_workloads import Setup
    from advisor.sample_workloads.running import record

    run = Setup(device=_choose_device(device))
    try:
        with Progress() as progress:
            progress.show(
                f"recording {t.count_noun(steps, 'step')} of a small CNN on the {run.device}"
            )
            return record("simple_cnn", run, folder, steps=steps, memory=False)[0]
    except OSError as error:
        raise AdvisorError(f"cannot write to {folder}: {error.strerror or error}") from None


def _choose_device(device: str | None) -> str:
    """Return the device to record on. Raises AdvisorError if it is not available."""
    from advisor.sample_workloads.running import default_device

    best = default_device()
    if device not in (None, "cpu", best):
        raise AdvisorError(f"--device {device}: not usable here; choose cpu or leave it out")
    return device or best


def _analyse(trace: Path, format_name: str, **shown_parts: Any) -> None:
    from advisor.advise.engine import Options

    report = analyze_paths_in_full([str(trace)], Options(), True).report
    if format_name == "terminal":
        out.show(f"$ advisor analyze {trace}\n\n")
    deliver(report, REPORTS.renderer(format_name), **shown_parts)
    sys.stdout.flush()
