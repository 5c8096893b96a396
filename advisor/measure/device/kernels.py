"""Properties of each kernel: family, dtype, FLOPs, bytes, tensor cores, waves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import polars as pl
from numpy.typing import NDArray

from advisor.core.intervals import Bools, Floats
from advisor.core.trace import Trace
from advisor.measure.device.families import CODE, MATRIX, Family
from advisor.measure.device.kernel_names import describe_kernels
from advisor.measure.device.matmuls import parse_convolution, parse_product
from advisor.measure.device.roofline import (
    measure_residency,
    model_flop_utilisation,
    sum_families,
    sum_kernels,
)
from advisor.measure.device.shapes import FORMATS, Format, OpInputs, main_dtype
from advisor.measure.device.traffic import count_bytes, count_flops
from advisor.measure.host.launches import NO_ROW, Launches, Rows, find_launches
from advisor.measure.host.names import distinct_names, name_matches
from advisor.measure.host.stacks import climb_stack

if TYPE_CHECKING:
    from advisor.core.trace import Trace
    from advisor.measure import Analysis

__all__ = ["measure_kernels", "model_flop_utilisation", "sum_families", "sum_kernels"]

Codes = NDArray[np.int8]

_TRUE, _FALSE, _UNKNOWN = 1, 0, -1

_MATRIX_CODES = [CODE[name] for name in MATRIX]
_OF_STEP = [CODE[name] for name in ("elementwise", "reduction", "other")]
"""Families that count as the optimizer inside ``Optimizer.step``; a matrix product there (Muon,
Shampoo) keeps its own."""
_NARROW = [FORMATS.index(name) for name in ("fp16", "bf16", "fp8", "int8")]


class _Names(NamedTuple):
    """Properties from the kernels' names, aligned with ``trace.gpu`` (see
    ``kernel_names.describe_kernels``)."""

    family: Codes
    communication: Bools
    moving: Bools
    helper: Bools
    matrix_unit: Codes
    matrix_if_16_bit: Bools
    direction: Codes
    dtype: Codes
    gemv: Bools


def measure_kernels(a: Analysis) -> pl.DataFrame:
    """Compute ``Analysis.kernels``, but for what only an engine's marks tell of attention.

    Family: the operator that launched a kernel decides, except where the kernel's name shows that
    it is a by-product (a transpose or a bias copy inside a convolution), and the name decides where
    no operator of a known family launched it. Communication is decided by the name or by recorded
    arguments of a collective, never by the operator. FLOPs and bytes of an operator go to the
    kernels that do its arithmetic, in proportion to their durations; its other kernels (split-K
    reductions, epilogues) have 0 FLOPs and unknown bytes."""
    trace = a.trace
    gpu = trace.gpu
    kernel = (gpu["kind"] == "kernel").to_numpy()
    names = _look_at_names(trace, kernel)
    launches = find_launches(trace)
    cost_op, cost_of, cost = _operators(trace, launches)
    base = _by_purpose(kernel, names, launches)
    family = base.copy()
    relayout = (family == CODE["copy"]) & kernel & (launches.family == CODE["copy"])
    relayout &= cost.relayout[cost_of] | (launches.outer_family == CODE["layout"])
    family[relayout] = CODE["layout"]
    family[launches.optimizer & np.isin(family, _OF_STEP) & kernel] = CODE["optimizer"]
    communication = gpu["comm"].is_not_null().to_numpy() | (kernel & names.communication)
    family[communication] = CODE["communication"]
    family[(gpu["kind"] == "memcpy").to_numpy() & ~communication] = CODE["copy"]
    family[(gpu["kind"] == "memset").to_numpy() & ~communication] = CODE["memset"]

    op_name = _op_names(trace, launches)
    op_row = _rows(np.where(cost_op >= 0, cost_op, _responsible(launches)))
    family[_other_lookups(trace, family, op_name, op_row)] = CODE["indexing"]

    own = kernel & ~communication & (cost_op >= 0)
    own &= (base == launches.family) | (launches.family == NO_ROW)  # it does its operator's work
    matrix = np.isin(family, _MATRIX_CODES)
    vendor = trace.meta.vendor
    compute = a.device.compute if a.device is not None and vendor != "amd" else None
    dtype = np.where(own & (cost.dtype[cost_of] >= 0), cost.dtype[cost_of], names.dtype)
    dtype[~kernel] = NO_ROW
    tensor_core = _tensor_core(family, matrix, names, dtype, compute)
    # Tensor cores of NVIDIA have no fp32: what they do with fp32 inputs is TF32.
    on_tensor = matrix & (tensor_core == _TRUE) & (vendor != "amd")
    dtype[on_tensor & (dtype == FORMATS.index("fp32"))] = FORMATS.index("tf32")
    flops, moved = _share_out(gpu, own, names, cost_of, cost)
    moved = np.where(kernel, moved, _memory_operations(gpu))
    resident = measure_residency(trace)
    eligible = _eligible(
        family, matrix, names, dtype, tensor_core, own & cost.is_vector_product[cost_of], compute
    )
    return pl.DataFrame(
        {
            "family": _enum(family, Family), "communication": communication,
            "tensor_core": _optional_bool(tensor_core), "eligible": _optional_bool(eligible),
            "dtype": _enum(dtype, Format), "flops": pl.Series(flops).fill_nan(None),
            "moved": pl.Series(moved).fill_nan(None), "waves": resident.waves,
            "occupancy": resident.occupancy, "op_name": op_name, "op_row": op_row,
            "sdpa": pl.Series(launches.sdpa, dtype=pl.Int32).replace(NO_ROW, None),
        }
    )  # fmt: skip


def _other_lookups(trace: Trace, family: Codes, op_name: pl.Series, op_row: pl.Series) -> Rows:
    """Return the rows of ``trace.gpu`` that look up what is no embedding by the names of kernel,
    operator and the two around that: ``aten::embedding`` calls ``aten::index_select``, and that
    ``aten::gather``."""
    rows = np.flatnonzero(family == CODE["embedding"])
    cpu, row = trace.cpu, op_row.gather(rows)
    names = [trace.gpu["name"].gather(rows), op_name.gather(rows)]
    for _ in range(2):
        row = cpu["parent"].gather(row)
        names.append(cpu["name"].gather(row))
    of_table = np.zeros(len(rows), dtype=bool)
    for each in names:
        of_table |= name_matches(each, "(?i)embed").fill_null(value=False).to_numpy()
    return rows[~of_table]


def _look_at_names(trace: Trace, kernel: Bools) -> _Names:
    """Describe each distinct kernel name once, and spread that over the rows."""
    gpu = trace.gpu
    index = np.flatnonzero(kernel)
    column = gpu["name"].gather(index)
    texts, which = distinct_names(column)
    described = describe_kernels(texts)

    missing: dict[str, int | bool] = dict.fromkeys(_Names._fields, False)
    missing |= {"family": CODE["other"], "matrix_unit": _UNKNOWN, "direction": 0, "dtype": NO_ROW}
    described = described.with_columns(
        pl.col("family", "dtype").to_physical().cast(pl.Int8),
        pl.col("matrix_unit").cast(pl.Int8),
        gemv=texts.str.contains(r"gemv|gemmk1|(^|\s)dot_kernel|conv_depthwise"),
    )
    columns: dict[str, Any] = {}
    for name, other in missing.items():  # the value of each row's name; ``other``: no kernel
        values = described[name].fill_null(other).to_numpy()
        columns[name] = np.full(gpu.height, other, dtype=values.dtype)
        columns[name][index] = np.append(values, values.dtype.type(other))[which]
    return _Names(**columns)


def _operators(trace: Trace, launches: Launches) -> tuple[Rows, Rows, Costs]:
    """Find the operator whose work a kernel is part of (row, -1: none), its place among the
    distinct ones, and the costs of those.

    An operator without recorded shapes gives way to the one around it when that is of the same
    family (``aten::mm`` inside ``aten::matmul``)."""
    inputs = trace.cpu["inputs"].fill_null(NO_ROW).to_numpy()
    described = np.append(inputs >= 0, False)  # the last entry is that of row -1
    op = launches.op
    up = ~described[op] & described[launches.outer_op] & (launches.family == launches.outer_family)
    op = np.where(up, launches.outer_op, op)
    triton = _is_triton(trace, launches.innermost_op)
    op = np.where((op < 0) & triton, launches.innermost_op, op)
    distinct, place = np.unique(op, return_inverse=True)
    result = sum_costs(trace, distinct)
    # When an operator and one inside it both have a formula for the same work, the inner counts.
    family = np.full(len(distinct), NO_ROW, dtype=np.int8)
    family[place] = launches.family
    counted = np.isin(family, _MATRIX_CODES) & (distinct >= 0) & ~np.isnan(result.flops)
    if counted.any():
        wanted = np.zeros(trace.cpu.height, dtype=np.bool_)
        wanted[distinct[counted]] = True
        parent = trace.cpu["parent"].fill_null(NO_ROW).cast(pl.Int64).to_numpy()
        around = climb_stack(parent, wanted, parent[distinct[counted]])
        twice = np.isin(distinct, around[around >= 0])
        result.flops[twice] = np.nan
        result.moved[twice] = np.nan
    return op, place.astype(np.int64), result


def _is_triton(trace: Trace, rows: Rows) -> Bools:
    """Find kernels whose arguments inductor's wrapper records as an operator of their name."""
    there = np.flatnonzero(rows >= 0)
    result = np.zeros(len(rows), dtype=np.bool_)
    if len(there):
        result[there] = name_matches(trace.cpu["name"].gather(rows[there]), "^triton_").to_numpy()
    return result


