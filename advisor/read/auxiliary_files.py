"""Assignment of files to ranks: files merged from the traces of several ranks, memory snapshots,
and auxiliary files next to traces (logs, dumps, kernel profiles, ``core/auxiliary_inputs.py``)."""

from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from advisor.core.errors import AdvisorError
from advisor.core.run_directory import SNAPSHOT
from advisor.core.snapshot import MemorySnapshot
from advisor.core.trace import COUNTER_SCHEMA, KINETO, Run, Trace
from advisor.read.formats.memory_snapshot.tables import MAX_SNAPSHOT_BYTES, read_snapshot
from advisor.read.formats.out_of_memory_text import of_exception
from advisor.read.reader import Reader, ReadOptions
from advisor.read.registry import all_readers, is_named_for, read_trace
from advisor.read.source import ByteSource

_MAX_FILES = 4096


@cache
def _auxiliary_readers() -> tuple[Reader, ...]:
    return tuple(reader for reader in all_readers() if reader.meta_field)


def is_named_log(path: str) -> bool:
    """Return whether a file is named like an auxiliary file, which is not a rank's trace."""
    return any(is_named_for(reader, Path(path).name) for reader in _auxiliary_readers())


def logs_in(folders: Iterable[Path], options: ReadOptions | None = None) -> list[Trace | str]:
    """Read the logs directly in these folders. An unreadable log yields a line of text instead."""
    result: list[Trace | str] = []
    for folder in folders:
        try:
            files = sorted(islice(folder.iterdir(), 4 * _MAX_FILES))
        except OSError:
            continue
        for file in [file for file in files if is_named_log(file.name)][:_MAX_FILES]:
            try:
                result.append(read_trace(str(file), options))
            except AdvisorError as error:
                result.append(str(error))
    return result


def merged_logs(traces: Iterable[Trace]) -> dict[str, Any]:
    """Return TraceMeta fields merged from all auxiliary files among traces. Empty if none."""
    metas = [trace.meta for trace in traces]
    result = {}
    for field, merge in {
        reader.meta_field: reader.merge for reader in _auxiliary_readers()
    }.items():
        values = [value for meta in metas if (value := getattr(meta, field))]
        if values:
            result[field] = values[0] if len(values) == 1 else merge(values)
    return result


def with_logs(traces: list[Trace], logs: Iterable[Trace] = ()) -> list[Trace]:
    """Attach the logs among the traces to the other traces. ``logs`` logs replace logs of the same
    kind. If there are only logs, return one trace that holds them all."""
    logs = list(logs)
    plain = [trace for trace in traces if not merged_logs([trace])]
    fields = merged_logs(traces) | merged_logs(logs) if plain else merged_logs([*traces, *logs])
    if not fields:
        return traces
    if not plain:
        path = traces[0].meta.path if len(traces) == 1 else str(Path(traces[0].meta.path).parent)
        plain = [replace(traces[0], meta=replace(traces[0].meta, rank=None, path=path))]
    return [replace(trace, meta=replace(trace.meta, **fields)) for trace in plain]


def with_memory(run: Run, options: ReadOptions | None) -> Run:
    """Return the run with its memory snapshots. The source is ``ReadOptions.memory_snapshot``, else
    each rank's snapshot from when memory ran out, else the figures in the text of the exception.
    Raises AdvisorError if the requested snapshot cannot be read."""
    options = options or ReadOptions()
    if options.memory_snapshot is not None:
        ranks = run.ranks or (sorted(run.recording.ranks) if run.recording is not None else [])
        rank = ranks[0] if ranks else -1
        return replace(run, snapshots={rank: _read_snapshot_file(options.memory_snapshot, options)})
    if run.recording is None:
        return run
    snapshots: dict[int, MemorySnapshot] = {}
    problems = list(run.problems)
    for rank, record in run.recording.ranks.items():
        file = Path(record.folder, SNAPSHOT)
        if file.is_file():
            try:
                snapshots[rank] = _read_snapshot_file(str(file), options)
                continue
            except AdvisorError as error:
                problems.append(str(error))
        events = [event for event in record.events if event.kind in ("oom", "end")]
        for event in reversed(events):
            text = event.data.get("message") or event.data.get("text")
            snapshot = of_exception(str(text), record.folder, event.data) if text else None
            if snapshot is not None:
                snapshots[rank] = snapshot
                break
    return replace(run, snapshots=snapshots, problems=tuple(problems))


def join_snapshots(
    traces: list[Trace], rank_of: dict[int, int]
) -> tuple[list[Trace], dict[int, Trace]]:
    """Separate snapshots, by rank, from traces: snapshots are not windows. ``rank_of``: rank by
    index. A snapshot without a rank goes to the first rank. Raises AdvisorError if one rank has two
    snapshots."""
    plain = [trace for trace in traces if trace.meta.snapshot is None]
    if not plain or len(plain) == len(traces):
        return traces, {}
    trace_ranks = [
        rank_of[index] for index, trace in enumerate(traces) if trace.meta.snapshot is None
    ]
    snapshots: dict[int, Trace] = {}
    for index, trace in enumerate(traces):
        if trace.meta.snapshot is not None:
            rank = rank_of[index] if rank_of[index] in trace_ranks else min(trace_ranks)
            if rank in snapshots:
                raise AdvisorError(
                    f"{snapshots[rank].meta.path} and {trace.meta.path}: two memory snapshots for "
                    "one rank; give one of them, or put 'rank0', 'rank1' … in the file names"
                )
            snapshots[rank] = trace
    return plain, snapshots


