"""Opening of paths and URLs as a Run: finds the traces, and assigns them to ranks and windows."""

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path
from typing import Literal

from advisor.core import text as t
from advisor.core.errors import AdvisorError
from advisor.core.run_directory import COMPILE_LOG, Recording, is_run, order_windows, read_recording
from advisor.core.trace import Run, Trace, blank_trace
from advisor.read.auxiliary_files import (
    join_snapshots,
    logs_in,
    merged_logs,
    ranks_in,
    with_logs,
    with_memory,
)
from advisor.read.formats.compile_log import read_logs
from advisor.read.formats.kernel_profiles.reader import KernelProfilerReader, layout_of, trace_of
from advisor.read.formats.kernel_profiles.triton_cache import (
    find_entries,
    kernels_in,
    read_triton_cache,
)
from advisor.read.reader import ReadOptions
from advisor.read.registry import (
    begins_like_trace,
    is_named_for,
    is_trace_name,
    read_trace,
    reader_of,
    with_window,
)
from advisor.read.remote.urls import RankFilter, RemoteFile, is_url, local_path, rank_in, redact_url
from advisor.read.runs import (
    SeveralRuns,
    named_like_traces,
    number_hosts_as_ranks,
    read_source,
    runs_in,
    wanted_traces,
    without_copies,
)
from advisor.read.source import SEE_FORMATS, ByteSource, kind_of

_WINDOW_NAME = re.compile(r"^trace_w(\d{1,6})\.json(?:\.gz|\.zst|\.zstd)?$")
ARCHIVES = {".zip": "zip", ".tar": "tar", ".tar.gz": "tar", ".tgz": "tar", ".tar.xz": "tar"}
"""Suffixes of archives, and the URL scheme of their members."""
_MAX_FILES = 4096
MAX_ELSEWHERE = 64
"""Maximum number of files from a URL that are kept at a time."""
SMALL_FILE_BYTES = 1 << 20
"""Maximum size of a file that is read to determine its format, in bytes."""
MAX_TRIED_MEMBERS = 8
"""Maximum number of members of an archive that are tried to find one to suggest."""
MIN_OVERLAP_NS = 1_000_000
"""Minimum overlap of two windows in ns: device times are converted to the host's clock with this
error."""


def open_run(
    paths: str | Path | Sequence[str | Path],
    options: ReadOptions | None = None,
    *,
    rank: int | None = None,
    window: int | Literal["first", "all"] = "all",
) -> Run:
    """Open a trace file, a directory of traces, or several of either, as one Run. Each can be a URL
    that fsspec knows (``s3://bucket/run/``, ``zip://*.json::https://…``), unless ``options.urls``
    is false; then each is the path of a file.

    A file's rank is the one in its ``distributedInfo``. Without one, it is the number after
    ``rank`` in the name of the file or of the nearest folder, else -1. One file may hold several
    ranks that were merged into it. Files of one rank are its windows, in order of time. Overlapping
    windows are an error, because recordings of one rank cannot overlap. A run directory of the
    recorder is opened with everything recorded, with or without traces. ``rank`` keeps only one
    rank, ``options.ranks`` several. ``window``: read only this window of each rank of a run
    directory, or the first readable one; the others are listed in ``Run.unread``.

    A single file must be a trace. Of several files, those that are not traces are left out and
    listed in ``Run.problems``, one line per file. Raises AdvisorError if a path does not exist,
    no trace is readable, a rank is missing, or windows overlap. A directory must have traces, of
    one run (SeveralRuns)."""
    given_paths = [paths] if isinstance(paths, str | Path) else list(paths)
    given_paths = [_find_only_run(_to_local_path(path, options)) for path in given_paths]
    if (
        len(given_paths) == 1
        and str(given_paths[0]) != "-"
        and "\0" not in str(given_paths[0])
        and is_run(given_paths[0])
    ):
        run = _open_recording(Path(given_paths[0]), options, rank, window)
        return with_memory(_with_recorded_logs(run, options), options)
    ranks = RankFilter(options.ranks) if options is not None and options.ranks else None
    files = _remove_duplicates(
        [file for path in given_paths for file in trace_files(path, len(given_paths) > 1)]
    )
    if not files:
        raise AdvisorError("no trace given")
    files = _select_files_of_ranks(files, range(rank, rank + 1) if rank is not None else ranks)
    traces, problems = _read_files(files, options, given_paths[0])
    traces = ranks_in(traces[0]) if len(traces) == 1 else number_hosts_as_ranks(traces)
    traces = with_logs(traces, _read_given_logs(options))
    traces, memory = join_snapshots(
        traces, {index: _rank_of(trace) for index, trace in enumerate(traces)}
    )
    by_rank = _keep_ranks(_group_by_rank(traces), rank, ranks, given_paths[0])
    traces_by_window = {}
    for rank_number, windows in by_rank.items():
        _refuse_overlap(rank_number, windows)
        for number, trace in enumerate(windows):
            known_rank = None if rank_number < 0 else rank_number
            traces_by_window[rank_number, number] = with_window(trace, known_rank, number)
    path = (
        Path(given_paths[0]) if len(given_paths) == 1 and not _is_remote(given_paths[0]) else None
    )
    snapshots = {
        rank_number: trace.meta.snapshot
        for rank_number, trace in memory.items()
        if trace.meta.snapshot is not None and rank_number in by_rank
    }
    problems += _describe_jobs(by_rank, given_paths[0])
    run = Run(traces=traces_by_window, path=path, problems=tuple(problems), snapshots=snapshots)
    return with_memory(run, options)


