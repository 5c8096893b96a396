"""Assignment of files to ranks: traces merged from several ranks into one file; auxiliary files
beside traces (logs, dumps, kernel profiles, ``core/auxiliary_inputs.py``); memory snapshots."""

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
from advisor.read.formats.memory_snapshot.tables import MAX_BYTES, read_snapshot
from advisor.read.formats.out_of_memory_text import of_exception
from advisor.read.reader import Reader, ReadOptions
from advisor.read.registry import all_readers, is_named_for, read_trace
from advisor.read.source import ByteSource

MAX_FILES = 4096


@cache
def _auxiliary_readers() -> tuple[Reader, ...]:
    return tuple(reader for reader in all_readers() if reader.meta_field)


def is_named_log(path: str) -> bool:
    """Return whether a file is named like an auxiliary file, which is no rank's trace."""
    return any(is_named_for(reader, Path(path).name) for reader in _auxiliary_readers())


def logs_in(folders: Iterable[Path], options: ReadOptions | None = None) -> list[Trace | str]:
    """Read the logs directly in these folders; a line of text for each that cannot be read."""
    result: list[Trace | str] = []
    for folder in folders:
        try:
            files = sorted(islice(folder.iterdir(), 4 * MAX_FILES))
        except OSError:
            continue
        for file in [each for each in files if is_named_log(each.name)][:MAX_FILES]:
            try:
                result.append(read_trace(str(file), options))
            except AdvisorError as error:
                result.append(str(error))
    return result


def merged_logs(traces: Iterable[Trace]) -> dict[str, Any]:
    """Return TraceMeta fields merged from all auxiliary files among traces; empty if none."""
    metas = [trace.meta for trace in traces]
    result = {}
    for field, merge in {
        reader.meta_field: reader.merge for reader in _auxiliary_readers()
    }.items():
        values = [value for meta in metas if (value := getattr(meta, field))]
        if values:
            result[field] = values[0] if len(values) == 1 else merge(values)
    return result


def with_logs(traces: list[Trace], given: Iterable[Trace] = ()) -> list[Trace]:
    """Attach the logs among the traces to the others; ``given`` ones replace those of their kind.
    With logs only, return one trace that holds them all."""
    given = list(given)
    plain = [trace for trace in traces if not merged_logs([trace])]
    fields = merged_logs(traces) | merged_logs(given) if plain else merged_logs([*traces, *given])
    if not fields:
        return traces
    if not plain:
        path = traces[0].meta.path if len(traces) == 1 else str(Path(traces[0].meta.path).parent)
        plain = [replace(traces[0], meta=replace(traces[0].meta, rank=None, path=path))]
    return [replace(trace, meta=replace(trace.meta, **fields)) for trace in plain]


def with_memory(run: Run, options: ReadOptions | None) -> Run:
    """Return the run with its memory snapshots: the one of ``ReadOptions.memory_snapshot``, else,
    of each rank, the one its recorder left when memory ran out, else the figures in the exception's
    text. Raises AdvisorError if the requested one cannot be read."""
    options = options or ReadOptions()
    if options.memory_snapshot is not None:
        number = _first_rank(run)
        return replace(run, snapshots={number: _read(options.memory_snapshot, options)})
    if run.recording is None:
        return run
    result: dict[int, MemorySnapshot] = {}
    problems = list(run.problems)
    for number, record in run.recording.ranks.items():
        file = Path(record.folder, SNAPSHOT)
        if file.is_file():
            try:
                result[number] = _read(str(file), options)
                continue
            except AdvisorError as error:
                problems.append(str(error))
        events = [event for event in record.events if event.kind in ("oom", "end")]
        for event in reversed(events):
            text = event.data.get("message") or event.data.get("text")
            snapshot = of_exception(str(text), record.folder, event.data) if text else None
            if snapshot is not None:
                result[number] = snapshot
                break
    return replace(run, snapshots=result, problems=tuple(problems))


def join_snapshots(
    traces: list[Trace], rank_of: dict[int, int]
) -> tuple[list[Trace], dict[int, Trace]]:
    """Separate traces from snapshots by rank, which are no windows. ``rank_of``: rank by index. A
    snapshot of no rank goes to the first. Raises AdvisorError: two snapshots of one rank."""
    plain = [trace for trace in traces if trace.meta.snapshot is None]
    if not plain or len(plain) == len(traces):
        return traces, {}
    own = [rank_of[place] for place, trace in enumerate(traces) if trace.meta.snapshot is None]
    result: dict[int, Trace] = {}
    for place, trace in enumerate(traces):
        if trace.meta.snapshot is not None:
            number = rank_of[place] if rank_of[place] in own else min(own)
            if number in result:
                raise AdvisorError(
                    f"{result[number].meta.path} and {trace.meta.path}: two memory snapshots for "
                    "one rank; give one of them, or put 'rank0', 'rank1' … in the file names"
                )
            result[number] = trace
    return plain, result


