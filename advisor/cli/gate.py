"""``advisor gate``: a run held against a baseline that was kept, for continuous integration."""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from advisor.cli import options as o
from advisor.cli import output as out
from advisor.cli import pricing
from advisor.cli.compare import parse_share
from advisor.cli.stepping import Steps, parse_steps, step_ranges
from advisor.core.errors import AdvisorError

if TYPE_CHECKING:
    from advisor.advise.engine import Options
    from advisor.compare.gate import Baseline, Decision


def command(
    paths: Annotated[
        list[str],
        typer.Argument(
            metavar="BASELINE RUN",
            help="A baseline that --save wrote (or a run to take it from), and a run: a trace, a "
            "folder of one run's traces, a recorded run. With --save: the run alone.",
        ),
    ],
    save: Annotated[
        Path | None,
        typer.Option("--save", metavar="FILE", help="Keep the run as a baseline in FILE."),
    ] = None,
    max_slower: Annotated[
        str,
        typer.Option(metavar="SHARE", help="Steps may be slower by this, such as 5%."),
    ] = "5%",
    max_memory: Annotated[
        str | None,
        typer.Option(metavar="SHARE", help="The memory peak may be higher by this."),
    ] = None,
    strict: Annotated[
        bool,
        typer.Option("--strict", help="Fail too when the steps are not shown to be within bounds."),
    ] = False,
    form: Annotated[str | None, o.form("advisor.render.gate")] = None,
    output: o.Output = None,
    rank: o.Rank = None,
    window: o.Window = None,
    steps: Steps = None,
    price: pricing.Price = None,
    prices: pricing.PriceTable = None,
    gpus: pricing.Gpus = None,
    progress: o.Progress = True,
) -> None:
    """Hold a run against a baseline. Exit code 0: not slower, or not shown to be; 1: a regression;
    2: the two cannot be held against each other.

    In GitHub Actions it writes annotations, and appends to the summary of the job.
    """
    from advisor.advise.engine import Options
    from advisor.read import ReadOptions

    paid = pricing.chosen(price, prices)
    options = Options(
        rank=rank,
        window=window,
        steps=parse_steps(steps),
        prices=paid,
        gpus=gpus,
        read=ReadOptions(step_ranges=step_ranges(steps)),
    )
    if save is not None:
        if len(paths) != 1:
            raise AdvisorError("--save keeps one run: advisor gate --save baseline.json RUN")
        out.check(save, paths)
        kept = _measure(paths[0], options, progress)
        out.write(kept.to_json().decode(), save, paths)
        print(f"{save}: {len(kept.durations_ns):,} steps kept", file=sys.stderr)
        return
    if len(paths) != 2:
        raise AdvisorError("give a baseline and a run: advisor gate baseline.json RUN")
    from advisor.compare.gate import Bounds, decide
    from advisor.render.formats import DECISIONS
    from advisor.render.renderer import Options as Written

    wanted = out.chosen(DECISIONS, form, output)
    if output is not None:
        out.check(output, paths)

    bounds = Bounds(
        slower=parse_share(max_slower, "--max-slower") or 0.0,
        memory=parse_share(max_memory, "--max-memory"),
        strict=strict,
    )
    before = _read(paths[0]) or _measure(paths[0], options, progress)
    decision = decide(before, _measure(paths[1], options, progress), bounds)
    width = out.PIPED_WIDTH if output is not None else out.columns(sys.stdout)
    text = wanted.render(decision, Written(width=width))
    if output is not None:
        out.write(text, output, paths)
    else:
        out.show(text)
    _tell_workflow(decision, shown=output is None and form == "github")
    if decision.failed:
        raise typer.Exit(1)


def _read(path: str) -> Baseline | None:
    """A baseline that ``--save`` wrote; ``None``: it is something else."""
    from advisor.compare.gate import Baseline
    from advisor.compare.gate.baseline import MAX_BYTES, SCHEMA
    from advisor.core.saved import read_saved

    return read_saved(path, Baseline, SCHEMA, MAX_BYTES)


def _measure(path: str, options: Options, progress: bool) -> Baseline:
    from advisor.cli.analyze import examine_paths
    from advisor.cli.progress import Progress
    from advisor.compare.gate import baseline_of

    with Progress(progress) as shown:
        read = dataclasses.replace(options.read, progress=shown.reading)
        return baseline_of(examine_paths([path], dataclasses.replace(options, read=read), shown))


def _tell_workflow(decision: Decision, *, shown: bool) -> None:
    """Annotations and the job's summary, where GitHub Actions runs this. A summary that cannot be
    written does not change what was decided."""
    from advisor.render.formats import DECISIONS

    if os.environ.get("GITHUB_ACTIONS") == "true" and not shown:
        # stdout may hold JSON for another program; Actions reads commands from stderr as well
        print(DECISIONS.render("github", decision), end="", file=sys.stderr)
    summary = os.environ.get("GITHUB_STEP_SUMMARY")
    if summary:
        try:
            with Path(summary).open("a", encoding="utf-8") as file:
                file.write(DECISIONS.render("markdown", decision))
        except OSError as error:
            why = error.strerror or str(error)
            print(f"advisor: the job's summary cannot be written ({why})", file=sys.stderr)
