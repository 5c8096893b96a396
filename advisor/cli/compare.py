"""``advisor compare``: two runs side by side, and a gate for continuous integration."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from advisor.cli import output as out
from advisor.errors import AdvisorError

if TYPE_CHECKING:
    from advisor.compare import Comparison

Format = Literal["terminal", "json", "markdown"]


def command(
    before: Annotated[
        str, typer.Argument(metavar="BEFORE", help="A trace, a folder of one run, or a report's.")
    ],
    after: Annotated[str, typer.Argument(metavar="AFTER", help="The same after the change.")],
    form: Annotated[
        Format | None,
        typer.Option("--format", help="Default: by the suffix of --output, else terminal."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Write to a file."),
    ] = None,
    fail_if_slower: Annotated[
        str | None,
        typer.Option(
            metavar="SHARE",
            help="Exit with 1 when steps are surely slower by more than this, such as 5%.",
        ),
    ] = None,
    rank: Annotated[
        int | None, typer.Option(metavar="N", min=0, help="Compare this rank of both.")
    ] = None,
    window: Annotated[
        int | None, typer.Option(metavar="N", min=0, help="Compare this window of both.")
    ] = None,
    redact: Annotated[
        bool, typer.Option(help="Leave out credentials, users, hosts and folders.")
    ] = False,
    progress: Annotated[
        bool, typer.Option("--progress/--no-progress", help="Progress on stderr, on a terminal.")
    ] = True,
) -> None:
    """What became faster or slower from one run to another, and what became of the findings."""
    bound = parse_share(fail_if_slower)
    wanted = _format(form, output)
    if output is not None:
        out.check(output, [before, after])
    if before == after == "-":
        raise AdvisorError("only one of the two can come from standard input")
    comparison = _compare(before, after, rank, window, progress)
    _deliver(comparison, wanted, output, redact=redact)
    if bound is not None and is_slower(comparison, bound):
        raise typer.Exit(1)


def _format(form: Format | None, output: Path | None) -> Format:
    chosen = out.choose_format(form, output)
    if chosen not in ("terminal", "json", "markdown"):
        raise AdvisorError(f"a comparison cannot be written as {chosen}")
    return chosen


def _compare(
    before: str, after: str, rank: int | None, window: int | None, progress: bool
) -> Comparison:
    from advisor.advice.engine import Options, examine
    from advisor.cli.progress import Progress
    from advisor.compare import compare_examined
    from advisor.ingest import ReadOptions, open_run

    with Progress(progress) as shown:
        options = Options(rank=rank, window=window, read=ReadOptions(progress=shown.reading))
        found = []
        for path in (before, after):
            run = open_run(path, options.read, rank=rank, window=options.which)
            shown.say("measuring")
            found.append(examine(run, options))
        shown.say("comparing")
        return compare_examined(*found)


def _deliver(comparison: Comparison, form: Format, output: Path | None, *, redact: bool) -> None:
    inputs = [comparison.before.path, comparison.after.path]
    if redact:
        from advisor.redact import redact as redacted

        comparison = redacted(comparison)
    if output is not None:
        text = render(comparison, form, width=out.PIPED_WIDTH, colour=False)
        out.write(text, output, inputs)
        return
    width, colour = out.columns(sys.stdout), out.colourful(sys.stdout)
    out.show(render(comparison, form, width=width, colour=colour))


def render(comparison: Comparison, form: Format, *, width: int, colour: bool) -> str:
    """The comparison in one of the formats."""
    if form == "json":
        from advisor.report.json import harmless

        return harmless(comparison.to_json())
    if form == "markdown":
        from advisor.compare import markdown

        return markdown.render(comparison)
    from advisor.compare import terminal

    return terminal.render(comparison, width=width, colour=colour)


def is_slower(comparison: Comparison, bound: float) -> bool:
    """The whole interval of the difference lies above the bound.

    Raises AdvisorError when step times could not be compared: a gate that lets through what it
    did not measure is none.
    """
    steps = comparison.steps
    if steps.share_low is None:
        raise AdvisorError(f"--fail-if-slower: step times are not compared: {steps.reason}")
    return steps.share_low > bound


def parse_share(text: str | None) -> float | None:
    """``5%`` or ``0.05``; AdvisorError for anything else."""
    if text is None:
        return None
    match = re.fullmatch(r"(\d{1,6}(?:\.\d{1,6})?)\s*(%?)", text.strip())
    if match is None:
        raise AdvisorError(f"--fail-if-slower {text}: give a share such as 5%")
    if not match[2] and float(match[1]) >= 1:
        raise AdvisorError(f"--fail-if-slower {text}: did you mean {text.strip()}%?")
    return float(match[1]) / (100 if match[2] else 1)
