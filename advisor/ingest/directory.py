"""A path, or several, to a Run: finds traces, tells ranks and windows apart."""

from __future__ import annotations

import re
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import replace
from pathlib import Path

from advisor.errors import AdvisorError
from advisor.ingest.kineto import ReadOptions, read_trace, with_window
from advisor.trace import Run, Trace

_TRACE_NAME = re.compile(r"\.json(\.gz|\.zst|\.zstd)?$", re.IGNORECASE)
_RANK = re.compile(r"rank[-_ =]?(\d{1,6})", re.IGNORECASE)
MAX_FILES = 4096


def open_run(
    paths: str | Path | Sequence[str | Path],
    options: ReadOptions | None = None,
    *,
    rank: int | None = None,
    executor: Executor | None = None,
) -> Run:
    """Open a trace file, a directory of traces, or several of either, as one Run.

    A file's rank is the one in its ``distributedInfo``, else the number after ``rank`` in its
    name or folder, else -1. Files of one rank are its windows, in order of time; ones that
    overlap in time are an error, because two recordings of one rank cannot.
    ``rank`` keeps one rank only. ``executor`` reads files in parallel.
    """
    given = [paths] if isinstance(paths, str | Path) else list(paths)
    files = [file for path in given for file in _files(str(path))]
    if not files:
        raise AdvisorError("no trace given")
    problems: list[str] = []
    traces: list[Trace] = []
    if len(files) == 1:
        traces.append(read_trace(files[0], options))
    else:
        for trace in _read_all(files, options, executor):
            if isinstance(trace, str):
                problems.append(trace)
            else:
                traces.append(trace)
    if not traces:
        raise AdvisorError(
            f"{given[0]}: none of the {len(files)} files is a readable trace; first: {problems[0]}"
        )
    by_rank = _group(traces)
    if rank is not None:
        if rank not in by_rank:
            have = ", ".join(map(str, sorted(by_rank)))
            raise AdvisorError(f"{given[0]}: no trace of rank {rank} (ranks present: {have})")
        by_rank = {rank: by_rank[rank]}
    keyed = {}
    for number, windows in by_rank.items():
        for window, trace in enumerate(windows):
            shown = None if number < 0 else number
            keyed[number, window] = with_window(trace, shown, window)
    path = Path(given[0]) if len(given) == 1 else None
    return Run(traces=keyed, path=path, problems=tuple(problems))


def _read_all(
    files: list[str], options: ReadOptions | None, executor: Executor | None
) -> list[Trace | str]:
    if executor is None:
        return [_try_read(file, options) for file in files]
    plain = replace(options or ReadOptions(), progress=None, processes=1)
    return list(executor.map(_try_read, files, [plain] * len(files)))


def _try_read(file: str, options: ReadOptions | None) -> Trace | str:
    """A trace, or the line that says why it is none."""
    try:
        return read_trace(file, options)
    except AdvisorError as error:
        return str(error)


def _files(path: str) -> list[str]:
    """The trace files a path stands for. Raises AdvisorError for a directory without any."""
    if path == "-":
        return [path]
    try:
        is_directory = Path(path).is_dir()
    except (OSError, ValueError):
        is_directory = False
    if not is_directory:
        return [path]
    found = sorted(
        str(file) for file in Path(path).rglob("*") if _TRACE_NAME.search(file.name) and file.is_file()
    )  # fmt: skip
    if not found:
        raise AdvisorError(f"{path}: a directory without traces (*.json, *.json.gz, *.json.zst)")
    if len(found) > MAX_FILES:
        raise AdvisorError(f"{path}: {len(found)} traces; give a directory with fewer")
    return found


def _group(traces: list[Trace]) -> dict[int, list[Trace]]:
    by_rank: dict[int, list[Trace]] = {}
    for trace in traces:
        by_rank.setdefault(_rank(trace), []).append(trace)
    for number, windows in by_rank.items():
        windows.sort(key=lambda t: t.meta.start_ns)
        for before, after in zip(windows, windows[1:], strict=False):
            end = before.meta.start_ns + before.meta.end_ns
            if before.meta.clock == after.meta.clock == "unix" and after.meta.start_ns < end:
                who = "traces without a rank" if number < 0 else f"traces of rank {number}"
                raise AdvisorError(
                    f"{before.meta.path} and {after.meta.path}: two {who} that overlap in time; "
                    "give one of them, or put 'rank0', 'rank1' … in the file names"
                )
    return dict(sorted(by_rank.items()))


def _rank(trace: Trace) -> int:
    if trace.meta.rank is not None and trace.meta.rank >= 0:
        return trace.meta.rank
    for part in reversed(Path(trace.meta.path).parts):
        if match := _RANK.search(part):
            return int(match.group(1))
    return -1
