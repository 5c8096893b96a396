"""``advisor analyze``: report of one trace or several."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from advisor.cli import options as o
from advisor.cli import output as out
from advisor.core import labels
from advisor.core.errors import AdvisorError
from advisor.render.formats import REPORTS

if TYPE_CHECKING:
    from advisor.advise.engine import AnalysisResult
    from advisor.advise.ranks.job import RanksDone
    from advisor.cli.options import Options
    from advisor.cli.output import Progress
    from advisor.core.report import Report
    from advisor.core.trace import Run
    from advisor.export.redact import NameMap
    from advisor.measure import Analysis
    from advisor.render.renderer import Renderer

FailOn = Literal["critical", "warning"]
BAR_WIDTH = 24
"""Width of the progress bar, characters."""
Paths = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="PATH",
        help="Trace files (.json, .json.gz, .json.zst), folders of them, URLs (s3://…), memory "
        "snapshots (.pickle), or - for stdin.",
    ),
]
CsvFolder = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="Also write the tables (findings, steps, kernels, operators, rooflines, idle) there "
        "as CSV.",
    ),
]
TableBy = Annotated[
    Literal["layer", "operator", "mesh"] | None,
    typer.Option(
        help="Show a table instead of the report: layers (modules), operators by shape with their "
        "rate, or the axes of the device mesh with their collectives."
    ),
]
Top = Annotated[
    int | None, typer.Option(metavar="N", min=1, help="Show N findings in full (JSON has all).")
]
FailOnSeverity = Annotated[
    FailOn | None,
    typer.Option(
        help="Exit with 1 when a finding is at least this severe: a gain of 5% of the step "
        "(warning) or 20% (critical)."
    ),
]


_MAX_PROBLEMS = 4
"""Maximum number of files without a trace to name."""


def _list_problems(run: Run, paths: list[str]) -> list[str]:
    """Return the problem of each file that is not a trace, among the given files and in folders of
    traces."""
    files = [(line, line.partition(": ")[0]) for line in run.problems]
    folder = run.recording is None
    return [line for line, file in files if file in paths or (folder and os.access(file, os.F_OK))]


@o.with_options(*o.ANALYSIS)
def command(
    paths: Paths = None,
    format_name: Annotated[str | None, o.format_option(REPORTS)] = None,
    output: o.Output = None,
    csv: CsvFolder = None,
    by: TableBy = None,
    top: Top = None,
    details: Annotated[bool, o.details_option(o.ALL_DETAILS)] = False,
    brief: o.Brief = False,
    fail_on: FailOnSeverity = None,
    redact: o.Redact = False,
    *,
    options: o.Options,
    progress: o.Progress = True,
) -> None:
    """Show what is slow in a PyTorch profiler trace, why, what to change, and what it saves.

    \b
      advisor analyze trace.json.gz      a trace; several: the ranks of one job
      advisor analyze runs/              the newest run that advisor record wrote
      advisor analyze snapshot.pickle    what uses the GPU's memory
    """
    if not paths:
        paths, options = _inputs_without_trace(options)
    if len({*paths}) < len(paths):
        duplicate = next(path for path in paths if paths.count(path) > 1)
        raise AdvisorError(f"{duplicate} is given twice; to compare two runs: advisor compare")
    paths = out.newest_run(paths)
    check_ranks(paths, options)
    renderer = choose_output(paths, format_name, output, csv, table=by is not None)
    names = RedactionNames(redact)
    examined = analyze_paths_in_full(paths, options, progress, names)
    report = examined.report
    redaction = names.collect(examined.run)
    left_out = _list_problems(examined.run, paths)
    for problem in left_out[:_MAX_PROBLEMS]:
        text = labels.clean(problem) if redaction is None else "a file"
        print(f"advisor: left out: {text}", file=sys.stderr)
    if hidden_count := len(left_out[_MAX_PROBLEMS:]):
        print(f"advisor: left out: {hidden_count} more (see --details)", file=sys.stderr)
    if csv is not None:
        write_tables(csv, examined, redact=redaction)
    if by is not None:
        show_table(report, by, top, redaction)
    else:
        deliver(
            report, renderer, output, top=top, details=details, brief=brief,
            analysis=examined.main, redact=redaction,
        )  # fmt: skip
    if fail_on is not None and reaches_severity(report, fail_on):
        raise typer.Exit(1)
    if (
        fail_on is not None
        and report.status == "limited"
        and any(i.truncated for i in report.inputs)
    ):
        raise AdvisorError(
            "--fail-on: the file is truncated, so there is no result; record it again"
        )


def choose_output(
    paths: list[str], format_name: str | None, output: Path | None, csv: Path | None, *, table: bool
) -> Renderer[Report]:
    """Return the renderer of the report. Raises AdvisorError for options that cannot be combined,
    and for an output that cannot be written."""
    renderer = out.choose_renderer(REPORTS, format_name, output)
    if table and (format_name not in (None, "terminal") or output is not None):
        raise AdvisorError("--by prints to the terminal only; drop --format and --output")
    if output is not None:
        out.check_output(output, paths)
    if csv is not None and csv.exists() and not csv.is_dir():
        raise AdvisorError(f"--csv {csv}: give a folder")
    return renderer


def show_table(
    report: Report,
    by: Literal["layer", "operator", "mesh"],
    top: int | None,
    redact: set[str] | None,
) -> None:
    """Print the table of layers, of operators by shape, or of the device mesh on the terminal."""
    from advisor.render.document import RenderOptions
    from advisor.render.documents import layers, ranks

    if redact is not None:
        from advisor.export.redact import redact_with

        report, _ = redact_with(report, redact)
    build = {"layer": layers.build, "mesh": ranks.build_mesh}.get(by, layers.build_operators)
    out.show_document(build(report, RenderOptions(top=top)))


def _inputs_without_trace(options: Options) -> tuple[list[str], Options]:
    """Return the inputs to analyse without a trace, and the options without these inputs: compile
    logs, else the snapshot, else kernel reports. Raises AdvisorError if there are none."""
    read = options.read
    if read.compile_log is not None:
        from advisor.read.formats.compile_log import log_files

        log_files(Path(read.compile_log))
        return [read.compile_log], o.with_read_options(options, compile_log=None)
    if read.memory_snapshot is not None:
        return [read.memory_snapshot], o.with_read_options(options, memory_snapshot=None)
    if read.kernel_profile is None:
        raise AdvisorError(
            "no PATH is given: advisor analyze PATH..., --memory-snapshot FILE or "
            "--kernel-profile FILE; 'advisor demo' shows a report"
        )
    from advisor.read.directory import profile_files

    return profile_files(read.kernel_profile), o.with_read_options(options, kernel_profile=None)


def check_ranks(paths: list[str], options: Options) -> None:
    """Raise AdvisorError for options about ranks that cannot be combined."""
    workers, cluster = options.workers, options.cluster
    if workers is not None and cluster is not None:
        raise AdvisorError("--workers and --cluster: choose one; a cluster has its own workers")
    job_options = {
        "--workers": workers,
        "--cluster": cluster,
        "--ranks": options.read.ranks or None,
    }
    given_names = [name for name, value in job_options.items() if value is not None]
    if given_names and "-" in paths:
        raise AdvisorError(f"{given_names[0]}: give files and folders, not standard input")


class RankProgress:
    """Callback that shows how many ranks of a job are done."""

    def __init__(self, progress: Progress) -> None:
        self._shown = progress
        self._announced = False

    def __call__(self, done: RanksDone) -> None:
        """Draw the progress bar. Print the address of Dask's dashboard once, if there is one."""
        if done.dashboard and not self._announced:
            self._announced = True
            print(f"Dask's dashboard: {done.dashboard}", file=sys.stderr)
        if done.ranks == done.total:
            self._shown.show("comparing the ranks")
            return
        filled = BAR_WIDTH * done.ranks // max(1, done.total)
        text = (
            f"[{'#' * filled}{'.' * (BAR_WIDTH - filled)}] {done.ranks:,} of {done.total:,} ranks"
        )
        self._shown.show(f"{text}, {done.unread:,} not read" if done.unread else text)


