"""``advisor analyze``: traces to a report."""

from __future__ import annotations

import re
import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from advisor.cli import output as out
from advisor.errors import AdvisorError

if TYPE_CHECKING:
    from advisor.advice.engine import Examined, Options
    from advisor.analysis import Analysis
    from advisor.cli.progress import Progress
    from advisor.report import Report

FailOn = Literal["critical", "warning"]
_SIZES = {"": 1, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}


def command(
    paths: Annotated[
        list[str],
        typer.Argument(
            metavar="PATH",
            help="Trace files (.json, .json.gz, .json.zst), folders of them, or - for stdin.",
        ),
    ],
    form: Annotated[
        out.Format | None,
        typer.Option("--format", help="Default: by the suffix of --output, else terminal."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Write the report to a file."),
    ] = None,
    rank: Annotated[
        int | None, typer.Option(metavar="N", min=0, help="Analyse this rank only.")
    ] = None,
    window: Annotated[
        int | None,
        typer.Option(metavar="N", min=0, help="Which window of a rank that has several."),
    ] = None,
    steps: Annotated[
        str | None,
        typer.Option(metavar="A:B", help="Steps A up to, not including, B, counted from 0."),
    ] = None,
    top: Annotated[
        int | None,
        typer.Option(metavar="N", min=0, help="Show the N findings worth most (JSON has all)."),
    ] = None,
    rules: Annotated[
        Path | None, typer.Option(metavar="DIR", help="More rules: every *.py in this folder.")
    ] = None,
    fail_on: Annotated[
        FailOn | None,
        typer.Option(
            help="Exit with 1 when a finding is at least this severe: worth 5 % of the step "
            "(warning) or 20 % (critical)."
        ),
    ] = None,
    max_size: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Stop at this uncompressed size (default 16G)."),
    ] = None,
    redact: Annotated[
        bool,
        typer.Option(help="Leave out credentials, users, hosts and folders."),
    ] = False,
    progress: Annotated[
        bool, typer.Option("--progress/--no-progress", help="Progress on stderr, on a terminal.")
    ] = True,
) -> None:
    """Say what is slow in a PyTorch profiler trace, why, what to change, what it is worth."""
    chosen, limit = parse_steps(steps), parse_size(max_size)
    wanted = out.choose_format(form, output)
    if output is not None:
        out.check(output, paths)

    from advisor.advice.engine import Options
    from advisor.cli.progress import Progress
    from advisor.ingest import ReadOptions
    from advisor.ingest.source import DEFAULT_LIMIT

    with Progress(progress) as shown:
        options = Options(
            rank=rank,
            window=window,
            steps=chosen,
            rules_folder=rules,
            read=ReadOptions(max_bytes=limit or DEFAULT_LIMIT, progress=shown.reading),
        )
        examined = examine_paths(paths, options, shown)
    report = examined.report
    deliver(report, wanted, output, top=top, analysis=examined.main, redact=redact)
    if fail_on is not None and is_hit(report, fail_on):
        raise typer.Exit(1)


def study(paths: list[str], options: Options, shown: Progress) -> Report:
    """Read and analyse, saying which of the two is going on."""
    return examine_paths(paths, options, shown).report


def examine_paths(paths: list[str], options: Options, shown: Progress) -> Examined:
    """The same with the measurements behind the report."""
    from advisor.advice.engine import examine
    from advisor.ingest import open_run

    _let_interrupts_through()
    run = open_run(paths, options.read, rank=options.rank, window=options.which)
    shown.say("measuring")
    return examine(run, options)


def _let_interrupts_through() -> None:
    """Let Ctrl-C end a read from a pipe: polars, once imported, handles the signal such that
    system calls go on after it."""
    if hasattr(signal, "siginterrupt") and threading.current_thread() is threading.main_thread():
        signal.siginterrupt(signal.SIGINT, True)


def deliver(
    report: Report,
    form: out.Format,
    output: Path | None = None,
    *,
    top: int | None = None,
    analysis: Analysis | None = None,
    redact: bool = False,
) -> None:
    """Render a report and show it, or write it to a file. ``analysis``: for its timeline."""
    inputs = [item.path for item in report.inputs]
    if redact:
        from advisor.redact import redact as redacted

        report = redacted(report)
    if output is not None:
        text = render(report, form, width=out.PIPED_WIDTH, colour=False, top=top, analysis=analysis)
        out.write(text, output, inputs)
        return
    width, colour = out.columns(sys.stdout), out.colourful(sys.stdout)
    out.show(render(report, form, width=width, colour=colour, top=top, analysis=analysis))


def render(
    report: Report,
    form: out.Format,
    *,
    width: int,
    colour: bool,
    top: int | None,
    analysis: Analysis | None = None,
) -> str:
    """The report in one of the formats; only the renderer that is needed is imported."""
    if form == "json":
        from advisor.report import json

        return json.render(report)
    if form == "markdown":
        from advisor.report import markdown

        return markdown.render(report, top=top)
    if form == "html":
        from advisor.report import html

        return html.render(report, analysis)
    if form == "sarif":
        from advisor.report import sarif

        return sarif.render(report)
    if form == "github":
        from advisor.report import github

        return github.render(report)
    from advisor.report import terminal

    return terminal.render(report, width=width, colour=colour, top=top)


def is_hit(report: Report, level: FailOn) -> bool:
    """A finding or a risk is at least this severe. Symptoms of another finding do not count."""
    severities = {"critical"} if level == "critical" else {"critical", "warning"}
    causes = [finding for finding in report.findings if finding.folded_under is None]
    return any(finding.severity in severities for finding in (*causes, *report.risks))


def parse_steps(text: str | None) -> tuple[int | None, int | None] | None:
    """``A:B``, ``A:`` or ``:B`` to a half-open range; AdvisorError for anything else."""
    if text is None:
        return None
    match = re.fullmatch(r"(\d{0,9}):(\d{0,9})", text.strip())
    if match is None:
        raise AdvisorError(f"--steps {text}: give a range A:B of step numbers, such as 2:8 or 2:")
    first, last = (int(part) if part else None for part in match.groups())
    if last is not None and last <= (first or 0):
        raise AdvisorError(f"--steps {text}: that range is empty; B is not included")
    return first, last


def parse_size(text: str | None) -> int | None:
    """``16G``, ``500M`` or plain bytes (decimal units); AdvisorError for anything else."""
    if text is None:
        return None
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,6})?)\s*([KMGT]?)B?", text.strip().upper())
    size = int(float(match[1]) * _SIZES[match[2]]) if match is not None else 0
    if size <= 0:
        raise AdvisorError(f"--max-size {text}: give a size such as 500M or 32G")
    return size
