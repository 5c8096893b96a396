"""``advisor compare``: two runs side by side, and a gate for continuous integration."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from advisor.cli import options as o
from advisor.cli import output as out
from advisor.cli.analyze import RedactionNames
from advisor.core.errors import AdvisorError
from advisor.render.formats import COMPARISONS

if TYPE_CHECKING:
    from advisor.advise.options import Options
    from advisor.compare import Comparison


@o.with_options(
    "rank", "window", "steps", "max_size", "price", "prices", "paid_gpus", "recorded_gpu"
)
def command(
    before: Annotated[
        str,
        typer.Argument(
            metavar="BEFORE", help="A trace, a folder of one run, or a saved JSON report."
        ),
    ],
    after: Annotated[str, typer.Argument(metavar="AFTER", help="The same, after the change.")],
    format_name: Annotated[str | None, o.format_option(COMPARISONS)] = None,
    output: o.Output = None,
    fail_if_slower: Annotated[
        str | None,
        typer.Option(
            metavar="SHARE",
            help="Exit with 1 when the steps are certainly slower by more than this, such as 5%.",
        ),
    ] = None,
    remember: Annotated[
        bool,
        typer.Option(
            "--remember", help="Add the saving of the fix to your ledger: no code, no names."
        ),
    ] = False,
    *,
    options: o.Options,
    details: Annotated[
        bool, o.details_option("Show what is within noise, and how the interval was computed.")
    ] = False,
    redact: o.Redact = False,
    progress: o.Progress = True,
) -> None:
    """Show what became faster or slower between two runs, and which findings changed."""
    bound = parse_share(fail_if_slower)
    renderer = out.choose_renderer(COMPARISONS, format_name, output)
    if output is not None:
        out.check_output(output, [before, after])
    if before == after == "-":
        raise AdvisorError("only one of the two can come from standard input")
    redaction = RedactionNames(redact)
    comparison, names = _compare(before, after, options, progress, redaction)
    if remember:
        _append_prediction(comparison)
    inputs = [comparison.before.path, comparison.after.path]
    if names is not None:
        from advisor.export.redact import redact as redacted

        comparison = redacted(comparison, names)
    out.deliver(renderer, comparison, output, inputs, details=details)
    if bound is not None:
        _apply_bound(comparison, bound)


def _append_prediction(comparison: Comparison) -> None:
    """Record the prediction and its gain in the user's ledger. The runs do not change."""
    import time

    from advisor.compare.compare import append_prediction
    from advisor.core.labels import clean
    from advisor.replay.ledger import user_file

    file = user_file()
    if append_prediction(comparison, file, unix=int(time.time())):
        print(f"advisor: added the saving of the fix to {clean(str(file))}", file=sys.stderr)


def _compare(
    before: str, after: str, options: Options, progress: bool, redaction: RedactionNames
) -> tuple[Comparison, set[str] | None]:
    """Return the comparison, and the users and hosts to remove from it, or ``None``."""
    from advisor.advise.engine import analyze_in_full, open_ranks
    from advisor.cli.report import read_saved
    from advisor.compare import compare_examined

    saved = [read_saved(path) for path in (before, after)]
    if any(saved) and (options.rank is not None or options.window is not None):
        raise AdvisorError("--rank and --window need a trace: a saved report covers one of each")
    if any(saved) and (options.steps is not None or options.read.step_ranges is not None):
        raise AdvisorError("--steps: the steps of a saved report are fixed; give the trace")
    if any(saved) and options.prices is not None:
        raise AdvisorError(f"{o.PRICE_OPTIONS}: {o.SAVED_HAS_COST}")
    with out.Progress(progress) as progress_line:
        options = o.with_read_options(
            options, progress=progress_line.report_bytes, peek=redaction.peek
        )
        examined = []
        for path, report in zip((before, after), saved, strict=True):
            if report is not None:
                continue
            run = open_ranks(path, options)
            progress_line.show("measuring")
            examined.append(analyze_in_full(run, options))
        progress_line.show("comparing")
        names = redaction.collect(*(item.run for item in examined))
        if not any(saved):
            return compare_examined(*examined), names
        from advisor.compare.compare import compare_reports

        examined_reports = iter(examined)
        reports = [report or next(examined_reports).report for report in saved]
        saved_indices = [index for index, report in enumerate(saved) if report is not None]
        return compare_reports(reports[0], reports[1], (before, after), saved_indices), names


def _apply_bound(comparison: Comparison, bound: float) -> None:
    """Print on stderr whether the run is slower, and exit with 1 if it is. Raises AdvisorError if
    step times are not compared: a gate must not pass an unmeasured run."""
    from advisor.compare.comparison import Bounds
    from advisor.compare.comparison_text import HEADLINES
    from advisor.compare.gate import decide

    steps = comparison.steps
    if steps.difference_ns is None:
        raise AdvisorError(f"--fail-if-slower: step times are not compared: {steps.reason}")
    decision = decide(comparison, Bounds(slower=bound))
    answer = "slower" if decision.failed else HEADLINES[decision.answer].lower()
    level = f"{steps.level:.0%} confidence"
    code = f"exit code {int(decision.failed)}"
    print(f"{answer}: {decision.reasons[0]} ({level}); {code}", file=sys.stderr)
    if decision.failed:
        raise typer.Exit(1)


def parse_share(text: str | None, option: str = "--fail-if-slower") -> float | None:
    """Parse ``5%`` or ``0.05`` to a share. Raises AdvisorError for anything else."""
    if text is None:
        return None
    match = re.fullmatch(r"(\d{1,6}(?:\.\d{1,6})?)\s*(%?)", text.strip())
    if match is None:
        raise AdvisorError(f"{option} {text}: give a share such as 5%")
    if not match[2] and float(match[1]) >= 1:
        raise AdvisorError(f"{option} {text}: did you mean {text.strip()}%?")
    return float(match[1]) / (100 if match[2] else 1)
