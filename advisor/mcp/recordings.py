"""List of the recordings below the folders that may be read."""

import os
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from advisor.core.errors import AdvisorError
from advisor.core.run_directory import MANIFEST, is_run, rank_folders
from advisor.mcp import answers
from advisor.mcp.answers import AllowedFolders, RecordingLine, Recordings
from advisor.measure.steps.run_steps import RunSummary
from advisor.read.reader import ReaderClaim
from advisor.read.registry import reader_of
from advisor.read.remote.urls import rank_in
from advisor.read.runs import wanted_traces
from advisor.read.source import ByteSource

MAX_SUMMARIZED_BYTES = 8 << 20
"""Maximum size of the records, without traces, that are read to summarise a run, in bytes."""


class _Candidate(NamedTuple):
    """A possible recording, judged by file names alone."""

    time_ns: int
    path: Path
    ranks: int | None = None


def list_recordings(allowed: AllowedFolders, folder: str, top: int) -> Recordings:
    """List runs, folders of ranks and files below a folder, or below all allowed folders, newest
    first. Leaves out links that lead outside, and names that cannot be shown as they are.
    Raises AdvisorError if the path is outside, or is not a folder."""
    roots = [allowed.inside(folder)] if folder else allowed.folders
    if not all(root.is_dir() for root in roots):
        raise AdvisorError(f"{folder}: not a folder below those that may be read")
    waiting, complete = _find_candidates(roots)
    waiting.sort()
    lines: list[RecordingLine] = []
    while waiting and len(lines) < min(top, answers.MAX_RECORDINGS):
        line = _build_line(allowed, waiting.pop())
        lines += [] if line is None else [line]
    return Recordings(
        recordings=sorted(lines, key=lambda line: -line["time_unix_ns"]),
        more_recordings=len(waiting),
        complete=complete,
        untrusted=answers.UNTRUSTED,
    )


def _find_candidates(roots: list[Path]) -> tuple[list[_Candidate], bool]:
    """Return all candidates, and whether the search was complete. Links are not followed."""
    runs: set[Path] = set()
    jobs: dict[Path, set[Path]] = defaultdict(set)
    files_below: dict[Path, set[Path]] = defaultdict(set)
    entries_left = answers.MAX_FOLDER_ENTRIES
    for root in roots:
        for folder_path, subfolders, names in os.walk(root):
            entries_left -= 1 + len(names)
            folder = Path(folder_path)
            if entries_left < 0:
                break
            if is_run(folder) and rank_folders(folder):
                runs.add(folder / MANIFEST)
                recordings = [folder / MANIFEST]
                subfolders.clear()
            else:
                subfolders[:] = [name for name in subfolders if not name.startswith(".")]
                recordings = [folder / name for name in wanted_traces(names)]
                for file in recordings:
                    jobs[_find_job_folder(file, root)].add(file)
            for parent in (folder, *folder.parents):
                files_below[parent].update(recordings)
    candidates = [_Candidate(_modified_ns(file), file.parent) for file in runs]
    for job, files in jobs.items():
        ranks = len({rank_in(str(file.relative_to(job))) for file in files})
        if ranks > 1 and files == files_below[job]:  # the folder holds nothing else
            candidates.append(_Candidate(max(map(_modified_ns, files)), job, ranks))
        else:
            candidates += [_Candidate(_modified_ns(file), file) for file in files]
    return candidates, entries_left >= 0


def _find_job_folder(file: Path, root: Path) -> Path:
    """Return the folder above the path component that names the rank, or the file if none does."""
    for part in (file, *file.parents):
        if part == root:
            break
        if rank_in(part.name) is not None:
            return part.parent
    return file


def _modified_ns(file: Path) -> int:
    try:
        return file.lstat().st_mtime_ns
    except OSError:
        return 0


def _detect_format(file: Path) -> str:
    """Return the name of a file's reader. Empty if no reader is sure, as for JSON settings.
    Raises AdvisorError."""
    source = ByteSource(str(file))
    reader = reader_of(source)
    return reader.name if reader.sniff(source.head(), source.path) is ReaderClaim.SURE else ""


def _build_line(allowed: AllowedFolders, candidate: _Candidate) -> RecordingLine | None:
    """Return a candidate's line, or ``None`` if it is outside, unknown in format or unprintable."""
    shown_path, summary = str(candidate.path), None
    if shown_path != answers.bound_name(shown_path, answers.LONGEST_PATH):
        return None
    try:
        real_path = allowed.path(shown_path)
        files = (
            [real_path]
            if real_path.is_file()
            else [Path(e.path) for e in answers.iterate_entries(real_path)]
        )
        sizes = {file: file.stat().st_size for file in files if file.is_file()}
        kind = "ranks" if candidate.ranks else "run" if real_path.is_dir() else ""
        kind = kind or _detect_format(real_path)
    except (AdvisorError, OSError):
        return None
    if not kind:
        return None
    records = sum(size for file, size in sizes.items() if file.suffix in (".json", ".jsonl"))
    if kind == "run" and records <= MAX_SUMMARIZED_BYTES:
        with suppress(AdvisorError):  # list it anyway: the error appears when it is read
            summary = RunSummary.read(shown_path)
    return RecordingLine(
        kind=kind,
        bytes=sum(sizes.values()),
        time_unix_ns=candidate.time_ns
        if summary is None
        else summary.started_unix_ns or candidate.time_ns,
        ranks=candidate.ranks if summary is None else summary.ranks,
        steps=None if summary is None else summary.steps,
        median_step_ns=None if summary is None or summary.step is None else summary.step.ns,
        from_trace={
            "path": shown_path,
            "command": "" if summary is None else answers.bound_name(summary.command),
        },
    )
