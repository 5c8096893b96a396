"""Whether opened traces and snapshots can be of one run; those that cannot are refused."""

from itertools import combinations
from pathlib import Path, PurePath

import polars as pl

from advisor.core import labels
from advisor.core import text as t
from advisor.core.errors import AdvisorError
from advisor.core.snapshot import MemorySnapshot
from advisor.core.trace import Run, Trace
from advisor.measure.host.launches import analysed_device
from advisor.measure.host.stacks import frame_rank
from advisor.measure.memory.memory_origin import frame_owner
from advisor.read import open_run
from advisor.read.reader import ReadOptions

MAX_FILES = 6
"""Number of file names in a message."""
MIN_SHARED_NAMES = 0.02
"""Smallest share of operator and kernel names common to two windows of one program. The operators
are the same, even if the kernels are chosen anew."""
MIN_NAMES = 20
"""Number of names below which a recording may be of anything."""
MAX_COMPARED = 16


def explain_unrelated(run: Run) -> list[str]:
    """Return the reasons why the traces cannot be of one run; empty if there is none.

    They ran on GPUs of different models, ranks were not recorded at one time, or two of them have
    next to no operator or kernel in common, or no file of the user's code."""
    traces = list(run.traces.values())
    if run.recording is not None:
        return []
    why = []
    beside = [s for s in run.snapshots.values() if Path(s.path).parent == run.path]
    own = [trace.meta.snapshot for trace in traces]
    taken = [*beside, *(snapshot for snapshot in own if snapshot is not None)]
    code = [_own_files(snapshot) for snapshot in taken[:MAX_COMPARED]]
    if taken:
        code += [_own_files(trace) for trace in traces if trace.meta.snapshot is None]
    code = [files for files in code if files][:MAX_COMPARED]
    if any(item.isdisjoint(other) for item, other in combinations(code, 2)):
        why.append("they have no file of a program in common")
    if len(traces) < 2:
        return why
    files: dict[str, list[str]] = {}
    for trace in traces:
        if name := _model(trace):
            files.setdefault(name, []).append(Path(trace.meta.path).name)
    if len(files) > 1:
        shown = [
            labels.clean(f"{labels.shorten(name, 40)} ({t.list_names(files[name], 2)})")
            for name in sorted(files)
        ]
        why.append(f"they ran on {t.list_names(shown, 4)}")
    firsts = [run.window(number).meta for number in run.ranks]
    if (
        len(firsts) > 1
        and all(m.clock == "unix" for m in firsts)
        and max(m.start_ns for m in firsts) > min(m.start_ns + m.end_ns for m in firsts)
    ):
        why.append("they were not recorded at the same time")
    if run.path is None and any(len(_processes(run, number)) > 1 for number in run.ranks):
        why.append("different processes wrote them ('advisor compare' compares two)")
    if not why and _strange([_names(trace) for trace in traces[:MAX_COMPARED]]):
        why.append("they have no operators and kernels in common")
    return why


def open_first_windows(path: str | Path, read: ReadOptions, rank: int | None = None) -> Run:
    """Open the ranks of a run, each with its first window. Raises AdvisorError if its files cannot
    be of one run."""
    run = open_run(path, read, rank=rank, window="first")
    refuse_unrelated(run)
    return run


def refuse_unrelated(run: Run) -> None:
    """Raise AdvisorError, with reasons and file names, if the files cannot be of one run."""
    if not (why := explain_unrelated(run)):
        return
    paths = [trace.meta.path for trace in run.traces.values()]
    paths += [snapshot.path for snapshot in run.snapshots.values()]
    names = [
        t.shorten_path(PurePath(path.partition("::")[0]).name, 60) for path in dict.fromkeys(paths)
    ]
    shown = names[:MAX_FILES] + [f"{len(names) - MAX_FILES} more"] * (len(names) > MAX_FILES)
    where = "" if run.path is None else f"{run.path}: "
    raise AdvisorError(
        f"{where}these {len(names)} files do not look like ranks or windows of one run: "
        f"{' and '.join(why)}; give those of one run ({', '.join(shown)})"
    )


def _model(trace: Trace) -> str | None:
    number = analysed_device(trace)
    device = None if number is None else trace.working_device(number)
    return None if device is None else device.name


def _processes(run: Run, rank: int) -> set[str]:
    """Return the processes that drove the steps in the windows of a rank."""
    traces = [trace for (number, _), trace in run.traces.items() if number == rank]
    return {
        str(trace.threads["pid"][trace.main_thread])
        for trace in traces
        if trace.main_thread is not None
    }


def _own_files(source: Trace | MemorySnapshot) -> set[str]:
    """Return the file names of the user's code in the stacks; empty if none was recorded."""
    if isinstance(source, MemorySnapshot):
        frames = {frame for stack in source.stacks for frame in stack}
        files = {frame.file for frame in frames if frame_owner(frame) == 2}
    else:
        python = source.cpu.filter(pl.col("kind") == "python")["name"].unique().cast(pl.String)
        files = {name.partition("(")[0] for name in python if frame_rank(name) == 2}
    return {file.replace("\\", "/").rpartition("/")[2] for file in files}


def _names(trace: Trace) -> set[str]:
    result: set[str] = set()
    for frame, kind in ((trace.cpu, "op"), (trace.gpu, "kernel")):
        result |= set(
            frame.filter(frame["kind"] == kind)["name"].cast(pl.String).unique().to_list()
        )
    return result


def _strange(named: list[set[str]]) -> bool:
    """Return whether two sets, with enough names each, have almost none in common."""
    return any(
        len(item & other) < MIN_SHARED_NAMES * min(len(item), len(other))
        for item, other in combinations(named, 2)
        if min(len(item), len(other)) >= MIN_NAMES
    )
