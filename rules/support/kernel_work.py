"""Functions of the kernel rules: which kernels count, how busy the device is, edits, places,
kernels of unfused attention, and how long fused kernels would take for the same work."""

import re
from collections.abc import Iterable, Iterator, Sequence
from math import ceil, prod
from typing import NamedTuple

import numpy as np
import polars as pl
from msgspec.structs import replace
from numpy.typing import NDArray

from advisor.core import text as t
from advisor.core.finding import Edit, Location, Operation, PassedCheck, Select, SkippedCheck
from advisor.core.intervals import intervals_of
from advisor.core.rule import Factor, Threshold
from advisor.measure import Analysis
from advisor.measure.device.matmuls import parse_product
from advisor.measure.device.operator_arguments import inputs_at
from advisor.measure.device.shapes import OpInputs, Tensor, width_of
from advisor.measure.host.names import name_matches
from advisor.measure.host.operators import KERNEL_NS, attainable_roofs
from advisor.measure.host.stacks import innermost_ancestor, parent_rows
from advisor.measure.steps.steps import rows_in_steps
from advisor.replay.selection import mask_launched_under
from advisor.rules.support.citations import FLASH_2, FLASH_3, SMALL_GRIDS_TRACES
from advisor.rules.support.common import (
    Rows,
    backward_operators,
    layer_columns,
    layer_fields,
    locate_row,
    of_each_step,
    scale_edit,
    work_launched_in,
)

Mask = NDArray[np.bool_]

MIN_BUSY = Threshold(0.5, "share of the step the device is busy", SMALL_GRIDS_TRACES)
"""Minimum busy share of the step at which the shape of kernels matters. Below it the device waits
for something else, and small kernels are a symptom. TensorBoard's plugin and Nsight's
``gpu_time_util`` call a device idle below 50%."""
MIN_UNKNOWN_SHARE = 0.20
"""Minimum share of kernel time with unknown rates at which a rule reports it."""
MIN_MERGED_SHARE = 0.8
"""Minimum share of the selected kernels that merge at which an edit merges all neighbours."""
UNIT = {"tf32": 4, "fp32": 4, "fp16": 8, "bf16": 8, "fp8": 16, "int8": 16}
"""Elements in 16 bytes, which one vectorised load takes."""
FUSED = r"(?i)multi_tensor_|fused_?(adam|sgd|adagrad|lamb|lion)|foreach|_fused_|^triton_"
"""Kernels that update many parameters at once: foreach and fused optimizers, Apex, Inductor."""
PERSISTENT = r"(?i)nvjet|persistent|stream_?k|fmhaSm1|_cta_|warpspecialized"
"""Kernels that launch at most one block per multiprocessor on purpose and loop over their tiles."""
TRANSPOSES = r"(?i)nchwToNhwc|nhwcToNchw|nchwToFolded|foldedNhwcToNchw|^batched_transpose_"
"""cuDNN's kernels (``cudnn::ops::nchwToNhwcKernel``) and MIOpen's (``batched_transpose_…``)."""


def kernel_mask(a: Analysis) -> Mask:
    """Return all kernels of the window, communication included, aligned with ``trace.gpu``."""
    kernel: Mask = (a.trace.gpu["kind"] == "kernel").to_numpy()
    return a.in_window & kernel


def compute_mask(a: Analysis) -> Mask:
    """Return kernels of the window that compute. Communication kernels are small on purpose."""
    communication: Mask = a.kernels["communication"].to_numpy()
    return kernel_mask(a) & ~communication


def family_mask(a: Analysis, *families: str) -> Mask:
    """Return rows of these kernel families, aligned with ``trace.gpu``."""
    rows: Mask = a.kernels["family"].is_in(list(families)).fill_null(False).to_numpy()
    return rows


def transposes_and_convolutions(a: Analysis) -> tuple[Mask, Mask]:
    """Return which device work transposes between NCHW and NHWC, and which does so or convolves."""
    rows = compute_mask(a)
    is_transpose = rows & name_matches(a.trace.gpu["name"], TRANSPOSES).to_numpy()
    return is_transpose, (rows & family_mask(a, "convolution")) | is_transpose


def summed_duration(a: Analysis, rows: Mask) -> int:
    """Return the summed duration of rows, ns. Work that runs at the same time counts twice."""
    return int(a.trace.gpu["dur"].to_numpy()[rows].sum())


