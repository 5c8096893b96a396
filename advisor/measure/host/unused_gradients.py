"""Work of the backward pass on gradients that no optimizer uses."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import polars as pl

from advisor.core.intervals import EMPTY, Intervals, covered_length, intersect, union
from advisor.core.run_directory import MAX_VALUE
from advisor.measure.device.shapes import Shape, read_inputs
from advisor.measure.host.device_reads import backward_nodes
from advisor.measure.host.names import OPTIMIZER_STEP, name_matches
from advisor.measure.host.stacks import ENGINE_NODE
from advisor.measure.steps.steps import step_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from advisor.measure import Analysis


ACCUMULATE = "torch::autograd::AccumulateGrad"
_BACKWARD_RANGE = r"^advisor::backward$"
_GRADIENT_OPS = r"^aten::(?:mm|bmm|addmm|sum|embedding_dense_backward|convolution_backward)$"
_PRODUCT_OPS = ("aten::mm", "aten::bmm", "aten::addmm")
_LOOKUP_OP = "aten::embedding_dense_backward"
_CONVOLUTION_OP = "aten::convolution_backward"
MAX_PARAMETERS_PER_NODE = 3
"""Maximum parameters whose gradients one node computes, such as a product's weight and bias."""
_MAX_PARAMETERS = 4096
_MAX_PASSES = 4
_MAX_EVENTS = 500_000
"""Maximum number of events of the backward pass that are read."""


class RecordedGradients(NamedTuple):
    """Parameters that get gradients, as the recorder found them, either of all models or between
    two optimizer steps."""

    unused: int
    """Number of parameters whose gradient is unused."""
    total: int
    """Number of all parameters."""
    bytes: int
    """Size of the unused gradients, bytes."""
    modules: tuple[str, ...]
    """Modules with the most unused gradients."""
    models: tuple[str, ...]
    """Classes of the models that have the parameters, if nothing in them is trained; else empty."""
    parameters: tuple[tuple[Shape, bool], ...]
    """Shape of each parameter, in the order of the model, and whether it is unused."""

    @property
    def flags(self) -> dict[Shape, list[bool]]:
        """Whether each parameter of a shape is unused, in the order of the model."""
        result: dict[Shape, list[bool]] = {}
        for shape, unused in self.parameters:
            result.setdefault(shape, []).append(unused)
        return result


class UnusedGradientWork(NamedTuple):
    """Work in the analysed steps that is saved if unused gradients are not computed."""

    spans: Intervals
    """Host time of operators and nodes that are saved completely."""
    convolutions: float
    """Share of the other convolutions' backward time that also computes an unused gradient."""
    rest: Intervals = EMPTY
    """Part of ``spans`` after the last used gradient of its backward pass."""


NO_WORK = UnusedGradientWork(EMPTY, 0.0)


def recorded_gradients(a: Analysis) -> RecordedGradients | None:
    """Read the parameters that no optimizer has; ``None`` if there are none or data is damaged."""
    events = [] if a.rank_record is None else a.rank_record.events_of("gradients")
    return _read_gradients(events[-1]) if events else None


def dropped_gradients(a: Analysis) -> list[RecordedGradients]:
    """Read the passes between two optimizer steps that compute gradients of another optimizer's
    parameters, which are dropped before that optimizer steps. Empty if there are none."""
    events = [] if a.rank_record is None else a.rank_record.events_of("dropped_gradients")
    passes = events[-1].get("passes") if events else None
    gradients = (
        [_read_gradients(item) for item in passes[:_MAX_PASSES]] if isinstance(passes, list) else []
    )
    return [item for item in gradients if item is not None]


def _read_gradients(data: Any) -> RecordedGradients | None:
    """Read what the recorder wrote about some parameters, or ``None`` if it is damaged."""
    data = data if isinstance(data, dict) else {}
    counts = [int(data[name]) for name in ("unused", "total", "bytes") if _is_count(data.get(name))]
    names, shapes, order = (data.get(name) for name in ("modules", "shapes", "order"))
    models = data.get("models")
    if not isinstance(names, list) or not isinstance(shapes, list) or not isinstance(order, list):
        return None
    if len(counts) != 3:
        return None
    sizes = [_parse_shape(shape) for shape in shapes[:_MAX_PARAMETERS]]
    parameters = tuple(
        (sizes[abs(number) - 1], number < 0)
        for number in order[:_MAX_PARAMETERS]
        if type(number) is int and 0 < abs(number) <= len(sizes)
    )
    modules, classes = (
        tuple(name for name in values if isinstance(name, str))
        for values in (names, models if isinstance(models, list) else [])
    )
    return RecordedGradients(counts[0], counts[1], counts[2], modules, classes, parameters)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 < value < MAX_VALUE