def _by_purpose(kernel: Bools, names: _Names, launches: Launches) -> Codes:
    """Return the family code of kernels, before what surrounds their operator is looked at."""
    op, name = launches.family, names.family
    family = np.where(op >= 0, op, name)
    named = name != CODE["other"]
    # An operator of no known family stands between: the kernel's own name says more.
    family = np.where((launches.op != launches.innermost_op) & named, name, family)
    beside = np.isin(op, _MATRIX_CODES) & ~np.isin(name, _MATRIX_CODES) & named
    beside |= (op == CODE["attention"]) & (name == CODE["gemm"])
    beside |= names.moving & ~np.isin(op, [CODE["copy"], CODE["layout"]])
    beside |= (op == CODE["copy"]) & (name == CODE["layout"])
    family = np.where(beside, name, family)
    return np.where(kernel, family, CODE["other"]).astype(np.int8)


def _tensor_core(
    family: Codes, matrix: Bools, names: _Names, dtype: Codes, compute: tuple[int, int] | None
) -> Codes:
    """Tell whether kernels run on matrix units: by name, then by number format and device."""
    result = np.where(matrix, names.matrix_unit, _FALSE)
    result[family == CODE["other"]] = _UNKNOWN
    open_question = matrix & (result == _UNKNOWN)
    result[open_question & names.matrix_if_16_bit & np.isin(dtype, _NARROW)] = _TRUE
    if compute is not None and compute < (8, 0):
        wide = np.isin(dtype, [FORMATS.index("fp32"), FORMATS.index("fp64")])
        result[matrix & wide & (result == _UNKNOWN)] = _FALSE  # no TF32 before Ampere
    if compute is not None and compute < (7, 0):
        result[matrix] = _FALSE
    return result.astype(np.int8)