def _read_snapshot_file(path: str, options: ReadOptions) -> MemorySnapshot:
    source = ByteSource(path, limit=min(options.max_bytes, MAX_SNAPSHOT_BYTES), peek=options.peek)
    return read_snapshot(source.blocks(), path)


_MAX_RANKS = 4096


def ranks_in(trace: Trace) -> list[Trace]:
    """Split a trace file into the ranks that it holds. Return the trace itself if it is one rank.

    A profiler records one process. So if several processes in a file launched device work, they are
    ranks whose files were merged (TraceFusion of TraceLens shifts process and correlation numbers
    by the rank; other tools keep them). A rank has the number of its device if each rank has its
    own device, else its index in the order of the process numbers.

    Device work goes to the rank that launched it. Work without a launch goes to the only rank that
    uses the device. Otherwise it is left out and counted, like the work of processes without a
    rank."""
    if trace.gpu.is_empty() or trace.threads["pid"].n_unique() < 2:
        return [trace]
    pids = trace.threads["pid"].to_list()
    distinct = sorted(set(pids), key=_pid_sort_key)
    pid_code = np.array([distinct.index(pid) for pid in pids], dtype=np.int64)
    process = (
        pid_code[trace.cpu["thread"].to_numpy()] if trace.cpu.height else np.zeros(0, np.int64)
    )
    launch = trace.gpu["launch"].fill_null(-1).to_numpy()
    owner = np.where(launch >= 0, process[np.maximum(launch, 0)] if len(process) else -1, -1)
    ranks = np.unique(owner[owner >= 0])
    operators = (trace.cpu["kind"] == "op").to_numpy()
    if operators.any() or trace.meta.format == KINETO:
        # where PyTorch's operators are recorded, a process without operators is not a rank
        ranks = np.intersect1d(ranks, np.unique(process[operators]))
    if not 2 <= len(ranks) <= _MAX_RANKS:
        return [trace]
    device = trace.gpu["device"].fill_null(-1).to_numpy()
    users = {
        int(device_id): np.unique(owner[(device == device_id) & (owner >= 0)])
        for device_id in np.unique(device)
    }
    for device_id, owners in users.items():
        if len(owners) == 1:
            owner[(device == device_id) & (owner < 0)] = owners[0]
    devices_of_ranks = [
        [device_id for device_id, owners in users.items() if rank in owners] for rank in ranks
    ]
    has_own_device = all(len(device_ids) == 1 for device_ids in devices_of_ranks) and len(
        {device_ids[0] for device_ids in devices_of_ranks}
    ) == len(ranks)
    numbers = (
        [device_ids[0] for device_ids in devices_of_ranks]
        if has_own_device
        else list(range(len(ranks)))
    )
    dropped_count = int((~np.isin(process, ranks)).sum() + (~np.isin(owner, ranks)).sum())
    numbered_ranks = sorted(zip(numbers, ranks.tolist(), strict=True))
    return [
        _select_rank(trace, number, process == rank, owner == rank, pid_code == rank, dropped_count)
        for number, rank in numbered_ranks
    ]


def _select_rank(
    trace: Trace,
    number: int,
    host: NDArray[np.bool_],
    device: NDArray[np.bool_],
    threads: NDArray[np.bool_],
    dropped_count: int,
) -> Trace:
    """Return the rows of one rank, with row references moved accordingly."""
    new_row = np.full(trace.cpu.height + 1, -1, dtype=np.int32)
    new_row[:-1][host] = np.arange(int(host.sum()), dtype=np.int32)

    def move_rows(column: pl.Series) -> pl.Series:
        rows = pl.Series(column.name, new_row[column.fill_null(trace.cpu.height).to_numpy()])
        return rows.set(rows < 0, None)

    cpu = trace.cpu.filter(pl.Series(host))
    gpu = trace.gpu.filter(pl.Series(device))
    thread_rows = pl.Series(np.flatnonzero(threads), dtype=pl.Int32).implode()
    calls = cpu["correlation"].drop_nulls().unique().implode()
    dropped = dict(trace.meta.events_dropped)
    if dropped_count:
        dropped["of no rank of this merged file"] = dropped_count
    return replace(
        trace,
        cpu=cpu.with_columns(move_rows(cpu["parent"])),
        gpu=gpu.with_columns(move_rows(gpu["launch"]), move_rows(gpu["op"])),
        sync=trace.sync.filter(pl.col("correlation").is_in(calls)),
        memory=trace.memory.filter(pl.col("thread").is_in(thread_rows)),
        counters=pl.DataFrame(schema=COUNTER_SCHEMA),
        meta=replace(trace.meta, rank=number, world_size=None, events_dropped=dropped),
    )


def _pid_sort_key(pid: str) -> tuple[int, str]:
    return (int(pid), "") if pid.isdecimal() and len(pid) < 40 else (1 << 62, pid)
