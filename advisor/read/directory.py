"""Opening of paths and URLs as a Run: finds traces, distinguishes ranks and windows."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path
from typing import Literal

from advisor.core import text as t
from advisor.core.errors import AdvisorError
from advisor.core.run_directory import COMPILE_LOG, is_run, read_recording
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
"""Suffixes of archives, and how their members' URLs begin."""
MAX_FILES = 4096
MAX_ELSEWHERE = 64
"""Most files of a URL that are kept at once."""
SMALL = 1 << 20
"""Size up to which a file is read to know its format, bytes."""
MAX_TRIED = 8
"""Most members of an archive that are tried, for one to suggest."""
OVERLAP_NS = 1_000_000
"""Least overlap of two windows, ns: device times are converted to the host's clock, within this."""


def open_run(
    paths: str | Path | Sequence[str | Path],
    options: ReadOptions | None = None,
    *,
    rank: int | None = None,
    window: int | Literal["first", "all"] = "all",
) -> Run:
    """Open a trace file, a directory of traces, or several of either, as one Run. Each can be a URL
    that fsspec knows (``s3://bucket/run/``, ``zip://*.json::https://…``), unless
    ``options.urls`` says otherwise; then it is the path of a file.

    A file's rank is the one in its ``distributedInfo``. Else it is the number after ``rank`` in its
    name, or in that of the nearest folder that has one, else -1. One file may hold several ranks
    that were merged into it. Files of one rank are its windows, in order of time. Ones that overlap
    in time are an error: two recordings of one rank cannot.
    A run directory of the recorder is opened with all that was recorded, with or without traces.
    ``rank`` keeps one rank only, ``options.ranks`` several. ``window``: of a run directory,
    read only this window of each rank, or its first that can be read; the others are listed in
    ``Run.unread``.

    One file must be a trace. Of several, those that are none are left out and listed in
    ``Run.problems``, a line each. Raises AdvisorError: a path that does not exist, or a directory
    without traces. Also for one of several runs (SeveralRuns), no readable trace at all, a rank
    that is not there, overlapping windows."""
    given = [paths] if isinstance(paths, str | Path) else list(paths)
    given = [_only_run(_here(path, options)) for path in given]
    if len(given) == 1 and str(given[0]) != "-" and "\0" not in str(given[0]) and is_run(given[0]):
        run = _open_recording(Path(given[0]), options, rank, window)
        return with_memory(_with_recorded_logs(run, options), options)
    ranks = RankFilter(options.ranks) if options is not None and options.ranks else None
    files = _distinct([file for path in given for file in trace_files(path, len(given) > 1)])
    if not files:
        raise AdvisorError("no trace given")
    files = _of_ranks(files, range(rank, rank + 1) if rank is not None else ranks)
    traces, problems = _read_files(files, options, given[0])
    traces = ranks_in(traces[0]) if len(traces) == 1 else number_hosts_as_ranks(traces)
    traces = with_logs(traces, _given(options))
    traces, memory = join_snapshots(
        traces, {place: _rank(trace) for place, trace in enumerate(traces)}
    )
    by_rank = _keep_ranks(_group(traces), rank, ranks, given[0])
    keyed = {}
    for number, windows in by_rank.items():
        _refuse_overlap(number, windows)
        for window, trace in enumerate(windows):
            shown = None if number < 0 else number
            keyed[number, window] = with_window(trace, shown, window)
    path = Path(given[0]) if len(given) == 1 and not _is_elsewhere(given[0]) else None
    snapshots = {
        number: trace.meta.snapshot
        for number, trace in memory.items()
        if trace.meta.snapshot is not None and number in by_rank
    }
    problems += _several_jobs(by_rank, given[0])
    run = Run(traces=keyed, path=path, problems=tuple(problems), snapshots=snapshots)
    return with_memory(run, options)


def _read_files(
    files: Sequence[str | RemoteFile], options: ReadOptions | None, given: str | Path
) -> tuple[list[Trace], list[str]]:
    """Read the files; of several, return a line for each that is no trace. Raises AdvisorError if
    none is one; ``given`` is the path that the error names."""
    if len(files) == 1:
        return [_read(files[0], options)], []
    read = [_try_read(file, options) for file in files]
    traces = [each for each in read if not isinstance(each, str)]
    problems = [each for each in read if isinstance(each, str)]
    if not traces:
        none = f"none of the {len(files)} files is a readable trace; first: {problems[0]}"
        raise AdvisorError(f"{_shown(given)}: {none}")
    return traces, problems