def _eligible(
    family: Codes,
    matrix: Bools,
    names: _Names,
    dtype: Codes,
    tensor_core: Codes,
    vector: Bools,
    compute: tuple[int, int] | None,
) -> Codes:
    """Tell whether matrix units could do a kernel's work with 16-bit or TF32 inputs."""
    result = np.where(family == CODE["other"], _UNKNOWN, _FALSE)
    possible = (dtype != NO_ROW) & (dtype != FORMATS.index("fp64"))
    result[matrix] = np.where(possible | (tensor_core == _TRUE), _TRUE, _UNKNOWN)[matrix]
    result[matrix & (dtype == FORMATS.index("fp64"))] = _FALSE
    result[matrix & (names.gemv | vector) & (tensor_core != _TRUE)] = _FALSE
    result[matrix & names.helper] = _FALSE
    if compute is not None and compute < (7, 0):
        result[matrix] = _FALSE
    return result.astype(np.int8)


def _share_out(
    gpu: pl.DataFrame, own: Bools, names: _Names, cost_of: Rows, cost: Costs
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return FLOPs and bytes of every kernel: its operator's, shared out by duration.

    The two gradients of a convolution cost the same; where the names tell which kernels do which,
    each gets its half whatever their durations."""
    flops = np.full(len(own), np.nan)
    moved = np.full(len(own), np.nan)
    rows = np.flatnonzero(own)
    if not len(rows):
        return flops, moved
    groups = len(cost.flops)
    which = cost_of[rows]
    main = ~names.helper[rows]
    main |= np.bincount(which, main, minlength=groups)[which] == 0  # all are helpers: none is
    dur = gpu["dur"].to_numpy()[rows].astype(np.float64)
    zero = np.bincount(which, np.where(main, dur, 0.0), minlength=groups)[which] <= 0
    weight = np.where(main, np.where(zero, 1.0, dur), 0.0)
    total = np.bincount(which, weight, minlength=groups)[which]
    moved[rows] = np.where(main, cost.moved[which] * weight / total, np.nan)
    direction = np.where(main, names.direction[rows], 0)
    unnamed = np.bincount(which, main & (direction == 0), minlength=groups)[which] > 0
    halves = (cost.gradients[which] == 2) & ~unnamed
    for side in (1, 2):  # both gradients must be there, else one of them has no name
        halves &= np.bincount(which, direction == side, minlength=groups)[which] > 0
    part = np.where(halves, which * 3 + direction, which * 3)
    within = np.bincount(part, weight, minlength=3 * groups)[part]
    work = np.where(halves, cost.flops[which] / 2, cost.flops[which])
    share = np.divide(weight, within, out=np.zeros_like(weight), where=within > 0)
    flops[rows] = np.where(main, work * share, np.where(np.isnan(work), np.nan, 0.0))
    return flops, moved


def _memory_operations(gpu: pl.DataFrame) -> NDArray[np.float64]:
    """Return the bytes moved by copies and memsets: a copy within the device reads and writes."""
    size = gpu["bytes"].cast(pl.Float64).fill_null(np.nan).to_numpy()
    inside = (gpu["copy"] == "DtoD").fill_null(False).to_numpy()
    moved: NDArray[np.float64] = np.where(inside, 2 * size, size)
    return moved


def _responsible(launches: Launches) -> Rows:
    """Return the row of the operator judged responsible, -1: none."""
    return np.where(launches.op >= 0, launches.op, launches.innermost_op)


def _rows(rows: Rows) -> pl.Series:
    return pl.Series(rows, dtype=pl.Int64).set(pl.Series(rows < 0), None)


def _op_names(trace: Trace, launches: Launches) -> pl.Series:
    return trace.cpu["name"].gather(_rows(_responsible(launches))).alias("op_name")


def _enum(codes: Codes, dtype: pl.Enum) -> pl.Series:
    physical = pl.Series(codes, dtype=pl.Int16).replace(NO_ROW, None).cast(pl.UInt8)
    names = pl.Series(dtype.categories, dtype=dtype)
    return names.gather(physical.cast(pl.Int64))


def _optional_bool(codes: Codes) -> pl.Series:
    known = codes != _UNKNOWN
    return pl.Series(codes == _TRUE).set(pl.Series(~known), None)


class Costs(NamedTuple):
    """Costs of operator rows, one entry for each row asked for; NaN: not known."""

    flops: Floats
    moved: Floats
    dtype: NDArray[np.int8]
    """Place of the number format in FORMATS; -1: not recorded."""
    is_vector_product: NDArray[np.bool_]
    """Whether it is a product with a vector: too little reuse for matrix units."""
    relayout: NDArray[np.bool_]
    """Whether it is a copy between equal types that only changes the order of the data."""
    gradients: NDArray[np.int8]
    """Gradients (input's, weight's) that a convolution's backward computes: 0, 1 or 2."""


def sum_costs(trace: Trace, ops: Rows) -> Costs:
    """Estimate the costs of rows of ``trace.cpu`` (-1: nothing known)."""
    count = len(ops)
    inputs = np.full(count, NO_ROW, dtype=np.int64)
    names = np.zeros(count, dtype=np.int64)
    there = np.flatnonzero(ops >= 0)
    if len(there):
        inputs[there] = trace.cpu["inputs"].gather(ops[there]).fill_null(NO_ROW).to_numpy()
        physical = trace.cpu["name"].gather(ops[there]).to_physical()
        names[there] = physical.fill_null(0).to_numpy()
    known = np.flatnonzero(inputs >= 0)
    keys, where = np.unique(names[known] << 32 | inputs[known], return_inverse=True)
    result = Costs(
        np.full(count, np.nan),
        np.full(count, np.nan),
        np.full(count, NO_ROW, dtype=np.int8),
        np.zeros(count, dtype=np.bool_),
        np.zeros(count, dtype=np.bool_),
        np.zeros(count, dtype=np.int8),
    )
    if not len(keys):
        return result
    first = np.zeros(len(keys), dtype=np.int64)
    first[where] = known
    spelled = trace.cpu["name"].gather(ops[first]).cast(pl.String).to_list()
    rows = trace.inputs[(keys & 0xFFFFFFFF).tolist()].rows()
    # A loop over the distinct pairs of operator and inputs: some hundreds, whatever the length.
    table = [
        _cost(name, OpInputs(*(text or "" for text in row)))
        for name, row in zip(spelled, rows, strict=True)
    ]
    columns: tuple[NDArray[Any], ...] = tuple(result)
    for column, values in zip(columns, zip(*table, strict=True), strict=True):
        column[known] = np.array(values, dtype=column.dtype)[where]
    return result


def _cost(name: str, x: OpInputs) -> tuple[float, float, int, bool, bool, int]:
    work, traffic, dtype = count_flops(name, x), count_bytes(name, x), main_dtype(name, x)
    matrix = parse_product(name, x)
    conv = parse_convolution(name, x)
    return (
        np.nan if work is None else work,
        np.nan if traffic is None else traffic,
        NO_ROW if dtype is None else FORMATS.index(dtype),
        matrix is not None and matrix.is_vector_product,
        name == "aten::copy_" and _relayout(x),
        sum(conv.output_mask[:2]) if conv is not None and conv.backward else 0,
    )


def _relayout(x: OpInputs) -> bool:
    target, source = x.tensor(0), x.tensor(1)
    if target is None or source is None or target.strides is None or source.strides is None:
        return False
    if target.dtype != source.dtype or target.shape != source.shape:
        return False
    if source.stored_elements != source.elements or target.elements < 2:
        return False  # a broadcast is written out
    order = zip(target.shape, target.strides, source.strides, strict=False)
    return any(to != of for size, to, of in order if size > 1)


MIN_VARIATION = 3.0
"""Ratio of durations of like kernels from which they vary; on GPUs that one program uses, kernels
with 0 to 15% of the time do."""
MIN_LIKE = 5
"""Number of like launches from which they are compared."""
MOSTLY_VARYING = 0.5
"""Share of the kernel time in kernels that vary, from which the times are of no use."""


class VaryingKernels(NamedTuple):
    """Kernels that take several times as long in one launch as in another, on the same inputs."""

    share: float
    """Their share of the kernel time in the steps."""
    ratio: float
    """The 90th over the 10th percentile of their durations, of the kernel that takes longest."""

    @property
    def are_most(self) -> bool:
        """Whether they take most of the kernel time, so that it says little of the program."""
        return self.share >= MOSTLY_VARYING


def find_varying_kernels(a: Analysis) -> VaryingKernels:
    """Find kernels of one name, grid and inputs of the operator whose durations differ by
    ``MIN_VARIATION`` and more. Of the program nothing differs between them, so the device does:
    another program uses it too, or its clock falls. Collectives, whose time contains waiting, are
    left out."""
    gpu = a.trace.gpu
    rows = a.in_window & (gpu["kind"] == "kernel").to_numpy() & gpu["op"].is_not_null().to_numpy()
    work = gpu.filter(pl.Series(rows & ~a.kernels["communication"].to_numpy()))
    whole = float(work["dur"].sum())
    same = ("name", "blocks", "threads", "inputs", "stream")
    ends = (
        pl.col("dur").quantile(end).alias(name) for end, name in ((0.1, "least"), (0.9, "most"))
    )
    table = (
        work.with_columns(inputs=a.trace.cpu["inputs"].gather(work["op"]))
        .filter(pl.col("inputs").is_not_null())
        .group_by(same)
        .agg(pl.len().alias("count"), pl.col("dur").sum(), *ends)
        .filter(pl.col("count") >= MIN_LIKE, pl.col("most") >= MIN_VARIATION * pl.col("least"))
        .sort("dur", *same)
    )
    if table.is_empty() or not whole:
        return VaryingKernels(0.0, 1.0)
    longest = table.row(-1, named=True)
    ratio = longest["most"] / max(1.0, longest["least"])
    return VaryingKernels(float(table["dur"].sum()) / whole, float(ratio))