def _read_files(
    files: Sequence[str | RemoteFile], options: ReadOptions | None, path: str | Path
) -> tuple[list[Trace], list[str]]:
    """Read the files. Of several files, return a line for each that is not a trace. Raises
    AdvisorError if none is a trace. ``path``: path that the error names."""
    if len(files) == 1:
        return [_read_file(files[0], options)], []
    results = [_read_or_explain(file, options) for file in files]
    traces = [result for result in results if not isinstance(result, str)]
    problems = [result for result in results if isinstance(result, str)]
    if not traces:
        message = f"none of the {len(files)} files is a readable trace; first: {problems[0]}"
        raise AdvisorError(f"{_format_path(path)}: {message}")
    return traces, problems


def _keep_ranks(
    by_rank: dict[int, list[Trace]], rank: int | None, ranks: RankFilter | None, path: str | Path
) -> dict[int, list[Trace]]:
    """Return the windows of the requested ranks. Raises AdvisorError if there are none."""
    if rank is not None:
        if rank not in by_rank:
            present = _format_ranks(by_rank)
            advice = "; leave out --rank" * (len(by_rank) == 1)
            raise AdvisorError(f"{_format_path(path)}: no trace of rank {rank} ({present}){advice}")
        return {rank: by_rank[rank]}
    if ranks is None:
        return by_rank
    chosen_windows = {
        rank_number: windows for rank_number, windows in by_rank.items() if rank_number in ranks
    }
    if not chosen_windows:
        raise AdvisorError(f"--ranks {ranks.text}: no trace of these ({_format_ranks(by_rank)})")
    ranks.refuse_missing(by_rank)
    return chosen_windows


def _with_recorded_logs(run: Run, options: ReadOptions | None) -> Run:
    """Return a recorder's run with the logs next to its traces and the logs given as options."""
    results = _read_recorded_logs(run, options)
    logs = [result for result in results if not isinstance(result, str)]
    fields = merged_logs(logs) | merged_logs(_read_given_logs(options))
    return replace(
        run,
        traces={
            window: replace(trace, meta=replace(trace.meta, **fields))
            for window, trace in run.traces.items()
        },
        logs=fields,
        problems=(*run.problems, *(line for line in results if isinstance(line, str))),
    )


def _read_recorded_logs(run: Run, options: ReadOptions | None) -> list[Trace | str]:
    """Read the logs in a run directory, those kept by the recorder for the read ranks and those put
    next to them. An unreadable log yields a line of text instead."""
    ranks = run.recording.ranks.values() if run.recording is not None else ()
    folders = [Path(record.folder) for record in ranks]
    result = logs_in([*([] if run.path is None else [run.path]), *folders], options)
    for folder in folders:
        with suppress(AdvisorError):  # cut off in its first record
            if (file := folder / COMPILE_LOG).is_file():
                result.append(read_trace(str(file), options))
    return result


