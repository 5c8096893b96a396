"""``advisor try``: measure what fixes save, without a change to the program's files."""

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
"""Settings for typer, as of ``advisor record``: what follows the program belongs to it."""


def command(
    program: Annotated[
        list[str],
        typer.Argument(
            metavar="[--] PROGRAM [ARGS]... | RUN",
            help="train.py args…, -m module args…, or the folder of a recorded run.",
        ),
    ],
    budget: Annotated[
        str, typer.Option(metavar="TIME", help="For everything: 90s, 10m, 1h.")
    ] = "10m",
    steps: Annotated[
        int | None,
        typer.Option(metavar="N", min=6, max=100_000, help="Timed steps of a run, at most."),
    ] = None,
    warmup: Annotated[
        int, typer.Option(metavar="N", min=1, max=100_000, help="Steps before those.")
    ] = 10,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="KNOB[=SETTING]", help="Try this knob alone; repeatable."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Record, and say what would be tried.")
    ] = False,
    allow_write: Annotated[
        list[str] | None,
        typer.Option(metavar="DIR", help="Let the program write into DIR; repeatable."),
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

    The program runs again and again for some steps, as it is and with one setting changed, side by
    side. What it writes goes to a scratch folder. Losses are compared. Ctrl-C leaves what is known.
    """
    from advisor.cli.output import Progress
    from advisor.core.run_directory import is_run
    from advisor.recorder import launch
    from advisor.tune.knob import find_knob
    from advisor.tune.pipeline import TrialRequest, command_of, try_program

    limits = _limits(parse_time(budget), steps, warmup)
    if behind := launch.warn_misplaced(program, OPTIONS):
        print(f"advisor: {behind}", file=sys.stderr)
    for name in only or []:
        find_knob(name.partition("=")[0])
    if output is not None:
        check_output(output, [])
    renderer = choose_renderer(TRIALS, format_name, output)
    recorded = Path(program[0]) if is_run(Path(program[0])) else None
    if recorded is not None and program[1:]:
        raise AdvisorError(f"options stand before the run: advisor try {' '.join(program[1:])} …")
    words = command_of(recorded) if recorded is not None else launch.command_line(program)
    wanted = TrialRequest(
        limits=limits,
        only=tuple(only or ()),
        dry=dry_run,
        remember=remember,
        allowed=tuple(str(Path(name).resolve()) for name in allow_write or ()),
        out=out,
    )
    # what ends us in CI, or an agent's server: a report of what is known, and no orphans
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with Progress(progress) as shown:
        report, run = try_program(words, recorded, wanted, shown.show)
    deliver(renderer, report, output, details=True)
    print(f"advisor: {run}: advisor dashboard {run} shows it", file=sys.stderr)
    if report.interrupted:
        raise typer.Exit(130)


def _limits(budget: float, steps: int | None, warmup: int) -> TrialLimits:
    """Return the limits of the trials. ``budget``: seconds for all; ``steps``: timed ones."""
    from advisor.tune.rounds import TrialLimits

    limits = TrialLimits(budget=budget, warmup=warmup, timeout=max(60.0, budget / 2))
    return limits if steps is None else replace(limits, steps=steps, max_runs=steps)


def parse_time(text: str) -> float:
    """Parse ``90``, ``90s``, ``10m`` or ``1h`` to seconds. Raises AdvisorError otherwise."""
    match = re.fullmatch(r"(\d{1,6}(?:\.\d{1,3})?)\s*([smh]?)", text.strip())
    if match is None or float(match[1]) <= 0:
        raise AdvisorError(f"--budget {text}: give a time such as 90s, 10m or 1h")
    return float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[match[2]]
