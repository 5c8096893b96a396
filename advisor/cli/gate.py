"""``advisor gate``: comparison of a run with a baseline, for continuous integration."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from advisor.cli import options as o
from advisor.cli import output as out
from advisor.cli.compare import parse_share
from advisor.core.errors import AdvisorError
from advisor.core.report_file import has_schema
from advisor.core.text import count_noun
from advisor.render.formats import DECISIONS

if TYPE_CHECKING:
    from advisor.advise.options import Options
    from advisor.compare import Comparison
    from advisor.core.report import Report

OLD_BASELINE = "advisor.baseline/1"
Paths = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="BASELINE RUN",
        help="A baseline that --save wrote (or a run to take it from), and a run: a trace, a "
        "folder of one run's traces, a recorded run. With --save: one run or several.",
    ),
]
Save = Annotated[
    Path | None, typer.Option("--save", metavar="FILE", help="Save the runs as a baseline in FILE.")
]
MaxSlower = Annotated[
    str, typer.Option(metavar="SHARE", help="Maximum slowdown of the steps, such as 5%.")
]
MaxMemory = Annotated[
    str | None, typer.Option(metavar="SHARE", help="Maximum increase of the memory peak.")
]
Strict = Annotated[
    bool,
    typer.Option("--strict", help="Also fail if the steps are not shown to be within bounds."),
]


@o.with_options(
    "rank", "window", "steps", "max_size", "price", "prices", "paid_gpus", "recorded_gpu"
)
def command(
    paths: Paths = None,
    save: Save = None,
    max_slower: MaxSlower = "5%",
    max_memory: MaxMemory = None,
    strict: Strict = False,
    format_name: Annotated[str | None, o.format_option(DECISIONS)] = None,
    output: o.Output = None,
    details: Annotated[
        bool, o.details_option("Show how certain the change is, and the caveats.")
    ] = False,
    *,
    options: o.Options,
    progress: o.Progress = True,
) -> None:
    """Compare a run with a baseline. Exit code 0: not slower, or not shown to be; 1: a regression;
    2: the two cannot be compared.

    In GitHub Actions, it writes annotations and appends to the job summary.

    \b
      advisor gate --save baseline.json RUN...   save a baseline
      advisor gate baseline.json RUN             compare with it
    """
    paths = paths or []
    if save is not None:
        _save_baseline(save, paths, options, progress)
        return
    if len(paths) != 2:
        how = "first, advisor gate --save baseline.json RUN writes the baseline"
        if len(paths) == 1:
            raise AdvisorError(f"no RUN is given: advisor gate {paths[0]} RUN; {how}")
        count = f"{len(paths)} paths are given" if paths else "no BASELINE and RUN are given"
        raise AdvisorError(f"{count}: advisor gate baseline.json RUN; {how}")
    from advisor.compare.comparison import Bounds
    from advisor.compare.gate import compare_with_baseline

    renderer = out.choose_renderer(DECISIONS, format_name, output)
    if output is not None:
        out.check_output(output, paths)

    bounds = Bounds(
        slower=parse_share(max_slower, "--max-slower") or 0.0,
        memory=parse_share(max_memory, "--max-memory"),
        strict=strict,
    )
    try:
        before = _read_report(paths[0], options, progress)
    except AdvisorError as error:
        if "--save" in str(error):  # an earlier baseline, which may be overwritten
            raise
        how = "advisor gate --save baseline.json RUN writes one"
        reason = str(error).partition("; ")[0]
        if "without traceEvents" in reason:  # a reason for a trace, which a baseline is not
            reason = f"{paths[0]}: neither a saved baseline nor a trace"
        raise AdvisorError(f"no baseline: {reason}; {how}") from None
    after = _read_report(paths[1], options, progress)
    comparison = compare_with_baseline(before, after, bounds)
    out.deliver(renderer, comparison, output, paths, details=details)
    _write_to_workflow(comparison, is_shown=output is None and format_name == "github")
    if comparison.decision is not None and comparison.decision.failed:
        raise typer.Exit(1)


def _save_baseline(save: Path, paths: list[str], options: Options, progress: bool) -> None:
    """Save the runs as a baseline, and say on stderr how many steps of how many runs it has."""
    from advisor.compare.gate import build_baseline

    if not paths:
        raise AdvisorError(f"no RUN is given: advisor gate --save {save} RUN")
    out.check_output(save, paths)
    baseline = build_baseline([_analyse_run(path, options, progress) for path in paths], paths)
    out.write(baseline.to_json().decode(), save, paths)
    sources = [steps.source for steps in baseline.step_durations]
    source = "recorder" if "recorder" in sources else sources[0]
    kind = "unprofiled" if source == "recorder" else "profiled"
    count = sum(
        len(steps.durations_ns) for steps in baseline.step_durations if steps.source == source
    )
    print(
        f"saved {save}: {count_noun(count, f'{kind} step')} of {count_noun(len(paths), 'run')}",
        file=sys.stderr,
    )
    if len(paths) == 1:
        print(
            "advisor: one run does not show how far runs differ: identical programs failed "
            "18% of simulated gates; save three runs or more",
            file=sys.stderr,
        )


def _read_report(path: str, options: Options, progress: bool) -> Report:
    """Return the report of a ``--save`` baseline, of a saved report, or of a run to analyse."""
    from advisor.cli.report import read_saved

    if has_schema(path, OLD_BASELINE):
        raise AdvisorError(
            f"{path}: a baseline of an earlier version; save it again with advisor gate --save "
            f"{path} RUN"
        )
    return read_saved(path) or _analyse_run(path, options, progress)


def _analyse_run(path: str, options: Options, progress: bool) -> Report:
    from advisor.cli.analyze import analyze_paths_in_full

    return analyze_paths_in_full([path], options, progress).report


def _write_to_workflow(comparison: Comparison, *, is_shown: bool) -> None:
    """Write annotations and the job summary if GitHub Actions runs this. A failure to write the
    summary does not change the decision."""
    if os.environ.get("GITHUB_ACTIONS") == "true" and not is_shown:
        # stdout may contain JSON for another program; Actions also reads commands from stderr
        print(DECISIONS.render("github", comparison), end="", file=sys.stderr)
    summary = os.environ.get("GITHUB_STEP_SUMMARY")
    if summary:
        try:
            with Path(summary).open("a", encoding="utf-8") as file:
                file.write(DECISIONS.render("markdown", comparison))
        except OSError as error:
            why = error.strerror or str(error)
            print(f"advisor: cannot write the job summary ({why})", file=sys.stderr)
