"""``advisor workloads``: small programs, each slow on purpose, to run, record and learn from."""

from __future__ import annotations

import logging
import os
import sys
import textwrap
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from advisor.cli import output as out
from advisor.core import text as t
from advisor.core.errors import AdvisorError, install_command

if TYPE_CHECKING:
    from advisor.sample_workloads import Workload

app = typer.Typer(
    help="Run small programs, each slow on purpose, and their cures.", rich_markup_mode=None
)

Name = Annotated[str, typer.Argument(metavar="NAME", help="As in 'advisor workloads list'.")]


@app.callback(invoke_without_command=True)
def _workloads(ctx: typer.Context) -> None:
    if ctx.invoked_subcommand is None:
        list_workloads()


@app.command("list")
def list_workloads() -> None:
    """List all workloads and the findings they must produce."""
    from advisor.sample_workloads import catalogue

    width = out.find_report_width(sys.stdout)
    result = catalogue()
    column = max(map(len, result)) + 2
    lines = []
    for name, workload in result.items():
        description = textwrap.wrap(workload.title, width - column)
        description += textwrap.wrap(
            _describe_findings(workload), width - column, break_on_hyphens=False
        )
        lines.append(f"{name:<{column}}{description[0]}")
        lines += [" " * column + line for line in description[1:]]
    lines += ["", "Run and record one:  advisor workloads run NAME --variant slow|cured"]
    out.show("\n".join(lines) + "\n")


@app.command("show")
def show(name: Name) -> None:
    """Show what is slow in a workload, what cures it, and its source file."""
    from advisor.sample_workloads import HERE, find

    workload = find(name)
    file = HERE / f"{workload.file}.py"
    out.show(f"{workload.doc}\n\n{_describe_findings(workload)}\nSource: {file}\n")


@app.command("run")
def run(
    name: Name,
    variant: Annotated[
        Literal["slow", "cured"], typer.Option(help="With the bottleneck, or with its cure.")
    ] = "slow",
    device: Annotated[
        str | None, typer.Option(metavar="NAME", help="cpu or cuda; default: cuda if available.")
    ] = None,
    scale: Annotated[
        float | None,
        typer.Option(metavar="X", help="Size: 1 is for a large GPU; default: by the device."),
    ] = None,
    steps: Annotated[
        int | None, typer.Option(metavar="N", min=1, max=10_000, help="Steps to trace.")
    ] = None,
    seed: Annotated[int, typer.Option(metavar="N", help="Seed of weights and data.")] = 0,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="DIR", help="A new folder for the recording."),
    ] = None,
) -> None:
    """Run a workload and record it."""
    from advisor.sample_workloads import Setup, find

    workload = find(name)
    if find_spec("torch") is None:
        raise AdvisorError(
            f"workloads are PyTorch programs, and PyTorch is missing: {install_command('record')}"
        )
    folder = _find_free_folder(
        output or Path("runs", f"{name}-{variant}"), chosen=output is not None
    )
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else the profiler logs its stages to stderr
    logging.getLogger("torch").setLevel(logging.ERROR)  # these workloads are slow on purpose
    warnings.filterwarnings("ignore", message="This DataLoader will create")
    from advisor.cli.output import Progress
    from advisor.sample_workloads import running

    device = device or running.default_device()
    try:
        setup = Setup(
            variant=variant,
            device=device,
            scale=workload.default_scale(device) if scale is None else scale,
            seed=seed,
        )
        with Progress() as progress:
            progress.show(
                f"recording {t.count_noun(steps or workload.steps, 'step')} of {name}, {variant}"
            )
            written = running.record_run(name, setup, folder, steps=steps)
    except OSError as error:
        raise AdvisorError(f"cannot write to {folder}: {error.strerror or error}") from None
    except ValueError as error:
        raise AdvisorError(str(error)) from None
    size = sum(path.stat().st_size for path in written) / 1e6
    out.show(
        f"{name}, {variant}, on {setup.device}: {size:.1f} MB in {folder}\n"
        f"next: advisor analyze {folder}\n"
    )


def _describe_findings(workload: Workload) -> str:
    """Describe the findings that a workload must produce, in a line."""
    if not workload.finds:
        return "finds nothing: a healthy control"
    where = "" if workload.shown_on == "cpu" else " (on a GPU)"
    needs = f"; {workload.processes} processes" if workload.processes > 1 else ""
    return f"finds {' or '.join(workload.finds)}{where}{needs}"


def _find_free_folder(folder: Path, *, chosen: bool) -> Path:
    """Return this folder if new or empty, else a numbered sibling unless the user chose it."""

    def is_taken(path: Path) -> bool:
        return path.exists() and (not path.is_dir() or any(path.iterdir()))

    if not is_taken(folder):
        return folder
    if chosen:
        raise AdvisorError(f"--output {folder}: not empty; choose a new folder")
    number = 2
    while is_taken(folder.with_name(f"{folder.name}-{number}")):
        number += 1
    return folder.with_name(f"{folder.name}-{number}")