def _parse_shape(shape: Any) -> Shape:
    valid = isinstance(shape, list) and all(type(size) is int and size >= 0 for size in shape)
    return tuple(shape) if valid else ()


def unused_gradient_work(a: Analysis) -> UnusedGradientWork:
    """Find operators that compute gradients of unused parameters.

    The shape shows whether a product or an accumulation belongs to an unused parameter. If some
    parameters of one shape are used and others are not, the backward pass computes them in reverse
    order of the model. After the last used gradient, all of the backward pass is saved. A
    convolution computes gradients of its weight and of its input in one operator, so a part of it
    stays. Passes between two optimizer steps are identified by the shapes of all parameters whose
    gradients they compute."""
    recorded, dropped, cpu = a.recorded_gradients, a.dropped_gradients, a.trace.cpu
    if (recorded is None and not dropped) or a.trace.inputs.is_empty():
        return NO_WORK
    nodes = backward_nodes(a)
    is_gradient_op = (cpu["name"] == ACCUMULATE) | name_matches(cpu["name"], _GRADIENT_OPS)
    rows = np.flatnonzero(is_gradient_op.to_numpy() & (nodes >= 0))
    table = _list_operators(a, rows, nodes[rows])
    if table.is_empty() or table.height > _MAX_EVENTS:
        return NO_WORK
    flags = {} if recorded is None else dict.fromkeys(table["part"].unique(), recorded.flags)
    if recorded is None:
        steps = cpu["ts"].filter(name_matches(cpu["name"], OPTIMIZER_STEP)).sort().to_numpy()
        pass_index = np.searchsorted(steps, table["ts"].to_numpy())
        table = table.with_columns(part=pl.Series(pass_index, dtype=pl.Int64))
        flags = _match_passes(table, [call.flags for call in dropped])
    accumulated = _match_parameters(table, ACCUMULATE, 0, flags)
    spans = [(ts, end) for ts, end, _, unused in accumulated if unused]
    used_ends = np.array([end for _, end, _, unused in accumulated if not unused], dtype=np.int64)
    pass_ends = _find_pass_ends(a, used_ends, np.array([ts for ts, _ in spans], dtype=np.int64))
    spans += pass_ends
    spans += _find_products(table, accumulated)
    saved = _union_spans(spans)
    convolutions = _match_parameters(table, _CONVOLUTION_OP, 2, flags)
    ts, end = (np.array([call[n] for call in convolutions], dtype=np.int64) for n in (0, 1))
    remaining = np.where(covered_length(ts, end, saved) > 0, 0, end - ts)
    share = remaining[[bool(call[3]) for call in convolutions]].sum() / max(remaining.sum(), 1)
    inside = a.steps.host_spans
    return UnusedGradientWork(
        intersect(saved, inside), share, intersect(_union_spans(pass_ends), inside)
    )


def _match_passes(
    table: pl.DataFrame, passes: list[dict[Shape, list[bool]]]
) -> dict[int, dict[Shape, list[bool]]]:
    """Return the recorded pass of each part of the trace, by the shapes that it accumulates. A part
    that fits two passes has none."""
    accumulations = table.filter(pl.col("name") == ACCUMULATE)
    result: dict[int, dict[Shape, list[bool]]] = {}
    for part, operands in accumulations.group_by("part").agg("dims").iter_rows():
        counts = Counter(_operand_shape(dims, 0) for dims in operands)
        matching = [
            flags_by_shape
            for flags_by_shape in passes
            if flags_by_shape.keys() == counts.keys()
            and all(counts[shape] % len(flags) == 0 for shape, flags in flags_by_shape.items())
        ]
        if len(matching) == 1:
            result[part] = matching[0]
    return result


def _list_operators(a: Analysis, rows: Any, node: Any) -> pl.DataFrame:
    """List the given operators in order of time: ``name, ts, end, node, part, dims``; ``part`` is
    the step."""
    cpu = a.trace.cpu
    table = pl.DataFrame(
        {
            "name": cpu["name"].gather(rows).cast(pl.String),
            "ts": cpu["ts"].gather(rows),
            "end": (cpu["ts"] + cpu["dur"]).gather(rows),
            "node": node,
            "part": step_of(a.steps, cpu["ts"].to_numpy()[rows]),
            "inputs": cpu["inputs"].gather(rows),
        }
    ).filter(pl.col("part").is_not_null() & pl.col("inputs").is_not_null())
    shapes = {
        row: [list(tensor.shape) for tensor in read_inputs(a.trace.inputs, row).tensors]
        for row in table["inputs"].unique().to_list()
    }
    dims = pl.Series([shapes[row] for row in table["inputs"]], dtype=pl.List(pl.List(pl.Int64)))
    return table.with_columns(dims=dims).sort("ts")


