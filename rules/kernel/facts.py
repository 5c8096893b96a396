"""What the kernel rules share: which rows count, how busy the device is, where it happens."""

from __future__ import annotations

import re
from collections.abc import Iterable

import numpy as np
import polars as pl
from numpy.typing import NDArray

from advisor.core.finding import Location
from advisor.measure import Analysis
from advisor.replay.selection import under_names

Mask = NDArray[np.bool_]

MIN_BUSY = 0.5
"""Below this busy share of the step the shape of kernels matters little: the device waits for
something else, and small kernels are a symptom of that (TensorBoard's plugin and Nsight's
``gpu_time_util`` call a device idle below 50 %)."""
UNIT = {"tf32": 4, "fp32": 4, "fp16": 8, "bf16": 8, "fp8": 16, "int8": 16}
"""Elements in 16 bytes: what one vectorised load takes."""
PERSISTENT = r"(?i)nvjet|persistent|stream_?k|fmhaSm1|_cta_|warpspecialized"
"""Kernels that launch at most one block a multiprocessor on purpose and loop over their tiles."""


def kernel_rows(a: Analysis) -> Mask:
    """Aligned with ``trace.gpu``: all kernels of the window, communication included."""
    kernel: Mask = (a.trace.gpu["kind"] == "kernel").to_numpy()
    return a.in_window & kernel


def compute_rows(a: Analysis) -> Mask:
    """Kernels of the window that compute. Communication kernels are small on purpose."""
    communication: Mask = a.kernels["communication"].to_numpy()
    return kernel_rows(a) & ~communication


def of_family(a: Analysis, *families: str) -> Mask:
    """Aligned with ``trace.gpu``: rows of these kernel families."""
    found: Mask = a.kernels["family"].is_in(list(families)).fill_null(False).to_numpy()
    return found


def launched_under(a: Analysis, pattern: str) -> Mask:
    """Aligned with ``trace.gpu``: launched inside a host event whose name has the pattern."""
    under: Mask = under_names(a, pattern)  # its last entry stands for "no launch in the window"
    found: Mask = under[a.trace.gpu["launch"].fill_null(-1).to_numpy()]
    return found


def duration(a: Analysis, rows: Mask) -> int:
    """Summed duration of rows, ns (work that runs side by side counts twice)."""
    return int(a.trace.gpu["dur"].to_numpy()[rows].sum())


def busy_share(a: Analysis) -> float:
    """Share of the window in which the device does anything at all."""
    return a.breakdown.busy.total / a.span_ns if a.span_ns else 0.0


def worth_looking(a: Analysis, min_busy: float = MIN_BUSY) -> bool:
    """Whether there are kernels, and the device is busy enough for their shape to matter."""
    return a.device_id is not None and bool(kernel_rows(a).any()) and busy_share(a) >= min_busy


def diluted(a: Analysis, rows: Mask, saved_ns: float) -> float:
    """The factor that takes ``saved_ns`` off the summed duration of ``rows``.

    An Edit selects events by what they are (a family, an op), so that it means the same in
    another window; where only some of them change, the others keep their time.
    """
    total = duration(a, rows)
    return 1.0 if not total else min(1.0, max(0.0, 1 - saved_ns / total))


def exactly(names: Iterable[str]) -> str:
    """Regular expression for exactly these names."""
    return "^(?:" + "|".join(re.escape(name) for name in names) + ")$"


def locations(a: Analysis, rows: Mask, limit: int = 3) -> list[Location]:
    """The kernels with most time among ``rows``: by op and kernel name, the longest instance."""
    gpu = a.trace.gpu
    where = np.flatnonzero(rows)
    table = pl.DataFrame(
        {
            "row": where,
            "dur": gpu["dur"].to_numpy()[where],
            "name": gpu["name"].gather(where),
            "op": a.kernels["op_name"]
            .gather(where)
            .fill_null(a.trace.cpu["name"].gather(gpu["op"].gather(where))),
        }
    )
    top = (
        table.group_by("name", "op")
        .agg(pl.col("dur").sum(), pl.len(), pl.col("row").get(pl.col("dur").arg_max()).alias("at"))
        .sort("dur", "at", descending=[True, False])
        .head(limit)
    )
    found = []
    for name, op, _, count, at in top.iter_rows():
        file, line, function = a.location(gpu["launch"][at])
        found.append(
            Location(
                file=file,
                line=line,
                function=function,
                op=op,
                kernel=name,
                ts_ns=gpu["ts"][at],
                dur_ns=gpu["dur"][at],
                count=count,
            )
        )
    return found
