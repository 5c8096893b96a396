"""Measurement of a job of many ranks, one by one where the files are, in processes or on Dask."""

from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from msgspec import structs

from advisor.advise.options import Options
from advisor.advise.options import RanksDone as RanksDone  # noqa: PLC0414
from advisor.advise.ranks.task import MeasureTask, for_workers, select_rank
from advisor.advise.ranks.worker_pool import Cluster, iterate_results, start_processes
from advisor.core import text as t
from advisor.core.cgroup import count_cores
from advisor.core.errors import AdvisorError
from advisor.core.pool import ProcessPool
from advisor.core.run_directory import is_run, read_recording
from advisor.core.trace import Run
from advisor.measure.ranks.summary_schema import RankSummary, UnreadRank, select_main_run
from advisor.read import open_run
from advisor.read.auxiliary_files import is_named_log, logs_in, with_logs
from advisor.read.directory import MAX_ELSEWHERE, trace_files
from advisor.read.registry import with_window
from advisor.read.remote.urls import RankFilter, RemoteFile, is_url, local_path, rank_in, redact_url
from advisor.read.runs import read_source

MAX_RANKS_IN_MEMORY: Final = 16
"""Maximum number of ranks whose traces are held in memory at once. Measuring a trace of 20 MB takes
about 0.15 GB (benchmarks/bench_ranks.py), and one of 100 MB about 0.8 GB. A machine with 16 GB has
room for sixteen of the latter."""


def files_summarized_apart(places: Sequence[str], options: Options) -> list[RemoteFile]:
    """Return the files of a job whose ranks are measured one by one: on request, or because there
    are more ranks than fit in memory. Empty otherwise.

    Raises AdvisorError if the options ask for this and no file has the chosen ranks."""
    chosen = options.read.ranks
    if options.workers is not None or options.cluster is not None:
        return _drop_logs(locate_traces(places, chosen))
    is_single_rank = options.rank is not None and (options.capture or options.window is not None)
    if is_single_rank or "-" in places:
        return []
    if not options.read.urls and any(map(is_url, places)):
        return []
    if (
        not any(is_url(each) or ("\0" not in each and Path(each).is_dir()) for each in places)
        and len(places) <= MAX_RANKS_IN_MEMORY
    ):
        return []
    try:
        result = _drop_logs(locate_traces(places, chosen))
    except AdvisorError:
        return []  # the reader reports why
    remote_count = sum(is_url(source.at) for source in result)
    return (
        result if _count_ranks(result) > MAX_RANKS_IN_MEMORY or remote_count > MAX_ELSEWHERE else []
    )


def _drop_logs(sources: list[RemoteFile]) -> list[RemoteFile]:
    """Return the sources without logs, which do not belong to a rank."""
    return [each for each in sources if not is_named_log(each.at)]


def summarize_apart(
    sources: Sequence[RemoteFile],
    places: Sequence[str],
    options: Options,
    config: dict[str, dict[str, Any]],
) -> tuple[list[RankSummary], list[UnreadRank]]:
    """Measure each rank where its file is. ``places``: paths as given, for messages.

    Raises AdvisorError if the cluster cannot be reached, or if no rank could be read."""
    wanted = for_workers(options, config)
    chosen = RankFilter(options.read.ranks) if options.read.ranks else None
    tasks = [MeasureTask(source=source, wanted=wanted) for source in _drop_ambiguous_ranks(sources)]
    progress = RanksDone(total=len(tasks))
    report = options.on_progress or (lambda _: None)
    summaries: list[RankSummary] = []
    unread: list[UnreadRank] = []

    with _open_workers(options.workers, options.cluster, len(tasks)) as workers:
        progress.dashboard = getattr(workers, "link", "")
        report(progress)
        for result in iterate_results(tasks, workers, seconds=options.seconds):
            if chosen is not None and result.rank >= 0 and result.rank not in chosen:
                progress.total -= 1  # the rank is not in the file's name
            elif isinstance(result, UnreadRank):
                unread.append(result)
                progress.unread += 1
            else:
                summaries.append(result)
                progress.read += 1
            report(progress)
    summaries.sort(key=lambda each: (each.rank, each.path))
    unread.sort(key=lambda each: (each.rank, each.path))
    if not summaries and not unread:
        raise AdvisorError(
            f"--ranks {options.read.ranks}: no trace of these ranks in {describe_places(places)}"
        )
    if not summaries:
        raise AdvisorError(
            f"{describe_places(places)}: none of the {len(unread)} files can be read; first: "
            f"{unread[0].path}: {unread[0].why}"
        )
    return summaries, unread


