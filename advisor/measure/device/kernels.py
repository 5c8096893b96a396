"""Properties of each kernel: family, dtype, FLOPs, bytes, tensor cores, waves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import polars as pl
from numpy.typing import NDArray

from advisor.core.intervals import Bools, Floats
from advisor.core.trace import Trace
from advisor.measure.device.families import FAMILY_CODE, MATRIX, Family
from advisor.measure.device.kernel_names import describe_kernels
from advisor.measure.device.matmuls import parse_convolution, parse_product
from advisor.measure.device.roofline import (
    measure_residency,
    model_flop_utilization,
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

__all__ = ["measure_kernels", "model_flop_utilization", "sum_families", "sum_kernels"]

Codes = NDArray[np.int8]

_TRUE, _FALSE, _UNKNOWN = 1, 0, -1

_MATRIX_CODES = [FAMILY_CODE[name] for name in MATRIX]
_OPTIMIZER_CODES = [FAMILY_CODE[name] for name in ("elementwise", "reduction", "other")]
"""Families that count as the optimizer inside ``Optimizer.step``. A matrix product there (Muon,
Shampoo) keeps its own family."""
_NARROW_FORMATS = [FORMATS.index(name) for name in ("fp16", "bf16", "fp8", "int8")]


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
    """Compute ``Analysis.kernels``, except for attention that only an engine's marks show.

    Family: the operator that launched a kernel decides, unless the kernel's name shows that it is a
    by-product (a transpose or a bias copy inside a convolution). The name decides if no operator of
    a known family launched it. The name or recorded arguments of a collective decide on
    communication, never the operator. FLOPs and bytes of an operator go to the kernels that do its
    arithmetic, in proportion to their durations; its other kernels (split-K reductions, epilogues)
    have 0 FLOPs and unknown bytes."""
    trace = a.trace
    gpu = trace.gpu
    is_kernel = (gpu["kind"] == "kernel").to_numpy()
    names = _describe_names(trace, is_kernel)
    launches = find_launches(trace)
    cost_op, cost_of, cost = _find_operators(trace, launches)
    purpose_family = _families_by_purpose(is_kernel, names, launches)
    family = purpose_family.copy()
    relayout = (
        (family == FAMILY_CODE["copy"]) & is_kernel & (launches.family == FAMILY_CODE["copy"])
    )
    relayout &= cost.relayout[cost_of] | (launches.outer_family == FAMILY_CODE["layout"])
    family[relayout] = FAMILY_CODE["layout"]
    family[launches.optimizer & np.isin(family, _OPTIMIZER_CODES) & is_kernel] = FAMILY_CODE[
        "optimizer"
    ]
    communication = gpu["comm"].is_not_null().to_numpy() | (is_kernel & names.communication)
    family[communication] = FAMILY_CODE["communication"]
    family[(gpu["kind"] == "memcpy").to_numpy() & ~communication] = FAMILY_CODE["copy"]
    family[(gpu["kind"] == "memset").to_numpy() & ~communication] = FAMILY_CODE["memset"]

    op_name = trace.cpu["name"].gather(_to_row_series(_responsible_rows(launches))).alias("op_name")
    op_row = _to_row_series(np.where(cost_op >= 0, cost_op, _responsible_rows(launches)))
    family[_find_other_lookups(trace, family, op_name, op_row)] = FAMILY_CODE["indexing"]

    is_own = is_kernel & ~communication & (cost_op >= 0)
    is_own &= (purpose_family == launches.family) | (
        launches.family == NO_ROW
    )  # does its operator's work
    is_matrix = np.isin(family, _MATRIX_CODES)
    vendor = trace.meta.vendor
    compute = a.device.compute if a.device is not None and vendor != "amd" else None
    dtype = np.where(is_own & (cost.dtype[cost_of] >= 0), cost.dtype[cost_of], names.dtype)
    dtype[~is_kernel] = NO_ROW
    tensor_core = _find_tensor_core_use(family, is_matrix, names, dtype, compute)
    # NVIDIA's tensor cores have no fp32: with fp32 inputs they compute in TF32.
    on_tensor_cores = is_matrix & (tensor_core == _TRUE) & (vendor != "amd")
    dtype[on_tensor_cores & (dtype == FORMATS.index("fp32"))] = FORMATS.index("tf32")
    flops, moved = _distribute_costs(gpu, is_own, names, cost_of, cost)
    moved = np.where(is_kernel, moved, _count_memory_bytes(gpu))
    residency = measure_residency(trace)
    eligible = _find_eligible(
        family,
        is_matrix,
        names,
        dtype,
        tensor_core,
        is_own & cost.is_vector_product[cost_of],
        compute,
    )
    return pl.DataFrame(
        {
            "family": _to_enum(family, Family), "communication": communication,
            "tensor_core": _to_optional_bool(tensor_core), "eligible": _to_optional_bool(eligible),
            "dtype": _to_enum(dtype, Format), "flops": pl.Series(flops).fill_nan(None),
            "moved": pl.Series(moved).fill_nan(None), "waves": residency.waves,
            "occupancy": residency.occupancy, "op_name": op_name, "op_row": op_row,
            "sdpa": pl.Series(launches.sdpa, dtype=pl.Int32).replace(NO_ROW, None),
        }
    )  # fmt: skip


def _find_other_lookups(trace: Trace, family: Codes, op_name: pl.Series, op_row: pl.Series) -> Rows:
    """Return the rows of ``trace.gpu`` that look up something other than an embedding, by the names
    of kernel, operator and its two ancestors: ``aten::embedding`` calls ``aten::index_select``,
    which calls ``aten::gather``."""
    rows = np.flatnonzero(family == FAMILY_CODE["embedding"])
    cpu, row = trace.cpu, op_row.gather(rows)
    names = [trace.gpu["name"].gather(rows), op_name.gather(rows)]
    for _ in range(2):
        row = cpu["parent"].gather(row)
        names.append(cpu["name"].gather(row))
    of_table = np.zeros(len(rows), dtype=bool)
    for column in names:
        of_table |= name_matches(column, "(?i)embed").fill_null(value=False).to_numpy()
    return rows[~of_table]


def _describe_names(trace: Trace, is_kernel: Bools) -> _Names:
    """Describe each distinct kernel name once, and assign the result to all rows."""
    gpu = trace.gpu
    index = np.flatnonzero(is_kernel)
    column = gpu["name"].gather(index)
    texts, name_index = distinct_names(column)
    described = describe_kernels(texts)

    missing: dict[str, int | bool] = dict.fromkeys(_Names._fields, False)
    missing |= {
        "family": FAMILY_CODE["other"],
        "matrix_unit": _UNKNOWN,
        "direction": 0,
        "dtype": NO_ROW,
    }
    described = described.with_columns(
        pl.col("family", "dtype").to_physical().cast(pl.Int8),
        pl.col("matrix_unit").cast(pl.Int8),
        gemv=texts.str.contains(r"gemv|gemmk1|(^|\s)dot_kernel|conv_depthwise"),
    )
    columns: dict[str, Any] = {}
    for name, default in missing.items():  # the value of each row's name, else ``other``
        values = described[name].fill_null(default).to_numpy()
        columns[name] = np.full(gpu.height, default, dtype=values.dtype)
        columns[name][index] = np.append(values, values.dtype.type(default))[name_index]
    return _Names(**columns)


def _find_operators(trace: Trace, launches: Launches) -> tuple[Rows, Rows, Costs]:
    """Find the operator whose work a kernel is part of (row, or -1), its index among the distinct
    operators, and their costs.

    An operator without recorded shapes is replaced by its parent of the same family (``aten::mm``
    inside ``aten::matmul``)."""
    inputs = trace.cpu["inputs"].fill_null(NO_ROW).to_numpy()
    has_inputs = np.append(inputs >= 0, False)  # the last entry is for row -1
    op = launches.op
    use_parent = (
        ~has_inputs[op] & has_inputs[launches.outer_op] & (launches.family == launches.outer_family)
    )
    op = np.where(use_parent, launches.outer_op, op)
    triton = _is_triton(trace, launches.innermost_op)
    op = np.where((op < 0) & triton, launches.innermost_op, op)
    distinct, index = np.unique(op, return_inverse=True)
    costs = sum_costs(trace, distinct)
    # If an operator and one inside it both have a formula for the same work, the inner one counts.
    family = np.full(len(distinct), NO_ROW, dtype=np.int8)
    family[index] = launches.family
    is_counted = np.isin(family, _MATRIX_CODES) & (distinct >= 0) & ~np.isnan(costs.flops)
    if is_counted.any():
        is_candidate = np.zeros(trace.cpu.height, dtype=np.bool_)
        is_candidate[distinct[is_counted]] = True
        parent = trace.cpu["parent"].fill_null(NO_ROW).cast(pl.Int64).to_numpy()
        ancestors = climb_stack(parent, is_candidate, parent[distinct[is_counted]])
        is_nested = np.isin(distinct, ancestors[ancestors >= 0])
        costs.flops[is_nested] = np.nan
        costs.moved[is_nested] = np.nan
    return op, index.astype(np.int64), costs


def _is_triton(trace: Trace, rows: Rows) -> Bools:
    """Find kernels whose arguments inductor's wrapper records as an operator of their name."""
    present = np.flatnonzero(rows >= 0)
    result = np.zeros(len(rows), dtype=np.bool_)
    if len(present):
        result[present] = name_matches(
            trace.cpu["name"].gather(rows[present]), "^triton_"
        ).to_numpy()
    return result