def _keep_ranks(
    by_rank: dict[int, list[Trace]], rank: int | None, ranks: RankFilter | None, given: str | Path
) -> dict[int, list[Trace]]:
    """Return the windows of the ranks that are asked for. Raises AdvisorError if there are none."""
    if rank is not None:
        if rank not in by_rank:
            have = _ranks(by_rank)
            omit = "; leave out --rank" * (len(by_rank) == 1)
            raise AdvisorError(f"{_shown(given)}: no trace of rank {rank} ({have}){omit}")
        return {rank: by_rank[rank]}
    if ranks is None:
        return by_rank
    kept = {number: windows for number, windows in by_rank.items() if number in ranks}
    if not kept:
        raise AdvisorError(f"--ranks {ranks.text}: no trace of these ({_ranks(by_rank)})")
    return kept


def _with_recorded_logs(run: Run, options: ReadOptions | None) -> Run:
    """Return a recorder's run with the logs beside its traces, and those given as options."""
    found = _recorded_logs(run, options)
    logs = [each for each in found if not isinstance(each, str)]
    fields = merged_logs(logs) | merged_logs(_given(options))
    return replace(
        run,
        traces={
            place: replace(trace, meta=replace(trace.meta, **fields))
            for place, trace in run.traces.items()
        },
        logs=fields,
        problems=(*run.problems, *(each for each in found if isinstance(each, str))),
    )


def _recorded_logs(run: Run, options: ReadOptions | None) -> list[Trace | str]:
    """Read the logs in a run directory: those the recorder kept of the ranks read, and those beside
    them. A line of text for each that cannot be read."""
    ranks = run.recording.ranks.values() if run.recording is not None else ()
    folders = [Path(record.folder) for record in ranks]
    result = logs_in([*([] if run.path is None else [run.path]), *folders], options)
    for folder in folders:
        with suppress(AdvisorError):  # cut off in its first record
            if (file := folder / COMPILE_LOG).is_file():
                result.append(read_trace(str(file), options))
    return result


def profile_files(path: str) -> list[str]:
    """Return the files that ``--kernel-profile PATH`` stands for: the file, or a folder's reports
    of a kernel profiler, by their first bytes, and the folder if it is a cache of Triton. Raises
    AdvisorError if there is none, or it cannot be read."""
    folder = Path(path)
    if not folder.is_dir():
        return [path]
    result = []
    reader = KernelProfilerReader()
    try:
        for file in sorted(folder.iterdir())[:MAX_FILES]:
            named = is_named_for(reader, file.name) or begins_like_trace(str(file))
            if named and file.is_file() and layout_of(ByteSource(str(file)).head()) is not None:
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