def _operand_shape(dims: Any, index: int) -> Shape:
    return tuple(dims[index] or ()) if dims is not None and index < len(dims) else ()


def _match_parameters(
    table: pl.DataFrame, name: str, operand: int, flags: dict[int, dict[Shape, list[bool]]]
) -> list[tuple[int, int, Shape, bool | None]]:
    """List operators of this name in order of time: begin, end, shape of an operand, and whether it
    is an unused parameter of that part, or ``None`` if unknown."""
    calls = table.filter(pl.col("name") == name).select("part", "dims", "ts", "end")
    rows = [(part, _operand_shape(dims, operand), *span) for part, dims, *span in calls.iter_rows()]
    counts = Counter(row[:2] for row in rows)
    calls_done: Counter[tuple[int, Shape]] = Counter()
    result: list[tuple[int, int, Shape, bool | None]] = []
    for part, shape, ts, end in rows:
        shape_flags = flags.get(part, {}).get(shape, [])
        unused: bool | None = None
        if len(set(shape_flags)) == 1:
            unused = shape_flags[0]
        elif (
            shape_flags and counts[part, shape] % len(shape_flags) == 0
        ):  # each parameter once per pass
            unused = shape_flags[::-1][calls_done[part, shape] % len(shape_flags)]
        calls_done[part, shape] += 1
        result.append((ts, end, shape, unused))
    return result


def _find_products(
    table: pl.DataFrame, accumulated: list[tuple[int, int, Shape, bool | None]]
) -> list[tuple[int, int]]:
    """Return operators whose result is an unused gradient, by the accumulations that follow: the
    engine accumulates a gradient directly after the nodes that computed it."""
    starts = np.array([ts for ts, *_ in accumulated], dtype=np.int64)
    result: list[tuple[int, int]] = []
    operators = table.filter(~pl.col("name").is_in([ACCUMULATE, _CONVOLUTION_OP]))
    for _, group in operators.group_by("node", maintain_order=True):
        rows = list(group.select("name", "ts", "end", "dims").iter_rows())
        first_accumulation = int(np.searchsorted(starts, rows[-1][2]))
        following = accumulated[first_accumulation : first_accumulation + MAX_PARAMETERS_PER_NODE]
        unused = {tuple(sorted(shape)) for _, _, shape, is_unused in following if is_unused}
        weights = [
            (end - ts, ts, end)
            for name, ts, end, dims in rows
            if name in _PRODUCT_OPS and tuple(sorted(_result_shape(name, dims))) in unused
        ]
        if weights:  # of two with the same shape, one propagates the gradient
            result.append(min(weights)[1:])
            result += [(ts, end) for name, ts, end, _ in rows if name == "aten::sum"]
        elif rows[0][0] == _LOOKUP_OP and following and following[0][3]:
            result.append(rows[0][1:3])
    return result


def _result_shape(name: str, dims: Any) -> Shape:
    first_operand = 1 if name == "aten::addmm" else 0
    left, right = _operand_shape(dims, first_operand), _operand_shape(dims, first_operand + 1)
    return (*left[:-1], right[-1]) if len(left) >= 2 and len(right) >= 2 else ()


def _find_pass_ends(a: Analysis, used: Any, unused: Any) -> list[tuple[int, int]]:
    """Return the end of each backward pass after its last used gradient, if unused ones follow."""
    cpu = a.trace.cpu
    nodes = np.flatnonzero(name_matches(cpu["name"], ENGINE_NODE).to_numpy())
    ends = (cpu["ts"] + cpu["dur"]).to_numpy()
    node_starts, node_ends = cpu["ts"].to_numpy()[nodes], ends[nodes]
    result: list[tuple[int, int]] = []
    for row in np.flatnonzero(name_matches(cpu["name"], _BACKWARD_RANGE).to_numpy()):
        start, end = int(cpu["ts"][int(row)]), int(ends[row])
        used_in_pass = used[(used > start) & (used <= end)]
        if not len(used_in_pass) or not ((unused > used_in_pass.max()) & (unused < end)).any():
            continue
        is_after = (node_starts >= used_in_pass.max()) & (node_starts < end)
        result.append((int(used_in_pass.max()), int(node_ends[is_after].max())))
    return result


def _union_spans(spans: Iterable[tuple[int, int]]) -> Intervals:
    bounds = np.array(list(spans), dtype=np.int64).reshape(-1, 2)
    return union(bounds[:, 0], bounds[:, 1])