def write_tables(folder: Path, examined: AnalysisResult, *, redact: set[str] | None) -> None:
    """Write the tables of the reported rank into a folder, one CSV file each."""
    from advisor.export.csv_tables import build_tables

    report = examined.report
    result = build_tables(examined.main, report)
    if redact is not None:
        from advisor.export.redact import Redactor, names_in

        redactor = Redactor(redact | names_in(report.to_json()))
        result = {name: table.redact(redactor.text) for name, table in result.items()}
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        why = error.strerror or str(error)
        raise AdvisorError(f"--csv: cannot create {folder} ({why})") from None
    for name, table in result.items():
        out.write(table.text(), folder / f"{name}.csv", [item.path for item in report.inputs])
    print(f"{folder}: {', '.join(f'{name}.csv' for name in result)}", file=sys.stderr)


class RedactionNames:
    """Names of users and hosts in the input, to be removed from the output."""

    def __init__(self, wanted: bool) -> None:
        self._names: NameMap | None = None
        if wanted:
            from advisor.export.redact import NameMap

            self._names = NameMap()

    @property
    def peek(self) -> Callable[[bytes], None] | None:
        """Function that a reader calls with each block of bytes, or ``None`` without redaction."""
        return None if self._names is None else self._names.scan

    def collect(self, *runs: Run) -> set[str] | None:
        """Return all names found so far and in the folders of recorded runs, or ``None`` if nothing
        is redacted."""
        if self._names is None:
            return None
        for run in runs:
            if run.recording is not None:
                self._names.scan_run(run.recording.path)
        return self._names.found


