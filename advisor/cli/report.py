"""``advisor report``: findings as a file to mail, or in a format of other tools."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from advisor.cli import options as o
from advisor.cli import output as out
from advisor.cli.analyze import RedactionNames, analyze_paths_in_full, deliver
from advisor.core.errors import AdvisorError
from advisor.render.formats import REPORTS

if TYPE_CHECKING:
    from advisor.core.report import Report

MAX_REPORT = 16 << 20
"""Maximum size of a saved report, bytes. The usual size is 100 KB. A malicious report takes forty
times its size when decoded."""


@o.with_options(
    "rank", "window", "steps", "max_size", "price", "prices", "paid_gpus", "recorded_gpu"
)
def command(
    paths: Annotated[
        list[str],
        typer.Argument(
            metavar="PATH", help="Traces or folders as for analyze, or one saved JSON report."
        ),
    ],
    html: Annotated[
        Path | None,
        typer.Option("--html", metavar="FILE", help="Write one self-contained HTML file."),
    ] = None,
    format_name: Annotated[str | None, o.format_option(REPORTS)] = None,
    output: o.Output = None,
    details: Annotated[bool, o.details_option(o.ALL_DETAILS)] = False,
    brief: o.Brief = False,
    redact: o.Redact = False,
    *,
    options: o.Options,
    progress: o.Progress = True,
) -> None:
    """Show a saved JSON report again, or that of a trace, or write it as a file.

    For a trace, advisor analyze shows the same and has more options."""
    renderer = out.choose_renderer(REPORTS, format_name, output)
    for target in (html, output):
        if target is not None:
            out.check_output(target, paths)
    if html is not None and output is not None and html.absolute() == output.absolute():
        raise AdvisorError(f"--html and --output are the same file: {html}")

    analysis = None
    redaction = RedactionNames(redact)
    saved = read_saved(paths[0]) if len(paths) == 1 else None
    if saved is not None and options.prices is not None:
        raise AdvisorError(f"{o.PRICE_OPTIONS}: {o.SAVED_HAS_COST}")
    if saved is not None:
        result, names = saved, redaction.collect()
    else:
        examined = analyze_paths_in_full(paths, options, progress, redaction)
        result, analysis = examined.report, examined.main
        names = redaction.collect(examined.run)
    if html is not None:
        deliver(result, REPORTS.renderer("html"), html, analysis=analysis, redact=names)
    if html is None or output is not None or format_name is not None:
        deliver(
            result, renderer, output, details=details, brief=brief, analysis=analysis, redact=names
        )


def read_saved(path: str) -> Report | None:
    """Read a report that ``analyze --format json`` wrote, or return ``None`` for other files."""
    from advisor.core import report_file
    from advisor.core.report import SCHEMA, Report

    return report_file.read_saved(path, Report, SCHEMA, MAX_REPORT)