def _families_by_purpose(is_kernel: Bools, names: _Names, launches: Launches) -> Codes:
    """Return the family code of kernels, without the surroundings of their operator."""
    op_family, name_family = launches.family, names.family
    family = np.where(op_family >= 0, op_family, name_family)
    has_known_name = name_family != FAMILY_CODE["other"]
    # An operator of unknown family is in between: the kernel's own name says more.
    family = np.where((launches.op != launches.innermost_op) & has_known_name, name_family, family)
    is_by_product = (
        np.isin(op_family, _MATRIX_CODES) & ~np.isin(name_family, _MATRIX_CODES) & has_known_name
    )
    is_by_product |= (op_family == FAMILY_CODE["attention"]) & (name_family == FAMILY_CODE["gemm"])
    is_by_product |= names.moving & ~np.isin(
        op_family, [FAMILY_CODE["copy"], FAMILY_CODE["layout"]]
    )
    is_by_product |= (op_family == FAMILY_CODE["copy"]) & (name_family == FAMILY_CODE["layout"])
    family = np.where(is_by_product, name_family, family)
    return np.where(is_kernel, family, FAMILY_CODE["other"]).astype(np.int8)


def _find_tensor_core_use(
    family: Codes, is_matrix: Bools, names: _Names, dtype: Codes, compute: tuple[int, int] | None
) -> Codes:
    """Return whether kernels run on matrix units, by name, then by number format and device."""
    result = np.where(is_matrix, names.matrix_unit, _FALSE)
    result[family == FAMILY_CODE["other"]] = _UNKNOWN
    is_open = is_matrix & (result == _UNKNOWN)
    result[is_open & names.matrix_if_16_bit & np.isin(dtype, _NARROW_FORMATS)] = _TRUE
    if compute is not None and compute < (8, 0):
        is_wide = np.isin(dtype, [FORMATS.index("fp32"), FORMATS.index("fp64")])
        result[is_matrix & is_wide & (result == _UNKNOWN)] = _FALSE  # no TF32 before Ampere
    if compute is not None and compute < (7, 0):
        result[is_matrix] = _FALSE
    return result.astype(np.int8)


