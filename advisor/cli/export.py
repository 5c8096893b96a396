"""``advisor export``: the trace for a viewer, with findings as tracks, or without secrets."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from advisor.cli import options as o
from advisor.cli import output as out
from advisor.cli.analyze import RedactionNames, analyze_with_progress
from advisor.core import text as t
from advisor.core.errors import AdvisorError
from advisor.read.remote import urls

SUFFIXES = (".json", ".gz", ".zst")


@o.with_options("rank", "window", "steps", "max_size")
def command(
    path: Annotated[
        str, typer.Argument(metavar="PATH", help="A trace, or a folder of one run (see --rank).")
    ],
    perfetto: Annotated[
        Path,
        typer.Option(
            "--perfetto",
            "-o",
            "--output",
            metavar="FILE",
            help="The trace with our tracks, for ui.perfetto.dev or chrome://tracing; "
            "compressed if it ends in .gz or .zst.",
        ),
    ],
    redact: Annotated[
        bool, typer.Option(help="Leave out credentials, users, hosts, folders and the environment.")
    ] = False,
    tracks: Annotated[
        bool, typer.Option("--tracks/--no-tracks", help="Add steps, idle gaps and findings.")
    ] = True,
    *,
    options: o.Options,
    progress: o.Progress = True,
) -> None:
    """Write the trace again, with steps, idle gaps by cause and findings as extra tracks."""
    if path == "-":
        raise AdvisorError("-: export reads a trace twice; save it to a file first")
    if urls.is_url(path):
        raise AdvisorError(
            f"{urls.redact_url(path)}: export reads a trace twice; download it first"
        )
    if perfetto.suffix and perfetto.suffix not in SUFFIXES and not perfetto.exists():
        raise AdvisorError(f"--output {perfetto}: give a name that ends in {', '.join(SUFFIXES)}")
    out.check_output(perfetto, [path])

    from advisor.export import build_tracks, write_trace

    redaction = RedactionNames(redact)
    with out.Progress(progress) as progress_line:
        options = o.with_read_options(
            options, progress=progress_line.report_bytes, peek=redaction.peek
        )
        examined = analyze_with_progress([path], options, progress_line)
        a, report = examined.main, examined.report
        if a.record_only:
            raise AdvisorError(f"{path}: no window was profiled, so there is no trace to export")
        source = a.trace.meta.path
        out.check_output(perfetto, [source])
        names = redaction.collect(examined.run)
        clean: Callable[[str], str] = str
        if names is not None:
            from advisor.export.redact import Redactor

            # before texts are shortened: half a name would not be recognised
            clean = Redactor(names).text
        written = write_trace(
            a.trace,
            perfetto,
            (lambda head: build_tracks(a, report, head, clean)) if tracks else None,
            redacted=redact,
            names=names or (),
            limit=options.read.max_bytes,
            progress=lambda _, size: progress_line.show(f"writing: {size / 1e6:,.0f} MB read"),
        )
    lines = [f"{perfetto}: {t.count_noun(written.events, 'event')} and {written.added:,} of ours"]
    if written.lost:
        lines.append(f"not an event, left out: {t.count_noun(written.lost, 'element')}")
    if written.repaired:
        lines.append("bytes that are not valid UTF-8 were replaced")
    if written.truncated:
        lines.append("the trace is truncated, and so is the output")
    print("; ".join(lines), file=sys.stderr)