def _given(options: ReadOptions | None) -> list[Trace]:
    """Read the files named in ``ReadOptions.kernel_profile`` and ``compile_log``. Raises
    AdvisorError if one is something else."""
    if options is None:
        return []
    result = []
    if options.compile_log is not None:
        path = Path(options.compile_log)
        result.append(blank_trace(str(path), compilation=read_logs(path, options)))
    for file in [] if options.kernel_profile is None else profile_files(options.kernel_profile):
        trace = _read(file, replace(options, kernel_profile=None))
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
    their names. A window that cannot be read is reported and left out; a run without any is a Run
    without traces. Raises AdvisorError: nothing was recorded, or not of this rank."""
    recording = read_recording(folder)
    if not recording.ranks:
        raise AdvisorError(f"{folder}: a run directory in which no process has recorded anything")
    if rank is not None:
        if rank not in recording.ranks:
            have = ", ".join(map(str, recording.ranks))
            raise AdvisorError(f"{folder}: nothing of rank {rank} (ranks present: {have})")
        recording.ranks = {rank: recording.ranks[rank]}
    waiting = {
        (number, int(found[1])): file
        for number, record in recording.ranks.items()
        for file in _listed(Path(record.folder))
        if (found := _WINDOW_NAME.match(file.name)) is not None and file.is_file()
    }
    waiting = dict(sorted(waiting.items()))
    problems = list(recording.problems)
    keyed: dict[tuple[int, int], Trace] = {}
    while now := _next_windows(waiting, keyed, window):
        for place in now:
            trace = _try_read(str(waiting.pop(place)), options)
            if isinstance(trace, str):
                problems.append(trace)
            else:
                keyed[place] = with_window(trace, *place)
    return Run(
        traces=dict(sorted(keyed.items())),
        path=folder,
        problems=tuple(problems),
        recording=recording,
        unread=tuple(waiting),
    )


def _next_windows(
    waiting: Iterable[tuple[int, int]],
    have: Iterable[tuple[int, int]],
    window: int | Literal["first", "all"],
) -> list[tuple[int, int]]:
    """Return the (rank, window) pairs to read next: with ``first``, a rank's second only if its
    first could not be read."""
    if window == "all":
        return list(waiting)
    if window != "first":
        return [place for place in waiting if place[1] == window]
    served = {rank for rank, _ in have}
    first: dict[int, tuple[int, int]] = {}
    for place in waiting:
        if place[0] not in served:
            first.setdefault(place[0], place)
    return list(first.values())


def _listed(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError as error:
        raise AdvisorError(f"{folder}: cannot be read ({error.strerror or error})") from None


def _here(path: str | Path, options: ReadOptions | None) -> str | Path:
    """Return a path unchanged and a URL as text; a local URL (``file://…``), or any URL if
    ``options.urls`` is false, as Path."""
    text = str(path)
    if isinstance(path, Path) or not is_url(text):
        return path
    here = text if options is not None and not options.urls else local_path(text)
    return text if here is None else Path(here)


def _is_elsewhere(given: str | Path) -> bool:
    return isinstance(given, str) and is_url(given)


def _shown(given: str | Path) -> str:
    return redact_url(given) if isinstance(given, str) else str(given)


def _ranks(numbers: Iterable[int]) -> str:
    """List ranks for an error; -1 is a rank whose number is not in its trace."""
    known = [str(number) for number in sorted(numbers)[:20] if number >= 0]
    return f"ranks present: {', '.join(known)}" if known else "no trace says its rank"


def _of_ranks(
    files: list[str | RemoteFile], ranks: RankFilter | range | None
) -> list[str | RemoteFile]:
    """Drop remote files whose names show another rank: they are not fetched. Raises AdvisorError if
    none is left, or more than can be kept at once."""
    kept = [
        file
        for file in files
        if isinstance(file, str) or ranks is None or file.rank is None or file.rank in ranks
    ]
    if sum(isinstance(file, RemoteFile) for file in kept) > MAX_ELSEWHERE:
        raise AdvisorError(
            f"{len(kept)} remote traces, more than {MAX_ELSEWHERE} to hold at once; measure them "
            "one by one (advisor analyze --workers N), or choose some, as with --ranks 0-7"
        )
    if not kept:
        have = ", ".join(str(file.rank) for file in files[:20] if isinstance(file, RemoteFile))
        raise AdvisorError(f"no trace of the ranks that were chosen (by the names: {have})")
    return kept


def _read(file: str | RemoteFile, options: ReadOptions | None) -> Trace:
    if isinstance(file, str):
        if Path(file).is_dir():  # no other folder stands for itself
            return trace_of(*read_triton_cache(file))
        kind = next((kind for end, kind in ARCHIVES.items() if file.lower().endswith(end)), None)
        if kind is None or not Path(file).is_file():
            return read_trace(file, options)
        file = _only_member(kind, file, options)
    return read_source(file, options or ReadOptions())


def _only_member(kind: str, archive: str, options: ReadOptions | None) -> RemoteFile:
    """Return the one trace in an archive. Raises AdvisorError: there is none, or several."""
    from advisor.read.remote.archives import list_members, open_member

    members = {member.name: member for member in list_members(kind, archive)}
    compiled = _compiled_in(members)
    named = [name for name in members if "::" not in name]
    names = wanted_traces([name for name in named if name.rpartition("/")[0] not in compiled])
    if compiled and not names:
        raise AdvisorError(_about_cache(kind, archive, compiled))
    names = names or (list(members) if len(members) == 1 else [])
    if len(names) == 1:
        url = f"{kind}://{names[0]}::{archive}"
        return RemoteFile(url=url, at=url, rank=rank_in(url), size=members[names[0]].size)
    what = f"{archive}: {t.with_article(kind)} archive of {t.count_noun(len(members), 'file')}"
    refused = []
    for name in names[:MAX_TRIED]:  # what is suggested must work
        url = f"{kind}://{name}::{archive}"
        tried = _try_read(RemoteFile(url=url, at=url, rank=None, size=members[name].size), options)
        if isinstance(tried, str):
            refused.append(tried.replace(url, name))
            continue
        ranks = {rank_in(f"{kind}://{each}::") for each in names}
        job = "" if None in ranks or len(ranks) < len(names) else f", or all: {kind}://::{archive}"
        how = f"give one of them as {kind}://NAME::ARCHIVE, such as {url}"
        raise AdvisorError(f"{what}; {how}{job}")
    if refused:
        raise AdvisorError(f"{what}, none of them a trace alone; the first in it, {refused[0]}")
    kinds = []
    for name in islice(members, MAX_TRIED):
        with open_member(kind, archive, name) as (stream, _):
            kinds.append(kind_of(stream.read(SMALL), name))
    if kinds and (known := kinds[0]) is not None:
        which = "each is" if len(kinds) > 1 and {known} == set(kinds) else "the first is"
        raise AdvisorError(f"{what}; {which} {known[0]}; {known[1] or SEE_FORMATS}")
    raise AdvisorError(f"{what}, none named like a trace; unpack it and give the file or folder")


def _compiled_in(names: Iterable[str]) -> dict[str, int]:
    """Return the folders of an archive that hold kernels which Triton compiled, and how many."""
    folders: dict[str, list[str]] = {}
    for name in names:
        folder, _, file = name.rpartition("/")
        folders.setdefault(folder, []).append(file)
    return {folder: len(found) for folder, own in folders.items() if (found := kernels_in(own))}


def _about_cache(kind: str, archive: str, compiled: dict[str, int]) -> str:
    """Say that an archive holds a cache of Triton, and how to read it."""
    tool = "unzip" if kind == "zip" else "tar xf"
    top = Path(min(compiled, key=len)).parent.as_posix()
    return (
        f"{archive}: {t.with_article(kind)} archive of Triton's cache "
        f"({t.count_noun(sum(compiled.values()), 'compiled kernel')}), no trace; unpack it "
        f"({tool} {Path(archive).name}), then advisor analyze {top}, or beside a trace "
        f"--kernel-profile {top}"
    )


def _try_read(file: str | RemoteFile, options: ReadOptions | None) -> Trace | str:
    """Return a trace, or the line that says why it cannot be read."""
    try:
        return _read(file, options)
    except AdvisorError as error:
        return str(error)


def trace_files(given: str | Path, one_of_several: bool) -> list[str | RemoteFile]:
    """Return the trace files that a path, or a URL given as text, stands for. Raises AdvisorError:
    a directory without any, or a missing path (the reader reports it if it is the only one)."""
    if isinstance(given, str) and _is_elsewhere(given):
        from advisor.read.remote.places import find_files

        return list(find_files(given, wanted_traces))
    return list(_files(str(given), one_of_several))


def _files(path: str, one_of_several: bool) -> list[str]:
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
        found = sorted(islice(_traces_under(Path(path)), MAX_FILES + 1))
        found = found or _by_content(Path(path))
        caches = [file for file in found if file == str(Path(path))]
        result = without_copies([file for file in found if file not in caches]) + caches
    except OSError as error:
        raise AdvisorError(f"{path}: cannot be read ({error.strerror or error})") from None
    if not result:
        if not any(Path(path).iterdir()):
            raise AdvisorError(f"{path}: an empty directory; give one with traces, or a file")
        raise AdvisorError(
            f"{path}: a directory without traces (no file is named or begins like one); give a "
            f"file, or {SEE_FORMATS}"
        )
    if len(result) > MAX_FILES:
        raise AdvisorError(f"{path}: more than {MAX_FILES} traces; give a directory with fewer")
    return result


def _only_run(given: str | Path) -> str | Path:
    """Return the run in a folder that holds only one; any other path unchanged."""
    try:
        refuse_several(str(given))
    except SeveralRuns as several:
        if len(several.found) == 1:
            return several.found[0]
    except OSError:
        pass
    return given


def refuse_several(path: str) -> None:
    """Raise SeveralRuns for a folder that holds runs of the recorder and no trace of its own: read
    together they would pass for windows of one run."""
    folder = Path(path)
    if path == "-" or "\0" in path or not folder.is_dir() or not (runs := runs_in(folder)):
        return
    with os.scandir(folder) as entries:
        if not any(is_trace_name(entry.name) and entry.is_file() for entry in entries):
            raise SeveralRuns(path, runs)


def require_trace(path: str) -> None:
    """Raise AdvisorError if no file of a path can be a trace, by its first bytes; small files are
    read. A run directory always passes, and standard input is not looked at."""
    if path == "-" or is_run(path):
        return
    problem: AdvisorError | None = None
    for file in map(str, trace_files(path, one_of_several=False)):
        try:
            source = ByteSource(file)
            if source.expected_bytes() > SMALL:
                reader_of(source)
            else:
                _read(file, None)
            return
        except AdvisorError as error:
            problem = problem or error
    if problem is not None:
        raise problem


def _traces_under(folder: Path) -> Iterator[str]:
    """Yield files named like traces, and the folder itself if it holds kernels that Triton
    compiled. Hidden files are left out: editors' copies."""
    compiled = False
    os.scandir(folder).close()  # os.walk is silent about a folder that may not be read
    for where, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        kernels = set(kernels_in(names))
        if kernels and not compiled:
            compiled = True
            yield str(folder)
        named = named_like_traces(names)
        others = (name for name in names if name not in named and not name.startswith("."))
        named += [name for name in others if begins_like_trace(str(Path(where, name)))]
        for name in named:
            if name.removesuffix(".json").removeprefix("__grp__") in kernels:
                continue
            file = Path(where, name)
            if file.is_file():
                yield str(file)


def _by_content(folder: Path) -> list[str]:
    """List the files directly in a folder that begin like traces, whatever their names."""
    files = sorted(file for file in islice(folder.iterdir(), MAX_FILES) if file.is_file())
    return [
        str(file)
        for file in files
        if not file.name.startswith(".") and begins_like_trace(str(file), any_name=True)
    ]


def _distinct(files: list[str | RemoteFile]) -> list[str | RemoteFile]:
    """Return each file once, however often and by whichever path it was given."""
    kept: dict[str, str | RemoteFile] = {}
    for file in files:
        at = file.at if isinstance(file, RemoteFile) else file
        kept.setdefault(at if at == "-" or is_url(at) else os.path.realpath(at), file)
    return list(kept.values())


def _group(traces: list[Trace]) -> dict[int, list[Trace]]:
    """Group traces by rank, those of one rank in order of time."""
    by_rank: dict[int, list[Trace]] = {}
    for trace in sorted(traces, key=lambda t: t.meta.start_ns):
        by_rank.setdefault(_rank(trace), []).append(trace)
    return dict(sorted(by_rank.items()))


def _several_jobs(by_rank: dict[int, list[Trace]], given: str | Path) -> list[str]:
    """Return a line if all ranks have windows in the same several folders: these are separate jobs,
    of which the first is analysed."""
    if len(by_rank) < 2 or _is_elsewhere(given) or not Path(given).is_dir():
        return []

    def job(trace: Trace) -> str:
        """Return the first folder below the given one that is not a rank's."""
        *folders, _ = Path(os.path.relpath(trace.meta.path, given)).parts
        return next((part for part in folders if rank_in(part) is None), "")

    first, *rest = ([job(trace) for trace in windows] for windows in by_rank.values())
    jobs = list(dict.fromkeys(first))
    if len(jobs) < 2 or any(each != first for each in rest):
        return []
    others = ", ".join(f"--window {first.index(each)} is of {each or given}" for each in jobs[1:])
    here = jobs[0] or given
    return [f"{given}: {len(jobs)} jobs, of which {here} is analysed; {others}; or give one folder"]


def _refuse_overlap(number: int, windows: list[Trace]) -> None:
    for before, after in pairwise(windows):
        end = before.meta.start_ns + before.meta.end_ns
        unix = before.meta.clock == after.meta.clock == "unix"
        if unix and after.meta.start_ns < end - OVERLAP_NS:
            who, cure = f"traces of rank {number}", "give one of them"
            if number < 0:
                who = "traces without a rank"
                cure += ", or put 'rank0', 'rank1' … in the file names"
            raise AdvisorError(
                f"{before.meta.path} and {after.meta.path}: two {who} overlap in time; {cure}"
            )


def _rank(trace: Trace) -> int:
    if trace.meta.rank is not None and trace.meta.rank >= 0:
        return trace.meta.rank
    number = rank_in(trace.meta.path)
    return -1 if number is None else number