def profile_files(path: str) -> list[str]:
    """Return the files that ``--kernel-profile PATH`` stands for: the file, or the reports of a
    kernel profiler in a folder, found by their first bytes, and the folder if it is a Triton cache.
    Raises AdvisorError if there is none or the folder cannot be read."""
    folder = Path(path)
    if not folder.is_dir():
        return [path]
    result = []
    reader = KernelProfilerReader()
    try:
        for file in sorted(folder.iterdir())[:_MAX_FILES]:
            is_candidate = is_named_for(reader, file.name) or begins_like_trace(str(file))
            if (
                is_candidate
                and file.is_file()
                and layout_of(ByteSource(str(file)).head()) is not None
            ):
                result.append(str(file))
    except OSError as error:
        raise AdvisorError(f"{path}: cannot be read ({error.strerror or error})") from None
    if next(find_entries(path), None) is not None:
        result.append(path)
    if not result:
        raise AdvisorError(
            f"{path}: no report of a kernel profiler (.ncu-rep, .csv) in this folder, and no cache "
            "of Triton"
        )
    return result


def _read_given_logs(options: ReadOptions | None) -> list[Trace]:
    """Read the files given as ``ReadOptions.kernel_profile`` and ``compile_log``. Raises
    AdvisorError if one is of another kind."""
    if options is None:
        return []
    result = []
    if options.compile_log is not None:
        path = Path(options.compile_log)
        result.append(blank_trace(str(path), compilation=read_logs(path, options)))
    for file in [] if options.kernel_profile is None else profile_files(options.kernel_profile):
        trace = _read_file(file, replace(options, kernel_profile=None))
        if trace.meta.kernel_profiles is None:
            raise AdvisorError(
                f"--kernel-profile {trace.meta.path}: give a report of Nsight Compute or rocprof, "
                "or a cache of Triton"
            )
        result.append(trace)
    return result


def _open_recording(
    folder: Path,
    options: ReadOptions | None,
    rank: int | None,
    window: int | Literal["first", "all"],
) -> Run:
    """Open a run directory: the recorder's files, and the traces of its windows, by the numbers in
    their names. A window that cannot be read is reported and left out. A run without windows is a
    Run without traces. Raises AdvisorError if nothing was recorded, or nothing of this rank."""
    recording = read_recording(folder)
    if not recording.ranks:
        raise AdvisorError(f"{folder}: a run directory in which no process has recorded anything")
    if rank is not None:
        if rank not in recording.ranks:
            present = ", ".join(map(str, recording.ranks))
            raise AdvisorError(f"{folder}: nothing of rank {rank} (ranks present: {present})")
        recording.ranks = {rank: recording.ranks[rank]}
    unread = {
        (rank_number, int(match[1])): file
        for rank_number, record in recording.ranks.items()
        for file in _list_folder(Path(record.folder))
        if (match := _WINDOW_NAME.match(file.name)) is not None and file.is_file()
    }
    unread = dict(_order_windows(unread, recording))
    problems = list(recording.problems)
    traces_by_window: dict[tuple[int, int], Trace] = {}
    while batch := _next_windows(unread, traces_by_window, window):
        for window_key in batch:
            trace = _read_or_explain(str(unread.pop(window_key)), options)
            if isinstance(trace, str):
                problems.append(trace)
            else:
                traces_by_window[window_key] = with_window(trace, *window_key)
    return Run(
        traces=dict(sorted(traces_by_window.items())),
        path=folder,
        problems=tuple(problems),
        recording=recording,
        unread=tuple(unread),
    )


def _order_windows(
    files: Mapping[tuple[int, int], Path], recording: Recording
) -> Iterator[tuple[tuple[int, int], Path]]:
    """Yield the (rank, window) pairs with their files, in the order in which they are analysed."""
    for rank, record in sorted(recording.ranks.items()):
        windows = sorted(window for each, window in files if each == rank)
        for window in order_windows(record, windows):
            yield (rank, window), files[rank, window]


def _next_windows(
    unread: Iterable[tuple[int, int]],
    finished: Iterable[tuple[int, int]],
    window: int | Literal["first", "all"],
) -> list[tuple[int, int]]:
    """Return the (rank, window) pairs to read next, of ``unread`` in the order in which they are
    analysed. With ``first``, the second one of a rank is read only if the first one could not be
    read."""
    if window == "all":
        return list(unread)
    if window != "first":
        return [window_key for window_key in unread if window_key[1] == window]
    finished_ranks = {rank for rank, _ in finished}
    first_windows: dict[int, tuple[int, int]] = {}
    for window_key in unread:
        if window_key[0] not in finished_ranks:
            first_windows.setdefault(window_key[0], window_key)
    return list(first_windows.values())


