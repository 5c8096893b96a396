"""Ranks that were merged into one file, as a trace each."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import polars as pl
from numpy.typing import NDArray

from advisor.core.trace import COUNTER_SCHEMA, KINETO, Trace

MAX_RANKS = 4096


def ranks_in(trace: Trace) -> list[Trace]:
    """The ranks that a file holds; the trace itself where it is one.

    A profiler records one process. So when several processes of a file launched device work that is
    in it, they are ranks whose files were merged (TraceLens' TraceFusion shifts process and
    correlation numbers by the rank, others keep them). Their numbers are those of their devices
    where each has one of its own, else their places in the order of their process numbers.

    Device work goes to the rank that launched it; work without a launch to the one that uses its
    device, if that is one, else it is left out and counted, as is what no rank's process did.
    """
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
    """The rows of one rank; references between them follow."""
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