def _first_rank(run: Run) -> int:
    ranks = run.ranks or (sorted(run.recording.ranks) if run.recording is not None else [])
    return ranks[0] if ranks else -1


def _read(path: str, options: ReadOptions) -> MemorySnapshot:
    source = ByteSource(path, limit=min(options.max_bytes, MAX_BYTES), peek=options.peek)
    return read_snapshot(source.blocks(), path)


MAX_RANKS = 4096


def ranks_in(trace: Trace) -> list[Trace]:
    """Split a trace file into the ranks it holds; return the trace itself if it is one rank.

    A profiler records one process. So when several processes of a file launched device work that is
    in it, they are ranks whose files were merged (TraceLens' TraceFusion shifts process and
    correlation numbers by the rank, others keep them). Their numbers are those of their devices
    where each has one of its own, else their places in the order of their process numbers.

    Device work goes to the rank that launched it; work without a launch to the one that uses its
    device, if that is one, else it is left out and counted, as is what no rank's process did."""
    if trace.gpu.is_empty() or trace.threads["pid"].n_unique() < 2:
        return [trace]
    pids = trace.threads["pid"].to_list()
    distinct = sorted(set(pids), key=_order)
    code = np.array([distinct.index(pid) for pid in pids], dtype=np.int64)
    process = code[trace.cpu["thread"].to_numpy()] if trace.cpu.height else np.zeros(0, np.int64)
    launch = trace.gpu["launch"].fill_null(-1).to_numpy()
    owner = np.where(launch >= 0, process[np.maximum(launch, 0)] if len(process) else -1, -1)
    ranks = np.unique(owner[owner >= 0])
    operators = (trace.cpu["kind"] == "op").to_numpy()
    if operators.any() or trace.meta.format == KINETO:
        # where PyTorch's operators are recorded, a process without any is no rank
        ranks = np.intersect1d(ranks, np.unique(process[operators]))
    if not 2 <= len(ranks) <= MAX_RANKS:
        return [trace]
    device = trace.gpu["device"].fill_null(-1).to_numpy()
    users = {int(d): np.unique(owner[(device == d) & (owner >= 0)]) for d in np.unique(device)}
    for d, who in users.items():
        if len(who) == 1:
            owner[(device == d) & (owner < 0)] = who[0]
    used = [[d for d, who in users.items() if rank in who] for rank in ranks]
    alone = all(len(each) == 1 for each in used) and len({each[0] for each in used}) == len(ranks)
    numbers = [each[0] for each in used] if alone else list(range(len(ranks)))
    left = int((~np.isin(process, ranks)).sum() + (~np.isin(owner, ranks)).sum())
    of_number = sorted(zip(numbers, ranks.tolist(), strict=True))
    return [
        _of_rank(trace, number, process == rank, owner == rank, code == rank, left)
        for number, rank in of_number
    ]


def _of_rank(
    trace: Trace,
    number: int,
    host: NDArray[np.bool_],
    device: NDArray[np.bool_],
    threads: NDArray[np.bool_],
    left: int,
) -> Trace:
    """Return the rows of one rank, with row references moved accordingly."""
    place = np.full(trace.cpu.height + 1, -1, dtype=np.int32)
    place[:-1][host] = np.arange(int(host.sum()), dtype=np.int32)

    def moved(column: pl.Series) -> pl.Series:
        rows = pl.Series(column.name, place[column.fill_null(trace.cpu.height).to_numpy()])
        return rows.set(rows < 0, None)

    cpu = trace.cpu.filter(pl.Series(host))
    gpu = trace.gpu.filter(pl.Series(device))
    own = pl.Series(np.flatnonzero(threads), dtype=pl.Int32).implode()
    calls = cpu["correlation"].drop_nulls().unique().implode()
    dropped = dict(trace.meta.events_dropped)
    if left:
        dropped["of no rank of this merged file"] = left
    return replace(
        trace,
        cpu=cpu.with_columns(moved(cpu["parent"])),
        gpu=gpu.with_columns(moved(gpu["launch"]), moved(gpu["op"])),
        sync=trace.sync.filter(pl.col("correlation").is_in(calls)),
        memory=trace.memory.filter(pl.col("thread").is_in(own)),
        counters=pl.DataFrame(schema=COUNTER_SCHEMA),
        meta=replace(trace.meta, rank=number, world_size=None, events_dropped=dropped),
    )


def _order(pid: str) -> tuple[int, str]:
    return (int(pid), "") if pid.isdecimal() and len(pid) < 40 else (1 << 62, pid)
