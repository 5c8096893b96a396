"""Jobs of many ranks in a session: their report, saved or made now; the keys of their ranks."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from advisor.advise.engine import Options
from advisor.advise.ranks.job import Done, is_many, study
from advisor.advise.ranks.task import Wanted
from advisor.core.saved import read_saved
from advisor.measure.ranks.job_report import MAX_JSON, SCHEMA, JobReport
from advisor.read.remote.urls import is_url

_KEY = re.compile(r"(\d{1,4})\.(\d{1,6})")


def report_of(path: str, options: Options, told: Callable[[str], object]) -> JobReport | None:
    """The report of a job: from a file that holds one, or of a folder of many ranks. ``None``: it
    is a trace or a run of few ranks, or a URL: nothing is fetched. ``told``: what is being done.

    Raises AdvisorError: no rank can be read; the file holds a damaged one.
    """
    saved = read_saved(path, JobReport, SCHEMA, MAX_JSON)
    if saved is not None:
        return saved
    if options.rank is not None or is_url(path) or not _is_folder(path):
        return None
    if not is_many([path]):
        return None

    def say(done: Done) -> None:
        told(f"measuring: {done.ranks:,} of {done.total:,} ranks")

    wanted = Wanted(
        steps=options.steps,
        step_ranges=options.read.step_ranges,
        window=options.window,
        max_bytes=options.read.max_bytes,
        rules_folder=None if options.rules_folder is None else str(options.rules_folder.resolve()),
    )
    return study([path], wanted=wanted, told=say)


def key_of(job: str, place: int) -> str:
    """The key of an entry that is a rank of a job: ``0.7`` is the eighth row of entry 0."""
    return f"{job}.{place}"


def split(key: str) -> tuple[str, int] | None:
    """The job and the row of such a key; ``None``: it is none."""
    found = _KEY.fullmatch(key)
    return (found[1], int(found[2])) if found else None


def _is_folder(path: str) -> bool:
    return "\0" not in path and Path(path).is_dir()
