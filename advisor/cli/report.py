"""``advisor report``: what was found, as a file to mail or as other tools read it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from advisor.cli import output as out
from advisor.cli import pricing
from advisor.cli.analyze import Told, deliver, examine_paths, parse_size
from advisor.cli.stepping import Steps, parse_steps, step_ranges
from advisor.errors import AdvisorError
from advisor.files import open_regular
from advisor.report.formats import REPORTS

if TYPE_CHECKING:
    from advisor.report import Report

MAX_REPORT = 16 << 20
"""Bytes of a saved report that is read back. They have some 100 KB; decoded, one that is written to
do harm takes forty times its size."""


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
    form: Annotated[
        str | None,
        typer.Option(
            "--format",
            metavar=out.metavar(REPORTS.package),
            help="Default: by the suffix of --output, else terminal.",
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write to a file.")
    ] = None,
    redact: Annotated[
        bool, typer.Option(help="Leave out credentials, users, hosts and folders.")
    ] = False,
    rank: Annotated[
        int | None, typer.Option(metavar="N", min=0, help="Analyse this rank only.")
    ] = None,
    window: Annotated[
        int | None, typer.Option(metavar="N", min=0, help="Which window of a rank.")
    ] = None,
    steps: Steps = None,
    max_size: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Stop at this uncompressed size (default 16G)."),
    ] = None,
    price: pricing.Price = None,
    prices: pricing.PriceTable = None,
    gpus: pricing.Gpus = None,
    progress: Annotated[
        bool, typer.Option("--progress/--no-progress", help="Progress on stderr, on a terminal.")
    ] = True,
) -> None:
    """Write a report: one HTML file, Markdown, SARIF for code scanning, GitHub annotations."""
    chosen, limit = parse_steps(steps), parse_size(max_size)
    paid = pricing.chosen(price, prices)
    wanted = out.chosen(REPORTS, form, output)
    for target in (html, output):
        if target is not None:
            out.check(target, paths)
    if html is not None and output is not None and html.absolute() == output.absolute():
        raise AdvisorError(f"--html and --output are the same file: {html}")

    from advisor.advice.engine import Options
    from advisor.cli.progress import Progress
    from advisor.ingest import ReadOptions
    from advisor.ingest.source import DEFAULT_LIMIT

    analysis = None
    told = Told(redact)
    saved = read_saved(paths[0]) if len(paths) == 1 else None
    if saved is not None and paid is not None:
        raise AdvisorError(f"{pricing.OPTIONS}: {pricing.SAVED}")
    if saved is not None:
        found, names = saved, told.of()
    else:
        with Progress(progress) as shown:
            read = ReadOptions(
                max_bytes=limit or DEFAULT_LIMIT,
                step_ranges=step_ranges(steps),
                progress=shown.reading,
                peek=told.peek,
            )
            options = Options(
                rank=rank, window=window, steps=chosen, read=read, prices=paid, gpus=gpus
            )
            examined = examine_paths(paths, options, shown)
        found, analysis = examined.report, examined.main
        names = told.of(examined.run)
    if html is not None:
        deliver(found, REPORTS.renderer("html"), html, analysis=analysis, redact=names)
    if html is None or output is not None or form is not None:
        deliver(found, wanted, output, analysis=analysis, redact=names)


def read_saved(path: str) -> Report | None:
    """A report that ``analyze --format json`` wrote; ``None``: it is something else."""
    if path == "-":
        return None
    try:
        with open_regular(path) as opened:
            head = opened.read(200)
            if b'"advisor.report/' not in head:
                return None
            text = head + opened.read(MAX_REPORT + 1)
    except (OSError, ValueError):
        return None  # the reader of traces says what is wrong with it
    if len(text) > MAX_REPORT:
        raise AdvisorError(f"{path}: a report larger than {MAX_REPORT >> 20} MiB; write it again")
    from advisor.report import Report

    try:
        return Report.from_json(text)
    except AdvisorError as error:
        raise AdvisorError(f"{path}: {error}") from None
