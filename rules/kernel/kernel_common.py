"""What the kernel rules share: which kernels count, how busy the device is, edits, places."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import polars as pl
from numpy.typing import NDArray

from advisor.core.finding import Edit, Location, Operation, PassedCheck, Select, SkippedCheck
from advisor.measure import Analysis
from advisor.replay.selection import under_names
from advisor.rules.common import in_layers, layer_fields, locate_row

Mask = NDArray[np.bool_]

MIN_BUSY = 0.5
"""Below this busy share of the step the shape of kernels matters little: the device waits for
something else, and small kernels are a symptom. TensorBoard's plugin and Nsight's
``gpu_time_util`` call a device idle below 50%."""
MIN_UNKNOWN_SHARE = 0.20
"""Share of kernel time with unknown rates from which a rule says so."""
UNIT = {"tf32": 4, "fp32": 4, "fp16": 8, "bf16": 8, "fp8": 16, "int8": 16}
"""Elements in 16 bytes: what one vectorised load takes."""
PERSISTENT = r"(?i)nvjet|persistent|stream_?k|fmhaSm1|_cta_|warpspecialized"
"""Kernels that launch at most one block per multiprocessor on purpose and loop over their tiles."""


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
    rows: Mask = a.kernels["family"].is_in(list(families)).fill_null(False).to_numpy()
    return rows


def launched_under(a: Analysis, pattern: str) -> Mask:
    """Aligned with ``trace.gpu``: launched inside a host event whose name matches the pattern."""
    under: Mask = under_names(a, pattern)  # its last entry stands for "no launch in the window"
    rows: Mask = under[a.trace.gpu["launch"].fill_null(-1).to_numpy()]
    return rows


def summed_duration(a: Analysis, rows: Mask) -> int:
    """Summed duration of rows, ns (work that runs side by side counts twice)."""
    return int(a.trace.gpu["dur"].to_numpy()[rows].sum())


def busy_share(a: Analysis) -> float:
    """Share of the window in which the device does anything at all."""
    return a.breakdown.busy.total / a.span_ns if a.span_ns else 0.0


def is_busy(a: Analysis, min_busy: float) -> bool:
    """Whether there are kernels, and the device is busy enough for their speed to matter."""
    return a.device_id is not None and bool(kernel_rows(a).any()) and busy_share(a) >= min_busy


def report_unknown_rates(a: Analysis, families: Sequence[str], work: str) -> Iterator[SkippedCheck]:
    """Says so where the families take much time and nothing is known of their rates."""
    table = a.rooflines.filter(pl.col("family").is_in(list(families)))
    blind = table.filter(pl.col("bound") == "unknown")
    if blind["share"].sum() < MIN_UNKNOWN_SHARE or blind["dur"].sum() < 0.8 * float(
        table["dur"].sum()
    ):
        return
    if a.hardware is None:
        why, record = "the attainable rates of this device are unknown", ""
    elif a.trace.meta.record_shapes is not True and not a.trace.inputs.height:
        why, record = "the trace has no input shapes", "record_shapes=True"
    else:
        return
    yield SkippedCheck(what=f"how near {work} come to the device's rates", why=why, record=record)


def no_shapes(a: Analysis, what: str) -> SkippedCheck:
    """That ``what`` needs shapes: none are recorded, or not those of these kernels."""
    if a.trace.inputs.is_empty():
        why, record = "the trace has no input shapes", "record_shapes=True"
    else:
        why, record = "the recorded input shapes are not those of these kernels' operators", ""
    return SkippedCheck(what=what, why=why, record=record)


def praise_tensor_cores(
    a: Analysis, matrix: Mask, on_tensor: Mask, min_share: float, min_rate: float
) -> Iterator[PassedCheck]:
    """Says that matrix work runs on tensor cores, where ``min_share`` of its time does and it
    reaches ``min_rate`` of the attainable rate; where no rate is known, where its format is."""
    total = summed_duration(a, matrix)
    used = summed_duration(a, on_tensor) / total
    if used < min_share:
        return
    table = a.rooflines.filter(pl.col("family").cast(pl.String).is_in(["gemm", "convolution"]))
    rate = pl.col("flops_per_s") / pl.col("attainable_flops_per_s")
    table = table.with_columns(reached=pl.col("efficiency").fill_null(rate))
    judged = table.drop_nulls("reached")
    known = table.drop_nulls("dtype")["dur"].sum() / total
    if judged["dur"].sum() >= 0.5 * total:
        reached = float((judged["dur"] * judged["reached"]).sum()) / float(judged["dur"].sum())
        known = min_share if reached >= min_rate else 0.0
    if known >= min_share:
        cores = "matrix cores" if a.trace.meta.vendor == "amd" else "tensor cores"
        yield PassedCheck(text=f"{used:.0%} of GEMM and convolution time runs on {cores}")


def scale_kernels(
    a: Analysis, rows: Mask, saved: Iterable[float], select: Select, op: Operation = "scale"
) -> Edit:
    """The Edit that takes ``saved`` (ns: expected, at best, at worst) off the summed duration of
    the kernels of ``select``, which are ``rows``.

    An Edit selects events by what they are (a family, an op), so that it means the same in
    another window. Where only some of them change, the others keep their time.
    """
    total = summed_duration(a, rows)
    expected, best, worst = (min(1.0, max(0.0, 1 - ns / total)) if total else 1.0 for ns in saved)
    return Edit(op=op, select=select, factor=expected, factor_low=best, factor_high=worst)


def kernels_named(names: Iterable[str]) -> Select:
    """Selects the kernels with exactly these names."""
    return Select(on="gpu", kind=("kernel",), name=match_exactly(names))


def match_exactly(names: Iterable[str]) -> str:
    """Regular expression for exactly these names."""
    return "^(?:" + "|".join(re.escape(name) for name in names) + ")$"


def kernel_locations(a: Analysis, rows: Mask, limit: int = 3) -> list[Location]:
    """The kernels with most time among ``rows``, by op and kernel name: the longest of each."""
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
            **in_layers(a, gpu["launch"].gather(where).fill_null(-1).to_numpy()),
        }
    )
    by_line = pl.col("layer") < 0
    top = (
        table.group_by(
            "layer", *(pl.when(by_line).then(pl.col(c)).alias(c) for c in ("name", "op"))
        )
        .agg(
            pl.col("dur").sum().alias("ns"),
            pl.len().alias("count"),
            pl.col("node").unique(),
            pl.col("row", "name", "op").get(pl.col("dur").arg_max()).name.prefix("longest_"),
        )
        .sort("ns", "longest_row", descending=[True, False])
        .head(limit)
    )
    places = []
    for place in top.iter_rows(named=True):
        longest, count = place["longest_row"], place["count"]
        places.append(
            locate_row(
                a,
                gpu["launch"][longest],
                **layer_fields(a, place),
                op=place["longest_op"],
                kernel=place["longest_name"],
                ts_ns=gpu["ts"][longest],
                dur_ns=gpu["dur"][longest],
                count=count,
            )
        )
    return places
