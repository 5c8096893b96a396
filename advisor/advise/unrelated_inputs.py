"""Check that opened traces and snapshots can belong to one run. Refuse them otherwise."""

from dataclasses import replace
from itertools import combinations
from pathlib import Path, PurePath

import polars as pl

from advisor.advise.window_choice import choose_window_numbers
from advisor.core import labels
from advisor.core import text as t
from advisor.core.errors import AdvisorError
from advisor.core.snapshot import MemorySnapshot
from advisor.core.trace import Run, Trace
from advisor.measure.host.launches import analyzed_device
from advisor.measure.host.stacks import CodeOwner, code_owner
from advisor.measure.memory.memory_origin import snapshot_code_owner
from advisor.read import open_run
from advisor.read.reader import ReadOptions

MAX_FILES = 6
"""Maximum number of file names in a message."""
MIN_SHARED_NAMES = 0.02
"""Minimum share of operator and kernel names common to two windows of one program. The operators
stay the same, even if other kernels are chosen."""
MIN_NAMES = 20
"""Number of names below which a recording may belong to any program."""
MAX_COMPARED = 16


def explain_unrelated(run: Run) -> list[str]:
    """Return the reasons why the traces cannot be of one run. Empty if there are none.

    The traces ran on different GPU models, the ranks were not recorded at the same time, or two
    traces share almost no operators and kernels, or no file of the user's code."""
    traces = list(run.traces.values())
    if run.recording is not None:
        return []
    reasons = []
    folder_snapshots = [s for s in run.snapshots.values() if Path(s.path).parent == run.path]
    trace_snapshots = [trace.meta.snapshot for trace in traces]
    snapshots = [
        *folder_snapshots,
        *(snapshot for snapshot in trace_snapshots if snapshot is not None),
    ]
    code_files = [_list_code_files(snapshot) for snapshot in snapshots[:MAX_COMPARED]]
    if snapshots:
        code_files += [_list_code_files(trace) for trace in traces if trace.meta.snapshot is None]
    code_files = [files for files in code_files if files][:MAX_COMPARED]
    if any(item.isdisjoint(other) for item, other in combinations(code_files, 2)):
        reasons.append("they have no file of a program in common")
    if len(traces) < 2:
        return reasons
    files: dict[str, list[str]] = {}
    for trace in traces:
        if name := _get_gpu_model(trace):
            files.setdefault(name, []).append(Path(trace.meta.path).name)
    if len(files) > 1:
        shown = [
            labels.clean(f"{labels.shorten(name, 40)} ({t.list_names(files[name], 2)})")
            for name in sorted(files)
        ]
        reasons.append(f"they ran on {t.list_names(shown, 4)}")
    first_windows = [run.window(number).meta for number in run.ranks]
    if (
        len(first_windows) > 1
        and all(m.clock == "unix" for m in first_windows)
        and max(m.start_ns for m in first_windows)
        > min(m.start_ns + m.end_ns for m in first_windows)
    ):
        reasons.append("they were not recorded at the same time")
    if any(len(_list_processes(run, number)) > 1 for number in run.ranks):
        reasons.append("different processes wrote them ('advisor compare' compares two)")
    if not reasons and _have_unrelated_pair(
        [_list_names(trace) for trace in traces[:MAX_COMPARED]]
    ):
        reasons.append("they have no operators and kernels in common")
    return reasons


def open_windows(
    path: str | Path, read: ReadOptions, rank: int | None = None, window: int | None = None
) -> Run:
    """Open the ranks of a run, each with one window: this one, or the rank's first that is like the
    run. Raises AdvisorError if it is missing, or if the files cannot be of one run."""
    run = open_run(path, read, rank=rank, window="first" if window is None else window)
    refuse_unrelated(run)
    keys = choose_window_numbers(run, window).items()
    return replace(run, traces={key: run.traces[key] for key in keys})


def refuse_unrelated(run: Run) -> None:
    """Raise AdvisorError with reasons and file names if the files cannot be of one run."""
    if not (reasons := explain_unrelated(run)):
        return
    paths = [trace.meta.path for trace in run.traces.values()]
    paths += [snapshot.path for snapshot in run.snapshots.values()]
    names = [
        t.shorten_path(PurePath(path.partition("::")[0]).name, 60) for path in dict.fromkeys(paths)
    ]
    listed_names = names[:MAX_FILES] + [f"{len(names) - MAX_FILES} more"] * (len(names) > MAX_FILES)
    prefix = "" if run.path is None else f"{run.path}: "
    raise AdvisorError(
        f"{prefix}these {len(names)} files do not look like ranks or windows of one run: "
        f"{' and '.join(reasons)}; pass files of one run ({', '.join(listed_names)})"
    )


def _get_gpu_model(trace: Trace) -> str | None:
    number = analyzed_device(trace)
    device = None if number is None else trace.working_device(number)
    return None if device is None else device.name


def _list_processes(run: Run, rank: int) -> set[str]:
    """Return the processes that drove the steps in the windows of a rank."""
    traces = [trace for (number, _), trace in run.traces.items() if number == rank]
    return {
        str(trace.threads["pid"][trace.main_thread])
        for trace in traces
        if trace.main_thread is not None
    }


def _list_code_files(source: Trace | MemorySnapshot) -> set[str]:
    """Return the file names of the user's code in the stacks. Empty if no stacks were recorded."""
    if isinstance(source, MemorySnapshot):
        frames = {frame for stack in source.stacks for frame in stack}
        files = {frame.file for frame in frames if snapshot_code_owner(frame) == CodeOwner.USER}
    else:
        python = source.cpu.filter(pl.col("kind") == "python")["name"].unique().cast(pl.String)
        files = {name.partition("(")[0] for name in python if code_owner(name) == CodeOwner.USER}
    return {file.replace("\\", "/").rpartition("/")[2] for file in files}


def _list_names(trace: Trace) -> set[str]:
    result: set[str] = set()
    for events, kind in ((trace.cpu, "op"), (trace.gpu, "kernel")):
        result |= set(
            events.filter(events["kind"] == kind)["name"].cast(pl.String).unique().to_list()
        )
    return result


def _have_unrelated_pair(named: list[set[str]]) -> bool:
    """Return whether two sets, with enough names each, have almost none in common."""
    return any(
        len(item & other) < MIN_SHARED_NAMES * min(len(item), len(other))
        for item, other in combinations(named, 2)
        if min(len(item), len(other)) >= MIN_NAMES
    )