def analyze_paths_in_full(
    paths: list[str], options: Options, progress: bool, names: RedactionNames | None = None
) -> AnalysisResult:
    """Read and analyse traces with a progress line on stderr. ``names`` collects users and hosts
    from the input."""
    with out.Progress(progress) as progress_line:
        peek = None if names is None else names.peek
        options = o.with_read_options(options, progress=progress_line.report_bytes, peek=peek)
        return analyze_with_progress(
            paths, replace(options, on_progress=RankProgress(progress_line)), progress_line
        )


def analyze_with_progress(paths: list[str], options: Options, progress: Progress) -> AnalysisResult:
    """Analyse traces with a progress line that the caller continues to use."""
    from advisor.advise.engine import analyze_in_full

    _allow_interrupts()
    return analyze_in_full(paths, options, lambda: progress.show("measuring"))


def _allow_interrupts() -> None:
    """Let Ctrl-C end a blocking read from a pipe. Once polars is imported, its signal handler
    restarts interrupted system calls."""
    if hasattr(signal, "siginterrupt") and threading.current_thread() is threading.main_thread():
        signal.siginterrupt(signal.SIGINT, True)


def deliver(
    report: Report,
    renderer: Renderer[Report],
    output: Path | None = None,
    *,
    top: int | None = None,
    details: bool = False,
    brief: bool = False,
    analysis: Analysis | None = None,
    redact: Iterable[str] | None = None,
) -> None:
    """Render a report and show it, or write it to a file. ``analysis`` provides its timeline.
    ``redact`` contains users and hosts to remove, along with other private text; ``None`` removes
    nothing."""
    inputs = [item.path for item in report.inputs]
    clean: Callable[[str], str] = str
    if redact is not None:
        from advisor.export.redact import redact_with

        report, redactor = redact_with(report, redact)
        clean = redactor.text
    out.deliver(
        renderer, report, output, inputs, top=top, details=details, brief=brief,
        analysis=analysis, clean=clean,
    )  # fmt: skip


def reaches_severity(report: Report, level: FailOn) -> bool:
    """Return whether a risk, or a finding that is not a symptom, is at least this severe."""
    severities = {"critical"} if level == "critical" else {"critical", "warning"}
    causes = [finding for finding in report.findings if finding.folded_under is None]
    return any(finding.severity in severities for finding in (*causes, *report.risks))