def of_kernel_time(a: Analysis, ns: float, share: float) -> str:
    """Return kernel time of the window as text: ``3 ms of each step (40% of kernel time)``."""
    duration = t.format_duration(ns / a.step_count)
    return f"{duration} {of_each_step(a)} ({share:.0%} of kernel time)"


def busy_share(a: Analysis) -> float:
    """Return the share of the step in which the device of this rank is busy."""
    return a.unprofiled_busy_share or 0.0


def is_device_busy(a: Analysis, min_busy: float) -> bool:
    """Return whether there are kernels, and the device is busy enough for their speed to matter."""
    return a.device_id is not None and bool(kernel_mask(a).any()) and busy_share(a) >= min_busy


def report_unknown_rates(a: Analysis, families: Sequence[str], work: str) -> Iterator[SkippedCheck]:
    """Report families that take much time and have unknown rates."""
    table = a.rooflines.filter(pl.col("family").is_in(list(families)))
    unknown_rates = table.filter(pl.col("bound") == "unknown")
    if unknown_rates["share"].sum() < MIN_UNKNOWN_SHARE or unknown_rates["dur"].sum() < 0.8 * float(
        table["dur"].sum()
    ):
        return
    subject = f"how near {work} come to the device's rates"
    if a.hardware is None:
        reason = "the attainable rates of this device are unknown"
        yield SkippedCheck(what=subject, why=reason, missing="GPU unknown")
    elif a.trace.meta.record_shapes is not True and not a.trace.inputs.height:
        yield skip_without_shapes(a, subject)


def skip_without_shapes(a: Analysis, what: str) -> SkippedCheck:
    """Report that ``what`` needs shapes: none are recorded, or none of these kernels' operators."""
    if a.trace.inputs.is_empty():
        reason, record = "the trace has no input shapes", "record_shapes=True"
        return SkippedCheck(what=what, why=reason, record=record, missing="no shapes")
    reason = "the recorded input shapes are not those of these kernels' operators"
    return SkippedCheck(what=what, why=reason)


def tensor_core_passed_check(
    a: Analysis, matrix: Mask, on_tensor: Mask, min_share: float, min_rate: float
) -> Iterator[PassedCheck]:
    """Report a pass if matrix work runs on tensor cores: ``min_share`` of its time does, and it
    reaches ``min_rate`` of the attainable rate. Where no rate is known, its format must be."""
    total = summed_duration(a, matrix)
    used_share = summed_duration(a, on_tensor) / total
    if used_share < min_share:
        return
    table = a.rooflines.filter(pl.col("family").cast(pl.String).is_in(["gemm", "convolution"]))
    rate = pl.col("flops_per_s") / pl.col("attainable_flops_per_s")
    table = table.with_columns(reached=pl.col("efficiency").fill_null(rate))
    rated = table.drop_nulls("reached")
    known_share = table.drop_nulls("dtype")["dur"].sum() / total
    if rated["dur"].sum() >= 0.5 * total:
        reached = float((rated["dur"] * rated["reached"]).sum()) / float(rated["dur"].sum())
        known_share = min_share if reached >= min_rate else 0.0
    if known_share >= min_share:
        cores = "matrix cores" if a.trace.meta.vendor == "amd" else "tensor cores"
        yield PassedCheck(text=f"{used_share:.0%} of GEMM and convolution time runs on {cores}")


def scale_kernels(
    a: Analysis, rows: Mask, saved: Iterable[float], select: Select, op: Operation = "scale"
) -> Edit:
    """Return the Edit that takes ``saved`` (ns: expected, at best, at worst) off the summed
    duration of the kernels of ``select``, which are ``rows``.

    An Edit selects events by what they are (a family, an op), so that it means the same in another
    window. Where only some of them change, the others keep their time."""
    total = summed_duration(a, rows)
    expected, best, worst = (min(1.0, max(0.0, 1 - ns / total)) if total else 1.0 for ns in saved)
    return Edit(op=op, select=select, factor=expected, best_factor=best, worst_factor=worst)


def memory_order(tensor: Tensor) -> tuple[int, ...]:
    """Return the dimensions from the outermost to the innermost in memory. Dimensions of one
    element are left out."""
    sizes = zip(tensor.shape, tensor.strides or (), strict=False)
    strides = {dim: stride for dim, (size, stride) in enumerate(sizes) if size > 1}
    return tuple(sorted(strides, key=lambda dim: -strides[dim]))


