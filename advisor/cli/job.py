"""Jobs of many ranks for ``advisor analyze``: when it is one, and its report."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import typer

from advisor.cli import output as out
from advisor.core.errors import AdvisorError
from advisor.read.remote.urls import is_url

if TYPE_CHECKING:
    from advisor.advise.ranks.job import Done
    from advisor.advise.ranks.task import Wanted
    from advisor.cli.output import Progress
    from advisor.measure.ranks.job_report import JobReport

BAR = 24
"""Columns of the bar of progress."""


def is_job(
    paths: Sequence[str],
    *,
    workers: int | None,
    cluster: str | None,
    ranks: str | None,
    single: Sequence[str],
) -> bool:
    """Whether these places are measured rank by rank: asked for by an option, or because they hold
    more ranks than are held at once. ``single``: options that were given and are of one rank.

    Raises AdvisorError: both are asked for.
    """
    if workers is not None and cluster is not None:
        raise AdvisorError("--workers and --cluster: choose one; a cluster has its own workers")
    given = {"--workers": workers, "--cluster": cluster, "--ranks": ranks}
    asked = [name for name, value in given.items() if value is not None]
    if asked and single:
        raise AdvisorError(
            f"{single[0]} is of one rank and {asked[0]} of many; give the trace of that rank alone"
        )
    if asked and "-" in paths:
        raise AdvisorError(f"{asked[0]}: give files and folders, not standard input")
    if asked or single or not any(is_url(path) or _is_folder(path) for path in paths):
        return bool(asked)
    from advisor.advise.ranks.job import is_many

    return is_many(paths)


def report_job(
    paths: Sequence[str],
    *,
    workers: int | None,
    cluster: str | None,
    ranks: str | None,
    wanted: Wanted,
    progress: bool,
) -> JobReport:
    """Measure and diagnose, saying how far it is."""
    from advisor.advise.ranks.job import study
    from advisor.cli.output import Progress

    with Progress(progress) as shown:
        shown.say("looking for traces")
        announced = False

        def told(done: Done) -> None:
            nonlocal announced
            if done.dashboard and not announced:
                announced = True
                print(f"Dask's dashboard: {done.dashboard}", file=sys.stderr)
            say_done(shown, done)

        return study(
            paths, ranks=ranks or "", workers=workers, cluster=cluster, wanted=wanted, told=told
        )


def say_done(shown: Progress, done: Done) -> None:
    """How many ranks are done, as a bar."""
    if done.ranks == done.total:
        shown.say("comparing the ranks")
        return
    filled = BAR * done.ranks // max(1, done.total)
    text = f"[{'#' * filled}{'.' * (BAR - filled)}] {done.ranks:,} of {done.total:,} ranks"
    shown.say(f"{text}, {done.unread:,} not read" if done.unread else text)


def deliver_job(
    report: JobReport,
    form: str | None,
    output: Path | None,
    paths: Sequence[str],
    *,
    top: int | None,
    details: bool,
    brief: bool,
    redact: bool,
) -> None:
    """Show it, or write it to a file."""
    from advisor.render.formats import JOBS

    renderer = out.chosen(JOBS, form, output)
    if redact:
        from advisor.export.redact import redact as redacted

        report = redacted(report, {row.host for row in report.rows if row.host})
    local = [path for path in paths if not is_url(path)]
    out.deliver(renderer, report, output, local, top=top, details=details, brief=brief)


def exit_if_hit(report: JobReport, level: Literal["critical", "warning"] | None) -> None:
    """Leave with 1 where a finding is at least this severe."""
    severities = {"critical"} if level == "critical" else {"critical", "warning"}
    if level is not None and any(found.severity in severities for found in report.findings):
        raise typer.Exit(1)


def _is_folder(path: str) -> bool:
    return "\0" not in path and Path(path).is_dir()
