"""``advisor try``: measure what fixes save, without changes to the program's files."""

from __future__ import annotations

import re
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from advisor.cli import options as o
from advisor.cli.output import check_output, choose_renderer, deliver
from advisor.core.errors import AdvisorError
from advisor.render.formats import TRIALS

if TYPE_CHECKING:
    from advisor.tune.rounds import TrialLimits

OPTIONS = ("--budget", "--steps", "--warmup", "--only", "--dry-run", "--remember", "--allow-write",
           "--out", "--output", "--format")  # fmt: skip
SETTINGS = {"ignore_unknown_options": True, "allow_interspersed_args": False}
"""Settings for typer, as for ``advisor record``: words after the program belong to it."""


def command(
    program: Annotated[
        list[str],
        typer.Argument(
            metavar="[--] PROGRAM [ARGS]... | RUN",
            help="train.py args…, -m module args…, or the folder of a recorded run.",
        ),
    ],
    budget: Annotated[str, typer.Option(metavar="TIME", help="Total time: 90s, 10m, 1h.")] = "10m",
    steps: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=6, max=100_000, help="Maximum number of timed steps per run."
        ),
    ] = None,
    warmup: Annotated[
        int, typer.Option(metavar="N", min=1, max=100_000, help="Steps before the timed ones.")
    ] = 10,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="KNOB[=SETTING]", help="Try only this knob; repeatable."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Record, and list what would be tried.")
    ] = False,
    allow_write: Annotated[
        list[str] | None,
        typer.Option(metavar="DIR", help="Allow the program to write to DIR; repeatable."),
    ] = None,
    remember: Annotated[
        bool, typer.Option("--remember", help="Add the outcome to your ledger: no code, no names.")
    ] = False,
    out: Annotated[
        str, typer.Option("--out", metavar="DIR", help="Run directory (a new one).")
    ] = "",
    format_name: Annotated[str | None, o.format_option(TRIALS)] = None,
    output: o.Output = None,
    progress: o.Progress = True,
) -> None:
    """Try the fixes that can be made while a program starts, and measure each.

    The program runs repeatedly for some steps, unchanged and with one setting changed, side by
    side. Its output goes to a scratch folder. Losses are compared. Ctrl-C keeps the results so far.
    """
    from advisor.cli.output import Progress
    from advisor.core.run_directory import is_run
    from advisor.recorder import launch
    from advisor.tune.knob import find_knob
    from advisor.tune.pipeline import TrialRequest, command_of, try_program

    limits = _make_limits(parse_time(budget), steps, warmup)
    if "--" not in sys.argv and (warning := launch.warn_misplaced(program, OPTIONS)):
        raise AdvisorError(f"{warning}, or -- before the program if it has this option")
    for name in only or []:
        find_knob(name.partition("=")[0])
    if output is not None:
        check_output(output, [])
    renderer = choose_renderer(TRIALS, format_name, output)
    recorded = Path(program[0]) if is_run(Path(program[0])) else None
    if recorded is not None and program[1:]:
        raise AdvisorError(f"options go before the run: advisor try {' '.join(program[1:])} …")
    words = command_of(recorded) if recorded is not None else launch.command_line(program)
    request = TrialRequest(
        limits=limits,
        only=tuple(only or ()),
        dry=dry_run,
        remember=remember,
        allowed=tuple(str(Path(name).resolve()) for name in allow_write or ()),
        out=out,
    )
    # CI or an agent's server ends us like this: report what is known, leave no orphans
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with Progress(progress) as progress_line:
        report, run = try_program(words, recorded, request, progress_line.show)
    deliver(renderer, report, output, details=True)
    print(f"wrote {run}; advisor dashboard {run} shows it", file=sys.stderr)
    if report.interrupted:
        raise typer.Exit(130)


def _make_limits(budget: float, steps: int | None, warmup: int) -> TrialLimits:
    """Return the limits of the trials. ``budget``: total seconds. ``steps``: timed steps."""
    from advisor.tune.rounds import TrialLimits

    limits = TrialLimits(budget=budget, warmup=warmup, timeout=max(60.0, budget / 2))
    return limits if steps is None else replace(limits, steps=steps, max_runs=steps)


def parse_time(text: str) -> float:
    """Parse ``90``, ``90s``, ``10m`` or ``1h`` to seconds. Raises AdvisorError otherwise."""
    match = re.fullmatch(r"(\d{1,6}(?:\.\d{1,3})?)\s*([smh]?)", text.strip())
    if match is None or float(match[1]) <= 0:
        raise AdvisorError(f"--budget {text}: give a time such as 90s, 10m or 1h")
    return float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[match[2]]