def _find_eligible(
    family: Codes,
    is_matrix: Bools,
    names: _Names,
    dtype: Codes,
    tensor_core: Codes,
    is_vector_product: Bools,
    compute: tuple[int, int] | None,
) -> Codes:
    """Return whether matrix units could do a kernel's work with 16-bit or TF32 inputs."""
    result = np.where(family == FAMILY_CODE["other"], _UNKNOWN, _FALSE)
    possible = (dtype != NO_ROW) & (dtype != FORMATS.index("fp64"))
    result[is_matrix] = np.where(possible | (tensor_core == _TRUE), _TRUE, _UNKNOWN)[is_matrix]
    result[is_matrix & (dtype == FORMATS.index("fp64"))] = _FALSE
    result[is_matrix & (names.gemv | is_vector_product) & (tensor_core != _TRUE)] = _FALSE
    result[is_matrix & names.helper] = _FALSE
    if compute is not None and compute < (7, 0):
        result[is_matrix] = _FALSE
    return result.astype(np.int8)


def _distribute_costs(
    gpu: pl.DataFrame, is_own: Bools, names: _Names, cost_of: Rows, cost: Costs
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return FLOPs and bytes of every kernel: its share of the operator's, in proportion to
    duration.

    The two gradients of a convolution cost the same. If the names show which kernels compute which
    gradient, each gets half whatever the durations."""
    flops = np.full(len(is_own), np.nan)
    moved = np.full(len(is_own), np.nan)
    rows = np.flatnonzero(is_own)
    if not len(rows):
        return flops, moved
    groups = len(cost.flops)
    index = cost_of[rows]
    is_main = ~names.helper[rows]
    is_main |= (
        np.bincount(index, is_main, minlength=groups)[index] == 0
    )  # if all are helpers, none is
    dur = gpu["dur"].to_numpy()[rows].astype(np.float64)
    has_no_time = np.bincount(index, np.where(is_main, dur, 0.0), minlength=groups)[index] <= 0
    weight = np.where(is_main, np.where(has_no_time, 1.0, dur), 0.0)
    total = np.bincount(index, weight, minlength=groups)[index]
    moved[rows] = np.where(is_main, cost.moved[index] * weight / total, np.nan)
    direction = np.where(is_main, names.direction[rows], 0)
    has_unnamed = np.bincount(index, is_main & (direction == 0), minlength=groups)[index] > 0
    split_in_half = (cost.gradients[index] == 2) & ~has_unnamed
    for gradient in (1, 2):  # both gradients must be named
        split_in_half &= np.bincount(index, direction == gradient, minlength=groups)[index] > 0
    part_index = np.where(split_in_half, index * 3 + direction, index * 3)
    part_weight = np.bincount(part_index, weight, minlength=3 * groups)[part_index]
    work = np.where(split_in_half, cost.flops[index] / 2, cost.flops[index])
    share = np.divide(weight, part_weight, out=np.zeros_like(weight), where=part_weight > 0)
    flops[rows] = np.where(is_main, work * share, np.where(np.isnan(work), np.nan, 0.0))
    return flops, moved


def _count_memory_bytes(gpu: pl.DataFrame) -> NDArray[np.float64]:
    """Return the bytes moved by copies and memsets. A copy within the device reads and writes."""
    size = gpu["bytes"].cast(pl.Float64).fill_null(np.nan).to_numpy()
    within_device = (gpu["copy"] == "DtoD").fill_null(False).to_numpy()
    moved: NDArray[np.float64] = np.where(within_device, 2 * size, size)
    return moved


def _responsible_rows(launches: Launches) -> Rows:
    """Return the row of the operator judged responsible, or -1."""
    return np.where(launches.op >= 0, launches.op, launches.innermost_op)


def _to_row_series(rows: Rows) -> pl.Series:
    return pl.Series(rows, dtype=pl.Int64).set(pl.Series(rows < 0), None)


def _to_enum(codes: Codes, dtype: pl.Enum) -> pl.Series:
    physical = pl.Series(codes, dtype=pl.Int16).replace(NO_ROW, None).cast(pl.UInt8)
    names = pl.Series(dtype.categories, dtype=dtype)
    return names.gather(physical.cast(pl.Int64))


def _to_optional_bool(codes: Codes) -> pl.Series:
    is_known = codes != _UNKNOWN
    return pl.Series(codes == _TRUE).set(pl.Series(~is_known), None)


class Costs(NamedTuple):
    """Costs of operator rows, with one entry per requested row; NaN if unknown."""

    flops: Floats
    moved: Floats
    dtype: NDArray[np.int8]
    """Index of the number format in FORMATS, or -1 if not recorded."""
    is_vector_product: NDArray[np.bool_]
    """Whether it is a product with a vector, which has too little reuse for matrix units."""
    relayout: NDArray[np.bool_]
    """Whether it is a copy between equal types that only changes the order of the data."""
    gradients: NDArray[np.int8]
    """Number of gradients (input, weight) that a convolution's backward computes: 0, 1 or 2."""


def sum_costs(trace: Trace, ops: Rows) -> Costs:
    """Estimate the costs of rows of ``trace.cpu`` (-1 for an unknown row)."""
    count = len(ops)
    inputs = np.full(count, NO_ROW, dtype=np.int64)
    names = np.zeros(count, dtype=np.int64)
    present = np.flatnonzero(ops >= 0)
    if len(present):
        inputs[present] = trace.cpu["inputs"].gather(ops[present]).fill_null(NO_ROW).to_numpy()
        physical = trace.cpu["name"].gather(ops[present]).to_physical()
        names[present] = physical.fill_null(0).to_numpy()
    known_rows = np.flatnonzero(inputs >= 0)
    keys, key_index = np.unique(names[known_rows] << 32 | inputs[known_rows], return_inverse=True)
    costs = Costs(
        np.full(count, np.nan),
        np.full(count, np.nan),
        np.full(count, NO_ROW, dtype=np.int8),
        np.zeros(count, dtype=np.bool_),
        np.zeros(count, dtype=np.bool_),
        np.zeros(count, dtype=np.int8),
    )
    if not len(keys):
        return costs
    first = np.zeros(len(keys), dtype=np.int64)
    first[key_index] = known_rows
    op_names = trace.cpu["name"].gather(ops[first]).cast(pl.String).to_list()
    rows = trace.inputs[(keys & 0xFFFFFFFF).tolist()].rows()
    # A loop over the distinct pairs of operator and inputs: some hundreds for any trace length.
    table = [
        _estimate_cost(name, OpInputs(*(text or "" for text in row)))
        for name, row in zip(op_names, rows, strict=True)
    ]
    columns: tuple[NDArray[Any], ...] = tuple(costs)
    for column, values in zip(columns, zip(*table, strict=True), strict=True):
        column[known_rows] = np.array(values, dtype=column.dtype)[key_index]
    return costs


def _estimate_cost(name: str, inputs: OpInputs) -> tuple[float, float, int, bool, bool, int]:
    flops, traffic, dtype = (
        count_flops(name, inputs),
        count_bytes(name, inputs),
        main_dtype(name, inputs),
    )
    product = parse_product(name, inputs)
    conv = parse_convolution(name, inputs)
    return (
        np.nan if flops is None else flops,
        np.nan if traffic is None else traffic,
        NO_ROW if dtype is None else FORMATS.index(dtype),
        product is not None and product.is_vector_product,
        name == "aten::copy_" and _is_relayout(inputs),
        sum(conv.output_mask[:2]) if conv is not None and conv.backward else 0,
    )


def _is_relayout(inputs: OpInputs) -> bool:
    target, source = inputs.tensor(0), inputs.tensor(1)
    if target is None or source is None or target.strides is None or source.strides is None:
        return False
    if target.dtype != source.dtype or target.shape != source.shape:
        return False
    if source.stored_elements != source.elements or target.elements < 2:
        return False  # a broadcast is written out
    dims = zip(target.shape, target.strides, source.strides, strict=False)
    return any(target_step != source_step for size, target_step, source_step in dims if size > 1)


MIN_VARIATION = 3.0
"""Minimum ratio of durations at which similar kernels vary. On GPUs used by one program, kernels
with 0 to 15% of the time vary."""
_MIN_LAUNCHES = 5
"""Minimum number of similar launches for a comparison."""
MIN_VARYING_SHARE = 0.5
"""Minimum share of the kernel time in varying kernels at which the times are useless."""


class VaryingKernels(NamedTuple):
    """Kernels that take several times as long in one launch as in another, on the same inputs."""

    share: float
    """Share of varying kernels in the kernel time of the steps."""
    ratio: float
    """90th over 10th percentile of the durations of the kernel that takes longest."""

    @property
    def are_most(self) -> bool:
        """Whether they take most of the kernel time, so that it says little about the program."""
        return self.share >= MIN_VARYING_SHARE


def find_varying_kernels(a: Analysis) -> VaryingKernels:
    """Find kernels with the same name, grid and operator inputs whose durations differ by
    ``MIN_VARIATION`` or more. Since the program does the same each time, the device must differ:
    another program uses it too, or its clock falls. Collectives are excluded, because their time
    includes waiting."""
    gpu = a.trace.gpu
    is_compared = (
        a.in_window & (gpu["kind"] == "kernel").to_numpy() & gpu["op"].is_not_null().to_numpy()
    )
    work = gpu.filter(pl.Series(is_compared & ~a.kernels["communication"].to_numpy()))
    total = float(work["dur"].sum())
    key_columns = ("name", "blocks", "threads", "inputs", "stream")
    percentiles = (
        pl.col("dur").quantile(quantile).alias(name)
        for quantile, name in ((0.1, "least"), (0.9, "most"))
    )
    table = (
        work.with_columns(inputs=a.trace.cpu["inputs"].gather(work["op"]))
        .filter(pl.col("inputs").is_not_null())
        .group_by(key_columns)
        .agg(pl.len().alias("count"), pl.col("dur").sum(), *percentiles)
        .filter(pl.col("count") >= _MIN_LAUNCHES, pl.col("most") >= MIN_VARIATION * pl.col("least"))
        .sort("dur", *key_columns)
    )
    if table.is_empty() or not total:
        return VaryingKernels(0.0, 1.0)
    longest = table.row(-1, named=True)
    ratio = longest["most"] / max(1.0, longest["least"])
    return VaryingKernels(float(table["dur"].sum()) / total, float(ratio))