def _list_folder(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError as error:
        raise AdvisorError(f"{folder}: cannot be read ({error.strerror or error})") from None


def _to_local_path(path: str | Path, options: ReadOptions | None) -> str | Path:
    """Return a path unchanged, and a URL as text. A local URL (``file://…``), or any URL if
    ``options.urls`` is false, is returned as a Path."""
    text = str(path)
    if isinstance(path, Path) or not is_url(text):
        return path
    local = text if options is not None and not options.urls else local_path(text)
    return text if local is None else Path(local)


def _is_remote(path: str | Path) -> bool:
    return isinstance(path, str) and is_url(path)


def _format_path(path: str | Path) -> str:
    return redact_url(path) if isinstance(path, str) else str(path)


def _format_ranks(numbers: Iterable[int]) -> str:
    """Format ranks for an error message. -1 is a rank whose number is not in its trace."""
    known = [str(number) for number in sorted(numbers)[:20] if number >= 0]
    return f"ranks present: {', '.join(known)}" if known else "no trace says its rank"


def _select_files_of_ranks(
    files: list[str | RemoteFile], ranks: RankFilter | range | None
) -> list[str | RemoteFile]:
    """Drop remote files whose names show another rank, so that they are not fetched. Raises
    AdvisorError if none is left, or if there are more than can be kept at a time."""
    kept_files = [
        file
        for file in files
        if isinstance(file, str) or ranks is None or file.rank is None or file.rank in ranks
    ]
    if sum(isinstance(file, RemoteFile) for file in kept_files) > MAX_ELSEWHERE:
        raise AdvisorError(
            f"{len(kept_files)} remote traces, more than {MAX_ELSEWHERE} to hold at once; measure "
            "them one by one (advisor analyze --workers N), or choose some, as with --ranks 0-7"
        )
    if not kept_files:
        present = ", ".join(str(file.rank) for file in files[:20] if isinstance(file, RemoteFile))
        raise AdvisorError(f"no trace of the ranks that were chosen (by the names: {present})")
    return kept_files


def _read_file(file: str | RemoteFile, options: ReadOptions | None) -> Trace:
    if isinstance(file, str):
        if Path(file).is_dir():  # only a Triton cache is given as a folder
            return trace_of(*read_triton_cache(file))
        kind = next((kind for end, kind in ARCHIVES.items() if file.lower().endswith(end)), None)
        if kind is None or not Path(file).is_file():
            return read_trace(file, options)
        file = _find_only_member(kind, file, options)
    return read_source(file, options or ReadOptions())


def _find_only_member(kind: str, archive: str, options: ReadOptions | None) -> RemoteFile:
    """Return the only trace in an archive. Raises AdvisorError if there is none or several."""
    from advisor.read.remote.archives import list_members, open_member

    members = {member.name: member for member in list_members(kind, archive)}
    compiled = _count_compiled_kernels(members)
    file_names = [name for name in members if "::" not in name]
    names = wanted_traces([name for name in file_names if name.rpartition("/")[0] not in compiled])
    if compiled and not names:
        raise AdvisorError(_describe_cache(kind, archive, compiled))
    names = names or (list(members) if len(members) == 1 else [])
    if len(names) == 1:
        url = f"{kind}://{names[0]}::{archive}"
        return RemoteFile(url=url, at=url, rank=rank_in(url), size=members[names[0]].size)
    description = (
        f"{archive}: {t.with_article(kind)} archive of {t.count_noun(len(members), 'file')}"
    )
    refused = []
    for name in names[:MAX_TRIED_MEMBERS]:  # suggest only a file that can be read
        url = f"{kind}://{name}::{archive}"
        result = _read_or_explain(
            RemoteFile(url=url, at=url, rank=None, size=members[name].size), options
        )
        if isinstance(result, str):
            refused.append(result.replace(url, name))
            continue
        ranks = {rank_in(f"{kind}://{other}::") for other in names}
        job = "" if None in ranks or len(ranks) < len(names) else f", or all: {kind}://::{archive}"
        advice = f"give one of them as {kind}://NAME::ARCHIVE, such as {url}"
        raise AdvisorError(f"{description}; {advice}{job}")
    if refused:
        raise AdvisorError(
            f"{description}, none of them a trace alone; the first in it, {refused[0]}"
        )
    kinds = []
    for name in islice(members, MAX_TRIED_MEMBERS):
        with open_member(kind, archive, name) as (stream, _):
            kinds.append(kind_of(stream.read(SMALL_FILE_BYTES), name))
    if kinds and (file_kind := kinds[0]) is not None:
        subject = "each is" if len(kinds) > 1 and {file_kind} == set(kinds) else "the first is"
        raise AdvisorError(
            f"{description}; {subject} {file_kind[0]}. {t.upper_first(file_kind[1] or SEE_FORMATS)}"
        )
    raise AdvisorError(
        f"{description}, none named like a trace; unpack it and give the file or folder"
    )


def _count_compiled_kernels(names: Iterable[str]) -> dict[str, int]:
    """Return the number of kernels that Triton compiled, by folder of an archive."""
    files_by_folder: dict[str, list[str]] = {}
    for name in names:
        folder, _, file = name.rpartition("/")
        files_by_folder.setdefault(folder, []).append(file)
    return {
        folder: len(kernels)
        for folder, names_in_folder in files_by_folder.items()
        if (kernels := kernels_in(names_in_folder))
    }


def _describe_cache(kind: str, archive: str, compiled: dict[str, int]) -> str:
    """Return a message that an archive holds a Triton cache, and how to read it."""
    tool = "unzip" if kind == "zip" else "tar xf"
    top = Path(min(compiled, key=len)).parent.as_posix()
    return (
        f"{archive}: {t.with_article(kind)} archive of Triton's cache "
        f"({t.count_noun(sum(compiled.values()), 'compiled kernel')}), not a trace. Unpack it: "
        f"{tool} {archive}. Then run advisor analyze {top}, or read it beside a trace: advisor "
        f"analyze TRACE --kernel-profile {top}"
    )


def _read_or_explain(file: str | RemoteFile, options: ReadOptions | None) -> Trace | str:
    """Return a trace, or the line that explains why it cannot be read."""
    try:
        return _read_file(file, options)
    except AdvisorError as error:
        return str(error)


def trace_files(path: str | Path, one_of_several: bool) -> list[str | RemoteFile]:
    """Return the trace files that a path, or a URL given as text, stands for. Raises AdvisorError
    for a directory without traces, or a missing path (if it is the only one, the reader does)."""
    if isinstance(path, str) and _is_remote(path):
        from advisor.read.remote.places import find_files

        return list(find_files(path, wanted_traces))
    return list(_find_files(str(path), one_of_several))


def _find_files(path: str, one_of_several: bool) -> list[str]:
    if path == "-":
        return [path]
    if "\0" in path:
        raise AdvisorError(f"{path!r}: not a file name")
    try:
        if not Path(path).is_dir():
            if one_of_several and not Path(path).exists():
                raise AdvisorError(f"{path}: no such file or directory")
            return [path]
        if not one_of_several:
            refuse_several(path)
        candidates = sorted(islice(_iterate_traces(Path(path)), _MAX_FILES + 1))
        candidates = candidates or _find_by_content(Path(path))
        caches = [file for file in candidates if file == str(Path(path))]
        result = without_copies([file for file in candidates if file not in caches]) + caches
    except OSError as error:
        raise AdvisorError(f"{path}: cannot be read ({error.strerror or error})") from None
    if not result:
        if not any(Path(path).iterdir()):
            raise AdvisorError(f"{path}: an empty directory; give one with traces, or a file")
        raise AdvisorError(
            f"{path}: a directory without traces (no file is named or begins like one); give a "
            f"file, or {SEE_FORMATS}"
        )
    if len(result) > _MAX_FILES:
        raise AdvisorError(f"{path}: more than {_MAX_FILES} traces; give a directory with fewer")
    return result


def _find_only_run(path: str | Path) -> str | Path:
    """Return the run in a folder that holds only one run, and any other path unchanged."""
    try:
        refuse_several(str(path))
    except SeveralRuns as several:
        if len(several.runs) == 1:
            return several.runs[0]
    except OSError:
        pass
    return path


def refuse_several(path: str) -> None:
    """Raise SeveralRuns for a folder that holds runs of the recorder but no trace itself. Read
    together, the runs would look like windows of one run."""
    folder = Path(path)
    if path == "-" or "\0" in path or not folder.is_dir() or not (runs := runs_in(folder)):
        return
    with os.scandir(folder) as entries:
        if not any(is_trace_name(entry.name) and entry.is_file() for entry in entries):
            raise SeveralRuns(path, runs)


def require_trace(path: str) -> None:
    """Raise AdvisorError if no file of a path can be a trace, by its first bytes. Small files are
    read. A run directory always passes, and standard input is not examined."""
    if path == "-" or is_run(path):
        return
    problem: AdvisorError | None = None
    for file in map(str, trace_files(path, one_of_several=False)):
        try:
            source = ByteSource(file)
            if source.expected_bytes() > SMALL_FILE_BYTES:
                reader_of(source)
            else:
                _read_file(file, None)
            return
        except AdvisorError as error:
            problem = problem or error
    if problem is not None:
        raise problem


def _iterate_traces(folder: Path) -> Iterator[str]:
    """Yield files named like traces, and the folder itself if it holds kernels compiled by Triton.
    Hidden files, such as copies by editors, are left out."""
    has_cache = False
    os.scandir(folder).close()  # os.walk ignores a folder that may not be read
    for folder_path, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        kernels = set(kernels_in(names))
        if kernels and not has_cache:
            has_cache = True
            yield str(folder)
        trace_names = named_like_traces(names)
        others = (name for name in names if name not in trace_names and not name.startswith("."))
        trace_names += [name for name in others if begins_like_trace(str(Path(folder_path, name)))]
        for name in trace_names:
            if name.removesuffix(".json").removeprefix("__grp__") in kernels:
                continue
            file = Path(folder_path, name)
            if file.is_file():
                yield str(file)


def _find_by_content(folder: Path) -> list[str]:
    """Return the files directly in a folder that begin like traces, whatever their names."""
    files = sorted(file for file in islice(folder.iterdir(), _MAX_FILES) if file.is_file())
    return [
        str(file)
        for file in files
        if not file.name.startswith(".") and begins_like_trace(str(file), any_name=True)
    ]


def _remove_duplicates(files: list[str | RemoteFile]) -> list[str | RemoteFile]:
    """Return each file once, however often and by whatever path it was given."""
    unique_files: dict[str, str | RemoteFile] = {}
    for file in files:
        address = file.at if isinstance(file, RemoteFile) else file
        unique_files.setdefault(
            address if address == "-" or is_url(address) else os.path.realpath(address), file
        )
    return list(unique_files.values())


def _group_by_rank(traces: list[Trace]) -> dict[int, list[Trace]]:
    """Group traces by rank, in order of time within a rank."""
    by_rank: dict[int, list[Trace]] = {}
    for trace in sorted(traces, key=lambda t: t.meta.start_ns):
        by_rank.setdefault(_rank_of(trace), []).append(trace)
    return dict(sorted(by_rank.items()))


def _describe_jobs(by_rank: dict[int, list[Trace]], folder: str | Path) -> list[str]:
    """Return a line if all ranks have windows in the same several folders. These are separate jobs,
    and the first one is analysed."""
    if len(by_rank) < 2 or _is_remote(folder) or not Path(folder).is_dir():
        return []

    def job(trace: Trace) -> str:
        """Return the first folder below the given one that is not the folder of a rank."""
        *folders, _ = Path(os.path.relpath(trace.meta.path, folder)).parts
        return next((part for part in folders if rank_in(part) is None), "")

    first_rank, *other_ranks = ([job(trace) for trace in windows] for windows in by_rank.values())
    jobs = list(dict.fromkeys(first_rank))
    if len(jobs) < 2 or any(jobs_of_rank != first_rank for jobs_of_rank in other_ranks):
        return []
    others = ", ".join(
        f"--window {first_rank.index(name)} is of {name or folder}" for name in jobs[1:]
    )
    first_job = jobs[0] or folder
    return [
        f"{folder}: {len(jobs)} jobs, of which {first_job} is analysed; {others}; "
        "or give one folder"
    ]


def _refuse_overlap(number: int, windows: list[Trace]) -> None:
    for earlier, later in pairwise(windows):
        end = earlier.meta.start_ns + earlier.meta.end_ns
        unix = earlier.meta.clock == later.meta.clock == "unix"
        if unix and later.meta.start_ns < end - MIN_OVERLAP_NS:
            traces_text, advice = f"traces of rank {number}", "give one of them"
            if number < 0:
                traces_text = "traces without a rank"
                advice += ", or put 'rank0', 'rank1' … in the file names"
            raise AdvisorError(
                f"{earlier.meta.path} and {later.meta.path}: two {traces_text} overlap in time; "
                f"{advice}"
            )


def _rank_of(trace: Trace) -> int:
    if trace.meta.rank is not None and trace.meta.rank >= 0:
        return trace.meta.rank
    number = rank_in(trace.meta.path)
    return -1 if number is None else number
