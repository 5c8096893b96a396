"""List of the recordings below the folders that may be read."""

import os
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from advisor.core.errors import AdvisorError
from advisor.core.run_directory import MANIFEST, is_run, rank_folders
from advisor.mcp import answers as b
from advisor.mcp.answers import AllowedFolders, RecordingLine, Recordings
from advisor.measure.steps.step_records import RunSummary
from advisor.read.reader import ReaderClaim
from advisor.read.registry import reader_of
from advisor.read.remote.urls import rank_in
from advisor.read.runs import wanted_traces
from advisor.read.source import ByteSource

MAX_SUMMARISED = 8 << 20
"""Largest size of a run's records that are read for its line, bytes, traces left out."""


class _Candidate(NamedTuple):
    """A possible recording, by names alone."""

    time_ns: int
    path: Path
    ranks: int | None = None


def list_recordings(allowed: AllowedFolders, folder: str, top: int) -> Recordings:
    """List runs, folders of ranks and files below a folder, or below all allowed ones; the newest
    first. Paths that a link leads outside, and names that cannot be shown as they are, are left
    out. Raises AdvisorError if the folder is outside, or is none."""
    roots = [allowed.inside(folder)] if folder else allowed.folders
    if not all(root.is_dir() for root in roots):
        raise AdvisorError(f"{folder}: not a folder below those that may be read")
    waiting, complete = _candidates(roots)
    waiting.sort()
    lines: list[RecordingLine] = []
    while waiting and len(lines) < min(top, b.MAX_RECORDINGS):
        line = _line(allowed, waiting.pop())
        lines += [] if line is None else [line]
    return Recordings(
        recordings=sorted(lines, key=lambda line: -line["time_unix_ns"]),
        more_recordings=len(waiting),
        complete=complete,
        untrusted=b.UNTRUSTED,
    )


def _candidates(roots: list[Path]) -> tuple[list[_Candidate], bool]:
    """Return all candidates, and whether all was searched. Folders behind links are not entered."""
    runs: set[Path] = set()
    jobs: dict[Path, set[Path]] = defaultdict(set)
    below: dict[Path, set[Path]] = defaultdict(set)
    left = b.MAX_ENTRIES
    for root in roots:
        for where, folders, names in os.walk(root):
            left -= 1 + len(names)
            here = Path(where)
            if left < 0:
                break
            if is_run(here) and rank_folders(here):
                runs.add(here / MANIFEST)
                own = [here / MANIFEST]
                folders.clear()
            else:
                folders[:] = [name for name in folders if not name.startswith(".")]
                own = [here / name for name in wanted_traces(names)]
                for file in own:
                    jobs[_job(file, root)].add(file)
            for parent in (here, *here.parents):
                below[parent].update(own)
    result = [_Candidate(_time(file), file.parent) for file in runs]
    for job, files in jobs.items():
        ranks = len({rank_in(str(file.relative_to(job))) for file in files})
        if ranks > 1 and files == below[job]:  # the folder can be given: there is nothing else
            result.append(_Candidate(max(map(_time, files)), job, ranks))
        else:
            result += [_Candidate(_time(file), file) for file in files]
    return result, left >= 0


def _job(file: Path, root: Path) -> Path:
    """Return the folder above the part of a path that has the rank; without one, the file."""
    for part in (file, *file.parents):
        if part == root:
            break
        if rank_in(part.name) is not None:
            return part.parent
    return file


def _time(file: Path) -> int:
    try:
        return file.lstat().st_mtime_ns
    except OSError:
        return 0


def _format(file: Path) -> str:
    """Return the name of a file's reader; empty if none is sure, as of settings in JSON. Raises
    AdvisorError."""
    source = ByteSource(str(file))
    reader = reader_of(source)
    return reader.name if reader.sniff(source.head(), source.path) is ReaderClaim.SURE else ""


def _line(allowed: AllowedFolders, item: _Candidate) -> RecordingLine | None:
    """Return a candidate's line; ``None`` if it is outside, of no known format or not printable."""
    given, summary = str(item.path), None
    if given != b.bound_name(given, b.LONGEST_PATH):
        return None
    try:
        real = allowed.path(given)
        files = [real] if real.is_file() else [Path(e.path) for e in b.iterate_entries(real)]
        sizes = {file: file.stat().st_size for file in files if file.is_file()}
        kind = "ranks" if item.ranks else "run" if real.is_dir() else ""
        kind = kind or _format(real)
    except (AdvisorError, OSError):
        return None
    if not kind:
        return None
    records = sum(size for file, size in sizes.items() if file.suffix in (".json", ".jsonl"))
    if kind == "run" and records <= MAX_SUMMARISED:
        with suppress(AdvisorError):  # listed all the same: reading it says what is wrong
            summary = RunSummary.read(given)
    return RecordingLine(
        kind=kind,
        bytes=sum(sizes.values()),
        time_unix_ns=item.time_ns if summary is None else summary.started_unix_ns or item.time_ns,
        ranks=item.ranks if summary is None else summary.ranks,
        steps=None if summary is None else summary.steps,
        median_step_ns=None if summary is None or summary.step is None else summary.step.ns,
        from_trace={
            "path": given,
            "command": "" if summary is None else b.bound_name(summary.command),
        },
    )
