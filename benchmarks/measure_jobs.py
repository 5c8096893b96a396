"""Measure what simulated jobs are drawn from: kernel lengths, launches and collectives of public
traces.

    python -m benchmarks.measure_jobs [FOLDER]

writes ``benchmarks/simulation/measured.json``; without FOLDER from the traces in tests/corpus.
Times are ns; each list holds the quantiles QUANTILES of what was measured, pooled over the traces
that ``sources`` names.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from advisor.measure import Analysis
from advisor.measure.comm.comms import list_collectives
from advisor.read import open_run
from benchmarks.public_traces import CORPUS

TRACES = {
    "a100_train_6steps.json.gz": "HolisticTraceAnalysis (MIT), A100",
    "nccl_collectives.json.gz": "HolisticTraceAnalysis (MIT), A100, 2 ranks",
    "v100_train_copy_heavy.json.gz": "HolisticTraceAnalysis (MIT), V100",
    "two_ranks_rank0.json.gz": "HolisticTraceAnalysis (MIT), 64 ranks",
    "b200_eager.json.gz": "TraceLens (MIT), B200, 8 ranks",
    "dlrm_8ranks/worker0.pt.trace.json.gz": "param (MIT), V100, 8 ranks",
}
QUANTILES = (0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95)
FEWEST = 20
"""Kernels of a family; with fewer it is not written."""
FEWEST_MESSAGES = 5
MIN_BYTES = 100_000
"""Smallest message whose rate is written: shorter ones take as long as an empty one."""
QUEUED_NS = 50_000
"""A launch that begins so long after the stream was free did not wait for it."""
OUT = Path(__file__).parent / "simulation" / "measured.json"


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("traces", type=Path, nargs="?", default=CORPUS)
    folder: Path = parser.parse_args().traces
    pooled = Pool()
    for name in TRACES:
        run = open_run(folder / name)
        pooled.add(Analysis(next(iter(run.traces.values()))))
    OUT.write_text(json.dumps(pooled.as_dict(), indent=1) + "\n", encoding="utf-8")


class Pool:
    """Measurements of several traces."""

    def __init__(self) -> None:
        self.kernels: dict[str, list[NDArray[np.float64]]] = {}
        self.host: dict[str, list[NDArray[np.float64]]] = {}
        self.collectives: dict[str, list[tuple[float, float, float]]] = {}

    def add(self, a: Analysis) -> None:
        """Add a trace."""
        gpu = a.trace.gpu.with_columns(family=a.kernels["family"].cast(pl.String)).filter(
            pl.col("kind") == "kernel"
        )
        work = gpu.filter(pl.col("family") != "communication")
        for (family,), rows in work.group_by("family"):
            self.kernels.setdefault(str(family), []).append(rows["dur"].to_numpy().astype(float))
        self._launches(a)
        for kind, size, dur in list_collectives(a).select("collective", "bytes", "dur").iter_rows():
            if size and dur and size >= MIN_BYTES:
                self.collectives.setdefault(kind, []).append((size, dur, size / dur))

    def _launches(self, a: Analysis) -> None:
        """``call``: of the launch call; ``between``: from one launch to the thread's next, in one
        stretch of work; ``latency``: from the call's begin to the kernel's, on a free stream."""
        cpu = a.trace.cpu.filter(pl.col("call") == "launch").sort("thread", "ts")
        if cpu.is_empty():
            return
        ts, thread = cpu["ts"].to_numpy(), cpu["thread"].to_numpy()
        gaps = np.diff(ts)[np.diff(thread) == 0]
        self.host.setdefault("between", []).append(gaps[gaps < 200_000].astype(float))
        self.host.setdefault("call", []).append(cpu["dur"].to_numpy().astype(float))
        gpu = a.trace.gpu.filter(pl.col("launch").is_not_null()).sort("stream", "ts")
        called = a.trace.cpu["ts"].to_numpy()[gpu["launch"].to_numpy()]
        start, stream = gpu["ts"].to_numpy(), gpu["stream"].to_numpy()
        before = np.append(0, (start + gpu["dur"].to_numpy())[:-1])
        free = np.append(False, stream[1:] == stream[:-1]) & (called > before)
        waited = (start - called)[free]
        self.host.setdefault("latency", []).append(
            waited[(waited > 0) & (waited < QUEUED_NS)].astype(float)
        )

    def as_dict(self) -> dict[str, Any]:
        """The measurements as they are written."""
        return {
            "sources": TRACES,
            "written_by": "benchmarks/measure_jobs.py",
            "quantiles": QUANTILES,
            "kernel_ns": {
                family: _quantiles(np.concatenate(parts))
                for family, parts in sorted(self.kernels.items())
                if sum(map(len, parts)) >= FEWEST
            },
            "host_ns": {k: _quantiles(np.concatenate(v)) for k, v in sorted(self.host.items())},
            "collectives": {
                kind: {
                    "count": len(rows),
                    "bytes": _quantiles(np.array(rows)[:, 0]),
                    "dur_ns": _quantiles(np.array(rows)[:, 1]),
                    "gb_per_s": _quantiles(np.array(rows)[:, 2], 2),
                }
                for kind, rows in sorted(self.collectives.items())
                if len(rows) >= FEWEST_MESSAGES
            },
        }


def _quantiles(values: NDArray[np.float64], digits: int = 0) -> list[float]:
    quantiles = np.quantile(values, QUANTILES)
    return [round(float(v), digits) if digits else int(v) for v in quantiles]


if __name__ == "__main__":
    main()