def is_channels_last(tensor: Tensor) -> bool:
    """Return whether channels are innermost in memory, as convolution kernels read them."""
    if len(tensor.shape) not in (4, 5) or not tensor.strides or tensor.strides[1] != 1:
        return False
    if tensor.shape[1] == 1 or all(size == 1 for size in tensor.shape[2:]):
        return False  # the same in both orders
    order = (0, *range(2, len(tensor.shape)), 1)
    return memory_order(tensor) == tuple(dim for dim in order if tensor.shape[dim] > 1)


def backward_chains(a: Analysis, chains: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return for kernels of the backward pass the chain whose operators created their node, else
    -1. It is aligned with ``trace.gpu``, like ``chains`` (-1: in none). They go with the chain: an
    operator that replaces it brings its own backward pass."""
    launch = a.trace.gpu["launch"].fill_null(-1).to_numpy()
    # the last entry means "no launch in the window"
    node = np.append(a.forward_op, -1)[launch]
    creates = np.zeros(a.trace.cpu.height, dtype=bool)
    creates[a.forward_op[a.forward_op >= 0]] = True
    around = np.append(innermost_ancestor(parent_rows(a.trace), creates), -1)[launch]
    chain_of = np.full(a.trace.cpu.height + 1, -1, dtype=np.int64)
    forward = (chains >= 0) & (node < 0) & (around >= 0)
    chain_of[around[forward]] = chains[forward]
    return np.where((node >= 0) & (chains < 0) & compute_mask(a), chain_of[node], -1)


def fuse_kernels(
    a: Analysis,
    selected: Mask,
    select: Select,
    saved: Iterable[float],
    chained: Mask,
    launches: int,
) -> list[Edit]:
    """Return the Edits that fuse the ``chained`` ones of the ``selected`` kernels, which take
    ``saved`` (ns) less, so that ``launches`` of them are left.

    Where nearly all that is selected merges, neighbours merge, and their launches go. Elsewhere the
    host saves the launched part of the operators' time."""
    count, saved, edits = int(chained.sum()), list(saved), []
    for part in select_by_name(a, selected, select, chained):
        if (chained & part.rows).sum() >= MIN_MERGED_SHARE * max(part.rows.sum(), count):
            return [scale_kernels(a, part.rows, saved, part.select, "merge")]
        edits.append(scale_kernels(a, part.rows, (ns * part.share for ns in saved), part.select))
    names = exact_pattern(_find_launching_operators(a, selected))
    remaining_share = 1 - (count - launches) / max(1, int(selected.sum()))
    host_select = Select(on="host", kind=("op",), name=names)
    return [*edits, Edit(op="scale", select=host_select, factor=remaining_share)]


class KernelPart(NamedTuple):
    """Kernels by name, some of which are the ``own`` kernels of a finding."""

    rows: Mask
    select: Select
    share: float
    """Share of the time of all own kernels."""
    mostly_own: bool


def select_by_name(a: Analysis, selected: Mask, select: Select, own: Mask) -> Iterator[KernelPart]:
    """Yield the ``selected`` kernels in two parts: those with names of mostly ``own`` kernels, and
    others with names that own kernels share. A fix that changes the others then leaves nearly all
    that the own ones gain."""
    time = pl.DataFrame({"name": a.trace.gpu["name"], "all": a.trace.gpu["dur"]}).with_columns(
        own=pl.col("all") * pl.Series(own)
    )
    time = time.filter(pl.Series(selected)).group_by("name").sum().sort("name")
    mostly = pl.col("own") > 0.5 * pl.col("all")
    parts = (time.filter(mostly), True), (time.filter(~mostly, pl.col("own") > 0), False)
    for table, mostly_own in parts:
        if table.is_empty():
            continue
        rows = selected & a.trace.gpu["name"].is_in(table["name"].implode()).to_numpy()
        named = select
        if rows.sum() < selected.sum():
            named = replace(select, name=exact_pattern(table["name"].cast(pl.String).to_list()))
        share = float(table["own"].sum()) / max(1, int(time["own"].sum()))
        yield KernelPart(rows, named, share, mostly_own)


def _find_launching_operators(a: Analysis, selected: Mask) -> list[str]:
    """Return the names of operators that spend most of their host time in calls that launch
    ``selected`` kernels. Operators that mostly launch other work, or none, such as copies on the
    host, keep their time."""
    gpu, cpu = a.trace.gpu, a.trace.cpu
    calling = gpu["op"].filter(pl.Series(selected)).drop_nulls().unique()
    others = gpu["op"].filter(pl.Series(compute_mask(a) & ~selected)).drop_nulls().unique()
    calls = cpu.lazy().select("kind", "name", "ts", "dur", row=pl.row_index())
    is_own = pl.col("row").is_in(calling.implode()) & ~pl.col("row").is_in(others.implode())
    start, end = cpu["ts"].gather(calling).min(), cpu["ts"].gather(calling).max()
    table = (
        calls.filter(pl.col("kind") == "op", pl.col("ts").is_between(start, end))
        .group_by("name")
        .agg(own=(pl.col("dur") * is_own).sum(), all=pl.col("dur").sum())
        .filter(pl.col("own") > 0.5 * pl.col("all"))
        .sort("name")
    )
    return table.collect()["name"].cast(pl.String).to_list()


def select_kernels(names: Iterable[str]) -> Select:
    """Select the kernels with exactly these names."""
    return Select(on="gpu", kind=("kernel",), name=exact_pattern(names))


def exact_pattern(names: Iterable[str]) -> str:
    """Return a regular expression for exactly these names, the same in any order."""
    return "^(?:" + "|".join(re.escape(name) for name in sorted(names)) + ")$"


def time_of_operators(a: Analysis, rows: Rows) -> int:
    """Return the time of operators, rows of ``trace.cpu``, ns: of the work they launch on the
    device, or their own on the host."""
    intervals = intervals_of(a.trace.cpu, rows)
    return int(intervals.total) if a.device_id is None else work_launched_in(a, intervals)


def with_backward(a: Analysis, forward: Rows, through: Rows | None = None) -> tuple[Rows, Rows]:
    """Return operators together with those of their backward pass in the steps, and the latter
    alone. ``through``: operators whose backward pass counts, if it is not that of all."""
    backward = rows_in_steps(a, backward_operators(a, forward if through is None else through))
    return np.concatenate([forward, backward]), backward


def scale_operators(a: Analysis, rows: Rows, saved: Sequence[float]) -> Edit:
    """Scale the operators of these names. An edit names all of their calls, and the others stay. On
    the host the time between two of them goes with them, in which large results are freed.
    ``saved`` is expected, at best, at worst, ns."""
    names = exact_pattern(a.trace.cpu["name"].gather(rows).cast(str).unique().to_list())
    same_name_rows = np.flatnonzero(name_matches(a.trace.cpu["name"], names).to_numpy())
    total_ns = max(time_of_operators(a, rows_in_steps(a, same_name_rows)), 1)
    select = Select(on="host", kind=("op",), name=names, at="loop")
    if a.device_id is not None:
        select = Select(on="gpu", under=names)
    return scale_edit(select, *(float(1 - ns / total_ns) for ns in saved))


def kernel_locations(a: Analysis, rows: Mask) -> list[Location]:
    """Return the kernels with most time among ``rows``, by op and kernel name: the longest of each,
    and how often it runs."""
    gpu = a.trace.gpu
    indices = np.flatnonzero(rows)
    table = pl.DataFrame(
        {
            "row": indices,
            "dur": gpu["dur"].to_numpy()[indices],
            "name": gpu["name"].gather(indices),
            "op": a.kernels["op_name"]
            .gather(indices)
            .fill_null(a.trace.cpu["name"].gather(gpu["op"].gather(indices))),
            **layer_columns(a, gpu["launch"].gather(indices).fill_null(-1).to_numpy()),
        }
    )
    by_line = pl.col("layer") < 0
    longest = pl.col("dur").arg_max()
    is_longest = [pl.col(c).eq_missing(pl.col(c).get(longest)) for c in ("name", "op")]
    top = (
        table.group_by(
            "layer", *(pl.when(by_line).then(pl.col(c)).alias(c) for c in ("name", "op"))
        )
        .agg(
            pl.col("dur").sum().alias("ns"),
            pl.col("dur").filter(*is_longest).sum().alias("named"),
            pl.all_horizontal(is_longest).sum().alias("count"),
            pl.col("node").unique(),
            pl.col("row", "name", "op").get(longest).name.prefix("longest_"),
        )
        .sort("ns", "longest_row", descending=[True, False])
        .head(3)
    )
    places = []
    for place in top.iter_rows(named=True):
        row, count = place["longest_row"], place["count"]
        places.append(
            locate_row(
                a,
                gpu["launch"][row],
                **layer_fields(a, place),
                share=place["named"] / max(table["dur"].sum(), 1),
                op=place["longest_op"],
                kernel=place["longest_name"],
                ts_ns=gpu["ts"][row],
                dur_ns=gpu["dur"][row],
                count=count,
            )
        )
    return places


MATH = r"^aten::_scaled_dot_product_attention_math"
FAMILIES_BETWEEN_PRODUCTS = ("elementwise", "copy", "layout", "random", "reduction")
"""Families of scaling, mask, cast and dropout between the products and the softmax."""
FORWARD = r"^aten::(bmm|baddbmm_?)$"
MAX_BETWEEN = 6
"""Maximum number of kernels between product and softmax: scale, mask, casts, dropout."""

ATTAINED_SHARE = Factor(0.45, "of the attainable rate: what a fused kernel reaches", FLASH_2)
BEST_ATTAINED_SHARE = Factor(0.7, "of the attainable rate, at best", FLASH_2, FLASH_3)
TILE = 64
"""Queries and keys per tile: fused kernels compute whole tiles. Heads narrower than that gain
nothing, as exponentials then take the time."""
WIDTH_STEP = 32
"""Step of the head width: wider heads are padded to a multiple of it."""
BACKWARD = 2.5
"""Ratio of products of the backward pass to the forward pass: five to two (FlashAttention 2)."""


class AttentionBlocks(NamedTuple):
    """Forward passes of unfused attention."""

    rows: Mask
    """Kernels of these passes, including PyTorch's own fallback, aligned with ``trace.gpu``."""
    blocks: Mask
    """Kernels of product, softmax, product, and everything in between."""
    first: NDArray[np.int64]
    """Rows of ``trace.gpu``: the product before each softmax, the softmax, the product after it."""
    softmax: NDArray[np.int64]
    last: NDArray[np.int64]


class FusedEstimate(NamedTuple):
    """Estimated time of the same blocks as fused kernels at the attainable rate."""

    half_ns: float
    """Time with inputs of 16 bits, wider ones cast, ns."""
    full_ns: float
    """Time with inputs as they are, FP32 at the FP32 rate, ns."""
    tokens: int
    """Length of the longest sequence."""
    wide: bool
    """Whether some inputs have more than 16 bits."""


def is_fallback_kernel(a: Analysis) -> Mask:
    """Return kernels of PyTorch's own fallback, aligned with ``trace.gpu``."""
    return mask_launched_under(a, MATH) & compute_mask(a)


def is_unfused_attention(a: Analysis) -> Mask:
    """Return forward kernels of unfused attention, aligned with ``trace.gpu``. That alone makes
    their rates low, not another bottleneck."""
    return find_blocks(a).rows


def find_blocks(a: Analysis, max_between: int = MAX_BETWEEN) -> AttentionBlocks:
    """Find product, softmax, product on one stream, with at most ``max_between`` kernels of
    scaling, mask, casts and dropout on each side of the softmax."""
    gpu, rows = a.trace.gpu, compute_mask(a)
    index = np.flatnonzero(rows)
    index = index[np.lexsort((gpu["ts"].to_numpy()[index], gpu["stream"].to_numpy()[index]))]
    in_block = np.zeros(len(rows), dtype=bool)
    if not len(index):
        return AttentionBlocks(in_block, in_block, index, index, index)
    family = a.kernels["family"].gather(index)
    op = a.kernels["op_name"].gather(index)
    softmax = (family == "softmax").fill_null(False).to_numpy()
    softmax &= ~name_matches(op, r"(?i)log_softmax|backward").to_numpy()
    products = name_matches(op, FORWARD).to_numpy() & (family == "gemm").fill_null(False).to_numpy()
    is_between = family.is_in(list(FAMILIES_BETWEEN_PRODUCTS)).fill_null(False).to_numpy()
    stream = gpu["stream"].to_numpy()[index]
    position = np.arange(len(index))
    is_stop = ~is_between & ~softmax
    # the last kernel before, and the first after, that is neither passing nor a softmax
    before = np.maximum.accumulate(np.where(is_stop, position, -1))
    after = np.minimum.accumulate(np.where(is_stop, position, len(index))[::-1])[::-1]
    middle = np.flatnonzero(softmax)
    start, end = before[middle], after[middle]
    is_block = (start >= 0) & (end < len(index))
    middle, start, end = middle[is_block], start[is_block], end[is_block]
    is_block = products[start] & products[end]
    is_block &= (stream[start] == stream[middle]) & (stream[end] == stream[middle])
    is_block &= (middle - start <= max_between + 1) & (end - middle <= max_between + 1)
    start, middle, end = start[is_block], middle[is_block], end[is_block]
    edge_counts = np.zeros(len(index) + 1, dtype=np.int64)
    np.add.at(edge_counts, start, 1)
    np.add.at(edge_counts, end + 1, -1)
    in_block[index[np.cumsum(edge_counts)[:-1] > 0]] = True
    return AttentionBlocks(
        in_block | is_fallback_kernel(a), in_block, index[start], index[middle], index[end]
    )


def estimate_fused_time(a: Analysis, blocks: AttentionBlocks) -> FusedEstimate | None:
    """Estimate how long fused kernels take for the same forward passes at the attainable rate: for
    the FLOPs of whole tiles, or for the bytes of queries, keys, values and results, whichever takes
    longer. The result is ``None`` if shapes or rates are unknown.

    Compared with the memory-efficient kernel in FP32 on an A100 (mask generation, five shapes of 7
    to 4,096 tokens and heads of 16 to 80): 15 to 24 TFLOP/s of whole tiles, of 15 attainable. By
    the FLOPs of the shapes alone: 0.1 to 14."""
    limits = attainable_roofs(a.hardware)
    half, full = (limits.matmul.get(name) for name in ("fp16", "fp32"))
    if half is None or full is None or limits.memory is None:
        return None
    measured_calls = tokens = 0
    half_ns = full_ns = 0.0
    wide = False
    for size, calls in _list_sizes(a, blocks):
        flops = 2.0 * size.batch * _round_up(size.queries, TILE) * _round_up(size.keys, TILE)
        flops *= _pad_width(size.width) + _pad_width(size.value_width)
        elements = size.batch * (size.queries + size.keys) * (size.width + size.value_width)
        read_ns = 1e9 * elements / limits.memory.rate
        half_ns += calls * (max(1e9 * flops / half.rate, min(size.bytes, 2) * read_ns) + KERNEL_NS)
        rate = full.rate if size.bytes > 2 else half.rate
        full_ns += calls * (max(1e9 * flops / rate, size.bytes * read_ns) + KERNEL_NS)
        measured_calls += calls
        tokens = max(tokens, size.queries, size.keys)
        wide |= size.bytes > 2
    if not measured_calls:
        return None
    # assume blocks without shapes, and the rest of the fallback, to be like the others
    scale = len(blocks.first) / measured_calls
    scale *= summed_duration(a, blocks.rows) / max(1, summed_duration(a, blocks.blocks))
    return FusedEstimate(half_ns * scale, full_ns * scale, tokens, wide)


class _Size(NamedTuple):
    """Sizes of one attention: ``batch`` (heads included) times [queries, width] x [width, keys],
    and [queries, keys] x [keys, value_width]."""

    batch: int
    queries: int
    keys: int
    width: int
    value_width: int
    bytes: int
    """Bytes of an element."""


def _list_sizes(a: Analysis, blocks: AttentionBlocks) -> Iterator[tuple[_Size, int]]:
    """Yield the recorded sizes of the blocks, and how many blocks have each."""
    gpu, cpu = a.trace.gpu, a.trace.cpu
    columns: dict[str, pl.Series] = {}
    for number, kernels in enumerate((blocks.first, blocks.softmax, blocks.last)):
        op = gpu["op"].gather(kernels)
        columns[f"op {number}"] = cpu["name"].gather(op).cast(pl.String)
        columns[f"inputs {number}"] = cpu["inputs"].gather(op)
    for *calls, count in pl.DataFrame(columns).group_by(pl.all()).len().iter_rows():
        inputs = [inputs_if_known(a, row) for row in calls[1::2]]
        scores = inputs[1] and inputs[1].tensor(0)
        first, last = (
            None
            if (product_inputs := inputs[n]) is None
            else parse_product(calls[2 * n] or "", product_inputs)
            for n in (0, 2)
        )
        if not scores or len(scores.shape) < 2 or not scores.elements or not last:
            continue
        value_width = last.batch * last.m * last.n * last.k // scores.elements
        size = width_of(last.a.dtype)
        if not size or not value_width:
            continue
        # a bias that is a product too (relative positions) may precede the softmax
        of_scores = first and first.batch * first.m * first.n == scores.elements
        *batch, queries, keys = scores.shape
        width = first.k if first and of_scores else value_width
        yield _Size(prod(batch), queries, keys, width, value_width, size), count


def inputs_if_known(a: Analysis, row: int | None) -> OpInputs | None:
    """Read the row of ``trace.inputs`` with this number, or return ``None`` without a number."""
    return None if row is None else inputs_at(a, row)


def _round_up(size: int, tile: int) -> int:
    return ceil(size / tile) * tile


def _pad_width(width: int) -> int:
    return max(TILE, _round_up(width, WIDTH_STEP))