def first_rank(
    summaries: Sequence[RankSummary], sources: Sequence[RemoteFile], options: Options
) -> Run:
    """Read the first rank of a job, or ``options.rank``, in this process. The report's figures are
    of this rank. Raises AdvisorError if this rank could not be measured."""
    ordered = select_main_run(summaries).summaries
    wanted = [each for each in ordered if options.rank in (None, each.rank)]
    if not wanted:
        present = ", ".join(str(each.rank) for each in ordered[:20])
        raise AdvisorError(f"--rank {options.rank}: not measured (ranks present: {present})")
    main_summary = wanted[0]
    rank_sources = [each for each in sources if each.rank == main_summary.rank]
    source = (
        next((each for each in sources if each.url == main_summary.path), None) or rank_sources[0]
    )
    read = replace(options.read, ranks="")
    if is_url(source.at):
        run = Run(traces={(main_summary.rank, 0): read_source(source, read)})
    else:
        run = select_rank(
            open_run(source.at, read, window=options.window_to_read), source.at, main_summary.rank
        )
    all_traces = list(run.traces.values())
    if not is_url(source.at) and not is_run(source.at):
        logs = logs_in([Path(source.at).parent], read)
        all_traces = with_logs([*all_traces, *(each for each in logs if not isinstance(each, str))])
    traces = {
        (main_summary.rank, window): with_window(trace, main_summary.rank, window)
        for (_, window), trace in zip(run.traces, all_traces, strict=True)
    }
    return replace(run, traces=traces) if traces else run


def _drop_ambiguous_ranks(result: Sequence[RemoteFile]) -> list[RemoteFile]:
    """Remove the rank of local files that share one, as their names may count ranks per host."""
    names = Counter(source.rank for source in result)
    return [
        structs.replace(source, rank=None)
        if names[source.rank] > 1 and not is_url(source.at)
        else source
        for source in result
    ]


def _count_ranks(result: Sequence[RemoteFile]) -> int:
    names = (Path(source.url).name for source in result if source.rank is None)
    processes = {name.partition(".")[0] for name in names if ".pt.trace.json" in name}
    return len({source.rank for source in result} - {None}) + len(processes)


def describe_places(places: Sequence[str]) -> str:
    """Name what is analysed, without credentials."""
    return t.list_names(map(redact_url, places), 1) if places else ""


def _open_workers(
    count: int | None, cluster: str | None, orders: int
) -> AbstractContextManager[ProcessPool | Cluster]:
    if cluster is not None:
        from advisor.advise.ranks.worker_pool import Cluster

        return Cluster(cluster)
    return start_processes(min(count or count_cores(), orders))


def locate_traces(places: Sequence[str], ranks: str = "") -> list[RemoteFile]:
    """Return the trace files of paths, folders, URLs and globs of URLs, each once, by rank and then
    name. ``ranks``: only these ranks, such as ``0-63,512``, by the names of files and folders.
    Files whose names have no rank are kept.

    Raises AdvisorError for a folder without traces, a missing path, a scheme that cannot be read,
    or no file of these ranks. A single URL that cannot be reached is a Source with its ``problem``.
    """
    chosen = RankFilter(ranks) if ranks else None
    result: dict[str, RemoteFile] = {}
    for place in places:
        local = local_path(place) if is_url(place) else None
        if run_files := _list_recorded_ranks(place if local is None else local):
            result.update({f"{each.at}#{each.rank}": each for each in run_files})
            continue
        for file in trace_files(place if local is None else local, len(places) > 1):
            source = file if isinstance(file, RemoteFile) else _describe_local_file(file)
            result.setdefault(source.at, source)
    findings = [
        item
        for item in result.values()
        if chosen is None or item.rank is None or item.rank in chosen
    ]
    if not findings:
        present = sorted({item.rank for item in result.values() if item.rank is not None})
        rank_list = ", ".join(map(str, present[:20])) or "none, by the names of the files"
        raise AdvisorError(f"--ranks {ranks}: no trace of these ranks (ranks present: {rank_list})")
    if chosen is not None and all(item.rank is not None for item in result.values()):
        chosen.refuse_missing([item.rank or 0 for item in result.values()])
    return sorted(findings, key=lambda item: (item.rank is None, item.rank or 0, item.url))


def _list_recorded_ranks(place: str) -> list[RemoteFile]:
    """Return a source for each rank of a run directory. Empty for any other path."""
    if is_url(place) or place == "-" or "\0" in place or not is_run(place):
        return []
    ranks = read_recording(Path(place)).ranks
    return [RemoteFile(url=place, at=place, rank=rank) for rank in ranks]


def _describe_local_file(path: str) -> RemoteFile:
    try:
        size = Path(path).stat().st_size
    except OSError:
        size = None  # the reader reports why
    return RemoteFile(url=path, at=path, rank=rank_in(path), size=size)
